"""Fixtures for tests with real agents: a place, brokers, processes, and nothing left behind."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ..broker.raw_agents import Threaded, config_for
from ..procs import Spawn, Spawned, broker_process, spawning
from .exports import Export, exporting
from .rings import RING

if TYPE_CHECKING:
    from torch import Tensor

    from tensorlease.agents import TrainerAgent, WorkerAgent


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A broker's address; and a directory for segments beside it, which must be empty in the end."""
    directory = tempfile.mkdtemp(prefix="tl-")
    segments = Path(directory) / "shm"
    segments.mkdir()
    monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(segments))
    yield f"ipc://{directory}/b.sock"
    if os.listdir(segments):
        gc.collect()  # they go with the agents, of which a caught exception may keep one
    left = os.listdir(segments)
    shutil.rmtree(directory)
    assert not left, f"segments were left behind: {left}"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where segments are made, for tests without a broker."""
    monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def export(directory: Path) -> Iterator[Export]:
    """Registers tensors without an agent: `export({"w": tensor}, regions)`."""
    with exporting() as made:
        yield made


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    with spawning() as start:
        yield start


@pytest.fixture
def broker(url: str) -> Iterator[Threaded]:
    """A broker in a thread of the test's process."""
    made = Threaded(config_for(url))
    yield made
    made.stop()
    if made.error is not None:
        raise made.error


@pytest.fixture
def start_broker(spawn: Spawn, url: str) -> Callable[..., Spawned]:
    """Starts a broker in a process: `start_broker(recovery=0.5)`."""

    def start(**durations: float) -> Spawned:
        return broker_process(spawn, url, durations)

    return start


@pytest.fixture
def trainer(broker: Threaded, url: str) -> Iterator[TrainerAgent]:
    """A trainer with one tensor of three ones, `w`."""
    import torch

    from tensorlease.agents import TrainerAgent

    agent = TrainerAgent("policy", endpoint=url)
    agent.register({"w": torch.ones(3)})
    yield agent
    agent.close(timeout=0.5)


@pytest.fixture
def ring_trainer(broker: Threaded, url: str) -> Iterator[TrainerAgent]:
    """A trainer with a ring of two slots of 64 KiB."""
    from tensorlease.agents import TrainerAgent

    agent = TrainerAgent("policy", endpoint=url, ring=RING)
    yield agent
    agent.close(timeout=0.5)


StartWorker = Callable[..., "WorkerAgent"]


@pytest.fixture
def start_worker(broker: Threaded, url: str) -> Iterator[StartWorker]:
    """Starts workers that run in threads: `start_worker("a", {"w": tensor}, prepare=hook)`."""
    from tensorlease.agents import WorkerAgent

    made: list[tuple[WorkerAgent, threading.Thread]] = []

    def start(
        replica: str,
        tensors: dict[str, Tensor],
        prepare: Callable[[object], object] | None = None,
        *,
        strict: bool = True,
        member: int = 0,
        size: int = 1,
    ) -> WorkerAgent:
        worker = WorkerAgent("policy", endpoint=url, replica=replica, member=member, size=size)
        if prepare is not None:
            worker.on_prepare(prepare)
        worker.attach(tensors, strict=strict)
        thread = threading.Thread(target=worker.run)
        thread.start()
        made.append((worker, thread))
        return worker

    yield start
    for worker, thread in made:
        worker.close(timeout=5.0)
        thread.join(10.0)
        assert not thread.is_alive()


@pytest.fixture
def worker(broker: Threaded, url: str) -> Iterator[WorkerAgent]:
    """A worker that has attached nothing yet."""
    from tensorlease.agents import WorkerAgent

    agent = WorkerAgent("policy", endpoint=url, replica="a")
    yield agent
    agent.close(timeout=2.0)


@pytest.fixture
def other(broker: Threaded, url: str) -> Iterator[WorkerAgent]:
    """A worker of another replica that is served by a thread."""
    import torch

    from tensorlease.agents import WorkerAgent

    agent = WorkerAgent("policy", endpoint=url, replica="other")
    agent.attach({"w": torch.zeros(3)})
    thread = threading.Thread(target=agent.run)
    thread.start()
    yield agent
    agent.close(timeout=2.0)
    thread.join(10.0)
    assert not thread.is_alive()
