"""Copies between addresses of GPU memory, done again each round: as a graph of the CUDA driver.

The first time they are issued one by one; the second time that is captured, over several streams,
and every further time one call to the driver does all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Final, NamedTuple

import torch

from . import cuda_driver as driver
from .copying import Run, as_one
from .cuda_driver import CudaError, Graph
from .still_there import StillThere

LANES: Final = 8
"""Streams that share the copies."""


# What torch's stubs do not say.
_make_event: Final[Callable[[], torch.cuda.Event]] = torch.cuda.Event


class DeviceRuns:
    """Runs of bytes of GPU memory that are copied again and again.

    Args:
        ordinal: The device that copies.
        runs: Addresses that it can reach; neighbours are copied as one within an allocation.
        sources_stay: The memory that is read is the same as long as this is used.
    """

    def __init__(self, ordinal: int, runs: Sequence[Run], *, sources_stay: bool = False) -> None:
        self._ordinal = ordinal
        self._sources_stay = sources_stay
        self._lanes = _shared_out(_joined(ordinal, runs))
        self._times = 0
        # What cannot be captured is issued one by one each time.
        self._graph: Graph | None = None
        # The memory that the graph copies in.
        self._memory: StillThere | None = None

    def begin(self) -> torch.cuda.Event:
        """Copies every run, after what this thread's current stream was told; returns its end."""
        lock, (main, *_) = _lanes(self._ordinal)
        with lock:
            _follow(self._ordinal, main)
            try:
                self.issue()
                event = _make_event()
                event.record(main)
            except BaseException:
                # Nobody could wait for what was issued.
                with driver.context(self._ordinal):
                    driver.synchronize(main.cuda_stream)
                raise
        return event

    def prepare(self) -> None:
        """Captures now what else would be captured at the second time."""
        lock, (main, *_) = _lanes(self._ordinal)
        with lock, driver.context(self._ordinal):
            if self._times == 0:
                self._times, self._graph = 2, self._captured(main)

    def issue(self) -> None:
        """Copies every run, in the order of the device's first lane; see `lane`."""
        main = _lanes(self._ordinal).streams[0]
        with driver.context(self._ordinal):
            if self._memory is not None and not self._memory.holds():
                self._graph, self._memory, self._times = None, None, 0
            self._times += 1
            if self._times == 2:
                self._graph = self._captured(main)
            if self._graph is not None:
                self._graph.launch(main.cuda_stream)
            else:
                self._issue(main)

    def _captured(self, main: torch.cuda.Stream) -> Graph | None:
        try:
            runs = [run for lane in self._lanes for run in lane]
            watched = [run.target for run in runs]
            watched += [] if self._sources_stay else [run.source for run in runs]
            self._memory = StillThere(self._ordinal, watched)
            with driver.captured(self._ordinal, main.cuda_stream) as capture:
                self._issue(main)
        except (CudaError, RuntimeError):
            return None
        return capture.graph

    def _issue(self, main: torch.cuda.Stream) -> None:
        used = _lanes(self._ordinal).streams[: len(self._lanes)]
        for stream in used[1:]:
            stream.wait_stream(main)
        try:
            for stream, runs in zip(used, self._lanes, strict=True):
                at = stream.cuda_stream
                for target, source, nbytes in runs:
                    driver.copy_async(target, source, nbytes, at)
        finally:  # Also what was issued before one of them failed ends before the first lane does.
            for stream in used[1:]:
                main.wait_stream(stream)


def copy_now(ordinal: int, run: Run) -> None:
    """Copies a run in the order of this thread's current stream."""
    stream = _current_stream(ordinal)
    with driver.context(ordinal):
        driver.copy_async(run.target, run.source, run.nbytes, stream)


def _current_stream(ordinal: int) -> int:
    """Returns this thread's current stream, without making an object of it where torch can."""
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return torch.cuda.current_stream(ordinal).cuda_stream if raw is None else raw(ordinal)


class _Lanes(NamedTuple):
    """The streams on which this process copies on a device."""

    lock: Lock
    """Held by the thread that uses them: what others told them would be captured, too."""
    streams: list[torch.cuda.Stream]


@cache
def _lanes(ordinal: int) -> _Lanes:
    make: Callable[..., torch.cuda.Stream] = torch.cuda.ExternalStream
    device = torch.device("cuda", ordinal)
    return _Lanes(Lock(), [make(driver.new_stream(ordinal), device) for _ in range(LANES)])


@contextmanager
def lane(ordinal: int, *, for_torch: bool = True) -> Iterator[None]:
    """When the block ends, all that the device's first lane was told in it was done.

    It begins after what this thread's current stream was told before. Others who copy on the device
    wait for the block's end.

    Args:
        ordinal: The device.
        for_torch: The lane is the current stream of the block, for what torch is to do there.
    """
    lock, (main, *_) = _lanes(ordinal)
    with lock:
        _follow(ordinal, main)
        try:
            if for_torch:
                with torch.cuda.device(ordinal), torch.cuda.stream(main):
                    yield
            else:
                yield
        finally:
            with driver.context(ordinal):
                driver.synchronize(main.cuda_stream)


def _follow(ordinal: int, stream: torch.cuda.Stream) -> None:
    """Has a stream wait for what this thread's current stream was told."""
    with driver.context(ordinal):
        idle = driver.is_idle(_current_stream(ordinal))
    if not idle:
        stream.wait_stream(torch.cuda.current_stream(ordinal))


def _joined(ordinal: int, runs: Sequence[Run]) -> list[Run]:
    """Joins each run with the one before where both sides go on in the same allocation."""
    joined: list[Run] = []
    # Where the allocations of the last one end: asked when it matters.
    ends: tuple[int, int] | None = None
    for run in runs:
        if joined and (one := as_one(joined[-1], run)):
            if ends is None:
                ends = _end_of(ordinal, one.target), _end_of(ordinal, one.source)
            if run.target < ends[0] and run.source < ends[1]:
                joined[-1] = one
                continue
        joined.append(run)
        ends = None
    return joined


def _end_of(ordinal: int, address: int) -> int:
    """Returns where the allocation of an address ends; 0: that is not known."""
    try:
        extent = driver.address_range(ordinal, address)
    except CudaError:
        return 0
    return extent.address + extent.nbytes


def _shared_out(runs: Sequence[Run]) -> list[list[Run]]:
    """Shares the runs out among the lanes, by bytes."""
    count = max(1, min(LANES, len(runs)))
    shares: list[list[Run]] = [[] for _ in range(count)]
    loads = [0] * count
    for run in sorted(runs, key=lambda run: -run.nbytes):
        least = loads.index(min(loads))
        shares[least].append(run)
        loads[least] += run.nbytes
    return shares
