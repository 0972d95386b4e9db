"""A worker is stopped, not killed: the round ends by its deadline, the lease waits for the worker."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from msgspec import Struct

from tensorlease.agents.results import RoundResult
from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import eventually
from .parties import TrainerParty, WorkerParty, World

pytestmark = pytest.mark.process

DURATIONS = {"beat": 0.2, "silent": 1.0, "drain": 0.2}
LIMITS = {"prepare_s": 1.5, "stage_s": 1.3, "commit_s": 0.6}
LATEST_S = 5.0


class Place(Struct, frozen=True):
    """Where the worker stops; empty: before the round, where nothing but its pipe tells it."""

    name: str
    holds: bool = True
    """It holds a lease there."""


PLACES = [
    Place(""),
    Place("in:prepare:1"),
    Place("in:copy:1"),
    Place("sending:Staged:1"),
    # It has voted: nothing of the batch is in its hands any more.
    Place("in:commit:1", holds=False),
]

IN_SUITE = [place for place in PLACES if place.name in ("", "in:copy:1", "in:commit:1")]


class Stopping:
    """A trainer and two replicas of one; the worker of one is stopped in each round."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.version = 0
        world.broker(DURATIONS)
        self.trainer: TrainerParty = world.start_trainer()
        self.victim: WorkerParty = world.start_worker("a")
        self.other: WorkerParty = world.start_worker("b")
        self.trainer.expect("registered")
        for worker in (self.victim, self.other):
            worker.instance = worker.expect("attached")
        self.trainer.ready(2)

    def stopped_at(self, place: Place) -> tuple[RoundResult, float]:
        """A round in which the victim stops; returns its result and how long it took."""
        self.version += 1
        if place.name:
            self.victim.hold(place.name)
        else:
            self.victim.process.stop()
        began = time.monotonic()
        self.trainer.open(self.version, min_replicas=1, **LIMITS)
        if place.name:
            self.victim.arrived(place.name)
            self.victim.process.stop()
        result = self.trainer.finished()
        took = time.monotonic() - began
        assert took < LATEST_S, f"{place.name}: {took:.2f} s"
        assert result.outcome is Outcome.MIXED, f"{place.name}: {result}"
        assert result.replicas["b"].fate is Fate.COMMITTED
        assert result.receivers["a/0"].pid == self.victim.pid
        assert self.other.report().version == self.version
        if place.holds:
            self._check_stuck(result)
        else:
            self.trainer.released()
            assert result.receivers["a/0"].fate is Fate.UNKNOWN
            assert result.receivers["a/0"].reason == "did not answer Commit in time"
        return result, took

    def _check_stuck(self, result: RoundResult) -> None:
        """The holder is named, with its pid, to the trainer and to who asks the broker."""
        eventually(lambda: self.trainer.stuck() != [])
        holder = self.trainer.stuck()[0]
        assert (holder.replica, holder.member, holder.pid) == ("a", 0, self.victim.pid)
        assert holder.instance == self.victim.instance
        assert result.receivers["a/0"].fate is Fate.STUCK, result
        assert "(silent)" in result.receivers["a/0"].reason
        held = self.world.channel().rounds[0]
        assert (held.stuck, held.leases[0].state) == (1, "stuck")
        assert held.leases[0].holders == [f"a/0 (pid {self.victim.pid})"]
        # Nothing but the holder's own word, or its end, gives the batch back.
        self.trainer.command("wait", "released", 0.2)
        late = self.trainer.expect("late")
        assert f"a/0 (pid {self.victim.pid}) keeps its lease: " in late
        assert "(silent)" in late

    def goes_on(self, place: Place) -> None:
        """The victim goes on: it drains, and is served by the next round."""
        self.victim.process.go_on()
        if place.name:
            self.victim.go()
        self.trainer.released()
        assert self.trainer.stuck() == []
        eventually(self._victim_is_out)
        self.trainer.ready(2)
        self._round_of_both()

    def _victim_is_out(self) -> bool:
        """Each round that it was prepared for has ended for it, and it does not claim this one.

        Who was stopped in its commit hook commits after all, late: by its own word it has it.
        """
        report = self.victim.report()
        version = self.version
        ended = report.count("abort", version) + report.count("commit", version)
        return ended == report.count("prepare", version) and report.wrong == []

    def _round_of_both(self) -> None:
        self.version += 1
        self.trainer.publish(self.version, min_replicas=2)
        result = self.trainer.result()
        assert result.outcome is Outcome.COMMITTED, result
        self.trainer.released()
        for worker in (self.victim, self.other):
            report = worker.report()
            assert (report.version, report.torn, report.wrong) == (self.version, False, [])
        self.world.no_lease_left()

    def dies(self) -> None:
        """The victim is killed while it is stopped; a new worker takes its place."""
        self.victim.kill()
        self.trainer.released()
        assert self.trainer.stuck() == []
        self.victim = self.world.worker("a")
        self.trainer.ready(2)
        self._round_of_both()


def stop_at(
    world: World, places: list[Place], row: Callable[[Place, RoundResult, float], None]
) -> None:
    """Stops a worker at each place; `row` gets what became of each round."""
    stopping = Stopping(world)
    for place in places:
        row(place, *stopping.stopped_at(place))
        stopping.goes_on(place)


def test_a_stopped_worker_keeps_its_lease_by_name_until_it_goes_on_and_drains(
    world: World,
) -> None:
    rows = []
    stop_at(world, IN_SUITE, lambda place, result, took: rows.append((place.name, result, took)))

    assert [name for name, _, _ in rows] == [place.name for place in IN_SUITE]


def test_a_stopped_worker_that_is_killed_gives_its_lease_back(world: World) -> None:
    stopping = Stopping(world)
    result, _ = stopping.stopped_at(Place("in:copy:1"))
    stopping.dies()

    assert result.receivers["a/0"].fate is Fate.STUCK


def test_a_new_worker_takes_the_place_of_one_that_is_stopped_and_the_old_lease_stays(
    world: World,
) -> None:
    stopping = Stopping(world)
    stopping.stopped_at(Place("in:copy:1"))
    old = stopping.victim
    stopping.victim = world.worker("a")
    held = world.channel().rounds[0].leases[0].holders
    old.kill()
    stopping.trainer.released()
    stopping.trainer.ready(2)
    stopping._round_of_both()

    assert [name.rpartition("(")[2] for name in held] == [f"pid {old.pid})"]


def test_a_stuck_worker_is_killed_by_its_pidfd_where_the_broker_is_told_to(world: World) -> None:
    world.broker(DURATIONS, kill_stuck=True)
    trainer, worker, other = world.trainer(), world.worker("a"), world.worker("b")
    trainer.ready(2)
    worker.hold("in:copy:1")
    trainer.open(1, **LIMITS)
    worker.arrived("in:copy:1")
    worker.process.stop()

    assert trainer.finished().replicas["b"].fate is Fate.COMMITTED
    trainer.released()
    assert worker.process.join() == -9
    assert other.report().version == 1
