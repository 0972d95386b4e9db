"""A worker is killed after each message of a round: its process's end says so, no deadline does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from msgspec import Struct

from tensorlease.agents.results import RoundResult
from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import eventually
from .parties import TrainerParty, WorkerParty, World

pytestmark = pytest.mark.process

SIZE = 2
SOON_S = 1.0
"""The proof that the pidfd ends a round: its deadlines are 30 to 60 s away."""


class Place(Struct, frozen=True):
    """Where the worker dies, and what becomes of the round."""

    name: str
    fate: Fate
    """Its replica's."""
    outcome: Outcome
    late: bool = False
    """The batch leaves when all workers wait for it."""

    @property
    def sent(self) -> str:
        """What the broker must have from every worker before one of them is killed."""
        what, name, _ = self.name.split(":")
        return f"received:{name}" if what == "sent" else ""


LOST, TORN, COMMITTED = Fate.LOST, Fate.TORN, Fate.COMMITTED
PLACES = [
    Place("received:Prepare:1", LOST, Outcome.MIXED),
    Place("in:prepare:1", LOST, Outcome.MIXED),
    Place("sent:Ready:1", LOST, Outcome.MIXED, late=True),
    Place("received:Deliver:1", LOST, Outcome.MIXED),
    Place("in:copy:1", LOST, Outcome.MIXED),
    Place("sending:Staged:1", LOST, Outcome.MIXED),
    # Its vote was the last that was missing: the decision has fallen, the others commit.
    Place("sent:Staged:1", TORN, Outcome.MIXED),
    Place("received:Commit:1", TORN, Outcome.MIXED),
    Place("in:commit:1", TORN, Outcome.MIXED),
    Place("sending:Committed:1", TORN, Outcome.MIXED),
    Place("sent:Committed:1", COMMITTED, Outcome.COMMITTED),
]


class Killing:
    """A trainer and two replicas of two; one worker dies in each round and is replaced."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.version = 0
        self.broker = world.broker()
        self.trainer: TrainerParty = world.start_trainer()
        starting = [
            world.start_worker(replica, member, size=SIZE)
            for replica in "ab"
            for member in range(SIZE)
        ]
        self.trainer.expect("registered")
        for worker in starting:
            worker.expect("attached")
        self.victim: WorkerParty = starting[0]
        self.mate: WorkerParty = starting[1]
        self.others: list[WorkerParty] = starting[2:]
        self.trainer.ready(2)

    def killed_at(self, place: Place) -> tuple[RoundResult, float]:
        """A round in which the victim dies there, and all that has to follow.

        Returns the result, and the seconds from the death to the end of the round.
        """
        victim = self.victim
        result, took = self._round_with_a_death(place)
        assert took < SOON_S, f"{place.name}: {took:.2f} s"
        assert result.outcome is place.outcome, f"{place.name}: {result}"
        assert result.replicas["a"].fate is place.fate, f"{place.name}: {result}"
        assert result.replicas["b"].fate is COMMITTED
        if place.fate is not COMMITTED:
            self._check_that_it_is_named(victim, result)
        self.trainer.released()
        self._check_who_has_it(place)
        self._next_round_without_it()
        self._and_with_a_new_one()
        return result, took

    def _round_with_a_death(self, place: Place) -> tuple[RoundResult, float]:
        self.version += 1
        if place.late:
            self.trainer.hold("sending:Batch:1")
        self.victim.hold(place.name)
        before = self.broker.counts()[place.sent]
        self.trainer.publish(self.version)
        self.victim.arrived(place.name)
        if place.sent:
            self.broker.until(place.sent, before + 2 * SIZE)
        began = time.monotonic()
        self.victim.kill()
        if place.late:
            self.trainer.go()
        result = self.trainer.result()
        return result, time.monotonic() - began

    def _check_that_it_is_named(self, victim: WorkerParty, result: RoundResult) -> None:
        receiver = result.receivers["a/0"]
        assert (receiver.pid, receiver.fate) == (victim.pid, LOST), result
        assert receiver.reason == f"worker a/0 (pid {victim.pid}) is gone: its process ended"
        assert "a" in result.reason and "its process ended" in result.reason
        assert result.replicas["a"].current != self.version

    def _check_who_has_it(self, place: Place) -> None:
        """The victim's replica has the version only where all of it had committed."""
        for worker in self.others:
            report = worker.report()
            assert (report.version, report.torn, report.wrong) == (self.version, False, [])
        if place.fate is COMMITTED:
            assert self.mate.report().version == self.version
        else:
            eventually(self._mate_is_out)

    def _mate_is_out(self) -> bool:
        """As before, if it had not begun to copy; else torn. Its hooks come in pairs."""
        report = self.mate.report()
        assert report.wrong == []
        version = 0 if report.torn else self.version - 1
        ended = report.count("commit", self.version) + report.count("abort", self.version)
        return report.version == version and ended == report.count("prepare", self.version)

    def _next_round_without_it(self) -> None:
        # A round may have ended before the death was noticed.
        eventually(lambda: self.victim.pid not in self._pids())
        self.version += 1
        self.trainer.publish(self.version)
        result = self.trainer.result()
        assert result.outcome is Outcome.COMMITTED
        assert set(result.receivers) == {"b/0", "b/1"}
        self.trainer.released()

    def _pids(self) -> set[int]:
        replicas = self.world.channel().replicas
        return {member.pid for replica in replicas for member in replica.members}

    def _and_with_a_new_one(self) -> None:
        self.victim = self.world.worker("a", 0, size=SIZE)
        self.trainer.ready(2)
        self.version += 1
        self.trainer.publish(self.version, min_replicas=2)
        result = self.trainer.result()
        assert result.outcome is Outcome.COMMITTED, result
        assert result.receivers["a/0"].pid == self.victim.pid
        self.trainer.released()
        for worker in (self.victim, self.mate, *self.others):
            report = worker.report()
            assert (report.version, report.torn, report.wrong) == (self.version, False, [])
        self.world.no_lease_left()

    def descriptors(self) -> tuple[int, int]:
        """How many files the broker and the trainer have open."""
        parties = (self.broker, self.trainer)
        broker, trainer = (len(os.listdir(f"/proc/{party.pid}/fd")) for party in parties)
        return broker, trainer


def kill_at(
    world: World, places: list[Place], row: Callable[[Place, RoundResult, float], None]
) -> None:
    """Kills a worker at each place; `row` gets what became of each round."""
    killing = Killing(world)
    row(places[0], *killing.killed_at(places[0]))
    before = killing.descriptors()
    for place in places[1:]:
        row(place, *killing.killed_at(place))
    eventually(
        lambda: all(now <= then for now, then in zip(killing.descriptors(), before, strict=True))
    )
    assert len(world.status().mappings) == 1


JOINING = ["sent:WorkerHello:1", "received:Welcome:1", "received:Offered:1", "sent:Take:1"]


def test_a_worker_that_is_killed_while_it_joins_keeps_nobody_waiting(world: World) -> None:
    world.broker()
    trainer = world.trainer()
    other = world.worker("b")
    for version, place in enumerate(JOINING, start=1):
        victim = world.start_worker("a", places=(place,))
        victim.arrived(place)
        victim.kill()
        trainer.publish(version)
        result = trainer.result()
        assert result.outcome is Outcome.COMMITTED or set(result.receivers) == {"a/0", "b/0"}
        assert result.replicas["b"].fate is COMMITTED
        assert result.seconds < SOON_S
        trainer.released()

    assert other.report().committed == [1, 2, 3, 4]
    world.no_lease_left()


def test_a_killed_worker_is_out_at_once_and_named_and_a_new_one_gets_the_next_round(
    world: World,
) -> None:
    times = {}

    def note(place: Place, _: RoundResult, seconds: float) -> None:
        times[place.name] = seconds

    kill_at(world, PLACES, note)

    assert len(times) == len(PLACES)
    assert max(times.values()) < SOON_S
