"""What settles a restored round, who is missing in it, and what is learned after the window."""

from __future__ import annotations

from msgspec.structs import replace

from tensorlease.broker.ledger.state import RoundState
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Fate, Outcome, Taken

from .harness import Desk, Member, Rank


def staging(desk: Desk) -> tuple[Rank, Member]:
    """A round of one batch that its one receiver has prepared for."""
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.readies()
    return rank, member


# ---------------------------------------------------------------- settled before the restart


def test_one_receiver_that_committed_rolls_the_round_forward(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    first.stages(0, vote=True)
    second.stages(0, vote=True)
    first.ran_commit()
    desk.restart(rank, first, second)
    second.forget()
    rank.returns()
    first.hello()
    second.hello(round=second.inside((0, 0), voted=True))
    assert second.got(m.Commit)
    second.commits()
    assert rank.outcome() is Outcome.COMMITTED
    assert desk.channel().last_version == 1


def test_one_receiver_that_was_told_to_commit_rolls_the_round_forward(desk: Desk) -> None:
    rank, member = staging(desk)
    member.stages(0, vote=True)
    desk.restart(rank, member)
    rank.calls[1].void = True
    rank.returns()
    member.hello(round=replace(member.inside((0, 0), voted=True), decided=True))
    assert rank.last(m.Voided).decided is True
    member.commits()
    assert rank.outcome() is Outcome.COMMITTED


def test_who_had_not_voted_when_the_round_was_decided_was_out(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    first.stages(0, vote=True)
    second.rejects()
    first.ran_commit()
    desk.restart(rank, first, second)
    rank.returns()
    first.hello()
    # Its Reject was never heard of here; it says that it is inside and unvoted.
    second.hello(round=second.inside((0, 0)))
    assert second.last(m.Expelled).code is Code.MEMBER_OUT
    assert rank.outcome() is Outcome.MIXED
    assert [rank.fate(first), rank.fate(second)] == [Fate.COMMITTED, Fate.EXPELLED]


def test_a_failed_commit_hook_is_announced_and_settles_the_round(desk: Desk) -> None:
    rank, member = staging(desk)
    member.stages(0, vote=True)
    member.ran_commit(ok=False, text="kernel not found")
    desk.restart(rank, member)
    rank.returns()
    member.hello()
    assert rank.outcome() is Outcome.FAILED
    assert rank.fate(member) is Fate.TORN
    assert "kernel not found" in rank.result().reason


def test_one_rank_that_was_told_settles_the_round_for_the_others(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.publish(1)
    second.publish(1)
    second.drop()
    member.stages(0, rank=0)
    member.stages(0, rank=1, vote=True)
    member.commits()
    assert first.finished() and not second.finished()
    desk.restart(first, second, member)
    first.returns()
    second.returns()
    member.hello()
    assert second.result() == first.result()


def test_a_rank_that_was_told_of_a_failure_settles_the_round_for_the_others(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.publish(1)
    second.publish(1)
    second.drop()
    member.rejects(text="broken")
    assert first.outcome() is Outcome.FAILED
    desk.restart(first, second, member)
    second.returns()
    member.hello(out=[member.key])
    assert not second.finished()
    first.returns()
    assert second.result() == first.result()
    assert second.released() == [0]


def test_a_told_failure_aborts_who_is_still_in_the_round(desk: Desk) -> None:
    rank, member = staging(desk)
    rank.void()
    assert rank.outcome() is Outcome.FAILED
    member.forget()
    desk.restart(rank, member)
    rank.returns()
    member.hello(round=member.inside())
    assert member.got(m.Abort)
    assert rank.released() == []
    member.drains()
    assert rank.released() == [0]


def test_a_told_success_tells_the_receiver_to_commit_again(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.serves()
    member.forget()
    desk.restart(rank, member)
    rank.returns()
    member.hello()
    assert member.kinds() == [m.Welcome]
    rank.publish(2)
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


# ---------------------------------------------------------------- who is not there any more


def test_receivers_that_stay_silent_leave_the_round_unresolved(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member)
    member.connected = False
    rank.returns()
    desk.wait(11)
    assert rank.outcome() is Outcome.UNRESOLVED
    assert "nothing was heard of a/0 (pid" in rank.result().reason
    # They may be reading: named, and never released.
    assert rank.last(m.Stuck).holders[0].instance == member.instance
    assert rank.released() == []
    assert rank.fate(member) in (Fate.UNKNOWN, Fate.STUCK)


def test_an_unresolved_round_is_not_current_anywhere(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member)
    member.connected = False
    rank.returns()
    desk.wait(11)
    assert desk.channel().last_version == 0
    rank.publish(1)
    assert rank.call == 2
    assert rank.got(m.OpenRefused) == []


def test_who_announces_itself_late_is_told_that_it_is_out_and_drains(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member)
    member.connected = False
    rank.returns()
    desk.wait(11)
    member.forget()
    member.hello(round=member.inside())
    assert member.kinds() == [m.Welcome, m.Expelled]
    assert rank.released() == []
    member.drains()
    assert rank.released() == [0]


def test_a_silent_receiver_does_not_unsettle_what_another_committed(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    first.stages(0, vote=True)
    second.stages(0, vote=True)
    first.ran_commit()
    desk.restart(rank, first, second)
    second.connected = False
    rank.returns()
    first.hello()
    desk.wait(11)
    assert rank.outcome() is Outcome.MIXED
    assert rank.fate(first) is Fate.COMMITTED
    assert rank.fate(second) in (Fate.UNKNOWN, Fate.STUCK)


def test_a_receiver_that_died_with_the_broker_is_lost(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    desk.restart(rank, first, second)
    rank.returns()
    second.gone()
    first.hello(round=first.inside())
    first.serves()
    assert rank.outcome() is Outcome.MIXED
    assert rank.fate(second) is Fate.LOST
    assert rank.released() == [0]


def test_a_receiver_that_leaves_while_the_broker_listens_is_lost(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    desk.restart(rank, first, second, "f" * 16)
    rank.returns()
    second.hello(round=second.inside())
    second.leave()
    first.hello(round=first.inside())
    desk.wait(11)
    first.serves()
    assert rank.outcome() is Outcome.MIXED
    assert rank.fate(second) is Fate.LOST


def test_who_was_out_of_the_round_is_out_after_the_restart(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    second.rejects()
    desk.restart(rank, first, second)
    second.forget()
    rank.returns()
    second.hello(out=[second.key])
    first.hello(round=first.inside())
    first.serves()
    assert rank.outcome() is Outcome.MIXED
    assert rank.fate(second) is Fate.EXPELLED
    assert second.kinds() == [m.Welcome]


def test_a_member_that_was_out_takes_its_replica_out_after_the_restart(desk: Desk) -> None:
    rank, pair, other = desk.trainer(), desk.engine("a"), desk.worker("b")
    rank.publish(1)
    desk.restart(rank, *pair, other)
    rank.returns()
    pair[0].hello(out=[pair[0].key])
    pair[1].hello(round=pair[1].inside())
    other.hello(round=other.inside())
    assert pair[1].last(m.Abort).code is Code.MEMBER_OUT
    other.serves()
    assert rank.outcome() is Outcome.MIXED


def test_a_round_whose_only_replica_was_out_fails(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member)
    rank.returns()
    member.hello(out=[member.key])
    assert rank.outcome() is Outcome.FAILED
    assert rank.released() == [0]


def test_a_trainer_that_died_with_the_broker_fails_the_round(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member)
    member.hello(round=member.inside())
    rank.gone()
    assert member.last(m.Abort).code is Code.TRAINER_LOST
    member.drains()
    assert desk.forgotten()


def test_a_rank_that_died_with_the_broker_fails_the_round_for_the_others(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.publish(1)
    second.publish(1)
    desk.restart(first, second, member)
    first.returns()
    member.hello(round=member.inside())
    second.gone()
    assert first.outcome() is Outcome.FAILED
    assert "rank 1" in first.result().reason
    assert member.got(m.Abort)


def test_a_silent_rank_leaves_the_round_unresolved(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.publish(1)
    second.publish(1)
    desk.restart(first, second, member)
    second.connected = False
    first.returns()
    member.hello(round=member.inside())
    desk.wait(11)
    assert first.outcome() is Outcome.UNRESOLVED
    assert member.last(m.Abort).code is Code.UNRESOLVED


def test_a_dead_trainers_round_rolls_forward_where_it_was_decided(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    first.stages(0, vote=True)
    second.stages(0, vote=True)
    first.ran_commit()
    desk.restart(rank, first, second)
    first.hello()
    second.forget()
    second.hello(round=second.inside((0, 0), voted=True))
    rank.gone()
    assert second.got(m.Commit)
    second.commits()
    assert desk.forgotten()


# ---------------------------------------------------------------- lists of receivers


def test_a_list_that_only_a_worker_knows_is_restored(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    rank.calls[1].receivers = None
    desk.restart(rank, *pair)
    rank.returns()
    pair[0].hello(round=pair[0].inside())
    assert desk.round().listed == [member.id for member in pair]
    pair[1].hello(round=pair[1].inside())
    for member in pair:
        member.stages(0, vote=True)
    for member in pair:
        member.commits()
    assert rank.outcome() is Outcome.COMMITTED
    assert rank.got(m.Opened)


def test_a_list_that_only_a_worker_that_committed_knows_is_restored(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    first.stages(0, vote=True)
    second.stages(0, vote=True)
    first.ran_commit()
    rank.calls[1].receivers = None
    desk.restart(rank, first, second)
    rank.returns()
    second.connected = False
    first.hello()
    desk.wait(11)
    assert rank.outcome() is Outcome.MIXED
    assert rank.fate(second) in (Fate.UNKNOWN, Fate.STUCK)


def test_a_round_that_a_worker_knows_waits_for_its_trainer(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member)
    member.hello(round=member.inside())
    assert desk.round().state is RoundState.RESTORING
    assert desk.round().version == 1
    rank.returns()
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_round_whose_list_nobody_knows_waits_and_silent_agents_keep_its_batches(
    desk: Desk,
) -> None:
    rank, member = staging(desk)
    rank.calls[1].receivers = None
    desk.restart(rank, member)
    member.connected = False
    rank.returns()
    desk.wait(11)
    assert desk.round().state is RoundState.OPENING
    desk.wait(61)
    # The silent one may have been told to commit it.
    assert rank.outcome() is Outcome.UNRESOLVED
    assert rank.released() == []
    member.gone()
    assert rank.released() == [0]


# ---------------------------------------------------------------- after the window


def test_a_trainer_that_announces_its_round_late_is_told_what_became_of_it(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member)
    rank.connected = False
    member.hello(round=member.inside())
    desk.wait(11)
    assert member.last(m.Abort).code in (Code.UNRESOLVED, Code.TRAINER_LOST)
    member.drains()
    rank.returns()
    assert rank.outcome() in (Outcome.UNRESOLVED, Outcome.FAILED)
    assert set(rank.released()) == {0}


def test_a_round_that_a_trainer_alone_announces_after_the_window_is_worked_out(
    desk: Desk,
) -> None:
    rank, member = staging(desk)
    desk.restart()
    rank.returns()
    assert rank.outcome() is Outcome.UNRESOLVED
    assert rank.released() == []
    member.forget()
    member.hello(round=member.inside())
    assert member.kinds() == [m.Welcome, m.Expelled]
    member.drains()
    assert rank.released() == [0]


def test_a_worker_in_a_round_that_nobody_else_knows_is_told_to_abort(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart()
    member.forget()
    member.hello(round=member.inside())
    assert member.kinds() == [m.Welcome, m.Abort]
    assert member.last(m.Abort).code is Code.NO_ROUND
    assert rank.call == 1


def test_messages_carry_the_new_brokers_epoch(desk: Desk) -> None:
    member = desk.worker("a")
    before = member.last(m.Welcome).epoch
    desk.restart(member)
    member.hello()
    assert member.last(m.Welcome).epoch != before


# ---------------------------------------------------------------- mappings and versions


def test_mappings_are_restored_from_the_workers(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    member.takes(rank, 1)
    desk.restart(rank, member)
    rank.returns()
    member.hello(mappings=[Taken(rank.instance, [1])])
    rank.retire(1)
    assert member.last(m.Unmap).buffers == [1]
    assert rank.got(m.Retired) == []
    member.unmaps(rank, 1)
    assert rank.last(m.Retired).buffers == [1]


def test_nothing_is_retired_while_the_broker_listens(desk: Desk) -> None:
    rank, member, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.offer(1)
    member.takes(rank, 1)
    desk.restart(rank, member, other)
    rank.returns()
    rank.retire(1)
    assert rank.got(m.Retired) == []
    member.hello(mappings=[Taken(rank.instance, [1])])
    assert member.last(m.Unmap).buffers == [1]
    member.unmaps(rank, 1)
    assert rank.got(m.Retired) == []
    other.hello()
    assert rank.last(m.Retired).buffers == [1]


def test_memory_of_a_trainer_that_did_not_return_is_given_back_after_the_window(
    desk: Desk,
) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    member.takes(rank, 1)
    desk.restart(rank, member)
    member.hello(mappings=[Taken(rank.instance, [1])])
    assert member.got(m.TrainerGone) == []
    rank.gone()
    assert member.last(m.TrainerGone).trainer == rank.instance


def test_the_last_version_is_learned_from_the_workers(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a", version=7)
    desk.restart(rank, member)
    member.hello()
    rank.returns()
    assert rank.last(m.Welcome).last_version == 7


def test_the_last_version_is_learned_from_what_a_trainer_was_told(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(5)
    member.serves()
    desk.restart(rank)
    rank.returns()
    assert desk.channel().last_version == 5


def test_calls_are_counted_on_after_a_restart(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.serves()
    desk.restart(rank, member)
    member.hello()
    rank.returns()
    assert rank.last(m.Welcome).last_call == 1
    rank.publish(2)
    assert rank.call == 2
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED
