"""Small worlds in which a promise breaks as soon as one rule of the ledger is taken away.

`make bite` takes each rule away in turn and runs these; docs/rules.md lists which belongs to which.
"""

from __future__ import annotations

from tensorlease.protocol.records import Outcome

from .parts import Shape
from .replay import follow, parse
from .search import explore
from .world import World


def walk(shape: Shape) -> int:
    """Visits every state of this world; returns how many there are."""
    return max(states for states, _, _ in explore(shape))


def go(shape: Shape, way: str) -> World:
    """Goes this way and then to the end of the world, every promise checked."""
    return follow(shape, parse(way))


def outcomes(world: World) -> list[Outcome]:
    """Returns what each rank was told of the first call."""
    return [app.results[1].outcome for app in world.trainers]


# ---------------------------------------------------------------- without a restart


def test_who_is_put_out_in_the_middle_of_a_copy_keeps_the_lease_until_it_is_done() -> None:
    assert walk(Shape("expelled", workers=1, expulsions=1)) > 60


def test_a_round_that_its_trainer_made_void_never_commits() -> None:
    assert walk(Shape("void", workers=1, voids=1)) > 100


def test_a_connection_lost_at_any_place_loses_no_answer_and_repeats_no_read() -> None:
    assert walk(Shape("dropped", workers=1, drops=1)) > 300


def test_a_round_without_its_least_replicas_fails_instead_of_committing_nothing() -> None:
    shape = Shape("nobody there", workers=1, worker_deaths=1)
    assert outcomes(go(shape, "kill worker 0, notice 1, publish 0")) == [Outcome.FAILED]


def test_what_is_read_for_a_relay_that_has_died_keeps_its_lease() -> None:
    assert walk(Shape("relay", workers=1, relays="named", worker_deaths=1)) > 200


def test_who_gets_batch_by_batch_commits_with_who_gets_all_at_once() -> None:
    world = go(
        Shape("one by one", batches=2),
        "publish 0, up 0, up 0, up 0, down 1, down 1, down 1, work 0, work 0, work 0, work 0, "
        "work 0, up 1, up 1, up 1, down 2, work 1, down 2, work 1, work 1",
    )
    assert outcomes(world) == [Outcome.COMMITTED]


def test_a_rank_that_was_away_when_the_round_ended_hears_what_the_others_heard() -> None:
    world = go(
        Shape("away", trainers=2, drops=1, worker_deaths=1),
        "publish 0, publish 1, up 0, up 0, up 1, up 1, drop 1, "
        "down 2, down 2, down 2, work 0, work 0, work 0, work 0, work 0, up 2, up 2, "
        "down 3, down 3, down 3, work 1, work 1, work 1, work 1, work 1, up 3, up 3, "
        "down 2, work 0, up 2, down 3, work 1, up 3, kill worker 0, notice 2",
    )
    assert outcomes(world) == [Outcome.COMMITTED] * 2


# ---------------------------------------------------------------- the broker dies


def test_what_a_dead_broker_sent_is_not_taken_for_its_successors_word() -> None:
    world = go(
        Shape("late", workers=1, broker_deaths=1, late=True),
        "publish 0, up 0, down 1, work 0, up 1, up 0, down 1, work 0, work 0, up 1, "
        "kill broker 0, start broker 0, connect 1, connect 0, late down 0",
    )
    assert outcomes(world) == [Outcome.COMMITTED]


def test_who_was_put_out_and_still_reads_is_known_after_a_restart() -> None:
    world = go(
        Shape("listed", workers=1, broker_deaths=1, expulsions=1),
        "publish 0, up 0, down 1, work 0, up 1, down 0, up 0, expel 0, kill broker 0, "
        "start broker 0, down 1, work 0, connect 1, down 1, down 0, connect 0, down 0, down 0",
    )
    assert outcomes(world) == [Outcome.FAILED]


def test_a_new_broker_takes_no_dead_relays_free_lock_for_the_end_of_what_is_read() -> None:
    world = go(
        Shape("noted", workers=1, relays="named", broker_deaths=1, worker_deaths=1),
        "publish 0, up 0, down 1, work 0, up 1, down 0, up 0, kill broker 0, start broker 0, "
        "down 1, work 0, kill worker 0, notice 1, connect 0, down 0, down 0, down 0",
    )
    assert outcomes(world) == [Outcome.FAILED]


def test_one_receiver_that_committed_settles_a_round_whose_only_rank_that_was_told_died() -> None:
    world = go(
        Shape("settled", trainers=2, workers=1, broker_deaths=1, trainer_deaths=1, drops=1),
        "publish 0, publish 1, up 0, up 0, up 1, up 1, drop 1, down 2, down 2, down 2, work 0, work 0, "
        "work 0, work 0, work 0, up 2, up 2, down 2, work 0, up 2, "
        "down 0, down 0, down 0, kill broker 0, kill trainer 0, notice 0",
    )
    assert outcomes(world) == [Outcome.COMMITTED] * 2


def test_who_had_not_voted_when_the_round_was_decided_does_not_commit_after_a_restart() -> None:
    world = go(
        Shape("unvoted", broker_deaths=1, expulsions=1),
        "publish 0, up 0, up 0, down 1, work 0, down 1, work 0, work 0, up 1, up 1, down 2, "
        "work 1, up 2, expel 0, down 1, work 0, kill broker 0, start broker 0, connect 2, "
        "connect 1, connect 0",
    )
    assert outcomes(world) == [Outcome.MIXED]


def test_who_stays_silent_after_a_restart_may_be_reading_what_nobody_listed() -> None:
    world = go(
        Shape("unlisted", workers=1, broker_deaths=1, stops=1),
        "publish 0, up 0, up 0, down 1, work 0, down 1, work 0, kill broker 0, stop 1, "
        "start broker 0, connect 0",
    )
    assert outcomes(world) == [Outcome.UNRESOLVED]
