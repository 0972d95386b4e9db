"""Offers, takes, mappings and retirement: when a trainer may give memory itself back."""

from __future__ import annotations

from tensorlease.broker.ledger import Settings
from tensorlease.broker.ledger import effects as fx
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Outcome, Taken

from .harness import ASSEMBLED, COLOCATED, Desk


def test_an_offer_goes_to_every_worker_with_its_body(desk: Desk) -> None:
    rank, first = desk.trainer(), desk.worker("a")
    rank.offer(1, 2, body=b"handles")
    offered = first.last(m.Offered)
    assert (offered.trainer, offered.rank, offered.device) == (rank.instance, 0, "cpu:0")
    assert (offered.number, offered.buffers) == (0, [1, 2])
    assert first.bodies[-1] == b"handles"


def test_a_late_joiner_is_offered_what_is_living(desk: Desk) -> None:
    rank = desk.trainer()
    rank.offer(1, number=0)
    rank.offer(2, number=1)
    rank.retire(1)
    late = desk.worker("a")
    assert [offered.number for offered in late.got(m.Offered)] == [1]
    assert late.bodies[-1] == b"offer"


def test_a_repeated_offer_is_not_passed_on_again(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    rank.offer(1)
    assert len(member.got(m.Offered)) == 1


def test_a_worker_that_returns_is_offered_what_it_has_not_seen(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1, number=0)
    member.takes(rank, 1)
    member.drop()
    rank.offer(2, number=1)
    member.forget()
    member.hello(mappings=[Taken(rank.instance, [1])])
    assert [offered.number for offered in member.got(m.Offered)] == [1]


def test_a_colocated_worker_is_offered_what_is_on_its_own_device_only(desk: Desk) -> None:
    ranks = [desk.trainer(r, 2, device=f"gpu-{r}", distribution=COLOCATED) for r in (0, 1)]
    member = desk.worker("a", device="gpu-1")
    for rank in ranks:
        rank.offer(1)
    assert [offered.rank for offered in member.got(m.Offered)] == [1]


def test_an_assembled_worker_is_offered_what_every_rank_has(desk: Desk) -> None:
    ranks = [desk.trainer(r, 2, device=f"gpu-{r}", distribution=ASSEMBLED) for r in (0, 1)]
    member = desk.worker("a", device="gpu-1")
    for rank in ranks:
        rank.offer(1)
    assert [offered.rank for offered in member.got(m.Offered)] == [0, 1]


def test_offers_beyond_the_limit_end_the_session_by_name(desk: Desk) -> None:
    desk.configure(Settings(max_offer_bytes=10))
    rank = desk.trainer()
    rank.offer(1, number=0, body=b"12345")
    rank.offer(2, number=1, body=b"123456")
    refused = rank.last(m.Refused)
    assert (refused.code, refused.retry) == (Code.BROKER_FULL, False)
    assert "11 bytes; the broker's max-offer-bytes is 10" in refused.text
    assert desk.asked[-1] == fx.EndSession(rank.instance)


# ---------------------------------------------------------------- retirement


def test_a_buffer_is_retired_when_all_have_unmapped_it(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.offer(1, 2)
    rank.retire(1)
    for member in (first, second):
        assert member.last(m.Unmap).buffers == [1]
    first.unmaps(rank, 1)
    assert rank.got(m.Retired) == []
    second.unmaps(rank, 1)
    assert rank.last(m.Retired).buffers == [1]


def test_a_buffer_that_nobody_has_mapped_is_retired_at_once(desk: Desk) -> None:
    rank = desk.trainer()
    rank.offer(1)
    rank.retire(1)
    assert rank.last(m.Retired).buffers == [1]


def test_what_a_worker_gave_back_before_needs_no_unmap(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    member.unmaps(rank, 1)
    rank.retire(1)
    assert member.got(m.Unmap) == []
    assert rank.last(m.Retired).buffers == [1]


def test_a_leased_buffer_is_not_retired(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    member.takes(rank, 1)
    rank.open(1)
    rank.batch(0, buffers=[1], registered=True, total=1)
    rank.retire(1)
    refused = rank.last(m.RetireRefused)
    assert (refused.code, refused.buffers) == (Code.LEASED, [1])
    assert member.instance in refused.text
    member.stages(0, vote=True)
    rank.retire(1)
    assert member.got(m.Unmap)


def test_a_parked_buffer_is_not_retired(desk: Desk) -> None:
    rank = desk.trainer()
    rank.offer(1)
    rank.open(1)
    rank.batch(0, buffers=[1], registered=True)
    rank.retire(1)
    assert rank.last(m.RetireRefused).code is Code.LEASED
    assert "a round that waits" in rank.last(m.RetireRefused).text


def test_a_ring_buffer_is_mapped_by_whom_it_was_sent_to(desk: Desk) -> None:
    rank, member, other = desk.trainer(), desk.worker("a"), desk.worker("b", 0, 2)
    rank.publish(1)
    member.serves()
    rank.retire(0)
    assert rank.got(m.Retired) == []
    assert member.last(m.Unmap).buffers == [0]
    assert other.got(m.Unmap) == []
    member.unmaps(rank, 0)
    assert rank.last(m.Retired).buffers == [0]


def test_a_death_ends_a_mapping(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    rank.retire(1)
    member.gone()
    assert rank.last(m.Retired).buffers == [1]


def test_a_farewell_ends_a_mapping(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    rank.retire(1)
    member.leave()
    assert rank.last(m.Retired).buffers == [1]


def test_silence_ends_no_mapping(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    rank.retire(1)
    desk.wait(1000, silent=[member])
    assert rank.got(m.Retired) == []


def test_a_hello_ends_the_mappings_that_it_does_not_say(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    rank.retire(1)
    member.hello()
    assert rank.last(m.Retired).buffers == [1]


def test_a_hello_that_says_a_retiring_buffer_is_asked_to_unmap_it_again(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    member.drop()
    rank.retire(1)
    member.forget()
    member.hello(mappings=[Taken(rank.instance, [1])])
    assert member.last(m.Unmap).buffers == [1]
    assert rank.got(m.Retired) == []
    member.unmaps(rank, 1)
    assert rank.last(m.Retired).buffers == [1]


def test_an_unmapped_of_what_was_never_mapped_is_harmless(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    member.unmaps(rank, 9)
    rank.offer(1)
    member.unmaps(rank, 9)
    rank.retire(1)
    assert member.last(m.Unmap).buffers == [1]


# ---------------------------------------------------------------- trainers that are gone


def test_workers_are_told_of_a_dead_trainer_whose_memory_they_have_mapped(desk: Desk) -> None:
    rank, member, other = desk.trainer(), desk.worker("a"), desk.worker("b", device="cpu:1")
    rank.offer(1)
    rank.gone()
    assert member.last(m.TrainerGone).trainer == rank.instance
    assert other.got(m.TrainerGone) == []
    # What a silent living process pins stays counted.
    assert desk.ledger.state.mappings == {rank.instance: {1: {member.instance}}}
    member.unmaps(rank, 1)
    assert desk.ledger.state.mappings == {}


def test_workers_are_told_of_a_trainer_that_left(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    rank.leave()
    assert member.last(m.TrainerGone).trainer == rank.instance


def test_a_hello_that_says_memory_of_a_dead_trainer_is_told_again(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    rank.gone()
    member.drop()
    member.forget()
    member.hello(mappings=[Taken(rank.instance, [1])])
    assert member.last(m.TrainerGone).trainer == rank.instance


def test_a_rank_that_restarts_offers_its_own_buffers_anew(desk: Desk) -> None:
    first, member = desk.trainer(), desk.worker("a")
    first.offer(1)
    member.takes(first, 1)
    first.gone()
    second = desk.trainer()
    second.offer(1)
    second.open(1)
    assert member.got(m.Prepare) == []
    member.takes(second, 1)
    second.batch(0, buffers=[1], registered=True, total=1)
    member.serves()
    assert second.outcome() is Outcome.COMMITTED
    assert member.last(m.Deliver).trainer == second.instance
