"""A round of only some of the registered tensors: adapters, or a range of layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from ..protocol.errors import ConfigError
from ..protocol.records import Proof
from ..protocol.tables import BatchBody, Buffer, TensorEntry, encode_body
from .nearest import nearest


class Tables(Protocol):
    """Buffers and what lies in them: registered ones, or copies of these."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all their tensors."""
        ...

    @property
    def buffers(self) -> list[Buffer]:
        """Each with its handle and its table."""
        ...


class Chosen(Struct, frozen=True):
    """What the one batch of a round carries."""

    buffers: list[int]
    """Numbers of the buffers that hold any of it."""
    nbytes: int
    """Bytes of its tensors, those of tied ones once."""
    body: bytes | None
    """The tables of these buffers, with the named tensors alone; None: they carry all of theirs."""
    registered: bool
    """Whether workers know the tables of these buffers from an offer."""
    proofs: list[Proof] = []
    """In a verified round: the digests of these buffers."""


def select(names: Collection[str], given: Iterable[Tables]) -> Chosen:
    """Returns the batch for the tensors of these names.

    The buffers are those that are given, so that nothing is mapped or copied for it.

    Raises:
        ConfigError: A name is not registered; the nearest one is named.
    """
    wanted = set(names)
    known: set[str] = set()
    chosen: list[Buffer] = []
    for buffers in given:
        known.update(buffers.names)
        for buffer in buffers.buffers:
            entries = _entries(buffer, wanted)
            if entries:
                chosen.append(replace(buffer, entries=entries))
    if unknown := sorted(wanted - known):
        near = nearest(unknown[0], known)
        hint = f"; the nearest is {near!r}" if near else ""
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ConfigError(f"subset: {unknown[0]!r}{more} is not registered with this trainer{hint}")
    body = BatchBody(chosen)
    return Chosen(body.numbers, body.nbytes, encode_body(body), False)


def _entries(buffer: Buffer, wanted: set[str]) -> list[TensorEntry]:
    """Returns the named entries; the first of several tied names owns their bytes."""
    entries: list[TensorEntry] = []
    owners: dict[tuple[int, object, str], str] = {}
    for entry in buffer.entries:
        if entry.name in wanted:
            tied_to = (entry.offset, entry.box, entry.alias_of or entry.name)
            owner = owners.setdefault(tied_to, entry.name)
            entries.append(replace(entry, alias_of=None if owner == entry.name else owner))
    return entries
