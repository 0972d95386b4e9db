"""Leases on weight buffers: tensors go from trainers to inference workers of one host, and no
buffer is written or freed before its last reader is done.

Importing this package is cheap: a name below is loaded when it is first asked for, so that neither
torch nor zmq is imported by a process that only wants to know the version.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .agents import (
        AttachError,
        ClosedError,
        ConfigError,
        DeadlineError,
        ExportError,
        GpuMemoryError,
        NoBrokerError,
        NotSharedError,
        Piece,
        RefusedError,
        RingFullError,
        RingOptions,
        RoundFailedError,
        RoundHandle,
        RoundResult,
        RowBlocks,
        Share,
        SharedMemoryError,
        SkippedError,
        StillLeasedError,
        TensorleaseError,
        TrainerAgent,
        UnreleasedError,
        VerifyError,
        ViewsKeptError,
        WorkerAgent,
    )

    __version__: str

__all__ = [
    "AttachError",
    "ClosedError",
    "ConfigError",
    "DeadlineError",
    "ExportError",
    "GpuMemoryError",
    "NoBrokerError",
    "NotSharedError",
    "Piece",
    "RefusedError",
    "RingFullError",
    "RingOptions",
    "RoundFailedError",
    "RoundHandle",
    "RoundResult",
    "RowBlocks",
    "Share",
    "SharedMemoryError",
    "SkippedError",
    "StillLeasedError",
    "TensorleaseError",
    "TrainerAgent",
    "UnreleasedError",
    "VerifyError",
    "ViewsKeptError",
    "WorkerAgent",
    "__version__",
]

_HOMES = {
    "AttachError": ".agents",
    "ClosedError": ".agents",
    "ConfigError": ".agents",
    "DeadlineError": ".agents",
    "ExportError": ".agents",
    "GpuMemoryError": ".agents",
    "NoBrokerError": ".agents",
    "NotSharedError": ".agents",
    "Piece": ".agents",
    "RefusedError": ".agents",
    "RingFullError": ".agents",
    "RingOptions": ".agents",
    "RoundFailedError": ".agents",
    "RoundHandle": ".agents",
    "RoundResult": ".agents",
    "RowBlocks": ".agents",
    "Share": ".agents",
    "SharedMemoryError": ".agents",
    "SkippedError": ".agents",
    "StillLeasedError": ".agents",
    "TensorleaseError": ".agents",
    "TrainerAgent": ".agents",
    "UnreleasedError": ".agents",
    "VerifyError": ".agents",
    "ViewsKeptError": ".agents",
    "WorkerAgent": ".agents",
}
"""Each public name, and the module that it is loaded from."""


def __getattr__(name: str) -> object:
    """Load a public name at its first use; later uses find it as an ordinary attribute.

    Raises:
        AttributeError: The package has no such name.
    """
    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("tensorlease")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name], __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
