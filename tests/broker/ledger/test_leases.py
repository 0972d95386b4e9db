"""Leases: who may still read a batch, and when it comes back."""

from __future__ import annotations

from tensorlease.broker.ledger import Settings
from tensorlease.broker.ledger.state import LeaseState
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Outcome

from .harness import Desk


def test_a_batch_is_forwarded_with_its_body_unread(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(0, buffers=[7, 9], body=b"\xff\x00handles")
    deliver = member.last(m.Deliver)
    assert (deliver.trainer, deliver.rank, deliver.seq) == (rank.instance, 0, 0)
    assert (deliver.buffers, deliver.registered, deliver.nbytes) == ([7, 9], False, 8)
    assert member.bodies[-1] == b"\xff\x00handles"


def test_a_batch_comes_back_when_its_last_holder_is_done(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    pair[0].stages(0, vote=True)
    assert rank.released() == []
    pair[1].stages(0, vote=True)
    assert rank.released() == [0]


def test_a_repeated_staged_counts_once(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    pair[0].stages(0, vote=True)
    pair[0].stages(0, vote=True)
    assert rank.released() == []


def test_a_staged_of_who_holds_nothing_releases_nothing(desk: Desk) -> None:
    rank, member, other = desk.trainer(), desk.worker("a"), desk.worker("b", 0, 2)
    rank.publish(1)
    other.stages(0, key=member.key)
    assert rank.released() == []


def test_a_late_staged_of_a_failed_try_does_not_count_for_the_next(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    first = member.key
    rank.void()
    member.drains()
    rank.publish(1)
    member.stages(0, vote=True, key=first)
    assert rank.released() == []
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_releases_come_one_by_one_and_make_room_in_the_window(desk: Desk) -> None:
    desk.configure(Settings(window=2))
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    for seq in range(6):
        rank.batch(seq, total=6 if seq == 5 else None)
        if seq > 0:
            member.stages(seq - 1)
    assert rank.released() == [0, 1, 2, 3, 4]
    member.serves([5])
    assert rank.outcome() is Outcome.COMMITTED


def test_more_unreleased_batches_than_the_window_fail_the_round(desk: Desk) -> None:
    desk.configure(Settings(window=2))
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    for seq in range(3):
        rank.batch(seq)
    assert rank.outcome() is Outcome.FAILED
    assert "more than 2 batches unreleased" in rank.result().reason
    assert member.last(m.Abort).code is Code.WINDOW
    # The one too many went nowhere; the others wait for who may be reading.
    assert rank.released() == [2]
    member.drains()
    assert rank.released() == [2, 0, 1]


def test_the_window_holds_for_parked_batches_too(desk: Desk) -> None:
    desk.configure(Settings(window=2))
    rank = desk.trainer()
    rank.open(1)
    for seq in range(3):
        rank.batch(seq)
    assert rank.outcome() is Outcome.FAILED
    assert sorted(rank.released()) == [0, 1, 2]


def test_a_repeated_batch_is_not_forwarded_again(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(0)
    rank.batch(0)
    assert len(member.got(m.Deliver)) == 1


def test_a_repeated_batch_that_was_released_is_released_again(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(0)
    member.stages(0)
    rank.batch(0)
    assert rank.released() == [0, 0]
    assert len(member.got(m.Deliver)) == 1


def test_an_expelled_receiver_keeps_its_lease_until_it_has_drained(desk: Desk) -> None:
    rank, slow, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    other.stages(0, vote=True)
    slow.readies()
    desk.wait(31)
    assert slow.last(m.Expelled).code is Code.DEADLINE
    other.commits()
    assert rank.outcome() is Outcome.MIXED
    assert rank.released() == []
    slow.drains()
    assert rank.released() == [0]


def test_an_aborted_receiver_keeps_its_lease_until_it_has_drained(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    rank.void()
    assert rank.released() == []
    member.drains()
    assert rank.released() == [0]


def test_a_staged_after_the_rounds_end_counts(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    rank.void()
    member.stages(0)
    assert rank.released() == [0]


def test_a_silent_worker_keeps_its_lease(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    desk.wait(1000, silent=[member])
    assert rank.released() == []


def test_a_dropped_session_keeps_its_leases(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.drop()
    desk.wait(1000)
    assert rank.released() == []


def test_a_dead_worker_leaves_its_leases(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.gone()
    assert rank.released() == [0]


def test_a_worker_that_left_leaves_its_leases(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.leave()
    assert rank.released() == [0]


def test_a_reject_leaves_all_leases_of_the_round(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1, batches=3)
    member.stages(0)
    member.rejects()
    assert rank.released() == [0, 1, 2]


def test_who_rejects_and_still_reads_is_out_at_once_and_keeps_its_lease_until_it_has_drained(
    desk: Desk,
) -> None:
    rank, member, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    other.stages(0, vote=True)
    member.rejects(text="a view is kept", reading=True)
    other.commits()
    assert rank.outcome() is Outcome.MIXED
    assert rank.released() == []
    desk.wait(11)
    assert [h.replica for h in rank.last(m.Stuck).holders] == ["a"]
    assert rank.released() == []
    assert [state.reason for state in rank.last(m.Members).replicas] == [
        "member 0 still reading an earlier round",
        "",
    ]
    # Nobody waits for it any more, and it is in no other round.
    rank.open(2)
    assert [id.replica for id in rank.last(m.Opened).receivers] == ["b"]
    member.drains()
    assert [(release.call, release.seq) for release in rank.got(m.Release)] == [(1, 0)]
    assert [state.reason for state in rank.last(m.Members).replicas] == ["", ""]


def test_who_still_reads_keeps_its_lease_when_it_connects_again_and_says_so_again(
    desk: Desk,
) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.rejects(reading=True)
    member.hello(round=member.inside())
    assert member.last(m.Expelled).code is Code.COPY_FAILED
    assert rank.released() == []
    member.rejects(reading=True)
    assert rank.released() == []
    member.drains()
    assert rank.released() == [0]


def test_after_a_restart_who_still_reads_keeps_its_lease(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    desk.restart(rank, member)
    rank.returns()
    member.hello(round=member.inside())
    member.rejects(reading=True)
    assert rank.outcome() is Outcome.FAILED
    assert rank.released() == []
    member.drains()
    assert rank.released() == [0]


def test_a_batch_goes_only_to_receivers_still_in_the_round(desk: Desk) -> None:
    rank, out, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.open(1)
    out.rejects()
    rank.batch(0, total=1)
    assert out.got(m.Deliver) == []
    assert len(other.got(m.Deliver)) == 1


def test_a_batch_that_concerns_nobody_comes_back_at_once(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1, 2)
    member.takes(rank, 1)
    rank.open(1)
    rank.batch(0, buffers=[2], registered=True)
    assert rank.released() == [0]
    assert member.got(m.Deliver) == []


def test_a_registered_batch_goes_to_who_takes_one_of_its_buffers(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.offer(1, 2)
    first.takes(rank, 1)
    second.takes(rank, 2)
    rank.open(1)
    rank.batch(0, buffers=[1], registered=True)
    rank.batch(1, buffers=[1, 2], registered=True, total=2)
    assert [d.seq for d in first.got(m.Deliver)] == [0, 1]
    assert [d.seq for d in second.got(m.Deliver)] == [1]
    assert second.last(m.Deliver).total == 1
    second.stages(1, vote=True)
    first.stages(0, 1, vote=True)
    assert sorted(rank.released()) == [0, 1]
    first.commits()
    second.commits()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_batch_of_buffers_that_were_not_offered_fails_the_round(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    member.takes(rank, 1)
    rank.open(1)
    rank.batch(0, buffers=[5], registered=True)
    assert rank.outcome() is Outcome.FAILED
    assert member.last(m.Abort).code is Code.UNKNOWN_BUFFER
    assert rank.released() == [0]


def test_the_body_is_kept_only_while_the_lease_is(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    lease = desk.round().leases[0, 0]
    assert (lease.state, lease.body) == (LeaseState.HELD, b"table")
    member.stages(0)
    assert (lease.state, lease.body) == (LeaseState.RELEASED, None)


def test_a_dead_trainer_has_nothing_to_be_released(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.publish(1)
    second.publish(1)
    first.gone()
    assert second.released() == []
    member.drains()
    assert second.released() == [0]
    assert first.released() == []


def test_a_trainer_that_leaves_while_others_read_is_not_told_that_they_are_done(
    desk: Desk,
) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    rank.leave()
    assert rank.released() == []
    assert rank.kinds()[-1] is m.ByeOk
    assert member.got(m.Abort)


def test_a_batch_after_the_rounds_end_comes_back_at_once(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(0)
    rank.void()
    rank.batch(1, total=2)
    assert rank.released() == [1]
    assert [d.seq for d in member.got(m.Deliver)] == [0]
