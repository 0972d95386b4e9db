"""Digests of tensors' bytes, as `docs/protocol.md` defines them.

A digest has two halves. The tag travels to the workers, which name a tensor by it whose bytes are
not those that were published. The other is kept from them, and goes into the proof of its buffer:
only who reads the bytes can say it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

import torch

from ..protocol.errors import ProtocolError
from ..protocol.records import Proof
from ..protocol.tables import TensorEntry
from .errors import VerifyError

PART_BYTES: Final = 64 * 2**20
"""Bytes that are brought to the processor at once, where they lie elsewhere."""
_HALF: Final = 8


def digest_of(data: torch.Tensor) -> bytes:
    """Returns the digest, 16 bytes, of bytes: uint8 of shape (n,), contiguous, on any device."""
    digest = sha256()
    for begin in range(0, data.numel(), PART_BYTES):
        part = data[begin : begin + PART_BYTES].cpu()
        digest.update((ctypes.c_ubyte * part.numel()).from_address(part.data_ptr()))
    return digest.digest()[: 2 * _HALF]


def digest_buffer(
    number: int, entries: Iterable[TensorEntry], data: torch.Tensor
) -> tuple[bytes, Proof]:
    """Returns the tags of a buffer's entries, one after the other, and its proof.

    Args:
        number: The buffer's.
        entries: What lies in it; an alias has a tag of zeros.
        data: Its bytes, uint8 of shape (n,).
    """
    tags: list[bytes] = []
    proof = sha256()
    with torch.inference_mode():
        for entry in entries:
            if entry.alias_of is not None:
                tags.append(bytes(_HALF))
                continue
            digest = digest_of(data[entry.offset : entry.offset + entry.nbytes])
            tags.append(digest[:_HALF])
            proof.update(digest[_HALF:])
    return b"".join(tags), Proof(number, proof.digest()[:_HALF])


def read_buffer(
    number: int, entries: Sequence[TensorEntry], data: torch.Tensor, tags: bytes
) -> Proof:
    """Returns the proof that the buffer was read.

    Raises:
        VerifyError: The bytes of a tensor are not those that were published.
        ProtocolError: The tags are not those of this table.
    """
    if len(tags) != _HALF * len(entries):
        raise ProtocolError(
            f"{len(tags)} bytes of tags for {len(entries)} tensors of buffer {number}"
        )
    found, proof = digest_buffer(number, entries, data)
    if found != tags:
        for index, entry in enumerate(entries):
            place = slice(_HALF * index, _HALF * (index + 1))
            if found[place] != tags[place]:
                raise VerifyError(
                    entry.name,
                    f"has other bytes in buffer {number} than were published: something wrote to it"
                    " while it was leased, or this worker has other memory mapped",
                )
    return proof
