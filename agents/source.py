"""What a trainer registers: its tensors' storages, moved once into memory that workers can map.

Those of a GPU stay where they are: what they lie in is exported (`cuda`). Of the others, as with `Tensor.share_memory_()`, the storage is what moves: parameters, tied tensors, views and
whatever else looks into it go on looking into the same, now shared, bytes.

How it moves depends on torch. Where a storage can exchange its memory with another
(`UntypedStorage._swap_data_ptr_`, after 2.11), every view follows, known or not. Elsewhere each
given tensor is pointed at the new storage one by one; a storage that others look into as well is
then refused by name, since they would silently keep the old bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from msgspec import Struct, field

from ..protocol.tables import Buffer, TensorEntry
from .copying import Run, copy_runs
from .errors import ExportError, GpuMemoryError, NotSharedError, SharedMemoryError
from .filling import check_memory
from .mappings import process_mappings
from .memory import ExportedMemory, MemoryKind
from .pieces import Pieces
from .placement import NamedTensors, Placed, holds_pieces, place
from .sharing import way_of
from .unmoved import HeldModel, Unmoved

if TYPE_CHECKING:
    from .cuda import CudaMemory
    from .cuda_driver import Extent

SEGMENT_BYTES: Final = 64 * 2**20
"""Storages up to this size are packed together; a larger one has a segment of its own."""
ALIGNMENT: Final = 256
"""Bytes: every storage begins at a multiple, as torch's own allocators do."""

Gpu = Callable[[], "CudaMemory"] | None
"""Gives the kind for tensors of a GPU, made when it is needed first."""

CAN_SWAP: Final = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


class _Storage(Struct):
    """A storage to be moved, and all that was given of it."""

    storage: torch.UntypedStorage
    placed: list[Placed] = field(default_factory=list)
    entries: list[TensorEntry] = field(default_factory=list)
    """Its tensors, with offsets within the storage."""

    @property
    def known(self) -> list[torch.Tensor]:
        """The given tensors that look into it, and those that they are views of."""
        given = [placed.tensor for placed in self.placed]
        bases = [tensor._base for tensor in given if tensor._base is not None]
        return list({id(tensor): tensor for tensor in (*given, *bases)}.values())


class RegisteredBuffers:
    """Registered tensors: keeps them, and the memory they were moved into, until `close`."""

    def __init__(
        self, buffers: list[Buffer], memory: list[ExportedMemory], placed: list[Placed]
    ) -> None:
        self.names: Final = tuple(dict.fromkeys(tensor.name for tensor in placed))
        self.pieces: Final = holds_pieces(placed)
        """Whether any tensor is less than the whole of its global shape."""
        self.model: HeldModel | None = None
        """The model that the tensors are of, if one was given."""
        self.closed = False
        """Whether `close` was called: nobody can map them any more."""
        self._placed = placed
        self._lie_in(buffers, memory)
        _registered.add(self)

    def _lie_in(self, buffers: list[Buffer], memory: list[ExportedMemory]) -> None:
        self.buffers = buffers
        """The buffers, for the body of an Offer."""
        self.numbers = [buffer.number for buffer in buffers]
        self.nbytes = sum(
            entry.nbytes for buffer in buffers for entry in buffer.entries if entry.alias_of is None
        )
        """Bytes of all elements, those of tied tensors once."""
        self._memory = memory
        # Where each tensor must still lie when a round is published; one of several boxes once.
        places = {id(tensor.tensor): tensor for tensor in self._placed if tensor.nbytes}
        self._places = [(tensor, tensor.tensor.data_ptr()) for tensor in places.values()]
        # Of all names: several DTensors may have had one local tensor.
        self._distributed = [each for each in self._placed if each.distributed is not None]
        self._empty = [each for each in self._placed if not each.nbytes]
        # As they lay when they were looked at one by one.
        self._unmoved: Unmoved | None = None

    def missing(self) -> bool:
        """Whether the memory, or a part of it, was removed by something else."""
        return any(memory.missing() for memory in self._memory)

    def renew(self, memory: MemoryKind, numbers: Iterator[int], gpu: Gpu = None) -> list[int]:
        """Moves into new memory, as `register` does; returns the former buffers.

        Who has those mapped may go on reading; nobody writes to them any more.

        Raises:
            ExportError, SharedMemoryError: See `register`. Nothing moved.
        """
        former = self.numbers
        _registered.discard(self)  # Else its tensors are registered already.
        try:
            buffers, exported = self._made_anew(memory, numbers, gpu)
        finally:
            _registered.add(self)
        for gone in self._memory:
            gone.free()
        self._lie_in(buffers, exported)
        return former

    def _made_anew(
        self, memory: MemoryKind, numbers: Iterator[int], gpu: Gpu
    ) -> tuple[list[Buffer], list[ExportedMemory]]:
        return _move(self._placed, memory, numbers, gpu)

    @property
    def shadows(self) -> bool:
        """Whether workers read copies, made by `fill`, and not the tensors themselves."""
        return False

    @property
    def via(self) -> tuple[str, ...]:
        """How their bytes travel: `ipc`, `staging` (copied on their GPU at each publish), `shm`."""
        handles = [buffer.handle for buffer in self.buffers if buffer.handle is not None]
        return tuple(sorted({way_of(handle, self.shadows) for handle in handles}))

    def require_held(self) -> None:
        """Raises `ExportError`, naming the tensor, if the model has another one by now."""
        if self.model is not None and (name := self.model.replaced()):
            raise ExportError(
                name,
                "is another tensor in the model by now (load_state_dict(assign=True), or a new"
                " nn.Parameter): write to it in place, or close these buffers and register again",
            )

    def check(self) -> None:
        """Raises `ExportError`, naming the tensor, if what workers would read is not the tensor.

        That is so after `parameter.data = other`: register again then. Also when a segment's file
        was removed, and `renew` was not called. Cheap enough for every publish.
        """
        self._check_memory()
        for placed in self._distributed:
            if placed.left_behind:
                raise _replaced(placed)
        for placed in self._empty:
            if not placed.is_as_given:
                raise _replaced(placed)
        if self._unmoved is not None and self._unmoved.holds():
            return
        for placed, address in self._places:
            tensor = placed.tensor
            there = tensor.data_ptr() == address
            if not (there and placed.is_as_given and tensor.is_contiguous()):
                raise _replaced(placed)
        self._unmoved = Unmoved([placed.tensor for placed, _ in self._places])

    def _check_memory(self) -> None:
        for memory, buffer in zip(self._memory, self.buffers, strict=False):
            if memory.missing():
                raise ExportError(
                    buffer.entries[0].name,
                    f"lies in buffer {buffer.number}, whose memory was removed by something else"
                    " (logind does at logout, unless RemoveIPC=no): close and register again",
                )

    def fill(self) -> None:
        """Brings what workers read up to date; nothing where that is the tensors themselves.

        To be called when nobody reads these buffers.
        """

    def holds(self, address: int) -> bool:
        """Whether the byte at `address` lies in these buffers."""
        return any(memory.holds(address) for memory in self._memory)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Returns names and (local) tensors that workers read; those without elements are left out."""
        return [(placed.name, placed.tensor) for placed, _ in self._places]

    def exports(self) -> list[tuple[Buffer, ExportedMemory | None]]:
        """Returns each buffer with its memory; None for the one that has no bytes."""
        memory = iter(self._memory)
        return [(buffer, next(memory) if buffer.nbytes else None) for buffer in self.buffers]

    def close(self) -> None:
        """Ends the export; nobody can map the buffers from now on. Idempotent.

        The tensors stay where they are, with their values: the memory is given back when the last
        of them, and of the workers' mappings, is gone.
        """
        self.closed = True
        _registered.discard(self)
        self._places, self._distributed, self._empty = [], [], []
        self._unmoved, self.model = None, None
        for memory in self._memory:
            memory.free()


def _replaced(placed: Placed) -> ExportError:
    return ExportError(
        placed.name,
        "no longer lies where it was registered, or not as it did (its data was replaced): copy into"
        " it in place, or close these buffers and register again",
    )


_registered: weakref.WeakSet[RegisteredBuffers] = weakref.WeakSet()


def register(
    named_tensors: NamedTensors,
    *,
    memory: MemoryKind,
    numbers: Iterator[int],
    regions: Pieces | None = None,
    gpu: Gpu = None,
) -> RegisteredBuffers:
    """Moves the storages of the tensors into `memory`, each once, all of them or none.

    Tied tensors (one memory, one shape) become aliases and count once. Every tensor goes on being
    the same object with the same values. A storage moves whole, also where a given tensor is only
    a part of it; only the given tensors are described to workers. While it moves, nobody may
    write to it. Memory needed meanwhile: all bytes twice.

    Args:
        named_tensors: Names and tensors; `model.named_parameters(remove_duplicate=False)` or
            `model.state_dict()`, say. DTensors say their region themselves.
        memory: The kind of memory to move into.
        numbers: Gives the number of each new buffer; never one twice within a trainer's instance.
        regions: For plain tensors that are pieces of larger ones: global shape and start.
        gpu: Gives the kind that exports tensors of a GPU where they are; None: they are refused.

    Raises:
        ExportError: A tensor cannot be registered; its name, why, and the way out. Nothing moved.
        SharedMemoryError: There is not enough room. Nothing moved, nothing is left behind.
    """
    placed = place(named_tensors, regions, ExportError)
    buffers, exported = _move(placed, memory, numbers, gpu)
    return RegisteredBuffers(buffers, exported, placed)


def _move(
    placed: list[Placed], memory: MemoryKind, numbers: Iterator[int], gpu: Gpu
) -> tuple[list[Buffer], list[ExportedMemory]]:
    """Moves the storages of the tensors, all or none; returns their buffers and the new memory.

    Those of a GPU are exported where they are.
    """
    empty = [tensor for tensor in placed if not tensor.nbytes]
    there = [t for t in placed if t.nbytes and gpu is not None and t.tensor.is_cuda]
    every = _storages_of([t for t in placed if t not in there] if there else placed, memory.device)
    exported: list[ExportedMemory] = []
    moved: list[_Moved] = []
    buffers: list[Buffer] = []
    try:
        for group, nbytes in pack([each.storage.nbytes() for each in every]):
            number = next(numbers)
            names = [placed.name for index, _ in group for placed in every[index].placed]
            segment = allocate_for(names, memory, nbytes, number)
            exported.append(segment)
            entries: list[TensorEntry] = []
            for index, offset in group:
                moved.append(_Moved(every[index], segment, offset))
                moved[-1].move()
                entries += [_shifted(entry, offset) for entry in every[index].entries]
            buffers.append(Buffer(number, nbytes, segment.handle, entries))
        if there and gpu is not None:
            _export(_storages_of(there, "cuda"), gpu(), numbers, buffers, exported)
        if empty:
            buffers.append(empty_buffer(next(numbers), empty))
    except BaseException:
        # Nothing is left here: who keeps the exception would keep its tensors from another try.
        while moved:
            moved.pop().undo()
        every.clear()
        for segment in exported:
            segment.free()
        raise
    return buffers, exported


def _export(
    every: list[_Storage],
    gpu: CudaMemory,
    numbers: Iterator[int],
    buffers: list[Buffer],
    exported: list[ExportedMemory],
) -> None:
    """Exports storages of GPUs where they are: a buffer for each allocation that they lie in."""
    from .cuda import extents, not_shared
    from .cuda_driver import CudaError
    from .cuda_reasons import COPIES, without_ipc

    for ordinal, first in {each.storage.device.index: each for each in reversed(every)}.items():
        if reason := without_ipc(ordinal):
            name = first.placed[0].name
            raise NotSharedError(name, f"is on a GPU without CUDA IPC: {reason}; {COPIES}")
    groups: dict[tuple[int, Extent], list[_Storage]] = {}
    where = extents([each.storage for each in every], every[0].placed[0].name)
    for each, key in zip(every, where, strict=True):
        groups.setdefault(key, []).append(each)
    for (ordinal, extent), group in groups.items():
        number = next(numbers)
        try:
            memory = gpu.export(number, ordinal, extent, [each.storage for each in group])
        except CudaError as error:
            address = group[0].storage.data_ptr()
            raise not_shared(group[0].placed[0].name, error, ordinal, address) from None
        exported.append(memory)
        entries = [
            _shifted(entry, each.storage.data_ptr() - memory.address)
            for each in group
            for entry in each.entries
        ]
        buffers.append(Buffer(number, memory.nbytes, memory.handle, entries))


def _storages_of(placed: list[Placed], device: str) -> list[_Storage]:
    """Returns the storages of the tensors that have elements; refuses what cannot be moved."""
    storages: dict[int, _Storage] = {}
    for tensor in placed:
        if not tensor.nbytes:
            continue
        _check_movable(tensor, device)
        storage = tensor.tensor.untyped_storage()
        storages.setdefault(storage._cdata, _Storage(storage)).placed.append(tensor)
    every = list(storages.values())
    for moving in every:
        moving.entries = _describe(moving)
        if device == "cpu" and not CAN_SWAP:
            _check_views_known(moving)
    return every


def allocate_for(
    names: Sequence[str], memory: MemoryKind, nbytes: int, number: int
) -> ExportedMemory:
    """Returns memory for tensors of these names.

    Raises:
        SharedMemoryError, GpuMemoryError: It could not be had; names them.
    """
    try:
        return memory.allocate(nbytes, number)
    except SharedMemoryError as error:
        raise error.naming(names) from error
    except GpuMemoryError as error:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise GpuMemoryError(f"tensor {names[0]!r}{more}: {error}") from error


def check_own(placed: Placed) -> None:
    """Raises `ExportError` for a tensor that lies in another trainer's memory, or in none."""
    check_memory(placed)
    received = process_mappings().owner_of(placed.tensor.data_ptr())
    if received is not None:
        raise ExportError(
            placed.name,
            f"was received: it lies in buffer {received[1]} of trainer {received[0]}, and only its"
            " owner can hand it on; clone it first",
        )


def _check_movable(placed: Placed, device: str) -> None:
    """Raises `ExportError` for a tensor whose storage must not, or cannot, be moved."""
    name, tensor = placed.name, placed.tensor
    if tensor.device.type != device:
        raise ExportError(
            name,
            f"is on {tensor.device}, this memory kind takes tensors on {device}: move it there, or"
            " register it with shadow=True, which copies it at each publish",
        )
    check_own(placed)
    if any(others.holds(tensor.data_ptr()) for others in _registered):
        raise ExportError(
            name,
            "is already registered (or shares the memory of a tensor that is): use that"
            " registration, or close it first",
        )
    # That of a GPU always says that it is.
    if device == "cpu" and tensor.untyped_storage().is_shared():
        raise ExportError(
            name,
            "was shared between processes by torch (share_memory_()), which would lose sight of"
            " it: register a clone, or register it before sharing",
        )
    if not tensor.is_contiguous():
        raise ExportError(
            name,
            f"is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}): call"
            " .contiguous(), register the tensor that it is a view of, or register it with"
            " shadow=True, which copies it at each publish",
        )


def _describe(moving: _Storage) -> list[TensorEntry]:
    """Returns the entries of one storage, tied tensors as aliases; refuses partial overlaps."""
    entries: list[TensorEntry] = []
    owners: dict[tuple[int, object, object, str], str] = {}
    spans: list[tuple[int, int, str]] = []
    for placed in moving.placed:
        start = placed.bytes_offset
        key = (start, placed.shape, placed.region, placed.dtype)
        owner = owners.setdefault(key, placed.name)
        entries.append(entry_of(placed, start, None if owner == placed.name else owner))
        if owner == placed.name:
            spans.append((start, start + placed.nbytes, placed.name))
    spans.sort()
    for index in range(1, len(spans)):
        _, end, first = spans[index - 1]
        begin, _, second = spans[index]
        if begin < end:
            raise ExportError(
                second,
                f"overlaps {first!r} in memory without being the same tensor: register one of the"
                " two",
            )
    return entries


def _check_views_known(moving: _Storage) -> None:
    """Refuses a storage into which tensors look that were not given (for a torch without swap)."""
    # One use is the storage object that we hold.
    known = len(moving.known) + 1
    others = torch._C._storage_Use_Count(moving.storage._cdata) - known
    if others > 0:
        raise ExportError(
            moving.placed[0].name,
            f"shares its memory with {others} tensors that were not given, which torch"
            f" {torch.__version__} cannot move along: give them too (named_parameters"
            "(remove_duplicate=False) rather than state_dict()), or register before making views",
        )


def pack(sizes: Iterable[int]) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """Yields of each segment what lies in it, as (index in `sizes`, offset), and its bytes.

    Together they have all of `sizes`, in bytes, in order.
    """
    group: list[tuple[int, int]] = []
    end = 0
    for index, nbytes in enumerate(sizes):
        if nbytes > SEGMENT_BYTES:
            yield [(index, 0)], nbytes
            continue
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if group and start + nbytes > SEGMENT_BYTES:
            yield group, end
            group, start = [], 0
        group.append((index, start))
        end = start + nbytes
    if group:
        yield group, end


def empty_buffer(
    number: int, placed: Iterable[Placed], dtypes: Mapping[str, str] | None = None
) -> Buffer:
    """Returns the buffer of tensors without elements: no bytes, so nothing to map.

    Args:
        number: The buffer's.
        placed: The tensors.
        dtypes: Other dtypes than their own, by name.
    """
    others = dtypes or {}
    entries = [entry_of(tensor, 0, None, others.get(tensor.name)) for tensor in placed]
    return Buffer(number, 0, None, entries)


def entry_of(
    placed: Placed, offset: int, alias_of: str | None, dtype: str | None = None
) -> TensorEntry:
    """Returns what a table says of a tensor at `offset`; in another dtype, if one is given."""
    whole = placed.region.is_whole(placed.shape)
    return TensorEntry(
        name=placed.name,
        dtype=dtype or placed.dtype,
        shape=placed.shape,
        region=None if whole else placed.region,
        offset=offset,
        alias_of=alias_of,
    )


def _shifted(entry: TensorEntry, offset: int) -> TensorEntry:
    return TensorEntry(
        entry.name, entry.dtype, entry.shape, entry.region, entry.offset + offset, entry.alias_of
    )


class _Moved:
    """A storage that is moved, and how to move it back."""

    def __init__(self, moving: _Storage, segment: ExportedMemory, offset: int) -> None:
        self._moving = moving
        self._other = segment.storage(offset, moving.storage.nbytes())
        self._swapped = False
        self._old: list[tuple[torch.Tensor, torch.Tensor]] = []

    def move(self) -> None:
        """Copies the bytes and points the tensors at them."""
        storage = self._moving.storage
        copy_runs([Run(self._other.data_ptr(), storage.data_ptr(), storage.nbytes())])
        if CAN_SWAP:
            _swap(storage, self._other)
            self._swapped = True
            return
        for tensor in self._moving.known:
            self._old.append((tensor, tensor.detach()))
            view = torch.empty(0, dtype=tensor.dtype)
            view.set_(self._other, tensor.storage_offset(), tensor.size(), tensor.stride())
            tensor.data = view

    def undo(self) -> None:
        """Puts the tensors back into the memory they came from, whose values are the same."""
        if self._swapped:
            _swap(self._moving.storage, self._other)
        for tensor, old in self._old:
            tensor.data = old


def _swap(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchanges the memory of two storages of one size."""
    getattr(storage, "_swap_data_ptr_")(other)  # noqa: B009 - torch's stubs do not know it
