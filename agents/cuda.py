"""The memory kind `cuda_ipc`: GPU memory of a trainer, mapped by workers through CUDA IPC.

Registered tensors stay where they are: the allocation that they lie in is exported as it is, once
for all tensors in it. An event says when what the trainer's stream has written is there: a trainer
does not wait for its device, and a worker looks for the event before it copies.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from threading import Lock
from typing import Any, Final

import torch

from ..protocol.handles import CUDA_FORMAT, CudaIpcHandle
from . import cuda_driver as driver
from .cuda_driver import CudaError, Extent
from .cuda_reasons import COPIES, not_exported, not_mapped, require_format, require_reach
from .errors import GpuMemoryError, MappingError, NotSharedError

log = logging.getLogger("tensorlease.agents")

# What torch's stubs do not say.
_make_event: Final[Callable[..., torch.cuda.Event]] = torch.cuda.Event
_handle_of: Final[Callable[[torch.cuda.Event], bytes]] = torch.cuda.Event.ipc_handle
_event_from: Final[Callable[..., Any]] = torch.cuda.Event.from_ipc_handle


class _Block:
    """A range of GPU memory, for torch to make tensors of; alive as long as one of them is."""

    def __init__(self, address: int, nbytes: int, keep: object = None) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }
        self._keep = keep


def _tensor(block: _Block, ordinal: int) -> torch.Tensor:
    """Returns a block as uint8 of shape (nbytes,)."""
    return torch.as_tensor(block, device=torch.device("cuda", ordinal))


class Order:
    """An event of this process on one device, that other processes can look for.

    There is one for all that a process has registered on the device, and one for each slot of a
    ring, since the next one is packed while this one is read. Those of slots are used again: workers
    keep what they have opened until they end, since the driver does not bear it to be closed.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal: Final = ordinal
        self._lock = Lock()
        with torch.cuda.device(ordinal):
            self.event: Final = _make_event(interprocess=True)
            self.handle: Final = _handle_of(self.event)

    def record(self) -> None:
        """What this thread's current stream has been told so far comes before, and all of before."""
        with self._lock, torch.cuda.device(self.ordinal):
            stream = torch.cuda.current_stream(self.ordinal)
            if stream.query():
                return  # All is there; a record would have the GPU turn to this process for it.
            self.event.wait(stream)  # Another thread's stream may have recorded it.
            self.event.record(stream)


class CudaExport:
    """A range of one allocation of this process, that workers can map.

    Args:
        extent: The allocation.
        begin: Where the range begins, in bytes of the allocation.
        nbytes: Its length.
        storages: What lies in it: kept, so that nothing else is given the memory.
        order: Says when what was written is there.
        at_end: Called once, when the export has ended.
    """

    def __init__(
        self,
        ordinal: int,
        extent: Extent,
        begin: int,
        nbytes: int,
        storages: Sequence[torch.UntypedStorage],
        order: Order,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.ordinal: Final = ordinal
        self.order: Final = order
        self._nbytes = nbytes
        self._address = extent.address + begin
        self._storages = list(storages)
        self._at_end: Callable[[], None] | None = at_end
        self._spans = [(each.data_ptr(), each.nbytes()) for each in storages]
        self._handle = CudaIpcHandle(
            CUDA_FORMAT,
            uuid_of(ordinal),
            driver.export_handle(ordinal, extent.address),
            extent.nbytes,
            begin,
            order.handle,
        )
        require_format(self._handle)

    @property
    def handle(self) -> CudaIpcHandle:
        """What a worker maps it by."""
        return self._handle

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._nbytes

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return self._address

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return torch.device("cuda", self.ordinal)

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Returns `nbytes` of it from byte `offset` as a storage."""
        block = _Block(self._address + offset, nbytes, self._storages)
        return _tensor(block, self.ordinal).untyped_storage()

    def holds(self, address: int) -> bool:
        """Whether the byte at `address` belongs to what lies in it."""
        return any(begin <= address < begin + nbytes for begin, nbytes in self._spans)

    def written(self) -> None:
        """Workers read it after what this thread's current stream was told so far."""
        self.order.record()

    def missing(self) -> bool:
        """Nobody can remove it under us."""
        return False

    def free(self) -> None:
        """Ends the export: the memory is given back when its tensors are gone. Idempotent."""
        self._storages = []
        at_end, self._at_end = self._at_end, None
        if at_end is not None:
            at_end()


class CudaMapping:
    """A trainer's GPU memory in a worker, for reading alone."""

    def __init__(self, handle: CudaIpcHandle, own: CudaExport | None, source: str = "") -> None:
        """Maps it.

        Args:
            handle: What the trainer says of it.
            own: The export itself, where the trainer is of this process.
            source: The trainer's instance.

        Raises:
            MappingError: It cannot be mapped here.
        """
        self._handle = handle
        self._own = own
        self._ordinal, self._opened = (own.ordinal, 0) if own is not None else _open(handle)
        base = self._opened + handle.storage_offset if own is None else own.address
        self._address = base
        self._nbytes = handle.storage_nbytes - handle.storage_offset if own is None else own.nbytes
        self._block: _Block | None = _Block(base, self._nbytes, own)
        self._alive: weakref.ref[_Block] = weakref.ref(self._block)
        self._event = own.order.event if own is not None else self._opened_event(source, handle)

    def _opened_event(self, source: str, handle: CudaIpcHandle) -> torch.cuda.Event:
        try:
            return _open_event(source, handle.event, self._ordinal)
        except RuntimeError as error:
            driver.close_handle(self._ordinal, self._opened)
            raise MappingError(
                f"the event of a trainer's GPU memory cannot be opened: {error}"
            ) from None

    @property
    def nbytes(self) -> int:
        """Its size in bytes, or more: up to the end of the allocation."""
        return self._nbytes

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return self._address

    @property
    def device(self) -> torch.device:
        """The device that can read it at this address."""
        return torch.device("cuda", self._ordinal)

    @property
    def event(self) -> torch.cuda.Event:
        """What the trainer has written is there after it; see `await_written`."""
        return self._event

    @property
    def foreign(self) -> bool:
        """Whether it belongs to another process."""
        return self._own is None

    def flat(self) -> torch.Tensor:
        """Returns all of it, uint8 of shape (nbytes,); to be read after the event."""
        return _tensor(self._readable(), self._ordinal)

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Returns a part of it; to be read after the event."""
        block = _Block(self._address + offset, nbytes, self._readable())
        return _tensor(block, self._ordinal).untyped_storage()

    def unmap(self) -> None:
        """Gives the mapping back; raises `MappingError` while a tensor looks into it."""
        self._block = None
        if self._alive() is not None:
            gc.collect()  # a view may hang in a reference cycle
        self._block = self._alive()
        if self._block is not None:
            raise MappingError(
                "GPU memory of a trainer cannot be unmapped: a tensor still looks into it; drop"
                " every view of a batch before it is acknowledged, or clone it"
            )
        opened, self._opened = self._opened, 0
        if opened:
            try:
                driver.close_handle(self._ordinal, opened)
            except CudaError as error:
                # Something else has failed on the device: nothing can read there any more.
                log.error("GPU memory of a trainer was not unmapped: %s", error)

    def _readable(self) -> _Block:
        if self._block is None:
            raise MappingError("GPU memory of a trainer was unmapped")
        return self._block


class CudaMemory:
    """GPU memory as a trainer's memory kind."""

    def __init__(self, instance: str) -> None:
        self._instance = instance

    def export(
        self, number: int, ordinal: int, extent: Extent, storages: Sequence[torch.UntypedStorage]
    ) -> CudaExport:
        """Exports the range of one allocation that these storages lie in.

        Raises:
            CudaError: Memory of this kind cannot be shared so.
        """
        begin = min(each.data_ptr() for each in storages) - extent.address
        end = max(each.data_ptr() + each.nbytes() for each in storages) - extent.address
        order = _process_order(ordinal)
        export = CudaExport(ordinal, extent, begin, end - begin, storages, order)
        _exports[self._instance, number] = export
        return export

    def written(self) -> None:
        """What this thread's streams were told so far is part of what workers read next.

        Of every device on which this process has registered tensors.
        """
        for order in list(_orders.values()):
            order.record()

    def allocate(self, nbytes: int, number: int, ordinal: int) -> CudaExport:
        """Returns new memory.

        Raises:
            GpuMemoryError: There is no room, or it cannot be shared.
        """
        device = torch.device("cuda", ordinal)
        try:
            storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
            extent = driver.address_range(ordinal, storage.data_ptr())
            begin = storage.data_ptr() - extent.address
            order = _slot_order(ordinal)
            back = partial(_spare_orders[ordinal].append, order)
            export = CudaExport(ordinal, extent, begin, nbytes, [storage], order, back)
        except torch.cuda.OutOfMemoryError as error:
            raise GpuMemoryError(f"{nbytes} bytes of {device}: {error}") from None
        except CudaError as error:
            raise GpuMemoryError(f"{nbytes} bytes of {device} cannot be shared: {error}") from None
        _exports[self._instance, number] = export
        return export


def extents(storages: Sequence[torch.UntypedStorage], name: str) -> list[tuple[int, Extent]]:
    """Returns the device and the allocation of each storage; `name`: for the error.

    Raises:
        ExportError: One of them is in no allocation that the driver knows.
    """
    found: list[tuple[int, Extent]] = []
    for storage in storages:
        ordinal = storage.device.index
        last = found[-1] if found else None
        if last is not None and last[0] == ordinal and _inside(storage, last[1]):
            found.append(last)
            continue
        try:
            found.append((ordinal, driver.address_range(ordinal, storage.data_ptr())))
        except CudaError as error:
            raise not_shared(name, error, ordinal, storage.data_ptr()) from None
    return found


def not_shared(name: str, error: CudaError, ordinal: int, address: int) -> NotSharedError:
    """Returns what to raise for a tensor whose memory CUDA IPC cannot share."""
    cause, instead = not_exported(ordinal, address)
    way_out = f"{instead}, or {COPIES}" if instead else COPIES
    return NotSharedError(
        name,
        f"lies in GPU memory that CUDA IPC cannot share ({error}) on GPU {uuid_of(ordinal)}:"
        f" {cause}; {way_out}",
    )


def local_export(source: str, number: int) -> CudaExport | None:
    """Returns the buffer `number` of a trainer's instance, if the trainer is of this process."""
    return _exports.get((source, number))


@cache
def uuid_of(ordinal: int) -> str:
    """Returns the UUID of a device."""
    return driver.uuid_of(ordinal)


def _inside(storage: torch.UntypedStorage, extent: Extent) -> bool:
    begin = storage.data_ptr()
    return extent.address <= begin and begin + storage.nbytes() <= extent.address + extent.nbytes


def _open(handle: CudaIpcHandle) -> tuple[int, int]:
    """Maps a handle by a device that can read it; returns that device, and the address."""
    require_format(handle)
    if not torch.cuda.is_available():
        raise MappingError(
            f"a trainer's tensors are on GPU {handle.gpu_uuid}, and this process has no CUDA: run"
            ' the worker where that GPU is, or let the trainer register with share="shm"'
        )
    ordinal = torch.cuda.current_device()
    require_reach(ordinal, handle.gpu_uuid)
    try:
        return ordinal, driver.open_handle(ordinal, handle.handle)
    except CudaError as error:
        raise MappingError(not_mapped(ordinal, handle.gpu_uuid, error)) from None


_orders: Final[dict[int, Order]] = {}
_spare_orders: Final[defaultdict[int, list[Order]]] = defaultdict(list)
_exports: Final[weakref.WeakValueDictionary[tuple[str, int], CudaExport]] = (
    weakref.WeakValueDictionary()
)
_events: Final[dict[tuple[str, bytes, int], torch.cuda.Event]] = {}
_lock: Final = Lock()


def _process_order(ordinal: int) -> Order:
    """Returns the event of this process on a device."""
    with _lock:
        order = _orders.get(ordinal)
        if order is None:
            order = _orders[ordinal] = Order(ordinal)
        return order


def _slot_order(ordinal: int) -> Order:
    """Returns an event that no other memory uses; for `_spare_orders` at its end."""
    with _lock:
        spare = _spare_orders[ordinal]
        return spare.pop() if spare else Order(ordinal)


def _open_event(source: str, handle: bytes, ordinal: int) -> torch.cuda.Event:
    """Opens a trainer's event: once, for good, though many buffers name it.

    Another trainer's may have the same handle, if it has the number of a process that has ended.
    """
    with _lock:
        known = _events.get((source, handle, ordinal))
        if known is not None:
            return known
        event: torch.cuda.Event = _event_from(torch.device("cuda", ordinal), handle)
        _events[source, handle, ordinal] = event
        return event
