"""Handles: how a worker maps a trainer's buffer. Typed, bounded, never pickled.

A handle is checked while it is decoded; nothing is opened or rebuilt from one that does not pass.
The bytes of a `CudaIpcHandle` are opaque.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .errors import ProtocolError
from .limits import Bytes
from .segments import NAME_PATTERN, SegmentName, parse_name

MAX_IPC_HANDLE_BYTES = 256
CUDA_FORMAT = 1
"""The driver's `CUipcMemHandle` and `CUipcEventHandle`, 64 bytes each."""


class _Handle(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of the handles: another number of fields than expected is refused."""


class ShmHandle(_Handle, frozen=True, tag="shm"):
    """A segment of shared memory, by the name of its file in the segment directory."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN, max_length=128)]
    """Names the owner too (`tensorlease.protocol.segments`); a path can never match."""
    nbytes: Annotated[int, Meta(ge=1, le=2**62)]
    """Size of the segment in bytes, exactly."""

    @property
    def owner(self) -> SegmentName:
        """The user, process and instance that the segment belongs to."""
        owner = parse_name(self.name)
        if owner is None:  # only for a handle that was not decoded
            raise ProtocolError(f"segment name {self.name[:64]!r} is none of ours")
        return owner


class CudaIpcHandle(_Handle, frozen=True, tag="cuda-ipc"):
    """A part of an allocation of GPU memory, by the allocation's CUDA IPC handle."""

    format_version: Annotated[int, Meta(ge=0, le=255)]
    """What `handle` and `event` are: see `CUDA_FORMAT`."""
    gpu_uuid: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")]
    """The device's UUID without prefix, in lower case."""
    handle: Annotated[bytes, Meta(min_length=1, max_length=MAX_IPC_HANDLE_BYTES)]
    storage_nbytes: Annotated[int, Meta(ge=1, le=2**62)]
    """Size of the exported allocation in bytes."""
    storage_offset: Bytes
    """Where the buffer begins in the allocation, in bytes."""
    event: Annotated[bytes, Meta(min_length=1, max_length=MAX_IPC_HANDLE_BYTES)]
    """The IPC handle of an event: what a batch carries is there after the event's last record."""


Handle = ShmHandle | CudaIpcHandle
