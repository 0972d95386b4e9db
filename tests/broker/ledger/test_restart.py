"""A new broker knows nothing: it listens, and goes on with what the agents announce."""

from __future__ import annotations

from msgspec.structs import replace

from tensorlease.broker.ledger import NOBODY
from tensorlease.broker.ledger import effects as fx
from tensorlease.broker.ledger.state import LeaseState, RoundState
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Fate, Outcome

from .harness import Desk, Member, Rank


def listening(desk: Desk) -> bool:
    return desk.ledger.state.recovering_until is not None


def staging(desk: Desk) -> tuple[Rank, Member]:
    """A round of one batch that its one receiver has prepared for."""
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.readies()
    return rank, member


# ---------------------------------------------------------------- the window


def test_a_broker_that_expects_nobody_does_not_listen(desk: Desk) -> None:
    desk.restart()
    assert not listening(desk)


def test_the_window_closes_when_everyone_expected_has_announced_itself(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    desk.restart(rank, member)
    rank.returns()
    assert listening(desk)
    member.hello()
    assert not listening(desk)


def test_the_window_closes_at_the_recovery_limit(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    desk.restart(rank, member)
    member.connected = False
    rank.returns()
    desk.wait(9)
    assert listening(desk)
    desk.wait(2)
    assert not listening(desk)


def test_the_window_closes_when_the_last_expected_is_found_gone(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    desk.restart(rank, member)
    rank.returns()
    member.gone()
    assert not listening(desk)


def test_whose_death_is_settled_within_the_window_is_lost_and_the_round_goes_on(
    desk: Desk,
) -> None:
    rank, dead, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    dead.stages(0)
    other.readies()
    dead.connected = False
    desk.restart(rank, dead, other)
    rank.returns()
    other.hello(round=other.inside())
    # Everyone else was quicker than the proof of its death.
    assert listening(desk) and not rank.finished()
    desk.wait(1.25)
    dead.gone()
    assert not listening(desk)
    other.serves()
    assert rank.outcome() is Outcome.MIXED
    assert [rank.fate(dead), rank.fate(other)] == [Fate.LOST, Fate.COMMITTED]


def test_an_expected_agent_that_is_refused_is_waited_for_no_longer(desk: Desk) -> None:
    member = desk.worker("a")
    desk.restart(member)
    member.greet(replace(member.hello_message(), protocol=(7, 7)))
    assert member.last(m.Refused).code is Code.BAD_VERSION
    assert not listening(desk)


def test_agents_without_locks_are_listened_for_to_the_limit(desk: Desk) -> None:
    rank = desk.trainer()
    desk.restart(rank, recover=True)
    rank.returns()
    assert listening(desk)
    assert desk.ledger.state.expected == {NOBODY}
    desk.wait(11)
    assert not listening(desk)


def test_a_new_run_that_comes_while_the_broker_listens_is_told_to_come_again(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member)
    other = desk.trainer(group="next")
    assert (other.last(m.Refused).code, other.last(m.Refused).retry) == (Code.BUSY, True)
    rank.returns()
    assert rank.got(m.Welcome)


def test_nothing_is_admitted_while_the_broker_listens(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    desk.restart(rank, member, "f" * 16)
    rank.returns()
    member.hello()
    rank.publish(1)
    desk.wait(9)
    assert member.got(m.Prepare) == []
    desk.wait(2)
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_nothing_is_released_or_decided_while_the_broker_listens(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member, "f" * 16)
    rank.returns()
    member.hello(round=member.inside())
    member.stages(0, vote=True)
    assert rank.released() == []
    assert member.got(m.Commit) == []
    desk.wait(11)
    assert rank.released() == [0]
    assert member.got(m.Commit)


def test_a_void_is_answered_when_the_window_is_closed(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member)
    rank.returns()
    rank.void()
    assert rank.got(m.Voided) == []
    member.hello(round=member.inside())
    assert rank.last(m.Voided).decided is False
    assert rank.outcome() is Outcome.FAILED
    assert member.last(m.Abort).code is Code.VOID


def test_a_void_of_a_round_that_is_not_admitted_is_answered_when_the_window_is_closed(
    desk: Desk,
) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    desk.restart(rank, member)
    rank.returns()
    rank.publish(1)
    rank.void()
    assert rank.got(m.Voided) == []
    member.hello()
    assert rank.last(m.Voided).decided is False
    assert rank.outcome() is Outcome.FAILED
    assert rank.released() == [0]


# ---------------------------------------------------------------- rounds that go on


def test_a_round_goes_on_where_it_was(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1, batches=2)
    pair[0].stages(0)
    for agent in (rank, *pair):
        agent.forget()
    desk.restart(rank, *pair)
    rank.returns()
    pair[0].hello(round=pair[0].inside((0, 0)))
    pair[1].hello(round=pair[1].inside())
    assert desk.round().state is RoundState.STAGING
    assert [d.seq for d in pair[0].got(m.Deliver)] == [1]
    assert [d.seq for d in pair[1].got(m.Deliver)] == [0, 1]
    assert [member.last(m.Total).total for member in pair] == [2, 2]
    pair[0].stages(1, vote=True)
    pair[1].stages(0, 1, vote=True)
    for member in pair:
        member.commits()
    assert sorted(rank.released()) == [0, 1]
    assert rank.outcome() is Outcome.COMMITTED


def test_a_batch_whose_body_comes_after_the_window_is_sent_again_then(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member)
    member.hello(round=member.inside())
    rank.hello()
    assert desk.round().state is RoundState.STAGING
    member.forget()
    rank.batch(0, total=1)
    assert [d.seq for d in member.got(m.Deliver)] == [0]
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_lost_staged_is_announced(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member)
    member.hello(round=member.inside((0, 0)))
    rank.returns()
    assert set(rank.released()) == {0}


def test_a_lost_vote_is_announced(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member)
    member.hello(round=member.inside((0, 0), voted=True))
    rank.returns()
    assert member.got(m.Commit)
    member.commits()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_vote_of_who_announced_itself_before_the_trainer_counts(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.restart(rank, member)
    member.hello(round=member.inside())
    member.stages(0)
    member.votes()
    rank.returns()
    assert member.got(m.Commit)


def test_a_lost_release_is_repeated(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(0)
    rank.connected = False
    desk.ledger.session_lost(rank.instance, desk.now)
    member.stages(0)
    assert rank.released() == []
    desk.restart(rank, member)
    rank.returns()
    member.hello(round=member.inside((0, 0)))
    assert rank.released() == [0]


def test_a_released_batch_is_not_asked_for_again(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(0)
    member.stages(0)
    member.forget()
    desk.restart(rank, member)
    rank.returns()
    member.hello(round=member.inside((0, 0)))
    assert desk.round().leases[0, 0].state is LeaseState.RELEASED
    rank.batch(1, total=2)
    assert [(d.seq, d.total) for d in member.got(m.Deliver)] == [(1, 2)]
    member.serves([1])
    assert rank.outcome() is Outcome.COMMITTED


def test_ranks_announce_themselves_one_by_one(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.publish(1)
    second.publish(1)
    member.stages(0, rank=0)
    desk.restart(first, second, member)
    second.returns()
    member.hello(round=member.inside((0, 0)))
    assert desk.round().state is RoundState.RESTORING
    first.returns()
    member.stages(0, rank=1, vote=True)
    member.commits()
    assert (first.outcome(), second.outcome()) == (Outcome.COMMITTED, Outcome.COMMITTED)


def test_a_round_that_was_not_admitted_is_opened_again(desk: Desk) -> None:
    rank = desk.trainer()
    rank.publish(1)
    desk.restart(rank)
    rank.returns()
    assert desk.round().state is RoundState.OPENING
    member = desk.worker("a")
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_worker_that_had_not_begun_gets_all_of_the_round(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.forget()
    desk.restart(rank, member)
    rank.returns()
    # Prepare was lost with the broker: it knows of no round.
    member.hello()
    assert [type(x) for x in member.heard][:3] == [m.Welcome, m.Prepare, m.Deliver]
    member.serves()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_restored_round_is_not_failed_by_a_smaller_window(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1, batches=3)
    desk.settings = replace(desk.settings, window=1)
    desk.restart(rank, member)
    rank.returns()
    member.hello(round=member.inside())
    member.serves([0, 1, 2])
    assert rank.outcome() is Outcome.COMMITTED


def test_the_receivers_are_watched_before_they_announce_themselves(desk: Desk) -> None:
    rank, member = staging(desk)
    desk.asked.clear()
    desk.restart(rank, member)
    rank.returns()
    assert fx.Watch(member.instance, member.processes, False) in desk.asked
