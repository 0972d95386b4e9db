"""Bytes that were packed into slots come out of them as they went in, by the table alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlease.agents.errors import ExportError
from tensorlease.agents.packing import Packing, cut, table_cost
from tensorlease.protocol.dtypes import ITEM_SIZES
from tensorlease.protocol.handles import ShmHandle
from tensorlease.protocol.regions import Region
from tensorlease.protocol.segments import SegmentName
from tensorlease.protocol.tables import BatchBody, Buffer, decode_batch, encode_body

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

torch = pytest.importorskip("torch")

MIB = 2**20
NAME = SegmentName(uid=0, pid=1, start=2, namespace=3, instance="01234567", number=0)


class Slot:
    """A slot in private memory, as both sides have it."""

    def __init__(self, nbytes: int) -> None:
        self.bytes: Tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self.packing = Packing(nbytes)
        self.nbytes = nbytes

    @property
    def address(self) -> int:
        return int(self.bytes.data_ptr())

    device = torch.device("cpu")
    event = None
    foreign = True

    def flat(self) -> Tensor:
        return self.bytes

    def storage(self, offset: int, nbytes: int) -> UntypedStorage:
        raise AssertionError

    def unmap(self) -> None:
        raise AssertionError


def pack(tensors: dict[str, Tensor], slot_bytes: int) -> list[Slot]:
    """Packs as a ring round does."""
    from tensorlease.agents.filling import fill
    from tensorlease.agents.placement import place

    slots = [Slot(slot_bytes)]
    for placed in place(tensors, None, ExportError):
        item = ITEM_SIZES[placed.dtype]
        for box in cut(placed.region.length, item, slot_bytes):
            cost = table_cost(placed.name, (), len(placed.shape))
            if not slots[-1].packing.fits(box.count * item, cost):
                slots.append(Slot(slot_bytes))
            last = slots[-1]
            fill(last.bytes, last.packing.offset, placed, box, placed.dtype)
            last.packing.add(placed.name, placed.dtype, placed.shape, box, (), cost)
    return slots


def unpack(slots: list[Slot], target: dict[str, Tensor]) -> None:
    """Applies the tables, as they travel, to a worker's tensors."""
    from tensorlease.agents.sink import AttachedTensors

    attached = AttachedTensors(target)
    coverage = attached.coverage()
    for number, slot in enumerate(slots):
        handle = ShmHandle(str(NAME), slot.nbytes)
        body = BatchBody([Buffer(number, slot.nbytes, handle, slot.packing.entries)])
        plan = attached.plan({"trainer": decode_batch(encode_body(body)).buffers}, partial=True)
        plan.copy("trainer", [number], {number: slot})
        coverage.staged(plan, "trainer", [number])
    assert coverage.missing() == ()
    assert coverage.complete()


DTYPES = ("uint8", "bfloat16", "float32", "int64", "complex128", "float8_e4m3fn")
SIZES = (MIB - 1, MIB, MIB + 1, 5 * MIB, 1, 17)
tensors = st.lists(
    st.tuples(st.sampled_from(SIZES), st.sampled_from(DTYPES), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(tensors)
@settings(max_examples=15, deadline=None)
def test_tensors_around_the_size_of_a_slot_come_out_equal_in_any_order_and_mix_of_dtypes(
    given_tensors: list[tuple[int, str, bool]],
) -> None:
    source: dict[str, Tensor] = {}
    target: dict[str, Tensor] = {}
    for place, (nbytes, dtype, two) in enumerate(given_tensors):
        kind = getattr(torch, dtype)
        count = -(-nbytes // kind.itemsize)
        raw = (torch.arange(count * kind.itemsize, dtype=torch.int32) * 31 + place) % 251
        flat = raw.to(torch.uint8).view(kind)
        # Of two axes, and not contiguous: columns first.
        shaped = flat[: count // 3 * 3].view(3, -1).t() if two else flat
        source[str(place)] = shaped
        zeros = torch.zeros(shaped.numel() * kind.itemsize, dtype=torch.uint8)
        target[str(place)] = zeros.view(kind).view(shaped.shape)

    slots = pack(source, MIB)
    unpack(slots, target)

    assert all(slot.packing.end <= MIB for slot in slots)
    wrong = [n for n in source if not torch.equal(_bytes(source[n]), _bytes(target[n]))]
    assert wrong == []


def _bytes(tensor: Tensor) -> Tensor:
    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    carrier = carriers.get(tensor.element_size(), torch.complex128)
    made: Tensor = tensor.view(carrier).contiguous().view(torch.uint8)
    return made


def test_a_box_of_a_strided_tensor_is_converted_where_it_lies() -> None:
    from tensorlease.agents.filling import fill
    from tensorlease.agents.placement import place

    tensor = torch.randn(6, 4).t()
    (placed,) = place({"w": tensor}, None, ExportError)
    slot = torch.zeros(1000, dtype=torch.uint8)

    fill(slot, 256, placed, Region((1, 2), (2, 3)), "bfloat16")

    got = slot[256:268].view(torch.bfloat16).view(2, 3)
    assert torch.equal(got, tensor[1:3, 2:5].bfloat16())
    assert not slot[:256].any()
    assert not slot[268:].any()


def test_what_lacks_only_so_many_texts_are_asked_for_names_the_first_and_starts_anew() -> None:
    from tensorlease.agents.sink import AttachedTensors

    source = {name: torch.ones(3) for name in "abc"}
    target = {name: torch.zeros(3) for name in "abcd"}
    attached = AttachedTensors(target)
    coverage = attached.coverage()
    (slot,) = pack(source, MIB)
    body = [Buffer(0, MIB, ShmHandle(str(NAME), MIB), slot.packing.entries)]
    plan = attached.plan({"trainer": body}, partial=True)
    assert [text[0] for text in coverage.missing(2)] == ["a", "b"]
    coverage.staged(plan, "trainer", [0])
    assert coverage.missing() == ("d: 0 of 3 elements filled",)
    coverage.reset()
    assert [text[0] for text in coverage.missing()] == ["a", "b", "c", "d"]
