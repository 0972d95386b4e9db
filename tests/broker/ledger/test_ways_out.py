"""Every way out of a round for a receiver, and what it means for its replica and the round."""

from __future__ import annotations

from tensorlease.broker.ledger.state import ReceiverState
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Fate, Outcome

from .harness import Desk


def test_a_reject_takes_its_whole_replica_out_and_the_round_goes_on(desk: Desk) -> None:
    rank, pair, other = desk.trainer(), desk.engine("a"), desk.worker("b")
    rank.publish(1)
    pair[0].rejects(Code.COPY_FAILED, "out of memory")
    abort = pair[1].last(m.Abort)
    assert abort.code is Code.MEMBER_OUT
    assert "a/0 (pid" in abort.text and "out of memory" in abort.text
    assert not pair[0].got(m.Abort) and not pair[0].got(m.Expelled)
    other.serves()
    assert rank.outcome() is Outcome.MIXED
    assert [rank.fate(x) for x in (*pair, other)] == [
        Fate.EXPELLED,
        Fate.EXPELLED,
        Fate.COMMITTED,
    ]
    assert rank.result().replicas[0].fate is Fate.EXPELLED


def test_the_other_members_are_told_once(desk: Desk) -> None:
    rank, trio, other = desk.trainer(), desk.engine("a", 3), desk.worker("b")
    rank.publish(1)
    trio[0].rejects()
    trio[1].rejects()
    trio[1].gone()
    assert len(trio[2].got(m.Abort)) == 1
    other.serves()
    assert rank.outcome() is Outcome.MIXED


def test_the_reject_of_the_last_replica_fails_the_round_with_its_reason(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.rejects(Code.UNREADABLE, "no such segment")
    assert rank.outcome() is Outcome.FAILED
    assert rank.result().reason == "no replica remains: no such segment"


def test_a_strict_round_fails_with_its_first_reject(desk: Desk) -> None:
    rank, member, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.open(1, strict=True)
    rank.batch(0, total=1)
    other.stages(0, vote=True)
    member.rejects(Code.COPY_FAILED, "out of memory")
    assert other.last(m.Abort).code is Code.STRICT
    assert rank.outcome() is Outcome.FAILED
    assert "out of memory" in rank.result().reason
    assert [rank.fate(member), rank.fate(other)] == [Fate.EXPELLED, Fate.ABORTED]


def test_a_strict_round_fails_with_a_death(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    desk.worker("b")
    rank.open(1, strict=True)
    member.gone()
    assert rank.outcome() is Outcome.FAILED


def test_too_few_replicas_fail_the_round(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1, min_replicas=2)
    first.rejects(text="broken")
    assert second.last(m.Abort).code is Code.TOO_FEW_REPLICAS
    assert "fewer than 2 replicas remain: broken" in rank.result().reason


def test_a_round_that_needs_no_replica_decides_when_all_are_out(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1, min_replicas=0)
    member.rejects()
    assert rank.outcome() is Outcome.FAILED
    assert desk.channel().last_version == 0


def test_a_death_takes_its_replica_out_and_names_the_pid(desk: Desk) -> None:
    rank, pair, other = desk.trainer(), desk.engine("a"), desk.worker("b")
    rank.publish(1)
    pair[0].gone("killed by signal 9")
    assert pair[1].last(m.Abort).code is Code.MEMBER_OUT
    other.serves()
    assert rank.fate(pair[0]) is Fate.LOST
    dead = next(r for r in rank.result().receivers if r.instance == pair[0].instance)
    assert f"(pid {dead.pid}) is gone: killed by signal 9" in dead.reason
    assert desk.round().receivers[pair[0].instance].code is Code.WORKER_LOST


def test_a_worker_that_leaves_in_the_middle_is_out(desk: Desk) -> None:
    rank, member, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    member.stages(0, vote=True)
    member.leave()
    other.serves()
    assert rank.outcome() is Outcome.MIXED
    assert rank.fate(member) is Fate.LOST
    assert desk.round().receivers[member.instance].code is Code.WORKER_LEFT


def test_an_unasked_drained_takes_its_replica_out(desk: Desk) -> None:
    rank, pair, other = desk.trainer(), desk.engine("a"), desk.worker("b")
    rank.publish(1)
    pair[0].drains()
    assert desk.receiver(pair[0]).state is ReceiverState.OUT
    assert desk.receiver(pair[0]).code is Code.WITHDRAWN
    assert pair[1].last(m.Abort).code is Code.MEMBER_OUT
    other.serves()
    assert rank.fate(pair[0]) is Fate.EXPELLED


def test_a_voter_whose_replica_falls_apart_gets_no_commit(desk: Desk) -> None:
    rank, pair, other = desk.trainer(), desk.engine("a"), desk.worker("b")
    rank.publish(1)
    pair[0].stages(0, vote=True)
    pair[1].gone()
    other.serves()
    assert pair[0].got(m.Commit) == []
    assert pair[0].got(m.Abort)
    assert desk.receiver(pair[0]).state is ReceiverState.DRAINING
    pair[0].drains()
    assert desk.receiver(pair[0]).state is ReceiverState.OUT


def test_the_round_is_decided_when_the_only_one_it_waited_for_is_out(desk: Desk) -> None:
    rank, slow, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    other.stages(0, vote=True)
    slow.gone()
    assert other.got(m.Commit)


def test_a_torn_reject_shows_in_the_replicas(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a", version=3)
    rank.publish(4)
    member.rejects(torn=True)
    assert desk.current() == (0, True)
    assert rank.result().replicas[0].current == 0


def test_an_untorn_reject_leaves_the_replica_at_its_version(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a", version=3)
    rank.publish(4)
    member.rejects()
    assert rank.result().replicas[0].current == 3
    assert desk.current() == (3, False)


def test_a_reject_of_an_unknown_round_is_harmless(desk: Desk) -> None:
    member = desk.worker("a")
    member.say(m.Reject(member.session, "run", 9, Code.COPY_FAILED, "late"))
    member.say(m.Drained(member.session, "run", 9, False))
    rank = desk.trainer()
    rank.publish(1)
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_who_is_out_hears_nothing_more_of_the_round(desk: Desk) -> None:
    rank, member, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.open(1)
    member.rejects()
    member.forget()
    rank.batch(0, total=1)
    other.serves()
    assert member.heard == []


def test_a_replica_that_was_out_takes_part_in_the_next_round(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    pair[0].rejects()
    rank.publish(2)
    # Its other member has yet to drain.
    assert pair[0].key[1] == 1
    pair[1].drains()
    for member in pair:
        assert member.key[1] == 2
        member.stages(0, vote=True)
    for member in pair:
        member.commits()
    assert rank.outcome() is Outcome.COMMITTED
