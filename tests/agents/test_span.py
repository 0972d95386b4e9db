"""Spans in which weights do not change: whom a trainer serves late, and when."""

from __future__ import annotations

import pytest

from tensorlease.agents.span import FIRST_PAUSE_S, LAST_PAUSE_S, LATE_OPEN_S, Span
from tensorlease.protocol.records import (
    Fate,
    Outcome,
    ReceiverResult,
    ReplicaResult,
    ReplicaState,
    RoundResult,
    Terms,
)

NOW = 1000.0


def replica(
    name: str = "a", current: int = 0, *, ready: bool = True, torn: bool = False
) -> ReplicaState:
    return ReplicaState(name, 1, [0], current, torn, ready, "" if ready else "waits for member 0")


def result(
    version: int,
    call: int,
    outcome: Outcome = Outcome.COMMITTED,
    *fates: tuple[str, Fate],
) -> RoundResult:
    replicas = [ReplicaResult(name, fate) for name, fate in fates]
    receivers = [ReceiverResult("1" * 16, name, 0, 7, fate) for name, fate in fates]
    return RoundResult("g", call, version, outcome, "", replicas, receivers)


def published(version: int = 5, *, guarded: bool = False, call: int = 1) -> Span:
    """A span whose trainer has published this version by this call."""
    span = Span()
    span.published(Terms(version, prepare_s=3.0), guarded=guarded)
    span.ended(result(version, call), NOW, late=False)
    return span


def test_in_a_declared_span_who_is_behind_is_due_at_the_published_version() -> None:
    span = published()
    span.enter(None, 1)
    terms = span.due([replica("a", 5), replica("b", 3)], 1, NOW)
    assert terms == Terms(5, open_s=LATE_OPEN_S, prepare_s=3.0)


@pytest.mark.parametrize(
    "state",
    [replica("a", 5), replica("a", 6), replica("a", 0, ready=False)],
    ids=["at it", "beyond it", "incomplete"],
)
def test_who_has_the_version_or_is_not_complete_is_not_due(state: ReplicaState) -> None:
    span = published()
    span.enter(None, 1)
    assert span.due([state], 1, NOW) is None


def test_a_torn_replica_is_due_whatever_it_was_at() -> None:
    span = published()
    span.enter(None, 1)
    assert span.due([replica("a", 5, torn=True)], 1, NOW) is not None


def test_outside_of_a_span_nobody_is_due() -> None:
    span = published()
    assert (span.version, span.due([replica()], 1, NOW)) == (0, None)
    span.enter(None, 1)
    assert span.version == 5
    span.leave()
    assert (span.version, span.due([replica()], 1, NOW)) == (0, None)


def test_spans_may_be_nested() -> None:
    span = published()
    span.enter(None, 1)
    span.enter(None, 1)
    span.leave()
    assert span.declared
    assert span.version == 5
    span.leave()
    assert not span.declared


def test_between_guarded_steps_who_is_behind_is_due_and_after_one_nobody() -> None:
    span = published(guarded=True)
    assert span.due([replica()], 1, NOW) is not None
    span.changed()
    assert span.due([replica()], 1, NOW) is None
    span.published(Terms(6), guarded=True)
    assert span.version == 0, "its round has not ended"
    span.ended(result(6, 2), NOW, late=False)
    assert span.version == 6


def test_a_round_that_ends_after_the_next_step_began_makes_nobody_due() -> None:
    span = Span()
    span.published(Terms(5), guarded=True)
    span.changed()
    span.ended(result(5, 1), NOW, late=False)
    assert span.due([replica()], 1, NOW) is None


def test_a_permission_to_write_ends_a_guarded_span_but_no_declared_one() -> None:
    span = published(guarded=True)
    span.permitted()
    assert span.version == 0
    span.enter(None, 1)
    assert span.version == 5


def test_without_one_of_its_guards_a_trainer_counts_as_unguarded() -> None:
    span = published(guarded=True)
    span.unguarded()
    assert span.version == 0


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNRESOLVED])
def test_a_version_that_failed_is_served_to_nobody_late(outcome: Outcome) -> None:
    span = Span()
    span.published(Terms(5), guarded=False)
    span.enter(None, 1)
    span.ended(result(5, 1, outcome), NOW, late=False)
    assert span.due([replica()], 1, NOW) is None


@pytest.mark.parametrize("outcome", [Outcome.MIXED, Outcome.EMPTY])
def test_a_version_that_some_have_or_nobody_was_there_for_is_served_late(outcome: Outcome) -> None:
    span = Span()
    span.published(Terms(5), guarded=False)
    span.enter(None, 1)
    span.ended(result(5, 1, outcome), NOW, late=False)
    assert span.due([replica()], 1, NOW) is not None


def test_what_the_application_says_the_weights_are_is_served_without_a_publish() -> None:
    span = Span()
    span.enter(57, 9)
    assert span.due([replica("a", 56)], 9, NOW) == Terms(57, open_s=LATE_OPEN_S)


def test_a_round_of_another_kind_makes_what_is_known_void() -> None:
    span = published(call=4)
    span.enter(None, 4)
    assert span.due([replica()], 5, NOW) is None
    assert span.due([replica()], 4, NOW) is not None


def test_a_replica_that_fails_is_tried_again_ever_more_rarely() -> None:
    span = published()
    span.enter(None, 1)
    now, pauses = NOW, []
    for call in range(2, 11):
        span.ended(result(5, call, Outcome.FAILED, ("a", Fate.EXPELLED)), now, late=True)
        begun = now
        while span.due([replica()], call, now) is None:
            now += 0.5
        pauses.append(now - begun)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE_S, LAST_PAUSE_S)


def test_a_failing_replica_keeps_nobody_else_from_being_served() -> None:
    span = published()
    span.enter(None, 1)
    span.ended(result(5, 2, Outcome.FAILED, ("a", Fate.EXPELLED)), NOW, late=True)
    assert span.due([replica("a")], 2, NOW) is None
    assert span.due([replica("a"), replica("b")], 2, NOW) is not None


def test_a_replica_that_went_and_came_again_is_tried_at_once() -> None:
    span = published()
    span.enter(None, 1)
    span.ended(result(5, 2, Outcome.FAILED, ("a", Fate.LOST)), NOW, late=True)
    assert span.due([replica("a")], 2, NOW) is None
    assert span.due([], 2, NOW) is None
    assert span.due([replica("a")], 2, NOW) is not None


def test_one_that_the_version_reached_at_last_has_no_failures_left() -> None:
    span = published()
    span.enter(None, 1)
    span.ended(result(5, 2, Outcome.FAILED, ("a", Fate.EXPELLED)), NOW, late=True)
    span.ended(result(5, 3, Outcome.COMMITTED, ("a", Fate.COMMITTED)), NOW, late=True)
    assert span.due([replica("a", 0, torn=True)], 3, NOW) is not None


def test_a_late_round_that_cannot_be_had_is_asked_for_again_after_a_pause() -> None:
    span = published()
    span.enter(None, 1)
    span.refused(NOW)
    assert span.due([replica()], 1, NOW + FIRST_PAUSE_S / 2) is None
    assert span.due([replica()], 1, NOW + FIRST_PAUSE_S) is not None
    span.ended(result(5, 2, Outcome.FAILED), NOW, late=True)
    assert span.due([replica()], 2, NOW + FIRST_PAUSE_S) is None
    assert span.due([replica()], 2, NOW + 2 * FIRST_PAUSE_S) is not None
