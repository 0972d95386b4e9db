"""Staging: plain memory of a GPU beside tensors whose own memory CUDA IPC cannot share.

It is made by the driver, outside of torch's allocator, whatever that is set to. What is published
is copied into it on the device.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import torch

from ..protocol.errors import TensorleaseError
from . import cuda_driver as driver
from .cuda_driver import CudaError, Extent
from .cuda_reasons import without_ipc
from .errors import GpuMemoryError, mebibytes

if TYPE_CHECKING:
    from .cuda import CudaExport, CudaMemory

PAGE_BYTES: Final = 2 * 2**20
"""The driver may put smaller allocations of a process into one, which is then shared whole."""
INSTEAD: Final = 'register with share="shm", which goes through shared memory'


class _Plain:
    """Memory of the driver, for torch to make tensors of; given back with the last of them."""

    def __init__(self, ordinal: int, nbytes: int) -> None:
        self._ordinal = ordinal
        whole = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self.extent: Final = Extent(driver.allocate(ordinal, whole), whole)
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.extent.address, False),
            "version": 2,
        }

    def __del__(self) -> None:
        # Not where the driver refused to make it; and a forked child cannot give it back.
        if hasattr(self, "extent"):
            with suppress(TensorleaseError):
                driver.free(self._ordinal, self.extent.address)


class StagingMemory:
    """Plain memory of one GPU as a memory kind; see `memory.MemoryKind`."""

    def __init__(self, gpu: CudaMemory, ordinal: int) -> None:
        self._gpu = gpu
        self._ordinal = ordinal

    @property
    def device(self) -> str:
        """See `MemoryKind.device`."""
        return "cuda"

    def allocate(self, nbytes: int, number: int) -> CudaExport:
        """Returns new memory.

        Raises:
            GpuMemoryError: There is no room, or CUDA IPC cannot share memory of this GPU at all.
        """
        if reason := without_ipc(self._ordinal):
            raise GpuMemoryError(f"no staging memory: {reason}; {INSTEAD}")
        try:
            plain = _Plain(self._ordinal, nbytes)
            storage = _storage_of(plain, self._ordinal)
            return self._gpu.export(number, self._ordinal, plain.extent, [storage])
        except CudaError as error:
            raise GpuMemoryError(self._why(nbytes, error)) from None

    def _why(self, nbytes: int, error: CudaError) -> str:
        text = f"{mebibytes(nbytes)} of staging memory on GPU {driver.uuid_of(self._ordinal)}"
        if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
            return f"{text} cannot be shared ({error}); {INSTEAD}"
        room = ""
        with suppress(CudaError):
            free, total = driver.room_of(self._ordinal)
            room = f", {mebibytes(free)} of {mebibytes(total)} free"
        return f"{text}: there is no room ({error}{room}); make some, or {INSTEAD}"


def _storage_of(plain: _Plain, ordinal: int) -> torch.UntypedStorage:
    return torch.as_tensor(plain, device=torch.device("cuda", ordinal)).untyped_storage()
