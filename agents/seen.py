"""What batches of a ring held: a round that sends the same tensors again needs no planning."""

from __future__ import annotations

from typing import Final, NamedTuple

from ..protocol.tables import Buffer
from .copy_plan import CopyPlan

MOST_BYTES: Final = 16 * 2**20
"""Of the tables that are remembered."""


class SeenBatch(NamedTuple):
    """A batch's table, and what of it a worker wants."""

    buffers: list[Buffer]
    copies: CopyPlan | None
    """What is copied into attached tensors; None: there are none."""
    names: frozenset[str]
    unwanted: frozenset[str]
    """Those of the names that nothing here wants."""


class SeenBatches:
    """Batches by trainer and table, the ones used last. Holds no view of any memory."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, bytes], SeenBatch] = {}
        self._nbytes = 0

    def find(self, trainer: str, body: bytes) -> SeenBatch | None:
        """Returns what is known of the batch, which counts as used."""
        seen = self._seen.pop((trainer, body), None)
        if seen is not None:
            self._seen[trainer, body] = seen
        return seen

    def keep(self, trainer: str, body: bytes, batch: SeenBatch) -> None:
        """Remembers a batch, and forgets those that were not used for longest."""
        self._seen[trainer, body] = batch
        self._nbytes += len(body)
        while self._nbytes > MOST_BYTES:
            self._drop(next(iter(self._seen)))

    def forget(self, trainer: str) -> None:
        """Forgets a trainer's."""
        for key in [key for key in self._seen if key[0] == trainer]:
            self._drop(key)

    def clear(self) -> None:
        """Forgets everything."""
        self._seen.clear()
        self._nbytes = 0

    def _drop(self, key: tuple[str, bytes]) -> None:
        del self._seen[key]
        self._nbytes -= len(key[1])
