"""The one interface of the memory kinds: allocate and free in the trainer, open and unmap in workers.

A new kind of memory is a module beside this one and a handle in `protocol/handles.py`; nothing
else knows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..protocol.handles import Handle

if TYPE_CHECKING:
    import torch


class ExportedMemory(Protocol):
    """Memory of a trainer that workers can map."""

    @property
    def handle(self) -> Handle:
        """What a worker maps it by."""
        ...

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        ...

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        ...

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Returns `nbytes` (at least 1) of it from byte `offset` as a torch storage.

        The memory stays mapped for as long as any storage of it lives, also after `free`.
        """
        ...

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        ...

    def holds(self, address: int) -> bool:
        """Whether the byte at `address` belongs to what was put into it."""
        ...

    def written(self) -> None:
        """What this thread's streams have written to it is to be read from now on."""
        ...

    def missing(self) -> bool:
        """Whether someone removed it under us, so that nobody can map it any more."""
        ...

    def free(self) -> None:
        """Ends the export: nobody can map it from now on. Who has it mapped keeps it. Idempotent."""
        ...


class Event(Protocol):
    """What comes in the order of a device's stream."""

    def query(self) -> bool:
        """Whether all of before it was done."""
        ...


class MappedMemory(Protocol):
    """A trainer's memory in a worker, for reading alone."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        ...

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that can read it."""
        ...

    @property
    def event(self) -> Event | None:
        """What the trainer has written is there after it (see `await_written`); None: it is."""
        ...

    @property
    def foreign(self) -> bool:
        """Whether it is another's: the memory at this address was not made here."""
        ...

    def flat(self) -> torch.Tensor:
        """Returns all of it, uint8 of shape (nbytes,). To be dropped before `unmap`."""
        ...

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Returns `nbytes` (at least 1) of it from byte `offset` as a torch storage of its own.

        To be dropped before `unmap`; writing to it may end the process.
        """
        ...

    def unmap(self) -> None:
        """Gives the mapping back. Idempotent.

        Raises:
            MappingError: A tensor still looks into it; may be called again once it is dropped.
        """
        ...


def bytes_of(memory: ExportedMemory) -> torch.Tensor:
    """Returns all of it, uint8 of shape (nbytes,)."""
    import torch

    data = torch.empty(0, dtype=torch.uint8, device=memory.device)
    return data.set_(memory.storage(0, memory.nbytes))


class MemoryKind(Protocol):
    """One way to share memory, in the trainer."""

    @property
    def device(self) -> str:
        """Type of the torch device that its tensors must be on."""
        ...

    def allocate(self, nbytes: int, number: int) -> ExportedMemory:
        """Returns new memory for the buffer `number` of this trainer, `nbytes` (at least 1) long.

        Raises:
            MemoryError_: It could not be had; nothing is left behind.
        """
        ...
