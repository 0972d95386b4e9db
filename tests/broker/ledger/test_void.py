"""Void: the licence to write before the release, or the news that it is too late."""

from __future__ import annotations

from tensorlease.broker.ledger.state import RoundState
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Outcome

from .harness import Desk


def test_a_void_fails_the_round_and_is_answered(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    rank.void()
    assert rank.outcome() is Outcome.FAILED
    assert rank.result().reason == "rank 0 made the round void"
    assert rank.last(m.Voided).decided is False
    assert member.last(m.Abort).code is Code.VOID


def test_a_voided_round_never_commits(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    rank.void()
    member.stages(0, vote=True)
    member.votes()
    assert member.got(m.Commit) == []
    assert desk.channel().last_version == 0


def test_a_round_that_waits_may_be_void_and_gives_its_batches_back(desk: Desk) -> None:
    rank = desk.trainer()
    rank.publish(1)
    rank.void()
    assert rank.outcome() is Outcome.FAILED
    assert rank.released() == [0]
    assert rank.last(m.Voided).decided is False


def test_a_void_after_the_decision_is_answered_decided(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.stages(0, vote=True)
    rank.void()
    assert rank.last(m.Voided).decided is True
    assert desk.round().state is RoundState.COMMITTING
    member.commits()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_void_after_the_end_says_whether_it_was_decided(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.serves()
    rank.void()
    assert rank.last(m.Voided).decided is True
    rank.publish(2)
    member.rejects()
    rank.void()
    assert rank.last(m.Voided).decided is False


def test_a_void_of_an_unknown_call_is_answered(desk: Desk) -> None:
    rank = desk.trainer()
    rank.void(7)
    assert rank.last(m.Voided) == m.Voided(desk.ledger.state.epoch, rank.instance, 7, False)


def test_a_repeated_void_is_answered_again(desk: Desk) -> None:
    rank = desk.trainer()
    rank.publish(1)
    rank.void()
    rank.void()
    assert len(rank.got(m.Voided)) == 2
    assert len(rank.got(m.Finished)) == 1


def test_the_void_of_one_rank_fails_the_round_for_all(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.publish(1)
    second.publish(1)
    second.void()
    assert first.outcome() is Outcome.FAILED
    assert "rank 1" in first.result().reason
    assert first.got(m.Voided) == []
    assert first.released() == []
    member.drains()
    assert first.released() == [0]


def test_a_void_in_a_lost_session_is_answered_after_the_next_hello(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    rank.drop()
    rank.calls[1].void = True
    rank.returns()
    assert rank.last(m.Voided).decided is False
    assert member.last(m.Abort).code is Code.VOID


def test_a_void_that_found_its_round_finished_is_answered_after_the_next_hello(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.stages(0, vote=True)
    rank.drop()
    member.commits()
    rank.calls[1].void = True
    rank.returns()
    assert rank.outcome() is Outcome.COMMITTED
    assert rank.last(m.Voided).decided is True
