"""The command `tensorlease bench broker`."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import click
from msgspec import Struct, field

from tensorlease.protocol.records import Outcome

from .party import Party
from .report import Goal, Report, finish, new_report, options
from .service import Service, broker_words, relay_words, serving

WORKERS = (1, 16, 64)
BODY_BYTES = 40_000
LIMIT = 2.0
"""Times what the relay takes, of both the clock's time and the processor's."""
WARM_UP = 10
CROWD_ROUNDS = 10


class Turns(Struct):
    """What one of the two took: seconds of each round, and of each turn's CPU for a round."""

    rounds_s: list[float] = field(default_factory=list)
    medians_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def take(self, service: Service, party: Party, rounds: int) -> None:
        """One turn of so many rounds."""
        times = []
        cpu_s = service.cpu_s
        for _ in range(rounds):
            start = time.perf_counter()
            party.round()
            times.append(time.perf_counter() - start)
        self.cpu_s.append((service.cpu_s - cpu_s) / rounds)
        self.rounds_s += times
        self.medians_s.append(quantile(times, 0.5))


class Crowd(NamedTuple):
    """Many agents that joined at once: seconds, bytes and what was measured."""

    join_s: float
    rounds_s: list[float]
    before: int
    joined: int
    after: int


@click.command()
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    multiple=True,
    default=WORKERS,
    show_default=True,
    help="How many workers; repeat it for several rows.",
)
@click.option("--body", type=click.IntRange(min=1), default=BODY_BYTES, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=40, show_default=True)
@click.option("--turns", type=click.IntRange(min=1), default=11, show_default=True)
@click.option(
    "--agents",
    type=click.IntRange(min=0),
    default=500,
    show_default=True,
    help="Agents that join one broker at once; 0: none.",
)
@options
def broker(
    workers: Sequence[int],
    body: int,
    rounds: int,
    turns: int,
    agents: int,
    as_json: bool,
    check: bool,
) -> int:
    """Measure rounds through a broker, the commit included, against a relay without a ledger.

    Both run at once, in processes of their own, and take turns of --rounds rounds. The agents are
    bare sockets in this process: no memory is copied but the body, in bytes, that is handed over.
    """
    words = [f"--workers {count}" for count in workers]
    command = ["tensorlease bench broker", *words, f"--body {body} --rounds {rounds}"]
    report = new_report(" ".join([*command, f"--turns {turns} --agents {agents}"]))
    for count in workers:
        compare(report, count, bytes(body), rounds, turns)
    if agents:
        measure_crowd(report, agents, bytes(body))
    return finish(report, as_json=as_json, check=check)


def compare(report: Report, workers: int, body: bytes, rounds: int, turns: int) -> None:
    """Adds the rows of one number of workers: the relay's, the broker's, and their ratio."""
    took = {"relay": Turns(), "broker": Turns()}
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        urls = {name: f"ipc://{directory}/{name}.sock" for name in took}
        with (
            serving(urls["relay"], relay_words(urls["relay"])) as relay,
            serving(urls["broker"], broker_words(urls["broker"], workers + 1)) as ours,
            Party(relay.url, workers, body) as of_relay,
            Party(ours.url, workers, body) as of_ours,
        ):
            parties = {"relay": (relay, of_relay), "broker": (ours, of_ours)}
            for _, party in parties.values():
                party.join()
            for _ in range(WARM_UP):
                of_relay.round()
                of_ours.round()
            for turn in range(turns):
                # Who begins changes: what wakes up after a pause is slower.
                for name in sorted(parties, reverse=bool(turn % 2)):
                    took[name].take(*parties[name], rounds)
            assert of_ours.result().result.outcome is Outcome.COMMITTED
    add_rows(report, workers, took["relay"], took["broker"])


def add_rows(report: Report, workers: int, relay: Turns, ours: Turns) -> None:
    """Adds what both took, and the goals."""
    row = f"{workers} worker{'s' * (workers > 1)}"
    for name, turns in (("relay", relay), ("broker", ours)):
        place = f"{row}, {name}"
        report.add(place, "median ms", [seconds * 1e3 for seconds in turns.medians_s])
        report.add(place, "p99 ms", [quantile(turns.rounds_s, 0.99) * 1e3])
        report.add(place, "CPU ms a round", [seconds * 1e3 for seconds in turns.cpu_s])
    for column, mine, theirs in (
        ("median ms", ours.medians_s, relay.medians_s),
        ("CPU ms a round", ours.cpu_s, relay.cpu_s),
    ):
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        value = report.add(f"{row}, ratio", column, ratios)
        name = f"{column.partition(' ms')[0]} of the broker's to the relay's"
        report.goals.append(Goal(row, name, value, LIMIT))


def measure_crowd(report: Report, agents: int, body: bytes) -> None:
    """Adds the row of many agents that join at once."""
    crowd = gather(agents, body)
    row = f"{agents} agents and a trainer"
    report.add(row, "joined after ms", [crowd.join_s * 1e3])
    report.add(row, "round ms", [seconds * 1e3 for seconds in crowd.rounds_s])
    mib = 2**20
    report.add(row, "broker's MiB before", [crowd.before / mib])
    report.add(row, "joined", [crowd.joined / mib])
    report.add(row, f"after {len(crowd.rounds_s)} rounds", [crowd.after / mib])
    report.add(row, "KiB a peer", [(crowd.after - crowd.before) / (agents + 1) / 1024])


def gather(agents: int, body: bytes) -> Crowd:
    """Joins so many agents and a trainer, and hands some rounds to all of them.

    Raises:
        RefusedError: One of them was not welcome, or a round did not commit.
        DeadlineError: One got no answer in time.
    """
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        url = f"ipc://{directory}/broker.sock"
        with (
            serving(url, broker_words(url, agents + 1)) as service,
            Party(url, agents, body) as party,
        ):
            before = service.resident
            start = time.perf_counter()
            party.join()
            join_s = time.perf_counter() - start
            joined = service.resident
            times = []
            for _ in range(CROWD_ROUNDS):
                start = time.perf_counter()
                party.round()
                times.append(time.perf_counter() - start)
            result = party.result().result
            assert result.outcome is Outcome.COMMITTED and len(result.receivers) == agents
            return Crowd(join_s, times, before, joined, service.resident)


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
