"""The worker's side, end to end with a real broker and real trainers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tensorlease.agents import RoundInfo, TrainerAgent, WorkerAgent
from tensorlease.agents.mappings import process_mappings
from tensorlease.protocol.errors import ClosedError, ConfigError, DeadlineError
from tensorlease.protocol.records import Outcome

from ..broker.raw_agents import Threaded, eventually
from ..procs import Spawned
from .conftest import StartWorker
from .serving import weights, work_until

torch = pytest.importorskip("torch")


# ---------------------------------------------------------------- working


def test_a_step_returns_the_version_that_it_committed(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    tensors = weights()
    worker.attach(tensors)
    handle = trainer.publish_nowait(1)
    assert worker.step(10.0) == 1
    assert tensors["w"].tolist() == [1.0] * 3
    assert handle.result(10.0).ok
    assert worker.step() is None


def test_a_step_without_a_limit_of_its_own_does_not_wait(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    worker.attach(weights())
    began = time.monotonic()
    assert worker.step() is None
    assert worker.step(0.2) is None
    assert time.monotonic() - began < 5.0


def test_steps_that_never_wait_serve_a_round_between_other_work(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    worker.attach(weights())
    handle = trainer.publish_nowait(1)
    done: list[int] = []

    def step() -> bool:
        if (version := worker.step()) is not None:
            done.append(version)
        return bool(done)

    eventually(step)
    assert done == [1]
    assert handle.result(10.0).ok


def test_wait_for_works_until_the_version_is_there_or_says_where_it_is(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    worker.attach(weights())
    trainer.publish_nowait(3)
    assert worker.wait_for(2, 10.0) == 3
    with pytest.raises(DeadlineError, match="at version 3"):
        worker.wait_for(4, 0.05)


def test_wait_for_waits_for_the_thread_that_runs_the_worker(
    trainer: TrainerAgent, other: WorkerAgent
) -> None:
    trainer.publish_nowait(1)
    assert other.wait_for(1, 10.0) == 1
    with pytest.raises(ConfigError, match="another thread"):
        other.step()


def test_run_returns_when_it_is_stopped_and_can_be_called_again(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    worker.attach(weights())
    returned: list[int] = []
    thread = threading.Thread(target=lambda: returned.append(worker.run()))
    thread.start()
    eventually(worker._serving.locked)
    worker.stop()
    thread.join(10.0)
    assert returned == [0]
    trainer.publish_nowait(1)
    assert worker.run(until=1) == 1


def test_a_stop_that_comes_before_run_is_not_lost(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    worker.attach(weights())
    worker.stop()
    assert worker.run() == 0
    trainer.publish_nowait(1)
    assert worker.run(until=1) == 1


def test_hooks_are_called_in_order_in_the_thread_that_works(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    calls: list[tuple[str, int, int]] = []
    tensors = weights()

    def note(name: str) -> Callable[[RoundInfo], object]:
        return lambda rnd: calls.append((name, int(tensors["w"].sum()), threading.get_ident()))

    infos: list[RoundInfo] = []
    worker.on_prepare(note("first"))
    worker.on_prepare(note("second"))
    worker.on_commit(note("commit"))
    worker.on_commit(infos.append)
    worker.attach(tensors)
    trainer.publish_nowait(4)
    worker.wait_for(4, 10.0)
    me = threading.get_ident()
    assert calls == [("first", 0, me), ("second", 0, me), ("commit", 3, me)]
    assert infos == [RoundInfo("policy", 4, 1, trainer.group, "a", 0)]


def test_steady_rounds_plan_once_and_map_once(
    trainer: TrainerAgent, worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.attach(weights())
    plans = 0
    plan = worker._intake.plan

    def counting(offers: object) -> object:
        nonlocal plans
        plans += 1
        return plan(offers)  # type: ignore[arg-type]

    monkeypatch.setattr(worker._intake, "plan", counting)
    for version in range(1, 11):
        trainer.publish_nowait(version)
        worker.wait_for(version, 10.0)
    assert plans == 1
    assert process_mappings().held() == [(trainer.instance, 0)]


def test_all_members_of_a_replica_switch_together(
    trainer: TrainerAgent, worker: WorkerAgent, url: str
) -> None:
    members = [
        WorkerAgent("policy", endpoint=url, replica="pair", member=m, size=2) for m in (0, 1)
    ]
    threads = [threading.Thread(target=member.run) for member in members]
    members[0].attach(weights())
    with pytest.raises(DeadlineError, match="pair waits for member 1 of 2"):
        trainer.wait_ready(timeout=0.3)
    members[1].attach(weights())
    for thread in threads:
        thread.start()
    result = trainer.publish(1)
    assert result.ok
    assert sorted(result.receivers) == ["pair/0", "pair/1"]
    for member, thread in zip(members, threads, strict=True):
        assert member.version == 1
        member.close()
        thread.join(10.0)


def test_a_worker_that_comes_late_is_offered_what_was_registered_before(
    trainer: TrainerAgent, other: WorkerAgent, worker: WorkerAgent
) -> None:
    assert trainer.publish(1).ok
    tensors = {"mine": torch.zeros(3)}
    worker.attach(tensors, rename={"mine": "w"})
    trainer.publish_nowait(2)
    assert worker.wait_for(2, 10.0) == 2
    assert tensors["mine"].tolist() == [1.0] * 3


def test_who_waits_for_what_another_thread_does_is_told_to_stop_with_it(
    worker: WorkerAgent,
) -> None:
    worker.attach(weights())
    serving = threading.Thread(target=worker.run)
    serving.start()
    eventually(worker._serving.locked)

    def wait() -> None:
        with pytest.raises(
            DeadlineError, match="not at version 1 when it was stopped: this worker is at version 0"
        ):
            worker.wait_for(1, 60.0)

    waiting = threading.Thread(target=wait)
    waiting.start()
    eventually(lambda: worker._connection.changed._waiters)  # type: ignore[attr-defined]
    worker.stop()
    for thread in (serving, waiting):
        thread.join(5.0)
        assert not thread.is_alive()


# ---------------------------------------------------------------- with asyncio


async def test_a_coroutine_serves_rounds_and_its_hooks_may_be_coroutines(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    calls: list[tuple[str, int]] = []

    @worker.on_prepare
    async def prepare(rnd: RoundInfo) -> None:
        await asyncio.sleep(0)
        calls.append(("prepare", threading.get_ident()))

    worker.on_commit(lambda rnd: calls.append(("commit", threading.get_ident())))
    tensors = weights()
    worker.attach(tensors)
    trainer.publish_nowait(1)
    assert await worker.astep(10.0) == 1
    me = threading.get_ident()
    assert calls == [("prepare", me), ("commit", me)]
    assert tensors["w"].tolist() == [1.0] * 3
    assert await worker.astep() is None


async def test_versions_yields_each_committed_version_until_the_worker_is_closed(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    worker.attach(weights())
    seen: list[int] = []
    handle = trainer.publish_nowait(1)
    async for version in worker.versions():
        seen.append(version)
        assert (await handle).ok
        await handle.released
        if version == 3:
            break
        handle = trainer.publish_nowait(version + 1)
    assert seen == [1, 2, 3]


async def test_a_cancelled_step_leaves_the_worker_able_to_go_on(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    worker.attach(weights())
    task = asyncio.create_task(worker.astep(30.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    trainer.publish_nowait(1)
    assert await worker.astep(10.0) == 1


@pytest.mark.parametrize("callback", [False, True], ids=["a copy", "a callback"])
async def test_a_batch_for_which_there_is_no_thread_puts_the_worker_out_of_one_round_alone(
    trainer: TrainerAgent, worker: WorkerAgent, callback: bool
) -> None:
    if callback:
        worker.on_stage(lambda rnd, tensors: None)
    else:
        worker.attach(weights())
    loop, ended = asyncio.get_running_loop(), ThreadPoolExecutor()
    worker.on_prepare(lambda rnd: loop.set_default_executor(ended) if rnd.version == 1 else None)
    ended.shutdown()
    handle = trainer.publish_nowait(1)
    with pytest.raises(RuntimeError, match="shutdown"):
        await worker.astep(10.0)
    loop.set_default_executor(ThreadPoolExecutor())
    assert await worker.astep(0.2) is None
    await handle.released
    assert "interrupted" in (await handle).reason
    trainer.publish_nowait(2)
    assert await worker.astep(10.0) == 2


def test_a_coroutine_hook_in_plain_code_puts_the_worker_out_and_says_why(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    async def prepare(rnd: RoundInfo) -> None:
        raise AssertionError("never runs")

    worker.on_prepare(prepare)
    worker.attach(weights())
    handle = trainer.publish_nowait(1)
    work_until(worker, lambda: handle.finished.done)
    assert "TypeError: this hook is a coroutine function" in handle.result(0).reason


def test_a_second_thread_that_would_work_for_the_worker_is_refused_by_name(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    worker.attach(weights())
    thread = threading.Thread(target=worker.run)
    thread.start()
    eventually(worker._serving.locked)
    calls: list[Callable[[], object]] = [worker.run, lambda: worker.step(10.0)]
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value) == (
            f"{worker!r} is run by another thread or coroutine already: wait for what it does there,"
            " or end that by stop()"
        )
    worker.stop()
    thread.join(10.0)
    assert worker.step() is None


def test_agents_of_one_process_keep_their_channels_apart_and_share_one(
    broker: Threaded, url: str
) -> None:
    """A policy with two workers and a critic with one, all here, with rounds at the same time."""
    with ExitStack() as stack:
        trainers = {
            name: stack.enter_context(TrainerAgent(name, endpoint=url))
            for name in ("policy", "critic")
        }
        for factor, trainer in enumerate(trainers.values(), 1):
            trainer.register({"w": torch.full((3,), 10.0 * factor)})
        copies = []
        threads = []
        for channel, replica in (("policy", "a"), ("policy", "b"), ("critic", "a")):
            worker = stack.enter_context(WorkerAgent(channel, endpoint=url, replica=replica))
            copies.append(torch.zeros(3))
            worker.attach({"w": copies[-1]})
            threads.append(threading.Thread(target=worker.run, kwargs={"until": 5}))
            threads[-1].start()
        trainers["policy"].wait_ready(2, timeout=20.0)
        for version in range(1, 6):
            handles = [trainer.publish_nowait(version) for trainer in trainers.values()]
            results = [handle.result(20.0) for handle in handles]
            assert all(result.ok for result in results)
            assert [set(result.receivers) for result in results] == [{"a/0", "b/0"}, {"a/0"}]
        for thread in threads:
            thread.join(10.0)
        assert [copy[0].item() for copy in copies] == [10.0, 10.0, 20.0]


# ---------------------------------------------------------------- the end


def test_closing_finishes_the_round_at_hand(trainer: TrainerAgent, worker: WorkerAgent) -> None:
    worker.attach(weights())
    work_until(worker, lambda: worker._intake._mapped)
    handle = trainer.publish_nowait(1)
    eventually(lambda: worker._core.state.round)
    worker.close()
    assert handle.result(10.0).ok
    with pytest.raises(ClosedError):
        worker.step()
    assert process_mappings().held() == []


def test_closing_leaves_a_round_that_does_not_end_and_wakes_the_engine(
    broker: Threaded, url: str, worker: WorkerAgent
) -> None:
    aborted: list[str] = []
    worker.on_abort(lambda rnd, reason, torn: aborted.append(reason))
    trainers = [TrainerAgent("policy", rank=rank, world_size=2, endpoint=url) for rank in (0, 1)]
    for rank, trainer in enumerate(trainers):
        trainer.register({"w": torch.ones(2)}, regions={"w": ((4,), (2 * rank,))})
    worker.attach({"w": torch.zeros(4)})
    first, second = trainers
    handle = first.publish_nowait(1)
    # Opened but never closed: the second rank's batch does not come.
    with second._connection.acting():
        second._core.open(first._core.state.calls[handle.call].terms)
    work_until(worker, lambda: worker._core.state.torn)
    worker.close(timeout=0.2)
    assert aborted == ["the worker closes"]
    assert handle.result(10.0).outcome is Outcome.FAILED
    for trainer in trainers:
        trainer.close(timeout=0.2)


def test_closing_from_another_thread_ends_run(
    trainer: TrainerAgent, worker: WorkerAgent, start_broker: Callable[..., Spawned]
) -> None:
    worker.attach(weights())
    thread = threading.Thread(target=worker.run)
    thread.start()
    eventually(worker._serving.locked)
    worker.close()
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_hook_cannot_close_its_worker_and_is_told_what_to_do(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    errors: list[str] = []

    def commit(rnd: RoundInfo) -> None:
        try:
            worker.close()
        except ConfigError as error:
            errors.append(str(error))
        worker.stop()

    worker.on_commit(commit)
    worker.attach(weights())
    trainer.publish_nowait(1)
    assert worker.run() == 1
    assert "call stop() there" in errors[0]


def test_a_member_that_attends_takes_no_tensors_runs_its_hooks_and_votes(
    trainer: TrainerAgent, url: str, start_worker: StartWorker
) -> None:
    target = torch.zeros(3)
    taking = start_worker("a", {"w": target}, member=1, size=2)
    with WorkerAgent("policy", endpoint=url, replica="a", member=0, size=2) as leading:
        seen: list[str] = []
        leading.on_prepare(lambda round: seen.append(f"prepare {round.version}"))
        leading.on_commit(lambda round: seen.append(f"commit {round.version}"))
        leading.attend()
        with pytest.raises(ConfigError, match="has its tensors already"):
            leading.attach({"w": torch.zeros(3)})
        thread = threading.Thread(target=leading.run, args=(1,))
        thread.start()
        trainer.wait_ready()
        result = trainer.publish(1)
        thread.join(10.0)
        assert result.ok, result
        assert seen == ["prepare 1", "commit 1"]
        assert (leading.version, taking.version) == (1, 1)
        assert target.tolist() == [1.0, 1.0, 1.0]


def test_who_takes_tensors_cannot_attend_as_well(worker: WorkerAgent) -> None:
    worker.attach({"w": torch.zeros(3)})
    with pytest.raises(ConfigError, match="takes tensors already"):
        worker.attend()
