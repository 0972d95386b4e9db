"""Ring rounds with real processes: what fails at each step, and slots that come back.

By hand, every place (`fault_table.py` makes docs/faults.md of them):

    TENSORLEASE_TEST_RING_ALL=1 pytest tests/e2e/test_ring_faults.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from msgspec import Struct

from tensorlease.agents.results import RoundResult
from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import eventually
from .parties import World
from .ring_children import SLOT
from .ring_parties import ALL, RingParty, start_trainer, start_worker
from .values import ring_shard

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

# ---------------------------------------------------------------- faults of a worker


class Fault(Struct, frozen=True):
    """What happens to a worker of replica a, and what becomes of it in the round."""

    how: str
    """kill, stop or raise."""
    place: str
    """Where; `last` counts the batches of the round. Empty: before the round."""
    fate: Fate
    stuck: bool = False
    """It keeps a slot until it goes on."""
    after: str = ""
    """What raises before, so that the worker comes there."""
    busy: bool = False
    """The other replica is held meanwhile, so that the round has not been decided yet."""

    @property
    def outcome(self) -> Outcome:
        """The round's."""
        return Outcome.COMMITTED if self.fate is Fate.COMMITTED else Outcome.MIXED


KILLS = [
    Fault("kill", "received:Prepare:1", Fate.LOST),
    Fault("kill", "in:prepare:1", Fate.LOST),
    Fault("kill", "received:Deliver:1", Fate.LOST),
    Fault("kill", "in:copy:1", Fate.LOST),
    Fault("kill", "in:copy:3", Fate.LOST),
    Fault("kill", "sending:Staged:2", Fate.LOST),
    Fault("kill", "sent:Staged:2", Fate.LOST),
    Fault("kill", "sent:Staged:last", Fate.LOST, busy=True),
    Fault("kill", "received:Commit:1", Fate.LOST),
    Fault("kill", "in:commit:1", Fate.LOST),
    Fault("kill", "sending:Committed:1", Fate.LOST),
    Fault("kill", "sent:Committed:1", Fate.COMMITTED),
    Fault("kill", "in:abort:1", Fate.EXPELLED, after="copy"),
]
RAISES = [
    Fault("raise", "in:prepare:1", Fate.EXPELLED),
    Fault("raise", "in:copy:1", Fate.EXPELLED),
    Fault("raise", "in:commit:1", Fate.TORN),
    Fault("raise", "in:abort:1", Fate.EXPELLED, after="copy"),
]
STOPS = [
    Fault("stop", "", Fate.STUCK, stuck=True),
    Fault("stop", "in:prepare:1", Fate.STUCK, stuck=True),
    Fault("stop", "in:copy:1", Fate.STUCK, stuck=True),
    Fault("stop", "in:copy:3", Fate.STUCK, stuck=True),
    Fault("stop", "sending:Staged:2", Fate.STUCK, stuck=True),
    Fault("stop", "in:commit:1", Fate.UNKNOWN),
    Fault("stop", "in:abort:1", Fate.EXPELLED, after="copy"),
]
EVERY_FAULT = [*KILLS, *RAISES, *STOPS]
SOME_FAULTS = [KILLS[1], KILLS[4], KILLS[5], KILLS[7], KILLS[11], KILLS[12]]
SOME_FAULTS += [*RAISES, STOPS[2], STOPS[5], STOPS[6]]
LIMITS = {"prepare_s": 1.5, "stage_s": 1.3, "commit_s": 0.6}
DURATIONS = {"beat": 0.2, "silent": 1.0, "drain": 0.2}
LATEST_S = 5.0
"""Where nobody is stopped, the round's limits are 30 to 60 s away."""


class Faults:
    """A trainer with a ring of two slots, and two replicas of one; replica a meets with faults."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.version = 0
        self.batches = 0
        self.broker = world.broker(DURATIONS)
        self.trainer = start_trainer(world)
        self.victim = start_worker(world, "a")
        self.other = start_worker(world, "b")
        self.trainer.expect("registered")
        for worker in (self.victim, self.other):
            worker.expect("attached")
        self.trainer.ready(2)
        self._round_of_both()

    def meets(self, fault: Fault) -> tuple[RoundResult, float]:
        """A round with the fault in it, one after it, and everything at its base line again.

        Returns the result, and the seconds from the fault to it; of a worker that raises, those of
        the whole round.
        """
        pid = self.victim.pid
        result, took = self._round_with(fault)
        assert took < LATEST_S, f"{fault}: {took:.2f} s"
        assert result.outcome is fault.outcome, f"{fault}: {result}"
        assert result.receivers["a/0"].fate is fault.fate, f"{fault}: {result}"
        assert result.receivers["a/0"].pid == pid
        if fault.how == "raise" or fault.after:
            assert "as the test wants" in result.receivers["a/0"].reason, fault
        assert result.replicas["b"].fate is Fate.COMMITTED, f"{fault}: {result}"
        report = self.other.report()
        assert (report.version, report.wrong) == (self.version, []), fault
        if fault.stuck:
            self._check_stuck(pid)
        else:
            eventually(self._at_base_line)  # Whether it ever goes on or not.
        self._back(fault)
        self.trainer.ready(2)
        self._round_of_both()
        return result, took

    def _round_with(self, fault: Fault) -> tuple[RoundResult, float]:
        self.version += 1
        place = fault.place.replace("last", str(self.batches))
        if fault.after:
            self.victim.fail(fault.after, "as the test wants")
        if fault.how == "raise":
            self.victim.fail(place.split(":")[1], "as the test wants")
        elif place:
            self.victim.hold(place)
        else:
            self.victim.process.stop()
        if fault.busy:
            self.other.hold(f"in:copy:{self.batches}")
        limits = LIMITS if fault.how == "stop" else {}
        before = self.broker.counts()
        began = time.monotonic()
        self.trainer.send(self.version, min_replicas=1, **limits)
        if fault.how != "raise" and place:
            self.victim.arrived(place)
            for what, count in self._said(fault):
                self.broker.until(what, before[what] + count)
            began = time.monotonic()
        if fault.how == "kill":
            self.victim.kill()
        elif fault.how == "stop" and place:
            self.victim.process.stop()
        if fault.busy:
            self.other.arrived(f"in:copy:{self.batches}")
            self.other.go()
        result = self.trainer.result()
        return result, time.monotonic() - began

    def _said(self, fault: Fault) -> Iterator[tuple[str, int]]:
        """What the broker must have of both workers before one of them meets with the fault."""
        if fault.after:  # What it raised is on its way while the abort hook begins.
            yield "received:Reject", 1
        if fault.busy:
            yield "received:Staged", 2 * self.batches - 1
        if fault.fate is Fate.COMMITTED:
            yield "received:Committed", 2

    def _check_stuck(self, pid: int) -> None:
        """What the silent worker keeps is counted and named, and was replaced."""
        ring = self.trainer.ring()
        assert 1 <= ring.stuck <= 2
        assert [(h.replica, h.member, h.pid) for h in ring.holders] == [("a", 0, pid)]
        assert ring.free == 2
        assert ring.nbytes == self.world.segment_bytes() == (2 + ring.stuck) * SLOT
        assert ring.nbytes <= ring.limit_bytes

    def _back(self, fault: Fault) -> None:
        """The worker goes on, or another takes its place."""
        if fault.how == "kill":
            self.victim = start_worker(self.world, "a")
            self.victim.expect("attached")
        elif fault.how == "stop":
            self.victim.process.go_on()
            if fault.place:
                self.victim.go()
        eventually(self._at_base_line)
        if fault.how != "kill":
            eventually(lambda: self._hooks_are_paired(fault))
            if fault.fate is not Fate.UNKNOWN:  # Else it commits after all, late.
                assert self.victim.report().count("commit", self.version) == int(
                    fault.fate is Fate.TORN
                )

    def _hooks_are_paired(self, fault: Fault) -> bool:
        """The victim's prepare hook was followed by one other; it may not have run at all where it
        was stopped before the round.
        """
        report = self.victim.report()
        ended = report.count("abort", self.version) + report.count("commit", self.version)
        prepared = report.count("prepare", self.version)
        return ended == prepared and (prepared == 1 or not fault.place)

    def _at_base_line(self) -> bool:
        ring = self.trainer.ring()
        segments = self.world.segments()
        return (ring.free, ring.slots, len(segments)) == (2, 2, 2)

    def _round_of_both(self) -> None:
        self.version += 1
        self.trainer.send(self.version, min_replicas=2)
        result = self.trainer.result()
        assert result.outcome is Outcome.COMMITTED, result
        self.batches = result.receivers["a/0"].batches
        for worker in (self.victim, self.other):
            report = worker.report()
            assert (report.version, report.torn, report.wrong) == (self.version, False, [])
            assert report.count("commit", self.version) == 1
        eventually(self._at_base_line)


def worker_faults(
    world: World, faults: list[Fault], row: Callable[[Fault, RoundResult, float], None]
) -> None:
    """Has a worker meet with each; `row` gets what became of each round."""
    meeting = Faults(world)
    for fault in faults:
        row(fault, *meeting.meets(fault))
    world.no_lease_left()


def test_a_worker_that_is_killed_stopped_or_raises_is_named_and_the_slots_come_back(
    world: World,
) -> None:
    met = []
    faults = EVERY_FAULT if ALL else SOME_FAULTS
    worker_faults(world, faults, lambda fault, result, took: met.append(fault))

    assert met == faults


def test_slots_that_a_stopped_worker_keeps_are_replaced_up_to_the_limit_and_then_it_is_named(
    world: World,
) -> None:
    world.broker(DURATIONS)
    trainer = start_trainer(world, slots=1, max_quarantine_bytes=0)
    victim, other = start_worker(world, "a"), start_worker(world, "b")
    for party, word in ((trainer, "registered"), (victim, "attached"), (other, "attached")):
        party.expect(word)
    trainer.ready(2)
    victim.hold("in:copy:1")
    trainer.send(1, min_replicas=1, **LIMITS)
    victim.arrived("in:copy:1")
    victim.process.stop()

    late = trainer.expect("late")

    assert late.startswith("RingFullError: version 1")
    assert f"kept by a/0 (pid {victim.pid})" in late
    assert world.segment_bytes() == SLOT
    victim.process.go_on()
    victim.go()
    eventually(lambda: trainer.ring().free == 1)
    trainer.ready(2)
    trainer.send(2, min_replicas=2)
    assert trainer.result().outcome is Outcome.COMMITTED
    assert (victim.report().version, other.report().version) == (2, 2)


def test_a_worker_that_hangs_is_out_and_the_rank_that_waits_for_its_slots_is_not_late(
    world: World,
) -> None:
    world.broker(DURATIONS | {"drain": 1.5})
    trainer = start_trainer(world)
    victim, other = start_worker(world, "a"), start_worker(world, "b")
    for party, word in ((trainer, "registered"), (victim, "attached"), (other, "attached")):
        party.expect(word)
    trainer.ready(2)
    victim.hold("in:copy:1")
    # Both slots come back, or are replaced, long after the rank would have been late.
    trainer.send(1, min_replicas=1, stage_s=1.0)
    victim.arrived("in:copy:1")

    result = trainer.result()

    assert result.outcome is Outcome.MIXED, result
    assert result.receivers["a/0"].fate is Fate.STUCK
    assert result.receivers["a/0"].reason == "made no progress for 1 s"  # It beats.
    assert result.replicas["b"].fate is Fate.COMMITTED
    assert [(h.replica, h.pid) for h in trainer.ring().holders] == [("a", victim.pid)]
    victim.go()
    eventually(lambda: (trainer.ring().free, trainer.ring().slots) == (2, 2))


# ---------------------------------------------------------------- faults of a trainer


class Death(Struct, frozen=True):
    """Where rank 1 dies, and what becomes of the round."""

    place: str
    outcome: Outcome
    busy: str = ""
    """Where a worker is held meanwhile, so that the round has not been decided yet."""


FAILED, COMMITTED = Outcome.FAILED, Outcome.COMMITTED
DEATHS = [
    Death("sending:Open:1", FAILED),
    Death("sent:Open:1", FAILED),
    Death("sending:Batch:1", FAILED),
    Death("sent:Batch:1", FAILED),
    Death("sent:Batch:2", FAILED, busy="in:prepare:1"),
    Death("received:Opened:1", FAILED, busy="in:copy:1"),
    Death("received:Release:1", FAILED),
    Death("sending:Batch:3", FAILED),
    # It has closed: what is staged may be decided.
    Death("sent:Batch:last", COMMITTED, busy="in:commit:1"),
    Death("received:Finished:1", COMMITTED),
]
SOME_DEATHS = [DEATHS[1], DEATHS[4], DEATHS[6], DEATHS[9]]


class Leaving(Struct, frozen=True):
    """After how many tensors rank 1 leaves its block by an exception."""

    count: int
    busy: str = ""
    """Where a worker is held meanwhile."""


OF_RANK_1 = len(ring_shard(1, 2))
LEAVINGS = [Leaving(count) for count in range(OF_RANK_1 + 1)]
LEAVINGS += [Leaving(1, "in:prepare:1"), Leaving(1, "in:copy:1")]
SOME_LEAVINGS = [LEAVINGS[0], LEAVINGS[1], LEAVINGS[OF_RANK_1], *LEAVINGS[OF_RANK_1 + 1 :]]


class TwoRanks:
    """Two ranks that own different rows, and a replica of one that wants all."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.version = 0
        self.broker = world.broker(DURATIONS)
        self.trainers = [self._start(0), self._start(1)]
        self.worker = start_worker(world)
        for trainer in self.trainers:
            trainer.expect("registered")
        self.worker.expect("attached")

    def _start(self, rank: int) -> RingParty:
        return start_trainer(
            self.world,
            rank,
            world_size=2,
            distribution="assembled",
            parts=ring_shard(rank, 2),
        )

    def commits(self) -> None:
        """A round that commits; all slots are free afterwards, and are all that there is."""
        self.trainers[0].ready(1)
        self.version += 1
        for trainer in self.trainers:
            trainer.send(self.version)
        for trainer in self.trainers:
            result = trainer.result()
            assert result.outcome is COMMITTED, result
        self.batches = max(trainer.ask("batches") for trainer in self.trainers[1:])
        report = self.worker.report()
        assert (report.version, report.torn, report.wrong) == (self.version, False, [])
        assert report.count("commit", self.version) == 1
        for trainer in self.trainers:
            eventually(lambda trainer=trainer: trainer.ring().free == 2)  # type: ignore[misc]
        eventually(lambda: self.world.segment_bytes() == 4 * SLOT)

    def dies(self, death: Death) -> tuple[RoundResult, float]:
        """A round in which rank 1 dies there, and a new one takes its place.

        Returns what rank 0 hears, and the seconds until then.
        """
        self.version += 1
        victim, place = self.trainers[1], death.place
        if place.endswith(":last"):
            place = place.replace("last", str(self.batches))
        if death.busy:
            self.worker.hold(death.busy)
        victim.hold(place)
        opened = self.broker.counts()["received:Open"]
        for trainer in self.trainers:
            trainer.send(self.version)
        victim.arrived(place)
        # A rank that opens after the death would open a round of its own.
        self.broker.until("received:Open", opened + 2 - (place == "sending:Open:1"))
        if death.busy:
            self.worker.arrived(death.busy)
        began = time.monotonic()
        victim.kill()
        if death.busy:
            self.worker.go()
        result = self.trainers[0].result()
        took = time.monotonic() - began
        assert took < LATEST_S, f"{death}: {took:.2f} s"
        assert result.outcome is death.outcome, f"{death}: {result}"
        if death.outcome is FAILED:
            assert "rank 1" in result.reason, death
            assert "its process ended" in result.reason, death
        self._worker_heard(death.outcome is COMMITTED)
        gone = f"-{victim.pid}-"
        eventually(lambda: not any(gone in name for name in self.world.segments()))
        eventually(lambda: self.trainers[0].ring().free == 2)
        self.trainers[1] = self._start(1)
        self.trainers[1].expect("registered")
        return result, took

    def leaves(self, leaving: Leaving) -> tuple[RoundResult, float]:
        """A round that rank 1 leaves by an exception; returns what rank 0 hears, and when."""
        self.version += 1
        opened = self.broker.counts()["received:Open"]
        if leaving.busy:
            self.worker.hold(leaving.busy)
        self.trainers[0].send(self.version)
        self.broker.until("received:Open", opened + 1)
        began = time.monotonic()
        self.trainers[1].leave(self.version, leaving.count, busy=bool(leaving.busy))
        if leaving.busy:
            self.worker.arrived(leaving.busy)
            began = time.monotonic()
            self.trainers[1].command("raise")
        result = self.trainers[0].result()
        took = time.monotonic() - began
        assert took < LATEST_S, f"{leaving}: {took:.2f} s"
        self.trainers[1].expect("left")
        if leaving.busy:
            self.worker.go()
        assert result.outcome is FAILED
        assert "rank 1 made the round void" in result.reason, leaving
        self._worker_heard(committed=False)
        return result, took

    def _worker_heard(self, committed: bool) -> None:
        """It commits once or, where it was prepared, aborts once; it claims nothing else."""
        version = self.version

        def heard() -> bool:
            report = self.worker.report()
            ends = report.count("abort", version) + report.count("commit", version)
            return ends == report.count("prepare", version)

        eventually(heard)
        report = self.worker.report()
        assert report.wrong == []
        assert report.count("commit", version) == int(committed)
        at = version if committed else 0 if report.torn else version - 1
        assert report.version == at


def trainer_deaths(
    world: World, deaths: list[Death], row: Callable[[Death, RoundResult, float], None]
) -> None:
    """Kills rank 1 at each place; `row` gets what became of each round."""
    ranks = TwoRanks(world)
    for death in deaths:
        ranks.commits()
        row(death, *ranks.dies(death))
    ranks.commits()
    world.no_lease_left()


def trainer_leavings(
    world: World, leavings: list[Leaving], row: Callable[[Leaving, RoundResult, float], None]
) -> None:
    """Has rank 1 leave its block at each place; `row` gets what became of each round."""
    ranks = TwoRanks(world)
    for leaving in leavings:
        ranks.commits()
        row(leaving, *ranks.leaves(leaving))
    ranks.commits()
    world.no_lease_left()


def test_a_trainer_that_is_killed_in_a_ring_round_fails_it_by_name_and_a_new_one_goes_on(
    world: World,
) -> None:
    met = []
    deaths = DEATHS if ALL else SOME_DEATHS
    trainer_deaths(world, deaths, lambda death, result, took: met.append(death))

    assert met == deaths


def test_a_trainer_that_leaves_its_block_by_an_exception_fails_the_round_for_all_ranks(
    world: World,
) -> None:
    met = []
    leavings = LEAVINGS if ALL else SOME_LEAVINGS
    trainer_leavings(world, leavings, lambda leaving, result, took: met.append(leaving))

    assert met == leavings
