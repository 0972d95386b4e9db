"""A trainer rank is killed after each message of a round: workers hear it, nobody claims anything."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from msgspec import Struct

from tensorlease.agents.results import RoundResult
from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import eventually
from .parties import TrainerParty, WorkerParty, World
from .values import WHOLE, shard

pytestmark = pytest.mark.process

RANKS = 2
SOON_S = 1.0


class Place(Struct, frozen=True):
    """Where rank 1 dies, and what becomes of the round."""

    name: str
    outcome: Outcome
    busy: str = ""
    """Where a worker is held meanwhile, so that the round has not been decided yet."""


FAILED, COMMITTED = Outcome.FAILED, Outcome.COMMITTED
PLACES = [
    Place("sending:Open:1", FAILED),
    Place("sent:Open:1", FAILED),
    Place("sending:Batch:1", FAILED),
    Place("sent:Batch:1", FAILED, busy="in:prepare:1"),
    Place("sent:Batch:1", FAILED, busy="in:copy:1"),
    Place("received:Opened:1", FAILED, busy="in:copy:1"),
    Place("received:Opened:1", FAILED, busy="sending:Staged:1"),
    # Once the broker has told the first to commit, nothing fails the round any more.
    Place("received:Release:1", COMMITTED),
    Place("received:Release:1", COMMITTED, busy="in:commit:1"),
    Place("received:Finished:1", COMMITTED),
]


class Killing:
    """Two ranks that own different rows, two replicas that want all; rank 1 dies in each round."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.version = 0
        self.broker = world.broker()
        self.trainer: TrainerParty = self._start(0)
        self.victim: TrainerParty = self._start(1)
        self.workers: list[WorkerParty] = [
            world.start_worker("a", 0, size=2, parts=shard(0, RANKS)),
            world.start_worker("a", 1, size=2, parts=shard(1, RANKS)),
            world.start_worker("b", parts=WHOLE),
        ]
        for trainer in (self.trainer, self.victim):
            trainer.expect("registered")
        for worker in self.workers:
            worker.expect("attached")

    def _start(self, rank: int) -> TrainerParty:
        parts = shard(rank, RANKS)
        return self.world.start_trainer(
            rank, world_size=RANKS, distribution="assembled", parts=parts
        )

    def killed_at(self, place: Place) -> tuple[RoundResult, float]:
        """A round in which rank 1 dies there, and all that has to follow.

        Returns the result that rank 0 hears, and the seconds from the death to it, or to the
        moment at which the busy worker goes on.
        """
        self.trainer.ready(2)
        self._round_that_commits()
        result, took = self._round_with_a_death(place)
        assert took < SOON_S, f"{place}: {took:.2f} s"
        assert result.outcome is place.outcome, f"{place}: {result}"
        if place.outcome is FAILED:
            assert "its process ended" in result.reason and "rank 1" in result.reason
            assert Fate.COMMITTED not in {r.fate for r in result.receivers.values()}
        self.trainer.released()
        self._check_workers(place)
        self._check_segments()
        self.victim = self._start(1)
        self.victim.expect("registered")
        return result, took

    def _round_that_commits(self) -> None:
        self.version += 1
        for trainer in (self.trainer, self.victim):
            trainer.publish(self.version, min_replicas=2)
        for trainer in (self.trainer, self.victim):
            result = trainer.result()
            assert result.outcome is COMMITTED, result
            trainer.released()
        for worker in self.workers:
            report = worker.report()
            assert (report.version, report.torn, report.wrong) == (self.version, False, [])

    def _round_with_a_death(self, place: Place) -> tuple[RoundResult, float]:
        self.version += 1
        busy = self.workers[2]
        if place.busy:
            busy.hold(place.busy)
        self.victim.hold(place.name)
        what, name, _ = place.name.split(":")
        before = self.broker.counts()
        for trainer in (self.trainer, self.victim):
            trainer.publish(self.version, min_replicas=2)
        self.victim.arrived(place.name)
        # A rank that opens after the death would open a round of its own.
        opens = RANKS - 1 if place.name == "sending:Open:1" else RANKS
        self.broker.until("received:Open", before["received:Open"] + opens)
        if what == "sent":
            self.broker.until(f"received:{name}", before[f"received:{name}"] + RANKS)
        if place.busy:
            busy.arrived(place.busy)
        if place.outcome is COMMITTED:
            # What it sent may be released before what the other rank sends has come.
            self.broker.until("sent:Commit", before["sent:Commit"] + 1)
        began = time.monotonic()
        self.victim.kill()
        if place.outcome is FAILED:
            result = self.trainer.result()
            took = time.monotonic() - began
            busy.go()
        else:
            took = time.monotonic() - began
            busy.go()
            result = self.trainer.result()
        return result, took

    def _check_workers(self, place: Place) -> None:
        """Each worker that was prepared hears of the end once; who claims the version, has it."""
        version = self.version

        def heard() -> bool:
            reports = [worker.report() for worker in self.workers]
            return all(
                r.count("abort", version) + r.count("commit", version)
                == r.count("prepare", version)
                for r in reports
            )

        eventually(heard)
        for worker in self.workers:
            report = worker.report()
            assert report.wrong == []
            if place.outcome is COMMITTED:
                assert report.version == version
                assert report.count("abort", version) == 0
            else:
                assert report.version == (0 if report.torn else version - 1)
                assert report.count("commit", version) == 0
                assert report.count("abort", version) <= 1
                if report.count("abort", version):
                    assert "its process ended" in report.reasons[-1][0]

    def _check_segments(self) -> None:
        """Nothing of the dead is left in shared memory, and no worker has it mapped."""
        mine = f"-{self.victim.pid}-"
        eventually(lambda: not any(mine in name for name in self.world.segments()))
        assert self.world.segments(), "those of rank 0 are there"
        eventually(lambda: len(self.world.status().mappings) <= 1)


def kill_at(
    world: World, places: list[Place], row: Callable[[Place, RoundResult, float], None]
) -> None:
    """Kills rank 1 at each place; `row` gets what became of each round."""
    killing = Killing(world)
    for place in places:
        row(place, *killing.killed_at(place))
    killing.trainer.ready(2)
    killing._round_that_commits()
    world.no_lease_left()


def test_a_killed_rank_fails_its_round_at_once_and_a_restarted_one_goes_on(world: World) -> None:
    rows = []

    def note(place: Place, result: RoundResult, seconds: float) -> None:
        rows.append((place, result.outcome, seconds))

    kill_at(world, PLACES, note)

    assert [outcome for _, outcome, _ in rows] == [place.outcome for place in PLACES]
    assert max(seconds for *_, seconds in rows) < SOON_S
