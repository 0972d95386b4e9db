"""Whether tensors still lie where they lay, and as they lay.

Asked in every round, of thousands of them: by what torch has for code that it compiled, which sees
to it that it is given what it was compiled for, in far less time. That is nobody's to call, so it is
tried first; where it has gone, or says no, it is asked by `map`, which takes a third of a
loop's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Final, ParamSpec, TypeVar

import torch

from .placement import as_dtensor, tensors_of

P = ParamSpec("P")
T = TypeVar("T")

_ADDRESS: Final = torch.Tensor.data_ptr
_COUNT: Final = torch.Tensor.numel
_STRIDES: Final = torch.Tensor.stride
_CONTIGUOUS: Final = torch.Tensor.is_contiguous
_CONJUGATE: Final = torch.Tensor.is_conj
_NEGATIVE: Final = torch.Tensor.is_neg
_STORAGE: Final = torch.Tensor.untyped_storage
_STORED: Final = torch.UntypedStorage.nbytes
_DTYPE: Final = attrgetter("dtype")
_SHAPE: Final = attrgetter("shape")
_PARTS: Final = attrgetter("_modules", "_parameters", "_buffers")


def _plainly(look: Callable[P, T]) -> Callable[P, T]:
    """Has torch not ask subclasses of tensors, vLLM's parameters say: in Python, for each."""

    @wraps(look)
    def plain(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C.DisableTorchFunctionSubclass():
            return look(*args, **kwargs)

    return plain


def _guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Returns what says yes of tensors with the dtypes, shapes and strides of these.

    It says no of some others, too: in inference mode, if they were not so before.
    """
    known = attrgetter("_C._dynamo.guards")(torch)  # Its stubs are wrong.
    guards = known.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    check: Callable[..., bool] = guards.check
    return check


@cache
def _can_guard() -> bool:
    """Whether this torch has such guards, and they see what they must."""
    try:
        # The default device of this thread may be one that cannot be used here.
        with torch.inference_mode(False), torch.device("cpu"):
            one = torch.zeros(4, 2)
            others = [one.t(), one.view(2, 4), one.view(4, 1, 2), one.flatten(), one[:3]]
            others += [one[:, :1], one.view(torch.int32), torch.zeros(4, 4)[:, :2]]
            others += [torch.complex(one, one).conj().imag]  # It lies there as its negative.
            check = _guards([torch.zeros(1), one])
            same = check(torch.zeros(1), torch.ones(4, 2))
            return same and not any(check(torch.zeros(1), other) for other in others)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False


class Unmoved:
    """Some tensors, with their places, strides, shapes and dtypes of now.

    Args:
        tensors: They; each has memory.
        own: More of them, which nobody else has: only where their storages lie may change.
    """

    @_plainly
    def __init__(self, tensors: Sequence[torch.Tensor], own: Sequence[torch.Tensor] = ()) -> None:
        self._tensors = tensors
        self._all = [*tensors, *own]
        self._addresses = list(map(_ADDRESS, self._all))
        self._counts = list(map(_COUNT, tensors))
        self._dtypes = list(map(_DTYPE, tensors))
        # Bits that say that the values are others than what lies there.
        self._conjugate = list(map(_CONJUGATE, tensors))
        self._negative = list(map(_NEGATIVE, tensors))
        # A storage of a GPU goes to another address when its size changes.
        self._storages_of = [tensor for tensor in self._all if tensor.device.type != "cuda"]
        self._stored = self._look_at_storages()
        # Of what is contiguous these and the count are the shape, too, but where an axis is of
        # length 1: a column that is turned to a row has the same strides, (1, 1).
        self._strides = list(map(_STRIDES, tensors))
        self._contiguous = [tensor for tensor in tensors if tensor.is_contiguous()]
        self._others = [t for t in tensors if not t.is_contiguous() or 1 in t.shape]
        self._shapes = list(map(_SHAPE, self._others))
        self._are_same = _guards(tensors) if _can_guard() else None

    @_plainly
    def holds(self) -> bool:
        """Whether they lie there still, and so."""
        return (
            list(map(_ADDRESS, self._all)) == self._addresses
            and self._look_at_storages() == self._stored
            and (self._are_guarded() or self._look_alike())
        )

    def _are_guarded(self) -> bool:
        return self._are_same is not None and self._are_same(*self._tensors)

    def _look_alike(self) -> bool:
        tensors = self._tensors
        return (
            list(map(_COUNT, tensors)) == self._counts
            and list(map(_DTYPE, tensors)) == self._dtypes
            and list(map(_CONJUGATE, tensors)) == self._conjugate
            and list(map(_NEGATIVE, tensors)) == self._negative
            and all(map(_CONTIGUOUS, self._contiguous))
            and list(map(_SHAPE, self._others)) == self._shapes
            # No list: thousands of tuples would have the garbage collector look at everything.
            and all(map(eq, map(_STRIDES, tensors), self._strides))
        )

    def _look_at_storages(self) -> list[int]:
        return list(map(_STORED, map(_STORAGE, self._storages_of)))


class _Parts:
    """What each module of a model has, by name, as it is now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = list(model.modules())
        self._held = self._look()

    def same(self) -> bool:
        """Whether they have the very same."""
        held = self._look()
        return len(held) == len(self._held) and all(map(is_, held, self._held))

    def _look(self) -> list[object]:
        parts: list[dict[str, object]] = [*chain.from_iterable(map(_PARTS, self._modules))]
        return [*chain.from_iterable(parts), *chain.from_iterable(map(dict.values, parts))]


class HeldModel:
    """A model, and which tensors it has, by their names.

    Args:
        model: It. Others hold the tensors; this sees when it has others. But for DTensors: FSDP puts
            whole parameters into their places while it computes, and leaves those of the root there.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parts = _Parts(model)
        every = tensors_of(model).items()
        self._tensors = {name: each for name, each in every if as_dtensor(each) is None}

    def replaced(self) -> str:
        """Returns the name of a tensor that it has no more, or another one of; empty: of none."""
        if self._parts.same():
            return ""
        now = tensors_of(self._model)
        for name, tensor in self._tensors.items():
            if now.get(name) is not tensor:
                return name
        self._parts = _Parts(self._model)
        return ""


class UnmovedModel:
    """A model's parameters and buffers, with their names and places of now.

    Args:
        model: It; each of its parameters and buffers has memory.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parts = _Parts(model)
        self._lie = Unmoved([*model.parameters(), *model.buffers()])

    def holds(self) -> bool:
        """Whether it has the same ones, where they lay. No for some that are the same, too."""
        return self._parts.same() and self._lie.holds()
