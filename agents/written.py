"""What a worker waits for before it reads: that a trainer's stream has written its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from .errors import MappingError
from .memory import MappedMemory

WRITTEN_S: Final = 300.0
"""Longest wait for it, in a round that does not end before."""
SPIN_S: Final = 50e-6
"""So long it is looked for without a pause: a pause takes as long at the least."""
LAST_PAUSE_S: Final = 1e-3


def await_written(memories: Iterable[MappedMemory], goes_on: Callable[[], bool]) -> None:
    """Waits until what a trainer was writing, when it published, is there.

    The host looks again and again: a stream that waits for the event of a trainer that has died
    may never go on, and one that waits takes its share of a GPU that others compute on.

    Args:
        memories: What is to be read.
        goes_on: Whether the round still does.

    Raises:
        MappingError: The round ended before, or it is not there after `WRITTEN_S`.
    """
    events = {id(event): event for memory in memories if (event := memory.event) is not None}
    start = time.monotonic()
    for event in events.values():
        while not event.query():
            lasted = time.monotonic() - start
            if lasted < SPIN_S:
                continue
            if not goes_on():
                raise MappingError("the round ended before the trainer's GPU had written its batch")
            if lasted > WRITTEN_S:
                raise MappingError(
                    f"the trainer's GPU has not written its batch {WRITTEN_S:.0f} s after it was"
                    " published: a kernel before it hangs, or waits for one that never comes"
                )
            time.sleep(min(lasted / 8, LAST_PAUSE_S))
