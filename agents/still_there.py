"""Whether GPU memory is still the memory that it was, and not other memory at the same address.

What was captured as a graph counts for the memory of then alone: an engine that sleeps gives its
weights' memory back, and may get other memory at the same addresses. The driver has a number for each
allocation, but to ask it for hundreds of them takes as long as the copies; what torch has given back
to the driver it counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from . import cuda_driver as driver
from .cuda_driver import CudaError

# What torch's stubs do not say.
_snapshot: Final[Callable[[], list[dict[str, Any]]]] = torch.cuda.memory_snapshot


class StillThere:
    """The allocations that some addresses lie in, as they are now.

    Args:
        ordinal: The device.
        addresses: Of its memory.

    Raises:
        CudaError: One of them is of memory that may be exchanged without a sign: virtual memory, or
            that of a pool.
    """

    def __init__(self, ordinal: int, addresses: Iterable[int]) -> None:
        self._ordinal: Final = ordinal
        self._given_back = _given_back(ordinal)
        ours = _torchs(ordinal)
        # An address in each allocation, and the driver's number for that; and those not of torch.
        self._numbers: dict[int, int] = {}
        self._others: dict[int, int] = {}
        end = 0
        with driver.context(ordinal):
            for address in sorted(addresses):
                if address < end:
                    continue
                extent = driver.address_range(ordinal, address)
                end = extent.address + extent.nbytes
                if driver.is_virtual(ordinal, address) or driver.is_pooled(ordinal, address):
                    raise CudaError("cuPointerGetAttribute", "memory that is mapped anew")
                self._numbers[address] = driver.buffer_id(address)
                if not ours.have(address):
                    self._others[address] = self._numbers[address]

    def holds(self) -> bool:
        """Whether they are what they were."""
        given_back = _given_back(self._ordinal)
        same = given_back is not None and given_back == self._given_back
        if not _are(self._ordinal, self._others if same else self._numbers):
            return False
        self._given_back = given_back
        return True


def _are(ordinal: int, numbers: dict[int, int]) -> bool:
    if not numbers:
        return True
    with driver.context(ordinal):
        try:
            return all(driver.buffer_id(address) == number for address, number in numbers.items())
        except CudaError:
            return False  # Something was given back, and nothing else is there.


def _given_back(ordinal: int) -> int | None:
    """Returns how often torch has given memory of a device back to the driver; None: it is not told."""
    count = torch.cuda.memory_stats_as_nested_dict(ordinal).get("num_device_free")
    return count if isinstance(count, int) else None


class _Segments(NamedTuple):
    """What torch has of the driver: where each segment begins, and ends, in order."""

    begins: list[int]
    ends: list[int]

    def have(self, address: int) -> bool:
        place = bisect_right(self.begins, address) - 1
        return place >= 0 and address < self.ends[place]


def _torchs(ordinal: int) -> _Segments:
    stats = torch.cuda.memory_stats_as_nested_dict(ordinal)
    counts = stats.get("num_device_alloc"), stats.get("num_device_free")
    if None in counts:
        return _Segments([], [])
    known = _known()
    if ordinal not in known or known[ordinal][0] != counts:
        segments = sorted(
            (each["address"], each["address"] + each["total_size"])
            for each in _snapshot()
            if each["device"] == ordinal
        )
        found = _Segments([begin for begin, _ in segments], [end for _, end in segments])
        known[ordinal] = (counts, found)
    return known[ordinal][1]


@cache
def _known() -> dict[int, tuple[tuple[object, object], _Segments]]:
    """The segments of each device, and the counts for which they are right."""
    return {}
