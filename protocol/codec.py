"""Encoding and decoding of envelopes: typed, validated while decoding, never pickled."""

from __future__ import annotations

import re
from functools import cache
from typing import TypeVar

import msgspec

from .errors import ProtocolError
from .limits import MAX_ENVELOPE_BYTES
from .messages import FromAgent, FromBroker, Prepare
from .records import ReceiverId

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_any = msgspec.msgpack.Decoder()


# Each is made when it is first used: that takes milliseconds, and no process needs both.
@cache
def _from_agent() -> msgspec.msgpack.Decoder[FromAgent]:
    return msgspec.msgpack.Decoder(FromAgent)


@cache
def _from_broker() -> msgspec.msgpack.Decoder[FromBroker]:
    return msgspec.msgpack.Decoder(FromBroker)


@cache
def _by_tag() -> dict[str, type[msgspec.Struct]]:
    return {
        str(kind.__struct_config__.tag): kind
        for union in (FromAgent, FromBroker)
        for kind in union.__args__
    }


def encode(message: FromAgent | FromBroker) -> bytes:
    """Returns the envelope frame of `message`."""
    return _encoder.encode(message)


class ListEncoder:
    """Encodes what the broker sends; the receivers of a round once for all of them.

    Prepare goes to each receiver with the list of all: encoded anew for each, a round's work would
    grow with the square of their number.
    """

    def __init__(self) -> None:
        # The list that was encoded last, and what became of it.
        self._receivers: list[ReceiverId] | None = None
        self._encoded = b""

    def encode(self, message: FromBroker) -> bytes:
        """Returns the same envelope frame as `encode`."""
        if not isinstance(message, Prepare):
            return _encoder.encode(message)
        if message.receivers is not self._receivers:
            self._receivers = message.receivers
            self._encoded = _encoder.encode(message.receivers)
        # The list is the last field: without it, an empty one of a single byte stands there.
        head = _encoder.encode(_without_receivers(message))
        return head[:-1] + self._encoded


def _without_receivers(message: Prepare) -> Prepare:
    return Prepare(message.epoch, message.to, message.group, message.call, message.terms, [])


def decode_from_agent(frame: bytes | memoryview) -> FromAgent:
    """Returns what an agent sent; raises `ProtocolError` naming the field that is wrong."""
    return _decode(_from_agent(), frame)


def decode_from_broker(frame: bytes | memoryview) -> FromBroker:
    """Returns what the broker sent; raises `ProtocolError` naming the field that is wrong."""
    return _decode(_from_broker(), frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview) -> T:
    if len(frame) > MAX_ENVELOPE_BYTES:
        raise ProtocolError(
            f"envelope of {len(frame)} bytes; the limit is {MAX_ENVELOPE_BYTES} bytes"
        )
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(_explain(str(error), frame)) from error


def _explain(text: str, frame: bytes | memoryview) -> str:
    """Turns msgspec's `$[3]` into the name of the message and the field."""
    try:
        raw = _any.decode(frame)
        kind = _by_tag()[raw[0]]
    except (
        msgspec.MsgspecError,
        UnicodeDecodeError,
        RecursionError,
        LookupError,
        TypeError,
    ):
        return f"not a message of this protocol: {text}"
    match = re.search(r"`\$\[(\d+)\]", text)
    fields = kind.__struct_fields__
    if match is None or not 1 <= int(match[1]) <= len(fields):
        return f"bad message {raw[0]!r}: {text}"
    return f"bad message {raw[0]!r}, field {fields[int(match[1]) - 1]!r}: {text}"
