"""The mappings of a process: each trainer's buffer is mapped once, however many agents read it."""

from __future__ import annotations

import logging
import os
from threading import Lock

from msgspec import Struct

from ..protocol.handles import Handle, ShmHandle
from .errors import MappingError
from .memory import MappedMemory

log = logging.getLogger("tensorlease.agents")


class _Held(Struct):
    handle: Handle
    memory: MappedMemory
    users: int


class Mappings:
    """Counted mappings, by (source, buffer number). Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: dict[tuple[str, int], _Held] = {}

    def map(self, source: str, number: int, handle: Handle) -> MappedMemory:
        """Returns buffer `number` of trainer instance `source`, mapped by the first who asks.

        Every call is to be matched by one `unmap`.

        Raises:
            SegmentGoneError: The memory is no longer there.
            MappingError: It cannot be mapped, or the same number came with another handle.
        """
        with self._lock:
            held = self._held.get((source, number))
            if held is None:
                held = _Held(handle, open_handle(handle, source, number), 0)
                self._held[source, number] = held
            elif held.handle != handle:
                raise MappingError(
                    f"buffer {number} of {source} came again with another handle; a number is"
                    " never used twice"
                )
            held.users += 1
            return held.memory

    def unmap(self, source: str, number: int) -> bool:
        """Ends one use of a buffer; returns whether it was the last, so that it is unmapped now.

        Raises:
            MappingError: It is not mapped; or a tensor still looks into it, and it is kept: to be
                called again once the tensor is dropped.
        """
        with self._lock:
            held = self._held.get((source, number))
            if held is None:
                raise MappingError(f"buffer {number} of {source} is not mapped here")
            if held.users > 1:
                held.users -= 1
                return False
            held.memory.unmap()
            del self._held[source, number]
            return True

    def held(self) -> list[tuple[str, int]]:
        """Returns (source, number) of everything mapped."""
        with self._lock:
            return sorted(self._held)

    def owner_of(self, address: int) -> tuple[str, int] | None:
        """Returns whose buffer (source, number) the byte at `address` belongs to, None if nobody's."""
        with self._lock:
            for key, held in self._held.items():
                memory = held.memory
                if memory.foreign and memory.address <= address < memory.address + memory.nbytes:
                    return key
        return None


def unmap_all(mapped: dict[str, dict[int, MappedMemory]]) -> None:
    """Ends the use of all of these, by source and number; what is looked into is kept, and said."""
    for source, held in mapped.items():
        for number in held:
            try:
                process_mappings().unmap(source, number)
            except MappingError as error:
                log.error("%s", error)
        held.clear()


def open_handle(handle: Handle, source: str, number: int) -> MappedMemory:
    """Maps buffer `number` of trainer instance `source`, by its kind.

    Raises:
        MappingError: It cannot be mapped here.
    """
    if isinstance(handle, ShmHandle):
        from .shm import open_segment

        return open_segment(handle)
    from .cuda import CudaMapping, local_export

    return CudaMapping(handle, local_export(source, number), source)


_process = Mappings()


def process_mappings() -> Mappings:
    """Returns the mappings of this process; a forked child starts with none."""
    return _process


def _start_anew() -> None:
    global _process
    _process = Mappings()  # what the parent has mapped is the parent's; its lock may be held


os.register_at_fork(after_in_child=_start_anew)
