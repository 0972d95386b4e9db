"""Models in safetensors files: what belongs to them, what is wrong with them, and how they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tensorlease.commands import checkpoint
from tensorlease.commands.checkpoint import read_checkpoint
from tensorlease.commands.file_errors import CheckpointError
from tensorlease.protocol.errors import TensorleaseError

from .checkpoints import (
    BROKEN,
    FIRST,
    SECOND,
    Entry,
    by_hand,
    save,
    tensors,
    two_files,
    write_index,
)

ALONE = "model.safetensors"


def assemble(directory: Path, most: int) -> dict[str, torch.Tensor]:
    """All tensors of a model, put together from the parts in which they are read."""
    found: dict[str, torch.Tensor] = {}
    for stored, box, tensor in read_checkpoint(directory).parts(most):
        assert tuple(tensor.shape) == box.length
        assert str(tensor.dtype) == f"torch.{stored.dtype}"
        assert tensor.nbytes <= max(most, tensor.element_size())
        target = found.setdefault(stored.name, torch.empty(stored.shape, dtype=tensor.dtype))
        for axis, (start, length) in enumerate(zip(box.start, box.length, strict=True)):
            target = target.narrow(axis, start, length)
        target.copy_(tensor)
    return found


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        t.dtype == second[n].dtype and torch.equal(t, second[n]) for n, t in first.items()
    )


@pytest.mark.parametrize("most", [1, 7, 64, 2**20])
def test_tensors_are_read_whole_or_in_boxes_and_have_the_same_bytes(
    tmp_path: Path, most: int
) -> None:
    two_files(tmp_path)
    assert equal(assemble(tmp_path, most), tensors())


def test_what_belongs_to_a_model_is_all_files_where_there_is_no_index(tmp_path: Path) -> None:
    content = tensors()
    save(tmp_path, {"a.safetensors": {"odd": content.pop("odd")}, "b.safetensors": content})
    assert equal(assemble(tmp_path, 2**20), tensors())


def test_where_there_is_an_index_the_rest_is_not_part_of_the_model_and_is_told_of(
    tmp_path: Path,
) -> None:
    places = two_files(tmp_path)
    del places["scalar"], places["odd"]
    write_index(tmp_path, places)
    save(tmp_path, {"consolidated.safetensors": tensors()})
    found = read_checkpoint(tmp_path)
    assert {tensor.name for tensor in found.tensors} == places.keys()
    assert found.nbytes == sum(t.nbytes for name, t in tensors().items() if name in places)
    first, second = found.notes
    assert FIRST in first and "1 more" in first
    assert second.endswith("not part of the model, by its index: consolidated.safetensors")


def test_numbers_of_four_bits_are_counted_as_torch_does(tmp_path: Path) -> None:
    by_hand(tmp_path / "model.safetensors", {"a": Entry("F4", [3, 4], [0, 6])}, 6)
    ((stored, _, tensor),) = read_checkpoint(tmp_path).parts(6)
    assert (stored.shape, stored.nbytes) == ((3, 2), 6)
    assert (tensor.shape, tensor.dtype) == ((3, 2), torch.float4_e2m1fn_x2)


def test_numbers_of_four_bits_that_end_within_a_byte_are_refused(tmp_path: Path) -> None:
    entries = {"a": Entry("F4", [2, 3], [0, 3]), "b": Entry("U8", [4], [3, 7])}
    by_hand(tmp_path / ALONE, entries, 7)
    with pytest.raises(
        CheckpointError, match=r"tensor 'a' has the shape \(2, 3\), whose last axis"
    ):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_with_its_file_its_tensor_and_the_way_out(
    tmp_path: Path, name: str
) -> None:
    BROKEN[name].make(tmp_path)
    with pytest.raises(TensorleaseError) as caught:
        read_checkpoint(tmp_path)
    said = str(caught.value)
    assert str(tmp_path) in said
    for part in BROKEN[name].says:
        assert part in said
        said = said.partition(part)[2]


def test_a_file_that_is_replaced_between_check_and_reading_is_noticed(tmp_path: Path) -> None:
    two_files(tmp_path)
    parts = read_checkpoint(tmp_path).parts(2**20)
    save(tmp_path, {FIRST: {"scalar": torch.zeros(2)}})
    with pytest.raises(CheckpointError, match=f"{FIRST}: has changed while it was read"):
        list(parts)


@pytest.mark.parametrize("how", ["renamed", "written in place"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_file_with_other_bytes_under_the_same_header_is_noticed(
    tmp_path: Path, how: str, after: int
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for directory, value in ((first, 1.0), (second, 2.0)):
        save(directory, {ALONE: {f"w{n}": torch.full((1000,), value) for n in range(4)}})
    parts = read_checkpoint(first).parts(4000)
    for _ in range(after):
        next(parts)
    if how == "renamed":
        (second / ALONE).rename(first / ALONE)
    else:
        with (first / ALONE).open("r+b") as file:
            file.write((second / ALONE).read_bytes())
        os.utime(first / ALONE, ns=(1, 1))  # However coarse the clock of the file system is.
    with pytest.raises(CheckpointError, match=f"{ALONE}: has changed while it was read"):
        list(parts)


@pytest.mark.parametrize("kept", [0, 4096, 5000])
def test_a_file_that_is_cut_off_while_it_is_read_is_noticed(tmp_path: Path, kept: int) -> None:
    save(tmp_path, {ALONE: {"w": torch.arange(4000.0)}})
    state = (tmp_path / ALONE).stat()
    parts = read_checkpoint(tmp_path).parts(400)
    first = next(parts)
    assert first.tensor[-1] == 99.0
    os.truncate(tmp_path / ALONE, kept)
    os.utime(tmp_path / ALONE, ns=(state.st_mtime_ns, state.st_mtime_ns))
    with pytest.raises(CheckpointError, match=f"{ALONE}: has changed while it was read"):
        list(parts)


def test_a_file_that_is_cut_off_after_the_last_look_at_it_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, {ALONE: {"w": torch.arange(4000.0)}})
    parts = read_checkpoint(tmp_path).parts(400)
    monkeypatch.setattr(checkpoint, "_require_unchanged", lambda file: None)
    next(parts)
    os.truncate(tmp_path / ALONE, 4096)
    with pytest.raises(CheckpointError, match=f"{ALONE}: has changed while it was read"):
        list(parts)


def test_a_file_that_becomes_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    two_files(tmp_path)
    parts = read_checkpoint(tmp_path).parts(8)
    next(parts)
    (tmp_path / SECOND).unlink()
    os.mkfifo(tmp_path / SECOND)
    with pytest.raises(CheckpointError, match=f"{SECOND}: cannot be read: it is no ordinary file"):
        list(parts)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ALONE)
    with pytest.raises(CheckpointError, match="cannot be read: it is no ordinary file"):
        read_checkpoint(tmp_path)
