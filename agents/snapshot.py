"""Snapshots: registered buffers, copied once, so that the originals may be written at once.

A snapshot has segments of its own, one for each registered buffer, with the same tables. They are
made at first use and used again by each later snapshot, once the workers have read the former.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct
from msgspec.structs import replace

from ..protocol.errors import ConfigError, DeadlineError
from ..protocol.tables import BatchBody, Buffer, encode_body
from .copying import Run, copy_runs
from .memory import ExportedMemory, bytes_of
from .source import RegisteredBuffers
from .subset import Chosen, select

Allocate = Callable[[int, int | None], tuple[int, ExportedMemory]]
"""Gives a new buffer of so many bytes, at least 1, of a GPU or shared: its number, and its memory."""


class Copies(Struct, frozen=True):
    """Where the tensors of one registration lie in the segments."""

    names: tuple[str, ...]
    buffers: list[Buffer]


class Snapshot:
    """The segments of one trainer's snapshots. `lone` says who may touch them.

    Args:
        allocate: Gives memory; may raise `SharedMemoryError`.
        number: Gives the number of a buffer without bytes.
    """

    def __init__(self, allocate: Allocate, number: Callable[[], int]) -> None:
        self._allocate = allocate
        self._number = number
        self._turn = threading.Lock()
        self._closed = False
        # The registered buffers that the segments fit, and those segments.
        self._fits: list[RegisteredBuffers] = []
        self._copies: list[Copies] = []
        self._memory: list[ExportedMemory] = []
        # What is copied into which segment.
        self._runs: dict[int, Run] = {}
        # What lies on a GPU, and the segment that it is fetched into.
        self._fetched: dict[int, tuple[ExportedMemory, ExportedMemory]] = {}
        # Where the registered bytes lay when that was worked out: they move when they are renewed.
        self._addresses: list[int] = []
        # What a round of everything carries.
        self._all = Chosen([], 0, b"", False)

    @contextmanager
    def lone(self, deadline: float) -> Iterator[None]:
        """Makes the caller the only one who copies; raises `DeadlineError` if others take too long."""
        if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DeadlineError(
                "another thread still takes a snapshot with this trainer: publish from one thread, or"
                " give a longer timeout"
            )
        try:
            yield
        finally:
            self._turn.release()
            if self._closed:
                self.close()

    def close(self) -> None:
        """Gives the segments back for good; whoever copies now does so when that is done."""
        self._closed = True
        if self._turn.acquire(blocking=False):
            try:
                self.free()
            finally:
                self._turn.release()

    @property
    def buffers(self) -> list[int]:
        """Numbers of its segments."""
        return [buffer.number for copies in self._copies for buffer in copies.buffers]

    def fits(self, registered: Sequence[RegisteredBuffers]) -> bool:
        """Whether the segments are those of these buffers, where they lie now, and still there."""
        if not self._fits or self._fits != list(registered):
            return False
        moved = self._addresses != _addresses(registered)
        return not moved and not any(segment.missing() for segment in self._memory)

    def make(self, registered: Sequence[RegisteredBuffers], limit: int) -> None:
        """Makes segments for these buffers, in place of those that were given back.

        Args:
            registered: All that is registered.
            limit: The most bytes that a body may have.

        Raises:
            SharedMemoryError: There is not enough room; nothing is left behind.
            ConfigError: The table is too large for the broker.
        """
        memory: list[ExportedMemory] = []
        copies: list[Copies] = []
        runs: dict[int, Run] = {}
        fetched: dict[int, tuple[ExportedMemory, ExportedMemory]] = {}
        try:
            for of in registered:
                buffers: list[Buffer] = []
                for original, source in of.exports():
                    if source is None:
                        buffers.append(replace(original, number=self._number()))
                        continue
                    number, target = self._allocate(original.nbytes, None)
                    memory.append(target)
                    if source.device.type == "cpu":
                        runs[number] = Run(target.address, source.address, original.nbytes)
                    else:
                        fetched[number] = (target, source)
                    buffers.append(replace(original, number=number, handle=target.handle))
                copies.append(Copies(of.names, buffers))
            every = [buffer for of in copies for buffer in of.buffers]
            body = encode_body(BatchBody(every))
            if len(body) > limit:
                raise ConfigError(
                    f"the table of a snapshot has {len(body)} bytes, the broker's"
                    f" limits.max-body-bytes is {limit}: raise it, or publish without snapshot"
                )
        except BaseException:
            for segment in memory:
                segment.free()
            raise
        self._fits, self._memory, self._copies = list(registered), memory, copies
        self._runs, self._addresses = runs, _addresses(registered)
        self._fetched = fetched
        numbers = [buffer.number for buffer in every]
        self._all = Chosen(numbers, sum(of.nbytes for of in registered), body, False)

    def take(self, subset: tuple[str, ...]) -> Chosen:
        """Copies the registered bytes; nobody may read the segments, or write the originals.

        Args:
            subset: Names of the tensors that are wanted, with whatever shares their segments; none:
                all.
        """
        chosen = select(subset, self._copies) if subset else self._all
        for number in chosen.buffers:
            if number in self._fetched:
                target, source = self._fetched[number]
                bytes_of(target).copy_(bytes_of(source))
        copy_runs([self._runs[number] for number in chosen.buffers if number in self._runs])
        return chosen

    def exports(self) -> list[tuple[Buffer, ExportedMemory | None]]:
        """Returns each segment with its memory; None for one that has no bytes."""
        memory = iter(self._memory)
        every = [buffer for copies in self._copies for buffer in copies.buffers]
        return [(buffer, next(memory) if buffer.nbytes else None) for buffer in every]

    def free(self) -> list[int]:
        """Gives the segments back; returns their numbers. Who has them mapped keeps them."""
        numbers = self.buffers
        memory, self._memory, self._copies, self._fits = self._memory, [], [], []
        self._runs, self._fetched = {}, {}
        for segment in memory:
            segment.free()
        return numbers


def _addresses(registered: Sequence[RegisteredBuffers]) -> list[int]:
    exports = [source for of in registered for _, source in of.exports()]
    return [source.address for source in exports if source is not None]
