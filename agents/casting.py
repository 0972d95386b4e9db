"""Which dtypes become which, and copies that convert without a second tensor of full size.

Floating tensors become any other floating dtype that torch can convert to, integers a wider one
that holds all their values, complex tensors another complex dtype. Everything else would lose what
kind of numbers they are, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

import torch

PART_BYTES: Final = 16 * 2**20
"""Bytes converted at once where torch needs room for it: between two devices."""

CARRIERS: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""Elements of one dtype are moved as those of their size: not every dtype has a copy kernel."""


@cache
def meant(given: object) -> str:
    """Returns ", torch.bfloat16 say" where the name of a dtype was given in its place; else ""."""
    if isinstance(given, str):
        name = given.removeprefix("torch.")
        if isinstance(getattr(torch, name, None), torch.dtype):
            return f", torch.{name} say"
    return ""


def why_not(source: torch.dtype, target: torch.dtype, device: torch.device) -> str:
    """Says why tensors of one dtype on a device cannot become another; empty if they can.

    The text goes on after "cannot become X: ".
    """
    if source == target:
        return ""
    if _kind(source) != _kind(target):
        return f"one is {_kind(source)}, the other {_kind(target)}"
    if _kind(source) == "integer" and not _holds(source, target):
        return "it does not hold all values"
    try:
        with torch.inference_mode():
            probe = torch.zeros(source.itemsize, dtype=torch.uint8, device=device).view(source)
            torch.empty(1, dtype=target).copy_(probe)
    except (RuntimeError, TypeError, NotImplementedError):
        return f"torch {torch.__version__} has no conversion between the two"
    return ""


def convert(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies `source` into `target`, of the same shape and perhaps another dtype and device.

    To be called where autograd is off. Between devices large tensors go part by part.
    """
    if source.dtype == target.dtype:
        carrier = CARRIERS[source.itemsize]
        target, source = target.view(carrier), source.view(carrier)
    same = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
    if same or target.device == source.device:
        target.copy_(source)
        return
    for target_part, source_part in parts_of(target, source):
        target_part.copy_(source_part)


def parts_of(
    target: torch.Tensor, source: torch.Tensor, most: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the same parts of two tensors of one shape, each of at most `most` bytes in `source`.

    Default: `PART_BYTES`.
    """
    most = PART_BYTES if most is None else most
    if source.numel() * source.element_size() <= most:
        yield target, source
        return
    # The first axis that can be cut: those before it have one place each.
    axis = next(axis for axis, size in enumerate(source.shape) if size > 1)
    size = source.shape[axis]
    step = max(1, most * size // (source.numel() * source.element_size()))
    for begin in range(0, size, step):
        length = min(step, size - begin)
        part = target.narrow(axis, begin, length), source.narrow(axis, begin, length)
        yield from parts_of(*part, most)


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating"
    if dtype.is_complex:
        return "complex"
    if dtype == torch.bool:
        return "bool"
    return "integer" if _limits(dtype) is not None else str(dtype).removeprefix("torch.")


def _limits(dtype: torch.dtype) -> tuple[int, int] | None:
    try:
        info = torch.iinfo(dtype)
    except TypeError:
        return None  # bits, and what torch stores without arithmetic
    return info.min, info.max


def _holds(source: torch.dtype, target: torch.dtype) -> bool:
    inner, outer = _limits(source), _limits(target)
    return (
        inner is not None and outer is not None and (outer[0] <= inner[0] and inner[1] <= outer[1])
    )
