"""Copies on GPUs: how they are shared out, and what is said where there is no driver."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from threading import Lock
from typing import Any

import pytest

from tensorlease.agents import cuda_driver
from tensorlease.agents.copying import Run
from tensorlease.agents.cuda_driver import CudaError, Extent

torch = pytest.importorskip("torch")

from tensorlease.agents import device_copies
from tensorlease.agents.device_copies import LANES, DeviceRuns, _joined, _Lanes, _shared_out

from .fake_cuda import CODES, FakeDriver, take_place


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 100])
def test_each_copy_is_made_once_and_no_lane_has_much_more_than_another(count: int) -> None:
    runs = [Run(target, target + 10**6, 1000 + 37 * target % 900) for target in range(count)]
    lanes = _shared_out(runs)
    assert sorted(run for lane in lanes for run in lane) == sorted(runs)
    assert len(lanes) == max(1, min(LANES, count))
    loads = [sum(run.nbytes for run in lane) for lane in lanes]
    assert max(loads) - min(loads) <= max((run.nbytes for run in runs), default=0)


def test_neighbours_are_one_copy_within_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def address_range(ordinal: int, address: int) -> Extent:
        if address >= 9000:
            raise CudaError("cuMemGetAddressRange", "CUDA_ERROR_NOT_FOUND")
        return Extent(address // 100 * 100, 100)

    monkeypatch.setattr(cuda_driver, "address_range", address_range)
    # The third begins another allocation that is read, the fifth one that is written; the sixth
    # does not go on where the fifth ends; of the last ones it is not known.
    sources = [1070, 1080, 1100, 1110, 1120, 1130, 9000, 9010]
    targets = [0, 10, 30, 90, 100, 120, 2000, 2010]
    runs = [Run(*ends, 10) for ends in zip(targets, sources, strict=True)]
    runs[1] = Run(10, 1080, 20)
    joined = _joined(0, runs)
    assert joined == [Run(0, 1070, 30), *runs[2:]]
    ends = [Run(0, 1000, 10), Run(10, 1010, 10), Run(20, 1020, 10)]
    assert _joined(0, ends) == [Run(0, 1000, 30)]


def test_without_a_driver_its_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libcuda-is-not-here.so")
    cuda_driver._library.cache_clear()
    with pytest.raises(CudaError, match=r"libcuda-is-not-here\.so: .*cannot open shared object"):
        cuda_driver.uuid_of(0)
    cuda_driver._library.cache_clear()


class Stream:
    """A stream that notes whom it was told to wait for."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.awaited: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.awaited.append(other.cuda_stream)


def test_what_was_issued_before_a_copy_failed_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams: list[Any] = [Stream(number) for number in range(LANES)]
    issued: list[int] = []
    synchronized: list[tuple[int, list[int]]] = []

    def copy(target: int, source: int, nbytes: int, stream: int) -> None:
        if stream == LANES - 1:
            raise CudaError("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE")
        issued.append(stream)

    def synchronize(stream: int) -> None:
        synchronized.append((stream, list(streams[stream].awaited)))

    monkeypatch.setattr(device_copies, "_lanes", lambda ordinal: _Lanes(Lock(), streams))
    monkeypatch.setattr(device_copies, "_follow", lambda ordinal, stream: None)
    monkeypatch.setattr(cuda_driver, "context", lambda ordinal: nullcontext())
    monkeypatch.setattr(cuda_driver, "copy_async", copy)
    monkeypatch.setattr(cuda_driver, "synchronize", synchronize)
    runs = DeviceRuns(0, [Run(10 * place, 1000 + 10 * place, 10) for place in range(LANES)])
    with pytest.raises(CudaError):
        runs.begin()
    assert issued == list(range(LANES - 1))
    assert synchronized == [(0, list(range(1, LANES)))]


def test_copies_that_were_prepared_are_a_graph_from_the_first_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    class Graph:
        def launch(self, stream: int) -> None:
            done.append("launch")

    def captured(self: DeviceRuns, main: object) -> Graph:
        done.append("capture")
        return Graph()

    streams: list[Any] = [Stream(number) for number in range(LANES)]
    monkeypatch.setattr(device_copies, "_lanes", lambda ordinal: _Lanes(Lock(), streams))
    monkeypatch.setattr(cuda_driver, "context", lambda ordinal: nullcontext())
    monkeypatch.setattr(cuda_driver, "copy_async", lambda *_: done.append("copy"))
    monkeypatch.setattr(DeviceRuns, "_captured", captured)
    prepared, plain = DeviceRuns(0, [Run(0, 10, 5)]), DeviceRuns(0, [Run(0, 10, 5)])
    prepared.prepare()
    for runs in (prepared, plain):
        for _ in range(3):
            runs.issue()
        done.append("next")
    first = ["capture", "launch", "launch", "launch", "next"]
    assert done == [*first, "copy", "capture", "launch", "launch", "next"]


class CopyingDriver(FakeDriver):
    """Copies in the host's memory; what is captured it does at each launch.

    Attributes:
        refuses: The function of a capture that fails; empty: none.
        copied: How many copies were made, by a launch or one by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refuses = ""
        self.copied = 0
        self._capturing = False
        self._graph: list[tuple[int, int, int]] = []

    def _answer(self, name: str) -> int:
        return CODES["CUDA_ERROR_INVALID_VALUE"] if name == self.refuses else 0

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)
        self.copied += 1

    def _cuMemcpyDtoDAsync_v2(self, target: int, source: int, nbytes: int, _: int) -> int:
        if not self._capturing:
            self._copy(target, source, nbytes)
            return 0
        self._graph.append((target, source, nbytes))
        return self._answer("cuMemcpyDtoDAsync_v2")

    def _cuStreamBeginCapture_v2(self, stream: Any, mode: Any) -> int:
        code = self._answer("cuStreamBeginCapture_v2")
        self._capturing = not code
        return code

    def _cuStreamEndCapture(self, stream: Any, graph: Any) -> int:
        self._capturing = False
        return self._answer("cuStreamEndCapture")

    def _cuGraphInstantiateWithFlags(self, made: Any, graph: Any, flags: Any) -> int:
        made.value = 7
        return self._answer("cuGraphInstantiateWithFlags")

    def _cuGraphLaunch(self, graph: Any, stream: Any) -> None:
        for run in self._graph:
            self._copy(*run)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> CopyingDriver:
    fake = CopyingDriver()
    take_place(fake, monkeypatch)
    streams: list[Any] = [Stream(number) for number in range(LANES)]
    monkeypatch.setattr(device_copies, "_lanes", lambda ordinal: _Lanes(Lock(), streams))
    monkeypatch.setattr(cuda_driver, "_copy_function", lambda: fake.cuMemcpyDtoDAsync_v2)
    return fake


def rounds_of(driver: CopyingDriver, count: int) -> list[list[str]]:
    """Copies three tensors in so many rounds; returns which functions of graphs each has called."""
    sent = [torch.zeros(100 + place, dtype=torch.uint8) for place in range(3)]
    held = [torch.zeros_like(tensor) for tensor in sent]
    driver.allocations = {tensor.data_ptr(): tensor.nbytes for tensor in (*sent, *held)}
    ends = zip(held, sent, strict=True)
    runs = DeviceRuns(0, [Run(t.data_ptr(), s.data_ptr(), s.nbytes) for t, s in ends])
    called: list[list[str]] = []
    for number in range(1, count + 1):
        for place, tensor in enumerate(sent):
            tensor.fill_(10 * number + place)
        driver.calls.clear()
        driver.copied = 0
        runs.issue()
        assert driver.copied == 3
        assert all(map(torch.equal, held, sent))
        called.append([name for name in driver.calls if "Capture" in name or "Graph" in name])
    return called


def test_what_is_captured_at_the_second_time_is_one_call_from_then_on(
    driver: CopyingDriver,
) -> None:
    capture = ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"]
    launch = ["cuGraphLaunch"]
    first, second, *later = rounds_of(driver, 4)
    assert first == []
    assert second == [*capture, "cuGraphDestroy", *launch]
    assert later == [launch, launch]


@pytest.mark.parametrize(
    "refuses",
    [
        "memory",
        "cuStreamBeginCapture_v2",
        "cuMemcpyDtoDAsync_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
    ],
)
def test_what_cannot_be_captured_is_tried_once_and_copied_one_by_one_each_time(
    driver: CopyingDriver, refuses: str
) -> None:
    driver.refuses = refuses
    driver.virtual = refuses == "memory"  # Nobody would see that it is exchanged.
    first, second, *later = rounds_of(driver, 5)
    assert first == []
    assert second.count("cuStreamBeginCapture_v2") == (refuses != "memory")
    assert "cuGraphLaunch" not in second
    assert later == [[], [], []]
