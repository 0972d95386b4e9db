"""The end of an agent: in every state, from any thread, and when nobody has closed it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tensorlease.agents import Outcome, TrainerAgent, WorkerAgent, snapshot
from tensorlease.agents import agent as agent_module
from tensorlease.agents.copying import Run, copy_runs
from tensorlease.agents.hooks import RoundInfo
from tensorlease.agents.mappings import process_mappings
from tensorlease.agents.relay import RelayWorker
from tensorlease.agents.shm import ShmSegment, sweep
from tensorlease.agents.work import CopyWork, UnmapWork, Work
from tensorlease.protocol.errors import ClosedError, NoBrokerError

from .. import procs
from ..broker.raw_agents import Threaded, eventually
from ..conftest import agents_closed, await_no_agent
from ..procs import Spawn, Spawned

torch = pytest.importorskip("torch")

EXIT_LIMIT_S = 0.5

Copies = tuple[threading.Event, threading.Event]


@pytest.fixture
def slow_copy(worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Copies of the worker say when they have begun, and wait to be let go."""
    begun, go_on = threading.Event(), threading.Event()
    copy = worker._intake.copy

    def held(work: CopyWork) -> None:
        begun.set()
        assert go_on.wait(20.0)
        copy(work)

    monkeypatch.setattr(worker._intake, "copy", held)
    return begun, go_on


def serving(worker: WorkerAgent) -> threading.Thread:
    thread = threading.Thread(target=worker.run)
    thread.start()
    return thread


def seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


# ---------------------------------------------------------------- while something is under way


def test_a_copy_is_never_cut_off_and_its_thread_leaves_when_it_is_done(
    trainer: TrainerAgent, worker: WorkerAgent, slow_copy: Copies
) -> None:
    begun, go_on = slow_copy
    copy = torch.zeros(3)
    worker.attach({"w": copy})
    thread = serving(worker)
    handle = trainer.publish_nowait(1)
    assert begun.wait(10.0)

    assert seconds(lambda: worker.close(timeout=0.1)) < 2.0
    # It still reads: the memory is mapped, and nobody was told that it has left.
    assert process_mappings().held() != []
    assert not handle.released.done
    assert worker.connected
    go_on.set()
    handle.released.wait(10.0)
    thread.join(10.0)
    assert not thread.is_alive()
    assert process_mappings().held() == []
    assert copy.tolist() == [1.0] * 3
    assert handle.result(10.0).outcome is Outcome.FAILED


def test_a_hook_that_outlasts_the_limit_is_left_and_the_engine_woken_when_it_returns(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    aborted: list[str] = []
    worker.on_abort(lambda rnd, reason, torn: aborted.append(reason))

    @worker.on_prepare
    def prepare(rnd: RoundInfo) -> None:
        inside.set()
        assert go_on.wait(20.0)

    worker.attach({"w": torch.zeros(3)})
    thread = serving(worker)
    handle = trainer.publish_nowait(1)
    assert inside.wait(10.0)
    assert seconds(lambda: worker.close(timeout=0.1)) < 2.0
    assert handle.result(10.0).outcome is Outcome.FAILED
    assert aborted == []
    go_on.set()
    thread.join(10.0)
    assert not thread.is_alive()
    assert aborted == ["the worker closes"]


def test_what_ends_a_program_and_comes_from_the_last_hook_keeps_nobody_from_closing(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    @worker.on_prepare
    def prepare(rnd: RoundInfo) -> None:
        inside.set()
        assert go_on.wait(20.0)

    worker.on_abort(lambda rnd, reason, torn: sys.exit(3))
    worker.attach({"w": torch.zeros(3)})

    def serve() -> None:
        with pytest.raises(SystemExit), worker:
            worker.run()

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        trainer.publish_nowait(1)
        assert inside.wait(10.0)
        worker.close(timeout=0.1)
        go_on.set()
        served.result(10.0)


@pytest.mark.parametrize("tail", [False, True], ids=["an offer", "an offer that is taken back"])
def test_what_came_while_a_hook_outlasted_the_limit_is_not_tried_for_ever(
    trainer: TrainerAgent,
    worker: WorkerAgent,
    monkeypatch: pytest.MonkeyPatch,
    tail: bool,
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    aborted: list[str] = []
    worker.on_abort(lambda rnd, reason, torn: aborted.append(reason))

    @worker.on_prepare
    def prepare(rnd: RoundInfo) -> None:
        inside.set()
        assert go_on.wait(20.0)

    worker.attach({"w": torch.zeros(3)})
    thread = serving(worker)
    trainer.publish_nowait(1)
    assert inside.wait(10.0)
    more = trainer.register({"v": torch.ones(2)})
    eventually(lambda: worker._core.queue)
    if tail:
        threading.Thread(target=trainer.unregister, args=(more,), daemon=True).start()
        eventually(lambda: any(isinstance(work, UnmapWork) for work in worker._core.queue))
    worker.close(timeout=0.1)
    moved: list[Work] = []
    monkeypatch.setattr(worker._performer, "_move_data", moved.append)
    go_on.set()
    thread.join(5.0)
    assert not thread.is_alive()
    assert moved == []
    assert aborted == ["the worker closes"]
    assert process_mappings().held() == []


def test_a_hook_that_waits_as_long_as_it_should_does_not_outlast_the_limit(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    inside = threading.Event()

    @worker.on_prepare
    def prepare(rnd: RoundInfo) -> None:
        inside.set()
        while worker.goes_on:
            time.sleep(0.01)

    worker.attach({"w": torch.zeros(3)})
    thread = serving(worker)
    trainer.publish_nowait(1)
    assert inside.wait(10.0)
    worker.close(timeout=0.1)
    thread.join(5.0)
    assert not thread.is_alive()


def run_in_coroutine(worker: WorkerAgent) -> None:
    async def run() -> None:
        async for _ in worker.versions():
            pass

    asyncio.run(run())


@pytest.mark.parametrize("run", [WorkerAgent.run, run_in_coroutine])
def test_a_batch_that_was_at_hand_when_the_limit_was_over_is_not_read(
    trainer: TrainerAgent,
    worker: WorkerAgent,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    run: Callable[[WorkerAgent], object],
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    settle = worker._performer._require_settled

    def held(work: Work) -> None:
        settle(work)
        if isinstance(work, CopyWork):
            inside.set()
            assert go_on.wait(20.0)

    monkeypatch.setattr(worker._performer, "_require_settled", held)
    copy = torch.zeros(3)
    worker.attach({"w": copy})
    thread = threading.Thread(target=run, args=(worker,))
    thread.start()
    handle = trainer.publish_nowait(1)
    assert inside.wait(10.0)
    worker.close(timeout=0.1)
    handle.released.wait(10.0)
    go_on.set()
    thread.join(5.0)
    assert not thread.is_alive()
    assert copy.tolist() == [0.0] * 3 and not worker.torn
    assert "the worker closes" in caplog.text and "interrupted" not in caplog.text


def test_a_second_close_waits_for_the_first_within_its_own_limit(
    trainer: TrainerAgent, worker: WorkerAgent, slow_copy: Copies
) -> None:
    begun, go_on = slow_copy
    worker.attach({"w": torch.zeros(3)})
    thread = serving(worker)
    trainer.publish_nowait(1)
    assert begun.wait(10.0)
    first = threading.Thread(target=worker.close, args=(20.0,))
    first.start()
    eventually(lambda: worker.closed)
    assert 0.2 <= seconds(lambda: worker.close(timeout=0.2)) < 2.0
    assert first.is_alive()
    threading.Timer(0.1, go_on.set).start()
    worker.close(timeout=20.0)
    assert worker._closed.is_set()
    first.join(10.0)
    thread.join(10.0)
    assert not first.is_alive() and not thread.is_alive()


def test_of_many_threads_that_close_a_trainer_one_does(trainer: TrainerAgent) -> None:
    threads = [threading.Thread(target=trainer.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(ClosedError):
        trainer.publish(1)


def test_what_is_registered_while_another_thread_closes_is_given_back(
    trainer: TrainerAgent, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = trainer._registry.move

    def close_meanwhile(*args: object, **more: object) -> object:
        moved = move(*args, **more)  # type: ignore[arg-type]
        thread = threading.Thread(target=trainer.close)
        thread.start()
        thread.join(10.0)
        return moved

    monkeypatch.setattr(trainer._registry, "move", close_meanwhile)
    tensor = torch.full((5,), 3.0)
    with pytest.raises(ClosedError):
        trainer.register({"v": tensor})
    assert tensor.tolist() == [3.0] * 5
    assert os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) == []


def test_a_snapshot_that_is_being_made_while_another_thread_closes_stays_until_it_is(
    trainer: TrainerAgent, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish_nowait(1, snapshot=True, quorum=0).result(10.0)
    begun, go_on = threading.Event(), threading.Event()

    def held(runs: Sequence[Run]) -> None:
        begun.set()
        assert go_on.wait(20.0)
        assert memory() is not None  # Else this would be the end of the process.
        copy_runs(runs)

    monkeypatch.setattr(snapshot, "copy_runs", held)

    def publish() -> None:
        with pytest.raises(ClosedError):
            trainer.publish_nowait(2, snapshot=True, quorum=0)

    segment = trainer._snapshot._memory[0]
    assert isinstance(segment, ShmSegment)
    memory = weakref.ref(segment._block)
    del segment
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(publish)
        assert begun.wait(10.0)
        trainer.close()
        go_on.set()
        published.result(10.0)
    assert os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) == []


# ---------------------------------------------------------------- without a broker


def test_without_a_broker_closing_takes_no_longer_than_its_limit(
    start_broker: Callable[..., Spawned], url: str
) -> None:
    never = TrainerAgent(endpoint=url)
    assert seconds(lambda: never.close(timeout=0.0)) < 0.5
    looking = WorkerAgent(endpoint=url, connect_timeout=0.1)
    with pytest.raises(NoBrokerError):
        looking.attach({"w": torch.zeros(1)})
    assert seconds(lambda: looking.close(timeout=0.0)) < 0.5

    broker = start_broker()
    trainer, worker = TrainerAgent(endpoint=url), WorkerAgent(endpoint=url)
    trainer.register({"w": torch.ones(3)})
    worker.attach({"w": torch.zeros(3)})
    handle = trainer.publish_nowait(1)
    broker.kill()
    eventually(lambda: not trainer.connected and not worker.connected)
    assert seconds(lambda: worker.close(timeout=0.3)) < 1.5
    assert seconds(lambda: trainer.close(timeout=0.3)) < 1.5
    # The goodbyes go on behind, until there is somebody who answers them.
    start_broker(recovery=0.2)
    with contextlib.suppress(ClosedError):
        assert not handle.result(10.0).ok  # It was told before it had said goodbye.
    eventually(lambda: all(thread.name != "tensorlease" for thread in threading.enumerate()))


def outlive_the_broker(url: str) -> None:
    """Ends the process, as the interpreter does, with a round under way and nobody to tell."""
    agent_module.EXIT_LIMIT_S = EXIT_LIMIT_S
    trainer = TrainerAgent("policy", endpoint=url)
    trainer.register({"w": torch.ones(4)})
    trainer.publish_nowait(1)
    procs.say("under way")
    eventually(lambda: not trainer.connected)
    procs.say("alone")
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(0)


def test_a_trainer_whose_broker_is_gone_ends_in_less_than_five_seconds_and_with_code_0(
    start_broker: Callable[..., Spawned], spawn: Spawn, url: str
) -> None:
    broker = start_broker()
    child = spawn(outlive_the_broker, url)
    assert child.hear() == "under way"
    broker.kill()
    assert child.hear() == "alone"
    began = time.monotonic()
    assert child.join() == 0
    beyond_s = time.monotonic() - began - EXIT_LIMIT_S
    assert beyond_s < 1.0 <= 5.0 - agent_module.EXIT_LIMIT_S
    assert os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) == []


# ---------------------------------------------------------------- by itself


def refer(worker: WorkerAgent, how: str) -> None:
    """Has it take a tensor, and be referred to by something that it has been given."""
    model: Any = torch.nn.Module()
    model.register_buffer("w", torch.zeros(3))
    if how == "in its callback":
        worker.on_stage(lambda rnd, tensors: None if worker.goes_on else worker.stop())
        return
    if how == "in a hook":
        worker.on_abort(lambda rnd, reason, torn: worker.stop())
    elif how == "by its model":
        model.worker = worker
    worker.attach(model)


@pytest.mark.parametrize("referred", ["nowhere", "in a hook", "in its callback", "by its model"])
def test_a_worker_that_nobody_closed_is_named_and_gives_its_mappings_back(
    trainer: TrainerAgent, broker: Threaded, url: str, referred: str
) -> None:
    worker = WorkerAgent("policy", endpoint=url, replica="b")
    refer(worker, referred)
    thread = serving(worker)
    assert trainer.publish(1, timeout=20.0).ok
    worker.stop()
    thread.join(10.0)
    assert process_mappings().held() != []
    name = repr(worker)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del worker, thread
        gc.collect()
    said = [str(w.message) for w in caught if w.category is ResourceWarning]
    assert said == [f"{name} was never closed: call close(), or use it in a `with` statement"]
    eventually(lambda: not process_mappings().held())
    eventually(lambda: trainer.replicas == {})


def test_a_relay_that_nobody_closed_leaves(trainer: TrainerAgent, url: str) -> None:
    relay = RelayWorker("policy", lambda buffers: None, replica="b", endpoint=url)
    relay.join()
    eventually(lambda: "b" in trainer.replicas)
    del relay
    with pytest.warns(ResourceWarning, match="was never closed"):
        gc.collect()
    eventually(lambda: trainer.replicas == {})


def leave(url: str, how: str) -> None:
    """Leaves the process in the middle of a round, as the interpreter does at its end."""
    agent_module.EXIT_LIMIT_S = EXIT_LIMIT_S
    trainer = TrainerAgent("policy", endpoint=url)
    trainer.register({"w": torch.ones(4)})
    worker = WorkerAgent("policy", endpoint=url)
    worker.attach({"w": torch.zeros(4)})
    worker.on_prepare(lambda rnd: sys.exit(3))
    trainer.publish_nowait(1)
    procs.say("under way")
    try:
        if how == "os._exit":
            os._exit(7)
        if how == "main":
            raise RuntimeError("in main")
        worker.run()
    except (SystemExit, RuntimeError):
        # What the interpreter does then; a forked process would not, at its end.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        os._exit(3)


@pytest.mark.parametrize("how", ["hook", "main", "os._exit"])
def test_leaving_in_the_middle_never_hangs_and_in_order_leaves_no_segment(
    start_broker: Callable[..., Spawned], spawn: Spawn, url: str, how: str
) -> None:
    start_broker()
    child = spawn(leave, url, how)
    assert child.hear() == "under way"
    began = time.monotonic()
    assert child.join() == (7 if how == "os._exit" else 3)
    assert time.monotonic() - began < EXIT_LIMIT_S + agent_module.GOODBYE_S + 1.0
    directory = os.environ["TENSORLEASE_SHM_DIR"]
    if how == "os._exit":
        # Nobody could; the next trainer here does, or the broker of this user.
        assert len(os.listdir(directory)) == len(sweep(Path(directory))) == 1
    assert os.listdir(directory) == []
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": torch.ones(1)})
        assert trainer.replicas == {}


def test_an_agent_that_a_test_leaves_behind_is_named(trainer: TrainerAgent) -> None:
    with pytest.raises(AssertionError, match="left behind: .*<TrainerAgent .*'policy' rank=0/1>"):
        await_no_agent(0.1)


def test_an_agent_that_a_test_before_left_behind_is_not_told_of_again(
    trainer: TrainerAgent,
) -> None:
    assert not trainer.closed
    assert list(agents_closed(0.1)) == [None]


def test_of_one_that_works_at_nothing_it_is_not_said_that_it_is_in_a_hook(
    worker: WorkerAgent, caplog: pytest.LogCaptureFixture
) -> None:
    worker.attach({"w": torch.zeros(3)})
    thread = serving(worker)
    worker.close(0.0)
    thread.join(20.0)
    assert not thread.is_alive()
    assert "was in a hook" not in caplog.text
