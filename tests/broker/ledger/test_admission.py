"""Opening and admission: which replicas a round gets, and when."""

from __future__ import annotations

from tensorlease.broker.ledger.state import LeaseState, RoundState
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Fate, Outcome

from .harness import ASSEMBLED, COLOCATED, Desk


def test_receivers_are_listed_with_their_processes_in_prepare_and_in_opened(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.open(1)
    opened = rank.last(m.Opened)
    assert opened.receivers == [member.id for member in pair]
    for member in pair:
        prepare = member.last(m.Prepare)
        assert prepare.receivers == opened.receivers
        assert (prepare.group, prepare.call) == (rank.group, 1)
        assert prepare.terms.version == 1


def test_admission_comes_before_prepare_and_prepare_before_the_batch(desk: Desk) -> None:
    rank = desk.trainer()
    rank.publish(1, batches=2)
    member = desk.worker("a")
    assert member.kinds() == [m.Welcome, m.Prepare, m.Deliver, m.Deliver, m.Total]
    assert [d.seq for d in member.got(m.Deliver)] == [0, 1]


def test_parked_batches_name_no_number_of_batches_before_all_of_them_are_out(desk: Desk) -> None:
    rank = desk.trainer()
    rank.publish(1, batches=2)
    member = desk.worker("a")
    assert [d.total for d in member.got(m.Deliver)] == [None, None]
    assert [t.total for t in member.got(m.Total)] == [2]


def test_a_worker_that_joins_later_is_no_receiver_of_an_admitted_round(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    late = desk.worker("b")
    rank.batch(0, total=1)
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED
    assert late.kinds() == [m.Welcome]


def test_a_late_joiner_is_served_by_a_round_of_its_own(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.serves()
    late = desk.worker("b")
    member.forget()
    rank.publish(1)
    late.serves()
    assert rank.outcome() is Outcome.COMMITTED
    assert member.heard == []


def test_only_complete_replicas_receive(desk: Desk) -> None:
    rank, half, whole = desk.trainer(), desk.worker("half", 0, 2), desk.worker("whole")
    rank.publish(1)
    whole.serves()
    assert rank.outcome() is Outcome.COMMITTED
    assert half.kinds() == [m.Welcome]


def test_a_silent_replica_is_no_receiver(desk: Desk) -> None:
    rank, silent, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    desk.wait(6, silent=[silent])
    rank.publish(1)
    other.serves()
    assert rank.outcome() is Outcome.COMMITTED
    assert silent.got(m.Prepare) == []


def test_a_round_waits_for_enough_replicas(desk: Desk) -> None:
    rank, first = desk.trainer(), desk.worker("a")
    rank.publish(1, min_replicas=2)
    assert first.got(m.Prepare) == []
    desk.worker("b")
    assert first.got(m.Prepare)
    assert len(rank.last(m.Opened).receivers) == 2


def test_too_few_replicas_at_the_open_limit_fail_the_round_naming_who_is_missing(
    desk: Desk,
) -> None:
    rank = desk.trainer()
    desk.worker("a", 0, 2)
    rank.publish(1)
    desk.wait(59)
    assert not rank.finished()
    desk.wait(2)
    assert rank.outcome() is Outcome.FAILED
    assert "0 of at least 1 replicas" in rank.result().reason
    assert "replica a waits for member 1 of 2" in rank.result().reason


def test_no_worker_at_the_open_limit_is_said(desk: Desk) -> None:
    rank = desk.trainer()
    rank.publish(1)
    desk.wait(61)
    assert "no worker has joined the channel" in rank.result().reason


def test_who_is_ready_when_too_few_are_is_named(desk: Desk) -> None:
    rank = desk.trainer()
    desk.worker("a")
    rank.publish(1, min_replicas=2)
    desk.wait(61)
    assert rank.result().reason == (
        "1 of at least 2 replicas was ready in time (a); no other has joined the channel"
    )


def test_who_has_the_version_already_counts_as_ready_and_is_no_reason(desk: Desk) -> None:
    rank = desk.trainer()
    desk.worker("a", version=3)
    desk.worker("b", 0, 2)
    rank.publish(3, min_replicas=2)
    desk.wait(61)
    assert rank.result().reason == (
        "1 of at least 2 replicas was ready in time (a has this version already);"
        " replica b waits for member 1 of 2"
    )


def test_the_open_limit_comes_with_open(desk: Desk) -> None:
    rank = desk.trainer()
    rank.open(1, open_s=3)
    desk.wait(2)
    assert not rank.finished()
    desk.wait(2)
    assert rank.outcome() is Outcome.FAILED


def test_a_rank_that_does_not_open_in_time_is_named(desk: Desk) -> None:
    first, second = desk.trainer(0, 2), desk.trainer(1, 2)
    first.publish(1)
    desk.wait(61)
    assert "rank 1 did not open call 1 in time" in first.result().reason
    assert second.result() == first.result()


def test_batches_before_admission_are_parked_and_come_back_if_the_round_ends_unopened(
    desk: Desk,
) -> None:
    rank = desk.trainer()
    rank.publish(1, batches=2)
    assert desk.round().leases[0, 0].state is LeaseState.PARKED
    assert rank.released() == []
    desk.wait(61)
    assert rank.released() == [0, 1]


def test_no_replica_asked_for_gives_empty_and_is_never_current(desk: Desk) -> None:
    rank = desk.trainer()
    rank.publish(5, min_replicas=0)
    assert rank.outcome() is Outcome.EMPTY
    assert rank.released() == [0]
    assert desk.channel().last_version == 0
    rank.publish(4, min_replicas=0)
    assert rank.outcome() is Outcome.EMPTY


def test_a_version_that_all_replicas_have_already_commits_at_once(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a", version=3)
    rank.publish(3)
    assert rank.outcome() is Outcome.COMMITTED
    assert rank.result().replicas[0].fate is Fate.COMMITTED
    assert rank.result().replicas[0].current == 3
    assert member.got(m.Prepare) == []


def test_a_torn_replica_gets_its_version_again(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a", version=3)
    member.torn = True
    member.hello()
    rank.publish(3)
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_replicas_that_have_the_version_count_as_enough(desk: Desk) -> None:
    rank, _, other = desk.trainer(), desk.worker("a", version=3), desk.worker("b")
    rank.publish(3, min_replicas=2)
    other.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_reconnecting_replica_is_waited_for(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    first.drop()
    rank.publish(1)
    assert second.got(m.Prepare) == []
    first.hello()
    assert first.got(m.Prepare) and second.got(m.Prepare)


def test_a_reconnecting_replica_that_falls_silent_is_not_waited_for(desk: Desk) -> None:
    rank, first, second = desk.trainer(), desk.worker("a"), desk.worker("b")
    first.drop()
    rank.publish(1)
    desk.wait(6)
    second.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_stopping_broker_admits_nothing_and_lets_rounds_under_way_end(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    assert desk.ledger.busy()
    desk.stop()
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED
    assert not desk.ledger.busy()
    rank.publish(2)
    assert desk.round(2).state is RoundState.OPENING
    assert member.key[1] == 1


def test_a_drained_broker_admits_the_rounds_that_wait_when_it_resumes(desk: Desk) -> None:
    rank = desk.trainer()
    member = desk.worker("a")
    desk.stop()
    rank.publish(1)
    assert desk.round(1).state is RoundState.OPENING
    desk.resume()
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_round_that_waits_on_a_stopping_broker_ends_at_the_open_limit(desk: Desk) -> None:
    rank = desk.trainer()
    desk.worker("a")
    desk.stop()
    rank.publish(1)
    desk.wait(61)
    assert rank.outcome() is Outcome.FAILED
    assert "admits no round any more" in rank.result().reason
    assert rank.released() == [0]


# ---------------------------------------------------------------- sources


def test_a_colocated_worker_without_a_trainer_on_its_device_is_not_served(desk: Desk) -> None:
    rank = desk.trainer(device="gpu-0")
    beside, elsewhere = desk.worker("a", device="gpu-0"), desk.worker("b", device="gpu-1")
    rank.publish(1)
    beside.serves()
    assert rank.outcome() is Outcome.MIXED
    unserved = rank.result().replicas[1]
    assert (unserved.replica, unserved.fate) == ("b", Fate.UNSERVED)
    assert unserved.reason.startswith("no-source: no trainer on device gpu-1")
    assert elsewhere.got(m.Prepare) == []


def test_a_colocated_worker_beside_two_trainers_is_not_served(desk: Desk) -> None:
    first, second = (desk.trainer(r, 2, distribution=COLOCATED) for r in (0, 1))
    desk.worker("a")
    first.open(1, open_s=1)
    second.open(1, open_s=1)
    desk.wait(2)
    assert first.outcome() is Outcome.FAILED
    assert "2 trainers on device cpu:0" in first.result().reason


def test_colocated_workers_get_the_batches_of_the_trainer_on_their_own_device(desk: Desk) -> None:
    ranks = [desk.trainer(r, 2, device=f"gpu-{r}", distribution=COLOCATED) for r in (0, 1)]
    members = [desk.worker("a", r, 2, device=f"gpu-{r}") for r in (0, 1)]
    for rank in ranks:
        rank.publish(1)
    for number, member in enumerate(members):
        assert [d.rank for d in member.got(m.Deliver)] == [number]
        member.stages(0, rank=number, vote=True)
    for member in members:
        member.commits()
    assert [rank.outcome() for rank in ranks] == [Outcome.COMMITTED] * 2


def test_a_trainer_that_no_worker_is_beside_has_no_receivers(desk: Desk) -> None:
    ranks = [desk.trainer(r, 2, device=f"gpu-{r}", distribution=COLOCATED) for r in (0, 1)]
    member = desk.worker("a", device="gpu-0")
    for rank in ranks:
        rank.publish(1)
    assert ranks[1].released() == [0]
    assert ranks[0].released() == []
    member.serves()
    assert ranks[1].outcome() is Outcome.COMMITTED


def test_an_assembled_worker_gets_the_ring_batches_of_every_rank(desk: Desk) -> None:
    ranks = [desk.trainer(r, 2, device=f"gpu-{r}") for r in (0, 1)]
    member = desk.worker("a", device="gpu-7")
    for rank in ranks:
        rank.publish(1)
    assert [(d.rank, d.seq) for d in member.got(m.Deliver)] == [(0, 0), (1, 0)]
    member.stages(0, rank=0)
    member.stages(0, rank=1, vote=True)
    member.commits()
    assert ranks[0].outcome() is Outcome.COMMITTED


def test_an_assembled_worker_on_another_host_is_not_served(desk: Desk) -> None:
    rank = desk.trainer(distribution=ASSEMBLED)
    desk.worker("a", host="elsewhere")
    rank.open(1, open_s=1)
    desk.wait(2)
    assert "another host" in rank.result().reason
    assert rank.result().replicas[0].fate is Fate.UNSERVED


def test_a_colocated_worker_on_the_same_device_of_another_host_is_not_served(desk: Desk) -> None:
    rank = desk.trainer()
    desk.worker("a", host="elsewhere")
    rank.open(1, open_s=1)
    desk.wait(2)
    assert rank.outcome() is Outcome.FAILED
    assert Code.NO_SOURCE in desk.codes


def test_a_round_waits_for_a_worker_that_has_yet_to_answer_an_offer(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1, 2)
    rank.open(1)
    assert member.got(m.Prepare) == []
    member.takes(rank, 1, 2)
    assert member.got(m.Prepare)


def test_an_offer_that_is_never_answered_is_named_at_the_open_limit(desk: Desk) -> None:
    rank = desk.trainer()
    desk.worker("a")
    rank.offer(1)
    rank.open(1)
    desk.wait(61)
    assert "replica a has yet to answer an offer" in rank.result().reason


def test_a_worker_that_misses_a_region_is_not_served_and_the_name_is_said(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    member.takes(rank, 1, complete=False)
    rank.open(1, open_s=1)
    desk.wait(2)
    assert rank.outcome() is Outcome.FAILED
    assert "finds no source: layers.0.weight" in rank.result().reason


def test_assembled_workers_must_find_all_regions_among_all_ranks(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.offer(1)
    second.offer(1)
    first.open(1)
    second.open(1)
    member.takes(first, 1)
    assert member.got(m.Prepare) == []
    member.takes(second, 1)
    assert member.got(m.Prepare)


# ---------------------------------------------------------------- subsets


def test_a_subset_round_goes_to_replicas_at_its_base_only(desk: Desk) -> None:
    rank = desk.trainer()
    at_base, behind = desk.worker("a", version=3), desk.worker("b", version=2)
    rank.open(4, base=3)
    rank.batch(0, total=1)
    assert at_base.last(m.Prepare).terms.subset
    at_base.serves()
    assert rank.outcome() is Outcome.MIXED
    reason = "not-at-base: at version 2, not 3: publish all tensors, or with base=2"
    assert rank.result().replicas[1].reason == reason
    assert behind.got(m.Prepare) == []


def test_a_subset_round_with_no_replica_at_its_base_fails_by_name(desk: Desk) -> None:
    rank = desk.trainer()
    desk.worker("a", version=2)
    rank.open(4, base=3, open_s=1)
    desk.wait(2)
    assert rank.outcome() is Outcome.FAILED
    assert "not-at-base" in rank.result().reason


def test_a_subset_whose_base_every_replica_has_left_behind_fails_at_once(desk: Desk) -> None:
    rank = desk.trainer()
    desk.worker("a", version=4)
    rank.open(5, base=3, open_s=50)
    assert rank.outcome() is Outcome.FAILED
    assert "publish all tensors, or with base=4" in rank.result().reason


def test_a_subset_waits_for_a_replica_that_is_not_complete(desk: Desk) -> None:
    rank = desk.trainer()
    desk.worker("a", version=4)
    desk.worker("b", 0, 2, version=3)
    rank.open(5, base=3, open_s=50)
    assert not rank.finished()
    desk.worker("b", 1, 2, version=3)
    assert rank.last(m.Opened).receivers


def test_a_torn_replica_is_at_no_base(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a", version=3)
    member.torn = True
    member.hello()
    rank.open(4, base=3, open_s=1)
    desk.wait(2)
    assert member.got(m.Prepare) == []
    assert rank.outcome() is Outcome.FAILED
