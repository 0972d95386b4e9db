"""The calls of the CUDA driver that torch does not offer: IPC handles, and bare copies.

By the driver's C library, so that nothing depends on the release of torch, nor on its counters:
the bytes of a handle are the driver's own. Every call is made with the device's primary context,
which is the one that torch uses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Final, NamedTuple

from ..protocol.errors import TensorleaseError

HANDLE_BYTES: Final = 64
_LIBRARY: Final = "libcuda.so.1"
_PEER_ACCESS: Final = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: memory of another GPU can be opened, too."""
_NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING: it does not wait for the default stream."""
_NOT_READY: Final = 600
"""CUDA_ERROR_NOT_READY: it goes on."""
_THREAD_LOCAL: Final = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: what other threads do is no part of a capture."""

_Pointer: Final = ctypes.c_uint64


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaError(TensorleaseError):
    """The CUDA driver has refused a call.

    Attributes:
        name: Of the error, CUDA_ERROR_INVALID_VALUE say.
    """

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name


class Extent(NamedTuple):
    """An allocation of GPU memory."""

    address: int
    nbytes: int


def address_range(ordinal: int, address: int) -> Extent:
    """Returns the allocation that a byte of a device's memory belongs to."""
    base, nbytes = _Pointer(), ctypes.c_size_t()
    with context(ordinal):
        _call(
            "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), _Pointer(address)
        )
    return Extent(base.value, nbytes.value)


def export_handle(ordinal: int, address: int) -> bytes:
    """Returns the IPC handle of the allocation that begins at `address`.

    Raises:
        CudaError: Memory of this kind cannot be shared so.
    """
    handle = _Handle()
    with context(ordinal):
        _call("cuIpcGetMemHandle", ctypes.byref(handle), _Pointer(address))
    return bytes(handle.reserved)


def open_handle(ordinal: int, handle: bytes) -> int:
    """Maps another process's allocation; returns its address. Each call needs its `close_handle`."""
    address = _Pointer()
    with context(ordinal):
        _call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_PEER_ACCESS),
        )
    return address.value


def close_handle(ordinal: int, address: int) -> None:
    """Gives one mapping back; nothing may read it any more."""
    with context(ordinal):
        _call("cuIpcCloseMemHandle", _Pointer(address))


def uuid_of(ordinal: int) -> str:
    """Returns the UUID of a device, or of its MIG instance, without prefix and in lower case."""
    device = ctypes.c_int()
    raw = (ctypes.c_ubyte * 16)()
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    _call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
    text = bytes(raw).hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def new_stream(ordinal: int) -> int:
    """Makes a stream that is nobody else's; it lives until the process ends.

    Those that torch gives out come from a pool, so that another library may have the same.
    """
    stream = ctypes.c_void_p()
    with context(ordinal):
        _call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
    assert stream.value is not None
    return stream.value


def is_idle(stream: int) -> bool:
    """Whether a stream has done all that it was told; within `context`.

    Raises:
        CudaError: Something on the device has failed.
    """
    code = _library().cuStreamQuery(ctypes.c_void_p(stream))
    if code not in (0, _NOT_READY):
        raise _error("cuStreamQuery", code)
    return not code


def synchronize(stream: int) -> None:
    """Waits until a stream has done all that it was told; within `context`."""
    _call("cuStreamSynchronize", ctypes.c_void_p(stream))


def copy_async(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copies between addresses of GPU memory, in the order of a stream; within `context`."""
    if code := _copy_function()(target, source, nbytes, stream):
        raise _error("cuMemcpyDtoDAsync_v2", code)


@cache
def _copy_function() -> Callable[[int, int, int, int], int]:
    """Returns what is called for each tensor: it converts its arguments in a fifth of the time."""
    function = _library().cuMemcpyDtoDAsync_v2
    function.argtypes = (_Pointer, _Pointer, ctypes.c_size_t, ctypes.c_void_p)
    copy: Callable[[int, int, int, int], int] = function
    return copy


class Graph:
    """What was done on a stream while it was captured, to be done again and again."""

    def __init__(self, ordinal: int, graph: ctypes.c_void_p) -> None:
        self._ordinal = ordinal
        self._exec = ctypes.c_void_p()
        try:
            _call(
                "cuGraphInstantiateWithFlags", ctypes.byref(self._exec), graph, ctypes.c_uint64(0)
            )
        finally:
            _call("cuGraphDestroy", graph)

    def launch(self, stream: int) -> None:
        """Does it all again, in the order of a stream; within `context`."""
        _call("cuGraphLaunch", self._exec, ctypes.c_void_p(stream))

    def __del__(self) -> None:
        handle, self._exec = self._exec, ctypes.c_void_p()
        if handle.value is not None:
            with suppress(TensorleaseError), context(self._ordinal):
                _call("cuGraphExecDestroy", handle)


class Capture:
    """The result of `captured`.

    Attributes:
        graph: What was captured, once the block has ended.
    """

    graph: Graph


@contextmanager
def captured(ordinal: int, stream: int) -> Iterator[Capture]:
    """Records what the block does on a stream, and on those that wait for it, in place of doing it.

    Within `context`.

    Raises:
        CudaError: It cannot be captured; the stream is as it was.
    """
    _call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(_THREAD_LOCAL))
    graph = ctypes.c_void_p()
    capture = Capture()
    try:
        yield capture
    except BaseException:
        _library().cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
        if graph.value is not None:
            _library().cuGraphDestroy(graph)
        raise
    _call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
    capture.graph = Graph(ordinal, graph)


class context:
    """Makes the primary context of a device the current one of this thread, within a block.

    No generator: it is entered for each tensor that a ring sends.
    """

    __slots__ = ("_ordinal",)

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal

    def __enter__(self) -> None:
        _call("cuCtxPushCurrent_v2", _primary(self._ordinal))

    def __exit__(self, *_: object) -> None:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@cache
def _primary(ordinal: int) -> ctypes.c_void_p:
    """Returns the primary context of a device, kept until the process ends: torch keeps it, too."""
    device, found = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(found), device)
    return found


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise CudaError(_LIBRARY, str(error)) from None


def _call(name: str, *arguments: object) -> None:
    if code := getattr(_library(), name)(*arguments):
        raise _error(name, code)


def _error(call: str, code: int) -> CudaError:
    text = ctypes.c_char_p()
    _library().cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
    return CudaError(call, (text.value or b"").decode() or f"error {code}")
