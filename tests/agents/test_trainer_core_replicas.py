"""The trainer's core: which rounds promise a buffer, and what version replicas are at."""

from __future__ import annotations

from tensorlease.agents.trainer_core import MembersChanged
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import ReplicaState

from .cores import EPOCH, ME, effects
from .test_trainer_core import finish, make, published, release


def test_rounds_that_promise_given_buffers_are_named_until_released_or_void() -> None:
    core = published(batches=2)
    assert [call.call for call in core.leased([0])] == [1]
    assert core.leased([7]) == core.leased([]) == []
    release(core, 0)
    assert core.leased([0]) == []
    assert [call.call for call in core.leased([0, 1])] == [1]
    core.void(1)
    assert core.leased([1]) != []
    core.receive(m.Voided(EPOCH, ME, 1, False))
    assert core.leased([1]) == []


def test_a_result_tells_what_version_its_replicas_are_at() -> None:
    core = published()
    states = [ReplicaState(name, 1, [0], 0, True, True) for name in ("a", "b")]
    core.receive(m.Members(EPOCH, ME, states))
    finish(core)
    assert [(s.replica, s.current, s.torn) for s in core.state.replicas] == [
        ("a", 1, False),
        ("b", 0, True),
    ]
    assert states[0].current == 0


def test_what_was_said_of_replicas_before_the_last_offer_was_heard_says_nothing_of_it() -> None:
    core = make()
    for number in (0, 1):
        core.offer(number, [number], 8, b"table")
    replicas = [ReplicaState("a", 1, [0], 3, False, True)]
    for offers, known in ((0, False), (1, False), (2, True)):
        core.receive(m.Members(EPOCH, ME, replicas, offers))
        assert MembersChanged(replicas, known) in effects(core)


def test_an_offer_that_was_asked_back_is_not_waited_for() -> None:
    core = make()
    core.offer(0, [1], 8, b"")
    core.offer(1, [2], 8, b"")
    core.retire([2])
    replicas = [ReplicaState("engine0", 1, [0], 1, False, True)]
    # The broker has forgotten the second by now; that it has is yet to be heard.
    core.receive(m.Members(EPOCH, ME, replicas, 1))
    assert MembersChanged(replicas, True) in effects(core)
