"""Trainers for stock servers that are fakes, and whether such a server has a version."""

from __future__ import annotations

import pytest
import torch

from tensorlease.agents import RoundResult, TrainerAgent
from tensorlease.agents.ring import RingOptions

from ..agents.fake_cuda import UUIDS
from .fake_stock_vllm import FakeStockVLLM, Segments, passing_for_gpu


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> Segments:
    """Shared memory of this process's trainers passes for that of a GPU."""
    return passing_for_gpu(monkeypatch)


WEIGHTS = {
    "w": torch.zeros(4, 3),
    "scale": torch.zeros(5, dtype=torch.bfloat16),
    "bytes": torch.zeros(3, dtype=torch.uint8),
    "single": torch.zeros((), dtype=torch.float32),
    "none": torch.zeros(0, 4),
}


class Source:
    """A trainer, each of whose values is the version."""

    def __init__(self, url: str, *, ring: bool = False, slots: int = 2) -> None:
        options = RingOptions(slots, 8192) if ring else None
        self._take(TrainerAgent("policy", endpoint=url, ring=options), ring)

    @classmethod
    def beside(cls, url: str, segments: Segments, rank: int, *, ring: bool, own: str) -> Source:
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

    def publish(self, version: int, replicas: int = 1) -> RoundResult:
        """Publishes a version once so many replicas are ready."""
        self.trainer.wait_ready(replicas, timeout=20.0)
        if self._ring:
            full = {name: torch.full_like(t, float(version)) for name, t in self.weights.items()}
            return self.trainer.publish_stream(version, full.items(), timeout=30.0)
        assert self.trainer.may_write()
        for tensor in self.weights.values():
            tensor.fill_(float(version))
        return self.trainer.publish(version, timeout=30.0)


def at(server: FakeStockVLLM, version: int) -> bool:
    """Whether all of its workers have exactly the version, and it works."""
    settled = server.label == str(version) and not server.paused and not server.active
    return settled and not server.unwaited and all(has(w, version) for w in server.weights)


def has(weights: dict[str, torch.Tensor], version: int) -> bool:
    if weights.keys() != WEIGHTS.keys():
        return False
    return all(
        torch.equal(weights[name], torch.full_like(tensor, float(version)))
        for name, tensor in WEIGHTS.items()
    )
