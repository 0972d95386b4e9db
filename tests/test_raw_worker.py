"""The worker that was written from docs/protocol.md alone, against a real broker and trainer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tensorlease.agents.trainer import TrainerAgent
from tensorlease.protocol.records import Fate, Outcome

from .broker.raw_agents import Child, broker_process, eventually

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "raw_worker.py"

pytestmark = pytest.mark.process


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="tl-")
    monkeypatch.setenv("TENSORLEASE_SHM_DIR", directory)
    yield f"ipc://{directory}/b.sock"
    shutil.rmtree(directory)


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.close()


def start_broker(children: list[Child], url: str) -> Child:
    def spawn(*words: str, **options: object) -> Child:
        children.append(Child(*words, **options))
        return children[-1]

    environ = {k: v for k, v in os.environ.items() if not k.startswith("TENSORLEASE_")}
    return broker_process(spawn, url, "--durations-recovery", "5", env=environ)


def start_worker(children: list[Child], url: str, until: int) -> Child:
    children.append(Child(str(EXAMPLE), url, "policy", "raw", "--until", str(until)))
    return children[-1]


def line_of(version: int, tensors: dict[str, torch.Tensor]) -> str:
    """What the worker prints when it has these tensors."""
    sums = (
        f"{name}={zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes()):08x}"
        for name, tensor in sorted(tensors.items())
    )
    return " ".join([f"version {version}", *sums])


def tensors_of_a_model() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "bias": torch.ones(5, dtype=torch.bfloat16),
    }


def test_a_worker_without_a_line_of_tensorlease_gets_each_version(
    url: str, children: list[Child]
) -> None:
    assert "tensorlease." not in "".join(
        line for line in EXAMPLE.read_text().splitlines() if "import" in line
    )
    start_broker(children, url)
    tensors = tensors_of_a_model()
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(tensors)
        worker = start_worker(children, url, until=2)
        trainer.wait_ready(1, timeout=20.0)
        for version in (1, 2):
            for tensor in tensors.values():
                tensor += version
            result = trainer.publish(version, timeout=20.0)
            assert result.outcome is Outcome.COMMITTED
            assert {name: replica.fate for name, replica in result.replicas.items()} == {
                "raw": Fate.COMMITTED
            }
            assert worker.line() == line_of(version, tensors)
        assert worker.end() == (0, "")
        eventually(lambda: not trainer.replicas)
        assert os.listdir(url.removeprefix("ipc://") + ".live") == [trainer.instance]


def test_it_goes_on_with_a_new_broker_after_the_old_one_was_killed(
    url: str, children: list[Child]
) -> None:
    broker = start_broker(children, url)
    tensors = tensors_of_a_model()
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(tensors)
        worker = start_worker(children, url, until=2)
        trainer.wait_ready(1, timeout=20.0)
        assert trainer.publish(1, timeout=20.0).outcome is Outcome.COMMITTED
        assert worker.line() == line_of(1, tensors)
        broker.signal(signal.SIGKILL)
        broker.end()
        start_broker(children, url)
        tensors["weight"].zero_()
        assert trainer.publish(2, timeout=30.0).outcome is Outcome.COMMITTED
        assert worker.line() == line_of(2, tensors)
        assert worker.end() == (0, "")


@pytest.mark.program
def test_where_no_broker_is_it_says_so_in_a_line() -> None:
    words = [sys.executable, str(EXAMPLE), "ipc:///nowhere/broker.sock"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("no broker at ipc:///nowhere/broker.sock")
    assert len(done.stderr.splitlines()) == 1
