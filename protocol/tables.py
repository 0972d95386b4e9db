"""Bodies: which tensors lie where in which buffers. The broker forwards them unread.

An offer's body tells a worker of a trainer's registered buffers; a batch's body tells it of the
ring slots that the batch fills. Both are lists of buffers, each with its handle and its table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import pairwise
from math import prod
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from .dtypes import ITEM_SIZES
from .errors import ProtocolError
from .field_paths import name_fields
from .handles import CudaIpcHandle, Handle, ShmHandle
from .limits import MAX_BODY_BYTES, BufferNumber, Bytes
from .regions import MAX_LENGTH, Dimensions, Region, whole

MAX_NAME = 512
"""Bytes of a tensor's name in UTF-8."""
MAX_ENTRIES = 200_000
"""Entries of one body, over all its buffers."""
MAX_BUFFERS = 65_536
"""Buffers of one body."""

Tags = Annotated[bytes, Meta(max_length=8 * MAX_ENTRIES)]
TensorName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class TensorEntry(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """One tensor, or one piece of it, inside a buffer: row-major, without gaps."""

    name: TensorName
    dtype: Annotated[str, Meta(max_length=32)]
    """A name of `tensorlease.protocol.dtypes.ITEM_SIZES`."""
    shape: Dimensions
    """The global shape, in elements."""
    region: Region | None
    """The box of the global shape that lies here; None says all of it."""
    offset: Bytes
    """Where the piece begins in the buffer, in bytes: a multiple of the dtype's item size."""
    alias_of: TensorName | None = None
    """Set on every name but one of a tied tensor: the name under which its bytes count."""

    @property
    def box(self) -> Region:
        """The region, also where it is the whole tensor."""
        return whole(self.shape) if self.region is None else self.region

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        return self.shape if self.region is None else self.region.length

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return prod(self.local_shape) * ITEM_SIZES[self.dtype]


class Buffer(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A buffer of a trainer: how to map it and what lies in it."""

    number: BufferNumber
    """Known within the trainer's instance; never used twice."""
    nbytes: Bytes
    handle: Handle | None
    """None only for the buffer of 0 bytes that holds the tensors without elements."""
    entries: Annotated[list[TensorEntry], Meta(max_length=MAX_ENTRIES)]
    tags: Tags | None = None
    """In a verified round: one half of each entry's digest, in order; of an alias, zeros."""


class TagsOf(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a verified round says of a registered buffer, whose table was offered before."""

    number: BufferNumber
    tags: Tags
    """One half of each entry's digest, in the order of the table; of an alias, zeros."""


Buffers = Annotated[list[Buffer], Meta(max_length=MAX_BUFFERS)]


class _Body(
    Struct, array_like=True, frozen=True, forbid_unknown_fields=True, dict=True, tag_field="kind"
):
    buffers: Buffers

    @property
    def numbers(self) -> list[int]:
        """The numbers of the buffers, in order."""
        return [buffer.number for buffer in self.buffers]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all pieces; those of a tied tensor count once."""
        return sum(entry.nbytes for entry in self.entries() if entry.alias_of is None)

    @cached_property
    def pieces(self) -> bool:
        """Whether any entry holds less than its whole tensor."""
        return any(not entry.box.is_whole(entry.shape) for entry in self.entries())

    def entries(self) -> Iterator[TensorEntry]:
        """Every entry of every buffer."""
        return (entry for buffer in self.buffers for entry in buffer.entries)


class TagsBody(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="tags"):
    """What goes with a Batch of registered buffers in a verified round."""

    buffers: Annotated[list[TagsOf], Meta(max_length=MAX_BUFFERS)]


class OfferBody(_Body, frozen=True, tag="offer"):
    """The registered buffers of an Offer."""


class BatchBody(_Body, frozen=True, tag="batch"):
    """The ring slots of a Batch."""


Body = TypeVar("Body", OfferBody, BatchBody)

_encoder = msgspec.msgpack.Encoder()


# Made when they are first used, by a worker: a trainer seldom needs any.
@cache
def _offer_decoder() -> msgspec.msgpack.Decoder[OfferBody]:
    return msgspec.msgpack.Decoder(OfferBody)


@cache
def _batch_decoder() -> msgspec.msgpack.Decoder[BatchBody]:
    return msgspec.msgpack.Decoder(BatchBody)


@cache
def _tags_decoder() -> msgspec.msgpack.Decoder[TagsBody]:
    return msgspec.msgpack.Decoder(TagsBody)


def encode_body(body: OfferBody | BatchBody, limit: int = MAX_BODY_BYTES) -> bytes:
    """Returns the body frame; raises `ProtocolError` if it has more than `limit` bytes."""
    frame = _encoder.encode(body)
    if len(frame) > limit:
        raise ProtocolError(
            f"body of {len(frame)} bytes for {len(body.buffers)} buffers; the limit is {limit}:"
            " offer the tensors in several parts"
        )
    return frame


def decode_offer(frame: bytes | memoryview, limit: int = MAX_BODY_BYTES) -> OfferBody:
    """Returns the checked body of an Offer; raises `ProtocolError` naming the field."""
    return _decode(_offer_decoder(), OfferBody, frame, limit)


def decode_batch(frame: bytes | memoryview, limit: int = MAX_BODY_BYTES) -> BatchBody:
    """Returns the checked body of a Batch; raises `ProtocolError` naming the field."""
    return _decode(_batch_decoder(), BatchBody, frame, limit)


def encode_tags(tags: TagsBody) -> bytes:
    """Returns the body frame of a batch of registered buffers in a verified round."""
    return _encoder.encode(tags)


def decode_tags(frame: bytes | memoryview) -> TagsBody:
    """Returns what `encode_tags` was given; raises `ProtocolError` naming the field."""
    try:
        return _tags_decoder().decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad body: {name_fields(TagsBody, frame, str(error))}") from error


def _decode(
    decoder: msgspec.msgpack.Decoder[Body],
    kind: type[Body],
    frame: bytes | memoryview,
    limit: int,
) -> Body:
    if len(frame) > limit:
        raise ProtocolError(f"body of {len(frame)} bytes; the limit is {limit} bytes")
    try:
        body = decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad body: {name_fields(kind, frame, str(error))}") from error
    validate(body)
    return body


def validate(body: OfferBody | BatchBody) -> None:
    """Checks what types cannot say; raises `ProtocolError` naming buffer, tensor and field."""
    total = sum(len(buffer.entries) for buffer in body.buffers)
    if total > MAX_ENTRIES:
        raise ProtocolError(f"bad body: {total} entries; the limit is {MAX_ENTRIES}")
    numbers: set[int] = set()
    seen: set[tuple[str, Region]] = set()
    for index, buffer in enumerate(body.buffers):
        where = f"bad body: buffers[{index}] (number {buffer.number})"
        if buffer.number in numbers:
            raise ProtocolError(f"{where}.number: given twice in one body")
        numbers.add(buffer.number)
        _check_handle(buffer, where)
        for position, entry in enumerate(buffer.entries):
            spot = f"{where}.entries[{position}] ({entry.name[:128]!r})"
            _check_entry(entry, buffer, spot)
            piece = (entry.name, entry.box)
            if piece in seen:
                raise ProtocolError(f"{spot}: this name and region was already given")
            seen.add(piece)
        _check_aliases(buffer.entries, where)
        _check_overlaps(buffer.entries, where)


def _check_handle(buffer: Buffer, where: str) -> None:
    handle = buffer.handle
    if (handle is None) != (buffer.nbytes == 0):
        raise ProtocolError(
            f"{where}.handle: missing exactly where the buffer has 0 bytes; it has {buffer.nbytes}"
        )
    if isinstance(handle, ShmHandle) and handle.nbytes != buffer.nbytes:
        raise ProtocolError(
            f"{where}.handle.nbytes: {handle.nbytes} is not the buffer's {buffer.nbytes}"
        )
    if isinstance(handle, CudaIpcHandle) and (
        handle.storage_offset + buffer.nbytes > handle.storage_nbytes
    ):
        raise ProtocolError(
            f"{where}.handle.storage_offset: the buffer ends at byte"
            f" {handle.storage_offset + buffer.nbytes} of {handle.storage_nbytes}"
        )


def _check_entry(entry: TensorEntry, buffer: Buffer, spot: str) -> None:
    item = ITEM_SIZES.get(entry.dtype)
    if item is None:
        raise ProtocolError(f"{spot}.dtype: {entry.dtype!r} is not one of the dtypes that travel")
    if len(entry.name.encode()) > MAX_NAME:
        raise ProtocolError(f"{spot}.name: more than {MAX_NAME} bytes")
    if entry.region is not None and not entry.region.inside(entry.shape):
        raise ProtocolError(f"{spot}.region: {entry.region} is no box of shape {entry.shape}")
    if prod(entry.shape) * item > MAX_LENGTH:
        raise ProtocolError(f"{spot}.shape: {entry.shape} is more than 2**62 bytes")
    if entry.offset % item:
        raise ProtocolError(
            f"{spot}.offset: byte {entry.offset} is not aligned to the {item} bytes of {entry.dtype}"
        )
    if entry.offset + entry.nbytes > buffer.nbytes:
        raise ProtocolError(
            f"{spot}.offset: the tensor ends at byte {entry.offset + entry.nbytes} of a buffer of"
            f" {buffer.nbytes}"
        )


def _check_aliases(entries: Sequence[TensorEntry], where: str) -> None:
    owners = {(entry.name, entry.box): entry for entry in entries if entry.alias_of is None}
    for entry in entries:
        if entry.alias_of is None:
            continue
        target = owners.get((entry.alias_of, entry.box))
        if target is None or (target.dtype, target.shape, target.offset) != (
            entry.dtype,
            entry.shape,
            entry.offset,
        ):
            raise ProtocolError(
                f"{where}: {entry.name[:128]!r}.alias_of: the buffer has no {entry.alias_of[:128]!r}"
                " of the same dtype, shape and place"
            )


def _check_overlaps(entries: Sequence[TensorEntry], where: str) -> None:
    spans = sorted(
        (entry.offset, entry.offset + entry.nbytes, entry.name)
        for entry in entries
        if entry.alias_of is None and entry.nbytes
    )
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise ProtocolError(
                f"{where}.entries: {name[:128]!r} and {other[:128]!r} share bytes {start} to {end}"
                " and neither is declared an alias"
            )
