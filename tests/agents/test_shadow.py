"""Shadows: what workers read is a copy, converted, that is made when it is filled and not before."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from tensorlease.agents import source
from tensorlease.agents.errors import AttachError, ExportError, SharedMemoryError
from tensorlease.agents.mappings import process_mappings
from tensorlease.agents.pieces import Pieces, RowBlocks
from tensorlease.agents.placement import NamedTensors
from tensorlease.agents.shadow import Dtypes, ShadowBuffers, register_shadow
from tensorlease.agents.shm import ShmMapping, ShmMemory
from tensorlease.agents.sink import AttachedTensors
from tensorlease.protocol.errors import ConfigError
from tensorlease.protocol.tables import OfferBody, decode_offer, encode_body

Make = Callable[..., ShadowBuffers]


@pytest.fixture(name="directory", autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(name="shadow")
def _shadow() -> Iterator[Make]:
    made: list[ShadowBuffers] = []
    numbers = itertools.count(1)

    def make(
        tensors: NamedTensors, dtype: Dtypes | None = None, regions: Pieces | None = None
    ) -> ShadowBuffers:
        buffers = register_shadow(
            tensors,
            memory=ShmMemory("0123456789abcdef"),
            numbers=numbers,
            regions=regions,
            dtype=dtype,
        )
        made.append(buffers)
        return buffers

    yield make
    for buffers in made:
        buffers.close()


def _read(directory: Path, buffers: ShadowBuffers) -> dict[str, list[torch.Tensor]]:
    """Reads all boxes of each name as a worker would: from the mapped segments, by the table."""
    found: dict[str, list[torch.Tensor]] = {}
    for buffer in decode_offer(encode_body(OfferBody(buffers.buffers))).buffers:
        flat = torch.empty(0, dtype=torch.uint8)
        if buffer.handle is not None:
            mapping = ShmMapping(directory, buffer.handle)  # type: ignore[arg-type]
            flat = mapping.flat().clone()
            mapping.unmap()
        for entry in buffer.entries:
            raw = flat[entry.offset : entry.offset + entry.nbytes]
            tensor = raw.view(getattr(torch, entry.dtype)).view(entry.local_shape)
            found.setdefault(entry.name, []).append(tensor)
    return found


def test_originals_stay_and_their_values_arrive_converted_when_filled(
    directory: Path, shadow: Make
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    buffers = shadow(model.named_parameters(), torch.bfloat16)
    assert buffers.nbytes == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert all(not parts[0].any() for parts in _read(directory, buffers).values())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        buffers.check()
        buffers.fill()
        read = _read(directory, buffers)
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad
            assert parameter.dtype is torch.float32
            assert torch.equal(read[name][0], parameter.to(torch.bfloat16))
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            assert not torch.equal(read[name][0], parameter.to(torch.bfloat16))
            assert torch.equal(_read(directory, buffers)[name][0], read[name][0])
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert buffers.shadows


def test_without_a_dtype_every_kind_and_layout_is_copied_as_it_is(
    directory: Path, shadow: Make
) -> None:
    with torch.inference_mode():
        inferred = torch.rand(3, 3)
    raw = torch.randint(0, 2, (6, 32), dtype=torch.uint8)
    tensors = {
        "transposed": torch.rand(5, 3).t(),
        "strided": torch.rand(20)[::2],
        "expanded": torch.rand(1).expand(4),
        "inferred": inferred,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(3, 0, dtype=torch.int16),
        "bool": torch.tensor([True, False]),
        "complex": torch.rand(3, dtype=torch.complex128)[::2],
        "fp8": raw.view(torch.float8_e4m3fn).t(),
        "fp4": raw.view(torch.float4_e2m1fn_x2).t(),
        "shared": torch.rand(3).share_memory_(),  # type: ignore[no-untyped-call]
    }
    buffers = shadow(tensors)
    buffers.fill()
    read = _read(directory, buffers)
    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 16: torch.complex128}
    for name, tensor in tensors.items():
        (copy,) = read[name]
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        carrier = carriers[tensor.dtype.itemsize]
        assert torch.equal(copy.view(carrier), tensor.view(carrier)), name


def test_dtypes_may_be_given_by_name_and_by_function(directory: Path, shadow: Make) -> None:
    tensors = {"w": torch.rand(4), "norm": torch.rand(4), "steps": torch.tensor(7)}
    by_name = shadow(tensors, {"w": torch.float8_e5m2})
    by_call = shadow(tensors, lambda name: torch.float8_e5m2 if name == "w" else None)
    for buffers in (by_name, by_call):
        buffers.fill()
        read = _read(directory, buffers)
        assert torch.equal(
            read["w"][0].view(torch.uint8), tensors["w"].to(torch.float8_e5m2).view(torch.uint8)
        )
        assert torch.equal(read["norm"][0], tensors["norm"])
        assert torch.equal(read["steps"][0], tensors["steps"])
        assert buffers.nbytes == 4 + 16 + 8


def test_an_empty_tensor_has_the_dtype_that_was_asked_for(directory: Path, shadow: Make) -> None:
    buffers = shadow({"e": torch.zeros(0, 3)}, torch.float16)
    buffers.fill()
    (copy,) = _read(directory, buffers)["e"]
    assert (copy.dtype, copy.shape) == (torch.float16, (0, 3))
    assert list(directory.iterdir()) == []


def test_row_blocks_and_tied_names_lie_there_once(directory: Path, shadow: Make) -> None:
    weight = torch.arange(8.0).view(4, 2)
    where = RowBlocks((8, 2), [(6, 2), (0, 2)])
    buffers = shadow(
        {"embed": weight, "head": weight}, torch.bfloat16, {"embed": where, "head": where}
    )
    assert buffers.nbytes == 16
    assert buffers.names == ("embed", "head")
    assert buffers.pieces
    entries = buffers.buffers[0].entries
    assert [(entry.name, entry.alias_of) for entry in entries] == [
        ("embed", None),
        ("head", "embed"),
        ("embed", None),
        ("head", "embed"),
    ]
    buffers.fill()
    read = _read(directory, buffers)
    for name in ("embed", "head"):
        assert [part.tolist() for part in read[name]] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_shadows_of_any_size_around_a_segments_arrive_whole_in_any_order(
    directory: Path, shadow: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "SEGMENT_BYTES", 2**12)
    sizes = {"less": 2**12 - 1, "equal": 2**12, "more": 2**12 + 1, "five": 5 * 2**12, "one": 1}
    for order in ("less equal more five one", "five one more less equal"):
        tensors = {
            name: torch.randint(0, 255, (sizes[name],), dtype=torch.uint8) for name in order.split()
        } | {"wide": torch.rand(513, dtype=torch.float64)}
        buffers = shadow(tensors)
        buffers.fill()
        read = _read(directory, buffers)
        assert all(torch.equal(read[name][0], tensor) for name, tensor in tensors.items())
        buffers.close()
    assert list(directory.iterdir()) == []


# What is refused, by name.


@pytest.mark.parametrize(
    ("tensor", "dtype", "text"),
    [
        (torch.tensor([1]), torch.bfloat16, "is torch.int64 and cannot become torch.bfloat16: one"),
        (torch.tensor([1j]), torch.float32, "cannot become torch.float32: one is complex"),
        (torch.rand(2), torch.int8, "cannot become torch.int8: one is floating.*returns None"),
        (torch.rand(2), torch.qint8, "cannot become torch.qint8, which has no byte view"),
        (torch.rand(2), torch.float4_e2m1fn_x2, "has no conversion"),
        (torch.rand(2), {"bad": "bfloat16"}, "the dtype 'bfloat16', which is no torch.dtype"),
        (torch.rand(2), lambda name: 3, "was given the dtype 3, which is no torch.dtype"),
        (torch.rand(2, device="meta"), None, "is on the meta device"),
    ],
)
def test_what_cannot_be_copied_or_converted_is_refused_and_nothing_is_left(
    shadow: Make, directory: Path, tensor: torch.Tensor, dtype: Any, text: str
) -> None:
    with pytest.raises(ExportError, match=f"'bad' .*{text}"):
        shadow({"bad": tensor}, dtype)
    assert list(directory.iterdir()) == []


def test_dtypes_of_no_kind_and_for_no_tensor_are_refused(shadow: Make) -> None:
    none: Any = "bfloat16"
    with pytest.raises(ConfigError, match="dtype 'bfloat16': must be a torch.dtype, a dict"):
        shadow({"w": torch.rand(2)}, none)
    with pytest.raises(ExportError, match="'v' has a dtype but was not given"):
        shadow({"w": torch.rand(2)}, {"v": torch.float16})


def test_a_received_tensor_is_refused_and_its_clone_is_not(shadow: Make) -> None:
    owner = shadow({"w": torch.arange(4)})
    handle = owner.buffers[0].handle
    assert handle is not None
    view = process_mappings().map("trainer-a", 1, handle).flat()
    with pytest.raises(ExportError, match="'w' was received.*trainer-a.*clone it first"):
        shadow({"w": view})
    assert shadow({"w": view.clone()}).nbytes == 32
    del view
    assert process_mappings().unmap("trainer-a", 1)


def test_without_room_nothing_is_left(
    shadow: Make, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "SEGMENT_BYTES", 2**12)
    allocate = ShmMemory.allocate

    def once(self: ShmMemory, nbytes: int, number: int) -> Any:
        if number > 1:
            raise SharedMemoryError(directory, nbytes, 0)
        return allocate(self, nbytes, number)

    monkeypatch.setattr(ShmMemory, "allocate", once)
    with pytest.raises(SharedMemoryError):
        shadow({"a": torch.rand(1024), "b": torch.rand(1024)})
    assert list(directory.iterdir()) == []


# Afterwards.


def test_an_original_may_be_replaced_by_one_of_the_same_form_and_by_no_other(
    directory: Path, shadow: Make
) -> None:
    model = nn.Linear(4, 2, bias=False)
    buffers = shadow(model.named_parameters(), torch.float16)
    model.weight.data = torch.full((4, 2), 3.0).t()
    buffers.fill()
    assert _read(directory, buffers)["weight"][0].eq(3).all()
    for other in (torch.zeros(1, 4), torch.zeros(2, 4, dtype=torch.float64)):
        model.weight.data = other
        for call in (buffers.check, buffers.fill):
            with pytest.raises(ExportError, match="'weight' was replaced since it was registered"):
                call()
    assert _read(directory, buffers)["weight"][0].eq(3).all()


@pytest.mark.parametrize("nbytes", [0, 16])
def test_an_original_whose_storage_was_taken_away_is_not_read(
    directory: Path, shadow: Make, nbytes: int
) -> None:
    weight = torch.ones(8)
    buffers = shadow({"weight": weight})
    buffers.fill()
    weight.untyped_storage().resize_(nbytes)  # As FSDP does between steps.
    for call in (buffers.check, buffers.fill):
        with pytest.raises(ExportError, match=f"'weight' has lost its memory .{nbytes} bytes"):
            call()
    weight.untyped_storage().resize_(32)
    weight.fill_(2)
    buffers.fill()
    assert _read(directory, buffers)["weight"][0].eq(2).all()


def test_an_original_that_is_lazily_negative_or_a_wrapper_by_now_is_named(shadow: Make) -> None:
    weights = {"weight": torch.ones(2), "empty": torch.ones(0)}
    buffers = shadow(weights)
    buffers.check()
    weights["weight"].data = torch.ops.aten._neg_view(weights["weight"].data)
    with pytest.raises(ExportError, match=r"'weight' was replaced .*, conjugated or negated"):
        buffers.check()
    swap: Any = torch.utils.swap_tensors
    wrapper: Any = TwoTensor
    swap(weights["weight"], wrapper(torch.ones(2), torch.ones(2)))
    with pytest.raises(ExportError, match="'weight' was replaced .* in a TwoTensor"):
        buffers.check()
    swap(weights["weight"], torch.ones(2))
    weights["empty"].data = torch.ones(1)
    with pytest.raises(ExportError, match="'empty' was replaced"):
        buffers.check()


def test_a_dtensor_that_was_given_another_local_tensor_is_found_wherever_it_is_used(
    shadow: Make,
) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        weight, other = (
            DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False) for _ in range(2)
        )
        moved = source.register(
            {"other": other}, memory=ShmMemory("fedcba9876543210"), numbers=itertools.count()
        )
        buffers = shadow({"w": weight})
        plan = AttachedTensors({"w": weight}).plan({"t": buffers.buffers})
        buffers.check()
        moved.check()
        weight._local_tensor = torch.ones(2)
        other._local_tensor = torch.ones(2)
        with pytest.raises(ExportError, match="'w' was replaced since it was registered"):
            buffers.check()
        with pytest.raises(ExportError, match="'other' no longer lies where it was registered"):
            moved.check()
        moved.close()
        mapping = process_mappings().map("t", 1, plan.handles("t")[1])
        with pytest.raises(AttachError, match="'w' was replaced since it was attached"):
            plan.copy("t", [1], {1: mapping})
        process_mappings().unmap("t", 1)
    finally:
        dist.destroy_process_group()


def test_of_dtensors_with_one_local_tensor_each_is_looked_at() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        local = torch.ones(2)
        tensors = {
            name: DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for name in "ab"
        }
        for each in tensors.values():
            each._local_tensor = local
        moved = source.register(
            tensors, memory=ShmMemory("fedcba9876543210"), numbers=itertools.count()
        )
        moved.check()
        tensors["a"]._local_tensor = torch.ones(2)
        with pytest.raises(ExportError, match="'a' no longer lies where it was registered"):
            moved.check()
        moved.close()
    finally:
        dist.destroy_process_group()


def test_tied_originals_that_part_are_found(shadow: Make) -> None:
    embed, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    head.weight.data = embed.weight.data
    buffers = shadow({"embed": embed.weight, "head": head.weight})
    buffers.check()
    head.weight.data = embed.weight.data.clone()
    with pytest.raises(ExportError, match="'head' was one tensor with 'embed' when"):
        buffers.check()


def test_a_segment_that_something_removed_is_found(directory: Path, shadow: Make) -> None:
    buffers = shadow({"w": torch.ones(2)})
    next(directory.iterdir()).unlink()
    with pytest.raises(ExportError, match="'w' lies in buffer 1, whose memory was removed"):
        buffers.check()


def test_after_close_the_files_are_gone_and_the_originals_free(
    directory: Path, shadow: Make
) -> None:
    weight = torch.ones(3)
    buffers = shadow({"w": weight})
    buffers.close()
    buffers.close()
    assert list(directory.iterdir()) == []
    assert shadow({"w": weight}).nbytes == 12
