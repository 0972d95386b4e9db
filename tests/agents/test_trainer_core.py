"""The trainer's core: identities, what is open, and when memory may be written again."""

from __future__ import annotations

import pytest

from tensorlease.agents.core import Joined, Post
from tensorlease.agents.trainer_core import (
    BuffersRetired,
    LeaseStuck,
    MembersChanged,
    Released,
    RetireDenied,
    RoundFinished,
    RoundOpened,
    RoundRefused,
    RoundVoided,
    TrainerCore,
)
from tensorlease.protocol import messages as m
from tensorlease.protocol.errors import RefusedError
from tensorlease.protocol.records import (
    Code,
    Distribution,
    Fate,
    Holder,
    LeaseNote,
    Outcome,
    ReplicaResult,
    ReplicaState,
    RoundResult,
    Terms,
)

from .cores import EPOCH, GROUP, IDENTITY, ME, NEXT_EPOCH, RECEIVERS, effects, posts, welcome


def make(*, window: int = 4) -> TrainerCore:
    """Returns a core that has joined."""
    core = TrainerCore(IDENTITY, 0, 1, "run", Distribution.COLOCATED)
    core.hello()
    welcome(core, window=window)
    effects(core)
    return core


def published(*, batches: int = 1, window: int = 4) -> TrainerCore:
    """Returns a core whose first call is under way."""
    core = make(window=window)
    call = core.open(Terms(1))
    for seq in range(batches):
        ring(core, call, seq, last=seq == batches - 1)
    effects(core)
    return core


def ring(core: TrainerCore, call: int, buffer: int, *, last: bool = False) -> int:
    return core.batch(call, [buffer], registered=False, nbytes=8, body=b"table", last=last)


def result(
    call: int = 1, *, outcome: Outcome = Outcome.COMMITTED, group: str = GROUP
) -> RoundResult:
    committed = outcome is Outcome.COMMITTED
    fate, current = (Fate.COMMITTED, call) if committed else (Fate.EXPELLED, 0)
    return RoundResult(group, call, call, outcome, "", [ReplicaResult("a", fate, current)], [])


def finish(core: TrainerCore, call: int = 1, *, outcome: Outcome = Outcome.COMMITTED) -> None:
    core.receive(m.Finished(EPOCH, ME, result(call, outcome=outcome)))


def release(core: TrainerCore, seq: int = 0, call: int = 1) -> None:
    core.receive(m.Release(EPOCH, ME, call, seq))


def refused(core: TrainerCore, call: int = 1, *, last_call: int = 0, last_version: int = 0) -> None:
    told = m.OpenRefused(
        EPOCH, ME, call, Code.VERSION_NOT_RISING, "too low", last_call, last_version
    )
    core.receive(told)


# ---------------------------------------------------------------- opening


def test_open_mints_the_next_call() -> None:
    core = make()
    assert core.open(Terms(1)) == 1
    assert posts(core) == [m.Open(1, 1, Terms(1))]
    finish(core)
    assert core.open(Terms(2)) == 2


def test_calls_are_counted_on_from_what_the_broker_says() -> None:
    core = TrainerCore(IDENTITY, 0, 1, "run", Distribution.COLOCATED)
    core.hello()
    welcome(core, last_call=7, last_version=3)
    assert core.next_call() == 8
    assert core.open(Terms(3)) == 8


def test_a_version_below_the_channels_last_is_refused_by_name() -> None:
    core = TrainerCore(IDENTITY, 0, 1, "run", Distribution.COLOCATED)
    core.hello()
    welcome(core, last_version=3)
    with pytest.raises(RefusedError, match="publish 4 or higher") as caught:
        core.open(Terms(2))
    assert caught.value.code == Code.VERSION_NOT_RISING.value
    assert core.state.calls == {}


def test_a_second_round_is_refused_while_one_is_under_way() -> None:
    core = published()
    with pytest.raises(RefusedError, match=r"call 1 \(version 1\) is still under way") as caught:
        core.open(Terms(2))
    assert caught.value.code == Code.BUSY.value


def test_a_version_that_failed_may_be_tried_again_as_a_new_call() -> None:
    core = published()
    release(core)
    finish(core, outcome=Outcome.FAILED)
    assert core.open(Terms(1)) == 2


def test_opened_is_told_once() -> None:
    core = published()
    for _ in range(2):
        core.receive(m.Opened(EPOCH, ME, 1, RECEIVERS))
    assert effects(core) == [RoundOpened(1, RECEIVERS)]


def test_opened_of_an_unknown_call_is_dropped() -> None:
    core = make()
    core.receive(m.Opened(EPOCH, ME, 9, RECEIVERS))
    assert effects(core) == []


def test_a_refused_round_gives_everything_back() -> None:
    core = published()
    refused(core, last_call=5, last_version=8)
    assert effects(core) == [RoundRefused(1, Code.VERSION_NOT_RISING, "too low")]
    assert core.may_write(0)
    assert core.hello().rounds == []
    assert core.next_call() == 6
    with pytest.raises(RefusedError, match="publish 9"):
        core.open(Terms(7))


def test_a_call_that_the_broker_refused_is_not_counted() -> None:
    core = published()
    refused(core, last_version=10)
    effects(core)
    assert core.open(Terms(11)) == 1


def test_the_last_version_that_it_knows_is_announced() -> None:
    core = published()
    refused(core, last_version=10)
    assert core.hello().last_version == 10


def test_a_repeated_refusal_is_told_once() -> None:
    core = published()
    refused(core)
    effects(core)
    refused(core)
    assert effects(core) == []


def test_what_is_said_late_of_a_refused_rounds_batches_is_not_said_of_the_next() -> None:
    core = make()
    terms = Terms(1)
    core.open(terms)
    ring(core, 1, 0)
    ring(core, 1, 1)
    no_round = m.OpenRefused(EPOCH, ME, 1, Code.NO_ROUND, "no round of call 1 is open", 0, 0)
    core.receive(m.OpenRefused(EPOCH, ME, 1, Code.TERMS_DIFFER, "other terms", 0, 0))
    effects(core)
    assert core.open(terms) == 1
    ring(core, 1, 2)

    core.receive(no_round)
    core.receive(no_round)

    assert [e for e in effects(core) if isinstance(e, RoundRefused)] == []
    core.receive(no_round)
    assert [e.call for e in effects(core) if isinstance(e, RoundRefused)] == [1]


def test_in_a_new_session_nothing_is_said_late_of_what_an_old_one_refused() -> None:
    core = make()
    core.open(Terms(1))
    ring(core, 1, 0)
    core.receive(m.OpenRefused(EPOCH, ME, 1, Code.TERMS_DIFFER, "other terms", 0, 0))
    core.hello()
    welcome(core)
    core.open(Terms(1))
    ring(core, 1, 1)
    effects(core)

    core.receive(m.OpenRefused(EPOCH, ME, 1, Code.NO_ROUND, "no round of call 1 is open", 0, 0))

    assert [e.call for e in effects(core) if isinstance(e, RoundRefused)] == [1]


def test_a_voided_round_is_remembered_while_a_slot_of_it_is_read() -> None:
    core = make()
    core.open(Terms(1))
    ring(core, 1, 7)
    core.void(1)
    core.receive(m.Voided(EPOCH, ME, 1, False))
    finish(core, outcome=Outcome.FAILED)
    core.open(Terms(2))
    effects(core)

    release(core)

    assert [(e.call, e.seq) for e in effects(core) if isinstance(e, Released)] == [(1, 0)]
    finish(core, 2, outcome=Outcome.FAILED)
    core.open(Terms(3))
    assert list(core.state.calls) == [3]


def test_a_refusal_of_a_batch_of_an_admitted_round_is_no_refusal_of_the_round() -> None:
    core = published()
    core.receive(m.Opened(EPOCH, ME, 1, RECEIVERS))
    effects(core)
    refused(core)
    assert effects(core) == []
    assert not core.may_write(0)


# ---------------------------------------------------------------- batches and leases


def test_batches_are_numbered_and_the_last_carries_the_manifest() -> None:
    core = make()
    call = core.open(Terms(1))
    effects(core)
    assert ring(core, call, 5) == 0
    assert ring(core, call, 6, last=True) == 1
    assert effects(core) == [
        Post(m.Batch(1, 1, 0, [5], False, 8, None), b"table"),
        Post(m.Batch(1, 1, 1, [6], False, 8, 2), b"table"),
    ]


def test_close_carries_the_manifest_where_no_batch_did() -> None:
    core = make()
    call = core.open(Terms(1))
    ring(core, call, 0)
    effects(core)
    core.close(call)
    assert posts(core) == [m.Close(1, 1, 1)]


def test_a_closed_round_takes_no_batch_and_no_close() -> None:
    core = published()
    for attempt in (lambda: ring(core, 1, 3), lambda: core.close(1)):
        with pytest.raises(RefusedError, match="call 1 is not open") as caught:
            attempt()
        assert caught.value.code == Code.NO_ROUND.value


def test_an_ended_round_takes_no_batch() -> None:
    core = make()
    call = core.open(Terms(1))
    finish(core, outcome=Outcome.FAILED)
    with pytest.raises(RefusedError, match="call 1 is not open"):
        ring(core, call, 0)


def test_an_unknown_round_takes_no_batch() -> None:
    with pytest.raises(RefusedError, match="call 3 is not open"):
        ring(make(), 3, 0)


def test_a_full_window_refuses_a_batch_until_one_is_released() -> None:
    core = make(window=2)
    call = core.open(Terms(1))
    ring(core, call, 0)
    ring(core, call, 1)
    with pytest.raises(RefusedError, match="2 batches of call 1 are unreleased; the window is 2"):
        ring(core, call, 2)
    release(core, 0)
    assert ring(core, call, 2) == 2


def test_the_window_holds_while_the_connection_is_lost() -> None:
    core = make(window=1)
    call = core.open(Terms(1))
    ring(core, call, 0)
    core.disconnected()
    with pytest.raises(RefusedError, match="the window is 1"):
        ring(core, call, 1)


def test_batches_before_the_first_welcome_wait_for_it() -> None:
    core = TrainerCore(IDENTITY, 0, 1, "run", Distribution.COLOCATED)
    core.hello()
    call = core.open(Terms(1))
    ring(core, call, 0)
    ring(core, call, 1, last=True)
    assert effects(core) == []
    welcome(core)
    assert [type(message) for message in posts(core)] == [m.Open, m.Batch, m.Batch]


def test_a_stuck_batch_is_not_counted_in_the_window() -> None:
    core = make(window=1)
    call = core.open(Terms(1))
    ring(core, call, 0)
    core.receive(m.Stuck(EPOCH, ME, 1, 0, [Holder("c" * 16, "a", 0, 4711)]))
    assert ring(core, call, 1) == 1
    assert not core.may_write(0)


def test_release_is_told_once_and_the_bytes_may_be_written() -> None:
    core = published()
    assert not core.may_write(0)
    release(core)
    release(core)
    assert effects(core) == [Released(1, 0)]
    assert core.may_write(0)


def test_release_of_what_is_unknown_is_dropped() -> None:
    core = published()
    release(core, seq=9)
    release(core, call=9)
    assert effects(core) == []
    assert not core.may_write(0)


def test_a_release_by_a_dead_broker_is_dropped() -> None:
    core = published()
    core.disconnected()
    core.hello()
    welcome(core, epoch=NEXT_EPOCH)
    effects(core)
    release(core)
    assert effects(core) == []
    assert not core.may_write(0)


def test_finished_is_no_licence_to_write() -> None:
    core = published()
    finish(core, outcome=Outcome.MIXED)
    assert not core.may_write(0)
    release(core)
    assert core.may_write(0)


def test_stuck_names_its_holders() -> None:
    core = published()
    holders = [Holder("c" * 16, "a", 0, 4711)]
    core.receive(m.Stuck(EPOCH, ME, 1, 0, holders))
    assert effects(core) == [LeaseStuck(1, 0, holders)]
    assert not core.may_write(0)


# ---------------------------------------------------------------- the end


def test_finished_is_told_once() -> None:
    core = published()
    finish(core)
    finish(core)
    assert effects(core) == [RoundFinished(1, result())]
    assert core.state.last_version == 1


def test_a_result_of_another_group_is_dropped() -> None:
    core = published()
    core.receive(m.Finished(EPOCH, ME, result(group="other#00000000")))
    assert effects(core) == []


def test_a_result_of_an_unknown_call_counts_calls_on() -> None:
    core = make()
    finish(core, 4)
    assert effects(core) == []
    assert core.next_call() == 5


def test_a_failed_round_raises_no_version() -> None:
    core = published()
    finish(core, outcome=Outcome.FAILED)
    assert core.state.last_version == 0


def test_an_ended_round_is_remembered_while_one_of_its_leases_is() -> None:
    core = published(batches=2)
    release(core, 0)
    finish(core)
    core.open(Terms(2))
    assert sorted(core.state.calls) == [1, 2]
    release(core, 1)
    finish(core, 2)
    core.open(Terms(3))
    assert sorted(core.state.calls) == [3]


# ---------------------------------------------------------------- void


def test_void_is_asked_for_and_answered_once() -> None:
    core = published()
    core.void(1)
    assert posts(core) == [m.Void(1, 1)]
    for _ in range(2):
        core.receive(m.Voided(EPOCH, ME, 1, False))
    assert effects(core) == [RoundVoided(1, False)]
    assert core.may_write(0)


def test_a_local_question_is_no_licence_to_write() -> None:
    core = published()
    core.void(1)
    assert not core.may_write(0)


def test_void_of_an_unknown_call_is_answered_at_once() -> None:
    core = make()
    core.void(7)
    assert effects(core) == [RoundVoided(7, False)]


def test_void_of_a_refused_call_is_answered_at_once() -> None:
    core = published()
    refused(core)
    effects(core)
    core.void(1)
    assert effects(core) == [RoundVoided(1, False)]


def test_void_of_a_void_call_is_answered_at_once() -> None:
    core = published()
    core.void(1)
    core.receive(m.Voided(EPOCH, ME, 1, True))
    effects(core)
    core.void(1)
    assert effects(core) == [RoundVoided(1, False)]


def test_an_answer_that_nobody_asked_for_is_dropped() -> None:
    core = published()
    core.receive(m.Voided(EPOCH, ME, 1, False))
    assert effects(core) == []
    assert not core.may_write(0)


def test_a_broker_that_is_provably_gone_answers_a_void() -> None:
    core = published()
    core.broker_gone()
    assert effects(core) == []
    core.void(1)
    effects(core)
    core.disconnected()
    core.broker_gone()
    assert effects(core) == [RoundVoided(1, False)]
    # No successor may let it commit.
    assert core.hello().rounds[0].void is True


def test_a_void_that_was_answered_is_not_announced() -> None:
    core = published()
    core.void(1)
    core.receive(m.Voided(EPOCH, ME, 1, False))
    assert core.hello().rounds[0].void is False


# ---------------------------------------------------------------- sessions


def test_a_hello_announces_all_that_is_open() -> None:
    core = published(batches=2)
    core.receive(m.Opened(EPOCH, ME, 1, RECEIVERS))
    release(core, 0)
    core.void(1)
    hello = core.hello()
    assert (hello.group, hello.rank, hello.world_size) == (GROUP, 0, 1)
    assert (hello.distribution, hello.last_call) == (Distribution.COLOCATED, 0)
    (told,) = hello.rounds
    assert (told.call, told.terms, told.receivers, told.total) == (1, Terms(1), RECEIVERS, 2)
    assert told.leases == [LeaseNote(0, [0], False, 8, True), LeaseNote(1, [1], False, 8, False)]
    assert (told.void, told.result) == (True, None)


def test_a_hello_announces_the_last_result() -> None:
    core = published()
    finish(core)
    hello = core.hello()
    assert hello.last_call == 1
    assert hello.rounds[0].result == result()


def test_a_welcome_is_followed_by_offers_then_batches_then_requests() -> None:
    core = published(batches=2)
    core.offer(0, [7, 8], 64, b"handles")
    release(core, 0)
    core.retire([7])
    effects(core)
    core.hello()
    welcome(core)
    taken = effects(core)
    assert isinstance(taken[0], Joined)
    assert taken[1:] == [
        Post(m.Offer(2, 0, [7, 8], 64), b"handles"),
        Post(m.Batch(2, 1, 1, [1], False, 8, 2), b"table"),
        Post(m.Retire(2, [7])),
    ]


def test_what_was_asked_behind_a_hello_is_not_said_twice() -> None:
    core = make()
    core.hello()
    core.offer(0, [7], 8, b"handles")
    call = core.open(Terms(1))
    ring(core, call, 0, last=True)
    welcome(core)
    assert posts(core) == [
        m.Open(2, 1, Terms(1)),
        m.Offer(2, 0, [7], 8),
        m.Batch(2, 1, 0, [0], False, 8, 1),
    ]


def test_an_ended_round_is_not_sent_again() -> None:
    core = published()
    finish(core)
    core.hello()
    welcome(core)
    assert posts(core) == []


def test_the_group_is_what_the_broker_named() -> None:
    core = TrainerCore(IDENTITY, 0, 1, "", Distribution.COLOCATED)
    assert core.hello().group == ""
    welcome(core)
    assert core.hello().group == GROUP


def test_a_welcome_counts_no_call_on_that_is_under_way() -> None:
    core = published()
    core.hello()
    welcome(core, last_call=1)
    assert core.state.last_call == 0


# ---------------------------------------------------------------- offers and retirement


def test_an_offer_is_posted_with_its_body() -> None:
    core = make()
    core.offer(3, [1, 2], 16, b"handles")
    assert effects(core) == [Post(m.Offer(1, 3, [1, 2], 16), b"handles")]


def test_a_retired_buffer_is_said_and_a_whole_offer_forgotten() -> None:
    core = make()
    core.offer(0, [1, 2], 16, b"handles")
    core.retire([2, 1])
    assert posts(core)[-1] == m.Retire(1, [1, 2])
    core.receive(m.Retired(EPOCH, ME, [1]))
    assert sorted(core.state.offers) == [0]
    core.receive(m.Retired(EPOCH, ME, [2]))
    assert effects(core) == [BuffersRetired([1]), BuffersRetired([2])]
    assert core.state.offers == {}
    assert core.state.retiring == set()


def test_a_refused_retirement_is_told_and_not_asked_again() -> None:
    core = make()
    core.offer(0, [1], 8, b"handles")
    core.retire([1])
    core.receive(m.RetireRefused(EPOCH, ME, [1], Code.LEASED, "leased to a"))
    assert RetireDenied([1], "leased to a") in effects(core)
    core.hello()
    welcome(core)
    assert posts(core) == [m.Offer(2, 0, [1], 8)]


def test_the_replicas_are_what_the_broker_said_last() -> None:
    core = make()
    replicas = [ReplicaState("a", 1, [0], 3, False, True)]
    core.receive(m.Members(EPOCH, ME, replicas))
    assert effects(core) == [MembersChanged(replicas)]
    assert core.state.replicas == replicas
