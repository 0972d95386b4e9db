"""What a worker's application thread does, one thing at a time; the core hands it out in order."""

from __future__ import annotations

from msgspec import Struct

from ..protocol import messages as m
from ..protocol.records import Code, Orphan, Receivers, Terms

RoundKey = tuple[str, int]
"""(group, call)."""


class Work(Struct, frozen=True):
    """Base of what the application's thread does; it reports by the method named in each."""


class PrepareWork(Work, frozen=True):
    """Run the prepare hook; then `prepared`."""

    key: RoundKey
    terms: Terms
    receivers: Receivers


class CopyWork(Work, frozen=True):
    """Take in a batch, synchronise the device, leave no view; then `copied`."""

    key: RoundKey
    batch: m.Deliver
    body: bytes | None


class CommitWork(Work, frozen=True):
    """Run the commit hook; then `committed`."""

    key: RoundKey
    version: int


class AbortWork(Work, frozen=True):
    """Run the abort hook; then `aborted`."""

    key: RoundKey
    code: Code
    text: str
    torn: bool


class PlanWork(Work, frozen=True):
    """Map and plan all offers that are known; then `planned`."""


class UnreadWork(Work, frozen=True):
    """Of a relay: see whether anything reads any more for those before it; then `found_out`."""

    orphans: list[Orphan]


class UnmapWork(Work, frozen=True):
    """Unmap these buffers; then `unmapped`."""

    trainer: str
    buffers: list[int]
