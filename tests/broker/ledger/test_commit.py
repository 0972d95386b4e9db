"""Commit: all or none for each replica, or torn and said so."""

from __future__ import annotations

from tensorlease.broker.ledger.state import ReceiverState
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Fate, Outcome

from .harness import Desk, Member, Rank


def torn_pair(desk: Desk) -> tuple[Rank, list[Member]]:
    """A replica of two of which one committed version 1 and the other failed to."""
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    for member in pair:
        member.stages(0, vote=True)
    pair[0].commits()
    pair[1].commits(ok=False, text="kernel not found")
    return rank, pair


def test_a_replica_is_current_when_all_its_members_committed(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    for member in pair:
        member.stages(0, vote=True)
    pair[0].commits()
    assert desk.current() == (0, True)
    pair[1].commits()
    assert desk.current() == (1, False)
    (replica,) = rank.result().replicas
    assert (replica.fate, replica.current) == (Fate.COMMITTED, 1)


def test_a_failed_commit_hook_makes_the_replica_torn_and_is_named(desk: Desk) -> None:
    rank, pair = torn_pair(desk)
    assert rank.outcome() is Outcome.FAILED
    assert [rank.fate(member) for member in pair] == [Fate.COMMITTED, Fate.TORN]
    (replica,) = rank.result().replicas
    assert (replica.fate, replica.current) == (Fate.TORN, 0)
    assert "member 1: torn: kernel not found" in replica.reason
    assert desk.receiver(pair[1]).code is Code.COMMIT_FAILED


def test_who_committed_hears_that_its_replica_did_not(desk: Desk) -> None:
    _, pair = torn_pair(desk)
    assert len(pair[0].got(m.Torn)) == 1
    assert "kernel not found" in pair[0].last(m.Torn).text
    assert pair[1].got(m.Torn) == []


def test_a_torn_replica_beside_a_committed_one_makes_the_round_mixed(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    first.stages(0, vote=True)
    second.stages(0, vote=True)
    first.commits()
    second.commits(ok=False, text="broken")
    assert rank.outcome() is Outcome.MIXED
    assert rank.result().reason == "replica b: torn: member 0: torn: broken"
    assert first.got(m.Torn) == []


def test_that_it_is_torn_is_repeated_at_each_hello(desk: Desk) -> None:
    _, pair = torn_pair(desk)
    pair[0].drop()
    pair[0].forget()
    pair[0].hello()
    assert pair[0].kinds() == [m.Welcome, m.Torn]


def test_a_repeated_committed_of_a_torn_round_makes_nothing_current(desk: Desk) -> None:
    _, pair = torn_pair(desk)
    for member in pair:
        member.commits()
    assert desk.current()[0] == 0


def test_a_repeated_committed_is_harmless(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.serves()
    member.commits()
    assert len(rank.got(m.Finished)) == 1
    assert desk.current() == (1, False)


def test_a_torn_replica_is_healed_by_a_later_round(desk: Desk) -> None:
    rank, pair = torn_pair(desk)
    rank.publish(1)
    for member in pair:
        member.stages(0, vote=True)
    for member in pair:
        member.commits()
    assert rank.outcome() is Outcome.COMMITTED
    assert rank.result().replicas[0].current == 1
    pair[0].forget()
    pair[0].hello()
    assert pair[0].got(m.Torn) == []


def test_nothing_fails_the_round_after_the_decision(desk: Desk) -> None:
    rank, pair, other = desk.trainer(), desk.engine("a"), desk.worker("b")
    rank.open(1, strict=True)
    rank.batch(0, total=1)
    for member in (*pair, other):
        member.stages(0, vote=True)
    pair[0].gone()
    assert other.got(m.Abort) == []
    pair[1].commits()
    other.commits()
    assert rank.outcome() is Outcome.MIXED
    assert [rank.fate(x) for x in (*pair, other)] == [Fate.LOST, Fate.COMMITTED, Fate.COMMITTED]
    assert rank.result().replicas[0].fate is Fate.TORN
    assert pair[1].got(m.Torn)


def test_a_worker_that_dies_after_its_commit_has_committed(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    first.stages(0, vote=True)
    second.stages(0, vote=True)
    first.commits()
    first.gone()
    second.commits()
    assert rank.outcome() is Outcome.COMMITTED
    assert rank.result().replicas[0].current == 0


def test_who_does_not_answer_commit_in_time_is_unknown(desk: Desk) -> None:
    rank, member, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    member.stages(0, vote=True)
    other.stages(0, vote=True)
    other.commits()
    desk.wait(61)
    assert rank.outcome() is Outcome.MIXED
    assert rank.fate(member) is Fate.UNKNOWN
    assert "did not answer Commit in time" in rank.result().reason
    assert desk.receiver(member).state is ReceiverState.OUT


def test_a_committed_after_the_commit_limit_counts_for_the_worker_alone(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.stages(0, vote=True)
    desk.wait(61)
    assert rank.outcome() is Outcome.FAILED
    member.commits()
    assert len(rank.got(m.Finished)) == 1
    member.hello()
    assert desk.current() == (1, False)


def test_a_late_committed_makes_no_torn_replica_current(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    for member in pair:
        member.stages(0, vote=True)
    pair[0].commits()
    desk.wait(61)
    assert pair[0].got(m.Torn)
    pair[1].commits()
    pair[1].hello()
    assert desk.current()[0] == 0


def test_a_committed_of_who_was_not_told_to_commit_decides_nothing(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    first.stages(0, vote=True)
    first.commits()
    assert not rank.finished()
    second.stages(0, vote=True)
    assert second.got(m.Commit)


def test_a_committed_of_an_unknown_round_is_harmless(desk: Desk) -> None:
    member = desk.worker("a")
    member.say(m.Committed(member.session, "run", 9, True))
    assert desk.current()[0] == 0


def test_a_worker_that_returns_in_the_middle_of_its_commit_is_told_again(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.stages(0, vote=True)
    member.drop()
    member.forget()
    member.hello(round=member.inside((0, 0), voted=True))
    assert member.kinds() == [m.Welcome, m.Commit]
    member.commits()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_worker_that_committed_while_it_was_away_says_so_in_its_hello(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.stages(0, vote=True)
    member.drop()
    member.ran_commit()
    member.hello()
    assert rank.outcome() is Outcome.COMMITTED
