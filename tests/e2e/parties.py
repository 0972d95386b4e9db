"""A test's side of the processes of end-to-end tests: it commands them, and hears what they say."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import zmq

from tensorlease.agents.results import RoundResult
from tensorlease.broker.queries import ChannelStatus, Status
from tensorlease.protocol.records import Holder

from ..broker.raw_agents import Raw, eventually
from ..procs import Spawn, Spawned, spawning
from . import children
from .children import BrokerSpec, Report, TrainerSpec, WorkerSpec

PATIENCE_S = 30.0
SIGKILLED = -9


class Party:
    """A process that says tuples; those that nobody waited for yet are kept."""

    def __init__(self, process: Spawned, name: str) -> None:
        self.process = process
        self.name = name
        self._kept: list[tuple[Any, ...]] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def command(self, *words: Any) -> None:
        self.process.say(words)

    def expect(self, about: str, timeout_s: float = PATIENCE_S) -> Any:
        """What it says about this: nothing, one thing, or a tuple. Fails where it says "late"."""
        deadline = time.monotonic() + timeout_s
        while True:
            for words in self._kept:
                if words[0] == about:
                    self._kept.remove(words)
                    return words[1] if len(words) == 2 else words[1:]
            words = self.process.hear(max(0.0, deadline - time.monotonic()))
            assert words[0] != "late" or about == "late", f"{self.name}: {words[1]}"
            self._kept.append(words)

    def ask(self, *words: Any, about: str = "") -> Any:
        self.command(*words)
        return self.expect(about or words[0])

    def hold(self, place: str) -> None:
        """Has it stop at a place; see `Seam`."""
        self.ask("hold", place, about="holding")

    def arrived(self, place: str) -> None:
        """Waits until it has stopped there."""
        assert self.expect("at") == place

    def fail(self, name: str, text: str) -> None:
        """Has what is done at `in:NAME` raise, once."""
        self.ask("fail", name, text, about="noted")

    def go(self) -> None:
        self.command("go")

    def kill(self) -> None:
        assert self.process.kill() == SIGKILLED


class BrokerParty(Party):
    def arm(self, place: str) -> None:
        """Has it kill itself at a place."""
        self.ask("arm", place, about="armed")

    def counts(self) -> Counter[str]:
        """How many messages it has sent and handled, by `sent:Name` and `received:Name`."""
        return Counter(self.ask("count", about="counts"))

    def until(self, what: str, count: int) -> None:
        """Waits until it has sent or handled so many of these messages."""
        eventually(lambda: self.counts()[what] >= count, PATIENCE_S)

    def died(self) -> None:
        """Waits until it has killed itself."""
        assert self.process.join(PATIENCE_S) == SIGKILLED


class TrainerParty(Party):
    instance: str

    def publish(self, version: int, **options: Any) -> None:
        self.command("publish", version, options)

    def open(self, version: int, **options: Any) -> None:
        self.command("open", version, options)
        self.expect("opened")

    def result(self) -> RoundResult:
        result = self.expect("result")
        assert isinstance(result, RoundResult)
        return result

    def finished(self, seconds: float = 20.0) -> RoundResult:
        result = self.ask("wait", "finished", seconds, about="finished")
        assert isinstance(result, RoundResult)
        return result

    def retry(self, version: int, **options: Any) -> None:
        self.command("retry", version, options)

    def close(self, seconds: float = 10.0) -> None:
        """Has it end, and waits for that."""
        self.ask("close", seconds, about="closed")
        assert self.process.join() == 0

    def released(self, seconds: float = 20.0) -> None:
        self.ask("wait", "released", seconds, about="released")

    def stuck(self) -> list[Holder]:
        return list(self.ask("stuck"))

    def ready(self, count: int) -> None:
        self.ask("ready", count)


class WorkerParty(Party):
    instance: str

    def report(self) -> Report:
        report = self.ask("report")
        assert isinstance(report, Report)
        return report

    def differing(self, version: int) -> list[str]:
        """Names of tensors that have other bytes now than this version."""
        return list(self.ask("compare", version, about="differing"))

    def close(self) -> None:
        """Has it end, and waits for that."""
        self.ask("close", about="closed")
        assert self.process.join() == 0


class World:
    """A broker's place, and the processes there."""

    def __init__(self, spawn: Spawn, url: str, shm_dir: str, context: zmq.Context[Any]) -> None:
        self.url = url
        self.shm_dir = shm_dir
        self._spawn = spawn
        self._context = context

    def spawn(self, function: Callable[..., Any], *args: Any) -> Spawned:
        """Starts a process of a test's own."""
        return self._spawn(function, *args)

    def broker(
        self,
        durations: dict[str, float] | None = None,
        place: str = "",
        *,
        kill_stuck: bool = False,
    ) -> BrokerParty:
        """Starts a broker; it listens when this returns, or may have died at its place."""
        spec = BrokerSpec(self.url, self.shm_dir, durations or {}, kill_stuck, place)
        party = BrokerParty(self._spawn(children.broker, spec), "broker")
        if not place:
            party.expect("ready")
        return party

    def start_trainer(self, rank: int = 0, **more: Any) -> TrainerParty:
        """Starts a trainer; it is not registered yet when this returns."""
        spec = TrainerSpec(self.url, self.shm_dir, rank, **more)
        return TrainerParty(self._spawn(children.trainer, spec), f"trainer {rank}")

    def start_worker(self, replica: str = "a", member: int = 0, **more: Any) -> WorkerParty:
        """Starts a worker; it is not attached yet when this returns."""
        spec = WorkerSpec(self.url, self.shm_dir, replica, member, **more)
        return WorkerParty(self._spawn(children.worker, spec), f"worker {replica}/{member}")

    def trainer(self, rank: int = 0, **more: Any) -> TrainerParty:
        party = self.start_trainer(rank, **more)
        party.instance = party.expect("registered")
        return party

    def worker(self, replica: str = "a", member: int = 0, **more: Any) -> WorkerParty:
        party = self.start_worker(replica, member, **more)
        party.instance = party.expect("attached")
        return party

    def status(self) -> Status:
        """What the broker holds now."""
        asker = Raw(self._context, self.url)
        try:
            return asker.status()
        finally:
            asker.close()
            Raw.made.remove(asker)

    def channel(self, name: str = "policy") -> ChannelStatus:
        return next(c for c in self.status().channels if c.name == name)

    def segments(self) -> list[str]:
        """Names of the shared memory that lies there."""
        return sorted(path.name for path in Path(self.shm_dir).iterdir())

    def segment_bytes(self) -> int:
        """Bytes of all of it."""
        return sum(path.stat().st_size for path in Path(self.shm_dir).iterdir())

    def no_lease_left(self) -> None:
        """Waits until no round is under way and no lease held."""
        eventually(lambda: not any(c.rounds for c in self.status().channels))


@contextmanager
def making_world() -> Iterator[World]:
    """A place for a broker and one for shared memory; the processes there are ended with it."""
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        TemporaryDirectory(prefix="tl-") as place,
        TemporaryDirectory(prefix="tl-e2e-", dir=shm) as segments,
        zmq.Context() as context,
        spawning() as spawn,
    ):
        yield World(spawn, f"ipc://{place}/b.sock", segments, context)


def all_of(parties: list[Any], do: Callable[[Any], Any]) -> list[Any]:
    """Does something with each, in order."""
    return [do(party) for party in parties]
