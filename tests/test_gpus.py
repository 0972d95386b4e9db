"""What `tensorlease doctor` says of GPUs and CUDA IPC, by a driver that answers as a test says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorlease.agents import cuda_driver as driver
from tensorlease.agents import cuda_reasons
from tensorlease.commands import gpus
from tensorlease.commands.findings import Finding, Level

from .agents.fake_cuda import UUIDS, FakeDriver, take_place


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    take_place(made, monkeypatch)
    monkeypatch.setattr(cuda_reasons, "platform", lambda: "")
    monkeypatch.setattr(cuda_reasons, "namespaces", lambda: "")
    return made


def found() -> dict[str, Finding]:
    return {finding.name: finding for finding in gpus.findings(gpus.look())}


def test_gpus_are_named_by_uuid_with_their_driver_ipc_and_peer_access(fake: FakeDriver) -> None:
    said = found()
    assert [each.level for each in said.values()] == [Level.OK] * 4
    both = f"cuda:0 NVIDIA H200 ({UUIDS[0]}), cuda:1 NVIDIA H200 ({UUIDS[1]})"
    assert said["GPUs"].text == f"{both}; driver of CUDA 13.1"
    assert said["CUDA IPC"].text == "the driver has it"
    assert said["peer access"].text == "each of the 2 GPUs reads each other"
    assert "cuCtxPushCurrent_v2" not in fake.calls  # A context takes memory of the device.


def without_ipc(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    fake.ipc = False
    patch.setattr(cuda_reasons, "platform", lambda: "a Tegra (Jetson)")


def on_wsl(_: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_reasons, "platform", lambda: "WSL2")


def mig(fake: FakeDriver, _: pytest.MonkeyPatch) -> None:
    fake.uuids, fake.names = [UUIDS[2]], ["NVIDIA H200 MIG 1g.18gb"]


def no_peers(fake: FakeDriver, _: pytest.MonkeyPatch) -> None:
    fake.peers = {(0, 1)}


def expandable(_: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@pytest.mark.parametrize(
    ("case", "name", "text", "way_out"),
    [
        (without_ipc, "CUDA IPC", "cuda:0, cuda:1 without it on a Tegra (Jetson)", 'share="shm"'),
        (on_wsl, "CUDA IPC", "as far as is known, WSL2 has none", 'share="shm"'),
        (mig, "CUDA IPC", "cuda:0 is a MIG instance", "trainer and worker on one instance"),
        (no_peers, "peer access", "none from cuda:1 to cuda:0", "workers on their trainer's GPU"),
        (expandable, "allocator", "expandable segments are on", "PYTORCH_CUDA_ALLOC_CONF and"),
    ],
)
def test_what_stands_in_the_way_of_ipc_is_a_warning_with_the_way_out(
    fake: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    case: Callable[[FakeDriver, pytest.MonkeyPatch], None],
    name: str,
    text: str,
    way_out: str,
) -> None:
    case(fake, monkeypatch)
    said = found()
    assert said.pop(name).level is Level.WARN
    assert all(each.level is Level.OK for each in said.values())
    finding = found()[name]
    assert text in finding.text and way_out in finding.way_out


def test_an_old_driver_does_not_say_whether_it_has_ipc(fake: FakeDriver) -> None:
    fake.fails["cuDeviceGetAttribute"] = "CUDA_ERROR_INVALID_VALUE"
    assert found()["CUDA IPC"].text.startswith("the driver does not say")


def test_a_container_is_said_since_both_sides_must_be_in_the_same(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_reasons, "namespaces", lambda: "this process is in PID namespaces")
    text = found()["CUDA IPC"].text
    assert (
        text
        == "the driver has it; this process is in PID namespaces: trainer and worker need the same"
    )


def no_library() -> None:
    raise driver.CudaError("libcuda.so.1", "cannot open shared object file")


def without_library(_: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(driver, "_library", no_library)


def no_device(fake: FakeDriver, _: pytest.MonkeyPatch) -> None:
    fake.fails["cuInit"] = "CUDA_ERROR_NO_DEVICE"


def hidden(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    fake.uuids = []
    patch.setenv("CUDA_VISIBLE_DEVICES", "")


def torch_without_cuda(_: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gpus, "_torch_has_cuda", lambda: False)


@pytest.mark.parametrize(
    ("case", "lacking"),
    [
        (without_library, "(libcuda.so.1: cannot open shared object file)"),
        (no_device, "(cuInit: CUDA_ERROR_NO_DEVICE)"),
        (hidden, "(the driver (CUDA 13.1) has no device for this process; CUDA_VISIBLE_DEVICES is"),
        (torch_without_cuda, "cannot use the 2 of the driver)"),
    ],
)
def test_without_a_gpu_it_is_said_what_is_missing(
    fake: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    case: Callable[[FakeDriver, pytest.MonkeyPatch], None],
    lacking: str,
) -> None:
    case(fake, monkeypatch)
    said = found()
    assert list(said) == ["GPUs"] and said["GPUs"].level is Level.OK
    assert said["GPUs"].text.startswith("torch sees none: tensors go through shared memory (")
    assert lacking in said["GPUs"].text
