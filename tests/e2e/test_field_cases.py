"""Failures that were reported in public, tried on real processes; docs/field-cases.md lists all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import eventually
from .parties import PATIENCE_S, WorkerParty, World

pytestmark = pytest.mark.process

SOON_S = 1.0
RANKS = 4


def test_memory_comes_back_when_the_slowest_receiver_is_done_and_not_before(world: World) -> None:
    """C05: the first acknowledgement let the next bytes overwrite what a slower rank still read."""
    world.broker()
    trainer = world.trainer()
    workers = [world.worker("a", member, size=2) for member in range(2)]
    trainer.ready(1)
    for version in range(1, 6):
        slow = workers[version % 2]
        slow.hold("in:copy:1")
        trainer.open(version)
        slow.arrived("in:copy:1")
        trainer.command("wait", "released", 0.05)
        assert f"a/{version % 2}" in trainer.expect("late")
        slow.go()
        assert trainer.finished().outcome is Outcome.COMMITTED
        trainer.released()
    trainer.command("rounds", 6, 50, {})
    assert {result.outcome for result in trainer.expect("results")} == {Outcome.COMMITTED}

    for worker in workers:
        report = worker.report()
        assert (report.committed, report.wrong) == (list(range(1, 51)), [])


def test_what_a_worker_took_is_its_own_whatever_becomes_of_the_trainers_memory(
    world: World,
) -> None:
    """C06: a "copy" to the CPU was the shared buffer itself, and changed after the answer."""
    world.broker()
    trainer, worker = world.trainer(), world.worker()
    trainer.publish(1)
    assert trainer.result().outcome is Outcome.COMMITTED
    trainer.released()

    trainer.ask("scribble", about="scribbled")
    assert worker.differing(1) == []
    trainer.close()
    eventually(lambda: worker.report().mapped == 0)
    assert worker.differing(1) == []
    assert world.segments() == []


def test_workers_that_all_call_themselves_the_first_get_what_is_theirs(world: World) -> None:
    """C16: each replica called itself number 0, and all loaded the first one's weights."""
    world.broker()
    trainers = [
        world.start_trainer(r, world_size=RANKS, device=f"cpu:{r}", offset=100 * r)
        for r in range(RANKS)
    ]
    workers = [world.start_worker(f"r{r}", device=f"cpu:{r}", offset=100 * r) for r in range(RANKS)]
    for trainer in trainers:
        trainer.expect("registered")
    for worker in workers:
        worker.expect("attached")
    for trainer in trainers:
        trainer.publish(1, min_replicas=RANKS)

    assert {trainer.result().outcome for trainer in trainers} == {Outcome.COMMITTED}
    assert [worker.report().wrong for worker in workers] == [[]] * RANKS
    # The values of different ranks differ in every tensor that has elements.
    assert len(workers[1].differing(1 - 100)) == len(workers[0].differing(2))


@pytest.mark.parametrize("where", ["prepare", "copy"])
def test_what_a_worker_raises_reaches_the_trainer_at_once_and_hurts_no_other(
    world: World, where: str
) -> None:
    """C61: only success had an answer, so that the trainer waited for ever for a failed worker."""
    world.broker()
    trainer, failing, other = world.trainer(), world.worker("a"), world.worker("b")
    trainer.ready(2)
    failing.fail(where, "out of memory " + "!" * 10_000)
    began = time.monotonic()
    trainer.publish(1, min_replicas=1)
    result = trainer.result()

    assert time.monotonic() - began < SOON_S
    assert result.outcome is Outcome.MIXED
    reason = result.receivers["a/0"].reason
    assert result.receivers["a/0"].fate is Fate.EXPELLED
    assert "RuntimeError: out of memory !!" in reason and len(reason) <= 4096
    assert result.replicas["b"].fate is Fate.COMMITTED
    trainer.released()
    eventually(lambda: failing.report().count("abort", 1) == 1)
    trainer.publish(2, min_replicas=2)
    assert trainer.result().outcome is Outcome.COMMITTED
    assert [w.report().version for w in (failing, other)] == [2, 2]
    assert [w.report().wrong for w in (failing, other)] == [[], []]


def test_a_fleet_that_loses_workers_in_a_round_and_between_rounds_goes_on(world: World) -> None:
    """C62: one dead shard blocked the next update for ever, and no view showed it."""
    world.broker()
    trainer = world.trainer()
    first, second, third = (world.worker(name) for name in "abc")
    trainer.ready(3)
    first.hold("in:copy:1")
    trainer.publish(1)
    first.arrived("in:copy:1")
    first.kill()
    result = trainer.result()
    assert result.outcome is Outcome.MIXED
    assert {name for name, r in result.replicas.items() if r.fate is Fate.LOST} == {"a"}
    trainer.released()

    second.kill()
    eventually(lambda: [r.replica for r in world.channel().replicas if r.members] == ["c"])
    trainer.publish(2)
    result = trainer.result()
    assert (result.outcome, set(result.receivers)) == (Outcome.COMMITTED, {"c/0"})
    assert third.report().committed == [1, 2]


def test_a_second_run_cannot_mix_into_a_round_and_follows_when_the_first_has_left(
    world: World,
) -> None:
    """C69: a begin of another caller, or a begin for each rank, broke the update under way."""
    world.broker()
    trainers = [
        world.start_trainer(r, world_size=2, device=f"cpu:{r}", group="first") for r in range(2)
    ]
    worker = world.worker()
    for trainer in trainers:
        trainer.expect("registered")
    for trainer in trainers:
        trainer.publish(5)
    assert [trainer.result().call for trainer in trainers] == [1, 1]

    second = world.start_trainer(group="second", connect_s=0.3)
    refusal = second.expect("refused")
    assert "held by group first" in refusal and f"pid {trainers[0].pid}" in refusal
    assert second.process.join() == 0
    for trainer in trainers:
        trainer.publish(5)
    assert [trainer.result().call for trainer in trainers] == [2, 2]
    for trainer in trainers:
        trainer.close()
    third = world.trainer(group="second")
    third.ready(1)
    third.publish(6)
    assert third.result().outcome is Outcome.COMMITTED
    assert worker.report().committed == [5, 6]


def test_a_worker_is_current_only_after_its_own_commit_and_wholly_in_a_round_or_out_of_it(
    world: World,
) -> None:
    """C74: a restarted worker counted as ready, and answered with the weights it began with."""
    world.broker()
    trainer, old, other = world.trainer(), world.worker("a"), world.worker("b")
    trainer.ready(2)
    trainer.publish(9)
    assert trainer.result().outcome is Outcome.COMMITTED
    old.kill()
    new = world.worker("a")
    trainer.ready(2)
    states = {r.replica: r.current for r in world.channel().replicas}
    assert (states, new.report().version) == ({"a": 0, "b": 9}, 0)

    # The same version again serves who has not got it, and nobody else.
    trainer.publish(9)
    result = trainer.result()
    assert (result.outcome, set(result.receivers)) == (Outcome.COMMITTED, {"a/0"})
    assert {r.replica: r.current for r in world.channel().replicas} == {"a": 9, "b": 9}
    assert other.report().committed == [9]

    new.hold("in:copy:1")
    trainer.open(10)
    new.arrived("in:copy:1")
    late = world.worker("c")
    new.go()
    assert set(trainer.finished().receivers) == {"a/0", "b/0"}
    assert (late.report().hooks, late.report().version) == ([], 0)
    trainer.released()


def test_a_commit_hook_that_fails_is_told_by_name_and_a_strict_round_switches_nobody(
    world: World,
) -> None:
    """C76: one worker failed and the others switched, behind one call that looked like success."""
    world.broker()
    trainer = world.trainer()
    workers = {name: world.worker(name) for name in "abc"}
    trainer.ready(3)
    workers["b"].fail("commit", "no room for the cache")
    trainer.publish(1)
    result = trainer.result()
    assert result.outcome is Outcome.MIXED
    assert {name: r.current for name, r in result.replicas.items()} == {"a": 1, "b": 0, "c": 1}
    assert result.replicas["b"].fate is Fate.TORN
    assert "no room for the cache" in result.reason
    assert [r.replica for r in world.channel().replicas if r.torn] == ["b"]

    workers["b"].fail("prepare", "busy")
    trainer.publish(2, strict=True)
    result = trainer.result()
    assert result.outcome is Outcome.FAILED
    assert "busy" in result.reason
    trainer.released()
    eventually(lambda: all(_hooks_are_paired(worker, 2) for worker in workers.values()))
    assert [worker.report().count("commit", 2) for worker in workers.values()] == [0, 0, 0]


def _hooks_are_paired(worker: WorkerParty, version: int) -> bool:
    report = worker.report()
    ended = report.count("abort", version) + report.count("commit", version)
    return ended == report.count("prepare", version)


def test_a_late_answer_to_an_abandoned_try_counts_for_nothing_while_workers_come_and_go(
    world: World,
) -> None:
    """C82: an answer to the first try was counted for the second, or was waited for for ever."""
    world.broker({"beat": 0.2, "silent": 1.0, "drain": 0.2})
    trainer = world.trainer()
    workers = {name: world.worker(name) for name in "abc"}
    trainer.ready(3)
    slow = workers["b"]
    slow.hold("sending:Staged:1")
    trainer.open(4, strict=True, stage_s=1.3, prepare_s=1.3)
    slow.arrived("sending:Staged:1")
    slow.process.stop()
    first = trainer.finished()
    assert (first.outcome, first.call) == (Outcome.FAILED, 1)
    assert first.receivers["b/0"].fate is Fate.STUCK

    workers["a"].close()
    workers["d"] = world.worker("d")
    eventually(lambda: {r.replica for r in world.channel().replicas if r.ready} == {"c", "d"})
    workers["c"].hold("in:copy:1")
    trainer.command("retry", 4, {"min_replicas": 2})
    workers["c"].arrived("in:copy:1")
    # Now the answer to the first try arrives, in the middle of the second.
    slow.process.go_on()
    slow.go()
    eventually(lambda: len(world.channel().rounds) == 1)
    held = world.channel().rounds[0]
    assert (held.call, held.held) == (2, 1)
    workers["c"].go()
    second = trainer.result()
    assert (second.outcome, second.call) == (Outcome.COMMITTED, 2)
    assert set(second.receivers) == {"c/0", "d/0"}
    trainer.released()

    trainer.ready(3)
    trainer.publish(5, min_replicas=3)
    assert set(trainer.result().receivers) == {"b/0", "c/0", "d/0"}
    for name in "bcd":
        report = workers[name].report()
        assert (report.version, report.wrong) == (5, [])
    assert slow.report().count("abort", 4) == 1
    world.no_lease_left()


def test_segments_that_are_removed_under_a_round_are_made_anew_for_the_next(world: World) -> None:
    """C34: at a logout all segments of the user vanished, and every try failed until a restart."""
    world.broker()
    trainer, mapped = world.trainer(), world.worker("a")
    trainer.ready(1)
    trainer.publish(1)
    assert trainer.result().outcome is Outcome.COMMITTED
    mapped.hold("in:copy:1")
    trainer.open(2)
    mapped.arrived("in:copy:1")
    for name in world.segments():
        (Path(world.shm_dir) / name).unlink()
    other = world.worker("b")
    eventually(
        lambda: any("segment gone" in r.reason for r in world.channel().replicas), PATIENCE_S
    )
    mapped.go()
    result = trainer.finished()
    assert (result.outcome, set(result.receivers)) == (Outcome.COMMITTED, {"a/0"})
    trainer.released()
    assert mapped.report().wrong == []

    trainer.publish(3, min_replicas=2)
    assert trainer.result().outcome is Outcome.COMMITTED
    trainer.released()
    assert [w.report().version for w in (mapped, other)] == [3, 3]
    assert [w.report().wrong for w in (mapped, other)] == [[], []]
    trainer.close()
    assert world.segments() == []
