"""A verified round: who says that it has a batch must show that it has read it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Fate, Outcome, Proof, Tally

from .harness import Desk, Member, Rank

RIGHT = [Proof(0, b"8 bytes.")]
WRONG = [Proof(0, b"stale...")]


def verified(desk: Desk, *replicas: str, batches: int = 1) -> tuple[Rank, list[Member]]:
    """A verified round that has been sent to a worker of each replica."""
    rank, members = desk.trainer(), [desk.worker(replica) for replica in replicas]
    rank.open(1, verify=True)
    for seq in range(batches):
        rank.batch(seq, total=batches, buffers=[0], proofs=RIGHT)
    return rank, members


def test_who_has_read_what_was_published_commits(desk: Desk) -> None:
    rank, [member] = verified(desk, "a")
    member.stages(0, vote=True, proofs=RIGHT)
    member.commits()
    assert rank.outcome() is Outcome.COMMITTED


def test_workers_are_not_told_what_they_have_to_find_out(desk: Desk) -> None:
    _, [member] = verified(desk, "a")
    assert member.last(m.Prepare).terms.verify
    assert RIGHT[0].digest not in repr(member.heard).encode()


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ([], "without a digest of buffer 0"),
        ([Proof(7, b"8 bytes.")], "without a digest of buffer 0"),
        (WRONG, "has read other bytes than were published: buffer 0 of batch 0 of rank 0"),
    ],
)
def test_who_cannot_show_that_it_has_read_it_is_out_and_its_lease_is_free(
    desk: Desk, said: list[Proof], text: str
) -> None:
    rank, [liar, honest] = verified(desk, "liar", "honest")
    liar.stages(0, vote=True, proofs=said)
    honest.stages(0, vote=True, proofs=RIGHT)
    honest.commits()
    assert rank.released() == [0]
    assert liar.last(m.Expelled).code is Code.NOT_VERIFIED
    assert not liar.got(m.Commit)
    assert (rank.outcome(), rank.fate(liar)) == (Outcome.MIXED, Fate.EXPELLED)
    assert text in rank.result().reason
    assert desk.current("liar") == (0, True)


def test_a_round_that_one_worker_cannot_verify_fails_if_there_is_no_other(desk: Desk) -> None:
    rank, [member] = verified(desk, "a")
    member.stages(0, vote=True, proofs=WRONG)
    assert rank.outcome() is Outcome.FAILED


def test_of_registered_buffers_those_are_to_be_shown_that_the_worker_takes(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.offer(0, 1)
    pair[0].takes(rank, 0, 1)
    pair[1].takes(rank, 1)
    rank.open(1, verify=True)
    proofs = [Proof(0, b"zero...."), Proof(1, b"one.....")]
    rank.batch(0, total=1, buffers=[0, 1], registered=True, body=b"tags", proofs=proofs)
    assert member_bodies(pair) == [b"tags", b"tags"]
    pair[0].stages(0, vote=True, proofs=proofs)
    pair[1].stages(0, vote=True, proofs=proofs[1:])
    for member in pair:
        member.commits()
    assert rank.outcome() is Outcome.COMMITTED


def member_bodies(members: list[Member]) -> list[bytes | None]:
    """Returns the body that each was last sent a batch with."""
    found: list[bytes | None] = []
    for member in members:
        sent = zip(member.heard, member.bodies, strict=True)
        found.append([body for message, body in sent if isinstance(message, m.Deliver)][-1])
    return found


def test_a_batch_without_digests_fails_a_verified_round(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1, verify=True)
    rank.batch(0, total=1)
    assert (rank.outcome(), rank.result().code) == (Outcome.FAILED, Code.NOT_VERIFIED)
    assert member.got(m.Abort)


def test_in_a_round_that_is_not_verified_nothing_is_to_be_shown(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.stages(0, vote=True)
    member.commits()
    assert rank.outcome() is Outcome.COMMITTED


@pytest.mark.parametrize("said", [RIGHT, WRONG, []])
@pytest.mark.parametrize("voted", [False, True])
def test_what_was_staged_before_a_restart_is_to_be_shown_after_it(
    desk: Desk, said: list[Proof], voted: bool
) -> None:
    rank, [member] = verified(desk, "a")
    member.readies()
    desk.restart(rank, member)
    rank.returns()
    member.hello(round=member.inside((0, 0), voted=voted, proofs=said))
    if said is RIGHT:
        if not voted:
            member.votes()
        member.commits()
        assert rank.outcome() is Outcome.COMMITTED
    else:
        assert member.last(m.Expelled).code is Code.NOT_VERIFIED
        assert rank.outcome() is Outcome.FAILED


def test_after_a_restart_none_commits_before_each_has_shown_it(desk: Desk) -> None:
    rank, members = verified(desk, "a", "b", "c")
    for member in members:
        member.readies()
    desk.restart(rank, *members)
    rank.returns()
    for member, said in zip(members, (WRONG, RIGHT, WRONG), strict=True):
        member.hello(round=member.inside((0, 0), voted=True, proofs=said))
    assert [bool(member.got(m.Commit)) for member in members] == [False, True, False]


def test_a_round_that_was_decided_before_a_restart_goes_on_without_who_had_not_shown_it(
    desk: Desk,
) -> None:
    rank, [liar, honest] = verified(desk, "liar", "honest")
    liar.stages(0, vote=True, proofs=WRONG)
    honest.stages(0, vote=True, proofs=RIGHT)
    honest.ran_commit()  # What it says, and that the other is out, is lost with the broker.
    said = liar.inside((0, 0), voted=True, proofs=WRONG)
    desk.restart(rank, liar, honest)
    rank.returns()
    honest.hello()
    liar.forget()
    liar.hello(round=said)
    assert not liar.got(m.Commit)
    assert liar.last(m.Expelled).code is Code.NOT_VERIFIED
    assert (rank.outcome(), rank.fate(liar)) == (Outcome.MIXED, Fate.EXPELLED)


def test_after_a_restart_the_whole_replica_of_who_had_not_shown_it_is_out(desk: Desk) -> None:
    rank, pair, honest = desk.trainer(), desk.engine("pair"), desk.worker("honest")
    rank.open(1, verify=True)
    rank.batch(0, total=1, buffers=[0], proofs=RIGHT)
    for member in (*pair, honest):
        member.readies()
    honest.ran_commit()
    said = [
        x.inside((0, 0), voted=True, proofs=p) for x, p in zip(pair, (WRONG, RIGHT), strict=True)
    ]
    desk.restart(rank, honest, *pair)
    rank.returns()
    honest.hello()
    for member, round in zip(pair, said, strict=True):
        member.hello(round=round)
    assert not any(member.got(m.Commit) for member in pair)
    assert rank.outcome() is Outcome.MIXED


def test_who_was_told_to_commit_does_though_nobody_knows_any_more_what_was_published(
    desk: Desk,
) -> None:
    rank, [member] = verified(desk, "a")
    member.stages(0, vote=True, proofs=RIGHT)
    assert member.got(m.Commit)
    said = replace(member.inside((0, 0), voted=True, proofs=RIGHT), decided=True)
    desk.restart(rank, member)
    member.hello(round=said)
    rank.gone()
    assert not member.got(m.Expelled)
    member.commits()
    assert desk.forgotten()


def test_where_nobody_knows_what_was_published_a_verified_round_takes_no_one_along(
    desk: Desk,
) -> None:
    rank, [first, second] = verified(desk, "first", "second")
    for member in (first, second):
        member.stages(0, vote=True, proofs=RIGHT)
    first.ran_commit()
    said = second.inside((0, 0), voted=True, proofs=RIGHT)
    rank.gone()
    desk.restart(first, second)
    first.hello()
    second.forget()
    second.hello(round=said)
    assert not second.got(m.Commit)


@pytest.mark.parametrize("said", [RIGHT, WRONG])
def test_what_was_staged_while_the_connection_was_lost_is_to_be_shown(
    desk: Desk, said: list[Proof]
) -> None:
    rank, [member] = verified(desk, "a", batches=2)
    member.drop()
    member.forget()
    member.hello(round=member.inside((0, 0), proofs=said))
    assert rank.released() == [0]
    assert len(member.got(m.Deliver)) == (1 if said is RIGHT else 0)
    if said is RIGHT:
        member.stages(1, vote=True, proofs=RIGHT)
        member.commits()
        assert rank.outcome() is Outcome.COMMITTED
    else:
        assert member.last(m.Expelled).code is Code.NOT_VERIFIED
        assert rank.outcome() is Outcome.FAILED


# ---------------------------------------------------------------- what was applied


def test_what_each_worker_made_of_the_names_is_in_the_result(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    tally = Tally(99, 1, ["extra"])
    member.stages(0, vote=True, tally=tally)
    member.commits()
    assert [receiver.tally for receiver in rank.result().receivers] == [tally]


def test_a_replica_that_applied_nothing_is_out(desk: Desk) -> None:
    rank, member, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    member.stages(0, vote=True, tally=Tally(0, 2, ["x", "y"]))
    other.stages(0, vote=True, tally=Tally(1, 0))
    other.commits()
    assert (rank.outcome(), rank.fate(member)) == (Outcome.MIXED, Fate.EXPELLED)
    assert "applied anything; the names sent were x, y" in rank.result().reason
    assert member.last(m.Expelled).code is Code.NOTHING_APPLIED


def test_one_member_of_a_replica_may_have_nothing_to_apply(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    pair[0].stages(0, vote=True, tally=Tally(0, 1, ["w"]))
    pair[1].stages(0, vote=True, tally=Tally(1, 0))
    for member in pair:
        member.commits()
    assert rank.outcome() is Outcome.COMMITTED


@pytest.mark.parametrize("last", [Tally(0, 1), None])
def test_a_replica_of_which_no_member_applied_anything_is_out(
    desk: Desk, last: Tally | None
) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    pair[0].stages(0, vote=True, tally=Tally(0, 1))
    pair[1].stages(0)
    pair[1].votes(last)
    if last is None:  # It does not say, and may have.
        for member in pair:
            member.commits()
        assert rank.outcome() is Outcome.COMMITTED
    else:
        assert rank.outcome() is Outcome.FAILED


def test_a_replica_that_applied_nothing_is_out_after_a_restart_too(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.readies()
    desk.restart(rank, member)
    rank.returns()
    member.hello(round=member.inside((0, 0), voted=True, tally=Tally(0, 1, ["w"])))
    assert rank.outcome() is Outcome.FAILED
    assert "applied anything" in rank.result().reason


# ---------------------------------------------------------------- what is not known


def test_who_is_put_out_is_at_no_version_until_it_says_what_it_wrote(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    for member in pair:
        member.stages(0, vote=True)
    for member in pair:
        member.commits()
    assert desk.current() == (1, False)
    rank.publish(2)
    pair[0].readies()
    pair[1].rejects(torn=False)
    assert desk.current() == (0, True)
    assert [replica.current for replica in rank.result().replicas] == [0]
    pair[0].drains(torn=False)
    assert desk.current() == (1, False)


def test_one_that_was_sent_nothing_is_at_the_version_that_it_was_at(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.serves()
    rank.open(2)
    rank.void()
    assert desk.current() == (1, False)


def test_whose_answer_to_commit_was_not_waited_for_is_at_no_version(desk: Desk) -> None:
    rank, member, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    for each in (member, other):
        each.stages(0, vote=True)
    other.commits()
    desk.wait(61)
    assert (rank.outcome(), rank.fate(member)) == (Outcome.MIXED, Fate.UNKNOWN)
    assert desk.current("a") == (0, True)
    member.commits()
    assert desk.current("a") == (1, False)


def test_the_version_again_is_not_there_already_while_a_later_one_may_have_been_written(
    desk: Desk,
) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.serves()
    rank.publish(2)
    member.readies()
    rank.void()
    rank.publish(1)
    member.drains(torn=True)
    member.forget()
    desk.wait(0)
    assert not [r for r in desk.round(3).unserved if r.fate is Fate.COMMITTED]


def test_a_subset_waits_for_who_has_yet_to_say_whether_it_is_at_the_base(desk: Desk) -> None:
    rank, pair = desk.trainer(), [desk.worker("a"), desk.worker("b")]
    rank.publish(1)
    both_serve(pair)
    rank.publish(2)
    rank.void()
    pair[0].drains(torn=False)
    rank.open(3, base=1)
    rank.batch(0, total=1)
    assert not rank.got(m.Opened)[2:]
    pair[1].drains(torn=False)
    both_serve(pair)
    assert rank.outcome() is Outcome.COMMITTED


def both_serve(pair: list[Member]) -> None:
    """Both stage the one batch and vote, and then both commit."""
    for member in pair:
        member.stages(0, vote=True)
    for member in pair:
        member.commits()


# ---------------------------------------------------------------- who was left out


def test_replicas_that_are_incomplete_or_silent_are_named_and_do_not_count(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    desk.worker("half", 0, 2)
    quiet = desk.worker("quiet")
    desk.wait(6, silent=[quiet])
    rank.publish(1)
    member.serves()
    result = rank.result()
    assert result.outcome is Outcome.COMMITTED
    assert [(r.replica, r.reason) for r in result.left_out] == [
        ("half", "waits for member 1 of 2"),
        ("quiet", "member 0 silent"),
    ]


def test_trainers_hear_that_a_replica_which_refused_is_torn(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.serves()
    rank.publish(2)
    rank.forget()
    member.rejects(torn=True)
    assert [(r.current, r.torn) for r in rank.last(m.Members).replicas] == [(0, True)]
