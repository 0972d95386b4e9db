"""Strided boxes, held against torch and against lists of places."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from tensorlease.agents.strides import MOST_BOXES, Axis, Span, apart, boxes_of, carried

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")


def places(offset: int, axes: Sequence[tuple[int, int]]) -> list[int]:
    found = [offset]
    for size, stride in axes:
        found = [place + index * stride for place in found for index in range(size)]
    return found


def span_of(tensor: Tensor) -> Span:
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return Span(int(tensor.storage_offset()), tuple((n, s) for n, s in axes if n > 1))


def cut(tensor: Tensor, made: random.Random) -> Tensor:
    """A box of a tensor."""
    for axis, size in enumerate(tensor.shape):
        begin = made.randrange(size)
        tensor = tensor.narrow(axis, begin, made.randint(1, size - begin))
    return tensor


def seen_somehow(tensor: Tensor, made: random.Random) -> Tensor:
    """A view of a row-major tensor, as a loader may make it."""
    for _ in range(made.randint(0, 3)):
        match made.randint(0, 2):
            case 0 if tensor.dim():
                axis = made.randrange(tensor.dim())
                begin = made.randrange(tensor.shape[axis])
                tensor = tensor.narrow(axis, begin, made.randint(1, tensor.shape[axis] - begin))
            case 1 if tensor.dim() > 1:
                tensor = tensor.transpose(0, 1)
            case 2 if tensor.is_contiguous() and tensor.dim():
                flat = tensor.view(-1)
                tensor = flat.view(2, -1) if flat.numel() % 2 == 0 else flat
            case _:
                pass
    return tensor


def test_the_boxes_of_a_copy_write_what_the_copy_has_written() -> None:
    made = random.Random(1)
    for _ in range(500):
        shape = [made.choice([1, 2, 3, 4, 6]) for _ in range(made.randint(0, 3))]
        source = torch.arange(torch.Size(shape).numel()).view(shape)
        read = seen_somehow(source, made)
        memory = torch.full((read.numel() + 5,), -1)
        written = memory[3 : 3 + read.numel()].view(read.shape)
        written.copy_(read)
        sizes = zip(read.shape, written.stride(), read.stride(), strict=True)
        axes = [Axis(*axis) for axis in sizes if axis[0] > 1]
        boxes = boxes_of(axes, 3, int(read.storage_offset()), shape)
        assert boxes
        again = torch.full_like(memory, -1)
        for region, offset, strides in boxes:
            part = source
            for axis, (begin, length) in enumerate(zip(region.start, region.length, strict=True)):
                part = part.narrow(axis, begin, length)
            again.as_strided(region.length, strides, offset).copy_(part)
        assert torch.equal(again, memory), (shape, read.shape, read.stride())


def test_a_whole_tensor_and_rows_of_it_are_one_box() -> None:
    for read in (torch.arange(24).view(4, 6), torch.arange(24).view(4, 6)[1:3]):
        flat = [Axis(read.numel(), 1, 1)]
        assert len(boxes_of(flat, 0, int(read.storage_offset()), (4, 6))) == 1


def test_an_element_that_is_read_for_many_and_too_many_boxes_are_none() -> None:
    assert boxes_of([Axis(3, 1, 0)], 0, 0, (4,)) == []
    every_other = MOST_BOXES + 1
    assert boxes_of([Axis(every_other, 1, 2)], 0, 0, (2 * every_other,)) == []
    assert len(boxes_of([Axis(5, 1, 2)], 0, 0, (10,))) == 5


def test_spans_that_are_called_apart_share_no_element_and_boxes_always_are() -> None:
    made = random.Random(2)
    for _ in range(1000):
        shape = made.choice([(4, 12), (2, 4, 6), (48,), (3, 4, 4)])
        memory = torch.arange(48).view(shape)
        one, other = cut(memory, made), cut(memory, made)
        shared = set(one.flatten().tolist()) & set(other.flatten().tolist())
        assert apart(span_of(one), span_of(other)) == (not shared)


def test_a_part_of_a_copy_is_found_on_the_other_side() -> None:
    made = random.Random(3)
    found = 0
    for _ in range(2000):
        memory = torch.arange(48).view(made.choice([(4, 12), (2, 4, 6), (48,)]))
        part, frame = span_of(cut(memory, made)), cut(memory, made)
        turned = torch.empty(frame.shape[::-1]).permute(*reversed(range(frame.dim())))
        sizes = zip(frame.shape, frame.stride(), turned.stride(), strict=True)
        axes = [(n, here, there) for n, here, there in sizes if n > 1]
        across = carried(part, int(frame.storage_offset()), axes)
        if across is None:
            continue
        here = places(int(frame.storage_offset()), [(n, s) for n, s, _ in axes])
        moved = dict(zip(here, places(0, [(n, s) for n, _, s in axes]), strict=True))
        assert [moved[place] for place in places(*part)] == places(*across)
        found += 1
    assert found > 100
