"""Registering: storages move once, everything that looks into them follows, or all stays."""

from __future__ import annotations

import itertools
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest
import torch
from torch import nn

from tensorlease.agents import source
from tensorlease.agents.errors import ExportError, SharedMemoryError
from tensorlease.agents.mappings import process_mappings
from tensorlease.agents.pieces import Piece, Pieces
from tensorlease.agents.placement import NamedTensors
from tensorlease.agents.shm import ShmMapping, ShmMemory, ShmSegment
from tensorlease.agents.source import RegisteredBuffers, register
from tensorlease.protocol.regions import Region
from tensorlease.protocol.tables import OfferBody, TensorEntry, decode_offer, encode_body

INSTANCE = "0123456789abcdef"


@pytest.fixture(name="directory", autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(name="swap", params=[True, False], ids=["swap", "no swap"])
def _swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways to move a storage: that of this torch, and that of those which cannot swap."""
    can_swap = bool(request.param)
    if can_swap and not source.CAN_SWAP:
        pytest.skip("this torch cannot exchange the memory of storages")
    monkeypatch.setattr(source, "CAN_SWAP", can_swap)
    return can_swap


def _register(
    named: NamedTensors, regions: Pieces | None = None, numbers: Iterator[int] | None = None
) -> RegisteredBuffers:
    memory = ShmMemory(INSTANCE)
    return register(named, memory=memory, numbers=numbers or itertools.count(1), regions=regions)


def _entries(registered: RegisteredBuffers) -> dict[str, TensorEntry]:
    return {entry.name: entry for buffer in registered.buffers for entry in buffer.entries}


def _read(directory: Path, registered: RegisteredBuffers, name: str) -> torch.Tensor:
    """Reads a tensor as a worker would: from the mapped segment, by the table."""
    for buffer in decode_offer(encode_body(OfferBody(registered.buffers))).buffers:
        for entry in buffer.entries:
            if entry.name == name:
                if buffer.handle is None:
                    return torch.empty(entry.local_shape, dtype=getattr(torch, entry.dtype))
                mapping = ShmMapping(directory, buffer.handle)  # type: ignore[arg-type]
                raw = mapping.flat()[entry.offset : entry.offset + entry.nbytes].clone()
                mapping.unmap()
                return raw.view(getattr(torch, entry.dtype)).view(entry.local_shape)
    raise AssertionError(name)


def test_a_model_keeps_training_and_what_it_writes_is_in_the_segments(
    directory: Path, swap: bool
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    objects = dict(model.named_parameters())
    registered = _register(model.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter is objects[name]
        assert torch.equal(parameter, values[name])
        assert torch.equal(_read(directory, registered, name), values[name])
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    registered.check()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, values[name])
        assert torch.equal(_read(directory, registered, name), parameter)
    assert registered.nbytes == sum(p.numel() * 4 for p in model.parameters())
    registered.close()


@pytest.mark.skipif(not source.CAN_SWAP, reason="this torch cannot swap")
def test_views_that_nobody_named_follow_their_storage(directory: Path) -> None:
    parameter = nn.Parameter(torch.zeros(4, 4))
    view, detached = parameter[1], parameter.detach()
    registered = _register({"w": parameter.data})
    with torch.no_grad():
        parameter.fill_(5)
    assert view.eq(5).all()
    assert detached.data_ptr() == parameter.data_ptr()
    assert _read(directory, registered, "w").eq(5).all()
    registered.close()


def test_without_swap_a_storage_with_unknown_views_is_refused_and_nothing_moves(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "CAN_SWAP", False)
    weight = torch.zeros(4, 4)
    view = weight[1]
    with pytest.raises(ExportError, match="'w' shares its memory with 1 tensors that were not"):
        _register({"w": weight})
    assert view.data_ptr() == weight[1].data_ptr()
    assert list(directory.iterdir()) == []


def test_tied_names_are_aliases_and_their_bytes_count_once(directory: Path, swap: bool) -> None:
    embed, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embed.weight
    model = nn.ModuleDict({"embed": embed, "head": head})
    registered = _register(model.named_parameters(remove_duplicate=False))
    entries = _entries(registered)
    assert entries["head.weight"].alias_of == "embed.weight"
    assert entries["embed.weight"].alias_of is None
    assert entries["head.weight"].offset == entries["embed.weight"].offset
    assert registered.nbytes == 6 * 4 * 4
    assert sum(path.stat().st_size for path in directory.iterdir()) == 6 * 4 * 4
    registered.close()


def test_views_of_one_buffer_move_it_once_and_only_they_are_described(
    directory: Path, swap: bool
) -> None:
    flat = torch.arange(1000, dtype=torch.float32)
    views = {f"v{number}": flat[number * 10 : number * 10 + 9] for number in range(100)}
    del flat  # the views still know it
    registered = _register(views)
    assert sum(path.stat().st_size for path in directory.iterdir()) == 4000
    assert registered.nbytes == sum(view.numel() * 4 for view in views.values())
    views["v7"].fill_(-1)
    assert _read(directory, registered, "v7").eq(-1).all()
    assert _read(directory, registered, "v8")[0] == 80
    registered.close()


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.complex64],
)
def test_every_kind_of_dtype_arrives_and_is_aligned(directory: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (24,), dtype=torch.uint8)
    tensors = {"odd": torch.ones(3, dtype=torch.int8), "t": raw.clone().view(dtype)}
    registered = _register(tensors)
    assert torch.equal(_read(directory, registered, "t").view(torch.uint8), raw)
    assert _entries(registered)["t"].offset % 256 == 0
    registered.close()


def test_empty_tensors_and_scalars_arrive_and_the_empty_export_nothing(
    directory: Path, swap: bool
) -> None:
    tensors = {
        "none": torch.zeros(0),
        "middle": torch.zeros(4, 0, 8, dtype=torch.int16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "w": torch.ones(3),
    }
    registered = _register(tensors)
    assert len(list(directory.iterdir())) == 1
    (handleless,) = [buffer for buffer in registered.buffers if buffer.handle is None]
    assert {entry.name for entry in handleless.entries} == {"none", "middle"}
    for name, tensor in tensors.items():
        read = _read(directory, registered, name)
        assert (read.shape, read.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(read, tensor)
    registered.close()
    only = _register({"none": torch.zeros(0)})
    assert [buffer.handle for buffer in only.buffers] == [None]
    assert list(directory.iterdir()) == []
    only.close()


def test_many_storages_share_few_segments_and_a_large_one_has_its_own(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "SEGMENT_BYTES", 64 * 1024)
    tensors = {f"t{number}": torch.full((250,), number) for number in range(100)}  # 2,000 bytes
    tensors["large"] = torch.ones(20_000)
    registered = _register(tensors)
    sizes = sorted(path.stat().st_size for path in directory.iterdir())
    assert len(sizes) == 5
    assert sizes[-1] == 80_000
    assert registered.numbers == [1, 2, 3, 4, 5]
    for name, tensor in tensors.items():
        assert torch.equal(_read(directory, registered, name), tensor)
    registered.close()


def test_numbers_go_on_over_registrations() -> None:
    numbers = itertools.count(7)
    first = _register({"a": torch.ones(1)}, numbers=numbers)
    second = _register({"b": torch.ones(1), "c": torch.ones(0)}, numbers=numbers)
    assert (first.numbers, second.numbers) == ([7], [8, 9])
    first.close()
    second.close()


def test_after_close_the_files_are_gone_and_the_tensors_live_on(
    directory: Path, swap: bool
) -> None:
    weight = torch.arange(5)
    registered = _register({"w": weight})
    registered.close()
    registered.close()
    del registered
    assert list(directory.iterdir()) == []
    weight += 1
    assert weight.tolist() == [1, 2, 3, 4, 5]
    again = _register({"w": weight})
    assert torch.equal(_read(directory, again, "w"), weight)
    again.close()


# Pieces.


def test_a_plain_tensor_may_be_a_box_of_a_larger_one() -> None:
    registered = _register(
        {"w": torch.ones(2, 3), "whole": torch.ones(4)},
        regions={"w": Piece((4, 6), (2, 3)), "whole": ((4,), (0,))},
    )
    entries = _entries(registered)
    assert entries["w"].shape == (4, 6)
    assert entries["w"].region == Region((2, 3), (2, 3))
    assert entries["whole"].region is None
    assert registered.pieces
    registered.close()


@pytest.mark.parametrize(
    ("regions", "text"),
    [
        ({"w": ((4, 4), (3, 0))}, "no box of its global shape"),
        ({"w": ((4,), (0,))}, "no box of its global shape"),
        ({"w": ((4, 4), (-1, 0))}, "no box of its global shape"),
        ({"x": ((4, 4), (0, 0))}, "'x' has a region but was not given"),
    ],
)
def test_a_region_that_does_not_fit_is_refused(regions: Pieces, text: str) -> None:
    with pytest.raises(ExportError, match=text):
        _register({"w": torch.ones(2, 3)}, regions=regions)


# What is refused, by name and with the way out.


def _tied_partly() -> dict[str, torch.Tensor]:
    flat = torch.zeros(10)
    return {"first": flat[:6], "bad": flat[4:]}


class _Wrapped(torch.Tensor):
    def __new__(cls, inner: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, *args: object, **kwargs: object) -> object:
        raise NotImplementedError


def _number() -> torch.Tensor:
    return 3.0  # type: ignore[return-value]


def _shared() -> torch.Tensor:
    return torch.ones(3).share_memory_()  # type: ignore[no-untyped-call,no-any-return]


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some releases call them deprecated
        return torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (lambda: torch.ones(3, 4).t(), "is not contiguous.*call .contiguous"),
        (lambda: torch.ones(8)[::2], "is not contiguous"),
        (lambda: torch.ones(1).expand(4), "is not contiguous"),
        (lambda: torch.ones(2, device="meta"), "meta device.*load or initialise"),
        (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo.*indices and values"),
        (_quantized, "is quantized.*int_repr"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "lazy conjugate.*resolve_conj"),
        (lambda: _Wrapped(torch.ones(2)), "is a _Wrapped.*inner tensors"),
        (lambda: nn.LazyLinear(3).weight, "is not initialised yet.*run the module"),
        (_shared, "share_memory_.*register a clone"),
        (_number, "is a float, not a torch.Tensor"),
        (lambda: torch.ones([1] * 17), "17 dimensions; 16"),
    ],
)
def test_a_tensor_that_cannot_be_registered_is_refused_and_nothing_moves(
    bad: Callable[[], torch.Tensor], text: str, directory: Path
) -> None:
    good = torch.ones(3)
    address = good.data_ptr()
    with pytest.raises(ExportError, match=f"'bad' .*{text}") as refused:
        _register({"good": good, "bad": bad()})
    assert refused.value.tensor == "bad"
    assert good.data_ptr() == address
    assert list(directory.iterdir()) == []


def test_partial_overlaps_duplicates_and_unusable_names_are_refused() -> None:
    with pytest.raises(ExportError, match="'bad' overlaps 'first' in memory"):
        _register(_tied_partly())
    with pytest.raises(ExportError, match="'w' was given twice"):
        _register([("w", torch.ones(1)), ("w", torch.ones(1))])
    for name in ("", "n" * 513):
        with pytest.raises(ExportError, match="no usable name"):
            _register({name: torch.ones(1)})


def test_a_registered_tensor_is_not_registered_twice() -> None:
    weight = torch.ones(4)
    registered = _register({"w": weight})
    with pytest.raises(ExportError, match="'again' is already registered"):
        _register({"again": weight[1:]})
    registered.close()


def test_a_received_tensor_is_not_handed_on_but_its_clone_is() -> None:
    owner = _register({"w": torch.arange(4)})
    handle = owner.buffers[0].handle
    assert handle is not None
    mappings = process_mappings()
    view = mappings.map("trainer-a", 1, handle).flat()
    with pytest.raises(ExportError, match="'w' was received.*trainer-a.*clone it first"):
        _register({"w": view})
    copy = _register({"w": view.clone()}, numbers=itertools.count(2))
    del view
    assert mappings.unmap("trainer-a", 1)
    owner.close()
    copy.close()


@pytest.mark.root
def test_without_room_nothing_moves_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: bool
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", small], check=True)
    try:
        monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(small))
        monkeypatch.setattr(source, "SEGMENT_BYTES", 2**20)
        tensors = {f"t{number}": torch.full((3 * 2**20,), number) for number in range(2)}
        tensors = {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        with pytest.raises(SharedMemoryError, match=rf"needs 12.0 MiB, 4.0 MiB free at {small}"):
            _register(tensors)
        assert [tensor.data_ptr() for tensor in tensors.values()] == addresses
        assert all(tensor.eq(place).all() for place, tensor in enumerate(tensors.values()))
        assert list(small.iterdir()) == []
        registered = _register({"t": torch.ones(2**20)})
        registered.close()
        del registered
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


def test_when_the_segment_of_the_seventh_of_twenty_cannot_be_made_it_is_named_and_all_is_undone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, swap: bool
) -> None:
    allocate = ShmMemory.allocate
    made: list[int] = []

    def failing(memory: ShmMemory, nbytes: int, number: int) -> ShmSegment:
        made.append(number)
        if len(made) == 7:
            raise SharedMemoryError(directory, nbytes, None, "no more of these")
        return allocate(memory, nbytes, number)

    monkeypatch.setattr(source, "SEGMENT_BYTES", 1000)
    tensors = {f"t{number}": torch.full((500,), float(number)) for number in range(1, 21)}
    addresses = [tensor.data_ptr() for tensor in tensors.values()]
    with monkeypatch.context() as patch:
        patch.setattr(ShmMemory, "allocate", failing)
        with pytest.raises(SharedMemoryError, match="tensor 't7': .*no more of these") as refused:
            _register(tensors)
    assert refused.value.tensors == ("t7",)
    assert [tensor.data_ptr() for tensor in tensors.values()] == addresses
    assert list(directory.iterdir()) == []
    registered = _register(tensors)
    assert len(registered.numbers) == 20
    assert _read(directory, registered, "t7").eq(7).all()
    registered.close()


# Afterwards.


def test_a_tensor_whose_data_was_replaced_is_found_by_name() -> None:
    model = nn.Linear(2, 2)
    registered = _register(model.named_parameters())
    registered.check()
    model.weight.data = torch.ones(2, 2)
    with pytest.raises(ExportError, match="'weight' no longer lies where it was registered"):
        registered.check()
    registered.close()


def test_a_tensor_that_is_of_another_dtype_by_now_is_found() -> None:
    model = nn.Linear(2, 2)
    registered = _register(model.named_parameters())
    for looked_at in (False, True):
        if looked_at:
            registered.check()
        model.weight.requires_grad_(False).data = model.weight.data.view(torch.int32)
        with pytest.raises(ExportError, match="'weight' no longer lies where it was registered"):
            registered.check()
        model.weight.data = model.weight.data.view(torch.float32)
    registered.close()


def test_a_tensor_that_became_a_part_or_a_transpose_of_itself_is_found() -> None:
    model = nn.Linear(2, 2)
    registered = _register(model.named_parameters())
    whole = model.weight.data
    for other in (whole.t(), whole[:1]):
        model.weight.data = other
        with pytest.raises(ExportError, match="'weight' no longer lies where it was registered"):
            registered.check()
    model.weight.data = whole
    registered.check()
    registered.close()


@pytest.mark.parametrize(
    "change",
    [
        torch.conj,
        torch.ops.aten._neg_view,
        lambda data: data.view(4, 2),
        lambda data: data.view(1, 2, 4),
    ],
)
@pytest.mark.parametrize("looked_at", [False, True])
def test_a_tensor_that_lies_there_and_is_another_by_now_is_found(
    change: Callable[[torch.Tensor], torch.Tensor], looked_at: bool
) -> None:
    weight = nn.Parameter(torch.ones(2, 4, dtype=torch.complex64), requires_grad=False)
    registered = _register({"weight": weight})
    if looked_at:
        registered.check()
    weight.data = change(weight.data)
    with pytest.raises(ExportError, match="'weight' no longer lies where it was registered"):
        registered.check()
    registered.close()


def test_a_tensor_without_elements_that_has_some_by_now_is_found() -> None:
    tensors = {"full": torch.ones(2), "empty": torch.ones(0, 2)}
    registered = _register(tensors)
    registered.check()
    tensors["empty"].data = torch.ones(1, 2)
    with pytest.raises(ExportError, match="'empty' no longer lies where it was registered"):
        registered.check()
    registered.close()


def test_a_tensor_whose_storage_was_taken_away_is_refused() -> None:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(16)
    with pytest.raises(ExportError, match=r"'w' has lost its memory \(16 bytes are left"):
        _register({"w": tensor})


def test_a_segment_that_something_removed_is_found(directory: Path) -> None:
    registered = _register({"w": torch.ones(2)})
    next(directory.iterdir()).unlink()
    with pytest.raises(ExportError, match="'w' lies in buffer 1, whose memory was removed"):
        registered.check()
    registered.close()


def test_registered_tensors_are_kept_alive_by_the_registration(directory: Path) -> None:
    registered = _register({"w": torch.full((1000,), 3.0)})
    for _ in range(100):
        torch.full((1000,), 4.0)
    assert _read(directory, registered, "w").eq(3).all()
    registered.check()
    registered.close()
