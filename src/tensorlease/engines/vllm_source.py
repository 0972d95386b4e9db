"""What a vLLM `WeightSource` says and gives, in the forms that it has had."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tensorlease.agents import Piece
from tensorlease.protocol.errors import ConfigError

if TYPE_CHECKING:
    import torch


def whole(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns an iterator of whole tensors: those of `iter_full`, before vLLM 0.33 of the source.

    Raises:
        ConfigError: It gives pieces alone.
    """
    if not hasattr(source, "iter_full"):
        return ((name, tensor) for name, tensor in source if tensor is not None)
    if not source.implements_iter_full():
        raise ConfigError(
            f"a {type(source).__name__} has no iter_full(), which distribution='colocated' needs"
        )
    tensors: Iterator[tuple[str, torch.Tensor]] = source.iter_full()
    return tensors


def has_pieces(source: Any) -> bool:
    """Whether it gives each rank's own piece of a tensor."""
    return hasattr(source, "iter_local") and bool(source.implements_iter_local())


def pieces(source: Any, rank: int) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Piece]]:
    """Returns an iterator of this rank's pieces, and which those of them are that are not whole.

    Empty pieces, which torch.chunk may leave to the last ranks, are in neither.
    """
    found: dict[str, Piece] = {}
    for meta in source.metadata:
        if not meta.placements or rank not in meta.owners:
            continue
        start, length = box_of(meta, rank)
        if 0 not in length:
            found[meta.name] = Piece(tuple(meta.shape), start)
    given = ((name, tensor) for name, tensor in source.iter_local() if tensor.numel())
    return given, found


def box_of(meta: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns where this rank's piece begins in the tensor, and its lengths, on each axis.

    Args:
        meta: A `ParamMeta`: `owners` in the order of a mesh of `mesh_shape`, each axis of which
            splits an axis of the tensor as torch.chunk does, or repeats it; the outer one first.
        rank: One of its owners.
    """
    place = _unravel(meta.owners.index(rank), meta.mesh_shape)
    start, length = [0] * len(meta.shape), list(meta.shape)
    for index, parts, placement in zip(place, meta.mesh_shape, meta.placements, strict=True):
        axis = getattr(placement, "dim", None)
        if axis is None:
            continue
        size = -(-length[axis] // parts)
        begin = min(index * size, length[axis])
        start[axis] += begin
        length[axis] = min(size, length[axis] - begin)
    return tuple(start), tuple(length)


def _unravel(index: int, shape: Sequence[int]) -> list[int]:
    place: list[int] = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        place.insert(0, at)
    return place
