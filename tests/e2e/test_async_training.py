"""Asynchronous training: workers pull every step, and none of them ever reads half a step.

Each step adds one to every weight, so that all weights of a version are one number: whoever read
while a step was writing has two. The same loop without the fence shows that the test can tell.
"""

from __future__ import annotations

import os

import pytest

from tensorlease.agents import RoundHandle, TrainerAgent, WorkerAgent

from ..procs import Spawned
from .parties import World

pytestmark = pytest.mark.process

STEPS = 200
WEIGHTS = 2**19
MIB_16 = 2**22
"""Weights of which a copy takes so long that steps meet it."""
MIB_256 = 2**26
"""The same on a GPU."""
LIMIT_S = 60.0
BY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def train(url: str, shm_dir: str, steps: int, count: int, fenced: bool, device: str) -> list[str]:
    """In a child: trains, and publishes after each step; returns the outcomes."""
    import torch

    os.environ["TENSORLEASE_SHM_DIR"] = shm_dir
    torch.set_num_threads(1)
    model = torch.nn.Linear(count, 1, device=device)
    with torch.no_grad():
        for weights in model.parameters():
            weights.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ones = torch.ones(count, device=device)

    def backward() -> None:
        optimizer.zero_grad()
        (-model(ones)).backward()

    handles: list[RoundHandle] = []
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(model.named_parameters())
        trainer.wait_ready(2)
        if fenced:
            trainer.guard(optimizer, timeout=LIMIT_S)
        backward()
        optimizer.step()
        for version in range(1, steps + 1):
            backward()
            handle = trainer.publish_nowait(version, quorum=2)
            handles.append(handle)
            # At once, while workers read. Under the fence the first step waits until they have;
            # without it, steps go on until then.
            while True:
                optimizer.step()
                if handle.released.done:
                    break
        return [handle.result(LIMIT_S).outcome.value for handle in handles]


def serve(
    url: str, shm_dir: str, replica: str, steps: int, count: int, device: str
) -> list[tuple[int, float, float]]:
    """In a child: pulls every version; returns each with its least and greatest weight."""
    import torch

    os.environ["TENSORLEASE_SHM_DIR"] = shm_dir
    torch.set_num_threads(1)
    model = torch.nn.Linear(count, 1, device=device)
    seen: list[tuple[int, float, float]] = []
    with WorkerAgent("policy", endpoint=url, replica=replica) as worker:

        @worker.on_commit
        def check(_: object) -> None:
            ends = [torch.aminmax(weights.detach()) for weights in model.parameters()]
            low, high = min(e.min.item() for e in ends), max(e.max.item() for e in ends)
            seen.append((len(seen) + 1, low, high))

        worker.attach(model.named_parameters())
        worker.run(until=steps)
    return seen


def run(
    world: World, steps: int, count: int, *, fenced: bool, device: str
) -> tuple[list[str], list[list[tuple[int, float, float]]]]:
    world.broker()
    workers: list[Spawned] = [
        world.spawn(serve, world.url, world.shm_dir, replica, steps, count, device)
        for replica in ("a", "b")
    ]
    trainer = world.spawn(train, world.url, world.shm_dir, steps, count, fenced, device)
    return trainer.result(LIMIT_S), [worker.result(LIMIT_S) for worker in workers]


@BY_DEVICE
def test_in_200_steps_under_the_fence_no_worker_reads_a_torn_version(
    world: World, device: str
) -> None:
    count = WEIGHTS if device == "cpu" else MIB_256
    outcomes, seen = run(world, STEPS, count, fenced=True, device=device)

    assert outcomes == ["committed"] * STEPS
    assert seen == [[(step, step, step) for step in range(1, STEPS + 1)]] * 2
    assert world.segments() == []


@BY_DEVICE
def test_without_the_fence_the_same_training_shows_torn_reads(world: World, device: str) -> None:
    count = MIB_16 if device == "cpu" else MIB_256
    _, seen = run(world, 30, count, fenced=False, device=device)

    torn = [(version, low, high) for worker in seen for version, low, high in worker if low != high]
    assert torn, "steps wrote while workers read, and nobody noticed"
