"""Reported failures (docs/field-cases.md), with our own engine in a server's workers."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorlease.agents import RoundResult, TrainerAgent
from tensorlease.agents.ring import RingOptions
from tensorlease.engines.member import UpdateError
from tensorlease.engines.vllm_extension import WorkerExtension
from tensorlease.engines.vllm_server import VLLMServer
from tensorlease.protocol.errors import RoundFailedError, TensorleaseError
from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import Threaded, eventually
from . import stub_vllm
from .conftest import Led
from .stub_vllm import EngineVLLM, checkpoint, config_of


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Our modules that need a vLLM."""
    return stub_vllm.install(monkeypatch)


@pytest.fixture
def server(ours: SimpleNamespace, led: Led) -> EngineVLLM:
    made = led("a", server=EngineVLLM(ours))
    assert isinstance(made, EngineVLLM)
    return made


Publish = Callable[..., RoundResult]


@pytest.fixture(params=["registered", "ring"])
def publish(request: pytest.FixtureRequest, broker: Threaded, url: str) -> Iterator[Publish]:
    """Publishes a checkpoint of a value, without some names, or with more."""
    trainers: list[TrainerAgent] = []
    ring = request.param == "ring"

    def send(
        version: int, value: float, without: str = "", more: dict[str, torch.Tensor] | None = None
    ) -> RoundResult:
        tensors = {n: t for n, t in checkpoint(value).items() if not without or without not in n}
        tensors |= more or {}
        if ring and trainers:
            trainer = trainers[-1]
        else:
            # Other registered tensors are those of another trainer, who comes when this one left.
            for each in trainers:
                each.close(5.0)
            trainer = TrainerAgent(
                "policy", endpoint=url, ring=RingOptions(2, 8192) if ring else None
            )
            trainers.append(trainer)
            if not ring:
                trainer.register(tensors)
        trainer.wait_ready(timeout=20.0)
        if ring:
            return trainer.publish_stream(version, tensors.items(), timeout=20.0)
        return trainer.publish(version, timeout=20.0)

    yield send
    for each in trainers:
        each.close(0.5)


# ---------------------------------------------------------------- C70, C72: not all, or too much


LACKING = [
    ("down.weight_scale", "down.weight_scale"),
    ("k_proj.weight", "qkv.weight (in part)"),
    ("proj.bias", "qkv.bias"),
    ("norm", "norm.weight"),
    ("embed", "embed.weight"),
]
"""What is not sent, and what of the model lacks something then."""


@pytest.mark.parametrize(("without", "named"), LACKING)
def test_a_layer_that_lacks_something_is_named_and_its_server_answers_nothing_until_all_has_come(
    server: EngineVLLM, publish: Publish, without: str, named: str
) -> None:
    result = publish(1, 1.0, without=without)
    assert not result.ok
    assert result.replicas["a"].fate is not Fate.COMMITTED
    assert named in result.reason, result.reason
    eventually(lambda: server.paused)
    assert server.label == "default"
    assert publish(2, 2.0).ok
    assert server.has(2.0, 2)


@pytest.mark.parametrize(("without", "_"), LACKING)
def test_what_a_recorded_load_had_and_is_not_sent_any_more_is_named_before_anything_switches(
    server: EngineVLLM, publish: Publish, without: str, _: str
) -> None:
    for version in (1, 2):
        assert publish(version, float(version)).ok
    result = publish(3, 3.0, without=without)
    assert result.outcome is Outcome.FAILED
    assert without in result.reason, result.reason
    assert server.label == "2"
    assert publish(4, 4.0).ok
    assert server.has(4.0, 4)


def test_a_name_that_the_model_does_not_know_is_named(server: EngineVLLM, publish: Publish) -> None:
    more = {"model.model.norm.weight": torch.ones(2)}
    result = publish(1, 1.0, more=more)
    assert result.outcome is Outcome.FAILED
    assert "There is no module or parameter named 'model.model.norm.weight'" in result.reason
    assert server.label == "default"
    assert publish(2, 2.0).ok
    assert server.has(2.0, 2)


def test_a_name_that_the_loader_skips_is_named_in_the_log_and_then_in_each_result(
    server: EngineVLLM, publish: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tensorlease.agents"):
        assert publish(1, 1.0).ok
    assert "1 are not read (rotary.inv_freq)" in caplog.text
    for version in (2, 3):
        result = publish(version, float(version))
        assert result.ok
        (worker,) = (r for name, r in result.receivers.items() if name == "a/1")
        assert worker.unwanted == ("rotary.inv_freq",)
        assert (worker.applied, worker.skipped) == (len(checkpoint(1.0)) - 1, 1)


# ---------------------------------------------------------------- C80: it has what was published


def test_recorded_or_not_each_version_is_what_a_fresh_load_gives(
    server: EngineVLLM, publish: Publish
) -> None:
    loads = []
    for version, value in enumerate([1.0, 5.0, 1.0, 7.0], 1):
        before = server.models[0].loads
        assert publish(version, value).ok
        assert server.has(value, version)
        loads.append(server.models[0].loads - before)
    # Loaded once, then copied.
    assert loads == [len(checkpoint(1.0)), 0, 0, 0]


def test_parameters_that_have_moved_since_the_load_was_recorded_have_the_version_all_the_same(
    server: EngineVLLM, publish: Publish
) -> None:
    for version in (1, 2):
        assert publish(version, float(version)).ok
    layer: Any = server.models[0].down
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), False)
    assert publish(3, 3.0).ok
    assert server.has(3.0, 3)
    assert publish(4, 4.0).ok
    assert server.has(4.0, 4)


# ---------------------------------------------------------------- C61, C76: what a failure leaves


def test_what_layers_have_kept_of_a_version_that_failed_is_not_mixed_with_the_next(
    server: EngineVLLM, broker: Threaded, url: str
) -> None:
    with TrainerAgent("policy", endpoint=url, ring=RingOptions(2, 8192)) as trainer:
        trainer.wait_ready(timeout=20.0)
        assert trainer.publish_stream(1, checkpoint(1.0).items(), timeout=20.0).ok
        server.engines[0].recorded.discard("so that layers are loaded")
        tensors = checkpoint(2.0)
        with (
            pytest.raises(RuntimeError, match="went wrong"),
            trainer.open_round(2, timeout=20.0) as r,
        ):
            # Half of a fused layer.
            r.send("q_proj.weight", tensors["q_proj.weight"])
            r.send("q_proj.bias", tensors["q_proj.bias"])
            r.flush()
            eventually(lambda: any(info.count for info in stub_vllm.LOADING.values()))
            raise RuntimeError("training went wrong")
        trainer.wait_ready(timeout=20.0)
        assert trainer.publish_stream(3, checkpoint(3.0).items(), timeout=20.0).ok
        assert server.has(3.0, 3)


def two_versions(trainer: TrainerAgent, tensors: dict[str, Any]) -> None:
    """Publishes these, twice: by then copies are repeated. Then they are others, not published."""
    trainer.register(tensors)
    for version in (1, 2):
        trainer.wait_ready(timeout=20.0)
        assert trainer.publish(version, timeout=20.0).ok
    for tensor in tensors.values():
        tensor += 2.0


def test_what_was_copied_before_a_round_failed_is_not_answered_by_though_no_update_was_asked_for(
    server: EngineVLLM, broker: Threaded, url: str
) -> None:
    tensors = checkpoint(1.0)
    with TrainerAgent("policy", endpoint=url) as trainer:
        two_versions(trainer, tensors)
        gate = server.hold_answer("/start_weight_update")
        handle = trainer.publish_nowait(3)
        assert gate.came.wait(10.0)
        # Workers copy from the moment that an update begins.
        norm: Any = server.models[0].norm.weight
        eventually(lambda: torch.equal(norm, tensors["norm.weight"]))
        trainer.void(handle)
        eventually(lambda: not server.leader._worker.goes_on)  # type: ignore[union-attr]
        gate.go.set()
        eventually(lambda: server.calls[-1] == "/finish_weight_update" and not server.active)
        trainer.wait_ready(timeout=20.0)
        assert server.paused
        assert server.label == "2"
        assert trainer.publish(4, timeout=20.0).ok
        assert server.has(3.0, 4)


def test_of_two_workers_one_has_copied_when_the_other_cannot_begin_and_the_server_is_held(
    ours: SimpleNamespace, led: Led, broker: Threaded, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EngineVLLM(ours, world_size=2)
    led("a", server=server)
    tensors = checkpoint(1.0)
    good: Any = server.models[0].norm.weight
    bad = server.engines[1]

    def fail() -> None:
        eventually(lambda: torch.equal(good, tensors["norm.weight"]))
        raise RuntimeError("out of memory")

    with TrainerAgent("policy", endpoint=url) as trainer:
        two_versions(trainer, tensors)
        with monkeypatch.context() as patch:
            patch.setattr(bad, "start_weight_update", fail)
            result = trainer.publish(3, timeout=20.0)
        assert "out of memory" in result.reason
        trainer.wait_ready(timeout=20.0)
        assert server.paused
        assert server.label == "2"
        assert trainer.publish(4, timeout=20.0).ok
        assert server.has(3.0, 4)


# ---------------------------------------------------------------- C16, C69: seats


def test_data_parallel_replicas_that_all_call_themselves_the_first_have_seats_of_their_own(
    ours: SimpleNamespace, broker: Threaded, url: str
) -> None:
    engines = [
        ours.vllm_engine.TensorleaseEngine(
            None, config_of(rank, world_size=2, index=index), torch.device("cpu"), stub_vllm.Stack()
        )
        for index in range(2)
        for rank in range(2)
    ]
    try:
        for engine in engines:
            engine.init_transfer_engine(ours.vllm_engine.InitInfo("policy", "a", 5, url))
        assert [engine._member.worker.member for engine in engines] == [1, 2, 3, 4]
    finally:
        for engine in engines:
            engine.shutdown()


def test_a_seat_is_not_given_to_another_leader_while_it_is_in_a_round(
    server: EngineVLLM, publish: Publish, ours: SimpleNamespace, url: str
) -> None:
    assert publish(1, 1.0).ok
    gate = server.hold("/update_weights")
    results: list[RoundResult] = []
    publishing = threading.Thread(target=lambda: results.append(publish(2, 2.0)))
    publishing.start()
    (engine,) = server.engines
    try:
        assert gate.came.wait(10.0)
        eventually(lambda: engine._member.worker.goes_on)
        with pytest.raises(UpdateError, match="a round goes on"):
            engine.init_transfer_engine(ours.vllm_engine.InitInfo("policy", "a", 2, url))
    finally:
        gate.go.set()
        publishing.join()
    assert results[0].ok
    assert server.has(2.0, 2)


# ---------------------------------------------------------------- by vLLM's trainer interfaces


class Client:
    """As vLLM's `HTTPVLLMWeightSyncClient`."""

    def __init__(self, url: str) -> None:
        self.base_url = url
        self._server = VLLMServer(url)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", None)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = {} if weight_version is None else {"weight_version": weight_version}
        self._post("/finish_weight_update", body)

    def _post(self, path: str, body: dict[str, Any] | None) -> None:
        self._server.post(path, body, 30.0)


class Given:
    """A `WeightSource` of what a test says."""

    def __init__(self) -> None:
        self.tensors = checkpoint(1.0)

    def implements_iter_full(self) -> bool:
        return True

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


def test_what_vllms_trainer_interfaces_send_is_named_whole_and_labelled_like_every_other_version(
    ours: SimpleNamespace, broker: Threaded, url: str
) -> None:
    server = EngineVLLM(ours)
    server.start()
    module, given = ours.vllm_trainer, Given()
    info = module.TensorleaseTrainerInitInfo(
        rank=0, channel="policy", endpoint=url, slot_bytes=8192, timeout=20.0
    )
    engine = module.TensorleaseTrainerEngine.trainer_init(
        info, client=Client(server.url), source=given
    )
    try:
        assert engine.send_weights().version == 1
        assert server.has(1.0, 1)
        # Without a scale; with a name that nobody knows; with a worker that raises.
        del given.tensors["down.weight_scale"]
        with pytest.raises(RoundFailedError, match=r"down\.weight_scale"):
            engine.send_weights()
        given.tensors = checkpoint(2.0) | {"no.such": torch.ones(2)}
        with pytest.raises(RoundFailedError, match=r"no\.such"):
            engine.send_weights()
        assert server.label == "1"
        given.tensors = checkpoint(3.0)
        server.calls.clear()
        assert engine.send_weights(9).version == 9
        assert server.has(3.0, 9)
        assert server.calls[-2:] == ["/finish_weight_update", "/reset_prefix_cache"]
        # Another trainer of this channel is refused by name, and breaks nothing.
        with pytest.raises(TensorleaseError, match=r"is held by pid \d+"):
            module.TensorleaseTrainerEngine.trainer_init(
                replace(info, timeout=1.0), client=Client(server.url), source=given
            )
        assert engine.send_weights().version == 10
        assert server.has(3.0, 10)
    finally:
        engine.shutdown()
        server.die()


# ---------------------------------------------------------------- by the worker extension


class Extended(WorkerExtension):
    """As vLLM makes it of its own worker."""

    def __init__(self, rank: int, world_size: int, index: int, replicas: int) -> None:
        self.rank = rank
        self.device = torch.device("cpu")
        self.model_runner = SimpleNamespace(model=stub_vllm.Stack())
        self.vllm_config = config_of(
            rank, world_size=world_size, index=index, data_parallel_size=replicas
        )

    def has(self, value: float) -> bool:
        want = stub_vllm.fresh(value)
        model = self.model_runner.model
        return all(torch.equal(have, want[name]) for name, have in model.values().items())


@pytest.fixture
def workers(ours: SimpleNamespace, broker: Threaded, url: str) -> Iterator[list[Extended]]:
    """Two data-parallel replicas of an engine, each of one worker that calls itself rank 0."""
    made = [Extended(0, 1, index, 2) for index in range(2)]
    yield made
    for each in made:
        each.tensorlease_close()


def test_workers_of_a_vllm_without_backends_have_the_whole_version_or_say_what_is_lacking(
    workers: list[Extended], publish: Publish, url: str
) -> None:
    assert [w.tensorlease_init("policy", "a", url) for w in workers] == [0, 1]

    def receive(version: int, value: float, without: str = "") -> tuple[RoundResult, list[Any]]:
        with ThreadPoolExecutor(3) as pool:
            round_ = pool.submit(publish, version, value, without)
            with torch.no_grad():
                done = [pool.submit(_received, each, version) for each in workers]
            return round_.result(30.0), [each.result(30.0) for each in done]

    result, said = receive(1, 1.0)
    assert result.ok and said == [1, 1]
    assert all(worker.has(1.0) for worker in workers)
    # The last leaves half of a fused layer, which is not mixed with what comes next.
    for version, (without, named) in enumerate([*LACKING, LACKING[1]], 2):
        result, said = receive(version, 2.0, without)
        assert not result.ok
        assert named in result.reason, result.reason
        assert all(isinstance(each, UpdateError) for each in said)
    result, said = receive(9, 9.0)
    assert result.ok and said == [9, 9]
    assert all(worker.has(9.0) for worker in workers)
    assert {worker._tensorlease_member.worker.version for worker in workers} == {9}  # type: ignore[union-attr]


def _received(worker: Extended, version: int) -> object:
    try:
        with torch.no_grad():
            return worker.tensorlease_receive(version, 20.0)
    except UpdateError as error:
        return error


def test_what_vllm_raises_at_the_end_of_an_update_is_no_version(
    workers: list[Extended], publish: Publish, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers[0]
    worker.vllm_config = config_of(data_parallel_size=1)
    worker.tensorlease_init("policy", "a", url)
    reload = sys.modules["vllm.model_executor.model_loader.reload"]

    def fails(model: object, config: object) -> None:
        raise RuntimeError("repacking failed")

    for version, finalize in ((1, fails), (2, stub_vllm.finalize)):
        monkeypatch.setattr(reload, "finalize_layerwise_reload", finalize)
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(publish, version, float(version))
            if version == 1:
                with pytest.raises(RuntimeError, match="repacking failed"):
                    worker.tensorlease_receive(version, 20.0)
            else:
                worker.tensorlease_receive(version, 20.0)
            result = publishing.result(30.0)
        assert result.ok is (version == 2)
        assert version == 2 or "repacking failed" in result.reason
    assert worker.has(2.0)
