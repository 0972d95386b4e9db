"""Draining, and silent but living receivers that keep a lease: named, bounded, never released."""

from __future__ import annotations

from msgspec.structs import replace

from tensorlease.broker.ledger import Settings
from tensorlease.broker.ledger import effects as fx
from tensorlease.broker.ledger.state import LeaseState, ReceiverState
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Fate, Holder, Outcome

from .harness import Desk, Member, Rank


def stuck_one(desk: Desk) -> tuple[Rank, Member, Member]:
    """A round of two replicas of which one has fallen silent and was put out."""
    rank, silent, other = desk.trainer(), desk.worker("a", pid=4711), desk.worker("b")
    rank.open(1)
    rank.batch(0)
    other.stages(0)
    silent.readies()
    desk.wait(31, silent=[silent])
    return rank, silent, other


def test_a_silent_holder_is_named_to_the_trainer_and_keeps_the_lease(desk: Desk) -> None:
    rank, silent, _ = stuck_one(desk)
    stuck = rank.last(m.Stuck)
    assert (stuck.call, stuck.seq) == (1, 0)
    assert stuck.holders == [Holder(silent.instance, "a", 0, 4711)]
    assert rank.released() == []
    assert desk.round().leases[0, 0].state is LeaseState.STUCK


def test_the_round_goes_on_without_the_silent_one_and_names_it(desk: Desk) -> None:
    rank, silent, other = stuck_one(desk)
    rank.batch(1, total=2)
    other.serves([1])
    assert rank.outcome() is Outcome.MIXED
    assert [rank.fate(silent), rank.fate(other)] == [Fate.STUCK, Fate.COMMITTED]
    assert rank.result().replicas[0].fate is Fate.STUCK
    assert rank.released() == [1]


def test_the_log_says_who_keeps_its_leases_though_it_is_silent(desk: Desk) -> None:
    stuck_one(desk)
    texts = [report.text for report in desk.requests(fx.Report)]
    assert any("a/0 (pid 4711) is silent and keeps its leases: stuck until" in t for t in texts)


def test_a_stuck_lease_does_not_count_in_the_window(desk: Desk) -> None:
    desk.configure(Settings(window=1))
    rank, _, other = stuck_one(desk)
    rank.batch(1)
    other.stages(1)
    rank.batch(2, total=3)
    other.serves([2])
    assert rank.outcome() is Outcome.MIXED


def test_a_stuck_lease_comes_back_when_its_holder_is_gone(desk: Desk) -> None:
    rank, silent, _ = stuck_one(desk)
    silent.gone()
    assert rank.released() == [0]


def test_a_stuck_lease_comes_back_when_its_holder_wakes_and_drains(desk: Desk) -> None:
    rank, silent, _ = stuck_one(desk)
    assert silent.got(m.Expelled)
    silent.drains()
    assert rank.released() == [0]
    assert desk.receiver(silent).stuck is False


def test_a_living_worker_that_does_not_drain_is_stuck(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    rank.void()
    desk.wait(9)
    assert rank.got(m.Stuck) == []
    desk.wait(2)
    assert rank.last(m.Stuck).holders[0].instance == member.instance
    assert desk.receiver(member).state is ReceiverState.DRAINING
    member.drains()
    assert rank.released() == [0]


def test_a_lease_that_others_still_read_is_not_stuck_yet(desk: Desk) -> None:
    rank, silent, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    silent.readies()
    other.readies()
    desk.wait(20, silent=[silent])
    other.progress += 1
    desk.wait(20, silent=[silent])
    assert desk.receiver(silent).stuck is True
    assert rank.got(m.Stuck) == []
    other.stages(0, vote=True)
    assert len(rank.got(m.Stuck)) == 1


def test_a_worker_that_holds_nothing_is_out_and_not_stuck(desk: Desk) -> None:
    rank, silent = desk.trainer(), desk.worker("a")
    rank.open(1)
    desk.wait(80, silent=[silent])
    assert rank.fate(silent) is Fate.EXPELLED
    assert rank.got(m.Stuck) == []


def test_configuration_may_kill_who_is_stuck(desk: Desk) -> None:
    desk.configure(Settings(kill_stuck=True))
    _, silent, _ = stuck_one(desk)
    assert desk.requests(fx.Kill) == [fx.Kill(silent.instance)]


def test_nobody_is_killed_by_default(desk: Desk) -> None:
    stuck_one(desk)
    assert desk.requests(fx.Kill) == []


def test_a_trainer_that_returns_is_told_again_what_is_stuck(desk: Desk) -> None:
    rank, _, _ = stuck_one(desk)
    rank.forget()
    rank.drop()
    rank.returns()
    assert [stuck.seq for stuck in rank.got(m.Stuck)] == [0]
    assert rank.released() == []


def test_a_trainer_that_returns_is_told_again_what_was_released(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(0)
    rank.drop()
    member.stages(0)
    assert rank.released() == []
    rank.hello()
    assert rank.released() == [0]


def test_a_stuck_receiver_that_says_hello_drains_by_that(desk: Desk) -> None:
    rank, silent, _ = stuck_one(desk)
    silent.hello()
    assert rank.released() == [0]


def test_a_stuck_receiver_that_returns_inside_the_round_is_told_that_it_is_out(desk: Desk) -> None:
    rank, silent, _ = stuck_one(desk)
    silent.forget()
    silent.hello(round=silent.inside())
    assert silent.kinds() == [m.Welcome, m.Expelled]
    assert rank.released() == []
    silent.drains()
    assert rank.released() == [0]


def test_the_drain_limit_is_the_brokers(desk: Desk) -> None:
    durations = replace(desk.settings.durations, drain_s=2.0)
    desk.configure(replace(desk.settings, durations=durations))
    rank = desk.trainer()
    desk.worker("a")
    rank.publish(1)
    rank.void()
    desk.wait(3)
    assert rank.got(m.Stuck)


def test_a_trainers_death_ends_what_was_stuck(desk: Desk) -> None:
    rank, silent, other = stuck_one(desk)
    rank.gone()
    assert desk.round().leases[0, 0].state is LeaseState.RELEASED
    for member in (silent, other):
        member.drains()
    assert desk.forgotten()
