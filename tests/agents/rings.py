"""What tests of ring rounds share: a small ring, a hook that waits, tensors that are compared."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorlease.agents.ring import RingOptions

if TYPE_CHECKING:
    from torch import Tensor

    from tensorlease.agents import WorkerAgent

SLOT = 64 * 1024
RING = RingOptions(num_ipc_handles=2, slot_bytes=SLOT)

Start = Callable[..., "WorkerAgent"]


class Held:
    """A prepare hook that waits, and counts."""

    def __init__(self, *, going: bool = False) -> None:
        self.calls = 0
        self.came = threading.Event()
        self.go = threading.Event()
        if going:
            self.go.set()

    def __call__(self, _: object) -> None:
        self.calls += 1
        self.came.set()
        assert self.go.wait(20.0)


def like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Zeros for each."""
    import torch

    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether both have the same names and values."""
    import torch

    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )
