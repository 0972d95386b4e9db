"""The broker alone ends phases; each limit names who was late."""

from __future__ import annotations

from msgspec.structs import replace

from tensorlease.broker.ledger.state import ReceiverState, RoundState
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Fate, Outcome, Terms

from .harness import Desk, Rank


def ring_round(rank: Rank, stage_s: float) -> None:
    """Opens a round and sends two batches, more to come: as many as the ring has slots."""
    rank.call = 1
    rank.say(m.Open(rank.session, 1, Terms(1, stage_s=stage_s)))
    for seq in range(2):
        rank.batch(seq)


def test_nothing_is_due_while_nobody_is_there(desk: Desk) -> None:
    desk.feed(desk.ledger.tick(desk.now))
    assert desk.ledger.next_check == float("inf")


def test_who_is_not_ready_in_time_is_expelled_by_name(desk: Desk) -> None:
    rank, slow, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    other.stages(0, vote=True)
    desk.wait(59)
    assert slow.got(m.Expelled) == []
    desk.wait(2)
    assert slow.last(m.Expelled).code is Code.DEADLINE
    assert slow.last(m.Expelled).text == "was not ready in 60 s"
    other.commits()
    assert rank.outcome() is Outcome.MIXED
    assert rank.fate(slow) is Fate.EXPELLED


def test_who_stages_without_progress_is_expelled_by_name(desk: Desk) -> None:
    rank, slow, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    other.stages(0, vote=True)
    slow.readies()
    desk.wait(29)
    assert slow.got(m.Expelled) == []
    desk.wait(2)
    assert slow.last(m.Expelled).text == "made no progress for 30 s"


def test_the_members_of_who_was_late_are_told_too(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    pair[0].stages(0, vote=True)
    pair[1].readies()
    desk.wait(31)
    assert pair[1].got(m.Expelled)
    assert pair[0].last(m.Abort).code is Code.MEMBER_OUT
    assert rank.outcome() is Outcome.FAILED


def test_each_staged_batch_is_progress(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1, batches=4)
    for seq in range(3):
        desk.wait(25)
        member.stages(seq)
    desk.wait(25)
    member.serves([3])
    assert rank.outcome() is Outcome.COMMITTED


def test_a_beat_with_progress_is_progress(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.readies()
    for _ in range(4):
        member.progress += 1
        desk.wait(25)
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_beat_without_progress_is_none(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.readies()
    desk.wait(31)
    assert rank.outcome() is Outcome.FAILED


def test_a_receiver_that_has_nothing_to_do_is_not_late(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(0)
    member.stages(0)
    desk.wait(25)
    rank.batch(1)
    desk.wait(25)
    member.stages(1)
    rank.batch(2, total=3)
    desk.wait(25)
    member.serves([2])
    assert rank.outcome() is Outcome.COMMITTED


def test_who_staged_all_and_does_not_vote_is_late(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.stages(0)
    desk.wait(31)
    assert member.last(m.Expelled).code is Code.DEADLINE


def test_a_rank_that_sends_nothing_fails_the_round_by_name(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.publish(1)
    second.open(1)
    member.stages(0)
    desk.wait(31)
    assert first.outcome() is Outcome.FAILED
    assert first.result().reason == "rank 1 sent nothing for 30 s"
    assert member.last(m.Abort).code is Code.DEADLINE


def test_a_rank_has_its_full_time_from_the_last_release(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(0)
    member.readies()
    desk.wait(29)
    member.stages(0)
    desk.wait(20)
    rank.batch(1, total=2)
    member.serves([1])
    assert rank.outcome() is Outcome.COMMITTED


def test_a_rank_has_its_full_time_from_the_last_ready(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    desk.wait(50)
    member.readies()
    desk.wait(20)
    rank.batch(0, total=1)
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_rank_has_its_full_time_from_the_expulsion_that_made_room(desk: Desk) -> None:
    rank, silent, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.open(1)
    rank.batch(0)
    other.stages(0)
    silent.readies()
    desk.wait(31, silent=[silent])
    assert desk.receiver(silent).fate is Fate.EXPELLED
    desk.wait(20, silent=[silent])
    rank.batch(1, total=2)
    other.serves([1])
    assert rank.outcome() is Outcome.MIXED


def test_a_rank_that_waits_for_an_expelled_holder_to_drain_is_not_late(desk: Desk) -> None:
    rank, hung, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    ring_round(rank, stage_s=3)
    for seq in range(2):
        other.stages(seq)
    hung.stages(0)
    desk.wait(4)
    assert desk.receiver(hung).fate is Fate.EXPELLED
    # It beats, and has 10 s to drain: there is no slot for the rank to send from until then.
    desk.wait(8)
    assert desk.round().state is RoundState.STAGING and rank.got(m.Stuck) == []
    desk.wait(2)
    assert [holder.instance for holder in rank.last(m.Stuck).holders] == [hung.instance]
    desk.wait(1)
    rank.batch(2, total=3)
    other.serves([2])
    assert rank.outcome() is Outcome.MIXED
    assert [rank.fate(hung), rank.fate(other)] == [Fate.STUCK, Fate.COMMITTED]


def test_a_rank_is_late_from_when_what_it_waited_for_is_stuck(desk: Desk) -> None:
    rank, hung, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    ring_round(rank, stage_s=3)
    for seq in range(2):
        other.stages(seq)
    hung.readies()
    desk.wait(13.1)
    assert rank.got(m.Stuck)
    desk.wait(2.8)
    assert not rank.finished()
    desk.wait(0.2)
    assert rank.result().reason == "rank 0 sent nothing for 3 s"


def test_a_rank_is_late_from_when_what_it_waited_for_has_drained(desk: Desk) -> None:
    rank, hung, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    ring_round(rank, stage_s=3)
    for seq in range(2):
        other.stages(seq)
    hung.readies()
    desk.wait(5)
    hung.drains()
    assert rank.released() == [0, 1]
    desk.wait(2.9)
    assert not rank.finished()
    desk.wait(0.2)
    assert rank.result().reason == "rank 0 sent nothing for 3 s"


def test_a_rank_with_nothing_at_a_receiver_is_late_while_another_rank_that_closed_waits(
    desk: Desk,
) -> None:
    first, second = desk.trainer(0, 2), desk.trainer(1, 2)
    hung, other = desk.worker("a"), desk.worker("b")
    terms = Terms(1, stage_s=3)
    for rank in (first, second):
        rank.call = 1
        rank.say(m.Open(rank.session, 1, terms))
    first.batch(0, total=1)
    hung.readies()
    other.stages(0)
    desk.wait(3.1)
    assert desk.receiver(hung).fate is Fate.EXPELLED
    desk.wait(3)
    assert first.result().reason == "rank 1 sent nothing for 3 s"


def test_a_batch_that_comes_to_who_holds_one_is_no_progress_of_it(desk: Desk) -> None:
    rank, hung, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.open(1)
    rank.batch(0)
    other.stages(0)
    hung.readies()
    desk.wait(20)
    rank.batch(1)
    other.stages(1)
    desk.wait(9)
    rank.batch(2, total=3)
    other.stages(2, vote=True)
    assert hung.got(m.Expelled) == []
    desk.wait(2)
    assert hung.last(m.Expelled).text == "made no progress for 30 s"
    other.commits()
    assert rank.outcome() is Outcome.MIXED


def test_limits_that_came_with_open_hold_for_the_round(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    terms = Terms(1, prepare_s=5, stage_s=4, commit_s=3)
    rank.say(m.Open(rank.session, 1, terms))
    desk.wait(6)
    assert member.last(m.Expelled).text == "was not ready in 5 s"
    member.drains()
    rank.say(m.Open(rank.session, 2, terms))
    member.readies()
    rank.batch(0, call=2)
    desk.wait(5)
    assert member.last(m.Expelled).text == "made no progress for 4 s"
    member.drains()
    rank.say(m.Open(rank.session, 3, terms))
    rank.batch(0, total=1, call=3)
    member.stages(0, vote=True)
    desk.wait(4)
    assert rank.fate(member) is Fate.UNKNOWN


def test_a_silent_worker_is_named_as_silent(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    desk.wait(61, silent=[member])
    assert "was not ready in 60 s (silent)" in rank.result().reason


def test_a_stall_of_the_broker_expels_nobody_that_was_heard_before_the_check(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    desk.now += 25
    # It reads its input before it judges anyone.
    member.stages(0, vote=True)
    desk.feed(desk.ledger.tick(desk.now))
    assert desk.receiver(member).state is ReceiverState.COMMITTING
    assert desk.round().state is RoundState.COMMITTING


def test_an_earlier_check_is_made_due_by_what_arrives(desk: Desk) -> None:
    rank = desk.trainer()
    desk.feed(desk.ledger.tick(desk.now))
    before = desk.ledger.next_check
    rank.open(1, open_s=1)
    assert desk.ledger.next_check == desk.now + 1 < before


def test_the_brokers_durations_hold_where_open_names_none(desk: Desk) -> None:
    durations = replace(desk.settings.durations, open_s=2.0)
    desk.configure(replace(desk.settings, durations=durations))
    rank = desk.trainer()
    rank.open(1)
    desk.wait(3)
    assert rank.outcome() is Outcome.FAILED
