"""Two channels on one engine: rounds queue first come, first served, for each process."""

from __future__ import annotations

from tensorlease.broker.ledger.state import RoundState
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Fate, Outcome

from .harness import Desk, Member, Rank

PID = 4711


def engine_of_two(desk: Desk) -> tuple[Rank, Member, Rank, Member]:
    """A policy and a critic that live in one process."""
    return (
        desk.trainer(channel="policy"),
        desk.worker("a", channel="policy", pid=PID),
        desk.trainer(channel="critic"),
        desk.worker("a", channel="critic", pid=PID),
    )


def test_channels_of_different_processes_do_not_wait_for_each_other(desk: Desk) -> None:
    policy, critic = desk.trainer(channel="policy"), desk.trainer(channel="critic")
    desk.worker("a", channel="policy")
    other = desk.worker("a", channel="critic")
    policy.open(1)
    critic.publish(1)
    other.serves()
    assert critic.outcome() is Outcome.COMMITTED


def test_a_round_waits_for_processes_that_are_busy_with_another(desk: Desk) -> None:
    policy, actor, critic, judge = engine_of_two(desk)
    policy.publish(1)
    critic.publish(1)
    assert judge.got(m.Prepare) == []
    actor.stages(0, vote=True)
    assert judge.got(m.Prepare) == []
    actor.commits()
    assert judge.got(m.Prepare)
    judge.serves()
    assert critic.outcome() is Outcome.COMMITTED


def test_a_process_that_drains_an_ended_round_is_busy_still(desk: Desk) -> None:
    policy, actor, critic, judge = engine_of_two(desk)
    policy.publish(1)
    critic.publish(1)
    policy.void()
    assert policy.finished()
    assert judge.got(m.Prepare) == []
    actor.drains()
    assert judge.got(m.Prepare)


def test_who_still_reads_an_ended_round_is_said_to_do_so(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    rank.void()
    rank.open(2, open_s=5)
    desk.wait(6)
    assert "replica a: still reading version 1 (call 1)" in rank.result().reason
    assert member.got(m.Prepare)[-1].terms.version == 1


def test_a_dead_worker_keeps_no_process_busy(desk: Desk) -> None:
    policy, actor, critic, judge = engine_of_two(desk)
    other = desk.worker("b", channel="policy")
    policy.publish(1)
    critic.publish(1)
    other.stages(0, vote=True)
    actor.gone()
    assert judge.got(m.Prepare)


def test_a_later_round_does_not_overtake_on_the_processes_of_a_waiting_one(desk: Desk) -> None:
    policy, actor, critic, judge = engine_of_two(desk)
    # The waiting round needs two processes, one of which is free: it is kept for it.
    free = desk.worker("b", channel="critic", pid=99)
    third, last = desk.trainer(channel="reward"), desk.worker("a", channel="reward", pid=99)
    policy.publish(1)
    critic.publish(1)
    third.publish(1)
    assert [x.got(m.Prepare) for x in (judge, free, last)] == [[], [], []]
    actor.serves()
    assert judge.got(m.Prepare) and free.got(m.Prepare)
    assert last.got(m.Prepare) == []
    judge.stages(0, vote=True)
    free.stages(0, vote=True)
    judge.commits()
    free.commits()
    assert last.got(m.Prepare)


def test_two_channels_on_two_engines_do_not_deadlock(desk: Desk) -> None:
    ranks = [desk.trainer(channel=channel) for channel in ("policy", "critic")]
    members = [
        [desk.worker(f"r{n}", channel=channel, pid=50 + n) for n in (0, 1)]
        for channel in ("policy", "critic")
    ]
    for rank in ranks:
        rank.publish(1)
    for rank, pair in zip(ranks, members, strict=True):
        for member in pair:
            member.stages(0, vote=True)
        for member in pair:
            member.commits()
        assert rank.outcome() is Outcome.COMMITTED


def test_at_the_open_limit_a_round_goes_with_who_is_free(desk: Desk) -> None:
    policy, actor, critic, judge = engine_of_two(desk)
    free = desk.worker("b", channel="critic")
    policy.publish(1)
    actor.stages(0)
    critic.open(1, open_s=10)
    critic.batch(0, total=1)
    desk.wait(11)
    assert free.got(m.Prepare)
    free.serves()
    assert critic.outcome() is Outcome.MIXED
    unserved = critic.result().replicas[1]
    assert (unserved.replica, unserved.fate) == ("a", Fate.UNSERVED)
    assert judge.got(m.Prepare) == []


def test_at_the_open_limit_a_round_whose_replicas_are_all_busy_fails_and_says_so(
    desk: Desk,
) -> None:
    policy, actor, critic, _ = engine_of_two(desk)
    policy.publish(1)
    actor.readies()
    critic.open(1, open_s=5)
    desk.wait(6)
    assert critic.outcome() is Outcome.FAILED
    assert "its processes are busy with another round" in critic.result().reason
    assert desk.round(1, channel="policy").state is RoundState.STAGING


def test_a_round_that_waits_for_more_replicas_keeps_nobody_from_working(desk: Desk) -> None:
    policy, _, critic, judge = engine_of_two(desk)
    policy.publish(1, min_replicas=2)
    critic.publish(1)
    judge.serves()
    assert critic.outcome() is Outcome.COMMITTED
