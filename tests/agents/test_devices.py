"""Tensors of a GPU through shared memory: out of it in a trainer, into it in a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tensorlease.agents import RingOptions, RoundInfo, TrainerAgent

from ..broker.raw_agents import Threaded
from .conftest import StartWorker

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


def mixed() -> dict[str, Tensor]:
    """A tensor of a GPU, one of the CPU that is larger than a slot, and small ones of both."""
    return {
        "gpu": torch.randn(300, 40, device="cuda").to(torch.bfloat16),
        "large": torch.randn(5000),
        "small": torch.arange(7),
        "view": torch.randn(64, 32, device="cuda").t()[::2],
        "large_gpu": torch.randn(9000, device="cuda"),
    }


def like(tensors: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    return {name: torch.zeros(t.shape, dtype=t.dtype, device=device) for name, t in tensors.items()}


def assert_equal(held: dict[str, Tensor], sent: dict[str, Tensor]) -> None:
    for name, tensor in sent.items():
        assert torch.equal(held[name].cpu(), tensor.cpu()), name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("verify", [False, True])
def test_tensors_of_gpu_and_cpu_go_through_one_ring_round(
    broker: Threaded, url: str, start_worker: StartWorker, device: str, verify: bool
) -> None:
    sent = mixed()
    held = like(sent, device)
    start_worker("a", held)
    with TrainerAgent("policy", endpoint=url, ring=RingOptions(3, 16_384)) as trainer:
        for version in (1, 2, 3):
            for tensor in sent.values():
                tensor.add_(1)
            with trainer.open_round(version, verify=verify) as ring:
                ring.send_all(sent)
            assert ring.result is not None
            ring.result.raise_for_status()
            assert_equal(held, sent)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_registered_tensors_of_a_gpu_go_by_their_shadows(
    broker: Threaded, url: str, start_worker: StartWorker, device: str
) -> None:
    sent = mixed()
    held = like(sent, device)
    start_worker("a", held)
    with TrainerAgent("policy", endpoint=url) as trainer:
        buffers = trainer.register(sent, shadow=True)
        trainer.wait_ready()
        for version in (1, 2, 3):
            for tensor in sent.values():
                tensor.mul_(2)
            trainer.publish(version, verify=version > 1).raise_for_status()
            assert_equal(held, sent)
        buffers.close()


def test_a_loader_may_take_what_it_gets_to_a_gpu(broker: Threaded, url: str) -> None:
    import threading

    from tensorlease.agents import WorkerAgent

    held: dict[str, Tensor] = {}

    def load(round: RoundInfo, tensors: list[tuple[str, Tensor]]) -> None:
        held.update((name, tensor.cuda()) for name, tensor in tensors)

    with (
        WorkerAgent("policy", endpoint=url) as worker,
        TrainerAgent("policy", endpoint=url, ring=RingOptions(3, 16_384)) as trainer,
    ):
        worker.on_stage(load)
        thread = threading.Thread(target=worker.run)
        thread.start()
        sent = mixed()
        with trainer.open_round(1) as ring:
            ring.send_all(sent)
        assert ring.result is not None
        ring.result.raise_for_status()
        assert_equal(held, sent)
        worker.stop()
        thread.join(10.0)
