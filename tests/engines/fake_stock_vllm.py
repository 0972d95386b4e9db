"""A stock vLLM server as `FakeVLLM` is one with our backend: with vLLM's own backend `ipc`.

Bodies are checked, split, looked up by GPU and refused as vLLM 0.32 and 0.33 do; what torch and
the driver would do with a handle is done with segments of shared memory that pass for memory of a
GPU (`passing_for_gpu`). Only here is a pickle read, and only of the few names that one may have.
"""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from tensorlease.agents.shm import ShmMapping, ShmSegment
from tensorlease.engines.vllm_wire import HANDLE_PREFIX
from tensorlease.protocol.handles import CUDA_FORMAT, CudaIpcHandle, ShmHandle

from ..agents.fake_cuda import UUIDS
from .fake_vllm import FakeVLLM, Gate, Refused

EVENT = bytes(range(64))
SIGNATURE = (
    (type,),
    (torch.Size,),
    (tuple,),
    (int,),
    (type,),
    (torch.dtype,),
    (int,),
    (bytes, type(None)),
    (int,),
    (int,),
    (bool,),
    (bytes,),
    (int,),
    (bytes,),
    (bool,),
)
"""The types of what `rebuild_cuda_tensor` is called with."""
ALLOWED = {("torch", "Tensor"), ("torch", "Size"), ("torch.storage", "TypedStorage")}


class Segments:
    """The segments that pass for memory of a GPU, by the handles under which they do."""

    def __init__(self) -> None:
        self.found: dict[bytes, ShmHandle] = {}
        self.directories: dict[bytes, Any] = {}
        # The GPU of each trainer, by its instance; else the first.
        self.gpus: dict[str, str] = {}

    def passing(self, segment: ShmSegment) -> CudaIpcHandle:
        """Returns the handle under which a segment passes for memory of a GPU."""
        real = segment._handle
        raw = hashlib.sha512(real.name.encode()).digest()
        self.found[raw], self.directories[raw] = real, segment._path.parent
        gpu = self.gpus.get(real.owner.instance, UUIDS[0])
        return CudaIpcHandle(CUDA_FORMAT, gpu, raw, real.nbytes, 0, EVENT)

    def open(self, raw: bytes) -> ShmMapping:
        """Maps what a handle stands for."""
        return ShmMapping(self.directories[raw], self.found[raw])


def passing_for_gpu(monkeypatch: pytest.MonkeyPatch) -> Segments:
    """Has trainers of this process offer their shared memory as if it were that of a GPU."""
    segments = Segments()
    monkeypatch.setattr(ShmSegment, "handle", property(segments.passing))
    return segments


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a handle")


def unpickled(text: str) -> Any:
    """Returns handles as they were pickled, if there is nothing else in them."""
    return _Unpickler(io.BytesIO(base64.b64decode(text))).load()


def parsed(info: dict[str, Any]) -> dict[str, Any]:
    """Returns an `update_info` with its handles, or raises as vLLM's own class does."""
    known = {"names", "dtype_names", "shapes", "ipc_handles_pickled", "tensor_sizes"}
    if extra := info.keys() - known:
        raise ValueError(f"got an unexpected keyword argument '{min(extra)}'")
    if lacking := {"names", "dtype_names", "shapes"} - info.keys():
        raise ValueError(f"missing a required argument: '{min(lacking)}'")
    if info.get("ipc_handles_pickled") is None:
        raise ValueError("Either `ipc_handles` or `ipc_handles_pickled` must be provided")
    handles = unpickled(info["ipc_handles_pickled"])
    lists = {"dtype_names": info["dtype_names"], "shapes": info["shapes"]}
    if isinstance(handles, list):
        lists["ipc_handles"] = handles
    for name, values in lists.items():
        if len(values) != len(info["names"]):
            raise ValueError(
                f"`{name}` should be of the same size as `names`: got {len(values)} and"
                f" {len(info['names'])}"
            )
    for each in handles if isinstance(handles, list) else [handles]:
        for arguments in each.values():
            check(arguments)
    return {**info, "ipc_handles": handles}


def check(arguments: Sequence[Any]) -> None:
    """Asserts that these can be what `rebuild_cuda_tensor` is called with."""
    assert len(arguments) == len(SIGNATURE), arguments
    for place, (value, types) in enumerate(zip(arguments, SIGNATURE, strict=True)):
        good = isinstance(value, type) if types == (type,) else type(value) in types
        assert good, f"argument {place} is {value!r}"


def split(content: torch.Tensor, info: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors of a packed buffer, views of it, as vLLM's `unpack_tensor` does."""
    sizes = info["tensor_sizes"]
    dtypes = [getattr(torch, name) for name in info["dtype_names"]]
    parts = torch.split(content[: sum(sizes)], sizes)
    every = zip(info["names"], info["shapes"], dtypes, parts, strict=True)
    return [(name, part.view(dtype).view(shape)) for name, shape, dtype, part in every]


class _Worker:
    """One worker of the server, on one GPU."""

    def __init__(self, gpu: str, segments: Segments) -> None:
        self.gpu = gpu
        self.active = False
        self.packed = False
        self.weights: dict[str, torch.Tensor] = {}
        # Unpacked, layers keep what they are given until the end of the update.
        self.kept: dict[str, torch.Tensor] = {}
        # What was read of each call: of which nothing is known to have been written before.
        self.unwaited: list[str] = []
        self._segments = segments
        # The packed buffer that stays mapped, by what it was rebuilt with.
        self._importer: tuple[tuple[Any, ...], torch.Tensor] | None = None

    def update(self, info: dict[str, Any], fails: str) -> None:
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            info = parsed(info)
            if fails:
                raise RuntimeError(fails)
            if self.packed:
                self._take_packed(info)
            else:
                self._take_unpacked(info)
        except BaseException:
            self.active = False
            raise

    def finish(self) -> None:
        if not self.active:
            raise RuntimeError(
                "finish_weight_update called without a matching start_weight_update."
            )
        # Only now: what the trainer has written meanwhile would be seen.
        self.weights.update((name, view.clone()) for name, view in self.kept.items())
        self.kept.clear()
        self._importer = None
        self.active = False

    def _take_packed(self, info: dict[str, Any]) -> None:
        if info.get("tensor_sizes") is None:
            raise ValueError("`tensor_sizes` is required when packed=True")
        assert isinstance(info["ipc_handles"], dict)
        arguments = self._own(info["ipc_handles"])
        waited = False
        if self._importer is None or self._importer[0] != arguments:
            # Torch knows a living storage again by these, and does not look at the event then.
            held = self._importer[0] if self._importer is not None else (None,) * 15
            waited = arguments[14] and (held[7], held[9]) != (arguments[7], arguments[9])
            self._importer = (arguments, self._rebuild(arguments))
        if info["names"] and not waited:
            self.unwaited += info["names"]
        whole = self._importer[1]
        self.weights.update((name, view.clone()) for name, view in split(whole, info))

    def _take_unpacked(self, info: dict[str, Any]) -> None:
        assert isinstance(info["ipc_handles"], list)
        waits: set[bytes] = set()
        for name, handles in zip(info["names"], info["ipc_handles"], strict=True):
            arguments = self._own(handles)
            if arguments[14]:
                waits.add(arguments[13])
            if arguments[7] is not None and arguments[13] not in waits:
                self.unwaited.append(name)
            self.kept[name] = self._rebuild(arguments)

    def _own(self, handles: dict[str, tuple[Any, ...]]) -> tuple[Any, ...]:
        if self.gpu not in handles:
            raise ValueError(
                f"IPC handle not found for GPU UUID {self.gpu}. Available UUIDs: {list(handles)}"
            )
        return handles[self.gpu]

    def _rebuild(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        _, size, stride, offset, _, dtype, _, handle, nbytes, start, *_ = arguments
        if handle is None or not nbytes:
            return torch.empty(size, dtype=dtype)
        assert handle.startswith(HANDLE_PREFIX) and len(handle) == 66
        storage = self._segments.open(handle[2:]).storage(start, nbytes)
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


class FakeStockVLLM(FakeVLLM):
    """One stock server, with a worker on each of these GPUs."""

    def __init__(self, segments: Segments, gpus: Sequence[str] = UUIDS[:1]) -> None:
        super().__init__(len(gpus))
        self._segments = segments
        self._gpus = list(gpus)
        self.bodies: list[dict[str, Any]] = []
        # Its workers do one thing after another, whoever asks.
        self._busy = threading.Lock()
        self._stall: Gate | None = None
        self._hire()

    def start(self) -> None:
        self._hire()
        super().start()

    def stall(self) -> Gate:
        """Has its workers wait, once, in the midst of `/update_weights`."""
        self._stall = Gate()
        return self._stall

    def _hire(self) -> None:
        self.workers = [_Worker(gpu, self._segments) for gpu in self._gpus]
        self.weights = [worker.weights for worker in self.workers]

    @property
    def unwaited(self) -> list[str]:
        """Names of tensors that were read without a look at the trainer's event."""
        return [name for worker in self.workers for name in worker.unwaited]

    def _turn(self, path: str) -> AbstractContextManager[object]:
        return nullcontext()  # `_busy` is.

    def _answer(self, path: str, query: dict[str, str], body: dict[str, Any]) -> Any:
        match path:
            case "/init_weight_transfer_engine":
                if extra := body["init_info"].keys() - {"packed"}:
                    raise ValueError(f"got an unexpected keyword argument '{min(extra)}'")
                for worker in self.workers:
                    worker.packed = body["init_info"].get("packed", False)
                return {"message": "Weight transfer initialized"}
            case "/start_weight_update":
                self._each(self._start_one)
                self.active = True
                self.loading.clear()
                return {"message": "Weight update started"}
            case "/update_weights":
                self.bodies.append(body)
                self._update_each(body["update_info"])
                self.loading.set()
                return {"message": "Weights updated"}
            case "/finish_weight_update":
                try:
                    self._each(lambda _, worker: worker.finish())
                finally:
                    self.active = any(worker.active for worker in self.workers)
                self.label = body.get("weight_version") or self.label
                return {"message": "Weight update finished"}
            case "/update_weight_version":
                self.label = body["new_version"]
                return {"success": True, "new_version": self.label}
            case "/v1/models":
                return {"data": [{"id": "model"}]}
            case "/v1/completions":
                assert not self.paused
                text = repr(sorted((n, t.float().sum().item()) for n, t in self.weights[0].items()))
                every = enumerate(body["prompt"])
                return {"choices": [{"index": n, "text": f"{text} after {p}"} for n, p in every]}
            case _:
                return super()._answer(path, query, body)

    def _each(self, act: Any) -> None:
        """Has each worker do something; raises the first error, when all have."""
        errors: list[BaseException] = []
        with self._busy:
            for place, worker in enumerate(self.workers):
                try:
                    act(place, worker)
                except Exception as error:  # noqa: BLE001
                    errors.append(error)
        if errors:
            raise Refused(500, f"Worker failed with error '{errors[0]}', please check the stack")

    @staticmethod
    def _start_one(place: int, worker: _Worker) -> None:
        if worker.active:
            raise RuntimeError(
                "start_weight_update called while a weight update is already active. Call"
                " finish_weight_update first."
            )
        worker.active = True
        worker.kept.clear()

    def _update_each(self, info: Any) -> None:
        fails, self.load_fails = self.load_fails, ""
        stall, self._stall = self._stall, None

        def one(place: int, worker: _Worker) -> None:
            if stall is not None and not place:
                stall.came.set()
                stall.go.wait(30.0)
            own = info[place] if isinstance(info, list) else info
            worker.update(own, fails if place == 0 else "")

        try:
            self._each(one)
        finally:
            self.active = any(worker.active for worker in self.workers)
