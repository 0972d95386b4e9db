"""Guards: what makes the steps of an optimizer wait for the fence."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from torch.nn import Parameter

from .source import RegisteredBuffers

if TYPE_CHECKING:
    from .fence import Fenced


class Removable(Protocol):
    """What `register_step_pre_hook` returns."""

    def remove(self) -> None:
        """The hook is not called any more."""
        ...


class Steps(Protocol):
    """An optimizer, or whatever else calls hooks before its step writes."""

    def register_step_pre_hook(self, hook: Callable[..., None]) -> Removable:
        """Has the hook called before each step."""
        ...


class Guard:
    """Makes the steps of one optimizer wait until nobody reads; see `TrainerAgent.guard`.

    Keeps neither the optimizer nor the trainer alive.
    """

    def __init__(self, trainer: Fenced, optimizer: Steps, timeout: float, serve_late: bool) -> None:
        self._trainer = weakref.ref(trainer)
        self._optimizer = _weak(optimizer)
        self._timeout = timeout
        self._serve_late = serve_late
        self._hook: Removable | None = optimizer.register_step_pre_hook(self._before_step)

    @property
    def active(self) -> bool:
        """Whether steps wait for it."""
        return self._hook is not None

    def remove(self) -> None:
        """Lets steps run unguarded from now on. Idempotent."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()
            trainer = self._trainer()
            if trainer is not None:
                trainer._forget_guard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Guard {'active' if self.active else 'removed'} timeout={self._timeout:g}>"

    def _before_step(self, *_: object) -> None:
        trainer = self._trainer()
        if trainer is not None and self.active:
            trainer._wait_writable(self._timeout, "the step did not run")

    def addresses(self) -> set[int] | None:
        """Where the tensors lie that this optimizer writes; None: nobody can know, or wants to."""
        groups = getattr(self._optimizer(), "param_groups", None)
        if groups is None or not self._serve_late:
            return None
        tensors = (tensor for group in groups for tensor in group["params"])
        return {getattr(tensor, "_local_tensor", tensor).data_ptr() for tensor in tensors}

    def count(self) -> int:
        """How many tensors it writes: changes when a group is added."""
        groups: Iterable[dict[str, list[object]]]
        groups = getattr(self._optimizer(), "param_groups", None) or ()
        return sum(len(group["params"]) for group in groups)


def unguarded(guards: Sequence[Guard], registered: Iterable[RegisteredBuffers]) -> list[str] | None:
    """Returns the names of tensors that may change without a guarded step.

    None: what the guarded optimizers write is not known. A parameter that takes no gradient is
    taken to stay as it is; a module's buffer is not, since a forward pass may write it.
    """
    written: set[int] = set()
    for guard in guards:
        addresses = guard.addresses()
        if addresses is None:
            return None
        written |= addresses
    return [
        name
        for buffers in registered
        for name, tensor in buffers.tensors()
        if tensor.data_ptr() not in written and not _is_frozen(tensor)
    ]


def _weak(thing: object) -> Callable[[], object]:
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: None  # It cannot be watched: what it writes is not known.


def _is_frozen(tensor: object) -> bool:
    """Whether it is a parameter that no training changes; a buffer of a module is none."""
    return isinstance(tensor, Parameter) and not tensor.requires_grad
