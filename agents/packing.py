"""What goes where in a slot of a ring: alignment, tables, and the cutting of large tensors. Pure.

A tensor that fits into a slot is never cut. A larger one is cut into boxes of its shape, each of
them one run of neighbouring elements; where the cuts are depends on the shape, the dtype and the
size of a slot alone, so that ranks which send the same tensor send the same boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from ..protocol.dtypes import ITEM_SIZES
from ..protocol.regions import Region
from ..protocol.tables import TensorEntry

ALIGNMENT: Final = 256
"""Bytes: every tensor begins at a multiple, as torch's own allocators do."""
TABLE_BYTES: Final = 2**20
"""A slot's table is not made longer than about this: many tiny tensors make several batches."""


def cut(length: Sequence[int], item: int, capacity: int) -> Iterator[Region]:
    """Yields the boxes, in row-major order, that a row-major array is sent in.

    Args:
        length: Its shape, in elements.
        item: Bytes of an element.
        capacity: Bytes that a box may have; at least `item`.
    """
    shape = tuple(length)
    if prod(shape) * item <= capacity:
        yield Region((0,) * len(shape), shape)
        return
    # The outermost axis along which one step fits: of that, as many steps at a time as fit.
    axis = next(a for a in range(len(shape)) if prod(shape[a + 1 :]) * item <= capacity)
    steps = capacity // (prod(shape[axis + 1 :]) * item)
    inner = shape[axis + 1 :]
    for outer in _indices(shape[:axis]):
        for first in range(0, shape[axis], steps):
            yield Region(
                (*outer, first, *(0,) * len(inner)),
                (*(1,) * axis, min(steps, shape[axis] - first), *inner),
            )


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields every index of an array of this shape, in row-major order."""
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (first, *rest)


def table_cost(name: str, aliases: Sequence[str], dims: int) -> int:
    """Returns an upper bound of the bytes that a tensor and its aliases have in a table."""
    names = len(name.encode()) * (1 + len(aliases)) + sum(len(alias.encode()) for alias in aliases)
    # A number has at most 9 bytes, a name's head 3; shape, start and length of each axis.
    return names + (1 + len(aliases)) * (60 + 27 * dims)


def entries_of(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    region: Region,
    aliases: Sequence[str],
    offset: int,
) -> list[TensorEntry]:
    """Returns what a table says of a box at `offset`, under each of its names."""
    box = None if region.is_whole(shape) else region
    first = TensorEntry(name, dtype, shape, box, offset)
    return [first, *(TensorEntry(a, dtype, shape, box, offset, name) for a in aliases)]


class Packing:
    """What one slot holds so far.

    Args:
        capacity: Bytes of the slot.
        table_limit: Bytes that its table may have.
    """

    def __init__(self, capacity: int, table_limit: int = TABLE_BYTES) -> None:
        self.capacity: Final = capacity
        self.table_limit: Final = table_limit
        self.entries: Final[list[TensorEntry]] = []
        self.end = 0
        """Where the last tensor ends, in bytes."""
        self.nbytes = 0
        """Bytes of all tensors, aliases and padding not counted."""
        self.body: bytes | None = None
        """The body of its batch, where that is known."""
        self._cost = 0

    @property
    def offset(self) -> int:
        """Where the next tensor begins, in bytes."""
        return -(-self.end // ALIGNMENT) * ALIGNMENT

    def fits(self, nbytes: int, cost: int) -> bool:
        """Whether a tensor of so many bytes, and of this cost in the table, may follow.

        The first of a slot always may, if its bytes do.
        """
        if self.entries and self._cost + cost > self.table_limit:
            return False
        return self.offset + nbytes <= self.capacity

    def add(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        region: Region,
        aliases: Sequence[str],
        cost: int,
    ) -> None:
        """Takes a box in, whose bytes are at `offset`.

        Args:
            name: The tensor's name.
            dtype: Its dtype in the slot, a name of `ITEM_SIZES`.
            shape: Its global shape.
            region: The box of it that is sent.
            aliases: Other names of the same bytes.
            cost: What `table_cost` says of it.
        """
        offset = self.offset
        self.entries.extend(entries_of(name, dtype, shape, region, aliases, offset))
        self._count(offset, region.count * ITEM_SIZES[dtype], cost)

    def add_again(self, entries: Sequence[TensorEntry], nbytes: int, cost: int) -> None:
        """As `add`, of a box whose entries for this offset are known."""
        self.entries.extend(entries)
        self._count(entries[0].offset, nbytes, cost)

    def set(self, entries: Sequence[TensorEntry], nbytes: int, end: int) -> None:
        """Holds these, and nothing else."""
        self.entries[:] = entries
        self.nbytes, self.end = nbytes, end

    def _count(self, offset: int, nbytes: int, cost: int) -> None:
        self.body = None
        self.end = offset + nbytes
        self.nbytes += nbytes
        self._cost += cost
