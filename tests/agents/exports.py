"""Registered buffers without an agent: what tests of plans and copies export."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tensorlease.agents.pieces import Pieces
    from tensorlease.agents.source import RegisteredBuffers

EXPORTER = "0123456789abcdef"
_numbers = itertools.count()  # Of buffers, which are of one trainer.

Export = Callable[..., "RegisteredBuffers"]


@contextmanager
def exporting() -> Iterator[Export]:
    """Gives what registers tensors, with their regions or without; all is closed in the end."""
    from tensorlease.agents.shm import ShmMemory
    from tensorlease.agents.source import register

    made: list[RegisteredBuffers] = []

    def export(tensors: Mapping[str, Tensor], regions: Pieces | None = None) -> RegisteredBuffers:
        memory = ShmMemory(EXPORTER)
        made.append(register(tensors, memory=memory, numbers=_numbers, regions=regions))
        return made[-1]

    try:
        yield export
    finally:
        for registered in made:
            registered.close()
