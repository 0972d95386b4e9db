"""Mappings are shared by the agents of a process and end with the last of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorlease.agents.errors import MappingError, SegmentGoneError
from tensorlease.agents.mappings import Mappings, process_mappings
from tensorlease.agents.shm import ShmMemory
from tensorlease.protocol.handles import CudaIpcHandle, ShmHandle

torch = pytest.importorskip("torch")

INSTANCE = "0123456789abcdef"


@pytest.fixture(name="directory", autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(tmp_path))
    return tmp_path


def _mapped(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(name)


def test_a_segment_is_mapped_once_and_unmapped_by_its_last_user() -> None:
    segment = ShmMemory(INSTANCE).allocate(64, 3)
    name = segment.handle.name
    mappings = Mappings()
    first = mappings.map("t", 3, segment.handle)
    assert mappings.map("t", 3, segment.handle) is first
    assert _mapped(name) == 2  # the trainer's own, and one
    assert mappings.held() == [("t", 3)]
    assert mappings.owner_of(first.address + 63) == ("t", 3)
    assert mappings.owner_of(first.address + 64) is None
    assert not mappings.unmap("t", 3)
    assert _mapped(name) == 2
    assert mappings.unmap("t", 3)
    assert _mapped(name) == 1
    assert mappings.held() == []
    with pytest.raises(MappingError, match="is not mapped here"):
        mappings.unmap("t", 3)
    segment.free()


def test_a_mapping_in_use_by_a_view_is_kept_and_can_be_ended_later() -> None:
    segment = ShmMemory(INSTANCE).allocate(64, 3)
    mappings = Mappings()
    view = mappings.map("t", 3, segment.handle).flat()
    with pytest.raises(MappingError, match="still looks into it"):
        mappings.unmap("t", 3)
    assert mappings.held() == [("t", 3)]
    del view
    assert mappings.unmap("t", 3)
    segment.free()


def test_a_number_that_comes_with_another_handle_is_refused() -> None:
    memory = ShmMemory(INSTANCE)
    first, second = memory.allocate(64, 3), memory.allocate(64, 4)
    mappings = Mappings()
    mappings.map("t", 3, first.handle)
    with pytest.raises(MappingError, match="never used twice"):
        mappings.map("t", 3, second.handle)
    mappings.unmap("t", 3)
    first.free()
    second.free()


def test_a_vanished_segment_is_named_and_nothing_is_held() -> None:
    name = f"tensorlease-0-1-2-3-0123abcd-{os.getpid()}"
    mappings = Mappings()
    with pytest.raises(SegmentGoneError, match="segment gone") as gone:
        mappings.map("t", 1, ShmHandle(name, 64))
    assert gone.value.name == name
    assert mappings.held() == []


def test_a_handle_of_a_kind_that_cannot_be_opened_here_is_refused() -> None:
    uuid = "0a1b2c3d-0000-1111-2222-0123456789ab"
    with pytest.raises(MappingError, match="format 9, and this agent knows 1"):
        Mappings().map("t", 1, CudaIpcHandle(9, uuid, b"x", 64, 0, b"e"))
    with pytest.raises(MappingError, match="memory has 1 bytes, and those of format 1 have 64"):
        Mappings().map("t", 1, CudaIpcHandle(1, uuid, b"x", 64, 0, bytes(64)))
    with pytest.raises(MappingError, match="event has 66 bytes, and those of format 1 have 64"):
        Mappings().map("t", 1, CudaIpcHandle(1, uuid, bytes(64), 64, 0, bytes(66)))
    if not torch.cuda.is_available():
        with pytest.raises(MappingError, match=f"are on GPU {uuid}, and this process has no CUDA"):
            Mappings().map("t", 1, CudaIpcHandle(1, uuid, bytes(64), 64, 0, bytes(64)))


def test_a_process_has_one_set_of_mappings() -> None:
    assert process_mappings() is process_mappings()
