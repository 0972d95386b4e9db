"""Workers whose engine loads by itself once, and whose loader's copies are repeated, end to end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from tensorlease.agents import TrainerAgent, WorkerAgent

from ..broker.raw_agents import Threaded
from .loaders import FALLBACK, IGNORED, EngineModel, checkpoint, expected, require_equal
from .serving import serving
from .stages import publish

if TYPE_CHECKING:
    from tensorlease.agents.recorded import RecordedLoad

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("no_thread_left")


def change(weights: dict[str, Any], seed: int) -> None:
    """Trains: other values, in place."""
    for name, tensor in checkpoint(seed).items():
        weights[name].copy_(tensor)


@pytest.fixture
def model() -> EngineModel:
    return EngineModel()


@pytest.fixture
def load(worker: WorkerAgent, model: EngineModel) -> RecordedLoad:
    return worker.attach_loader(model.load_weights, model.parameters)


def test_every_round_equals_a_fresh_load_and_only_the_first_runs_all_of_the_loader(
    url: str, broker: Threaded, worker: WorkerAgent, model: EngineModel, load: RecordedLoad
) -> None:
    weights = checkpoint(1)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(weights)
        for version in range(1, 5):
            change(weights, version)
            assert publish(trainer, worker, version).ok
            require_equal(model.state(), expected(version))
    assert sorted(model.loads[0]) == sorted(weights)
    assert [sorted(names) for names in model.loads[1:]] == [sorted(FALLBACK)] * 3
    assert load.recording is not None
    assert load.fallback.keys() == FALLBACK
    assert load.recording.ignored == IGNORED
    assert load.recording.names == weights.keys() - FALLBACK - IGNORED


def test_the_log_names_what_goes_to_the_loader_each_time_once(
    url: str,
    broker: Threaded,
    worker: WorkerAgent,
    load: RecordedLoad,
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = checkpoint(1)
    with (
        caplog.at_level(logging.INFO, logger="tensorlease.agents"),
        TrainerAgent("policy", endpoint=url) as trainer,
    ):
        trainer.register(weights)
        for version in (1, 2, 3):
            assert publish(trainer, worker, version).ok
    lines = [r.getMessage() for r in caplog.records if "recorded what" in r.getMessage()]
    assert len(lines) == 1
    assert f"{len(FALLBACK)} go to the loader each time" in lines[0]
    for name, why in load.fallback.items():
        assert f"{name}: {why}" in lines[0]
    assert "aten::" in load.fallback["linear8"]
    assert "none of its parameters" in load.fallback["packed"]
    assert "_local_scalar_dense" in load.fallback["scalar"]


def test_a_parameter_that_was_replaced_is_written_and_the_load_is_recorded_anew(
    url: str, broker: Threaded, worker: WorkerAgent, model: EngineModel, load: RecordedLoad
) -> None:
    weights = checkpoint(1)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(weights)
        for version in (1, 2):
            assert publish(trainer, worker, version).ok
        first = load.recording
        old = model.weights["qkv"]
        kept = old.clone()
        model.weights["qkv"] = torch.nn.Parameter(torch.zeros_like(old), requires_grad=False)
        model.weights["o"].data = torch.zeros_like(model.weights["o"])
        change(weights, 3)
        assert publish(trainer, worker, 3).ok
        require_equal(model.state(), expected(3))
        assert torch.equal(old, kept)
        assert load.recording is not first
        change(weights, 4)
        assert publish(trainer, worker, 4).ok
        require_equal(model.state(), expected(4))
    assert [len(names) for names in model.loads] == [len(weights), 3, len(weights), 3]


def test_a_trainer_that_comes_anew_is_copied_from_without_a_load(
    url: str, broker: Threaded, worker: WorkerAgent, model: EngineModel, load: RecordedLoad
) -> None:
    for version in (1, 2):
        with TrainerAgent("policy", endpoint=url) as trainer:
            trainer.register(checkpoint(version))
            assert publish(trainer, worker, version).ok
            require_equal(model.state(), expected(version))
    assert [len(names) for names in model.loads] == [len(checkpoint(1)), len(FALLBACK)]


def test_another_dtype_at_the_trainer_is_recorded_anew(
    url: str, broker: Threaded, worker: WorkerAgent, model: EngineModel, load: RecordedLoad
) -> None:
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(checkpoint(1))
        assert publish(trainer, worker, 1).ok
    weights = {name: tensor.float() for name, tensor in checkpoint(2).items()}
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(weights)
        for version in (2, 3):
            assert publish(trainer, worker, version).ok
            have, want = model.state(), expected(2)
            del have["buffer"], want["buffer"]  # It has the bits of another dtype.
            require_equal(have, want)
    assert [len(names) for names in model.loads] == [len(weights), len(weights), len(FALLBACK)]


def test_a_name_that_is_offered_later_is_loaded(
    url: str, broker: Threaded, worker: WorkerAgent, model: EngineModel, load: RecordedLoad
) -> None:
    weights = checkpoint(1)
    late = {"norm": weights.pop("norm")}
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(weights)
        assert publish(trainer, worker, 1).ok
        assert not model.weights["norm"].any()
        trainer.register(late)
        for version in (2, 3):
            assert publish(trainer, worker, version).ok
            require_equal(model.state(), expected(1))
    assert [len(names) for names in model.loads] == [len(weights), len(weights) + 1, 3]


def test_a_ring_is_copied_from_too_and_a_name_that_is_new_in_it_goes_to_the_loader(
    ring_trainer: TrainerAgent, worker: WorkerAgent, model: EngineModel, load: RecordedLoad
) -> None:
    def sent(version: int, without: set[str]) -> None:
        weights = {n: t for n, t in checkpoint(version).items() if n not in without}
        with ring_trainer.open_round(version, timeout=20.0) as r:
            for name, tensor in weights.items():
                r.send(name, tensor)
                r.flush()
        assert r.result is not None
        r.result.raise_for_status()

    with serving(worker):
        ring_trainer.wait_ready(1, timeout=20.0)
        sent(1, {"norm"})
        sent(2, set())
    require_equal(model.state(), expected(2))
    assert "norm" in {name for names in model.loads[1:] for name in names}
