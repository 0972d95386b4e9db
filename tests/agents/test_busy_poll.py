"""Who waits for an agent's message looks for it without sleeping, for a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tensorlease.agents import TrainerAgent, WorkerAgent
from tensorlease.agents.poll_loop import BUSY_POLL, PollLoop
from tensorlease.broker.config import BrokerConfig
from tensorlease.protocol.busy_poll import CORES, LASTS_S, LONG_S, MANY_CORES, BusyPoll, lasts_s
from tensorlease.protocol.errors import ConfigError

from ..broker.raw_agents import Threaded
from .serving import serving

torch = pytest.importorskip("torch")


class Poller:
    """Notes with what limits it is polled, in milliseconds; nothing comes."""

    def __init__(self) -> None:
        self.limits: list[int] = []

    def poll(self, limit: int) -> list[tuple[Any, int]]:
        self.limits.append(limit)
        return []


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[PollLoop]:
    """A loop whose thread was not started, with a poller that notes."""
    monkeypatch.setenv(BUSY_POLL, "on")
    # Not those of who runs the tests.
    others = set(threading.enumerate()) - {threading.current_thread()}
    every = threading.enumerate
    monkeypatch.setattr(threading, "enumerate", lambda: [t for t in every() if t not in others])
    made = PollLoop()
    made.poller = Poller()  # type: ignore[assignment]
    yield made
    made._close()


def limits_of(loop: PollLoop) -> list[int]:
    assert isinstance(loop.poller, Poller)
    return loop.poller.limits


def test_after_something_came_who_waits_does_not_sleep_for_a_moment(
    loop: PollLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 10.0, 10.0, 10.0 + LASTS_S / 2, 10.0 + 1.1 * LASTS_S])
    monkeypatch.setattr("tensorlease.agents.poll_loop.time.monotonic", lambda: next(clock))
    loop._driver = threading.get_ident()
    loop._stirred_at = 10.0
    loop._poll(5.0)
    assert limits_of(loop) == [0, 0, 5000]


@pytest.mark.parametrize(
    ("name", "sleeps"), [("another", True), ("tensorlease", False), ("tensorlease-copy_0", False)]
)
def test_beside_other_threads_of_the_application_who_waits_sleeps(
    loop: PollLoop, name: str, sleeps: bool
) -> None:
    end = threading.Event()
    other = threading.Thread(target=end.wait, args=(30.0,), name=name)
    other.start()
    try:
        loop._driver = threading.get_ident()
        loop._stirred_at = time.monotonic() + 0.05
        loop._poll(0.01)
    finally:
        end.set()
        other.join()
    assert (limits_of(loop) == [10]) is sleeps


def test_who_waits_for_long_sleeps(loop: PollLoop) -> None:
    loop._driver = threading.get_ident()
    loop._poll(5.0)
    assert limits_of(loop) == [5000]


def test_the_thread_in_the_background_sleeps(loop: PollLoop) -> None:
    loop._stirred_at = float("inf")
    loop._poll(5.0)
    assert limits_of(loop) == [5000]


def test_a_short_wait_is_not_made_longer(loop: PollLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.0, 10.0, 10.0002])
    monkeypatch.setattr("tensorlease.agents.poll_loop.time.monotonic", lambda: next(clock))
    loop._driver = threading.get_ident()
    loop._stirred_at = 10.0
    loop._poll(0.0001)
    assert limits_of(loop) == [0, 1]


@pytest.mark.parametrize("choice", [BusyPoll.ON, BusyPoll.OFF])
def test_rounds_are_the_same_either_way(
    url: str, monkeypatch: pytest.MonkeyPatch, choice: BusyPoll
) -> None:
    monkeypatch.setenv(BUSY_POLL, choice.value)
    source, target = torch.zeros(3), torch.zeros(3)
    broker = Threaded(BrokerConfig(endpoints=(url,), busy_poll=choice))
    try:
        with (
            WorkerAgent("policy", endpoint=url) as worker,
            TrainerAgent("policy", endpoint=url) as trainer,
        ):
            worker.attach({"w": target})
            trainer.register({"w": source})
            loop = trainer._connection._loop
            assert loop is not None and bool(loop._busy_s) is (choice is BusyPoll.ON)
            with serving(worker):
                trainer.wait_ready(1, timeout=20.0)
                for version in range(1, 6):
                    source.fill_(version)
                    assert trainer.publish(version, timeout=20.0).ok
                    assert target.tolist() == [version] * 3
    finally:
        broker.stop()
    assert broker.error is None


@pytest.mark.parametrize(
    ("choice", "cores", "limit", "lasts"),
    [
        (BusyPoll.AUTO, CORES, "", LASTS_S),
        (BusyPoll.AUTO, CORES - 1, "", 0.0),
        (BusyPoll.AUTO, MANY_CORES, "max 100000\n", LONG_S),
        (BusyPoll.AUTO, MANY_CORES - 1, "max 100000\n", LASTS_S),
        (BusyPoll.AUTO, 64, "800000 100000\n", LASTS_S),
        (BusyPoll.AUTO, 64, "750000 100000\n", 0.0),
        (BusyPoll.AUTO, 64, "what is this", LONG_S),
        (BusyPoll.ON, 1, "100000 100000\n", LASTS_S),
        (BusyPoll.OFF, 64, "", 0.0),
    ],
)
def test_with_few_cores_it_is_off_unless_it_is_asked_for_and_with_many_it_lasts_longer(
    choice: BusyPoll, cores: int, limit: str, lasts: float
) -> None:
    assert lasts_s(choice, cores, limit) == lasts


def test_a_word_that_there_is_not_is_named_and_the_agent_can_begin_again(
    url: str, broker: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUSY_POLL, "perhaps")
    worker = WorkerAgent("policy", endpoint=url)
    with pytest.raises(ConfigError, match=r"TENSORLEASE_BUSY_POLL is 'perhaps': .* auto, on, off"):
        worker.attach({"w": torch.zeros(3)})
    monkeypatch.setenv(BUSY_POLL, "on")
    with worker:
        worker.attach({"w": torch.zeros(3)})
        assert worker.connected
