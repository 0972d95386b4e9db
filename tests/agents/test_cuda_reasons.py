"""GPU memory that cannot be shared or mapped: each case is named, with the way out, by any driver."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorlease.agents import cuda, cuda_driver, cuda_reasons, source
from tensorlease.agents.cuda_driver import CudaError
from tensorlease.agents.errors import MappingError, NotSharedError
from tensorlease.agents.placement import Placed
from tensorlease.protocol.handles import CUDA_FORMAT, CudaIpcHandle
from tensorlease.protocol.regions import Region
from tensorlease.protocol.tables import Buffer, TensorEntry

from .fake_cuda import UUIDS, FakeDriver, FakeOrder, FakeStorage, take_place

MIB = 2**20
BASE = 0x7000_0000_0000


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    made.allocations[BASE] = 20 * MIB
    take_place(made, monkeypatch)
    monkeypatch.setattr(cuda_reasons, "platform", lambda: "")
    return made


def exported(*where: tuple[int, int], ordinal: int = 0) -> list[Buffer]:
    """Exports tensors of these (address, bytes), `w0` and so on."""
    every = []
    for index, (address, nbytes) in enumerate(where):
        found: Any = source._Storage(FakeStorage(address, nbytes, ordinal))  # type: ignore[arg-type]
        entry = TensorEntry(f"w{index}", "uint8", (nbytes,), None, 0)
        found.entries.append(entry)
        found.placed.append(
            Placed(
                f"w{index}",
                torch.empty(0),
                "uint8",
                (nbytes,),
                Region((0,), (nbytes,)),
                True,
                torch.device("cuda", ordinal),
                (nbytes,),
            )
        )
        every.append(found)
    buffers: list[Buffer] = []
    source._export(every, cuda.CudaMemory("0123456789abcdef"), iter(range(9)), buffers, [])
    return buffers


def handle(uuid: str = UUIDS[0], **others: Any) -> CudaIpcHandle:
    given: dict[str, Any] = {
        "format_version": CUDA_FORMAT,
        "gpu_uuid": uuid,
        "handle": bytes(range(64)),
        "storage_nbytes": 20 * MIB,
        "storage_offset": 3072,
        "event": bytes(64),
    }
    return CudaIpcHandle(**given | others)


def refused(uuid: str = UUIDS[0]) -> str:
    """What a worker says of a handle that it cannot map."""
    with pytest.raises(MappingError) as error:
        cuda.CudaMapping(handle(uuid), None)
    return str(error.value)


# ------------------------------------------------------------------- in the trainer


def expandable(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    fake.virtual = True
    patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments : True")


def expandable_by_torch(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    fake.virtual = True
    segment = {"address": BASE, "total_size": 20 * MIB, "is_expandable": True}
    patch.setattr(torch.cuda, "memory_snapshot", lambda: [segment])


def own_allocator(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    fake.virtual = True
    # Torch's are expandable, but this one is none of torch's.
    segment = {"address": BASE, "total_size": 20 * MIB, "is_expandable": False}
    patch.setattr(torch.cuda, "memory_snapshot", lambda: [segment])
    patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def pluggable(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    def no_snapshot() -> None:
        raise RuntimeError("pluggable allocators have no snapshot")

    fake.fails["cuIpcGetMemHandle"] = "CUDA_ERROR_INVALID_VALUE"
    patch.setattr(torch.cuda, "memory_snapshot", no_snapshot)


def pool(fake: FakeDriver, _: pytest.MonkeyPatch) -> None:
    fake.pooled = True


def managed(fake: FakeDriver, _: pytest.MonkeyPatch) -> None:
    fake.managed = True


def unknown(fake: FakeDriver, _: pytest.MonkeyPatch) -> None:
    fake.allocations.clear()
    fake.fails |= {"cuPointerGetAttribute": "CUDA_ERROR_INVALID_VALUE"}


def wsl(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    fake.fails["cuIpcGetMemHandle"] = "CUDA_ERROR_NOT_SUPPORTED"
    patch.setattr(cuda_reasons, "platform", lambda: "WSL2")


def no_ipc(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    fake.ipc = False
    patch.setattr(cuda_reasons, "platform", lambda: "a Tegra (Jetson)")


Case = Callable[[FakeDriver, pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("case", "cause", "instead"),
    [
        (expandable, "expandable segments", "leave expandable_segments:True out of PYTORCH_CUDA"),
        (expandable_by_torch, "expandable segments", "leave expandable_segments:True out of"),
        (own_allocator, "an allocator of its own (a memory saver", "make it outside of that"),
        (pluggable, "another pool or allocator", "make it with torch's own allocator"),
        (pool, "a stream-ordered memory pool (cudaMallocAsync)", "leave backend:cudaMallocAsync"),
        (managed, "managed memory (cudaMallocManaged)", "make it with torch's own allocator"),
        (unknown, "another pool or allocator", "make it with torch's own allocator"),
        (wsl, "as far as is known, WSL2 has no CUDA IPC", ""),
        (no_ipc, "has no CUDA IPC on a Tegra (Jetson), says its driver", ""),
    ],
)
def test_memory_that_cannot_be_shared_is_named_with_its_cause_and_the_ways_out(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, case: Case, cause: str, instead: str
) -> None:
    case(fake, monkeypatch)
    with pytest.raises(NotSharedError) as error:
        exported((BASE, MIB))
    text = str(error.value)
    assert text.startswith("tensor 'w0' ") and f"GPU {UUIDS[0]}" in text
    assert cause in text and instead in text
    assert text.endswith('share="auto" (or "staging", "shm"), which copies it at each publish')


def test_a_device_without_ipc_is_known_before_anything_of_it_is_exported(fake: FakeDriver) -> None:
    fake.ipc = False
    with pytest.raises(NotSharedError, match="IPC_EVENT_SUPPORTED is 0"):
        exported((BASE, MIB), ordinal=1)
    assert "cuIpcGetMemHandle" not in fake.calls


def test_an_old_driver_that_does_not_say_whether_it_has_ipc_is_tried(fake: FakeDriver) -> None:
    fake.fails["cuDeviceGetAttribute"] = "CUDA_ERROR_INVALID_VALUE"
    assert len(exported((BASE, MIB))) == 1


def test_the_platform_is_read_from_the_kernel_and_the_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, board = tmp_path / "osrelease", tmp_path / "nv_tegra_release"
    monkeypatch.setattr(cuda_reasons, "_OS_RELEASE", release)
    monkeypatch.setattr(cuda_reasons, "_TEGRA_RELEASE", board)
    assert cuda_reasons.platform() == ""
    release.write_text("6.8.0-45-generic\n")
    assert cuda_reasons.platform() == ""
    board.write_text("# R36\n")
    assert "Tegra" in cuda_reasons.platform()
    release.write_text("5.15.153.1-microsoft-standard-WSL2\n")
    assert cuda_reasons.platform() == "WSL2"


def test_thousands_of_tensors_have_one_handle_for_each_allocation_whatever_its_bytes_are(
    fake: FakeDriver,
) -> None:
    fake.allocations[BASE + 64 * MIB] = 20 * MIB
    where = [(BASE + 8192 * n, 4096) for n in range(2000)]
    where += [(BASE + 64 * MIB + 8192 * n, 4096) for n in range(2000)]
    buffers = exported(*where)
    # The bytes of a handle that the driver leaves unwritten differ from call to call: it is asked once.
    assert fake.calls.count("cuIpcGetMemHandle") == len(buffers) == 2
    assert [len(buffer.entries) for buffer in buffers] == [2000, 2000]
    assert buffers[0].entries[3].offset == 3 * 8192


def test_a_handle_is_the_drivers_own_and_says_where_in_its_allocation_the_buffer_lies(
    fake: FakeDriver,
) -> None:
    (buffer,) = exported((BASE + 4096, MIB))
    made = buffer.handle
    assert isinstance(made, CudaIpcHandle)
    # 64 bytes without a version, a counter or a pointer of any release of torch.
    assert made.format_version == CUDA_FORMAT and len(made.handle) == 64
    assert made.handle[:8] == BASE.to_bytes(8, "little") and made.event == FakeOrder.handle
    assert (made.storage_offset, made.storage_nbytes, made.gpu_uuid) == (4096, 20 * MIB, UUIDS[0])


def test_a_trainer_whose_torch_makes_other_event_handles_does_not_offer_them(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeOrder, "handle", bytes(66))
    with pytest.raises(MappingError, match="event has 66 bytes, and those of format 1 have 64"):
        exported((BASE, MIB))


# ------------------------------------------------------------------- in the worker


@pytest.fixture
def mapped(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setattr(cuda, "_open_event", lambda source, handle, ordinal: None)
    yield fake


def test_a_mapping_begins_inside_the_allocation_and_is_made_by_the_workers_own_number(
    mapped: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The trainer's GPU 0 is the worker's GPU 1.
    mapped.uuids = [UUIDS[1], UUIDS[0]]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    mapping = cuda.CudaMapping(handle(UUIDS[0]), None)
    assert mapping.device == torch.device("cuda", 1)
    assert mapping.address == 0x6000_0000_0000 + 3072
    assert mapping.nbytes == 20 * MIB - 3072
    assert mapped.opened == [(0, bytes(range(64)))]


def test_an_event_is_opened_once_for_a_trainer_and_anew_for_another_with_the_same_handle(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bytes] = []

    def open_event(device: object, event: bytes) -> object:
        opened.append(event)
        return object()

    monkeypatch.setattr(cuda, "_event_from", open_event)
    monkeypatch.setattr(cuda, "_events", {})
    first, again, other = (
        cuda.CudaMapping(handle(UUIDS[0]), None, source).event
        for source in ("trainer", "trainer", "its heir, of the same pid")
    )
    assert first is again
    assert other is not first
    assert opened == [bytes(64)] * 2


def test_a_mig_instance_is_compared_by_its_own_uuid_and_no_handle_of_another_is_tried(
    mapped: FakeDriver,
) -> None:
    mapped.names = ["NVIDIA H200 MIG 1g.18gb"]
    mapped.uuids = [UUIDS[0]]
    cuda.CudaMapping(handle(UUIDS[0]), None)
    assert len(mapped.opened) == 1
    text = refused(UUIDS[2])
    assert f"memory of GPU {UUIDS[2]} cannot be mapped on MIG instance {UUIDS[0]}" in text
    assert "run trainer and worker on one instance" in text and 'share="shm"' in text
    assert len(mapped.opened) == 1


def test_gpus_without_peer_access_are_named_before_anything_is_opened(mapped: FakeDriver) -> None:
    mapped.peers = {(1, 0)}
    text = refused(UUIDS[1])
    assert f"memory of GPU {UUIDS[1]} cannot be mapped on GPU {UUIDS[0]}" in text
    assert "no peer access" in text and 'share="shm"' in text
    assert mapped.opened == []


def test_a_gpu_that_the_worker_does_not_see_is_tried_and_named_where_it_fails(
    mapped: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped.uuids = [UUIDS[0]]
    cuda.CudaMapping(handle(UUIDS[3]), None)  # The driver can do without it being seen.
    mapped.fails["cuIpcOpenMemHandle_v2"] = "CUDA_ERROR_INVALID_DEVICE"
    assert "a container hides it, say" in refused(UUIDS[3])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    text = refused(UUIDS[3])
    assert f"memory of GPU {UUIDS[3]} cannot be mapped on {UUIDS[0]}" in text
    assert "not among those that this process sees (CUDA_VISIBLE_DEVICES=1 hides it)" in text
    assert "show it to both sides" in text and 'share="shm"' in text


def test_a_handle_that_reads_as_ones_own_is_of_another_pid_namespace(mapped: FakeDriver) -> None:
    mapped.fails["cuIpcOpenMemHandle_v2"] = "CUDA_ERROR_INVALID_CONTEXT"
    text = refused()
    assert "CUDA_ERROR_INVALID_CONTEXT" in text and "different PID namespaces" in text
    assert "--pid=host --ipc=host" in text


@pytest.mark.parametrize("inode", [5, 0xEFFFFFFC])
def test_a_handle_that_is_not_known_may_be_freed_or_of_another_container(
    mapped: FakeDriver, monkeypatch: pytest.MonkeyPatch, inode: int
) -> None:
    monkeypatch.setattr(cuda_reasons, "_FIRST_NAMESPACES", {"pid": own_inode() if inode > 5 else 5})
    mapped.fails["cuIpcOpenMemHandle_v2"] = "CUDA_ERROR_INVALID_VALUE"
    text = refused()
    assert "the trainer may have freed it or have ended" in text
    ours = "this process is in PID namespaces of a container, which the trainer may not share"
    assert (ours in text) == (inode == 5)
    assert "--pid=host --ipc=host" in text and 'share="shm"' in text


def own_inode() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def test_a_platform_without_ipc_is_named_by_the_worker_as_well(
    mapped: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_reasons, "platform", lambda: "WSL2")
    mapped.fails["cuIpcOpenMemHandle_v2"] = "CUDA_ERROR_INVALID_HANDLE"
    assert "CUDA_ERROR_INVALID_HANDLE): as far as is known, WSL2 has no CUDA IPC" in refused()


def test_a_gpu_without_room_for_a_mapping_is_named_with_what_is_free(mapped: FakeDriver) -> None:
    mapped.fails["cuIpcOpenMemHandle_v2"] = "CUDA_ERROR_OUT_OF_MEMORY"
    text = refused()
    assert "no room for the mapping on that GPU, of whose 96.0 MiB 3.0 MiB are free" in text
    assert "let the engine take less" in text


def test_what_the_driver_calls_an_error_is_what_is_raised(fake: FakeDriver) -> None:
    fake.fails["cuDeviceGetName"] = "CUDA_ERROR_NO_DEVICE"
    with pytest.raises(CudaError, match="cuDeviceGetName: CUDA_ERROR_NO_DEVICE"):
        cuda_driver.name_of(0)
