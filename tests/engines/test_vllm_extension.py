"""Workers of a vLLM without backends take versions by methods that are added to them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tensorlease.agents import TrainerAgent
from tensorlease.engines.member import EngineMember, UpdateError
from tensorlease.engines.vllm_extension import WorkerExtension
from tensorlease.protocol.errors import ConfigError

from ..broker.raw_agents import eventually

SIZE = 2


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}
        self.threads: set[int] = set()
        self.fails = ""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self.fails:
            text, self.fails = self.fails, ""
            raise RuntimeError(text)
        self.threads.add(threading.get_ident())
        self.loaded.update(weights)


class Worker:
    """What a vLLM worker has, and nothing else."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.device = torch.device("cpu")
        self.model_runner = SimpleNamespace(model=Model())
        parallel = SimpleNamespace(world_size=SIZE, data_parallel_rank=0, data_parallel_size=1)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, model_config=None)


class Extended(Worker, WorkerExtension):
    """As vLLM makes it, with `--worker-extension-cls`."""


class Engine:
    """An engine of two workers, and its `collective_rpc`."""

    def __init__(self) -> None:
        self.workers = [Extended(rank) for rank in range(SIZE)]
        self._pool = ThreadPoolExecutor(SIZE)

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        calls = [self._pool.submit(getattr(worker, method), *args) for worker in self.workers]
        return [call.result(30.0) for call in calls]

    def weights(self) -> list[list[float]]:
        return [worker.model_runner.model.loaded["w"].tolist() for worker in self.workers]

    def members(self) -> list[EngineMember]:
        made = [worker._tensorlease_member for worker in self.workers]
        return [member for member in made if member is not None]

    def close(self) -> None:
        self.collective_rpc("tensorlease_close")
        self._pool.shutdown()


@pytest.fixture
def processed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The models whose weights were processed, by a vLLM that has no layerwise reload."""
    done: list[object] = []
    names = ["vllm", "vllm.model_executor", "vllm.model_executor.model_loader"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    utils = ModuleType("vllm.model_executor.model_loader.utils")
    utils.process_weights_after_loading = (  # type: ignore[attr-defined]
        lambda model, config, device: done.append(model)
    )
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    return done


@pytest.fixture
def engine(trainer: TrainerAgent, url: str, processed: list[object]) -> Iterator[Engine]:
    made = Engine()
    assert made.collective_rpc("tensorlease_init", "policy", "engine", url) == [0, 1]
    trainer.wait_ready(["engine"], timeout=20.0)
    yield made
    made.close()


def test_versions_are_received_by_all_workers_and_processed_once(
    trainer: TrainerAgent, engine: Engine, processed: list[object]
) -> None:
    for version in (1, 2):
        handle = trainer.publish_nowait(version)
        # Over HTTP both are text.
        assert engine.collective_rpc("tensorlease_receive", str(version), "20") == [version] * SIZE
        assert handle.result(20.0).ok
    assert engine.weights() == [[1.0] * 3] * SIZE
    assert len(processed) == 2 * SIZE
    # A trainer's memory may change afterwards: nothing of it is kept.
    assert trainer.may_write()


def test_layers_are_loaded_anew_where_vllm_can(
    trainer: TrainerAgent, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    reload: Any = ModuleType("vllm.model_executor.model_loader.reload")
    reload.initialize_layerwise_reload = lambda model: calls.append("initialize")
    reload.finalize_layerwise_reload = lambda model, config: calls.append("finalize")
    loader = sys.modules["vllm.model_executor.model_loader"]
    monkeypatch.setattr(loader, "reload", reload, raising=False)
    handle = trainer.publish_nowait(1)
    engine.collective_rpc("tensorlease_receive", 1)
    assert handle.result(20.0).ok
    assert calls == ["initialize", "initialize", "finalize", "finalize"]


def test_a_version_whose_first_round_failed_untold_may_be_received_of_the_second(
    trainer: TrainerAgent, engine: Engine
) -> None:
    failed = trainer.publish_nowait(1)
    eventually(lambda: all(member.worker.goes_on for member in engine.members()))
    assert not trainer.void(failed, 20.0)
    eventually(lambda: all(member._missed for member in engine.members()))
    trainer.wait_ready(["engine"], timeout=20.0)
    handle = trainer.publish_nowait(1)
    engine.collective_rpc("tensorlease_receive", 1, 20.0)
    assert handle.result(20.0).ok


def test_what_one_worker_raises_is_the_reason_of_all_and_the_next_version_repairs_it(
    trainer: TrainerAgent, engine: Engine, processed: list[object]
) -> None:
    engine.workers[1].model_runner.model.fails = "no such parameter"
    handle = trainer.publish_nowait(1)
    with pytest.raises(UpdateError, match="version 1 did not come: .*no such parameter"):
        engine.collective_rpc("tensorlease_receive", 1, 20.0)
    result = handle.result(20.0)
    assert not result.ok
    assert "no such parameter" in result.reason
    assert not processed
    trainer.wait_ready(["engine"], timeout=20.0)
    handle = trainer.publish_nowait(2)
    engine.collective_rpc("tensorlease_receive", 2, 20.0)
    assert handle.result(20.0).ok


def test_what_it_is_told_in_the_wrong_order_or_form_is_refused(engine: Engine) -> None:
    worker = engine.workers[0]
    with pytest.raises(ConfigError, match="version 'newest', timeout '20': must be numbers"):
        worker.tensorlease_receive("newest", "20")
    worker.tensorlease_close()
    with pytest.raises(UpdateError, match="tensorlease_init has to come before"):
        worker.tensorlease_receive(1)


def test_it_adds_no_name_that_a_worker_of_vllm_may_have() -> None:
    names = [name for name in dir(WorkerExtension) if not name.startswith("__")]
    assert names
    assert all(name.lstrip("_").startswith("tensorlease_") for name in names), names
