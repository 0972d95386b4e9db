"""Fixtures of tests of `push` and `pull`: a place, a broker, a small model, processes, workers."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ..broker.raw_agents import Threaded, config_for
from ..checkpoints import two_files
from ..procs import Spawn, spawning
from .helpers import MIB, Serve

if TYPE_CHECKING:
    from tensorlease.agents import WorkerAgent


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A broker's address; and a directory for segments beside it, which must be empty in the end."""
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        segments = Path(directory) / "shm"
        if MIB > 256:
            segments = Path(tempfile.mkdtemp(prefix="tl-push-", dir="/dev/shm"))
        segments.mkdir(exist_ok=True)
        monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(segments))
        monkeypatch.setenv("TENSORLEASE_ENDPOINT", url := f"ipc://{directory}/b.sock")
        yield url
        assert os.listdir(segments) == []
        shutil.rmtree(segments)


@pytest.fixture
def broker(url: str) -> Iterator[Threaded]:
    made = Threaded(config_for(url))
    yield made
    made.stop()
    if made.error is not None:
        raise made.error


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    with spawning() as start:
        yield start


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small one, of two files."""
    directory = tmp_path / "model"
    directory.mkdir()
    two_files(directory)
    return directory


@pytest.fixture
def serve(broker: Threaded) -> Iterator[Serve]:
    """Starts workers in threads that give what comes to a callback."""
    from tensorlease.agents import WorkerAgent

    made: list[tuple[WorkerAgent, threading.Thread]] = []

    def start(replica: str, callback: Callable[[object, object], object]) -> WorkerAgent:
        worker = WorkerAgent(replica=replica)
        worker.on_stage(callback)
        thread = threading.Thread(target=worker.run)
        thread.start()
        made.append((worker, thread))
        return worker

    yield start
    for worker, thread in made:
        worker.close(5.0)
        thread.join(10.0)
        assert not thread.is_alive()
