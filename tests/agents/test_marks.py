"""Marks tell bytes apart, and stay the same for the same."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tensorlease.agents.marks import PART_BYTES, mark_of

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.complex128], ids=str)
def test_each_bit_and_the_order_count(dtype: Any) -> None:
    bits = torch.arange(64, dtype=torch.uint8).remainder(2)
    tensor = bits.view(dtype)
    mark = int(mark_of(tensor))
    assert int(mark_of(tensor.clone())) == mark
    for place in range(64):
        bits[place] ^= 1
        assert int(mark_of(tensor)) != mark
        bits[place] ^= 1
    rows = torch.arange(32, dtype=torch.uint8).view(2, 16)
    assert int(mark_of(rows)) != int(mark_of(rows.flip(0)))
    assert int(mark_of(rows)) != int(mark_of(rows.t()))


def test_strides_do_not_count_and_large_tensors_are_read_in_parts() -> None:
    large = torch.arange(3 * PART_BYTES // 4, dtype=torch.int32).view(3, -1)
    turned = large.t().contiguous().t()
    mark = int(mark_of(large))
    assert int(mark_of(turned)) == mark
    large[2, 5] += 1
    assert int(mark_of(large)) != mark


def test_nothing_has_a_mark_too() -> None:
    assert int(mark_of(torch.empty(0, 3))) == 0
