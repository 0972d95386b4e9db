"""Where the blocks of rows of a tensor lie, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorlease import Piece, RowBlocks
from tensorlease.agents.errors import AttachError, ExportError
from tensorlease.agents.placement import holds_pieces, place
from tensorlease.protocol.errors import ConfigError
from tensorlease.protocol.regions import Region


def _blocks(given: Any) -> RowBlocks:
    """Row blocks that no type checker would let pass."""
    return RowBlocks((8, 2), given)


def test_row_blocks_are_boxes_in_the_order_of_the_local_rows() -> None:
    tensor = torch.arange(8.0).view(4, 2)
    blocks = RowBlocks((8, 2), [(4, 1), (0, 2), (3, 0), (7, 1)])
    placed = place({"w": tensor}, {"w": blocks}, ExportError)
    assert [box.region for box in placed] == [
        Region((4, 0), (1, 2)),
        Region((0, 0), (2, 2)),
        Region((7, 0), (1, 2)),
    ]
    assert [box.box().tolist() for box in placed] == [[[0, 1]], [[2, 3], [4, 5]], [[6, 7]]]
    assert [box.address - tensor.data_ptr() for box in placed] == [0, 8, 24]
    assert [box.bytes_offset for box in placed] == [0, 8, 24]
    assert [box.nbytes for box in placed] == [8, 16, 8]
    assert all(box.tensor is tensor and box.shape == (8, 2) for box in placed)


def test_row_blocks_may_begin_anywhere_on_the_other_axes() -> None:
    blocks = RowBlocks([8, 6, 5], [(6, 2), (0, 1)], start=(2, 0))
    placed = place({"w": torch.zeros(3, 4, 5)}, {"w": blocks}, ExportError)
    assert [box.region for box in placed] == [
        Region((6, 2, 0), (2, 4, 5)),
        Region((0, 2, 0), (1, 4, 5)),
    ]


def test_row_blocks_of_a_tensor_without_rows_are_one_empty_box() -> None:
    (box,) = place({"w": torch.zeros(0, 2)}, {"w": RowBlocks((8, 2), [])}, ExportError)
    assert box.region == Region((0, 0), (0, 2))
    assert box.box().shape == (0, 2)


def test_numbers_of_other_kinds_become_ints() -> None:
    given: Any = [torch.tensor([2, 1]), (torch.tensor(0), 1)]
    blocks = RowBlocks(torch.Size([4, 1]), given)
    placed = place({"w": torch.zeros(2, 1)}, {"w": blocks}, ExportError)
    assert [box.region for box in placed] == [Region((2, 0), (1, 1)), Region((0, 0), (1, 1))]
    assert all(type(size) is int for box in placed for size in (*box.shape, *box.region.start))


def test_all_rows_in_another_order_are_a_whole_tensor() -> None:
    tensors = {"w": torch.zeros(4, 2), "v": torch.zeros(2)}
    all_rows = place(tensors, {"w": RowBlocks((4, 2), [(2, 2), (0, 2)])}, ExportError)
    assert not holds_pieces(all_rows)
    some = place(tensors, {"w": RowBlocks((5, 2), [(2, 2), (0, 2)])}, ExportError)
    assert holds_pieces(some)


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (RowBlocks((8, 2), [(0, 2), (4, 1)]), "has 4 rows, and its 2 row blocks have 3 in all"),
        (RowBlocks((8, 2), []), "has 4 rows, and its 0 row blocks have 0 in all"),
        (RowBlocks((8, 2), [(0, 2), (7, 2)]), r"\[7:9, 0:2\], which is no box of .*\(8, 2\)"),
        (RowBlocks((8, 2), [(-1, 2), (4, 2)]), r"\[-1:1, 0:2\], which is no box of"),
        (RowBlocks((8, 2), [(0, 6), (6, -2)]), "which is no box of its global shape"),
        (RowBlocks((8, 2), [(4, 2), (3, 2)]), "row blocks 3:5 and 4:6, which overlap"),
        (RowBlocks((8, 2), [(4, 2), (4, 2)]), "row blocks 4:6 and 4:6, which overlap"),
        (RowBlocks((8,), [(0, 4)]), r"has 2 axes .*row blocks a global shape of 1: \(8,\)"),
        (
            RowBlocks((8, 3), [(0, 4)]),
            r"shape \(4, 2\) and row blocks of \(8, 3\), with start=\(\)",
        ),
        (RowBlocks((8, 2), [(0, 4)], (0, 0)), r"with start=\(0, 0\): that must say where"),
        (RowBlocks((8, 3), [(0, 4)], (2,)), r"\[0:4, 2:4\], which is no box of"),
        (_blocks([(0,)]), "no global shape and list of .first row, number of rows."),
        (_blocks([(0.0, 4)]), "all of them whole numbers"),
        (_blocks(4), "all of them whole numbers"),
        (((8, 2), [(0, 2), (4, 2)]), "start of whole numbers, and no RowBlocks"),
        (((8, 2, 1), (0, 0, 0)), r"has 2 axes .*\(8, 2, 1\), of 3 axes, from \(0, 0, 0\), of 3"),
        (Piece((8, 2), (0,)), r"\(8, 2\), of 2 axes, from \(0,\), of 1: all three"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(blocks: Any, text: str) -> None:
    for error in (ExportError, AttachError):
        with pytest.raises(error, match=f"'w' .*{text}"):
            place({"w": torch.zeros(4, 2)}, {"w": blocks}, error)


def test_a_scalar_has_no_rows() -> None:
    with pytest.raises(ExportError, match="'w' has 0 axes .*at least one"):
        place({"w": torch.zeros(())}, {"w": RowBlocks((), [(0, 1)])}, ExportError)


def test_a_region_for_a_name_that_was_not_given_is_refused() -> None:
    with pytest.raises(AttachError, match="'v' has a region but was not given: regions= has the"):
        place({"w": torch.zeros(2)}, {"v": RowBlocks((2,), [(0, 2)])}, AttachError)


def test_regions_without_names_are_refused() -> None:
    regions: Any = [RowBlocks((2,), [(0, 2)])]
    with pytest.raises(ConfigError, match="regions is a list: give a dict"):
        place({"w": torch.zeros(2)}, regions, ExportError)
