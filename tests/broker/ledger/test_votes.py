"""Votes and the decision: all ranks closed, every receiver complete, then Commit."""

from __future__ import annotations

from tensorlease.broker.ledger.state import ReceiverState, RoundState
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Fate, Outcome

from .harness import Desk


def test_a_steady_round_needs_no_more_messages_than_these(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.forget()
    member.forget()
    rank.publish(1)
    member.serves()
    assert rank.kinds() == [m.Opened, m.Release, m.Finished]
    assert member.kinds() == [m.Prepare, m.Deliver, m.Commit]


def test_the_last_batch_says_how_many_there_are(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1, batches=3)
    assert [d.total for d in member.got(m.Deliver)] == [None, None, 3]
    assert member.got(m.Total) == []


def test_close_tells_each_receiver_how_many_batches_it_gets(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.open(1)
    rank.batch(0)
    rank.batch(1)
    rank.close(2)
    assert [[t.total for t in member.got(m.Total)] for member in pair] == [[2], [2]]


def test_a_receiver_of_no_batch_is_told_zero(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.offer(1)
    first.takes(rank, 1)
    second.takes(rank)
    rank.open(1)
    rank.batch(0, buffers=[1], registered=True, total=1)
    assert second.last(m.Total).total == 0
    assert first.got(m.Total) == []


def test_a_round_without_any_batch_is_voted_on(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.close(0)
    assert member.last(m.Total).total == 0
    member.votes()
    member.commits()
    assert rank.outcome() is Outcome.COMMITTED


def test_no_total_is_told_before_all_ranks_closed(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.open(1)
    second.open(1)
    first.batch(0, total=1)
    second.batch(0)
    assert [d.total for d in member.got(m.Deliver)] == [None, None]
    second.close(1)
    assert member.last(m.Total).total == 2


def test_a_vote_before_all_ranks_closed_does_not_count(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(0)
    member.stages(0, vote=True)
    rank.close(1)
    assert member.got(m.Commit) == []
    member.votes()
    assert member.got(m.Commit)


def test_a_vote_of_who_still_owes_a_batch_does_not_count(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1, batches=2)
    member.stages(1, vote=True)
    assert member.got(m.Commit) == []
    member.stages(0, vote=True)
    assert member.got(m.Commit)


def test_commit_waits_for_the_vote_of_every_receiver(desk: Desk) -> None:
    rank, pair, other = desk.trainer(), desk.engine("a"), desk.worker("b")
    rank.publish(1)
    pair[0].stages(0, vote=True)
    other.stages(0, vote=True)
    assert [x.got(m.Commit) for x in (*pair, other)] == [[], [], []]
    pair[1].stages(0, vote=True)
    assert all(x.got(m.Commit) for x in (*pair, other))
    assert desk.round().state is RoundState.COMMITTING


def test_the_round_is_finished_when_every_receiver_has_answered_commit(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    for member in pair:
        member.stages(0, vote=True)
    pair[0].commits()
    assert not rank.finished()
    pair[1].commits()
    assert rank.outcome() is Outcome.COMMITTED


def test_commit_goes_only_to_receivers_that_voted(desk: Desk) -> None:
    rank, slow, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    other.stages(0, vote=True)
    slow.readies()
    desk.wait(31)
    assert other.got(m.Commit)
    assert slow.got(m.Commit) == []
    slow.stages(0, vote=True)
    assert slow.got(m.Commit) == []


def test_a_repeated_vote_is_not_answered_by_another_commit(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.stages(0, vote=True)
    member.stages(0, vote=True)
    member.votes()
    assert len(member.got(m.Commit)) == 1


def test_a_vote_for_an_unknown_round_is_harmless(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    member.say(m.Vote(member.session, "run", 99))
    member.say(m.Ready(member.session, "run", 99))
    rank.publish(1)
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_the_first_staged_implies_ready(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1, batches=2)
    assert desk.receiver(member).state is ReceiverState.PREPARING
    member.stages(0)
    assert desk.receiver(member).state is ReceiverState.STAGING


def test_ready_begins_the_staging_of_a_receiver(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    member.readies()
    assert desk.receiver(member).state is ReceiverState.STAGING


def test_the_channels_version_rises_with_the_decision(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(5)
    assert desk.channel().last_version == 0
    member.stages(0, vote=True)
    assert desk.channel().last_version == 5


def test_a_result_tells_what_each_receiver_measured_and_got(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a", pid=4711)
    rank.publish(1, batches=2)
    desk.wait(1.5)
    member.stages(0, 1, vote=True)
    desk.wait(0.5)
    member.commits()
    result = rank.result()
    (receiver,) = result.receivers
    assert (receiver.replica, receiver.member, receiver.pid) == ("a", 0, 4711)
    assert receiver.fate is Fate.COMMITTED
    assert (receiver.batches, receiver.nbytes) == (2, 16)
    assert (receiver.prepare_us, receiver.copy_us, receiver.commit_us) == (10, 20, 30)
    assert (result.nbytes, result.opening_us) == (16, 0)
    assert (result.staging_us, result.committing_us) == (1_500_000, 500_000)
    (replica,) = result.replicas
    assert (replica.replica, replica.fate, replica.current) == ("a", Fate.COMMITTED, 1)


def test_all_ranks_are_told_the_same_result(desk: Desk) -> None:
    ranks, member = [desk.trainer(r, 3) for r in range(3)], desk.worker("a")
    for rank in ranks:
        rank.publish(1)
    for number in range(3):
        member.stages(0, rank=number, vote=number == 2)
    member.commits()
    assert len({id(rank.result()) for rank in ranks}) == 1
    assert ranks[0].outcome() is Outcome.COMMITTED


def test_min_replicas_is_checked_again_at_the_decision(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1, min_replicas=2)
    first.stages(0, vote=True)
    second.rejects()
    assert first.got(m.Commit) == []
    assert rank.outcome() is Outcome.FAILED
