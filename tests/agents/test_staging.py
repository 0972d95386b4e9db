"""Staging memory: the driver's own, beside tensors whose memory cannot be shared; given back again."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tensorlease.agents import cuda, staging
from tensorlease.agents.errors import GpuMemoryError
from tensorlease.agents.registry import Registry
from tensorlease.agents.source import allocate_for
from tensorlease.protocol.handles import CudaIpcHandle

from .fake_cuda import UUIDS, FakeDriver, FakeStorage, take_place

MIB = 2**20
ME = "0123456789abcdef"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    take_place(made, monkeypatch)

    def storage_of(plain: Any, ordinal: int) -> FakeStorage:
        (nbytes,) = plain.__cuda_array_interface__["shape"]
        address, _ = plain.__cuda_array_interface__["data"]
        return FakeStorage(address, nbytes, ordinal, plain)

    monkeypatch.setattr(staging, "_storage_of", storage_of)
    return made


def memory(ordinal: int = 0) -> staging.StagingMemory:
    return staging.StagingMemory(cuda.CudaMemory(ME), ordinal)


def test_it_is_an_allocation_of_its_own_that_workers_map_from_its_begin(fake: FakeDriver) -> None:
    first, second = memory(1).allocate(1000, 7), memory(1).allocate(3 * MIB, 8)
    # Whole pages, so that the driver puts nothing else into what is shared.
    assert list(fake.allocations.values()) == [2 * MIB, 4 * MIB]
    for made, nbytes, whole in ((first, 1000, 2 * MIB), (second, 3 * MIB, 4 * MIB)):
        assert isinstance(made.handle, CudaIpcHandle)
        assert made.handle.gpu_uuid == UUIDS[1] and made.handle.storage_offset == 0
        assert (made.nbytes, made.handle.storage_nbytes) == (nbytes, whole)
        assert made.device == torch.device("cuda", 1)
    assert cuda.local_export(ME, 7) is first


def test_it_is_given_back_with_the_last_who_looks_into_it(fake: FakeDriver) -> None:
    made = memory().allocate(1000, 7)
    view = list(made._storages)
    made.free()
    assert len(fake.allocations) == 1
    view.clear()
    gc.collect()
    assert fake.allocations == {}


def test_without_room_the_tensors_the_gpu_and_what_is_free_are_named(fake: FakeDriver) -> None:
    fake.fails["cuMemAlloc_v2"] = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(GpuMemoryError) as error:
        allocate_for(["w", "b"], memory(), 5 * MIB, 7)
    text = str(error.value)
    assert text.startswith(f"tensor 'w' and 1 more: 5.0 MiB of staging memory on GPU {UUIDS[0]}")
    assert "there is no room (cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY, 3.0 MiB of 96.0 MiB" in text
    assert 'share="shm"' in text


def test_a_gpu_without_ipc_gets_no_copy_that_nobody_could_map(fake: FakeDriver) -> None:
    fake.ipc = False
    with pytest.raises(GpuMemoryError, match=f'GPU {UUIDS[0]} has no CUDA IPC.*share="shm"'):
        memory().allocate(1000, 7)
    assert fake.allocations == {}


def test_what_cannot_be_shared_either_is_given_back_at_once(fake: FakeDriver) -> None:
    fake.fails["cuIpcGetMemHandle"] = "CUDA_ERROR_NOT_SUPPORTED"
    with pytest.raises(
        GpuMemoryError, match=r"cannot be shared \(cuIpcGetMemHandle: CUDA_ERROR_NOT"
    ):
        memory().allocate(1000, 7)
    gc.collect()
    assert fake.allocations == {}


def test_a_ring_has_memory_of_the_driver_where_that_of_torch_cannot_be_shared(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise GpuMemoryError("2 bytes of cuda:0 cannot be shared")

    monkeypatch.setattr(cuda.CudaMemory, "allocate", refuse)
    via: dict[int, str] = {}
    registry = Registry(ME, None, via)
    number, made = registry.allocate(1000, 0)
    assert isinstance(made.handle, CudaIpcHandle) and via == {number: "ipc"}
    fake.ipc = False
    with pytest.raises(GpuMemoryError, match="2 bytes of cuda:0 cannot be shared"):
        registry.allocate(1000, 0)
