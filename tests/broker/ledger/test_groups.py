"""The trainers of a channel: who holds it, and which calls and versions they may open."""

from __future__ import annotations

from tensorlease.broker.ledger.state import RoundState
from tensorlease.protocol import codec
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Outcome

from .harness import ASSEMBLED, COLOCATED, Desk, Rank


def refusal(rank: Rank) -> m.Refused:
    return rank.last(m.Refused)


def test_the_first_trainer_names_the_group(desk: Desk) -> None:
    first, second = desk.trainer(0, 2, group=""), desk.trainer(1, 2, group="")
    name = first.last(m.Welcome).group
    assert name
    assert second.last(m.Welcome).group == name


def test_another_group_is_refused_with_the_holders_name(desk: Desk) -> None:
    desk.trainer(group="run", pid=4711)
    other = desk.trainer(group="intruder")
    assert (refusal(other).code, refusal(other).retry) == (Code.FOREIGN_GROUP, True)
    assert "group run#" in refusal(other).text
    assert "pid 4711" in refusal(other).text


def test_runs_of_one_name_are_groups_of_their_own(desk: Desk) -> None:
    first = desk.trainer(group="run")
    first.leave()
    second = desk.trainer(group="run")
    assert first.group != second.group
    assert second.group.startswith("run#")


def test_a_name_as_long_as_names_may_be_still_fits_with_what_the_broker_adds(desk: Desk) -> None:
    first, second = desk.trainer(0, 2, group="n" * 128), desk.trainer(1, 2, group="n" * 128)
    for rank in (first, second):
        frame = codec.encode(rank.last(m.Welcome))
        assert codec.decode_from_broker(frame) == rank.last(m.Welcome)


def test_a_rank_that_returns_names_the_group_as_the_broker_did(desk: Desk) -> None:
    rank = desk.trainer(group="run")
    named = rank.group
    rank.drop()
    rank.hello()
    assert rank.group == named


def test_another_group_of_another_channel_is_welcome(desk: Desk) -> None:
    desk.trainer(group="run")
    assert desk.trainer(group="other", channel="critic").got(m.Welcome)


def test_another_group_may_come_when_all_ranks_of_the_old_one_left(desk: Desk) -> None:
    first, second = desk.trainer(0, 2), desk.trainer(1, 2)
    first.leave()
    assert refusal(desk.trainer(0, 2, group="next")).code is Code.FOREIGN_GROUP
    second.gone()
    assert desk.trainer(0, 2, group="next").group.startswith("next#")


def test_a_silent_trainer_still_holds_its_channel(desk: Desk) -> None:
    rank = desk.trainer()
    desk.wait(60, silent=[rank])
    assert refusal(desk.trainer(group="next")).code is Code.FOREIGN_GROUP


def test_a_taken_rank_is_refused_with_the_holders_pid(desk: Desk) -> None:
    desk.trainer(0, 2, pid=4711)
    second = desk.trainer(0, 2)
    assert (refusal(second).code, refusal(second).retry) == (Code.RANK_TAKEN, True)
    assert "pid 4711" in refusal(second).text


def test_a_refused_place_comes_with_the_ways_out(desk: Desk) -> None:
    desk.trainer(pid=4711)
    text = refusal(desk.trainer()).text
    assert "rank=0, world_size=1" in text
    assert "different channels" in text
    foreign = refusal(desk.trainer(group="next"))
    assert foreign.code is Code.FOREIGN_GROUP
    assert "(rank 0: pid 4711): end these processes, or take another channel" in foreign.text
    other = refusal(desk.trainer(1, 4))
    assert other.code is Code.WORLD_SIZE
    assert (
        "(rank 0: pid 4711): give all ranks of channel 'policy' the same world_size=" in other.text
    )
    beyond = refusal(desk.trainer(2, 2))
    assert beyond.text == "rank 2 of 2 on channel 'policy': ranks go from 0 to 1"


def test_a_rank_beyond_the_world_size_is_refused(desk: Desk) -> None:
    assert refusal(desk.trainer(2, 2)).code is Code.WORLD_SIZE


def test_a_rank_of_another_world_size_is_refused(desk: Desk) -> None:
    desk.trainer(0, 2)
    other = desk.trainer(1, 4)
    assert refusal(other).code is Code.WORLD_SIZE
    assert "world size 4; group run#00000001 has 2" in refusal(other).text


def test_a_rank_of_another_distribution_is_refused(desk: Desk) -> None:
    desk.trainer(0, 2, distribution=ASSEMBLED)
    other = desk.trainer(1, 2, distribution=COLOCATED)
    assert refusal(other).code is Code.DISTRIBUTION
    assert "colocated; group run#00000001 is assembled" in refusal(other).text


def test_a_rank_that_restarts_alone_rejoins_and_hears_the_last_call(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.open(5)
    second.open(5)
    first.close(0)
    second.batch(0, total=1)
    member.serves(rank=1)
    second.gone()
    again = desk.trainer(1, 2)
    welcome = again.last(m.Welcome)
    assert (welcome.group, welcome.last_call, welcome.last_version) == (first.group, 1, 5)


def test_a_call_that_is_over_is_refused_with_the_last_one(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.serves()
    rank.open(2)
    rank.batch(0, total=1)
    member.serves()
    rank.open(3, call=1)
    refused = rank.last(m.OpenRefused)
    assert (refused.code, refused.last_call, refused.last_version) == (Code.CALL_ENDED, 2, 2)


def test_a_call_that_leaves_one_out_is_refused(desk: Desk) -> None:
    rank = desk.trainer()
    rank.open(1, call=2)
    refused = rank.last(m.OpenRefused)
    assert (refused.code, refused.call, refused.last_call) == (Code.CALL_GAP, 2, 0)


def test_a_version_below_the_channels_last_is_refused_with_what_would_do(desk: Desk) -> None:
    rank = desk.trainer()
    desk.worker("a", version=7)
    rank.open(6)
    refused = rank.last(m.OpenRefused)
    assert (refused.code, refused.last_version) == (Code.VERSION_NOT_RISING, 7)
    assert "publish 8 or higher" in refused.text


def test_a_retry_of_the_last_version_is_a_new_call(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(3)
    first.stages(0, vote=True)
    second.rejects()
    first.commits()
    assert rank.outcome() is Outcome.MIXED
    first.forget()
    rank.publish(3)
    assert rank.call == 2
    assert first.heard == []
    second.serves()
    assert rank.outcome() is Outcome.COMMITTED
    assert {r.replica for r in rank.result().replicas} == {"a", "b"}


def test_a_version_that_failed_everywhere_may_be_tried_again(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.rejects()
    assert rank.outcome() is Outcome.FAILED
    rank.publish(1)
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_the_round_waits_for_all_ranks(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.publish(1)
    assert member.got(m.Prepare) == []
    second.publish(1)
    assert member.got(m.Prepare)
    assert [d.rank for d in member.got(m.Deliver)] == [0, 1]


def test_ranks_that_opened_different_versions_are_all_refused_by_name(desk: Desk) -> None:
    first, second = desk.trainer(0, 2), desk.trainer(1, 2)
    first.open(1)
    second.open(2)
    for rank in (first, second):
        assert rank.outcome() is Outcome.FAILED
        assert "rank 1 opened 2, rank 0 opened 1" in rank.result().reason


def test_ranks_that_opened_different_terms_are_all_refused(desk: Desk) -> None:
    first, second = desk.trainer(0, 2), desk.trainer(1, 2)
    desk.worker("a")
    first.open(1, strict=True)
    second.open(1)
    assert first.result() == second.result()
    assert first.outcome() is Outcome.FAILED
    assert "strict=True" in first.result().reason


def test_a_repeated_open_is_harmless(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.open(1, call=1)
    rank.batch(0, total=1)
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_an_open_of_a_round_that_has_ended_is_answered_with_its_result(desk: Desk) -> None:
    first, second = desk.trainer(0, 2), desk.trainer(1, 2)
    first.open(1, open_s=5)
    desk.wait(6)
    assert first.outcome() is Outcome.FAILED
    second.forget()
    second.open(1, open_s=5)
    assert second.result() == first.result()


def test_a_batch_of_a_call_that_was_not_opened_is_refused(desk: Desk) -> None:
    rank = desk.trainer()
    rank.batch(0, call=1)
    refused = rank.last(m.OpenRefused)
    assert (refused.code, refused.call) == (Code.NO_ROUND, 1)


def test_a_batch_that_travels_behind_a_refused_open_is_refused_too(desk: Desk) -> None:
    rank = desk.trainer()
    desk.worker("a", version=7)
    rank.publish(1)
    assert [r.code for r in rank.got(m.OpenRefused)] == [Code.VERSION_NOT_RISING, Code.NO_ROUND]


def test_a_lost_rank_fails_the_round_before_its_decision(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.publish(1)
    second.open(1)
    second.gone()
    assert first.outcome() is Outcome.FAILED
    assert "trainer rank 1" in first.result().reason
    assert member.last(m.Abort).code is Code.TRAINER_LOST


def test_a_rank_that_leaves_fails_the_round_before_its_decision(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    rank.leave()
    assert member.last(m.Abort).code is Code.TRAINER_LEFT
    member.drains()
    assert desk.forgotten()


def test_a_lost_rank_fails_nothing_after_the_decision(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.open(1)
    first.close(0)
    second.publish(1)
    member.stages(0, rank=1, vote=True)
    assert desk.round().state is RoundState.COMMITTING
    second.gone()
    member.commits()
    assert first.outcome() is Outcome.COMMITTED


def test_a_rank_lost_before_all_ranks_opened_fails_the_waiting_round(desk: Desk) -> None:
    first, second = desk.trainer(0, 2), desk.trainer(1, 2)
    first.publish(1)
    first.gone()
    second.forget()
    second.publish(1)
    assert second.outcome() is Outcome.FAILED
    assert "trainer rank 0" in second.result().reason
