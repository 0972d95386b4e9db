"""Handles are typed: nothing else passes the decoder, and the message names the field."""

from __future__ import annotations

import pickle
from pathlib import Path

import msgspec
import pytest

from tensorlease.protocol.errors import ProtocolError
from tensorlease.protocol.handles import CudaIpcHandle, Handle, ShmHandle
from tensorlease.protocol.tables import Buffer, OfferBody, decode_offer, encode_body

NAME = "tensorlease-0-12-34-4026531836-0123abcd-7"
UUID = "0a1b2c3d-0000-1111-2222-0123456789ab"
SHM = ["shm", NAME, 64]
CUDA = ["cuda-ipc", 1, UUID, b"\x01" * 64, 64, 0, b"\x02" * 64]


def _decode(handle: object) -> Handle | None:
    frame = msgspec.msgpack.encode(["offer", [[1, 64, handle, []]]])
    return decode_offer(frame).buffers[0].handle


@pytest.mark.parametrize(
    "handle",
    [ShmHandle(NAME, 64), CudaIpcHandle(1, UUID, b"\x01" * 64, 4096, 64, b"\x02" * 64)],
)
def test_a_handle_reads_back(handle: Handle) -> None:
    body = OfferBody([Buffer(1, 64, handle, [])])
    assert decode_offer(encode_body(body)) == body


def test_a_handle_names_its_owner() -> None:
    assert (ShmHandle(NAME, 64).owner.pid, ShmHandle(NAME, 64).owner.start) == (12, 34)


@pytest.mark.parametrize(
    ("handle", "field"),
    [
        (["shm", "../../etc/passwd", 64], "handle.name"),
        (["shm", NAME + "/../x", 64], "handle.name"),
        (["shm", NAME + "\n", 64], "handle.name"),
        (["shm", NAME, -1], "handle.nbytes"),
        (["shm", NAME, 0], "handle.nbytes"),
        (["shm", NAME, True], "handle.nbytes"),
        (["shm", NAME], "handle: "),
        ([*SHM, 1], "handle: "),
        (["file", NAME, 64], "handle"),
        (["rebuild_cuda_tensor", [1, 2, 3]], "handle"),
        ({"type": "shm"}, "handle: "),
        (CUDA[:-1], "handle: "),
        ([CUDA, CUDA], "handle"),
        (CUDA[:2] + [{"index": 0}] + CUDA[3:], "handle.gpu_uuid"),
        (CUDA[:2] + ["GPU-" + UUID] + CUDA[3:], "handle.gpu_uuid"),
        (CUDA[:2] + [UUID.upper()] + CUDA[3:], "handle.gpu_uuid"),
        (CUDA[:3] + [b"\x01" * 257] + CUDA[4:], "handle.handle"),
        (CUDA[:3] + ["text"] + CUDA[4:], "handle.handle"),
        (CUDA[:4] + [32] + CUDA[5:], "handle.storage_offset"),
        (CUDA[:5] + [-8] + CUDA[6:], "handle.storage_offset"),
    ],
)
def test_a_handle_of_another_form_is_refused_and_the_field_named(
    handle: object, field: str
) -> None:
    with pytest.raises(ProtocolError) as refused:
        _decode(handle)
    assert f"buffers[0].{field}" in str(refused.value) or f"(number 1).{field}" in str(
        refused.value
    )


class _Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_in_place_of_a_handle_or_a_field_is_never_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    poison = pickle.dumps(_Marker(marker))
    for handle in (poison, ["shm", poison, 64], CUDA[:2] + [poison] + CUDA[3:]):
        with pytest.raises(ProtocolError):
            _decode(handle)
    assert isinstance(_decode(CUDA[:3] + [poison] + CUDA[4:]), CudaIpcHandle)  # opaque bytes
    with pytest.raises(ProtocolError):
        decode_offer(poison)
    assert not marker.exists()
    pickle.loads(poison)
    assert marker.exists()  # the poison itself works
