"""Batches that GPUs have begun to copy before their turn.

So one follows the other there, without a pause in which another process has the GPU: to go from one
process to another takes it as long as to copy some hundred megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .copy_plan import Begun, CopyPlan
from .memory import MappedMemory

Key = tuple[int, int]
"""Rank and sequence number."""


class Ahead:
    """What was begun, by batch, until it is its turn."""

    def __init__(self) -> None:
        self._begun: dict[Key, Begun] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._begun

    def __len__(self) -> int:
        return len(self._begun)

    def begin(
        self,
        key: Key,
        plan: CopyPlan,
        source: str,
        numbers: Sequence[int],
        mapped: Mapping[int, MappedMemory],
    ) -> bool:
        """Has GPUs begin a batch, if all of it is mapped and written; returns whether they have."""
        wanted = set(numbers)
        taken = [number for number in plan.takes.get(source, ()) if number in wanted]
        if not all(number in mapped for number in taken):
            return False
        # Thousands of buffers have one event.
        events = {id(event): event for n in taken if (event := mapped[n].event) is not None}
        if not all(event.query() for event in events.values()):
            return False
        begun = plan.begin(source, numbers, mapped)
        if begun is not None:
            self._begun[key] = begun
        return begun is not None

    def take(self, key: Key) -> Begun | None:
        """Returns what waits for a batch, whose turn it is; None: it was not begun."""
        return self._begun.pop(key, None)

    def wait(self) -> None:
        """Waits until all of them are done; it counts for nothing."""
        while self._begun:
            key, begun = next(iter(self._begun.items()))
            begun.wait()  # An interrupt before its end leaves it here.
            self._begun.pop(key, None)
