"""Arithmetic of strided boxes: which elements of which memory, as offsets and strides.

All sizes, offsets and strides are in elements. Axes of one place are left out everywhere: their
strides say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ..protocol.regions import Region

MOST_BOXES: Final = 1024
"""Boxes that one copy is cut into at most."""


class Axis(NamedTuple):
    """One axis of a copy."""

    size: int
    target: int
    """Stride in the memory that is written."""
    origin: int
    """Stride in the memory that is read."""


class Span(NamedTuple):
    """A strided box of some memory."""

    offset: int
    axes: tuple[tuple[int, int], ...]
    """Size and stride of each."""

    @property
    def end(self) -> int:
        """The place after its last element."""
        return self.offset + sum((size - 1) * stride for size, stride in self.axes) + 1

    @property
    def filled(self) -> int:
        """Number of its elements."""
        count = 1
        for size, _ in self.axes:
            count *= size
        return count


def apart(one: Span, other: Span) -> bool:
    """Whether they have no element in common; False where that is not easily seen."""
    if one.end <= other.offset or other.end <= one.offset:
        return True
    radices = sorted({1, *(s for _, s in one.axes), *(s for _, s in other.axes)}, reverse=True)
    boxes = _digits(one, radices), _digits(other, radices)
    if boxes[0] is None or boxes[1] is None:
        return False
    return any(
        start + size <= begin or begin + length <= start
        for (start, size), (begin, length) in zip(boxes[0], boxes[1], strict=True)
    )


def _digits(span: Span, radices: Sequence[int]) -> list[tuple[int, int]] | None:
    """Returns start and length by radix, the largest first; None if it is no box of them."""
    sizes = dict.fromkeys(radices, 1)
    for size, stride in span.axes:
        if not stride or sizes[stride] != 1:
            return None
        sizes[stride] = size
    found: list[tuple[int, int]] = []
    left, above = span.offset, 0
    for radix in radices:
        start, left = divmod(left, radix)
        if above and (above % radix or start + sizes[radix] > above // radix):
            return None
        found.append((start, sizes[radix]))
        above = radix
    return found


def carried(span: Span, frame_offset: int, frame: Sequence[tuple[int, int, int]]) -> Span | None:
    """Returns what a span is on the other side of a copy of which it is a part.

    None if it is not seen to be a part.

    Args:
        span: Some elements of one side.
        frame_offset: Where the copy begins on that side.
        frame: Size, stride on that side, and stride on the other, of each of its axes.

    Returns:
        Its offset, from the copy's beginning on the other side, and its strides there.
    """
    order = sorted(frame, key=lambda axis: -axis[1])
    left, other = span.offset - frame_offset, 0
    starts: dict[int, tuple[int, int, int]] = {}
    above = 0
    for size, stride, across in order:
        if not stride or (above and above < size * stride):
            return None
        start, left = divmod(left, stride)
        starts[stride] = (start, size, across)
        other += start * across
        above = stride
    if left:
        return None
    axes: list[tuple[int, int]] = []
    used: set[int] = set()
    for size, stride in span.axes:
        if stride not in starts or stride in used:
            return None
        used.add(stride)
        axes.append((size, starts[stride][2]))
    lengths = {stride: size for size, stride in span.axes}
    for stride, (start, size, _) in starts.items():
        if start < 0 or start + lengths.get(stride, 1) > size:
            return None
    return Span(other, tuple(axes))


class Box(NamedTuple):
    """A box of a tensor's global shape, and where it goes."""

    region: Region
    offset: int
    """Of its first element in the memory that is written."""
    strides: tuple[int, ...]
    """There, for each axis of the global shape."""


def boxes_of(axes: Sequence[Axis], target: int, origin: int, shape: Sequence[int]) -> list[Box]:
    """Returns the boxes of a row-major tensor that a copy reads; none if they are too many.

    Args:
        axes: The copy.
        target: Offset of what is written.
        origin: Offset of what is read in the tensor.
        shape: The tensor's.
    """
    found: list[Box] = []
    for box in _boxes(list(axes), target, origin, tuple(shape)):
        if box is None or len(found) == MOST_BOXES:
            return []
        found.append(box)
    return found


def _boxes(
    axes: list[Axis], target: int, origin: int, shape: tuple[int, ...]
) -> Iterator[Box | None]:
    strides = _row_major(shape)
    starts: list[int] = []
    left = origin
    for stride in strides:
        start, left = divmod(left, stride)
        starts.append(start)
    lengths, written = [1] * len(shape), [1] * len(shape)
    waiting = sorted(axes, key=lambda axis: axis.origin)  # The innermost first.
    while waiting:
        size, to, by = waiting.pop(0)
        place = next((k for k in range(len(shape)) if 0 < strides[k] <= by), None)
        if place is None:
            yield None  # One element is read for many.
            return
        room = shape[place] - starts[place]
        if by == strides[place] and lengths[place] == 1 and size <= room:
            lengths[place], written[place] = size, to
            continue
        if by == strides[place] and lengths[place] == 1 and not starts[place]:
            whole = shape[place]
            if size % whole == 0:  # It goes on in the axis before.
                lengths[place], written[place] = whole, to
                waiting.insert(0, Axis(size // whole, to * whole, by * whole))
                continue
        inner = lengths[place]
        if by == strides[place] * inner and to == written[place] * inner and size * inner <= room:
            lengths[place] = inner * size  # One axis, seen as two.
            continue
        # No box: one for each place of the outermost axis.
        outer = max(axes, key=lambda axis: axis.origin)
        rest = [axis for axis in axes if axis is not outer]
        if outer.size > MOST_BOXES:
            yield None
            return
        for index in range(outer.size):
            yield from _boxes(
                rest, target + index * outer.target, origin + index * outer.origin, shape
            )
        return
    yield Box(Region(tuple(starts), tuple(lengths)), target, tuple(written))


def _row_major(shape: tuple[int, ...]) -> list[int]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]
