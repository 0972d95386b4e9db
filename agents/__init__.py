"""The agents: what trainers and inference workers embed.

Importing this package is cheap and starts nothing: a name below is loaded, and torch with it, when
it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..protocol.errors import (
        ClosedError,
        ConfigError,
        DeadlineError,
        NoBrokerError,
        RefusedError,
        RoundFailedError,
        TensorleaseError,
    )
    from ..protocol.records import Code, Distribution, Fate, Outcome
    from .arguments import Stragglers
    from .errors import (
        AttachError,
        ExportError,
        GpuMemoryError,
        LoadError,
        NotSharedError,
        RingFullError,
        SharedMemoryError,
        VerifyError,
        ViewsKeptError,
    )
    from .hooks import RoundInfo
    from .pieces import Piece, RowBlocks
    from .results import (
        RoundHandle,
        RoundResult,
        SkippedError,
        StillLeasedError,
        UnreleasedError,
    )
    from .ring import RingOptions, RingStatus
    from .ring_round import RingRound
    from .sharing import Share
    from .trainer import TrainerAgent
    from .worker import WorkerAgent

__all__ = [
    "AttachError",
    "ClosedError",
    "Code",
    "ConfigError",
    "DeadlineError",
    "Distribution",
    "ExportError",
    "Fate",
    "GpuMemoryError",
    "LoadError",
    "NoBrokerError",
    "NotSharedError",
    "Outcome",
    "Piece",
    "RefusedError",
    "RingFullError",
    "RingOptions",
    "RingRound",
    "RingStatus",
    "RoundFailedError",
    "RoundHandle",
    "RoundInfo",
    "RoundResult",
    "RowBlocks",
    "Share",
    "SharedMemoryError",
    "SkippedError",
    "StillLeasedError",
    "Stragglers",
    "TensorleaseError",
    "TrainerAgent",
    "UnreleasedError",
    "VerifyError",
    "ViewsKeptError",
    "WorkerAgent",
]

_HOMES = {
    "AttachError": ".errors",
    "ClosedError": "..protocol.errors",
    "Code": "..protocol.records",
    "ConfigError": "..protocol.errors",
    "DeadlineError": "..protocol.errors",
    "Distribution": "..protocol.records",
    "ExportError": ".errors",
    "Fate": "..protocol.records",
    "LoadError": ".errors",
    "NoBrokerError": "..protocol.errors",
    "Outcome": "..protocol.records",
    "Piece": ".pieces",
    "RefusedError": "..protocol.errors",
    "RingFullError": ".errors",
    "RingOptions": ".ring",
    "RingRound": ".ring_round",
    "RingStatus": ".ring",
    "RoundFailedError": "..protocol.errors",
    "RoundHandle": ".results",
    "RoundInfo": ".hooks",
    "RoundResult": ".results",
    "RowBlocks": ".pieces",
    "GpuMemoryError": ".errors",
    "NotSharedError": ".errors",
    "Share": ".sharing",
    "SharedMemoryError": ".errors",
    "SkippedError": ".results",
    "StillLeasedError": ".results",
    "Stragglers": ".arguments",
    "TensorleaseError": "..protocol.errors",
    "TrainerAgent": ".trainer",
    "UnreleasedError": ".results",
    "VerifyError": ".errors",
    "ViewsKeptError": ".errors",
    "WorkerAgent": ".worker",
}
"""Each public name, and the module that it is loaded from."""


def __getattr__(name: str) -> object:
    """Loads a public name at its first use.

    Raises:
        AttributeError: The package has no such name.
        ModuleNotFoundError: There is no torch.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value: object = getattr(import_module(_HOMES[name], __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            "agents move torch tensors, and there is no torch here: install the build of torch that"
            " fits this machine",
            name="torch",
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
