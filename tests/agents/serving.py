"""A worker's tensors in tests, and how it is served step by step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tensorlease.agents import WorkerAgent


def weights() -> dict[str, Tensor]:
    import torch

    return {"w": torch.zeros(3)}


def work_until(worker: WorkerAgent, condition: Callable[[], object]) -> None:
    """Steps the worker until the condition holds."""
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        worker.step(0.02)


@contextmanager
def serving(worker: WorkerAgent) -> Iterator[None]:
    """Serves the worker in a thread."""
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(10.0)
        assert not thread.is_alive()
