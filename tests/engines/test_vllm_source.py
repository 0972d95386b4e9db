"""What a `WeightSource` gives, in the forms of vLLM 0.32 and 0.33, is whole tensors or pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from tensorlease.engines.vllm_source import box_of, has_pieces, pieces, whole
from tensorlease.protocol.errors import ConfigError


@dataclass
class Replicate:
    pass


@dataclass
class Shard:
    dim: int


@dataclass
class Meta:
    """As `ParamMeta` has it."""

    name: str
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Replicate | Shard, ...] | None = None


def split(tensor: torch.Tensor, meta: Meta) -> dict[int, torch.Tensor]:
    """Returns each owner's piece, as torch.chunk makes them: the outer axis of the mesh first."""
    assert meta.mesh_shape is not None and meta.placements is not None and meta.owners is not None
    found: dict[int, torch.Tensor] = {}
    for owner, place in zip(
        meta.owners, product(*(range(size) for size in meta.mesh_shape)), strict=True
    ):
        piece = tensor
        for at, parts, placement in zip(place, meta.mesh_shape, meta.placements, strict=True):
            if isinstance(placement, Shard):
                chunks = list(piece.chunk(parts, placement.dim))
                empty = piece.narrow(placement.dim, 0, 0)
                piece = (chunks + [empty] * parts)[at]
        found[owner] = piece
    return found


class Source:
    """As of vLLM 0.33, of one tensor."""

    def __init__(self, rank: int, metas: Sequence[Meta], tensor: torch.Tensor) -> None:
        self.metadata = list(metas)
        self._rank = rank
        self._tensor = tensor

    def implements_iter_local(self) -> bool:
        return True

    def implements_iter_full(self) -> bool:
        return False

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self.metadata:
            piece = split(self._tensor, meta)[self._rank] if meta.placements else self._tensor
            yield meta.name, piece


@pytest.mark.parametrize(
    ("shape", "mesh", "placements"),
    [
        ((8, 3), (4,), (Shard(0),)),
        ((10, 3), (4,), (Shard(0),)),
        ((3, 5), (4,), (Shard(0),)),
        ((6, 7), (2, 3), (Replicate(), Shard(1))),
        ((6, 7), (2, 3), (Shard(1), Shard(0))),
        ((11, 2), (2, 3), (Shard(0), Shard(0))),
        ((5,), (8,), (Shard(0),)),
    ],
)
def test_a_ranks_box_is_where_its_piece_lies(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Replicate | Shard, ...]
) -> None:
    whole_one = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    ranks = torch.Size(mesh).numel()
    owners = tuple(range(10, 10 + ranks))
    meta = Meta("w", shape, owners, mesh, placements)
    for rank, piece in split(whole_one, meta).items():
        start, length = box_of(meta, rank)
        assert length == tuple(piece.shape)
        box = whole_one[tuple(slice(s, s + n) for s, n in zip(start, length, strict=True))]
        assert torch.equal(box, piece)


def test_empty_pieces_are_left_out_and_whole_tensors_have_no_box() -> None:
    tensor = torch.ones(3, 2)
    metas = [Meta("cut", (3, 2), (0, 1, 2, 3), (4,), (Shard(0),)), Meta("whole", (3, 2))]
    for rank, names in ((2, ["cut", "whole"]), (3, ["whole"])):
        source = Source(rank, metas, tensor)
        assert has_pieces(source)
        given, boxes = pieces(source, rank)
        assert [name for name, _ in given] == names
        assert sorted(boxes) == [name for name in names if name == "cut"]
        if boxes:
            assert boxes["cut"] == ((3, 2), (2, 0))


def test_whole_tensors_are_those_of_either_form() -> None:
    pairs = [("a", torch.ones(1)), ("b", torch.ones(2))]
    assert list(whole([*pairs, ("elsewhere", None)])) == pairs
    assert not has_pieces(pairs)
    with pytest.raises(ConfigError, match=r"a Source has no iter_full\(\)"):
        whole(Source(0, [], torch.ones(1)))
