"""The codec: whatever bytes come, a message or a `ProtocolError`, and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlease.protocol import codec
from tensorlease.protocol import messages as m
from tensorlease.protocol.errors import ProtocolError
from tensorlease.protocol.limits import MAX_ENVELOPE_BYTES
from tensorlease.protocol.records import Fields, Process, ReceiverId, Terms

from .generated import FROM_AGENT, MESSAGES, any_message

Decode = Callable[[bytes], Fields]

sides = pytest.mark.parametrize(
    "decode", [codec.decode_from_agent, codec.decode_from_broker], ids=["agent", "broker"]
)

OPEN = codec.encode(m.Open(1, 1, Terms(1)))


def raw(*values: object) -> bytes:
    return msgspec.msgpack.encode(list(values))


def test_a_frame_is_an_array_that_begins_with_the_tag() -> None:
    assert msgspec.msgpack.decode(codec.encode(m.Close(1, 2, 3))) == ["close", 1, 2, 3]


def test_a_list_of_receivers_is_encoded_once_and_every_frame_is_as_if_it_were_not() -> None:
    encoder = codec.ListEncoder()
    receivers = [ReceiverId(f"{n:016x}", f"replica-{n}", 0, [Process(n + 1, 7)]) for n in range(20)]
    for known in ([], receivers, receivers[:3], receivers):
        for receiver in receivers:
            prepare = m.Prepare("e" * 16, receiver.instance, "group", 4, Terms(9), known)
            assert encoder.encode(prepare) == codec.encode(prepare)
    commit = m.Commit("e" * 16, "f" * 16, "group", 4)
    assert encoder.encode(commit) == codec.encode(commit)


def test_a_memoryview_is_decoded_as_bytes_are() -> None:
    assert codec.decode_from_agent(memoryview(OPEN)) == m.Open(1, 1, Terms(1))


def test_unknown_fields_behind_the_known_ones_are_left_unread() -> None:
    assert codec.decode_from_agent(raw("close", 1, 2, 3, "of a later version")) == m.Close(1, 2, 3)


def test_a_field_that_was_added_later_may_be_absent() -> None:
    assert codec.decode_from_agent(raw("staged", 1, "run", 1, 0, 0)) == m.Staged(1, "run", 1, 0, 0)


@sides
@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"", "not a message of this protocol"),
        (b"\xc0", "not a message of this protocol"),
        (b"\xc1", "not a message of this protocol"),
        (b"hello", "not a message of this protocol"),
        (b"\x80\x04\x95", "not a message of this protocol"),
        (raw(), "not a message of this protocol"),
        (raw(7, 1), "not a message of this protocol"),
        (raw(["open"], 1), "not a message of this protocol"),
        (raw("no-such-message", 1), "not a message of this protocol"),
        (msgspec.msgpack.encode({"open": 1}), "not a message of this protocol"),
    ],
    ids=repr,
)
def test_what_is_no_message_is_refused(decode: Decode, frame: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode(frame)


def test_a_message_that_lacks_fields_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="bad message 'close': .*at least length 4, got 2"):
        codec.decode_from_agent(raw("close", 1))


@pytest.mark.parametrize("length", range(len(OPEN)))
def test_a_truncated_frame_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="not a message of this protocol"):
        codec.decode_from_agent(OPEN[:length])


def test_bytes_behind_a_message_are_refused() -> None:
    with pytest.raises(ProtocolError, match="not a message of this protocol"):
        codec.decode_from_agent(OPEN + b"\x00")


def test_a_text_that_is_no_utf8_is_refused() -> None:
    frame = raw("vote", 1, "run", 1).replace(b"run", b"\xff\xfe\xfd")
    with pytest.raises(ProtocolError):
        codec.decode_from_agent(frame)


@sides
@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"], ids=repr)
def test_a_huge_length_without_the_bytes_is_refused(decode: Decode, head: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(head + struct.pack(">I", 0xFFFFFFFF))


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"], ids=repr)
def test_a_huge_length_within_a_message_is_refused(head: bytes) -> None:
    whole = raw("retire", 1, [1])
    assert whole.endswith(b"\x91\x01")
    with pytest.raises(ProtocolError):
        codec.decode_from_agent(whole[:-2] + head + struct.pack(">I", 0xFFFFFFFF))


def test_more_buffers_than_the_limit_are_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="bad message 'retire', field 'buffers'"):
        codec.decode_from_agent(raw("retire", 1, [0] * 65_537))


@sides
@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1x"], ids=["lists", "maps"])
def test_deep_nesting_is_refused(decode: Decode, head: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(head * 100_000 + b"\xc0")


@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1x"], ids=["lists", "maps"])
def test_deep_nesting_within_a_message_is_refused(head: bytes) -> None:
    whole = raw("retire", 1, [1])
    with pytest.raises(ProtocolError):
        codec.decode_from_agent(whole[:-1] + head * 100_000 + b"\xc0")


@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1x"], ids=["lists", "maps"])
def test_deep_nesting_behind_the_known_fields_is_refused(head: bytes) -> None:
    whole = bytearray(raw("vote", 1, "run", 1))
    whole[0] += 1
    with pytest.raises(ProtocolError):
        codec.decode_from_agent(bytes(whole) + head * 100_000 + b"\xc0")


@sides
def test_an_envelope_above_the_limit_is_refused_undecoded(decode: Decode) -> None:
    with pytest.raises(ProtocolError, match=r"envelope of 16777217 bytes; the limit is 16777216"):
        decode(bytes(MAX_ENVELOPE_BYTES + 1))


def test_a_refusal_keeps_what_the_decoder_said() -> None:
    with pytest.raises(ProtocolError, match=r"field 'call': Expected `int` >= 1") as caught:
        codec.decode_from_agent(raw("close", 1, 0, 3))
    assert isinstance(caught.value.__cause__, msgspec.MsgspecError)


@sides
@settings(max_examples=500, deadline=None)
@given(frame=st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_protocol_errors(decode: Decode, frame: bytes) -> None:
    try:
        message = decode(frame)
    except ProtocolError:
        return
    assert type(message) in MESSAGES


@settings(max_examples=200, deadline=None)
@given(
    message=any_message(),
    at=st.floats(0, 1, exclude_max=True),
    byte=st.integers(0, 255),
)
def test_one_wrong_byte_raises_nothing_but_protocol_errors(
    message: Fields, at: float, byte: int
) -> None:
    frame = bytearray(codec.encode(message))  # type: ignore[arg-type]
    frame[int(at * len(frame))] = byte
    decode = codec.decode_from_agent if type(message) in FROM_AGENT else codec.decode_from_broker
    try:
        other = decode(bytes(frame))
    except ProtocolError:
        return
    assert type(other) in MESSAGES


@sides
@settings(max_examples=300, deadline=None)
@given(
    values=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=6),
        max_leaves=20,
    ),
    tag=st.sampled_from([str(kind.__struct_config__.tag) for kind in MESSAGES]),
)
def test_well_formed_nonsense_raises_nothing_but_protocol_errors(
    decode: Decode, values: object, tag: str
) -> None:
    rest = values if isinstance(values, list) else [values]
    try:
        message = decode(raw(tag, *rest))
    except ProtocolError:
        return
    assert type(message) in MESSAGES
