"""Boxes of a tensor's global shape, and how pieces of a tensor add up.

Trainers say which box of a tensor they hold, workers which box they want. All sizes are in
elements; a scalar has the one box with no axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Annotated, Generic, TypeVar

from msgspec import Meta, Struct

from .errors import ProtocolError

MAX_DIMS = 16
MAX_LENGTH = 2**62

Dimension = Annotated[int, Meta(ge=0, le=MAX_LENGTH)]
Dimensions = Annotated[tuple[Dimension, ...], Meta(max_length=MAX_DIMS)]

Source = TypeVar("Source")


class OverlapError(ProtocolError):
    """Two pieces of one tensor overlap without being the same region.

    Attributes:
        tensor: The tensor's name.
        first: One of the regions.
        second: The other.
    """

    def __init__(self, tensor: str, first: Region, second: Region) -> None:
        super().__init__(
            f"tensor {tensor!r} is offered as {first} and as {second}, which overlap without"
            " being equal: which one is right cannot be known; offer each element once, or the"
            " same region everywhere"
        )
        self.tensor = tensor
        self.first = first
        self.second = second


class Region(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """A box: where it starts and how long it is, on each axis of the global shape."""

    start: Dimensions
    length: Dimensions

    def __str__(self) -> str:
        axes = (
            f"{start}:{start + length}"
            for start, length in zip(self.start, self.length, strict=False)
        )
        return f"[{', '.join(axes)}]"

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.length)

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether this is a box of `shape`: as many axes, and within each of them."""
        return len(self.start) == len(self.length) == len(shape) and all(
            start + length <= size
            for start, length, size in zip(self.start, self.length, shape, strict=True)
        )

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Whether this box is all of `shape`."""
        return self.length == tuple(shape) and not any(self.start)

    def intersect(self, other: Region) -> Region | None:
        """Returns the common box of two boxes of one shape, None if they share no element."""
        starts: list[int] = []
        lengths: list[int] = []
        for start, length, other_start, other_length in zip(
            self.start, self.length, other.start, other.length, strict=True
        ):
            low = max(start, other_start)
            high = min(start + length, other_start + other_length)
            if high <= low:
                return None
            starts.append(low)
            lengths.append(high - low)
        return Region(tuple(starts), tuple(lengths))

    def within(self, outer: Region) -> Region:
        """Returns this box in the coordinates of `outer`, which contains it."""
        return Region(
            tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.length
        )


def whole(shape: Sequence[int]) -> Region:
    """Returns the box that is all of `shape`."""
    return Region((0,) * len(shape), tuple(shape))


def single_run(inner: Region, shape: Sequence[int]) -> tuple[int, int] | None:
    """Returns (first element, number of elements) of `inner` in a row-major array of `shape`.

    None if the box is not one run of neighbouring elements.
    """
    count = inner.count
    if not count:
        return (0, 0)
    first = 0
    stride = 1
    run = 1
    open_ended = True
    for start, length, size in zip(
        reversed(inner.start), reversed(inner.length), reversed(shape), strict=True
    ):
        first += start * stride
        stride *= size
        if open_ended:
            run *= length
            open_ended = length == size
        elif length != 1:
            return None
    return (first, run)


class Copy(Struct, Generic[Source], frozen=True):
    """One box to copy from one source."""

    source: Source
    held: Region
    """The box that the source holds."""
    region: Region
    """The part of it that is wanted, in global coordinates."""


def is_common(first: Region, second: Region) -> bool:
    """Whether two boxes of one shape share an element, or are the same box, which may be empty."""
    return first == second or first.intersect(second) is not None


def require_disjoint(tensor: str, regions: Iterable[Region]) -> list[Region]:
    """Returns the different regions that hold elements; raises `OverlapError` if any two overlap.

    Equal regions count as one: they hold the same elements.
    """
    distinct = sorted(
        {region for region in regions if region.count},
        key=lambda region: (region.start, region.length),
    )
    # Sorted by their first axis, a region can only overlap those that begin before it ends there:
    # row shards of a thousand ranks cost a thousand comparisons, not a million.
    for index, region in enumerate(distinct):
        end = region.start[0] + region.length[0] if region.start else 1
        for other in distinct[index + 1 :]:
            if other.start and other.start[0] >= end:
                break
            if region.intersect(other) is not None:
                raise OverlapError(tensor, region, other)
    return distinct


def covers(tensor: str, wanted: Region, offered: Iterable[Region]) -> bool:
    """Whether the offered regions hold every element of `wanted`.

    Raises `OverlapError`, naming the tensor, if two of them overlap without being equal.
    """
    return covered(wanted, require_disjoint(tensor, offered)) == wanted.count


def covered(wanted: Region, disjoint: Iterable[Region]) -> int:
    """Returns how many elements of `wanted` the regions hold, none of which overlap."""
    parts = (region.intersect(wanted) for region in disjoint)
    return sum(part.count for part in parts if part is not None)


def plan(
    tensor: str, wanted: Region, offered: Iterable[tuple[Source, Region]]
) -> list[Copy[Source]]:
    """Returns the copies that bring as much of `wanted` as is offered.

    Args:
        tensor: The tensor's name, for the error.
        wanted: What is wanted, a box of the global shape.
        offered: Who holds what, the preferred (nearest) source first: of several that hold the
            same region, the first is taken.

    Raises:
        OverlapError: Two offered regions overlap without being equal.
    """
    nearest: dict[Region, Source] = {}
    for source, region in offered:
        nearest.setdefault(region, source)
    copies: list[Copy[Source]] = []
    for region in require_disjoint(tensor, nearest):
        part = region.intersect(wanted)
        if part is not None:
            copies.append(Copy(nearest[region], region, part))
    return copies
