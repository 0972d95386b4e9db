"""Views that a callback keeps: never acknowledged, and their memory stays promised."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tensorlease.agents import RoundInfo, TrainerAgent, WorkerAgent
from tensorlease.agents.intake import Copied
from tensorlease.agents.mappings import process_mappings
from tensorlease.agents.results import UnreleasedError
from tensorlease.agents.ring import RingOptions
from tensorlease.agents.work import CopyWork
from tensorlease.protocol.errors import DeadlineError
from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import eventually
from ..procs import Spawn
from .serving import weights, work_until
from .stages import Model, Views, publish

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")


@pytest.fixture
def worker_of() -> Iterator[Callable[..., WorkerAgent]]:
    """Makes a worker with a callback that runs in a thread, and closes it."""
    made: list[tuple[WorkerAgent, threading.Thread]] = []

    def make(url: str, load: Callable[[RoundInfo, Views], object]) -> WorkerAgent:
        agent = WorkerAgent("policy", endpoint=url, replica="a")
        agent.on_stage(load)
        made.append((agent, threading.Thread(target=agent.run)))
        made[-1][1].start()
        return agent

    yield make
    for agent, thread in made:
        agent.close(timeout=2.0)
        thread.join(10.0)


def test_a_view_of_a_slot_that_is_kept_keeps_the_slot_until_it_is_dropped(
    url: str, start_broker: Callable[..., object], worker_of: Callable[..., WorkerAgent]
) -> None:
    start_broker(drain=0.2)
    kept: list[Views] = []
    seen: list[list[float]] = []

    def load(round: RoundInfo, tensors: Views) -> None:
        seen.append(tensors[0][1].tolist())
        if round.version == 1:
            kept.append(tensors)

    worker = worker_of(url, load)
    with TrainerAgent("policy", endpoint=url, ring=RingOptions(1, 4096)) as trainer:
        with trainer.open_round(1, timeout=10.0) as ring:
            ring.send("w", torch.full((4,), 1.0))
        assert ring.result is not None
        assert "ViewsKeptError" in ring.result.reason
        eventually(lambda: trainer.ring.stuck == 1)
        assert kept[0][0][1].tolist() == [1.0] * 4
        kept.clear()
        eventually(lambda: trainer.ring.stuck == 0)
        with trainer.open_round(2) as ring:
            ring.send("w", torch.full((4,), 2.0))
        assert ring.result is not None and ring.result.ok
    assert seen == [[1.0] * 4, [2.0] * 4]
    assert worker.version == 2


def whole_list(tensors: Views) -> object:
    return tensors


def one_slice(tensors: Views) -> object:
    return tensors[0][1][1:]


def reshaped(tensors: Views) -> object:
    return tensors[0][1].view(1, 3).t()


def by_numpy(tensors: Views) -> object:
    return tensors[0][1].numpy()


def parameter(tensors: Views) -> object:
    return torch.nn.Parameter(tensors[0][1], requires_grad=False)


def storage(tensors: Views) -> object:
    return tensors[0][1].untyped_storage()


def closure(tensors: Views) -> object:
    view = tensors[0][1]
    return lambda: view.sum()


@pytest.mark.parametrize(
    "keep", [whole_list, one_slice, reshaped, by_numpy, parameter, storage, closure]
)
def test_a_view_that_is_kept_is_never_acknowledged_and_its_memory_stays_promised(
    trainer: TrainerAgent,
    worker: WorkerAgent,
    other: WorkerAgent,
    keep: Callable[[Views], object],
) -> None:
    trainer.register({"v": torch.zeros(2)})
    kept: list[object] = []
    aborted: list[tuple[int, str]] = []
    model = Model()

    def load(round: RoundInfo, tensors: Views) -> None:
        model.load_weights(tensors)
        if round.version == 1:
            kept.append(keep(tensors))

    worker.on_stage(load)
    worker.on_abort(lambda round, reason, torn: aborted.append((round.version, reason)))
    handle = trainer.publish_nowait(1)
    work_until(worker, lambda: handle.finished.done)
    result = handle.result(0)
    assert result.outcome is Outcome.MIXED
    reason = result.receivers["a/0"].reason
    assert reason.startswith("ViewsKeptError: on_stage kept views of")
    assert "'w'" in reason and ".clone()" in reason
    assert ("'v'" in reason) == (keep is whole_list)
    work_until(worker, lambda: aborted)
    assert aborted == [(1, reason)]

    assert not trainer.may_write()
    with pytest.raises(DeadlineError, match="a/0"):
        handle.released.wait(0.1)
    worker.step(0.05)
    assert worker.holding and not handle.released.done
    kept.clear()
    work_until(worker, lambda: handle.released.done)
    assert trainer.may_write() and not worker.holding
    assert aborted == [(1, reason)]
    assert publish(trainer, worker, 2).ok
    assert worker.version == 2


def test_a_view_in_a_reference_cycle_is_collected_and_no_view_that_is_kept(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    class Node:
        view: Tensor
        me: Node

    def load(round: RoundInfo, tensors: Views) -> None:
        node = Node()
        node.me, node.view = node, tensors[0][1]

    gc.disable()
    try:
        worker.on_stage(load)
        assert publish(trainer, worker, 1).ok
    finally:
        gc.enable()


def test_a_view_that_is_dropped_outside_of_any_call_is_noticed_by_the_next_beat(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    kept: list[Views] = []
    worker.on_stage(lambda round, tensors: kept.append(tensors))
    handle = trainer.publish_nowait(1)
    work_until(worker, lambda: handle.finished.done)
    kept.clear()
    handle.released.wait(5.0)  # nobody calls step()


def serve_two_versions(url: str) -> list[float]:
    with WorkerAgent("policy", endpoint=url, replica="b") as worker:
        tensors = weights()
        worker.attach(tensors)
        worker.run(until=2)
        return tensors["w"].tolist()


def test_a_stuck_view_is_named_with_its_pid_and_keeps_no_other_replica_from_later_rounds(
    url: str, start_broker: Callable[..., object], spawn: Spawn
) -> None:
    start_broker(drain=0.2)
    kept: list[Views] = []
    with (
        TrainerAgent("policy", endpoint=url) as trainer,
        WorkerAgent("policy", endpoint=url, replica="a") as worker,
    ):
        trainer.register({"w": torch.ones(3)})
        worker.on_stage(lambda round, tensors: kept.append(tensors))
        other = spawn(serve_two_versions, url)
        first = trainer.publish_nowait(1, min_replicas=2)
        work_until(worker, lambda: first.stuck)
        assert [(h.replica, h.member, h.pid) for h in first.stuck] == [("a", 0, os.getpid())]
        with pytest.raises(DeadlineError, match=rf"a/0 \(pid {os.getpid()}\)"):
            first.released.wait(0.05)
        result = trainer.publish_nowait(2).result(10.0)
        assert result.replicas["b"].fate is Fate.COMMITTED
        assert other.result() == [1.0] * 3
        assert not first.released.done
        kept.clear()
        work_until(worker, lambda: first.released.done)


def test_a_worker_that_holds_views_says_no_goodbye_until_they_are_gone(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    kept: list[Views] = []
    worker.on_stage(lambda round, tensors: kept.append(tensors))
    handle = trainer.publish_nowait(1)
    work_until(worker, lambda: handle.finished.done)
    worker.close(timeout=0.1)
    assert not trainer.may_write()
    assert process_mappings().held() == [(trainer.instance, 0)]
    with pytest.raises(DeadlineError):
        handle.released.wait(1.5)
    kept.clear()
    handle.released.wait(5.0)
    eventually(lambda: not trainer.replicas)
    assert process_mappings().held() == []


def test_a_worker_that_holds_views_is_not_collected(trainer: TrainerAgent, url: str) -> None:
    kept: list[Views] = []

    def serve() -> Any:
        lost = WorkerAgent("policy", endpoint=url, replica="lost")
        lost.on_stage(lambda round, tensors: kept.append(tensors))
        handle = trainer.publish_nowait(1)
        work_until(lost, lambda: handle.finished.done)
        return handle

    handle = serve()
    gc.collect()
    with pytest.raises(DeadlineError):
        handle.released.wait(1.5)

    def drop() -> None:
        kept.clear()
        handle.released.wait(5.0)
        eventually(lambda: not trainer.replicas)

    with pytest.warns(ResourceWarning, match="never closed"):
        drop()
    eventually(lambda: not process_mappings().held())


def test_an_interrupt_in_the_callback_passes_on_and_leaves_no_view(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    def load(round: RoundInfo, tensors: Views) -> None:
        if round.version == 1:
            raise KeyboardInterrupt

    worker.on_stage(load)
    handle = trainer.publish_nowait(1)
    with pytest.raises(KeyboardInterrupt):
        worker.step(10.0)
    assert handle.result(10.0).outcome is Outcome.FAILED
    handle.released.wait(5.0)
    assert publish(trainer, worker, 2).ok


def test_publish_says_who_keeps_the_memory(trainer: TrainerAgent, worker: WorkerAgent) -> None:
    kept: list[Views] = []
    worker.on_stage(lambda round, tensors: kept.append(tensors))
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        with pytest.raises(UnreleasedError) as caught:
            trainer.publish(1, timeout=4.0)
        assert "ViewsKeptError" in caught.value.result.reason
    finally:
        kept.clear()
        worker.stop()
        thread.join(10.0)


def test_close_while_another_thread_is_in_the_callback_says_no_goodbye_before_it_returns(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    reading, go = threading.Event(), threading.Event()
    read: list[list[float]] = []

    def load(round: RoundInfo, tensors: Views) -> None:
        reading.set()
        assert go.wait(10.0)
        read.append(tensors[0][1].tolist())

    worker.on_stage(load)
    thread = threading.Thread(target=worker.run)
    thread.start()
    handle = trainer.publish_nowait(1)
    assert reading.wait(10.0)
    worker.close(timeout=0.1)
    assert not trainer.may_write()
    with pytest.raises(DeadlineError):
        handle.released.wait(0.3)
    go.set()
    thread.join(10.0)
    handle.released.wait(5.0)
    assert read == [[1.0] * 3]
    eventually(lambda: not trainer.replicas)
    assert process_mappings().held() == []


def test_a_batch_whose_coroutine_is_cancelled_while_it_is_read_is_given_up(
    trainer: TrainerAgent, worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go = threading.Event(), threading.Event()
    copy = worker._intake.copy

    def slow(work: CopyWork) -> Copied:
        copied = copy(work)
        reading.set()
        assert go.wait(10.0)
        return copied

    called: list[int] = []
    worker.on_stage(lambda round, tensors: called.append(round.version))
    handle = trainer.publish_nowait(1)

    async def serve() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(worker._intake, "copy", slow)
            task = asyncio.create_task(worker.astep(10.0))
            await asyncio.to_thread(reading.wait, 10.0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not handle.released.done
            go.set()
        result = await asyncio.to_thread(handle.result, 5.0)
        assert "the worker was interrupted" in result.reason
        await asyncio.to_thread(handle.released.wait, 5.0)
        await asyncio.to_thread(trainer.publish_nowait, 2)
        assert await worker.astep(10.0) == 2

    asyncio.run(asyncio.wait_for(serve(), 20.0))
    assert called == [2]
