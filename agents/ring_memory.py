"""A trainer's ring: its slots' accounting, and the memory behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from ..protocol.errors import ClosedError
from ..protocol.tables import BatchBody, Buffer, encode_body
from .memory import ExportedMemory, bytes_of
from .packing import Packing
from .ring import RingOptions, Slots, SlotState

Allocate = Callable[[int, int | None], tuple[int, ExportedMemory]]


class Filling(NamedTuple):
    """A slot that is being filled. Its bytes can be written as long as somebody keeps this.

    Attributes:
        number: The number of its buffer.
        memory: What workers map.
        view: Its bytes, uint8 of shape (slot_bytes,).
        packing: What lies where in it.
    """

    number: int
    memory: ExportedMemory
    view: torch.Tensor
    packing: Packing

    def body(self, tags: bytes | None) -> bytes:
        """Returns the body of its batch; `tags`: of a verified round."""
        if tags is None and self.packing.body is not None:
            return self.packing.body
        nbytes, handle = self.memory.nbytes, self.memory.handle
        buffer = Buffer(self.number, nbytes, handle, self.packing.entries, tags)
        return encode_body(BatchBody([buffer]))


class RingMemory:
    """Slots in memory that workers map. All but `make` is called under the connection's lock.

    Args:
        options: How large it is.
        allocate: Gives memory of so many bytes, of a GPU or shared, with the number of its buffer.
    """

    def __init__(self, options: RingOptions, allocate: Allocate) -> None:
        self.slots = Slots(options)
        self._allocate = allocate
        self._memory: dict[int, ExportedMemory] = {}
        self._views: dict[int, torch.Tensor] = {}
        self._closed = False

    def make(self, count: int) -> list[tuple[int, ExportedMemory]]:
        """Makes memory for new slots, to be given to `add`: all of it or none.

        Raises:
            SharedMemoryError, GpuMemoryError: There is not enough room; nothing is left behind.
        """
        made: list[tuple[int, ExportedMemory]] = []
        options = self.slots.options
        try:
            while len(made) < count:
                made.append(self._allocate(options.slot_bytes, options.ordinal))
        except BaseException:
            for _, memory in made:
                memory.free()
            raise
        return made

    def add(self, made: Iterable[tuple[int, ExportedMemory]]) -> None:
        """The memory becomes free slots.

        Raises:
            ClosedError: The ring was closed meanwhile; the memory is freed.
        """
        if self._closed:
            for _, memory in made:
                memory.free()
        self._check_open()
        for number, memory in made:
            self._memory[number] = memory
            self._views[number] = bytes_of(memory)
            self.slots.add(number)

    def fill(self, table_bytes: int, turn: int) -> Filling | None:
        """Takes a free slot, if there is one, for tensors whose table has at most `table_bytes`.

        `turn`: see `Slots.fill`.

        Raises:
            ClosedError: The ring was closed.
        """
        self._check_open()
        number = self.slots.fill(turn)
        if number is None:
            return None
        packing = Packing(self.slots.options.slot_bytes, table_bytes)
        return Filling(number, self._memory[number], self._views[number], packing)

    def retire_missing(self) -> list[int]:
        """Retires the free slots whose memory was removed by something else; returns them."""
        free = self.slots.numbers(SlotState.FREE)
        return self.retire(number for number in free if self._memory[number].missing())

    def retire_free(self) -> list[int]:
        """Retires all free slots; returns them."""
        return self.retire(self.slots.numbers(SlotState.FREE))

    def retire(self, numbers: Iterable[int]) -> list[int]:
        """Retires these free slots; returns them."""
        chosen = list(numbers)
        for number in chosen:
            self.slots.retire(number)
        return chosen

    def gone(self, numbers: Iterable[int]) -> None:
        """Nobody has these mapped any more: the retired slots among them are freed."""
        for number in self.slots.gone(numbers):
            self._views.pop(number)
            self._memory.pop(number).free()

    def close(self) -> None:
        """Frees everything. Idempotent."""
        self._closed = True
        for memory in self._memory.values():
            memory.free()
        self._views.clear()
        self._memory.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the trainer was closed while a round was filling its ring")
