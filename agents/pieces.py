"""How a user says which boxes of a global shape a plain tensor holds, and what boxes those are."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, SupportsIndex

from msgspec import Struct

from ..protocol.errors import ConfigError
from ..protocol.regions import MAX_LENGTH, Region
from .errors import TensorError


class Piece(NamedTuple):
    """Says that a plain tensor is a box of a larger one; the box's lengths are its own shape."""

    shape: Sequence[int]
    """The global shape."""
    start: Sequence[int]
    """Where the box begins, on each axis."""


class RowBlocks(Struct, frozen=True):
    """Says that a plain tensor consists of several blocks of rows of a larger one.

    For layouts that are fused or interleaved: `RowBlocks((8, 64), [(0, 2), (4, 2)])` is a tensor
    of shape (4, 64) whose first two rows are the rows 0 and 1 of the global tensor, and whose
    others are its rows 4 and 5. The blocks' lengths add up to the tensor's rows, and no two blocks
    have a row in common.
    """

    shape: Sequence[int]
    """The global shape, of at least one axis."""
    blocks: Sequence[tuple[int, int]]
    """First row and number of rows of each block, in the order in which they lie in the tensor."""
    start: Sequence[int] = ()
    """Where the tensor begins on each axis after the first; left out, it has all of them."""


Place = Piece | RowBlocks | tuple[Sequence[int], Sequence[int]]
"""Of one tensor. A plain tuple is a `Piece`."""
Pieces = Mapping[str, Place]
"""By the names under which the tensors are given."""


def mapping_of(regions: Pieces | None) -> dict[str, Place]:
    """Returns the regions by name; raises `ConfigError` for what has no names."""
    if regions is None:
        return {}
    if not isinstance(regions, Mapping):
        raise ConfigError(
            f"regions is a {type(regions).__name__}: give a dict of each tensor's name and its"
            " (global shape, start) or RowBlocks"
        )
    return dict(regions)


def boxes_of(
    name: str, place: Place, local: tuple[int, ...], error: type[TensorError]
) -> tuple[tuple[int, ...], list[Region]]:
    """Returns the global shape, and the boxes of which a tensor consists, along its rows.

    Args:
        name: The tensor's, for the error.
        place: What the user said.
        local: The tensor's own shape.
        error: What to raise for a place that this tensor cannot have.
    """
    if isinstance(place, RowBlocks):
        return _row_blocks(name, place, local, error)
    what = "global shape and start of whole numbers, and no RowBlocks"
    try:
        shape, start = (_ints(sizes) for sizes in place)
    except (TypeError, ValueError):
        raise error(name, f"has the region {place!r}, which is no {what}") from None
    if not len(shape) == len(start) == len(local):
        raise error(
            name,
            f"has {len(local)} axes (shape {local}) and is no box of its global shape {shape}, of"
            f" {len(shape)} axes, from {start}, of {len(start)}: all three must have as many",
        )
    box = Region(start, local)
    _require_inside(name, box, shape, error)
    return shape, [box]


def _row_blocks(
    name: str, given: RowBlocks, local: tuple[int, ...], error: type[TensorError]
) -> tuple[tuple[int, ...], list[Region]]:
    try:
        shape, start = _ints(given.shape), _ints(given.start)
        blocks = [(first, rows) for first, rows in map(_ints, given.blocks)]
    except (TypeError, ValueError):
        raise error(
            name,
            f"has the region {given!r}, which is no global shape and list of (first row, number of"
            " rows), all of them whole numbers",
        ) from None
    if not local or len(shape) != len(local):
        raise error(
            name,
            f"has {len(local)} axes (its shape is {local}), and its row blocks a global shape of"
            f" {len(shape)}: {shape}; they must have the same number, and at least one",
        )
    if not start and local[1:] == shape[1:]:
        start = (0,) * (len(shape) - 1)
    if len(start) != len(shape) - 1:
        raise error(
            name,
            f"has the shape {local} and row blocks of {shape}, with start={start}: that must say"
            " where the tensor begins on each axis after the first",
        )
    rows = sum(length for _, length in blocks)
    if rows != local[0]:
        raise error(
            name, f"has {local[0]} rows, and its {len(blocks)} row blocks have {rows} in all"
        )
    boxes = [Region((first, *start), (length, *local[1:])) for first, length in blocks]
    for box in boxes:
        _require_inside(name, box, shape, error)
    # Blocks without rows say nothing; a tensor of them alone is an empty box.
    boxes = [box for box in boxes if box.length[0]] or [Region((0, *start), local)]
    spans = sorted((box.start[0], box.start[0] + box.length[0]) for box in boxes)
    for (first, end), (other, other_end) in itertools.pairwise(spans):
        if other < end:
            raise error(
                name,
                f"has the row blocks {first}:{end} and {other}:{other_end}, which overlap: each row"
                " of the global tensor can be in it once",
            )
    return shape, boxes


def _ints(sizes: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Returns plain ints, whatever integers they were given as."""
    return tuple(operator.index(size) for size in sizes)


def _require_inside(
    name: str, box: Region, shape: tuple[int, ...], error: type[TensorError]
) -> None:
    least = min((*shape, *box.start, *box.length), default=0)
    if least < 0 or max(shape, default=0) > MAX_LENGTH or not box.inside(shape):
        raise error(name, f"is the box {box}, which is no box of its global shape {shape}")
