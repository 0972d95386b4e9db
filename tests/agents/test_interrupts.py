"""Ctrl+C in each call that waits: it passes through at once, and the agent works as before."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tensorlease.agents import RoundHandle, TrainerAgent, WorkerAgent
from tensorlease.agents.connection import Connection
from tensorlease.agents.poll_loop import PollLoop
from tensorlease.protocol.codec import decode_from_broker
from tensorlease.protocol.errors import DeadlineError, RefusedError

from ..broker.raw_agents import Threaded, config_for, eventually
from ..procs import Spawn, Spawned

torch = pytest.importorskip("torch")

Waiting = Callable[[], object]
FAR_S = 60.0


def interrupt(call: Callable[[], object], waiting: Waiting, *, aside: bool = False) -> None:
    """Makes a call in this thread, which is the main one, and interrupts it once it waits.

    `aside`: the signal comes to another thread, and so ends no wait of this one.
    """
    main = threading.get_ident()
    assert main == threading.main_thread().ident

    def strike() -> None:
        eventually(lambda: waiting() or None)
        signal.pthread_kill(threading.get_ident() if aside else main, signal.SIGINT)

    striker = threading.Thread(target=strike)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            striker.start()
            call()
            pytest.fail("it returned")
        assert time.monotonic() - began < FAR_S / 4
    finally:
        signal.signal(signal.SIGINT, former)
        striker.join(10.0)


def in_condition(agent: TrainerAgent | WorkerAgent) -> Waiting:
    """Whether somebody waits for a change of the agent's state, at the condition or the poll."""

    def waiting() -> bool:
        connection = agent._connection
        waiters = connection.changed._waiters  # type: ignore[attr-defined]
        return bool(waiters or (connection._loop is not None and connection._loop._driver))

    return waiting


def at_round(handle: RoundHandle) -> Waiting:
    """Whether somebody waits for the end of a round, or for its release."""
    return lambda: bool(handle.finished._watchers or handle.released._watchers)


def latest(trainer: TrainerAgent) -> Waiting:
    """As `at_round`, for the round that the trainer opened last."""

    def waiting() -> bool:
        handles = list(trainer._handles.values())
        return bool(handles and at_round(handles[-1])())

    return waiting


def commits(trainer: TrainerAgent, worker: WorkerAgent, version: int) -> None:
    """Both work: a version goes from one to the other."""
    thread = threading.Thread(target=worker.run, args=(version,))
    thread.start()
    assert trainer.publish(version, timeout=20.0).ok
    thread.join(10.0)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "call", ["wait_ready", "publish", "publish_nowait", "result", "released", "unregister", "void"]
)
def test_a_trainer_that_was_interrupted_goes_on(
    broker: Threaded, url: str, worker: WorkerAgent, call: str
) -> None:
    worker.attach({"w": torch.zeros(3)})
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": torch.ones(3)})
        version = 2
        match call:
            case "wait_ready":
                version = 1
                interrupt(lambda: trainer.wait_ready(5, timeout=FAR_S), in_condition(trainer))
            case "publish":
                interrupt(lambda: trainer.publish(1, timeout=FAR_S), latest(trainer))
            case "publish_nowait":
                trainer.publish_nowait(1)
                interrupt(lambda: trainer.publish_nowait(2, timeout=FAR_S), in_condition(trainer))
            case "result":
                handle = trainer.publish_nowait(1)
                interrupt(lambda: handle.result(FAR_S), at_round(handle))
            case "released":
                handle = trainer.publish_nowait(1)
                interrupt(lambda: handle.released.wait(FAR_S), at_round(handle))
            case "unregister":
                commits(trainer, worker, 1)
                # The worker has it mapped, and nobody works for it.
                interrupt(lambda: trainer.unregister(timeout=FAR_S), in_condition(trainer))
                with pytest.raises(RefusedError, match="nothing is registered"):
                    trainer.publish(2)
                trainer.register({"w": torch.ones(3)})
            case _:
                handle = trainer.publish_nowait(1)
                trainer._core.void = lambda call: None  # type: ignore[method-assign]
                interrupt(lambda: trainer.void(handle, timeout=FAR_S), in_condition(trainer))
                del trainer._core.void
        commits(trainer, worker, version)
        trainer.close(timeout=0.5)


def test_buffers_that_nobody_waited_for_can_be_asked_for_again(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    worker.attach({"w": torch.zeros(3)})
    commits(trainer, worker, 1)
    interrupt(lambda: trainer.unregister(timeout=FAR_S), in_condition(trainer))
    with pytest.raises(DeadlineError, match="are still mapped"):
        trainer.unregister(timeout=0.1)
    assert os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) != []
    thread = threading.Thread(target=worker.run)
    thread.start()
    trainer.unregister(timeout=20.0)
    trainer.unregister(timeout=0.1)
    assert os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) == []
    worker.stop()
    thread.join(10.0)


@pytest.mark.parametrize("call", ["run", "step", "wait_for"])
def test_a_worker_that_was_interrupted_goes_on(
    trainer: TrainerAgent, worker: WorkerAgent, call: str
) -> None:
    worker.attach({"w": torch.zeros(3)})
    worker.step(0.2)  # Answers the offer; then there is nothing to do but wait.
    calls: dict[str, Callable[[], object]] = {
        "run": worker.run,
        "step": lambda: worker.step(FAR_S),
        "wait_for": lambda: worker.wait_for(1, FAR_S),
    }
    interrupt(calls[call], in_condition(worker))
    commits(trainer, worker, 1)


def test_an_agent_that_was_interrupted_while_it_looked_for_a_broker_finds_it_later(
    url: str,
) -> None:
    with (
        TrainerAgent("policy", endpoint=url, connect_timeout=FAR_S) as trainer,
        WorkerAgent("policy", endpoint=url, connect_timeout=FAR_S) as worker,
    ):
        source, target = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
        interrupt(lambda: trainer.register(source), in_condition(trainer))
        interrupt(lambda: worker.attach(target), in_condition(worker))
        broker = Threaded(config_for(url))
        trainer.register(source)
        worker.attach(target)
        commits(trainer, worker, 1)
        worker.close()
        trainer.close()
        broker.stop()


def test_a_close_that_was_interrupted_has_closed(broker: Threaded, url: str) -> None:
    trainer = TrainerAgent("policy", endpoint=url)
    trainer.register({"w": torch.ones(3)})
    trainer.publish_nowait(1)
    interrupt(lambda: trainer.close(timeout=FAR_S), in_condition(trainer))
    assert trainer.closed
    eventually(lambda: not broker.broker.ledger.state.peers)


def test_a_goodbye_that_was_interrupted_leaves_no_segment(
    start_broker: Callable[[], Spawned], url: str
) -> None:
    broker = start_broker()
    trainer = TrainerAgent("policy", endpoint=url)
    trainer.register({"w": torch.ones(3)})
    broker.stop()
    interrupt(lambda: trainer.close(timeout=FAR_S), in_condition(trainer))
    assert os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) == []
    broker.go_on()
    eventually(lambda: not trainer.connected)


def test_an_interrupt_just_when_a_wait_has_let_go_of_the_lock_passes_through_and_all_goes_on(
    trainer: TrainerAgent, worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.attach({"w": torch.zeros(3)})
    changed = worker._connection.changed
    let_go = changed._release_save  # type: ignore[attr-defined]
    struck: list[int] = []

    def struck_after() -> object:
        state = let_go()
        if threading.current_thread() is threading.main_thread() and not struck:
            struck.append(1)
            raise KeyboardInterrupt
        return state

    monkeypatch.setattr(changed, "_release_save", struck_after)
    for nested in (False, True):
        struck.clear()
        with pytest.raises(KeyboardInterrupt):
            if nested:
                with worker._connection.mutex:
                    worker.run()
            else:
                worker.run()
        assert not worker._connection.mutex._is_owned()  # type: ignore[attr-defined]
    commits(trainer, worker, 1)


def test_a_signal_that_ends_no_wait_by_itself_is_heard_all_the_same(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    worker.attach({"w": torch.zeros(3)})
    interrupt(worker.run, in_condition(worker), aside=True)
    handle = trainer.publish_nowait(1)
    interrupt(lambda: handle.result(FAR_S), at_round(handle), aside=True)
    worker.run(until=1)
    assert handle.result(20.0).ok


def follower(url: str) -> None:
    """In a child: takes two versions."""
    with WorkerAgent("policy", endpoint=url) as worker:
        worker.attach({"w": torch.zeros(3)})
        worker.run(until=2)


def test_an_interrupt_while_a_message_is_taken_in_loses_nothing_of_it(
    trainer: TrainerAgent, url: str, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = spawn(follower, url)
    trainer.wait_ready(1, timeout=20.0)
    take = Connection._take
    struck: list[str] = []

    def struck_before(self: Connection, frames: list[bytes]) -> None:
        message = type(decode_from_broker(frames[0])).__name__
        if message == "Finished" and not struck:
            struck.append(threading.current_thread().name)
            signal.raise_signal(signal.SIGINT)
        take(self, frames)

    monkeypatch.setattr(Connection, "_take", struck_before)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.publish(1, timeout=20.0)
    finally:
        signal.signal(signal.SIGINT, former)
    assert struck == [threading.main_thread().name]
    assert trainer.last_version == 1
    assert trainer.publish(2, timeout=20.0).ok
    assert trainer._core.session.number == 1
    process.result()


def test_an_interrupt_while_the_first_agent_begins_to_connect_leaves_one_that_connects(
    broker: Threaded, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = PollLoop.start
    former = signal.signal(signal.SIGINT, signal.default_int_handler)

    def struck(self: PollLoop) -> None:
        signal.raise_signal(signal.SIGINT)
        start(self)

    monkeypatch.setattr(PollLoop, "start", struck)
    try:
        with TrainerAgent("policy", endpoint=url) as trainer:
            with pytest.raises(KeyboardInterrupt):
                trainer.wait_ready(0, timeout=20.0)
            trainer.wait_ready(0, timeout=20.0)
            assert trainer.connected
    finally:
        signal.signal(signal.SIGINT, former)
