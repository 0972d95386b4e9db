"""The body of `/update_weights` for vLLM's own backend `ipc`, as a stock server reads it.

vLLM takes handles as a pickle of what torch's `rebuild_cuda_tensor` is called with. This module
writes such pickles, from a trainer's typed handles and tables alone; it reads none, opens no
handle and needs no GPU. Both forms are here:

- *unpacked*: one handle for each tensor, all of them in one call;
- *packed*: one handle for a run of bytes in which tensors lie without gaps, one run a call.

Nothing of torch's counting of openings takes part: the counter that a handle names does not exist,
and torch passes over that when it opens and drops. When memory may be written again is the ledger's
to say. The trainer's event goes along, and has the server's stream wait for what is being written.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, Final, NamedTuple

import torch

from tensorlease.protocol.dtypes import ITEM_SIZES
from tensorlease.protocol.handles import CudaIpcHandle
from tensorlease.protocol.tables import Buffer, TensorEntry

PICKLE_PROTOCOL: Final = 4
HANDLE_PREFIX: Final = b"\x01c"
"""Torch's framing of the driver's handle: a format version, then `c` for memory of cudaMalloc.

2.11 writes version 2, 2.13 version 3. Each reads its own and older ones, and `c` is alike in all.
"""
NO_COUNTER: Final = b"/tensorlease-counts-by-itself"
"""A reference counter that does not exist."""

Arguments = tuple[Any, ...]
"""What `rebuild_cuda_tensor` is called with: 15 values."""
Info = dict[str, Any]
"""The `update_info` of one call, or one worker's."""


class Spot(NamedTuple):
    """Where the bytes of a call's handle begin: no two calls in turn may have the same.

    vLLM keeps the last packed buffer mapped, and torch knows a living storage by this; neither
    looks at the event again then.
    """

    handle: bytes
    offset: int


class Run(NamedTuple):
    """Tensors that lie in one buffer without gaps."""

    handle: CudaIpcHandle
    start: int
    """Where the first begins, in bytes of the allocation."""
    entries: list[TensorEntry]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def spot(self) -> Spot:
        """Where it begins."""
        return Spot(self.handle.handle, self.start)


def unpacked(buffers: Sequence[Buffer]) -> Info:
    """Returns the info of all tensors in buffers of one GPU; the first handle has the event.

    All handles are opened before anything is read, on one stream: it waits once for each event.
    """
    waited: set[bytes] = set()
    entries: list[TensorEntry] = []
    arguments: list[dict[str, Arguments]] = []
    gpu = next((b.handle.gpu_uuid for b in buffers if isinstance(b.handle, CudaIpcHandle)), "")
    for buffer in buffers:
        handle = buffer.handle
        assert handle is None or isinstance(handle, CudaIpcHandle)
        for entry in buffer.entries:
            entries.append(entry)
            if handle is None or not entry.nbytes:
                arguments.append({gpu: _nothing(entry)})
                continue
            wait = handle.event not in waited
            waited.add(handle.event)
            start = handle.storage_offset + entry.offset
            dtype, shape = dtype_of(entry.dtype), entry.shape
            arguments.append({gpu: _rebuild(dtype, shape, handle, start, entry.nbytes, wait)})
    return _info(entries, arguments)


def packed(run: Run) -> Info:
    """Returns the info of one run; its handle has the event."""
    arguments = _rebuild(torch.uint8, (run.nbytes,), run.handle, run.start, run.nbytes, True)
    info = _info(run.entries, {run.handle.gpu_uuid: arguments})
    return info | {"tensor_sizes": [entry.nbytes for entry in run.entries]}


def nothing_of(run: Run) -> Info:
    """Returns the info of no tensor, in a buffer that begins elsewhere than the run does."""
    start = run.start + 1 if run.start + 1 < run.handle.storage_nbytes else run.start - 1
    arguments = _rebuild(torch.uint8, (1,), run.handle, start, 1, False)
    return _info([], {run.handle.gpu_uuid: arguments}) | {"tensor_sizes": []}


def runs(buffers: Sequence[Buffer], most: int) -> list[Run]:
    """Returns the tensors of buffers of one GPU as runs of at most `most` bytes each.

    A tensor that is larger goes alone. Where one ends and the next begins further on (a slot's
    tensors begin at multiples of 256 bytes), or where it would begin at no multiple of its own
    item, counted from the run's begin, there is another run.
    """
    found: list[Run] = []
    empty: list[TensorEntry] = []
    for buffer in buffers:
        handle = buffer.handle
        # Names of the same bytes go after all others.
        order = sorted(buffer.entries, key=lambda e: (e.alias_of is not None, e.offset))
        empty += [entry for entry in order if not entry.nbytes]
        for entry in order:
            if not entry.nbytes:
                continue
            assert isinstance(handle, CudaIpcHandle)
            start = handle.storage_offset + entry.offset
            last = found[-1] if found else None
            if last is not None and last.handle == handle and _follows(last, start, entry, most):
                last.entries.append(entry)
            else:
                found.append(Run(handle, start, [entry]))
    if empty and not found:
        found += [Run(h, h.storage_offset, []) for b in buffers[:1] if (h := _gpus(b)) is not None]
    if found:
        found[0].entries[:0] = empty
    return found


def merged(infos: Sequence[Info]) -> Info | list[Info]:
    """Returns one body for all workers of a server, from that of each one's GPU.

    If all get the same tensors it is one info, in which each finds its GPU's handle. Else (the
    experts of expert parallelism, say) it is a list: the n-th is the n-th worker's.
    """
    first, *others = infos
    same = all({**info, _HANDLES: None} == {**first, _HANDLES: None} for info in others)
    if not same:
        return [_written(info) for info in infos]
    handles = first[_HANDLES]
    if isinstance(handles, list):
        every = zip(*(info[_HANDLES] for info in infos), strict=True)
        return _written({**first, _HANDLES: [_union(each) for each in every]})
    return _written({**first, _HANDLES: _union([info[_HANDLES] for info in infos])})


_HANDLES: Final = "ipc_handles"


@cache
def dtype_of(name: str) -> torch.dtype:
    """Returns torch's dtype of a name that travels."""
    dtype = getattr(torch, name) if name in ITEM_SIZES else None
    assert isinstance(dtype, torch.dtype), f"{name} is not one of the dtypes that travel"
    return dtype


def _follows(last: Run, start: int, entry: TensorEntry, most: int) -> bool:
    nbytes = last.nbytes
    aligned = nbytes % ITEM_SIZES[entry.dtype] == 0
    return start == last.start + nbytes and aligned and nbytes + entry.nbytes <= most


def _gpus(buffer: Buffer) -> CudaIpcHandle | None:
    return buffer.handle if isinstance(buffer.handle, CudaIpcHandle) else None


def _union(handles: Sequence[Mapping[str, Arguments]]) -> dict[str, Arguments]:
    return {gpu: arguments for each in handles for gpu, arguments in each.items()}


def _info(entries: Sequence[TensorEntry], handles: object) -> Info:
    return {
        "names": [entry.name for entry in entries],
        "dtype_names": [entry.dtype for entry in entries],
        "shapes": [list(entry.shape) for entry in entries],
        _HANDLES: handles,
    }


def _written(info: Info) -> Info:
    """Returns it as JSON can carry it."""
    rest = {key: value for key, value in info.items() if key != _HANDLES}
    content = pickle.dumps(info[_HANDLES], protocol=PICKLE_PROTOCOL)
    return rest | {"ipc_handles_pickled": base64.b64encode(content).decode()}


def _rebuild(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    handle: CudaIpcHandle,
    start: int,
    nbytes: int,
    wait: bool,
) -> Arguments:
    """Returns the arguments for `nbytes` of an allocation from byte `start`, row-major."""
    return (
        torch.Tensor,
        torch.Size(shape),
        tuple(_strides(shape)),
        0,
        torch.storage.TypedStorage,
        dtype,
        0,  # Who rebuilds it sets the number that the GPU has there.
        HANDLE_PREFIX + handle.handle,
        nbytes,
        start,
        False,
        NO_COUNTER,
        0,
        handle.event,
        wait,
    )


def _nothing(entry: TensorEntry) -> Arguments:
    """Returns the arguments for a tensor without elements."""
    size, strides = torch.Size(entry.shape), tuple(_strides(entry.shape))
    head = (torch.Tensor, size, strides, 0, torch.storage.TypedStorage, dtype_of(entry.dtype), 0)
    return (*head, None, 0, 0, False, NO_COUNTER, 0, b"", False)


def _strides(shape: tuple[int, ...]) -> Iterator[int]:
    return (max(1, prod(shape[axis + 1 :])) for axis in range(len(shape)))
