"""Reported failures (docs/field-cases.md): each worker of a server has what is its own, and all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from tensorlease.agents import RoundResult, TrainerAgent
from tensorlease.agents.ring import RingOptions
from tensorlease.engines import member as member_module
from tensorlease.protocol.errors import DeadlineError, RefusedError, TensorleaseError
from tensorlease.protocol.records import Fate, Outcome

from ..agents.fake_cuda import UUIDS
from ..broker.raw_agents import Threaded, eventually
from .conftest import Led, StockLed
from .fake_stock_vllm import FakeStockVLLM, Segments, parsed
from .fake_vllm import FakeVLLM
from .sources import Source

SHAPES = {"w": (4, 3), "v": (2,)}


def weights_of(rank: int, version: int) -> dict[str, torch.Tensor]:
    """What a rank has in a version: nobody else's values."""
    value = float(100 * version + rank)
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


class Ranks:
    """Trainer ranks, each on a GPU of its own and with values of its own."""

    def __init__(
        self, url: str, gpus: Sequence[str], segments: Segments | None, *, ring: bool = False
    ) -> None:
        self._ring = ring
        self.trainers: list[TrainerAgent] = []
        self.tensors: list[dict[str, torch.Tensor]] = []
        for rank, gpu in enumerate(gpus):
            trainer = TrainerAgent(
                "policy",
                endpoint=url,
                ring=RingOptions(2, 8192) if ring else None,
                rank=rank,
                world_size=len(gpus),
                group="run",
                device=gpu,
            )
            if segments is not None:
                segments.gpus[trainer.instance[:8]] = gpu
            self.trainers.append(trainer)
            self.tensors.append(weights_of(rank, 0))
            if not ring:
                trainer.register(self.tensors[rank])

    def publish(self, version: int) -> list[RoundResult]:
        with ThreadPoolExecutor(len(self.trainers)) as pool:
            return list(pool.map(lambda rank: self._publish(rank, version), self.ranks))

    @property
    def ranks(self) -> range:
        return range(len(self.trainers))

    def _publish(self, rank: int, version: int) -> RoundResult:
        trainer, values = self.trainers[rank], weights_of(rank, version)
        trainer.wait_ready(timeout=20.0)
        if self._ring:
            return trainer.publish_stream(version, values.items(), timeout=30.0)
        for name, tensor in values.items():
            self.tensors[rank][name].copy_(tensor)
        return trainer.publish(version, timeout=30.0)

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close(0.5)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def has_those_of(weights: dict[str, torch.Tensor], rank: int, version: int) -> bool:
    want = weights_of(rank, version)
    return weights.keys() == want.keys() and all(torch.equal(weights[n], want[n]) for n in want)


# ---------------------------------------------------------------- C14, C16: whose is what


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
@pytest.mark.parametrize("way", ["plugin", "unpacked", "ring"])
def test_each_worker_of_a_server_has_what_the_rank_on_its_own_gpu_sent(
    request: pytest.FixtureRequest,
    broker: Threaded,
    url: str,
    stack: ExitStack,
    way: str,
    order: list[int],
) -> None:
    gpus = [UUIDS[place] for place in order]
    server: FakeVLLM
    if way == "plugin":
        segments = None
        server = request.getfixturevalue("led")("a", 4, devices=gpus, device=gpus[0])
    else:
        segments = request.getfixturevalue("segments")
        lead = request.getfixturevalue("stock_led")
        server = lead("a", packed=way == "ring", gpus=gpus, devices=gpus)
    ranks = Ranks(url, UUIDS, segments, ring=way == "ring")
    stack.callback(ranks.close)
    for version in (1, 2):
        assert all(result.ok for result in ranks.publish(version))
        # A worker's place in the server is no rank's number.
        assert [has_those_of(w, order[n], version) for n, w in enumerate(server.weights)] == (
            [True] * 4
        )
    if isinstance(server, FakeStockVLLM):
        for body in server.bodies:
            for info in [body["update_info"]]:
                handles = parsed(info)["ipc_handles"]
                for each in handles if isinstance(handles, list) else [handles]:
                    # By UUID; the number of a device is set by whoever opens it.
                    assert set(each) == set(UUIDS)
                    assert {arguments[6] for arguments in each.values()} == {0}


def test_gpus_that_are_named_in_another_order_than_the_workers_never_get_each_others_handles(
    url: str, stock_led: StockLed, segments: Segments, stack: ExitStack
) -> None:
    # Where ranks send different tensors a body has an entry for each worker, by its place.
    server = stock_led("a", gpus=UUIDS[:2], devices=UUIDS[1::-1])
    ranks = Ranks(url, UUIDS[:2], segments)
    stack.callback(ranks.close)
    for rank, trainer in enumerate(ranks.trainers):
        trainer.register({f"expert.{rank}": torch.ones(3)})
    result = ranks.publish(1)[0]
    assert result.outcome is Outcome.FAILED
    assert "IPC handle not found for GPU UUID" in result.reason
    assert all(not weights for weights in server.weights)
    eventually(lambda: server.paused)
    assert server.label == "default"


# ---------------------------------------------------------------- C83: not all of it is there


@pytest.mark.parametrize("way", ["unpacked", "ring"])
def test_a_gpu_for_which_nothing_is_sent_is_named_and_the_server_is_not_touched(
    url: str, stock_led: StockLed, segments: Segments, stack: ExitStack, way: str
) -> None:
    server = stock_led("a", packed=way == "ring", gpus=UUIDS[:2], devices=UUIDS[:2])
    ranks = Ranks(url, UUIDS[:1], segments, ring=way == "ring")
    stack.callback(ranks.close)
    eventually(lambda: server.leader.leads)
    with pytest.raises(DeadlineError, match=UUIDS[1]):
        ranks.trainers[0].wait_ready(timeout=1.0)
    assert set(server.calls) <= {"/init_weight_transfer_engine"}


@pytest.mark.parametrize("way", ["plugin", "unpacked", "ring"])
def test_a_version_of_no_tensor_is_refused_and_no_server_is_told(
    request: pytest.FixtureRequest, broker: Threaded, url: str, stack: ExitStack, way: str
) -> None:
    if way == "plugin":
        server: FakeVLLM = request.getfixturevalue("led")("a")
    else:
        request.getfixturevalue("segments")
        server = request.getfixturevalue("stock_led")("a", packed=way == "ring")
    trainer = TrainerAgent("policy", endpoint=url, ring=RingOptions(2, 8192))
    stack.callback(trainer.close, 0.5)
    trainer.wait_ready(timeout=20.0)
    server.calls.clear()
    with pytest.raises(RefusedError, match="nothing is registered"):
        trainer.publish(1, timeout=10.0)
    with pytest.raises(TensorleaseError, match="nothing was sent"):
        trainer.publish_stream(1, [], timeout=10.0)
    assert "/update_weights" not in server.calls
    assert server.label == "default" and not server.paused


# ---------------------------------------------------------------- C72: dtypes


@pytest.mark.parametrize("way", ["plugin", "unpacked", "packed"])
def test_weights_of_eight_bits_and_their_scales_are_byte_for_byte_those_of_the_trainer(
    request: pytest.FixtureRequest, broker: Threaded, url: str, stack: ExitStack, way: str
) -> None:
    made = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 255, (16, 8), generator=made, dtype=torch.uint8)
    tensors = {
        "w.weight": bits.view(torch.float8_e4m3fn),
        "w.weight_scale_inv": torch.rand(4, generator=made),
        "e.scale": bits[0].clone().view(torch.float8_e8m0fnu),
        "q.weight_packed": bits[1].clone(),
    }
    if way == "plugin":
        server: FakeVLLM = request.getfixturevalue("led")("a")
    else:
        request.getfixturevalue("segments")
        server = request.getfixturevalue("stock_led")("a", packed=way == "packed")
    trainer = TrainerAgent("policy", endpoint=url)
    stack.callback(trainer.close, 0.5)
    trainer.register(tensors)
    trainer.wait_ready(timeout=20.0)
    assert trainer.publish(1, timeout=20.0).ok
    (weights,) = server.weights
    assert weights.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert weights[name].dtype == tensor.dtype
        assert weights[name].shape == tensor.shape
        as_bytes = (
            each.contiguous().view(-1).view(torch.uint8) for each in (weights[name], tensor)
        )
        assert torch.equal(*as_bytes), name


# ---------------------------------------------------------------- C80: nothing was done


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights"])
def test_a_server_that_says_that_it_is_done_and_has_done_nothing_is_named_and_at_no_version(
    source: Source, led: Led, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    server = led("a")
    assert source.publish(1).ok
    for name in ("TOLD_S", "BEGIN_S"):
        monkeypatch.setattr(member_module, name, 0.5)
    server.lies.add(path)
    result = source.publish(2)
    assert result.outcome is Outcome.FAILED
    assert result.receivers["a/0"].fate is not Fate.COMMITTED
    assert server.label == "1"
    state = source.trainer.replicas.get("a")
    assert state is None or state.current != 2
    assert all(weights["w"].eq(1.0).all() for weights in server.weights if weights)
    server.lies.clear()
    assert source.publish(3).ok
    assert server.label == "3" and server.weights[0]["w"].eq(3.0).all()
