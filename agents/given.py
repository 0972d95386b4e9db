"""What an engine's loader is given, and what is wrong with what it does with that."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from .errors import LoadError

if TYPE_CHECKING:
    import torch


class Given:
    """What a loader is given; says which tensor it was at when it failed."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = iter(tensors)
        # Each that was given, and what it is called; and the last one. Whoever records what becomes
        # of them would take a look at their storage for one at their values.
        self._given: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self._last = "nothing"

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors:
            kind = str(tensor.dtype).removeprefix("torch.")
            self._last = f"{name} ({kind} of {tuple(tensor.shape)})"
            self._given.append((weakref.ref(tensor), self._last))
            yield name, tensor

    def said(self, error: Exception) -> str:
        """Returns what to say of what the loader has raised."""
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        at = self._found(error.__traceback__) or f"a tensor before or at {self._last}"
        return f"load_weights failed at {at}: {said}"

    def _found(self, traceback: TracebackType | None) -> str:
        """Returns which of them was at hand where it failed: loaders reorder what they get."""
        found = ""
        alive = ((ref(), called) for ref, called in self._given)
        places = {_place_of(tensor): called for tensor, called in alive if tensor is not None}
        while traceback is not None:
            # Its variables; `f_locals` would keep them, though the frame is cleared.
            for value in gc.get_referents(traceback.tb_frame):
                # A tensor; without an import of torch. One of the meta device lies nowhere.
                if not getattr(value, "is_meta", True):
                    found = places.get(_place_of(value), found)
            traceback = traceback.tb_next
        return found


def _place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def checked(
    load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
) -> Callable[[Iterator[tuple[str, torch.Tensor]]], object]:
    """Returns a loader that raises `LoadError` where this one fails, or does not take everything."""

    def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> object:
        given = Given(tensors)
        weights = iter(given)
        try:
            result = load_weights(weights)
        except Exception as error:
            raise LoadError(given.said(error)) from error
        if inspect.isgenerator(result) or inspect.isasyncgen(result) or inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise LoadError(
                "load_weights is a generator, or a coroutine function, so that it has loaded"
                " nothing yet: call what consumes it, `lambda weights: list(load_weights(weights))` say"
            )
        for name, _ in weights:
            raise LoadError(
                f"load_weights returned before it had taken {name}, and perhaps more: it must take all"
                " that it is given, also what it has no use for"
            )
        return result

    return load
