"""Workers that give what comes to a callback, end to end with a real broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tensorlease.agents import ExportError, RoundInfo, TrainerAgent, WorkerAgent
from tensorlease.agents.mappings import process_mappings
from tensorlease.protocol.errors import ConfigError, DeadlineError
from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import Threaded
from .serving import weights, work_until
from .stages import Model, Views, publish

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")


def test_load_weights_fits_and_gets_every_tensor_with_its_shape_and_dtype(
    broker: Threaded, url: str, worker: WorkerAgent
) -> None:
    tensors = {
        "w": torch.arange(6.0).view(2, 3),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "fp8": torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "int4": torch.arange(8, dtype=torch.uint8),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).view(2, 3).t().contiguous(),
    }
    model = Model()
    infos: list[RoundInfo] = []

    def load(round: RoundInfo, tensors: Views) -> None:
        infos.append(round)
        model.load_weights(tensors)

    worker.on_stage(load)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(tensors)
        for version in (1, 2):
            tensors["w"] += 1
            assert publish(trainer, worker, version).ok
            assert {name: t.shape for name, t in model.loaded.items()} == {
                name: t.shape for name, t in tensors.items()
            }
            for name, tensor in tensors.items():
                got = model.loaded[name]
                assert got.dtype is tensor.dtype
                assert torch.equal(
                    got.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
                )
        assert infos == [RoundInfo("policy", v, v, trainer.group, "a", 0) for v in (1, 2)]
    assert model.calls == [list(model.loaded)] * 2
    assert worker.version == 2


def test_both_names_of_a_tied_tensor_are_given(trainer: TrainerAgent, worker: WorkerAgent) -> None:
    embed = torch.arange(4.0)
    trainer.register({"embed": embed, "head": embed})
    model = Model()
    worker.on_stage(lambda round, tensors: model.load_weights(tensors), ["embed", "head"])
    assert publish(trainer, worker, 1).ok
    assert {name: t.tolist() for name, t in model.loaded.items()} == {
        "embed": [0.0, 1.0, 2.0, 3.0],
        "head": [0.0, 1.0, 2.0, 3.0],
    }
    assert worker.unwanted == ("w",)


def test_attached_tensors_are_copied_and_only_the_others_are_given(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    trainer.register({"v": torch.full((2,), 5.0)})
    model, mine = Model(), weights()
    worker.on_stage(lambda round, tensors: model.load_weights(tensors))
    worker.attach(mine)
    assert publish(trainer, worker, 1).ok
    assert mine["w"].tolist() == [1.0] * 3
    assert model.calls == [["v"]]
    assert worker.unwanted == ()


@pytest.mark.parametrize("strict", [True, False])
def test_a_wanted_name_that_is_not_offered_is_named_and_the_worker_is_served_nothing(
    trainer: TrainerAgent, worker: WorkerAgent, strict: bool
) -> None:
    model = Model()
    worker.on_stage(
        lambda round, tensors: model.load_weights(tensors), ["w", "absent"], strict=strict
    )
    if not strict:
        assert publish(trainer, worker, 1).ok
        assert model.calls == [["w"]]
        return
    handle = trainer.publish_nowait(1, open_s=0.3)
    work_until(worker, lambda: handle.finished.done)
    result = handle.result(0)
    assert result.outcome is Outcome.FAILED
    assert "absent: not offered" in result.reason
    assert (model.calls, worker.version) == ([], 0)


def test_a_worker_that_wants_nothing_of_what_is_sent_never_commits(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    model = Model()
    worker.on_stage(lambda round, tensors: model.load_weights(tensors), ["x"], strict=False)
    handle = trainer.publish_nowait(1, open_s=0.3)
    work_until(worker, lambda: handle.finished.done)
    assert handle.result(0).outcome is Outcome.FAILED
    assert (model.calls, worker.version, worker.unwanted) == ([], 0, ("w",))


def test_what_is_sent_for_nobody_is_said_once_for_each_set(
    trainer: TrainerAgent, worker: WorkerAgent, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.register({f"more{n}": torch.zeros(1) for n in range(10)})
    worker.attach(weights())
    for version in range(1, 4):
        assert publish(trainer, worker, version).ok
    said = [r.message for r in caplog.records if "not wanted here" in r.message]
    assert len(said) == 1
    assert said[0].startswith("10 tensors are sent and not wanted here: more0, more1")
    assert worker.unwanted == tuple(sorted(f"more{n}" for n in range(10)))


# ---------------------------------------------------------------- what fails


def test_what_the_callback_raises_is_an_outcome_by_name_and_the_others_go_on(
    trainer: TrainerAgent, worker: WorkerAgent, other: WorkerAgent
) -> None:
    fail = True
    aborted: list[tuple[int, bool]] = []
    model = Model()

    def load(round: RoundInfo, tensors: Views) -> None:
        if fail:
            name, view = tensors[0]
            kept_by_the_frame = view[1:]
            raise ValueError(f"{name} has {len(kept_by_the_frame)} rows")
        model.load_weights(tensors)

    worker.on_stage(load)
    worker.on_abort(lambda round, reason, torn: aborted.append((round.version, torn)))
    result = publish(trainer, worker, 1)
    assert result.outcome is Outcome.MIXED
    assert result.receivers["a/0"].fate is Fate.EXPELLED
    assert result.receivers["a/0"].reason == "on_stage raised ValueError: w has 2 rows"
    assert result.replicas["other"].fate is Fate.COMMITTED
    work_until(worker, lambda: aborted)
    assert aborted == [(1, True)]
    assert trainer.may_write()
    assert not worker.holding
    fail = False
    assert publish(trainer, worker, 2).ok
    assert (worker.version, other.version) == (2, 2)


@pytest.mark.parametrize("kind", ["coroutine", "generator"])
def test_a_callback_that_has_loaded_nothing_is_no_success(
    trainer: TrainerAgent, worker: WorkerAgent, kind: str
) -> None:
    async def coroutine(round: RoundInfo, tensors: Views) -> None:
        pass

    def generator(round: RoundInfo, tensors: Views) -> Iterator[str]:
        for name, _ in tensors:
            yield name

    worker.on_stage(coroutine if kind == "coroutine" else generator)
    result = publish(trainer, worker, 1)
    assert result.outcome is Outcome.FAILED
    expected = "astep()" if kind == "coroutine" else "consume it in the callback"
    assert expected in result.reason
    assert worker.version == 0


# ---------------------------------------------------------------- coroutines


def test_a_callback_may_be_a_coroutine_function_and_gets_every_version(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    model = Model()

    @worker.on_stage
    async def load(round: RoundInfo, tensors: Views) -> None:
        await asyncio.sleep(0)
        await asyncio.to_thread(model.load_weights, tensors)

    async def serve() -> list[int]:
        seen: list[int] = []
        trainer.publish_nowait(1)
        async for version in worker.versions():
            seen.append(version)
            if version == 3:
                worker.stop()
            else:
                await asyncio.to_thread(trainer.publish_nowait, version + 1)
        return seen

    assert asyncio.run(asyncio.wait_for(serve(), 20.0)) == [1, 2, 3]
    assert model.calls == [["w"]] * 3


def test_a_thread_that_reads_on_after_a_cancelled_callback_keeps_the_memory(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    reading, go = threading.Event(), threading.Event()

    def read(tensors: Views) -> float:
        reading.set()
        assert go.wait(10.0)
        return float(tensors[0][1].sum())

    async def load(round: RoundInfo, tensors: Views) -> None:
        await asyncio.to_thread(read, tensors)

    worker.on_stage(load)
    handle = trainer.publish_nowait(1)

    async def serve() -> None:
        task = asyncio.create_task(worker.astep(10.0))
        await asyncio.to_thread(reading.wait, 10.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not trainer.may_write()
        with pytest.raises(DeadlineError):
            await asyncio.to_thread(handle.released.wait, 0.2)
        go.set()

    asyncio.run(asyncio.wait_for(serve(), 20.0))
    assert "CancelledError" in handle.result(5.0).reason
    handle.released.wait(5.0)


# ---------------------------------------------------------------- two agents in a process


def test_two_workers_of_a_process_share_each_mapping_which_is_closed_once(
    trainer: TrainerAgent, worker: WorkerAgent, url: str
) -> None:
    target, draft = Model(), Model()
    worker.on_stage(lambda round, tensors: target.load_weights(tensors))
    with WorkerAgent("policy", endpoint=url, replica="draft") as second:
        second.on_stage(lambda round, tensors: draft.load_weights(tensors))
        for version in (1, 2):
            handle = trainer.publish_nowait(version, min_replicas=2)

            def both(handle: Any = handle) -> bool:
                second.step(0.02)
                return bool(handle.finished.done)

            work_until(worker, both)
            assert handle.result(0).ok
            assert process_mappings().held() == [(trainer.instance, 0)]
        worker.close()
        assert process_mappings().held() == [(trainer.instance, 0)]
        handle = trainer.publish_nowait(3)
        assert second.wait_for(3, 10.0) == 3
    assert process_mappings().held() == []
    assert (target.calls, draft.calls) == ([["w"]] * 2, [["w"]] * 3)


def test_what_a_callback_gets_is_not_handed_on_and_its_clone_is(
    trainer: TrainerAgent, worker: WorkerAgent, url: str
) -> None:
    said: list[str] = []
    clones: dict[str, Tensor] = {}
    with TrainerAgent("relay", endpoint=url) as relay:

        def load(round: RoundInfo, tensors: Views) -> None:
            for name, tensor in tensors:
                with pytest.raises(ExportError) as refused:
                    relay.register({name: tensor})
                said.append(str(refused.value))
                with pytest.raises(ExportError) as refused:
                    relay.register({name: tensor}, shadow=True)
                said.append(str(refused.value))
                clones[name] = tensor.clone()

        worker.on_stage(load)
        assert publish(trainer, worker, 1).ok
        assert len(said) == 2
        assert all(
            f"'w' was received: it lies in buffer 0 of trainer {trainer.instance}" in text
            and "clone it first" in text
            for text in said
        )
        relay.register(clones)
        assert relay.publish(1, min_replicas=0).outcome is Outcome.EMPTY


def test_a_round_waits_for_no_longer_than_its_limit_for_a_second_worker_that_hangs(
    trainer: TrainerAgent, worker: WorkerAgent, url: str
) -> None:
    model = Model()
    worker.on_stage(lambda round, tensors: model.load_weights(tensors))
    with WorkerAgent("policy", endpoint=url, replica="draft") as second:
        second.on_stage(lambda round, tensors: None)
        trainer.publish_nowait(1, min_replicas=2)

        def both() -> bool:
            second.step(0.02)
            return second.version == worker.version == 1

        work_until(worker, both)
        handle = trainer.publish_nowait(2, prepare_s=0.3)
        work_until(worker, lambda: handle.finished.done)  # nobody serves the second
        result = handle.result(0)
        assert result.replicas["a"].fate is Fate.COMMITTED
        assert "draft/0" in result.receivers
        assert "was not ready in 0.3 s" in result.receivers["draft/0"].reason


# ---------------------------------------------------------------- wrong calls


def test_a_callback_that_cannot_be_is_refused(trainer: TrainerAgent, worker: WorkerAgent) -> None:
    def load(round: RoundInfo, tensors: Views) -> None: ...

    for names in ("w", list[str]()):
        with pytest.raises(ConfigError):
            worker.on_stage(load, names)
    for group in (("w",), "ab"):
        with pytest.raises(ConfigError):
            worker.on_stage(load, together=[group])
    with pytest.raises(ConfigError, match="is to come together with others, but is not wanted"):
        worker.on_stage(load, ["w"], together=[("w", "scale")])
    with pytest.raises(ConfigError, match="two groups"):
        worker.on_stage(load, together=[("w", "s"), ("w", "t")])
    with pytest.raises(ConfigError, match="must be something that can be called"):
        worker.on_stage(3)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"call attach\(\) or on_stage\(\) first"):
        worker.step()
    worker.on_stage(load)
    with pytest.raises(ConfigError, match="has an on_stage already"):
        worker.on_stage(load)
    assert publish(trainer, worker, 1).ok
    with pytest.raises(ConfigError, match="works already"):
        worker.attach(weights())
