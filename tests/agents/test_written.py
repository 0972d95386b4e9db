"""What a worker waits for before it reads: that a trainer's device has written its memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tensorlease.agents import RoundResult, TrainerAgent, WorkerAgent, written
from tensorlease.agents.errors import MappingError
from tensorlease.agents.shm import ShmMapping
from tensorlease.agents.written import await_written
from tensorlease.protocol.records import Outcome

from ..broker.raw_agents import eventually

StartWorker = Callable[..., WorkerAgent]


class FakeEvent:
    """An event of a device that is not here."""

    def __init__(self) -> None:
        self.done = False
        self.asked = threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.done


class Memory:
    def __init__(self, event: FakeEvent | None) -> None:
        self.event = event


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> FakeEvent:
    """That of all shared memory, as if a device wrote it."""
    made = FakeEvent()
    monkeypatch.setattr(ShmMapping, "event", property(lambda _: made))
    return made


def memories(*events: FakeEvent | None) -> list[ShmMapping]:
    return [Memory(event) for event in events]  # type: ignore[misc]


def test_it_returns_once_every_event_has_come_and_waits_for_none_that_is_not_there() -> None:
    first, second = FakeEvent(), FakeEvent()
    first.done = True
    waiting = threading.Thread(
        target=await_written, args=(memories(None, first, second), lambda: True)
    )
    waiting.start()
    assert second.asked.wait(10.0)
    waiting.join(0.1)
    assert waiting.is_alive()
    second.done = True
    waiting.join(10.0)
    assert not waiting.is_alive()


def test_it_does_not_wait_on_in_a_round_that_has_ended() -> None:
    with pytest.raises(MappingError, match="the round ended before"):
        await_written(memories(FakeEvent()), lambda: False)
    done = FakeEvent()
    done.done = True
    await_written(memories(done), lambda: False)


def test_it_says_after_a_time_that_the_device_has_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(written, "WRITTEN_S", 0.05)
    with pytest.raises(MappingError, match="has not written its batch"):
        await_written(memories(FakeEvent()), lambda: True)


Publish = Callable[[TrainerAgent], RoundResult]


def registered(trainer: TrainerAgent) -> RoundResult:
    return trainer.publish(1, timeout=20.0)


def ring(trainer: TrainerAgent) -> RoundResult:
    return trainer.publish_stream(1, [("w", torch.ones(3))], timeout=20.0)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


both = pytest.mark.parametrize(
    ("which", "publish"), [("trainer", registered), ("ring_trainer", ring)]
)


@both
def test_a_worker_reads_nothing_before_the_event(
    event: FakeEvent,
    which: str,
    publish: Publish,
    request: pytest.FixtureRequest,
    start_worker: StartWorker,
    pool: ThreadPoolExecutor,
) -> None:
    trainer = request.getfixturevalue(which)
    target = torch.zeros(3)
    worker = start_worker("a", {"w": target})
    publishing = pool.submit(publish, trainer)
    assert event.asked.wait(10.0)
    assert target.tolist() == [0.0, 0.0, 0.0]
    assert not publishing.done()
    event.done = True
    assert publishing.result(20.0).ok
    assert target.tolist() == [1.0, 1.0, 1.0]
    assert worker.version == 1


@both
def test_a_worker_whose_event_never_comes_leaves_a_round_that_fails_and_is_whole(
    event: FakeEvent,
    which: str,
    publish: Publish,
    request: pytest.FixtureRequest,
    start_worker: StartWorker,
    pool: ThreadPoolExecutor,
) -> None:
    trainer = request.getfixturevalue(which)
    worker = start_worker("a", {"w": torch.zeros(3)})
    publishing = pool.submit(publish, trainer)
    assert event.asked.wait(10.0)
    assert trainer.void(1) is False
    assert publishing.result(20.0).outcome is Outcome.FAILED
    eventually(lambda: worker._core.state.round is None)
    assert not worker.torn
    assert trainer.may_write()
