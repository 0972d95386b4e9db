"""What Prometheus reads of a broker: counts of what happened, and what the ledger holds now.

Labels are bounded: channels (the first `MAX_CHANNELS` by name, all others are `other`), ranks below
`MAX_RANKS`, and words of the protocol. Nothing that an agent makes up without bound becomes a label.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..protocol.records import Outcome, RoundResult
from .ledger.state import Lease, LeaseState, RoundState, State
from .queries import Counters

MAX_CHANNELS: Final = 32
MAX_RANKS: Final = 64
OTHER: Final = "other"
_REMEMBERED: Final = 1024
Label = Callable[[str], str]
_ROUND_BUCKETS: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)


class Meter:
    """Counts what passes by; everything else is looked up when it is asked for.

    Its registry is its own: nothing of the process, or of other libraries in it, is told.

    Args:
        state: The ledger's; it is only read, in the thread of the broker's loop.
        counters: The shell's.
        clock: Monotonic seconds.
    """

    def __init__(
        self, state: State, counters: Counters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._channels: set[str] = set()
        # When each rank has opened the round that it waits for; monotonic seconds.
        self._opened: dict[tuple[str, int], float] = {}
        self._clock = clock
        labels = ["channel"]
        self._rounds = self._counter("rounds", "Rounds that have ended.", [*labels, "outcome"])
        self._bytes = self._counter("published_bytes", "Bytes of all batches of those.", labels)
        self._receivers = self._counter(
            "receivers", "What became of receivers in those.", [*labels, "fate"]
        )
        self._blocked = self._counter(
            "trainer_blocked_seconds",
            "From a rank's open to the end of its round.",
            [*labels, "rank"],
        )
        self._seconds = Histogram(
            "tensorlease_round_seconds",
            "Parts of rounds: opening (to the admission), staging, committing.",
            [*labels, "part"],
            buckets=_ROUND_BUCKETS,
            registry=self.registry,
        )
        self._hooks = Histogram(
            "tensorlease_receiver_seconds",
            "What workers measured: prepare hooks, copies, commit hooks.",
            [*labels, "part"],
            buckets=_ROUND_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_Now(state, counters, self.channel))

    def _counter(self, name: str, text: str, labels: Iterable[str]) -> Counter:
        return Counter(f"tensorlease_{name}", text, labels, registry=self.registry)

    def channel(self, name: str) -> str:
        """Returns the label of a channel."""
        if name not in self._channels and len(self._channels) >= MAX_CHANNELS:
            return OTHER
        self._channels.add(name)
        return name

    def opened(self, instance: str, call: int, now: float) -> None:
        """A rank opens a round; `now`: monotonic seconds."""
        if len(self._opened) < _REMEMBERED:
            self._opened.setdefault((instance, call), now)

    def ended(self, name: str, result: RoundResult, ranks: Sequence[tuple[int, str]]) -> None:
        """A round of the channel `name` has ended; `ranks`: number and instance of each."""
        channel = self.channel(name)
        now = self._clock()
        for number, instance in ranks:
            since = self._opened.pop((instance, result.call), None)
            if since is not None:
                rank = str(number) if number < MAX_RANKS else OTHER
                self._blocked.labels(channel, rank).inc(max(0.0, now - since))
        self._rounds.labels(channel, result.outcome.value).inc()
        self._bytes.labels(channel).inc(result.nbytes)
        for receiver in result.receivers:
            self._receivers.labels(channel, receiver.fate.value).inc()
        if result.outcome in (Outcome.COMMITTED, Outcome.MIXED):
            _observe(
                self._seconds,
                channel,
                opening=result.opening_us,
                staging=result.staging_us,
                committing=result.committing_us,
            )
            for receiver in result.receivers:
                _observe(
                    self._hooks,
                    channel,
                    prepare=receiver.prepare_us,
                    copy=receiver.copy_us,
                    commit=receiver.commit_us,
                )

    def gone(self, instance: str) -> None:
        """An agent is forgotten: what it has opened ends for nobody."""
        for key in [key for key in self._opened if key[0] == instance]:
            del self._opened[key]

    def text(self) -> bytes:
        """Returns all of it in Prometheus' text format."""
        return generate_latest(self.registry)


class _Now(Collector):
    """What the ledger holds at the moment of asking."""

    def __init__(self, state: State, counters: Counters, label: Label) -> None:
        self._state = state
        self._counters = counters
        self._label = label

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        counters = self._counters
        for name, text in (
            ("messages_received", "Messages of agents."),
            ("messages_sent", "Messages to agents."),
            ("bad_messages", "Bytes that were no message."),
            ("refusals", "Sessions that were refused."),
            ("lost_sessions", "Sessions that were dropped, as their agent did not read."),
        ):
            yield _total(name, text, getattr(counters, name))
        yield _gauge("unsent_messages", "Waiting for agents to read.", counters.unsent_messages)
        yield _gauge("unsent_bytes", "Waiting for agents to read.", counters.unsent_bytes)
        state = self._state
        recovering = state.recovering_until is not None
        yield _gauge("recovering", "1: listens for agents after a restart.", int(recovering))
        yield from self._agents(state)
        yield from self._rounds(state)

    def _agents(self, state: State) -> Iterator[Metric]:
        agents = GaugeMetricFamily("tensorlease_agents", "Agents.", labels=["kind", "state"])
        counts: dict[tuple[str, str], int] = {}
        for peer in state.peers.values():
            key = ("worker" if peer.worker is not None else "trainer", peer.state.value)
            counts[key] = counts.get(key, 0) + 1
        for labels, count in sorted(counts.items()):
            agents.add_metric(labels, count)
        yield agents
        mapped = sum(len(buffers) for buffers in state.mappings.values())
        yield _gauge("mapped_buffers", "Buffers that some worker has mapped.", mapped)

    def _rounds(self, state: State) -> Iterator[Metric]:
        under_way: dict[tuple[str, str], int] = {}
        leases: dict[tuple[str, str], list[int]] = {}
        versions: dict[str, int] = {}
        for channel in state.channels.values():
            label = self._label(channel.name)
            versions[label] = max(versions.get(label, 0), channel.last_version)
            for rnd in channel.rounds.values():
                if rnd.state is not RoundState.FINISHED:
                    key = (label, rnd.state.value)
                    under_way[key] = under_way.get(key, 0) + 1
                for lease in rnd.leases.values():
                    _add(leases, label, lease)
        last = GaugeMetricFamily(
            "tensorlease_version", "The last version that was decided.", labels=["channel"]
        )
        for name, version in sorted(versions.items()):
            last.add_metric([name], version)
        yield last
        rounds = GaugeMetricFamily(
            "tensorlease_rounds_under_way", "Rounds.", labels=["channel", "state"]
        )
        for labels, count in sorted(under_way.items()):
            rounds.add_metric(labels, count)
        yield rounds
        for index, (name, text) in enumerate(
            (("leases", "Batches that are not released."), ("leased_bytes", "Bytes of those."))
        ):
            family = GaugeMetricFamily(f"tensorlease_{name}", text, labels=["channel", "state"])
            for labels, sums in sorted(leases.items()):
                family.add_metric(labels, sums[index])
            yield family


def _observe(histogram: Histogram, channel: str, **parts: int) -> None:
    """Notes parts of a round, in microseconds."""
    for part, micros in parts.items():
        histogram.labels(channel, part).observe(micros / 1e6)


def _add(leases: dict[tuple[str, str], list[int]], channel: str, lease: Lease) -> None:
    if lease.state is not LeaseState.RELEASED:
        sums = leases.setdefault((channel, lease.state.value), [0, 0])
        sums[0] += 1
        sums[1] += lease.nbytes


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tensorlease_{name}", text, value=value)


def _total(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"tensorlease_{name}", text, value=value)
