"""Whether GPU memory is that of before: by a driver, and a torch, that answer as a test says."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tensorlease.agents.cuda_driver import CudaError, Extent

torch = pytest.importorskip("torch")
still_there = pytest.importorskip("tensorlease.agents.still_there")

SIZE = 1000


class Memory:
    """Allocations of 1000 bytes each, at multiples of 1000; those below 10,000 are torch's."""

    def __init__(self) -> None:
        self.numbers = {place * SIZE: 100 + place for place in range(1, 20)}
        self.virtual: set[int] = set()
        self.pooled: set[int] = set()
        self.asked: list[int] = []
        self.allocated = self.given_back = 0
        self.counts = True

    def address_range(self, _: int, address: int) -> Extent:
        return Extent(address // SIZE * SIZE, SIZE)

    def buffer_id(self, address: int) -> int:
        begin = address // SIZE * SIZE
        self.asked.append(begin)
        if begin not in self.numbers:
            raise CudaError("cuPointerGetAttribute", "CUDA_ERROR_INVALID_VALUE")
        return self.numbers[begin]

    def stats(self, _: int) -> dict[str, Any]:
        if not self.counts:
            return {}
        return {"num_device_alloc": self.allocated, "num_device_free": self.given_back}

    def snapshot(self) -> list[dict[str, Any]]:
        return [
            {"address": begin, "total_size": SIZE, "device": 0}
            for begin in self.numbers
            if begin < 10 * SIZE
        ]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    found = Memory()
    driver = still_there.driver
    monkeypatch.setattr(driver, "context", lambda _: nullcontext())
    monkeypatch.setattr(driver, "address_range", found.address_range)
    monkeypatch.setattr(driver, "buffer_id", found.buffer_id)
    monkeypatch.setattr(driver, "is_virtual", lambda _, at: at // SIZE * SIZE in found.virtual)
    monkeypatch.setattr(driver, "is_pooled", lambda _, at: at // SIZE * SIZE in found.pooled)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", found.stats)
    monkeypatch.setattr(still_there, "_snapshot", found.snapshot)
    still_there._known().clear()
    return found


def test_while_torch_gives_nothing_back_only_memory_of_others_is_asked_for(memory: Memory) -> None:
    there = still_there.StillThere(0, [1001, 1500, 2000, 12_345])
    memory.asked.clear()
    assert there.holds()
    assert memory.asked == [12_000]


@pytest.mark.parametrize("counts", [True, False])
def test_other_memory_at_the_same_address_is_noticed(memory: Memory, counts: bool) -> None:
    memory.counts = counts
    there = still_there.StillThere(0, [1001, 2000])
    memory.given_back += 1
    assert there.holds()  # It was something else.
    memory.given_back += 1
    memory.numbers[2000] = 777
    assert not there.holds()


def test_memory_of_others_that_was_exchanged_is_noticed(memory: Memory) -> None:
    there = still_there.StillThere(0, [1001, 12_345])
    memory.numbers[12_000] = 777
    assert not there.holds()


def test_memory_that_is_gone_is_noticed(memory: Memory) -> None:
    there = still_there.StillThere(0, [12_345])
    del memory.numbers[12_000]
    assert not there.holds()


@pytest.mark.parametrize("kind", ["virtual", "pooled"])
def test_memory_that_is_exchanged_without_a_sign_is_refused(memory: Memory, kind: str) -> None:
    getattr(memory, kind).add(2000)
    with pytest.raises(CudaError, match="mapped anew"):
        still_there.StillThere(0, [1001, 2500])


def test_segments_that_torch_has_got_meanwhile_are_its_own(memory: Memory) -> None:
    still_there.StillThere(0, [1001])
    memory.numbers[500_000] = 1
    memory.snapshot = lambda: [  # type: ignore[method-assign]
        {"address": 500_000, "total_size": SIZE, "device": 0}
    ]
    still_there._snapshot = memory.snapshot
    memory.allocated += 1
    there = still_there.StillThere(0, [500_100])
    memory.asked.clear()
    assert there.holds()
    assert memory.asked == []
