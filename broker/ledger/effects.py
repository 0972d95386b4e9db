"""What the ledger asks of the shell around it."""

from __future__ import annotations

from msgspec import Struct

from ...protocol.messages import FromBroker
from ...protocol.records import Process, RoundResult


class Effect(Struct, frozen=True, gc=False):
    """Base of all effects; they are carried out in order."""


class Send(Effect, frozen=True):
    """Send `message` (and `body`, unread) over the session of `to`."""

    to: str
    message: FromBroker
    body: bytes | None = None


class Answer(Effect, frozen=True):
    """Send `message` over the connection that the event came from."""

    message: FromBroker


class BeginSession(Effect, frozen=True):
    """The connection that the event came from is now the session of `instance`."""

    instance: str


class EndSession(Effect, frozen=True):
    """Forget the connection of `instance`; what was sent before still goes out."""

    instance: str


class Watch(Effect, frozen=True):
    """Report `gone` of this instance as soon as all its processes are."""

    instance: str
    processes: list[Process]
    locked: bool


class WatchReaders(Effect, frozen=True):
    """Report `readers_gone` of this instance, which has ended, as soon as all of these are gone.

    None: nobody knows who they are.
    """

    instance: str
    readers: list[Process]


class Unwatch(Effect, frozen=True):
    """Its death matters no more."""

    instance: str


class Sweep(Effect, frozen=True):
    """This instance is gone: remove the shared memory that it left."""

    instance: str


class Kill(Effect, frozen=True):
    """Configuration says that a receiver that is stuck is killed."""

    instance: str


class Report(Effect, frozen=True):
    """A line for the log. `failed`: a round that did not commit everywhere."""

    text: str
    failed: bool = False


class Ended(Effect, frozen=True):
    """A round has ended: for who counts; its result is on the way to its ranks."""

    channel: str
    result: RoundResult
    ranks: list[tuple[int, str]]
    """Number and instance of each rank that opened it."""
