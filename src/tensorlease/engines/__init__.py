"""Inference engines: how a version reaches a whole engine, and not just a worker's tensors.

Importing this package is cheap, since engines import its plugins in each of their processes: a name
below is loaded, and torch with it, when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .vllm_control import VLLMControl

__all__ = ["VLLMControl"]

_HOMES = {"VLLMControl": ".vllm_control"}
"""Each public name, and the module that it is loaded from."""


def __getattr__(name: str) -> object:
    """Loads a public name at its first use.

    Raises:
        AttributeError: The package has no such name.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
