"""What both cores share: sessions, and who may be believed."""

from __future__ import annotations

import pytest

from tensorlease.agents.core import Core, Farewell, Joined, Post, Reconnect, TurnedAway
from tensorlease.agents.trainer_core import TrainerCore
from tensorlease.agents.worker_core import WorkerCore
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Distribution, Durations

from .cores import EPOCH, IDENTITY, ME, NEXT_EPOCH, effects, of, posts, welcome


def make_trainer() -> Core:
    return TrainerCore(IDENTITY, 0, 1, "run", Distribution.COLOCATED)


def make_worker() -> Core:
    return WorkerCore(IDENTITY, "a", 0, 1)


@pytest.fixture(params=[make_trainer, make_worker], ids=["trainer", "worker"])
def core(request: pytest.FixtureRequest) -> Core:
    made = request.param()
    assert isinstance(made, Core)
    return made


def hello(core: Core) -> m.TrainerHello | m.WorkerHello:
    assert isinstance(core, TrainerCore | WorkerCore)
    return core.hello()


def joined(core: Core) -> Core:
    hello(core)
    welcome(core)
    effects(core)
    return core


def test_a_hello_says_who_the_agent_is_and_counts_sessions(core: Core) -> None:
    first = hello(core)
    assert (first.session, first.instance, first.channel) == (1, ME, "policy")
    assert (first.host, first.device, first.processes) == ("host", "cpu:0", IDENTITY.processes)
    assert (first.protocol, first.locked, first.software) == ((1, 1), True, "test")
    assert hello(core).session == 2


def test_a_welcome_opens_the_session(core: Core) -> None:
    hello(core)
    assert not core.connected
    welcome(core)
    assert core.connected
    assert of(Joined, effects(core))
    assert core.session.durations == Durations()


def test_a_welcome_of_an_older_session_is_dropped(core: Core) -> None:
    hello(core)
    hello(core)
    core.receive(m.Welcome(EPOCH, ME, 1, 1, "run", 0, 0, Durations(), 4, 1))
    assert not core.connected
    assert effects(core) == []


def test_a_repeated_welcome_is_dropped(core: Core) -> None:
    joined(core)
    welcome(core, epoch=NEXT_EPOCH)
    assert effects(core) == []
    assert core.session.epoch == EPOCH


def test_what_is_meant_for_another_agent_is_dropped(core: Core) -> None:
    joined(core)
    core.receive(m.Refused(EPOCH, "f" * 16, Code.FORBIDDEN, "go away", False))
    core.receive(m.Stopping(EPOCH, "f" * 16))
    core.receive(m.Reply(EPOCH, 1))
    assert effects(core) == []
    assert core.connected


def test_what_a_broker_of_another_epoch_says_is_dropped(core: Core) -> None:
    joined(core)
    core.receive(m.Stopping(NEXT_EPOCH, ME))
    core.receive(m.ByeOk(NEXT_EPOCH, ME))
    assert effects(core) == []
    assert core.connected


def test_nothing_is_posted_while_the_connection_is_lost(core: Core) -> None:
    joined(core)
    core.disconnected()
    core.post(m.Beat(core.session.number))
    assert effects(core) == []


def test_what_is_posted_behind_a_hello_follows_its_welcome(core: Core) -> None:
    hello(core)
    core.post(m.Beat(1, progress=5))
    assert effects(core) == []
    welcome(core)
    taken = effects(core)
    assert isinstance(taken[0], Joined)
    assert Post(m.Beat(1, progress=5)) in taken


def test_what_was_posted_behind_a_hello_that_got_lost_is_dropped(core: Core) -> None:
    hello(core)
    core.post(m.Beat(1, progress=5))
    hello(core)
    welcome(core)
    assert posts(core) == []


def test_a_refusal_turns_the_agent_away(core: Core) -> None:
    hello(core)
    core.receive(m.Refused(EPOCH, ME, Code.BROKER_FULL, "full", True))
    assert effects(core) == [TurnedAway(Code.BROKER_FULL, "full", True)]
    assert not core.connected


def test_an_unknown_session_is_made_anew(core: Core) -> None:
    joined(core)
    core.receive(m.WhoAreYou(EPOCH))
    assert effects(core) == [Reconnect()]
    assert not core.connected


def test_a_question_by_another_broker_makes_a_new_session_too(core: Core) -> None:
    hello(core)
    core.receive(m.WhoAreYou(NEXT_EPOCH))
    assert effects(core) == [Reconnect()]


def test_a_stopping_broker_is_looked_for_again(core: Core) -> None:
    joined(core)
    core.receive(m.Stopping(EPOCH, ME))
    assert effects(core) == [Reconnect()]
    assert not core.connected


def test_a_beat_is_answered_by_nothing_more(core: Core) -> None:
    joined(core)
    core.receive(m.BeatOk(EPOCH, ME))
    assert effects(core) == []


def test_a_goodbye_is_said_and_answered(core: Core) -> None:
    joined(core)
    core.bye()
    assert posts(core) == [m.Bye(1)]
    core.receive(m.ByeOk(EPOCH, ME))
    assert effects(core) == [Farewell()]


def test_a_goodbye_that_got_lost_is_said_again_once(core: Core) -> None:
    joined(core)
    core.bye()
    core.disconnected()
    effects(core)
    hello(core)
    core.bye()
    welcome(core)
    assert posts(core) == [m.Bye(2)]


def test_a_core_takes_what_it_does_not_know_for_nothing(core: Core) -> None:
    joined(core)
    if isinstance(core, TrainerCore):
        core.receive(m.Commit(EPOCH, ME, "run", 1))
    else:
        core.receive(m.Release(EPOCH, ME, 1, 0))
    assert effects(core) == []
