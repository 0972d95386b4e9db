"""A CUDA driver that answers as a test says: its library, in place of libcuda.so.1."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorlease.agents import cuda, cuda_reasons
from tensorlease.agents import cuda_driver as driver

CODES = {
    "CUDA_ERROR_INVALID_VALUE": 1,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_NO_DEVICE": 100,
    "CUDA_ERROR_INVALID_DEVICE": 101,
    "CUDA_ERROR_INVALID_CONTEXT": 201,
    "CUDA_ERROR_MAP_FAILED": 205,
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": 217,
    "CUDA_ERROR_INVALID_HANDLE": 400,
    "CUDA_ERROR_NOT_SUPPORTED": 801,
}
"""As in cuda.h."""
UUIDS = tuple(f"0a1b2c3d-0000-1111-2222-00000000000{n}" for n in range(4))
ROOM = (3 * 2**20, 96 * 2**20)


class FakeDriver:
    """Two GPUs that can reach each other; every call succeeds but for what `fails` has.

    Attributes:
        fails: The error by the name of the function.
        uuids: Of the devices that the process sees, in the order of their numbers.
        names: What they are called.
        peers: Pairs of numbers that have peer access; None: all.
        ipc: Whether they have CUDA IPC.
        managed, pooled, virtual: What the memory that is asked for is.
        allocations: Address and size of each allocation that there is.
        calls: The name of each function that was called, in order.
    """

    def __init__(self) -> None:
        self.fails: dict[str, str] = {}
        self.uuids = list(UUIDS[:2])
        self.names = ["NVIDIA H200", "NVIDIA H200"]
        self.peers: set[tuple[int, int]] | None = None
        self.ipc = True
        self.managed = False
        self.pooled = False
        self.virtual = False
        self.allocations: dict[int, int] = {}
        self.opened: list[tuple[int, bytes]] = []
        self.calls: list[str] = []
        self._addresses = itertools.count(0x7F00_0000_0000, 2**32)

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        answer = getattr(type(self), f"_{name}", None)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.fails:
                return CODES[self.fails[name]]
            values = [getattr(each, "_obj", each) for each in arguments]
            return 0 if answer is None else int(answer(self, *values) or 0)

        return call

    def _cuGetErrorName(self, code: Any, text: Any) -> None:
        names = {number: name for name, number in CODES.items()}
        text.value = names[code.value].encode()

    def _cuDeviceGet(self, device: Any, ordinal: Any) -> None:
        device.value = ordinal.value

    def _cuDeviceGetCount(self, count: Any) -> None:
        count.value = len(self.uuids)

    def _cuDriverGetVersion(self, version: Any) -> None:
        version.value = 13010

    def _cuDeviceGetName(self, text: Any, _: Any, device: Any) -> None:
        text.value = self.names[device.value].encode()

    def _cuDeviceGetUuid_v2(self, raw: Any, device: Any) -> None:
        raw[:] = bytes.fromhex(self.uuids[device.value].replace("-", ""))

    def _cuDeviceGetAttribute(self, value: Any, attribute: Any, _: Any) -> None:
        assert attribute.value == 125
        value.value = self.ipc

    def _cuDeviceCanAccessPeer(self, value: Any, device: Any, other: Any) -> None:
        value.value = self.peers is None or (device.value, other.value) in self.peers

    def _cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        free.value, total.value = ROOM

    def _cuMemGetAddressRange_v2(self, base: Any, nbytes: Any, address: Any) -> int:
        for begin, size in self.allocations.items():
            if begin <= address.value < begin + size:
                base.value, nbytes.value = begin, size
                return 0
        return CODES["CUDA_ERROR_INVALID_VALUE"]

    def _cuMemAlloc_v2(self, address: Any, nbytes: Any) -> None:
        address.value = next(self._addresses)
        self.allocations[address.value] = nbytes.value

    def _cuMemFree_v2(self, address: Any) -> None:
        del self.allocations[address.value]

    def _cuPointerGetAttribute(self, value: Any, attribute: Any, _: Any) -> None:
        if attribute.value == 8:
            value.value = self.managed
        elif self.pooled:
            value.value = 0x1000

    def _cuMemRetainAllocationHandle(self, handle: Any, _: Any) -> int:
        handle.value = 7
        return 0 if self.virtual else CODES["CUDA_ERROR_INVALID_VALUE"]

    def _cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        if self.virtual or self.pooled or self.managed or address.value not in self.allocations:
            return CODES["CUDA_ERROR_INVALID_VALUE"]
        # The driver leaves some of the bytes as they were: two handles of one allocation differ.
        handle.reserved[:] = address.value.to_bytes(8, "little") + os.urandom(56)
        return 0

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> None:
        assert flags.value == 1
        self.opened.append((len(self.opened), bytes(handle.reserved)))
        address.value = 0x6000_0000_0000


class FakeStorage:
    """A storage of so many bytes at an address of a GPU."""

    def __init__(self, address: int, nbytes: int, ordinal: int = 0, keep: object = None) -> None:
        self.device = torch.device("cuda", ordinal)
        self.keep = keep
        self._address, self._nbytes = address, nbytes

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._nbytes


class FakeOrder:
    """What stands for the event of a process on a device."""

    handle = bytes(range(64))
    records = 0

    def record(self) -> None:
        self.records += 1


def take_place(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's library is the fake until the test has ended, and torch has CUDA."""
    monkeypatch.setattr(driver, "_library", lambda: fake)
    monkeypatch.setattr(driver, "_primary", lambda ordinal: ctypes.c_void_p(ordinal + 1))
    monkeypatch.setattr(cuda, "uuid_of", driver.uuid_of)
    monkeypatch.setattr(cuda, "_orders", {0: FakeOrder(), 1: FakeOrder()})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    for name in (*cuda_reasons.ALLOCATOR_VARIABLES, cuda_reasons.VISIBLE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
