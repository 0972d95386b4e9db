"""Whether tensors that are to be written share memory: then one would hold the other's values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from .errors import AttachError
from .placement import Placed, reach_of


class Span(NamedTuple):
    """The bytes from a box's first element to its last, with what lies between them."""

    device: str
    begin: int
    end: int
    placed: Placed


def span_of(placed: Placed) -> Span:
    """Returns where a box lies; it has at least one element."""
    tensor, lengths = placed.tensor, placed.region.length
    nbytes = reach_of(lengths, tensor.stride()) * tensor.element_size()
    return Span(str(tensor.device), placed.address, placed.address + nbytes, placed)


def require_apart(tensors: Iterable[Placed]) -> None:
    """Raises `AttachError`, naming both, if two of them have an element in common.

    Tensors whose elements only alternate (columns of one fused tensor) are apart.
    """
    spans = sorted(
        (span_of(placed) for placed in tensors if placed.nbytes), key=lambda span: span[:3]
    )
    for cluster in _clusters(spans):
        _check(cluster)


def _clusters(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Yields those that overlap with another, directly or by others between them."""
    cluster: list[Span] = []
    end = 0
    for span in spans:
        if cluster and (span.device != cluster[0].device or span.begin >= end):
            if len(cluster) > 1:
                yield cluster
            cluster = []
        end = max(end, span.end) if cluster else span.end
        cluster.append(span)
    if len(cluster) > 1:
        yield cluster


def _check(cluster: list[Span]) -> None:
    """Marks the bytes of one after the other, and sees whether they were marked before."""
    base = cluster[0].begin
    marks = torch.zeros(max(span.end for span in cluster) - base, dtype=torch.bool)
    for index, span in enumerate(cluster):
        mine = _bytes_of(span, marks, base)
        if not mine.any():
            mine.fill_(True)
            continue
        for other in cluster[:index]:
            marks.zero_()
            _bytes_of(other, marks, base).fill_(True)
            if mine.any():
                raise AttachError(
                    span.placed.name,
                    f"overlaps {other.placed.name!r} in memory without being the same tensor, so"
                    " that one would be written over the other: attach one of the two, or clone",
                )


def _bytes_of(span: Span, marks: torch.Tensor, base: int) -> torch.Tensor:
    tensor = span.placed.tensor
    item = tensor.element_size()
    strides = [item * step for step in tensor.stride()]
    return marks.as_strided((*span.placed.region.length, item), (*strides, 1), span.begin - base)
