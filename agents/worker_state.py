"""What a worker's core remembers, and what it tells its shell."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct, field

from ..protocol import messages as m
from ..protocol.records import (
    BatchRef,
    Code,
    CommitNote,
    Orphan,
    Phase,
    Proof,
    Receivers,
    TakeNote,
    Tally,
    Terms,
    WorkerRound,
)
from .core import Effect
from .work import RoundKey


class WorkAdded(Effect, frozen=True):
    """There is work for the application's thread."""


class Holding(Effect, frozen=True):
    """A callback has kept views: the round is not over before `WorkerCore.let_go`."""


class ToldTorn(Effect, frozen=True):
    """Another member's commit failed: the replica is not current at this version."""

    version: int
    text: str


BatchKey = tuple[int, int]
"""(rank, sequence number)."""


class BatchState(Enum):
    WAITING = "waiting"
    READING = "reading"
    STAGED = "staged"


class HeldBatch(Struct):
    message: m.Deliver
    body: bytes | None
    state: BatchState = BatchState.WAITING
    # Digests of what was read of it, where the round is verified.
    proofs: list[Proof] = []


class CurrentRound(Struct):
    """The round that the worker takes part in."""

    key: RoundKey
    terms: Terms
    receivers: Receivers
    phase: Phase = Phase.PREPARING
    batches: dict[BatchKey, HeldBatch] = field(default_factory=dict)
    # How many batches it gets; None: the broker has not said yet.
    total: int | None = None
    # The prepare hook was begun: one commit or one abort hook must follow.
    hooked: bool = False
    # The broker was told that the prepare hook is done.
    began: bool = False
    # All wanted regions are staged; and which are not.
    covered: bool = False
    missing: str = ""
    # What it made of the names that came so far.
    tally: Tally | None = None
    # Whether the weights were in doubt before the copy at hand.
    was_torn: bool = False
    # Commit came: the round is decided, and the commit hook is about to run or running.
    decided: bool = False
    # The round ends as soon as the work at hand is done.
    ending: tuple[Code, str] | None = None
    # Its work is done, but a callback has kept views of the trainer's memory.
    kept: bool = False

    def announcement(self) -> WorkerRound:
        """What a Hello says of it."""
        staged, reading = (
            [
                BatchRef(*key, batch.proofs)
                for key, batch in self.batches.items()
                if batch.state is state
            ]
            for state in (BatchState.STAGED, BatchState.READING)
        )
        voted = self.phase in (Phase.VOTED, Phase.COMMITTING)
        return WorkerRound(
            *self.key,
            self.terms,
            self.receivers,
            staged,
            reading,
            voted,
            self.decided,
            self.tally if voted else None,
        )


class OfferNote(Struct):
    trainer: str
    number: int
    buffers: list[int]


class WorkerState(Struct):
    """All that a worker's core remembers."""

    # The version of the last successful commit (0: none), and whether the weights are in doubt.
    version: int = 0
    torn: bool = False
    committed: CommitNote | None = None
    # How it left its last round, as the end of a sentence; empty: it committed.
    left: str = ""
    round: CurrentRound | None = None
    # The next round, held until the present one is drained.
    pending: CurrentRound | None = None
    out: list[RoundKey] = field(default_factory=list)
    offers: list[OfferNote] = field(default_factory=list)
    note: TakeNote = field(default_factory=lambda: TakeNote([], [], False, []))
    # trainer instance -> buffers that are mapped here.
    mappings: dict[str, set[int]] = field(default_factory=dict)
    # Batches and hooks done so far: the progress that beats carry.
    progress: int = 0
    # Of a relay: those before it that have ended, and for which something may read still.
    orphans: list[Orphan] = field(default_factory=list)

    def note_left(self, rnd: CurrentRound, text: str) -> None:
        """A round that the worker took part in does not make it current."""
        self.left = f"and left version {rnd.terms.version}: {text}"


def why_late(state: WorkerState, channel: str) -> str:
    """Says why a worker is not at a version that it waits for, as the end of a sentence."""
    if lacks := "; ".join(state.note.missing[:3]):
        return f", and cannot be in a round: {lacks}"
    if state.left:
        return f", {state.left}{_kept(state.round)}"
    if state.round is not None:
        return _kept(state.round)
    if not state.version and not state.offers and not state.out:
        return (
            f", and no trainer has offered anything or opened a round for it: is {channel!r} the"
            " trainers' channel, and is one running? Who comes late is served inside"
            " trainer.unchanged(), or between guarded steps, or by the next version"
        )
    return (
        ", and no trainer has opened a round for it: who comes late is served inside"
        " trainer.unchanged(), or between guarded steps, or by the next version"
    )


def _kept(rnd: CurrentRound | None) -> str:
    """Says that views are kept, if they are: no other round begins before they are dropped."""
    if rnd is None or not rnd.kept:
        return ""
    return (
        f"; views that on_stage got of version {rnd.terms.version} are kept still: drop them, so"
        " that another round can begin"
    )
