"""Errors of the agents' data plane: each names the tensor or the memory it is about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..protocol.errors import TensorleaseError
from ..protocol.records import Holder
from .holders import name_of
from .ring import RingStatus


class TensorError(TensorleaseError):
    """A tensor that cannot take part as it is.

    Attributes:
        tensor: The name it was given under.
        reason: What is wrong with it, and the way out.
    """

    def __init__(self, tensor: str, reason: str) -> None:
        super().__init__(f"tensor {tensor!r} {reason}")
        self.tensor = tensor
        self.reason = reason


class ExportError(TensorError):
    """A trainer's tensor that cannot be registered, or no longer is where it was registered."""


class NotSharedError(ExportError):
    """A trainer's tensor of a GPU whose memory CUDA IPC cannot share."""


class AttachError(TensorError):
    """A worker's tensor that cannot be written to."""


class MismatchError(TensorError):
    """A worker's tensor differs from what a trainer offers under its name."""


class VerifyError(TensorError):
    """What a worker read, or wrote, is not what was published; found in a verified round."""


class ViewsKeptError(TensorleaseError):
    """A callback has returned, and something still looks into a trainer's memory by its views.

    Attributes:
        tensors: Whose views.
    """

    def __init__(self, tensors: Sequence[str]) -> None:
        shown = ", ".join(map(repr, tensors[:8])) + (", ..." if len(tensors) > 8 else "")
        super().__init__(
            f"on_stage kept views of {len(tensors)} tensors ({shown}) after it had returned: their"
            " memory is the trainer's, which must not write to it until they are dropped; copy what"
            " is to stay, by .clone() or into tensors of your own"
        )
        self.tensors = tuple(tensors)


class LoadError(TensorleaseError):
    """An engine's `load_weights` has not loaded what it was given; says at which tensor, and why."""


class CoverageError(TensorleaseError):
    """Tensors that a worker wants are not offered, or not in full.

    Attributes:
        missing: One text for each of them, which begins with its name.
    """

    def __init__(self, missing: Sequence[str]) -> None:
        shown = "; ".join(missing[:8]) + ("; ..." if len(missing) > 8 else "")
        super().__init__(
            f"{len(missing)} tensors that this worker wants are not offered in full: {shown}"
        )
        self.missing = tuple(missing)


class MemoryError_(TensorleaseError):
    """Memory that could not be made, mapped or given back."""


class SharedMemoryError(MemoryError_):
    """Shared memory could not be had.

    Attributes:
        path: The directory of the segments.
        needed: Bytes asked for.
        free: Bytes that were free there; None where that is not the reason.
        reason: What the operating system said, where `free` is None.
        tensors: The names of those that were to lie there; none: a slot of a ring, say.
    """

    def __init__(
        self,
        path: Path,
        needed: int,
        free: int | None,
        reason: str = "",
        tensors: Sequence[str] = (),
    ) -> None:
        if free is None:
            text = f"no segment of {mebibytes(needed)} could be made at {path}: {reason}"
        else:
            text = (
                f"needs {mebibytes(needed)}, {mebibytes(free)} free at {path}: enlarge it (for a"
                " container, its --shm-size), or let TENSORLEASE_SHM_DIR name another tmpfs"
            )
        if tensors:
            more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
            text = f"tensor {tensors[0]!r}{more}: {text}"
        super().__init__(text)
        self.path = path
        self.needed = needed
        self.free = free
        self.reason = reason
        self.tensors = tuple(tensors)

    def naming(self, tensors: Sequence[str]) -> SharedMemoryError:
        """Returns the same, said of these tensors."""
        names = tuple(dict.fromkeys(tensors))
        return SharedMemoryError(self.path, self.needed, self.free, self.reason, names)


class GpuMemoryError(MemoryError_):
    """Memory of a GPU could not be had, or not be shared."""


NO_ROOM: Final = (SharedMemoryError, GpuMemoryError)
"""What new memory may be refused with."""


class RingFullError(MemoryError_):
    """Silent workers keep all the slots that a ring may have.

    Attributes:
        holders: Who they are.
        status: The ring's slots and bytes.
    """

    def __init__(self, version: int, status: RingStatus) -> None:
        who = ", ".join(map(name_of, status.holders))
        living = all(holder.readers is None for holder in status.holders)
        how = ", silent but living" if living else ""
        super().__init__(
            f"version {version} cannot be sent on: {status.stuck} slots of"
            f" {mebibytes(status.slot_bytes)} are kept by {who}{how}, and the ring"
            f" may have {mebibytes(status.limit_bytes)} in all: end these processes, or allow more"
            " by max_quarantine_bytes"
        )
        self.holders: tuple[Holder, ...] = status.holders
        self.status = status


class MappingError(MemoryError_):
    """A handle that could not be mapped, or a mapping that could not be given back."""


class StillReadError(MemoryError_):
    """What a relay has handed on may be read still by those who got it."""


class SegmentGoneError(MappingError):
    """The file of a segment has vanished: its trainer ended, or something else removed it.

    Attributes:
        name: The segment's name.
    """

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(
            f"segment gone: {name} is not in {directory}; its trainer has ended, something removed"
            " it (logind does at logout, unless RemoveIPC=no), or the trainer uses another"
            " TENSORLEASE_SHM_DIR or mount namespace"
        )
        self.name = name


def mebibytes(nbytes: int) -> str:
    """Returns a number of bytes as people read it: `64.0 MiB`."""
    return f"{nbytes / 2**20:.1f} MiB"
