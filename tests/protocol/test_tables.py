"""Bodies: what they say, and each way in which one is refused."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorlease.protocol.errors import ProtocolError
from tensorlease.protocol.handles import ShmHandle
from tensorlease.protocol.regions import Region
from tensorlease.protocol.tables import (
    BatchBody,
    Buffer,
    OfferBody,
    TensorEntry,
    decode_batch,
    decode_offer,
    encode_body,
)

NAME = "tensorlease-0-12-34-4026531836-0123abcd-7"


def _body(*entries: TensorEntry, nbytes: int = 4096) -> OfferBody:
    return OfferBody([Buffer(7, nbytes, ShmHandle(NAME, nbytes), list(entries))])


HALF = TensorEntry("w", "float32", (4, 4), Region((2, 0), (2, 4)), 256)
SCALAR = TensorEntry("s", "bfloat16", (), None, 2)
TIED = TensorEntry("head", "float32", (4, 4), Region((2, 0), (2, 4)), 256, "w")
EMPTY = TensorEntry("e", "float64", (4, 0, 8), None, 0)


def test_a_body_reads_back_and_counts_tied_bytes_once() -> None:
    body = _body(HALF, SCALAR, TIED)
    assert decode_offer(encode_body(body)) == body
    assert body.nbytes == 2 * 4 * 4 + 2
    assert body.numbers == [7]
    assert body.pieces
    assert not _body(SCALAR).pieces
    assert HALF.local_shape == (2, 4)
    assert SCALAR.nbytes == 2


def test_tensors_without_elements_travel_in_a_buffer_without_a_handle() -> None:
    body = BatchBody([Buffer(3, 0, None, [EMPTY])])
    assert decode_batch(encode_body(body)) == body
    assert body.nbytes == 0


def test_an_offer_is_no_batch() -> None:
    with pytest.raises(ProtocolError, match="kind"):
        decode_batch(encode_body(_body()))


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (TensorEntry("w", "qint8", (4,), None, 0), r"'w'\).dtype: 'qint8'"),
        (TensorEntry("w", "float32", (4,), None, 4090), r"offset: byte 4090 is not aligned"),
        (TensorEntry("w", "float32", (4,), None, 4084), r"offset: the tensor ends at byte 4100"),
        (TensorEntry("w", "float32", (1 << 40,), None, 0), r"offset: the tensor ends"),
        (TensorEntry("w", "float32", (1 << 61,), None, 0), r"shape: .* more than 2\*\*62 bytes"),
        (TensorEntry("w", "uint8", (4,), Region((2,), (3,)), 0), r"region: \[2:5\] is no box"),
        (TensorEntry("w", "uint8", (4,), Region((0, 0), (1, 1)), 0), r"region: .* is no box"),
        (TensorEntry("w", "uint8", (4,), Region((0, 0), (4,)), 0), r"region: .* is no box"),
        (TensorEntry("é" * 300, "uint8", (4,), None, 0), r"name: more than 512 bytes"),
        (TensorEntry("w", "uint8", (4,), None, 0, "nobody"), r"'w'.alias_of: .* no 'nobody'"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused_by_name(entry: TensorEntry, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        decode_offer(encode_body(_body(entry)))


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (HALF, "'w'.: this name and region was already given"),
        (TensorEntry("v", "uint8", (4,), None, 284), "'w' and 'v' share bytes 284 to 288"),
        (
            TensorEntry("v", "float64", (2, 2), Region((0, 0), (2, 2)), 256, "w"),
            "'v'.alias_of",
        ),
        (TensorEntry("v", "float32", (4, 4), Region((2, 0), (2, 4)), 0, "w"), "'v'.alias_of"),
    ],
)
def test_entries_that_contradict_each_other_are_refused_by_name(
    second: TensorEntry, text: str
) -> None:
    with pytest.raises(ProtocolError, match=text):
        decode_offer(encode_body(_body(HALF, second)))


@pytest.mark.parametrize(
    ("buffers", "text"),
    [
        ([Buffer(1, 0, None, []), Buffer(1, 0, None, [])], r"buffers\[1\].*number: given twice"),
        ([Buffer(1, 8, None, [])], "handle: missing"),
        ([Buffer(1, 0, ShmHandle(NAME, 8), [])], "handle: missing"),
        ([Buffer(1, 8, ShmHandle(NAME, 16), [])], "handle.nbytes: 16 is not the buffer's 8"),
    ],
)
def test_buffers_that_cannot_be_are_refused(buffers: list[Buffer], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        decode_offer(encode_body(OfferBody(buffers)))


def _change(path: list[int], value: object) -> bytes:
    raw = msgspec.msgpack.decode(encode_body(_body(HALF, SCALAR)))
    place = raw
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return msgspec.msgpack.encode(raw)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ([1, 0, 0], -1, r"buffers\[0\].number"),
        ([1, 0, 1], -4096, r"buffers\[0\].nbytes"),
        ([1, 0, 3, 0, 0], "", r"buffers\[0\].entries\[0\].name"),
        ([1, 0, 3, 0, 2, 1], -4, r"buffers\[0\].entries\[0\].shape\[1\]"),
        ([1, 0, 3, 0, 3, 0, 0], -2, r"buffers\[0\].entries\[0\].region.start\[0\]"),
        ([1, 0, 3, 1, 4], -2, r"buffers\[0\].entries\[1\].offset"),
        ([1, 0, 3, 1, 2], [1] * 17, r"buffers\[0\].entries\[1\].shape"),
        ([1, 0, 3, 1], ["s", "uint8"], r"buffers\[0\].entries\[1\]: "),
        ([1], {}, "buffers"),
    ],
)
def test_a_field_of_the_wrong_type_or_range_is_named(
    path: list[int], value: object, field: str
) -> None:
    with pytest.raises(ProtocolError, match=field):
        decode_offer(_change(path, value))


def test_a_body_above_the_limit_is_neither_sent_nor_decoded() -> None:
    frame = encode_body(_body(HALF))
    with pytest.raises(ProtocolError, match="limit is 10"):
        encode_body(_body(HALF), limit=10)
    with pytest.raises(ProtocolError, match="limit is 10"):
        decode_offer(frame, limit=10)


@pytest.mark.parametrize("cut", [lambda f: f[:-1], lambda f: f + b"\0", lambda f: b""])
def test_a_frame_that_is_cut_or_has_a_tail_is_refused(cut: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ProtocolError, match="bad body"):
        decode_offer(cut(encode_body(_body(HALF))))


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused_and_nothing_else(frame: bytes) -> None:
    try:
        body = decode_offer(frame)
    except ProtocolError:
        return
    assert decode_offer(encode_body(body)) == body
