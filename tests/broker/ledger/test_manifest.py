"""A rank's manifest is the number of its batches; what does not fit it fails the round."""

from __future__ import annotations

from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Outcome

from .harness import Desk


def test_a_batch_behind_the_last_one_fails_the_round(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(0, total=1)
    rank.batch(1)
    assert rank.outcome() is Outcome.FAILED
    assert rank.result().reason == "rank 0: batch 1 of a manifest of 1"
    assert member.last(m.Abort).code is Code.MANIFEST
    assert rank.released() == [1]


def test_a_batch_numbered_beyond_its_own_manifest_fails_the_round(desk: Desk) -> None:
    rank = desk.trainer()
    desk.worker("a")
    rank.open(1)
    rank.batch(4, total=3)
    assert "batch 4 of a manifest of 3" in rank.result().reason


def test_a_close_with_fewer_batches_than_came_fails_the_round(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(0)
    rank.batch(1)
    rank.close(1)
    assert "closes with 1 batches after 2" in rank.result().reason
    assert member.last(m.Abort).code is Code.MANIFEST


def test_a_manifest_that_changes_fails_the_round(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    rank.close(2)
    assert rank.outcome() is Outcome.FAILED
    assert member.last(m.Abort).code is Code.MANIFEST


def test_a_batch_with_another_manifest_than_before_fails_the_round(desk: Desk) -> None:
    rank = desk.trainer()
    desk.worker("a")
    rank.open(1)
    rank.batch(0, total=3)
    rank.batch(1, total=2)
    assert rank.outcome() is Outcome.FAILED


def test_a_repeated_close_is_harmless(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    rank.close(1)
    member.serves()
    rank.close(1)
    assert rank.outcome() is Outcome.COMMITTED


def test_a_close_after_the_decision_changes_nothing(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.stages(0, vote=True)
    rank.close(7)
    member.commits()
    assert rank.outcome() is Outcome.COMMITTED


def test_batches_may_come_in_any_order(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(1, total=2)
    assert member.got(m.Total) == []
    rank.batch(0)
    assert member.last(m.Deliver).total == 2
    member.serves([0, 1])
    assert rank.outcome() is Outcome.COMMITTED


def test_a_round_waits_for_a_batch_that_its_manifest_counts(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.close(1)
    assert member.got(m.Total) == []
    rank.batch(0)
    assert member.last(m.Deliver).total == 1
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_close_of_a_call_that_was_not_opened_is_ignored(desk: Desk) -> None:
    rank = desk.trainer()
    rank.say(m.Close(rank.session, 1, 1))
    rank.publish(1)
    assert desk.worker("a").got(m.Prepare)


def test_a_manifest_that_does_not_fit_fails_a_round_that_is_not_admitted_yet(desk: Desk) -> None:
    rank = desk.trainer()
    rank.open(1)
    rank.batch(0, total=1)
    rank.batch(1)
    assert rank.outcome() is Outcome.FAILED
    assert rank.released() == [0, 1]
