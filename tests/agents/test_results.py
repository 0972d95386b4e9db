"""Results as people read them, and milestones."""

from __future__ import annotations

import msgspec
import pytest

from tensorlease.agents.results import Milestone, RoundHandle, RoundResult
from tensorlease.protocol import records
from tensorlease.protocol.errors import ClosedError, DeadlineError, RoundFailedError
from tensorlease.protocol.records import Fate, Holder, Outcome, ReceiverResult, ReplicaResult


def record(outcome: Outcome, reason: str = "") -> records.RoundResult:
    return records.RoundResult(
        group="g",
        call=3,
        version=7,
        outcome=outcome,
        reason=reason,
        replicas=[
            ReplicaResult("a", Fate.COMMITTED, 7),
            ReplicaResult("b", Fate.LOST, 0, "member 1: lost: gone"),
            ReplicaResult("c", Fate.UNSERVED, 6, "busy"),
        ],
        receivers=[
            ReceiverResult("1" * 16, "a", 0, 11, Fate.COMMITTED, "", 1000, 2000, 3000, 1, 2**20),
            ReceiverResult("2" * 16, "b", 1, 12, Fate.LOST, "gone"),
        ],
        nbytes=2**21,
        opening_us=1000,
        staging_us=2000,
        committing_us=500,
    )


def test_a_result_names_each_replica_and_each_worker_with_times_in_seconds() -> None:
    result = RoundResult(record(Outcome.MIXED))
    assert result.receivers["a/0"].copy_s == 0.002
    assert result.receivers["b/1"].fate is Fate.LOST
    assert result.replicas["c"].reason == "busy"
    assert result.seconds == pytest.approx(0.0035)
    lines = str(result).splitlines()
    assert lines[0].startswith("version 7  mixed  2.0 MiB  3.5 ms")
    assert [line.split()[0] for line in lines[1:]] == ["worker", "a/0", "b/1", "c"]
    assert lines[3].endswith("gone")


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (12, "12 B"), (1536, "1.5 KiB"), (3 * 2**19, "1.5 MiB")]
)
def test_bytes_of_a_small_round_are_said_too(nbytes: int, text: str) -> None:
    small = msgspec.structs.replace(record(Outcome.COMMITTED), nbytes=nbytes)
    assert str(RoundResult(small)).startswith(f"version 7  committed  {text}  3.5 ms")


def test_a_result_of_nobody_gives_its_reason() -> None:
    empty = records.RoundResult("g", 1, 1, Outcome.FAILED, "no worker", [], [])
    assert str(RoundResult(empty)).splitlines()[1] == "  no worker"


def test_only_a_version_that_all_committed_is_ok() -> None:
    for outcome in Outcome:
        result = RoundResult(record(outcome, "replica b: lost"))
        if outcome is Outcome.COMMITTED:
            assert result.raise_for_status() is result
            continue
        with pytest.raises(
            RoundFailedError, match=r"version 7 \(call 3\).*replica b: lost; at it: a"
        ):
            result.raise_for_status()


def test_a_milestone_is_reached_or_missed_once() -> None:
    milestone: Milestone[int] = Milestone(lambda limit: DeadlineError(f"not in {limit}"))
    assert milestone.reached is None
    with pytest.raises(DeadlineError, match=r"not in 0\.0"):
        milestone.wait(0.0)
    milestone.reach(1)
    milestone.reach(2)
    milestone.fail(ClosedError("too late"))
    assert milestone.done
    assert milestone.wait(0.0) == milestone.reached == 1


async def test_a_missed_milestone_raises_for_threads_and_coroutines() -> None:
    milestone: Milestone[int] = Milestone(lambda limit: DeadlineError("late"))
    milestone.fail(ClosedError("the agent was closed"))
    assert milestone.reached is None
    with pytest.raises(ClosedError):
        milestone.wait(0.0)
    with pytest.raises(ClosedError):
        await milestone


def test_a_handle_names_stuck_workers_until_their_batches_come_back() -> None:
    handle = RoundHandle(None, 1, lambda _: "a/0 is missing")
    holder = Holder("1" * 16, "a", 0, 11)
    handle.note_stuck(0, [holder])
    handle.note_stuck(1, [holder])
    handle.note_released(0)
    assert handle.stuck == [holder]
    handle.note_released(1)
    assert handle.stuck == []
    with pytest.raises(DeadlineError, match="a/0 is missing; the round itself goes on"):
        handle.result(0.0)
    assert (handle.over, handle.decided) == (False, False)
    handle.released.reach(None)
    handle.finished.reach(RoundResult(record(Outcome.MIXED)))
    assert (handle.over, handle.decided) == (True, True)


def test_an_outcome_and_a_fate_print_as_their_texts() -> None:
    assert [str(Outcome.MIXED), f"{Fate.TORN}"] == ["mixed", "torn"]
    assert msgspec.json.encode([Outcome.MIXED, Fate.TORN]) == b'["mixed","torn"]'
