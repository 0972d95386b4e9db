"""Whom a trainer says that a round waits for: never one of whom it knows that nothing is missing."""

from __future__ import annotations

import pytest

from tensorlease.agents.describe import describe_call, readers
from tensorlease.agents.results import RoundHandle, RoundResult
from tensorlease.agents.trainer_core import Call, TrainerLease
from tensorlease.protocol import records
from tensorlease.protocol.records import (
    Fate,
    Holder,
    Outcome,
    Process,
    ReceiverId,
    ReceiverResult,
    ReplicaState,
    Terms,
)

VERSION = 7


def receiver(name: str, pid: int) -> ReceiverId:
    return ReceiverId(name * 16, name, 0, [Process(pid, 1)])


def state(name: str, current: int, reason: str = "") -> ReplicaState:
    return ReplicaState(name, 1, [0], current, False, not reason, reason)


A, B = receiver("a", 100), receiver("b", 200)
BEFORE = [state("a", VERSION - 1), state("b", VERSION - 1)]


def call(*receivers: ReceiverId, held: bool = False) -> Call:
    made = Call(1, Terms(VERSION), receivers=list(receivers), total=1)
    made.leases[0] = TrainerLease(0, [0], True, 8, None, [], released=not held)
    if held:
        made.held[0] = made.leases[0]
    return made


def handle() -> RoundHandle:
    return RoundHandle("trainer", VERSION, lambda _: "")


def test_one_receiver_is_named_as_the_one_from_whom_it_is_missing() -> None:
    said = describe_call(call(A), handle(), BEFORE, 1)
    assert said == "a/0 (pid 100) has not voted or not committed"
    said = describe_call(call(A, held=True), handle(), BEFORE, 1)
    assert said == "batch 0 is not released by a/0 (pid 100)"


def test_of_several_it_says_that_a_trainer_is_not_told_which_and_who_knows() -> None:
    which = "(a trainer is not told which: `tensorlease status` says whom the round waits for)"
    both = "at least one of a/0 (pid 100), b/0 (pid 200)"
    said = describe_call(call(A, B), handle(), BEFORE, 1)
    assert said == f"{both} has not voted or not committed {which}"
    said = describe_call(call(A, B, held=True), handle(), BEFORE, 1)
    assert said == f"batch 0 is not released by {both} {which}"


def test_a_replica_that_is_at_the_version_by_now_is_not_named() -> None:
    states = [state("a", VERSION), state("b", VERSION - 1)]
    said = describe_call(call(A, B), handle(), states, 1)
    assert said == "b/0 (pid 200) has not voted or not committed"
    assert readers(call(A, B, held=True), handle(), states) == [B]


def test_who_has_committed_by_the_result_is_not_named_and_nobody_is_in_its_place() -> None:
    results = [
        ReceiverResult(r.instance, r.replica, 0, r.processes[0].pid, fate)
        for r, fate in ((A, Fate.COMMITTED), (B, Fate.STUCK))
    ]
    ended = handle()
    ended.finished.reach(
        RoundResult(records.RoundResult("g", 1, VERSION, Outcome.MIXED, "", [], results))
    )
    said = describe_call(call(A, B, held=True), ended, BEFORE, 1)
    assert said == "batch 0 is not released by b/0 (pid 200)"
    assert readers(call(A, held=True), ended, BEFORE) == []


def test_who_keeps_a_lease_by_the_brokers_word_is_the_only_one_named_and_why_by_the_result() -> (
    None
):
    stuck = handle()
    stuck.note_stuck(0, [Holder(B.instance, "b", 0, 200)])
    said = describe_call(call(A, B, held=True), stuck, BEFORE, 1)
    assert said == "b/0 (pid 200) keeps its lease"
    result = ReceiverResult(B.instance, "b", 0, 200, Fate.STUCK, reason="on_stage kept views")
    stuck.finished.reach(
        RoundResult(records.RoundResult("g", 1, VERSION, Outcome.FAILED, "", [], [result]))
    )
    said = describe_call(call(A, B, held=True), stuck, BEFORE, 1)
    assert said == "b/0 (pid 200) keeps its lease: on_stage kept views"


@pytest.mark.parametrize(("pids", "who"), [([], "others"), ([7], "pid 7"), ([7, 8], "pids 7, 8")])
def test_of_one_that_has_ended_those_are_named_that_may_read_for_it(
    pids: list[int], who: str
) -> None:
    stuck = handle()
    stuck.note_stuck(0, [Holder(B.instance, "b", 0, 200, pids)])
    said = describe_call(call(A, B, held=True), stuck, BEFORE, 1)
    assert said == (
        f"b/0 (pid 200, which has ended: {who} may still be reading for it) keeps its lease"
    )


def test_before_the_admission_one_of_several_ranks_hears_that_the_others_have_to_publish() -> None:
    states = [state("a", VERSION - 1)]
    said = describe_call(None, handle(), states, 1)
    assert said.startswith("not admitted yet; replicas: a is complete")
    said = describe_call(None, handle(), states, 2)
    assert said.startswith("not admitted yet (each of the 2 ranks has to publish it); replicas: a ")
