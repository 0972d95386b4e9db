"""The trainer's side, end to end with a real broker and real workers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tensorlease.agents import RoundHandle, TrainerAgent, UnreleasedError, WorkerAgent
from tensorlease.agents.errors import ExportError
from tensorlease.protocol.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    RefusedError,
    RoundFailedError,
)
from tensorlease.protocol.records import Distribution, Fate, Outcome

from .. import procs
from ..broker.raw_agents import Threaded, eventually
from ..procs import Spawn, Spawned
from .serving import serving

torch = pytest.importorskip("torch")


@pytest.fixture
def trainer(broker: Threaded, url: str) -> Iterator[TrainerAgent]:
    agent = TrainerAgent("policy", endpoint=url)
    yield agent
    agent.close(timeout=0.5)


# ---------------------------------------------------------------- publishing


def test_a_worker_that_wants_nothing_but_empty_tensors_is_in_the_round(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    trainer.register({"a": torch.ones(3), "empty": torch.empty(0, 3)})
    worker = start_worker("r", {"empty": torch.zeros(0, 3)})
    assert trainer.publish(7, timeout=20.0).raise_for_status().version == 7
    eventually(lambda: worker.version == 7)


def test_a_published_version_has_equal_values_and_a_result_that_names_all(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    source = {"a": torch.randn(33, 7), "b": torch.arange(5), "empty": torch.empty(0, 3)}
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    trainer.register(source)
    worker = start_worker("r", target)
    result = trainer.publish(7).raise_for_status()
    assert all(torch.equal(source[name], target[name]) for name in source)
    assert worker.version == trainer.last_version == result.version == 7
    assert list(result.receivers) == ["r/0"]
    assert result.receivers["r/0"].fate is Fate.COMMITTED
    assert result.replicas["r"].current == 7
    assert result.nbytes == 33 * 7 * 4 + 5 * 8
    assert "r/0" in str(result)
    assert trainer.may_write()


def test_a_trainer_and_a_worker_in_processes_of_their_own_agree(
    start_broker: Callable[..., Spawned], spawn: Spawn, url: str
) -> None:
    start_broker()
    worker = spawn(attach_and_serve, url, 20)
    assert spawn(register_and_publish, url, 20).result() == worker.result()


def register_and_publish(url: str, versions: int) -> list[float]:
    weights = torch.zeros(1000)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": weights})
        for version in range(1, versions + 1):
            weights.normal_()
            trainer.publish(version).raise_for_status()
    return [float(x) for x in weights]


def attach_and_serve(url: str, versions: int) -> list[float]:
    weights = torch.zeros(1000)
    with WorkerAgent("policy", endpoint=url, replica="a") as worker:
        worker.attach({"w": weights})
        assert worker.run(until=versions) == versions
    return [float(x) for x in weights]


def test_tensors_that_the_user_drops_right_after_publishing_arrive_whole(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    go_on = threading.Event()
    target = torch.zeros(64, 64)

    def publish() -> RoundHandle:
        trainer.register({"w": torch.full((64, 64), 3.0)})
        return trainer.publish_nowait(1)

    start_worker("a", {"w": target}, lambda _: go_on.wait(10.0))
    handle = publish()
    others = [torch.full((64, 64), float(n)) for n in range(100)]
    go_on.set()
    assert handle.result(10.0).ok
    assert torch.all(target == 3.0)
    assert len(others) == 100


def test_only_when_the_slowest_of_all_receivers_is_done_is_memory_written_again(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    source = torch.zeros(5000)
    fast, slow = torch.zeros(5000), torch.zeros(5000)
    trainer.register({"w": source})
    seen: list[tuple[float, float]] = []
    start_worker("fast", {"w": fast})
    start_worker("slow", {"w": slow}, lambda _: threading.Event().wait(0.005))
    trainer.wait_ready(2)
    for version in range(1, 51):
        # Written only after `released`, forward of `finished`: as a training loop would.
        source.fill_(version)
        handle = trainer.publish_nowait(version)
        handle.released.wait(10.0)
        source.fill_(-1.0)
        assert handle.result(10.0).ok
        seen += [(float(t.min()), float(t.max())) for t in (fast, slow)]
    assert seen == [(float(v), float(v)) for v in range(1, 51) for _ in range(2)]


def test_what_a_worker_has_is_a_copy_that_outlives_the_trainers_memory(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    source, target = torch.full((1000,), 5.0), torch.zeros(1000)
    trainer.register({"w": source})
    start_worker("a", {"w": target})
    trainer.publish(1).raise_for_status()
    source.fill_(-1.0)
    trainer.close()
    del source
    assert torch.all(target == 5.0)


def test_all_that_is_registered_travels_in_each_round(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    first, second = torch.ones(3), torch.full((4,), 2.0)
    target = {"first": torch.zeros(3), "second": torch.zeros(4)}
    trainer.register({"first": first})
    start_worker("a", target)
    with pytest.raises(DeadlineError, match="second: not offered"):
        trainer.wait_ready(timeout=1.0)
    trainer.register({"second": second})
    trainer.publish(1).raise_for_status()
    assert torch.equal(target["first"], first)
    assert torch.equal(target["second"], second)


def test_ranks_assemble_what_a_worker_wants_from_pieces(
    broker: Threaded, url: str, start_worker: Callable[..., WorkerAgent]
) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    target = torch.zeros(6, 4)
    trainers = [TrainerAgent("policy", rank=rank, world_size=2, endpoint=url) for rank in (0, 1)]
    for rank, trainer in enumerate(trainers):
        rows = whole[3 * rank : 3 * rank + 3].clone()
        trainer.register({"w": rows}, regions={"w": ((6, 4), (3 * rank, 0))})
        assert trainer.distribution is Distribution.ASSEMBLED
    start_worker("a", {"w": target})
    handles = [trainer.publish_nowait(1) for trainer in trainers]
    results = [handle.result(10.0) for handle in handles]
    assert [r.outcome for r in results] == [Outcome.COMMITTED] * 2
    assert torch.equal(target, whole)
    assert trainers[0].group == trainers[1].group != ""
    for trainer in trainers:
        trainer.close()


def test_a_torchrun_environment_gives_rank_world_size_and_group(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with TrainerAgent(endpoint=url) as trainer:
        assert (trainer.rank, trainer.world_size, trainer.group) == (3, 4, "run-2")
    with TrainerAgent(endpoint=url, rank=0, world_size=1, group="mine") as trainer:
        assert (trainer.rank, trainer.world_size, trainer.group) == (0, 1, "mine")


async def test_a_coroutine_publishes_and_awaits(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    source, target = torch.ones(3), torch.zeros(3)
    trainer.register({"w": source})
    start_worker("a", {"w": target})
    assert (await trainer.apublish(1)).ok
    handle = trainer.publish_nowait(2)
    assert (await handle.finished).ok
    await handle.released
    assert (await handle).version == 2
    assert target.tolist() == [1.0] * 3


async def test_a_cancelled_await_takes_the_result_from_nobody_else(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    go_on = threading.Event()
    trainer.register({"w": torch.ones(3)})
    start_worker("a", {"w": torch.zeros(3)}, lambda _: go_on.wait(10.0))
    handle = trainer.publish_nowait(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await handle
    go_on.set()
    assert (await handle).ok


def test_of_threads_that_publish_at_once_each_waits_for_the_round_before(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    source, target = {"w": torch.zeros(10)}, {"w": torch.ones(10)}
    trainer.register(source)
    start_worker("a", target)
    trainer.wait_ready(1)
    for version in range(1, 11):  # the same one from all of them: it never falls
        with ThreadPoolExecutor(4) as pool:
            rounds = [pool.submit(trainer.publish, version) for _ in range(4)]
        assert all(one.result().ok for one in rounds)


# ---------------------------------------------------------------- refusals


def test_a_round_of_nothing_is_refused_here(trainer: TrainerAgent) -> None:
    with pytest.raises(RefusedError, match="nothing is registered") as refused:
        trainer.publish(1)
    assert refused.value.code == "no-source"
    with pytest.raises(ConfigError, match="no tensors"):
        trainer.register({})


@pytest.mark.parametrize("version", [0, -1, 2**63, True])
def test_a_version_that_cannot_be_is_refused_here(trainer: TrainerAgent, version: int) -> None:
    trainer.register({"w": torch.ones(1)})
    with pytest.raises(ConfigError, match="version"):
        trainer.publish(version)


def test_a_version_that_does_not_rise_is_refused_with_the_next_possible(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    trainer.register({"w": torch.ones(1)})
    start_worker("a", {"w": torch.zeros(1)})
    trainer.publish(5).raise_for_status()
    with pytest.raises(RefusedError, match="publish 6 or higher"):
        trainer.publish(4)
    assert trainer.publish(6).ok


def test_a_restarted_trainer_counts_on_where_the_old_one_stopped(
    broker: Threaded, url: str, start_worker: Callable[..., WorkerAgent]
) -> None:
    start_worker("a", {"w": torch.zeros(1)})
    for version in (1, 2, 3):
        with TrainerAgent("policy", endpoint=url, group="run") as trainer:
            trainer.register({"w": torch.ones(1)})
            assert trainer.last_version == version - 1
            assert trainer.publish(version).ok


def test_a_tensor_that_was_moved_away_is_named_before_anything_is_sent(
    trainer: TrainerAgent,
) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    trainer.register({"w": parameter})
    parameter.data = torch.zeros(3)
    with pytest.raises(ExportError, match="'w' no longer lies"):
        trainer.publish(1)


def test_pieces_do_not_fit_a_trainer_that_is_colocated(trainer: TrainerAgent) -> None:
    trainer.register({"w": torch.ones(1)})
    half = torch.ones(2)
    address = half.data_ptr()
    with pytest.raises(ConfigError, match="distribution='assembled'"):
        trainer.register({"v": half}, regions={"v": ((4,), (0,))})
    assert half.data_ptr() == address


def test_an_unknown_distribution_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'colocated' or 'assembled'"):
        TrainerAgent(distribution="scattered")


# ---------------------------------------------------------------- limits


def test_a_limit_names_who_is_missing_and_the_round_goes_on(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    go_on = threading.Event()
    trainer.register({"w": torch.ones(1)})
    worker = start_worker("slow", {"w": torch.zeros(1)}, lambda _: go_on.wait(10.0))
    trainer.wait_ready()
    handle = trainer.publish_nowait(1)
    eventually(lambda: worker._core.state.round is not None)
    with pytest.raises(DeadlineError, match=r"slow/0 \(pid \d+\).*goes on"):
        handle.result(0.05)
    with pytest.raises(DeadlineError, match="batch 0 is not released"):
        handle.released.wait(0.05)
    with pytest.raises(DeadlineError, match="version 2 was not opened: an earlier round"):
        trainer.publish(2, timeout=0.05)
    assert not trainer.may_write()
    go_on.set()
    assert handle.result(10.0).ok
    assert trainer.publish(2).ok


def test_too_few_replicas_fail_the_round_and_say_who_is_missing(trainer: TrainerAgent) -> None:
    trainer.register({"w": torch.ones(1)})
    result = trainer.publish(1, open_s=0.2)
    assert result.outcome is Outcome.FAILED
    with pytest.raises(RoundFailedError, match="no worker has joined") as failed:
        result.raise_for_status()
    assert failed.value.result is result


def test_with_none_wanted_and_none_there_the_round_is_empty(trainer: TrainerAgent) -> None:
    trainer.register({"w": torch.ones(1)})
    result = trainer.publish(1, min_replicas=0)
    assert result.outcome is Outcome.EMPTY
    assert not result.ok


def test_a_void_round_gives_the_licence_to_write_and_commits_nowhere(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    go_on = threading.Event()
    trainer.register({"w": torch.ones(1)})
    worker = start_worker("a", {"w": torch.zeros(1)}, lambda _: go_on.wait(10.0))
    trainer.wait_ready()
    handle = trainer.publish_nowait(1)
    eventually(lambda: worker._core.state.round is not None)
    assert trainer.void(handle) is False
    assert trainer.may_write()
    assert handle.result(10.0).outcome is Outcome.FAILED
    go_on.set()
    assert trainer.publish(2).ok
    assert trainer.void(2) is True
    assert worker.version == 2


def stopped_worker(url: str) -> None:
    with WorkerAgent("policy", endpoint=url, replica="stopped") as worker:
        worker.attach({"w": torch.zeros(1)})
        worker.on_prepare(lambda _: procs.say("preparing"))
        worker.on_prepare(lambda _: threading.Event().wait(0.5))
        worker.run(until=2)


def test_a_stopped_worker_keeps_its_lease_and_is_named_until_it_goes_on(
    start_broker: Callable[..., Spawned], spawn: Spawn, url: str
) -> None:
    start_broker(beat=0.1, silent=0.5, prepare=1.0, drain=0.3)
    worker = spawn(stopped_worker, url)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": torch.ones(1)})
        trainer.wait_ready()
        handle = trainer.publish_nowait(1)
        assert worker.hear() == "preparing"
        worker.stop()
        assert handle.result(10.0).outcome is Outcome.FAILED
        eventually(lambda: [holder.pid for holder in handle.stuck] == [worker.pid])
        with pytest.raises(DeadlineError, match=rf"stopped/0 \(pid {worker.pid}\) .*silent"):
            handle.released.wait(0.05)
        worker.go_on()
        handle.released.wait(10.0)
        assert handle.stuck == []
        assert trainer.publish(2, timeout=20.0).ok
        assert worker.join() == 0


def test_publish_does_not_return_while_a_worker_keeps_the_memory(
    start_broker: Callable[..., Spawned], spawn: Spawn, url: str
) -> None:
    start_broker(beat=0.1, silent=0.5, prepare=0.7, drain=0.3)
    worker = spawn(stopped_worker, url)
    trainer = TrainerAgent("policy", endpoint=url)
    trainer.register({"w": torch.ones(1)})
    trainer.wait_ready()
    errors: list[UnreleasedError] = []

    def publish() -> None:
        try:
            trainer.publish(1, timeout=3.0)
        except UnreleasedError as error:
            errors.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    worker.hear()
    worker.stop()
    thread.join(10.0)
    assert errors[0].result.outcome is Outcome.FAILED
    assert [holder.pid for holder in errors[0].handle.stuck] == [worker.pid]
    worker.kill()
    errors[0].handle.released.wait(5.0)
    trainer.close()


# ---------------------------------------------------------------- the end


def test_a_trainer_that_leaves_right_after_publishing_is_waited_for(
    start_broker: Callable[..., Spawned], spawn: Spawn, url: str
) -> None:
    start_broker()
    workers = [spawn(slow_worker, url, replica) for replica in ("a", "b")]
    leaving = spawn(publish_and_leave, url)
    assert leaving.join() == 0
    assert [worker.result() for worker in workers] == [(1, 4.0)] * 2


def slow_worker(url: str, replica: str) -> tuple[int, float]:
    weights = torch.zeros(4)
    with WorkerAgent("policy", endpoint=url, replica=replica) as worker:
        worker.on_prepare(lambda _: threading.Event().wait(1.0))
        worker.attach({"w": weights})
        version = worker.run(until=1)
    return version, float(weights.sum())


def publish_and_leave(url: str) -> None:
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": torch.ones(4)})
        trainer.publish_nowait(1, min_replicas=2)


def test_a_trainer_that_cannot_wait_any_longer_fails_its_round_for_all(
    broker: Threaded, url: str, start_worker: Callable[..., WorkerAgent]
) -> None:
    go_on = threading.Event()
    aborted: list[str] = []
    worker = start_worker("a", {"w": torch.zeros(1)}, lambda _: go_on.wait(10.0))
    worker.on_abort(lambda _, reason, torn: aborted.append(reason))
    trainer = TrainerAgent("policy", endpoint=url)
    trainer.register({"w": torch.ones(1)})
    trainer.wait_ready()
    handle = trainer.publish_nowait(1)
    eventually(lambda: worker._core.state.round is not None)
    began = time.monotonic()
    trainer.close(timeout=0.2)
    assert time.monotonic() - began < 3.0
    with pytest.raises(ClosedError, match="closed before the round had ended"):
        handle.result(1.0)
    go_on.set()
    eventually(lambda: aborted)
    assert "left" in aborted[0]
    assert worker.version == 0


def test_unregister_waits_until_no_worker_has_the_buffers_mapped(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    source, target = torch.ones(3), torch.zeros(3)
    buffers = trainer.register({"w": source})
    worker = start_worker("a", {"w": target})
    trainer.publish(1).raise_for_status()
    trainer.unregister(buffers)
    assert worker._intake._mapped == {}
    with pytest.raises(RefusedError, match="nothing is registered"):
        trainer.publish(2)
    source.fill_(4.0)
    trainer.register({"w": source})
    trainer.publish(2).raise_for_status()
    assert target.tolist() == [4.0] * 3


def test_leased_buffers_are_not_taken_back(
    trainer: TrainerAgent, start_worker: Callable[..., WorkerAgent]
) -> None:
    go_on = threading.Event()
    trainer.register({"w": torch.ones(1)})
    worker = start_worker("a", {"w": torch.zeros(1)}, lambda _: go_on.wait(10.0))
    trainer.wait_ready()
    handle = trainer.publish_nowait(1)
    eventually(lambda: worker._core.state.round is not None)
    with pytest.raises(RefusedError, match="leased") as refused:
        trainer.unregister()
    assert refused.value.code == "leased"
    go_on.set()
    assert handle.result(10.0).ok


@pytest.mark.parametrize("shadow", [False, True])
def test_a_model_that_was_given_another_parameter_is_not_published_as_it_was(
    broker: Threaded, url: str, worker: WorkerAgent, shadow: bool
) -> None:
    def model(value: float) -> Any:
        made = torch.nn.Linear(3, 2).requires_grad_(False)
        made.weight.fill_(value)
        return made

    ours, theirs = model(1.0), model(0.0)
    worker.attach(theirs)
    with TrainerAgent("policy", endpoint=url) as trainer, serving(worker):
        buffers = trainer.register(ours, shadow=shadow)
        trainer.wait_ready()
        assert trainer.publish(1).ok
        ours.load_state_dict(model(2.0).state_dict(), assign=True)
        with pytest.raises(ExportError, match="'weight' is another tensor in the model by now"):
            trainer.publish(2)
        trainer.unregister(buffers)
        trainer.register(ours, shadow=shadow)
        trainer.wait_ready()
        assert trainer.publish(2).ok
        assert theirs.weight.eq(2.0).all()
        written, theirs.weight = theirs.weight, model(0.0).weight
        failed = trainer.publish(3)
        assert "AttachError: tensor 'weight' is another tensor in the model since" in failed.reason
        assert "torn" not in failed.reason
        theirs.weight = written
        trainer.wait_ready()
        assert trainer.publish(4).ok
