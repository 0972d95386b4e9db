"""What goes where in a slot: cuts, alignment, tables."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlease.agents.packing import ALIGNMENT, Packing, cut, table_cost
from tensorlease.protocol.dtypes import ITEM_SIZES
from tensorlease.protocol.handles import ShmHandle
from tensorlease.protocol.regions import Region, require_disjoint, single_run, whole
from tensorlease.protocol.tables import BatchBody, Buffer, TensorEntry, decode_batch, encode_body

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
items = st.sampled_from([1, 2, 4, 8, 16])


@given(shapes, items, st.integers(16, 300))
@settings(deadline=None)
def test_the_boxes_of_a_tensor_fit_are_runs_and_hold_each_element_once_in_order(
    shape: tuple[int, ...], item: int, capacity: int
) -> None:
    boxes = list(cut(shape, item, capacity))

    at = 0
    for box in boxes:
        assert box.inside(shape)
        assert box.count * item <= capacity
        run = single_run(box, shape)
        assert run is not None
        assert run[1] == box.count
        if box.count:
            assert run[0] == at
        at += box.count
    assert at == prod(shape)
    require_disjoint("w", boxes)
    if prod(shape) * item <= capacity:
        assert boxes == [whole(shape)]


def test_a_large_tensor_is_cut_along_the_first_axis_of_which_a_step_fits() -> None:
    assert list(cut((5, 4), 1, 8)) == [
        Region((0, 0), (2, 4)),
        Region((2, 0), (2, 4)),
        Region((4, 0), (1, 4)),
    ]
    assert list(cut((2, 5), 1, 4)) == [
        Region((0, 0), (1, 4)),
        Region((0, 4), (1, 1)),
        Region((1, 0), (1, 4)),
        Region((1, 4), (1, 1)),
    ]


tensors = st.lists(
    st.tuples(
        st.sampled_from(sorted(ITEM_SIZES)),
        st.integers(0, 40),
        st.lists(st.sampled_from(["x", "y"]), unique=True, max_size=2),
    ),
    max_size=12,
)


@given(tensors)
@settings(deadline=None)
def test_what_a_packing_takes_in_is_a_table_that_passes_every_check(
    given_tensors: list[tuple[str, int, list[str]]],
) -> None:
    packing = Packing(4096)
    nbytes = end = 0
    for place, (dtype, count, aliases) in enumerate(given_tensors):
        size = count * ITEM_SIZES[dtype]
        names = [f"{place}.{alias}" for alias in aliases]
        cost = table_cost(str(place), names, 1)
        if not packing.fits(size, cost):
            break
        assert packing.offset % ALIGNMENT == 0
        assert packing.offset >= end
        end = packing.offset + size
        packing.add(str(place), dtype, (count,), whole((count,)), names, cost)
        nbytes += size
    assert packing.end <= packing.capacity
    assert packing.nbytes == nbytes

    body = BatchBody([Buffer(0, 4096, ShmHandle(_handle(), 4096), packing.entries)])

    assert decode_batch(encode_body(body)).nbytes == nbytes


def _handle() -> str:
    from tensorlease.protocol.segments import SegmentName

    return str(SegmentName(uid=0, pid=1, start=2, namespace=3, instance="01234567", number=0))


def test_padding_counts_as_room() -> None:
    packing = Packing(ALIGNMENT + 8)
    packing.add("a", "uint8", (1,), whole((1,)), (), 0)
    assert packing.offset == ALIGNMENT
    assert packing.fits(8, 0)
    assert not packing.fits(9, 0)


def test_a_table_ends_a_slot_before_it_grows_beyond_its_limit() -> None:
    packing = Packing(1 << 20, table_limit=1000)
    assert packing.fits(0, 5000), "the first may always follow, else it never could"
    while packing.fits(4, cost := table_cost("n" * 100, [], 1)):
        packing.add("n" * 100, "float32", (1,), whole((1,)), (), cost)
    assert cost * len(packing.entries) <= 1000
    assert 1 < len(packing.entries) < 10


@pytest.mark.parametrize("dims", [0, 1, 16])
def test_the_cost_of_a_tensor_is_at_least_its_bytes_in_the_table(dims: int) -> None:
    shape = (2**62,) * dims
    region = Region(shape, shape)
    names = ["ä" * 250, "b" * 500]
    entries = [
        TensorEntry("n" * 512, "float4_e2m1fn_x2", shape, region, 2**62),
        *(TensorEntry(a, "float4_e2m1fn_x2", shape, region, 2**62, "n" * 512) for a in names),
    ]
    handle = ShmHandle(_handle(), 1)
    empty = encode_body(BatchBody([Buffer(0, 1, handle, [])]))
    full = encode_body(BatchBody([Buffer(0, 1, handle, entries)]))

    assert len(full) - len(empty) <= table_cost("n" * 512, names, dims)
