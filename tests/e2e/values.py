"""What trainers publish in end-to-end tests: bytes that follow from version, name and region."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch

from tensorlease.agents.pieces import Pieces

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed": ((13, 8), torch.bfloat16),
    "layer.weight": ((10, 6), torch.float32),
    "head": ((6, 3), torch.int8),
    "layer.bias": ((7,), torch.float16),
    "scale": ((), torch.float64),
    "empty": ((0, 4), torch.float32),
}
# Those of ring rounds, which go in several batches of a small slot; the last one, of so many MiB
# (with slots of 16 MiB), only where the environment asks for it.
BIG_MIB = int(os.environ.get("TENSORLEASE_TEST_RING_MIB", "0"))
RING_SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "ring.embed": ((97, 64), torch.bfloat16),
    "ring.weight": ((130, 200), torch.float32),
    "ring.head": ((50, 33), torch.int8),
    "ring.bias": ((7,), torch.float16),
    "ring.scale": ((), torch.float64),
    "ring.empty": ((0, 4), torch.float32),
    "ring.big": ((BIG_MIB * 1024, 512), torch.bfloat16),
}
BIG = ("ring.big",) if BIG_MIB else ()
"""Rounds of registered tensors carry it too where the environment asks for it."""
SPLIT = ("embed", "layer.weight", "head", *BIG)
"""Names whose rows are divided among the ranks where each owns a part."""


@dataclass(frozen=True)
class Part:
    """Rows of a tensor; `rows` None: all of it."""

    name: str
    first: int = 0
    rows: int | None = None


WHOLE = tuple(Part(name) for name in SHAPES)
WHOLE_BIG = (*WHOLE, *(Part(name) for name in BIG))
RING_WHOLE = tuple(Part(name) for name in RING_SHAPES)
RING_SPLIT = ("ring.embed", "ring.weight", "ring.head", "ring.big")


def bounds(name: str, world_size: int) -> list[int]:
    """Where the ranks' rows begin, and the end: each rank has fewer than the one before it."""
    rows = _form(name)[0][0]
    shares = [world_size - rank for rank in range(world_size)]
    return [rows * sum(shares[:rank]) // sum(shares) for rank in range(world_size + 1)]


def shard(rank: int, world_size: int) -> tuple[Part, ...]:
    """The parts that a rank owns: uneven row blocks; what has no rows to divide is the last's."""
    return _shard((*SHAPES, *BIG), SPLIT, rank, world_size)


def ring_shard(rank: int, world_size: int) -> tuple[Part, ...]:
    """As `shard`, of the tensors of ring rounds."""
    return _shard(RING_SHAPES, RING_SPLIT, rank, world_size)


def _shard(
    names: Iterable[str], split: tuple[str, ...], rank: int, world_size: int
) -> tuple[Part, ...]:
    parts = []
    for name in names:
        if name in split:
            cuts = bounds(name, world_size)
            parts.append(Part(name, cuts[rank], cuts[rank + 1] - cuts[rank]))
        elif rank == world_size - 1:
            parts.append(Part(name))
    return tuple(parts)


def expected(version: int, part: Part) -> torch.Tensor:
    """The values of this version; version 0: what nobody publishes."""
    shape, dtype = _form(part.name)
    raw = _pattern(part.name)
    if part.rows is not None:
        row = math.prod(shape[1:]) * dtype.itemsize
        raw = raw[part.first * row : (part.first + part.rows) * row]
        shape = (part.rows, *shape[1:])
    return (raw + version * 17 % 251).view(dtype).reshape(shape)


def _form(name: str) -> tuple[tuple[int, ...], torch.dtype]:
    return SHAPES[name] if name in SHAPES else RING_SHAPES[name]


@cache
def _pattern(name: str) -> torch.Tensor:
    """The bytes of a tensor in version 0."""
    shape, dtype = _form(name)
    seed = zlib.crc32(name.encode()) % 199
    count = math.prod(shape) * dtype.itemsize
    return ((torch.arange(count, dtype=torch.int32) * 31 + seed) % 251).to(torch.uint8)


def fresh(parts: tuple[Part, ...]) -> dict[str, torch.Tensor]:
    """New tensors for these parts, with the values of version 0."""
    return {part.name: expected(0, part).clone() for part in parts}


def regions(parts: tuple[Part, ...]) -> Pieces:
    """What `register` and `attach` must know of parts that are pieces."""
    pieces = {}
    for part in parts:
        shape = _form(part.name)[0]
        if part.rows is not None:
            pieces[part.name] = (shape, (part.first, *[0] * (len(shape) - 1)))
    return pieces


def fill(tensors: dict[str, torch.Tensor], parts: tuple[Part, ...], version: int) -> None:
    """Writes the values of a version into tensors."""
    for part in parts:
        tensors[part.name].copy_(expected(version, part))


def differences(
    tensors: dict[str, torch.Tensor], parts: tuple[Part, ...], version: int
) -> list[str]:
    """Names the tensors whose bytes are not those of the version."""
    return [
        part.name
        for part in parts
        if not torch.equal(_bytes(tensors[part.name]), _bytes(expected(version, part)))
    ]


def sources(parts: tuple[Part, ...], world_size: int) -> set[int]:
    """The ranks that own something of these parts, where each rank owns its shard."""
    found = set()
    for part in parts:
        if part.name not in SPLIT:
            found.add(world_size - 1)
            continue
        first = part.first
        end = _form(part.name)[0][0] if part.rows is None else first + part.rows
        cuts = bounds(part.name, world_size)
        found.update(r for r in range(world_size) if first < cuts[r + 1] and cuts[r] < end)
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
