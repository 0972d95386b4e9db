"""Boxes, against sets of their elements."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorlease.protocol.regions import (
    OverlapError,
    Region,
    covered,
    covers,
    plan,
    require_disjoint,
    single_run,
    whole,
)

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    start = tuple(draw(st.integers(0, size)) for size in shape)
    length = tuple(
        draw(st.integers(0, size - begin)) for size, begin in zip(shape, start, strict=True)
    )
    return Region(start, length)


def elements(region: Region) -> set[tuple[int, ...]]:
    axes = (range(s, s + n) for s, n in zip(region.start, region.length, strict=True))
    return set(product(*axes))


@st.composite
def shape_and_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Region]]:
    shape = draw(SHAPES)
    return shape, [draw(boxes(shape)) for _ in range(count)]


@st.composite
def shards(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    """A shape cut along each axis at the same places: disjoint boxes that are all of it."""
    shape = draw(SHAPES)
    axes: list[list[tuple[int, int]]] = []
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        axes.append([(a, b - a) for a, b in pairwise(cuts)] or [(0, 0)])
    cells = [
        Region(tuple(s for s, _ in cell), tuple(n for _, n in cell)) for cell in product(*axes)
    ]
    return shape, draw(st.permutations(cells))


@given(shape_and_boxes(2))
def test_an_intersection_holds_exactly_the_common_elements(
    case: tuple[tuple[int, ...], list[Region]],
) -> None:
    _, (first, second) = case
    common = first.intersect(second)
    expected = elements(first) & elements(second)
    assert (set() if common is None else elements(common)) == expected


@given(shape_and_boxes(1))
def test_a_single_run_is_exactly_the_places_of_the_box_and_none_is_missed(
    case: tuple[tuple[int, ...], list[Region]],
) -> None:
    shape, (box,) = case
    places = {index: place for place, index in enumerate(product(*(range(n) for n in shape)))}
    wanted = sorted(places[element] for element in elements(box))
    run = single_run(box, shape)
    neighbours = not wanted or wanted == list(range(wanted[0], wanted[0] + len(wanted)))
    assert (run is not None) == neighbours
    if run is not None and wanted:
        assert wanted == list(range(run[0], run[0] + run[1]))


@given(shape_and_boxes(4))
def test_boxes_are_refused_exactly_if_two_unequal_ones_share_an_element(
    case: tuple[tuple[int, ...], list[Region]],
) -> None:
    _, offered = case
    clash = any(
        a != b and elements(a) & elements(b)
        for index, a in enumerate(offered)
        for b in offered[index + 1 :]
    )
    if clash:
        with pytest.raises(OverlapError, match="'w'"):
            require_disjoint("w", offered)
    else:
        assert set(require_disjoint("w", offered)) == {r for r in offered if elements(r)}


@given(shards(), st.data())
def test_a_plan_brings_each_wanted_element_once_from_the_nearest_source(
    case: tuple[tuple[int, ...], list[Region]], data: st.DataObject
) -> None:
    shape, cells = case
    wanted = data.draw(boxes(shape))
    held = data.draw(st.lists(st.sampled_from(cells), max_size=8)) if cells else []
    offered = list(enumerate(held))
    copies = plan("w", wanted, offered)
    brought = [element for copy in copies for element in elements(copy.region)]
    expected = elements(wanted) & {e for region in held for e in elements(region)}
    assert len(brought) == len(set(brought))
    assert set(brought) == expected
    assert all(copy.source == held.index(copy.held) for copy in copies)
    assert covers("w", wanted, held) == (expected == elements(wanted))
    assert covered(wanted, require_disjoint("w", held)) == len(expected)


@given(shape_and_boxes(2))
def test_a_box_within_another_keeps_its_shape(
    case: tuple[tuple[int, ...], list[Region]],
) -> None:
    _, (outer, other) = case
    inner = outer.intersect(other)
    if inner is not None:
        local = inner.within(outer)
        assert local.inside(outer.length)
        assert local.length == inner.length


def test_a_scalar_has_one_region() -> None:
    assert covers("s", whole(()), [whole(()), whole(())])
    assert plan("s", whole(()), [("far", whole(())), ("near", whole(()))])[0].source == "far"
    assert not covers("s", whole(()), [])


def test_the_shards_of_many_ranks_are_checked_in_time_linear_in_their_number() -> None:
    rows = [Region((rank, 0), (1, 64)) for rank in range(20_000)]
    assert covers("w", whole((20_000, 64)), rows)


def test_an_overlap_is_refused_by_name_with_both_regions() -> None:
    with pytest.raises(OverlapError) as refused:
        covers("layer.w", whole((4,)), [Region((0,), (3,)), Region((2,), (2,))])
    assert "'layer.w'" in str(refused.value)
    assert "[0:3]" in str(refused.value)
    assert refused.value.tensor == "layer.w"
