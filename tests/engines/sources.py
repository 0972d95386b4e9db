"""Trainers that publish to servers that are led, and whether a server has what they published."""

from __future__ import annotations

import torch

from tensorlease.agents import RoundResult, TrainerAgent
from tensorlease.agents.ring import RingOptions
from tensorlease.protocol.records import Fate

from ..agents.fake_cuda import UUIDS
from .fake_stock_vllm import FakeStockVLLM, Segments
from .fake_vllm import FakeVLLM


class Source:
    """A trainer of one tensor, `w`, each of whose values is the version unless another is given."""

    def __init__(self, url: str) -> None:
        self.trainer = TrainerAgent("policy", endpoint=url)
        self._weights = torch.zeros(3)
        self.trainer.register({"w": self._weights})

    def write(self, value: int) -> None:
        """Sets the tensor to the value."""
        self._weights.fill_(float(value))

    def publish(
        self, version: int, replicas: int = 1, least: int = 1, value: int | None = None
    ) -> RoundResult:
        """Publishes a version once so many replicas are ready, to `least` of them or none."""
        self.trainer.wait_ready(replicas, timeout=20.0)
        assert self.trainer.may_write()
        self.write(version if value is None else value)
        return self.trainer.publish(version, timeout=30.0, min_replicas=least)


def at(server: FakeVLLM, version: int, value: int | None = None) -> bool:
    """Whether all of its workers have the version, of this value, and it works."""
    wanted = [float(version if value is None else value)] * 3
    values = [each["w"].tolist() for each in server.weights if each]
    settled = server.label == str(version) and not server.paused and not server.active
    return settled and values == [wanted] * server.world_size


def is_fate(fate: Fate, wanted: Fate) -> bool:
    """Whether it is the wanted one; a leader that leaves may be heard to before it has gone."""
    return fate is wanted or (wanted is Fate.LOST and fate is Fate.EXPELLED)


# ---------------------------------------------------------------- stock servers


WEIGHTS = {
    "w": torch.zeros(4, 3),
    "scale": torch.zeros(5, dtype=torch.bfloat16),
    "bytes": torch.zeros(3, dtype=torch.uint8),
    "single": torch.zeros((), dtype=torch.float32),
    "none": torch.zeros(0, 4),
}


class StockSource:
    """A trainer for stock servers, each of whose values is the version unless another is given."""

    def __init__(self, url: str, *, ring: bool = False, slots: int = 2) -> None:
        options = RingOptions(slots, 8192) if ring else None
        self._take(TrainerAgent("policy", endpoint=url, ring=options), ring)

    @classmethod
    def beside(
        cls, url: str, segments: Segments, rank: int, *, ring: bool, own: str
    ) -> StockSource:
        """Returns rank `rank` of two, on a GPU of its own; `own`: a tensor that no other has."""
        source, gpu = cls.__new__(cls), UUIDS[rank]
        options = RingOptions(2, 8192) if ring else None
        trainer = TrainerAgent(
            "policy", endpoint=url, ring=options, rank=rank, world_size=2, group="run", device=gpu
        )
        segments.gpus[trainer.instance[:8]] = gpu
        source._take(trainer, ring, own)
        return source

    def _take(self, trainer: TrainerAgent, ring: bool, own: str = "") -> None:
        self.trainer, self._ring = trainer, ring
        self.weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
        if own:
            self.weights[own] = torch.zeros(7)
        if not ring:
            trainer.register(self.weights)

    def publish(self, version: int, replicas: int = 1, value: int | None = None) -> RoundResult:
        """Publishes a version once so many replicas are ready."""
        number = float(version if value is None else value)
        self.trainer.wait_ready(replicas, timeout=20.0)
        if self._ring:
            full = {name: torch.full_like(t, number) for name, t in self.weights.items()}
            return self.trainer.publish_stream(version, full.items(), timeout=30.0)
        assert self.trainer.may_write()
        for tensor in self.weights.values():
            tensor.fill_(number)
        return self.trainer.publish(version, timeout=30.0)


def stock_at(server: FakeStockVLLM, version: int, value: int | None = None) -> bool:
    """Whether all of its workers have exactly the version, of this value, and it works."""
    number = version if value is None else value
    settled = server.label == str(version) and not server.paused and not server.active
    return settled and not server.unwaited and all(has(w, number) for w in server.weights)


def has(weights: dict[str, torch.Tensor], value: int) -> bool:
    if weights.keys() != WEIGHTS.keys():
        return False
    return all(
        torch.equal(weights[name], torch.full_like(tensor, float(value)))
        for name, tensor in WEIGHTS.items()
    )
