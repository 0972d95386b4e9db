"""Verified rounds: what a trainer says of the bytes that it publishes, and how a worker looks at them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace

from ..protocol.errors import ProtocolError
from ..protocol.records import Proof
from ..protocol.tables import (
    BatchBody,
    Buffer,
    TagsBody,
    TagsOf,
    decode_batch,
    decode_tags,
    encode_body,
    encode_tags,
)
from .copy_plan import CopyPlan
from .digests import digest_buffer, read_buffer
from .errors import MappingError
from .memory import ExportedMemory, MappedMemory, bytes_of
from .subset import Chosen

Exports = Iterable[tuple[Buffer, ExportedMemory | None]]
"""Buffers with their memory; None for those without bytes."""


def with_digests(chosen: Chosen, exports: Exports) -> Chosen:
    """Returns the batch with the digests of what its buffers hold now; nobody may write to them.

    Args:
        chosen: The batch.
        exports: Its buffers, and perhaps others.
    """
    known = {buffer.number: (buffer, memory) for buffer, memory in exports}
    if chosen.body is None:
        buffers = [known[number][0] for number in chosen.buffers]
    else:
        buffers = decode_batch(chosen.body).buffers
    tagged: list[tuple[Buffer, bytes]] = []
    proofs: list[Proof] = []
    for buffer in buffers:
        data = _bytes_of(known[buffer.number][1])
        tags, proof = digest_buffer(buffer.number, buffer.entries, data)
        tagged.append((buffer, tags))
        proofs.append(proof)
    if chosen.registered:
        body = encode_tags(TagsBody([TagsOf(buffer.number, tags) for buffer, tags in tagged]))
    else:
        body = encode_body(BatchBody([replace(buffer, tags=tags) for buffer, tags in tagged]))
    return replace(chosen, body=body, proofs=proofs)


def _bytes_of(memory: ExportedMemory | None) -> torch.Tensor:
    if memory is None:
        return torch.empty(0, dtype=torch.uint8)
    return bytes_of(memory)


class Part(NamedTuple):
    """What one plan has copied of a batch."""

    plan: CopyPlan
    source: str
    numbers: Sequence[int]
    mapped: Mapping[int, MappedMemory]


class Reading:
    """A batch that a worker takes in, of a verified round. Holds no view of any memory.

    Args:
        tables: Its buffers that are taken.
        tags: Those of their entries, by the buffer's number.
        mapped: The mappings of those that have bytes.
    """

    def __init__(
        self,
        tables: Sequence[Buffer],
        tags: Mapping[int, bytes],
        mapped: Mapping[int, MappedMemory],
    ) -> None:
        self._tables = tables
        self._tags = tags
        self._mapped = mapped
        self.parts: list[Part] = []
        """What was copied of it."""

    def read(self) -> list[Proof]:
        """Returns the proof of each buffer.

        Raises:
            VerifyError: A tensor has other bytes than were published.
            MappingError: A buffer is not mapped.
        """
        return [self._read(buffer) for buffer in self._tables]

    def _read(self, buffer: Buffer) -> Proof:
        memory = self._mapped.get(buffer.number)
        if memory is None and buffer.nbytes:
            raise MappingError(f"buffer {buffer.number} is to be verified but not mapped")
        data = torch.empty(0, dtype=torch.uint8) if memory is None else memory.flat()
        return read_buffer(buffer.number, buffer.entries, data, self._tags.get(buffer.number, b""))

    def compare(self) -> None:
        """Raises `VerifyError` unless what was copied is what is there."""
        for plan, source, numbers, mapped in self.parts:
            plan.compare(source, numbers, mapped)


def tags_of(body: bytes) -> dict[int, bytes]:
    """Returns the tags that came with a batch of registered buffers, by the buffer's number.

    Raises:
        ProtocolError: There are none.
    """
    if not body:
        raise ProtocolError("a batch of a verified round came without tags")
    return {buffer.number: buffer.tags for buffer in decode_tags(body).buffers}
