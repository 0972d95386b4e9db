"""Who polls: the thread that waits, and the one in the background while nobody does."""

from __future__ import annotations

import threading

import pytest

from tensorlease.agents import TrainerAgent, WorkerAgent, waiting
from tensorlease.agents.connection import Connection
from tensorlease.agents.poll_loop import THREAD_NAME, PollLoop

from ..broker.raw_agents import eventually
from .rings import Start
from .serving import serving

torch = pytest.importorskip("torch")


@pytest.fixture
def takers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The kind of each message that comes, and the name of the thread that takes it in."""
    found: list[tuple[str, str]] = []
    take = Connection._take

    def noted(self: Connection, frames: list[bytes]) -> None:
        take(self, frames)
        found.append((self._name.split()[0], threading.current_thread().name))

    monkeypatch.setattr(Connection, "_take", noted)
    return found


def test_who_waits_for_a_round_takes_in_what_ends_it(
    trainer: TrainerAgent, start_worker: Start, takers: list[tuple[str, str]]
) -> None:
    start_worker("r", {"w": torch.zeros(3)})
    trainer.wait_ready(1, timeout=20.0)
    takers.clear()
    for version in range(1, 6):
        assert trainer.publish(version, timeout=20.0).ok
    mine = {name for kind, name in takers if kind == "trainer"}
    # Two threads wait here, and each takes in what is for either.
    assert THREAD_NAME not in mine and mine


def test_while_nobody_waits_what_comes_is_taken_in_all_the_same(
    trainer: TrainerAgent, worker: WorkerAgent, takers: list[tuple[str, str]]
) -> None:
    worker.attach({"w": torch.zeros(3)})
    with serving(worker):
        handle = trainer.publish_nowait(1)
        eventually(lambda: handle.finished.done)
    takers.clear()
    # Nobody calls anything any more: beats are answered.
    eventually(lambda: ("trainer", THREAD_NAME) in takers)


def test_a_thread_that_waits_takes_the_seat_from_the_background_and_gives_it_back(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    worker.attach({"w": torch.zeros(3)})
    loop = trainer._connection._loop
    assert isinstance(loop, PollLoop)
    eventually(loop._seat.locked)  # By the background, since nobody waits.
    assert loop._driver is None
    thread = threading.Thread(target=worker.run)
    thread.start()
    eventually(lambda: loop._driver == thread.ident and loop._asleep)
    worker.stop()
    thread.join(10.0)
    assert not thread.is_alive()
    eventually(lambda: loop._driver is None and loop._seat.locked())


def test_a_thread_at_the_poll_is_woken_by_what_another_one_does(
    worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LOOK_S", 60.0)
    worker.attach({"w": torch.zeros(3)})
    thread = threading.Thread(target=worker.run)
    thread.start()
    loop = worker._connection._loop
    assert loop is not None
    eventually(lambda: loop._driver == thread.ident)
    woken: list[int] = []
    wake = loop.wake

    def noted() -> None:
        woken.append(threading.get_ident())
        wake()

    monkeypatch.setattr(loop, "wake", noted)
    worker.stop()
    assert woken == [threading.get_ident()]
    thread.join(10.0)
    assert not thread.is_alive()
