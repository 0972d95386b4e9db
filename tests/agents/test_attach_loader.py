"""Workers whose engine loads by itself once, and whose loader's copies are repeated, end to end."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tensorlease.agents import RoundResult, TrainerAgent, WorkerAgent
from tensorlease.agents.loading import UNTOUCHED
from tensorlease.agents.recorded import RecordedLoad
from tensorlease.protocol.errors import ConfigError
from tensorlease.protocol.records import Outcome

from ..broker.raw_agents import Threaded
from .loaders import FALLBACK, IGNORED, EngineModel, checkpoint, expected, require_equal
from .serving import serving, work_until
from .stages import publish

if TYPE_CHECKING:
    from tensorlease.agents.results import RoundHandle

torch = pytest.importorskip("torch")


def change(weights: dict[str, Any], seed: int) -> None:
    """Trains: other values, in place."""
    for name, tensor in checkpoint(seed).items():
        weights[name].copy_(tensor)


def served(worker: WorkerAgent, handle: RoundHandle) -> None:
    """The round is over, and the worker has the version."""
    work_until(worker, lambda: handle.finished.done)
    handle.result(0).raise_for_status()


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


@pytest.mark.parametrize("absent", ["q", "scalar", "inv_freq"])
def test_once_the_load_is_known_a_round_without_what_it_loads_is_no_version(
    ring_trainer: TrainerAgent, worker: WorkerAgent, model: EngineModel, absent: str
) -> None:
    """Copied, loaded each time, and ignored."""
    worker.attach_loader(model.load_weights, model.parameters)
    with serving(worker):
        ring_trainer.wait_ready(1, timeout=20.0)
        assert ring_trainer.publish_stream(1, checkpoint(1), timeout=20.0).ok
        some = {name: tensor for name, tensor in checkpoint(2).items() if name != absent}
        result = ring_trainer.publish_stream(2, some, timeout=20.0)
        if absent in IGNORED:
            assert result.ok
            return
        assert not result.ok
        assert f"not covered: {absent}: not sent, and loaded in the rounds before" in result.reason
        assert ring_trainer.publish_stream(3, checkpoint(3), timeout=20.0).ok
        require_equal(model.state(), expected(3))


def test_once_the_load_is_known_a_registration_without_what_it_loads_is_no_version(
    url: str, broker: Threaded, worker: WorkerAgent, model: EngineModel
) -> None:
    worker.attach_loader(model.load_weights, model.parameters)
    weights = checkpoint(1)
    q = {"q": weights.pop("q")}
    with TrainerAgent("policy", endpoint=url) as trainer, serving(worker):
        trainer.register(weights)
        extra = trainer.register(q)
        trainer.wait_ready(1, timeout=20.0)
        assert trainer.publish(1, timeout=20.0).ok
        trainer.unregister(extra, timeout=20.0)
        result = trainer.publish(2, timeout=20.0)
        assert not result.ok
        assert "q: not sent, and loaded in the rounds before" in result.reason
        trainer.register(q)
        assert trainer.publish(3, timeout=20.0).ok


@pytest.mark.gpu
def test_on_a_gpu_every_round_equals_a_fresh_load(
    url: str, broker: Threaded, worker: WorkerAgent
) -> None:
    model = EngineModel(device="cuda")
    recorded = worker.attach_loader(model.load_weights, model.parameters)
    weights = checkpoint(1, "cuda")
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(weights)
        for version in range(1, 6):
            change(weights, version)
            assert publish(trainer, worker, version).ok
            require_equal(model.state(), expected(version, "cuda"))
    assert [len(names) for names in model.loads[1:]] == [len(FALLBACK)] * 4
    assert recorded.fallback.keys() == FALLBACK


def test_pieces_of_two_ranks_are_copied_without_being_put_together(
    url: str, broker: Threaded, worker: WorkerAgent, model: EngineModel, load: RecordedLoad
) -> None:
    def rank(number: int) -> TrainerAgent:
        options = {"rank": number, "world_size": 2, "group": "g", "distribution": "assembled"}
        return TrainerAgent("policy", endpoint=url, **options)  # type: ignore[arg-type]

    def halves(version: int, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Rows by turns: of each tensor the first or the second half."""
        parts: dict[str, Any] = {}
        regions: dict[str, Any] = {}
        for name, tensor in checkpoint(version).items():
            rows = len(tensor) // 2
            begin, length = (0, rows) if number == 0 else (rows, len(tensor) - rows)
            parts[name] = tensor.narrow(0, begin, length).clone()
            regions[name] = (tuple(tensor.shape), (begin, *(0 for _ in tensor.shape[1:])))
        return parts, regions

    with rank(0) as first, rank(1) as second:
        held = []
        for number, trainer in enumerate((first, second)):
            parts, regions = halves(1, number)
            held.append(parts)
            trainer.register(parts, regions=regions)
        for version in (1, 2, 3):
            for number, parts in enumerate(held):
                for name, tensor in halves(version, number)[0].items():
                    parts[name].copy_(tensor)
            handle, other = first.publish_nowait(version), second.publish_nowait(version)
            served(worker, handle)
            assert other.result(10.0).ok
            require_equal(model.state(), expected(version))
    times = Counter(name for names in model.loads for name in names)
    assert times == {name: 3 if name in FALLBACK else 1 for name in checkpoint(1)}


def test_a_verified_round_and_one_of_some_tensors(
    url: str, broker: Threaded, worker: WorkerAgent, model: EngineModel, load: RecordedLoad
) -> None:
    weights = checkpoint(1)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(weights)
        assert publish(trainer, worker, 1).ok
        change(weights, 2)
        served(worker, trainer.publish_nowait(2, verify=True))
        require_equal(model.state(), expected(2))
        change(weights, 3)
        served(worker, trainer.publish_nowait(3, subset=["q", "linear8"]))
    changed, old = expected(3), expected(2)
    have = model.state()
    for name in ("linear8", "linear8_scale"):
        old[name] = changed[name]
    old["qkv"][:8] = changed["qkv"][:8]
    require_equal(have, old)
    assert model.loads[-1] == ["linear8"]


def test_what_it_has_recorded_is_there_before_other_commit_hooks_run(
    url: str, broker: Threaded, worker: WorkerAgent, model: EngineModel
) -> None:
    there: list[bool] = []
    made: list[RecordedLoad] = []
    worker.on_commit(lambda _: there.append(made[0].recording is not None))
    made.append(worker.attach_loader(model.load_weights, model.parameters))
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(checkpoint(1))
        assert publish(trainer, worker, 1).ok
    assert there == [True]


def test_a_round_that_fails_in_the_loader_is_recorded_when_it_works(
    url: str, broker: Threaded, worker: WorkerAgent, model: EngineModel
) -> None:
    fails = [True]

    def load_weights(weights: Any) -> None:
        model.load_weights(weights)
        if fails.pop() if fails else False:
            raise RuntimeError("it went wrong")

    recorded = worker.attach_loader(load_weights, model.parameters)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(checkpoint(1))
        result = publish(trainer, worker, 1)
        assert result.outcome is Outcome.FAILED
        assert "it went wrong" in result.reason
        assert recorded.recording is None
        assert publish(trainer, worker, 1).ok
        assert recorded.recording is not None
        require_equal(model.state(), expected(1))


def test_a_worker_has_a_loader_or_tensors_and_a_callback_not_both(
    broker: Threaded, worker: WorkerAgent, load: RecordedLoad, model: EngineModel
) -> None:
    with pytest.raises(ConfigError, match="a loader has them all"):
        worker.attach_loader(model.load_weights, model.parameters)
    with pytest.raises(ConfigError, match="has an on_stage already"):
        worker.on_stage(lambda round, tensors: None)
    with pytest.raises(ConfigError, match="has a loader"):
        worker.attach({"w": torch.zeros(1)})


def test_an_engine_that_leads_its_loads_itself_is_told_when_its_recording_is_void(
    url: str, broker: Threaded, worker: WorkerAgent, model: EngineModel
) -> None:
    load = RecordedLoad(model.load_weights, model.parameters, layer_of=lambda name: name)
    worker.on_stage(lambda round, tensors: load.load(tensors), recorded=load)
    # Nothing falls back: an engine has begun no load, but copies alone.
    weights = {n: t for n, t in checkpoint(1).items() if n not in FALLBACK}
    late = {"norm": weights.pop("norm")}

    def engine_does(version: int) -> bool:
        load.begin()
        result = publish(trainer, worker, version)
        if result.ok:
            load.finish()
        return bool(result.ok)

    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(weights)
        assert engine_does(1)
        assert engine_does(2)
        trainer.register(late)
        load.begin()  # Before the worker knows of what is offered now.
        result = publish(trainer, worker, 3)
        assert result.outcome is Outcome.FAILED
        assert "norm" in result.reason
        assert "the next round is loaded as a whole" in result.reason
        assert UNTOUCHED in result.reason
        assert engine_does(3)
        assert torch.equal(model.weights["norm"], late["norm"].bfloat16())


def test_an_engine_that_leads_its_loads_itself_loads_as_a_whole_what_it_hears_of_before(
    url: str, broker: Threaded, worker: WorkerAgent, model: EngineModel
) -> None:
    load = RecordedLoad(model.load_weights, model.parameters, layer_of=lambda name: name)
    worker.on_stage(lambda round, tensors: load.load(tensors), recorded=load)
    # The engine begins each load when it is told of the round: by then the offers are known.
    worker.on_prepare(lambda round: load.begin())
    worker.on_commit(lambda round: load.finish())
    weights = checkpoint(1)
    late = {"norm": weights.pop("norm")}
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(weights)
        assert publish(trainer, worker, 1).ok
        trainer.register(late)
        for version in (2, 3):
            assert publish(trainer, worker, version).ok
            require_equal(model.state(), expected(1))


@pytest.mark.parametrize("some_fall_back", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_new_name_in_a_ring_of_an_engine_that_leads_its_loads_itself(
    ring_trainer: TrainerAgent,
    worker: WorkerAgent,
    model: EngineModel,
    first: bool,
    some_fall_back: bool,
) -> None:
    load = RecordedLoad(model.load_weights, model.parameters, layer_of=lambda name: name)
    worker.on_stage(lambda round, tensors: load.load(tensors), recorded=load)
    worker.on_prepare(lambda round: load.begin())
    worker.on_commit(lambda round: load.finish())
    copied = set(checkpoint(1)) - FALLBACK - {"norm"}
    names = list(checkpoint(1)) if some_fall_back else sorted(copied | {"norm"})

    def sent(version: int, *, new: bool) -> RoundResult:
        weights = {name: checkpoint(version)[name] for name in names}
        norm = weights.pop("norm")
        if new:
            weights = {"norm": norm, **weights} if first else {**weights, "norm": norm}
        with ring_trainer.open_round(version, timeout=20.0) as r:
            for name, tensor in weights.items():
                r.send(name, tensor)
                r.flush()
                if r.ended:
                    break
        assert r.result is not None
        return r.result

    with serving(worker):
        ring_trainer.wait_ready(1, timeout=20.0)
        assert sent(1, new=False).ok
        result = sent(2, new=True)
        if first and some_fall_back:
            # The loader gets a part anyway: it gets all of it.
            assert result.ok, result.reason
        else:
            assert "'norm' is new" in result.reason
            assert "publish again" in result.reason
            assert (UNTOUCHED in result.reason) is first
            ring_trainer.wait_ready(1, timeout=20.0)
            assert sent(2, new=True).ok
        if some_fall_back:
            require_equal(model.state(), expected(2))
        else:
            assert torch.equal(model.weights["norm"], checkpoint(2)["norm"].bfloat16())


def test_a_loader_that_writes_to_what_it_is_given_is_refused_and_the_trainers_memory_is_as_it_was(
    url: str, broker: Threaded, worker: WorkerAgent
) -> None:
    model = torch.nn.Linear(3, 2, bias=False).requires_grad_(False)
    clones = False

    def load_weights(weights: Any) -> None:
        for name, weight in weights:
            weight.unsqueeze_(0).squeeze_(0)  # Nothing is written.
            given = weight.clone() if clones else weight
            given.mul_(2)
            model.get_parameter(name).copy_(given)

    worker.attach_loader(load_weights, model)
    values = torch.ones(2, 3)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"weight": values})
        result = publish(trainer, worker, 1)
        assert not result.ok
        assert "LoadError: load_weights failed at weight" in result.reason
        assert "writes to weight in place, which is the trainer's memory: clone it" in result.reason
        assert values.eq(1).all()
        clones = True
        assert publish(trainer, worker, 2).ok
    assert model.weight.eq(2).all()
