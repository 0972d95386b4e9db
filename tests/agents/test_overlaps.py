"""Tensors that are written to share no element, unless they are the same tensor."""

from __future__ import annotations

import pytest
import torch

from tensorlease.agents.errors import AttachError
from tensorlease.agents.sink import AttachedTensors


@pytest.mark.parametrize("second", [slice(2, 6), slice(3, 4), slice(0, 6), slice(0, 3)])
def test_a_tensor_that_lies_partly_in_another_is_refused_with_both_names(second: slice) -> None:
    memory = torch.zeros(8)
    with pytest.raises(AttachError, match="overlaps '[ab]' in memory"):
        AttachedTensors({"a": memory[:4], "x": torch.zeros(3), "b": memory[second]})


def test_one_element_in_common_of_two_that_alternate_is_found() -> None:
    memory = torch.zeros(6, 8)
    columns = {f"c{i}": memory[:, 2 * i : 2 * i + 2] for i in range(4)}
    AttachedTensors(columns)
    with pytest.raises(AttachError, match="'c2'"):
        AttachedTensors({**columns, "one": memory[5:6, 5:6]})


def test_another_dtype_over_the_same_bytes_is_refused() -> None:
    memory = torch.zeros(8)
    with pytest.raises(AttachError, match="overlaps"):
        AttachedTensors({"a": memory, "b": memory.view(torch.int32)})


def test_neighbours_the_same_tensor_twice_and_empty_ones_are_no_overlap() -> None:
    fused = torch.zeros(9, 4)
    parts = {name: fused[3 * i : 3 * i + 3] for i, name in enumerate("qkv")}
    attached = AttachedTensors({**parts, "tied": fused[0:3], "none": fused[1:1]})
    assert attached.nbytes == fused.nbytes


def test_memory_that_two_storages_share_is_seen() -> None:
    memory = bytearray(64)
    first = torch.frombuffer(memory, dtype=torch.float32)
    second = torch.frombuffer(memory, dtype=torch.float32, offset=32)
    with pytest.raises(AttachError, match="overlaps 'a'"):
        AttachedTensors({"a": first, "b": second})
