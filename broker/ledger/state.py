"""What the ledger knows: plain structs, their states, and the table of transitions.

All of it is data: `msgspec` can encode a whole `State` and give it back, which is how small worlds
are explored exhaustively. Cross references are by id, never by object; `validate` checks them. So
no cycle can begin, and what there is most of (receivers, leases) is not tracked by the collector.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct, field

from ...protocol.records import (
    Code,
    CommitNote,
    Distribution,
    Durations,
    Fate,
    Process,
    Proof,
    ReceiverId,
    ReplicaResult,
    RoundResult,
    TakeNote,
    Tally,
    Terms,
)

RoundKey = tuple[str, int]
"""(group, call); unique within a channel."""
LeaseKey = tuple[int, int]
"""(rank, sequence number); unique within a round."""

NOBODY = "-"
"""Stands in `State.expected` for agents that cannot be known by name (they hold no lock)."""


class Label(Enum):
    """Base of states and causes. Members are singletons: hashed by identity, for speed."""

    __hash__ = object.__hash__


class PeerState(Label):
    """How the broker stands with an agent. A peer that is gone or left is forgotten at once."""

    LIVE = "live"
    AWAY = "away"
    SILENT = "silent"


class RoundState(Label):
    """`docs/protocol.md` defines each state and draws the graph."""

    OPENING = "opening"
    RESTORING = "restoring"
    STAGING = "staging"
    COMMITTING = "committing"
    FINISHED = "finished"


class ReceiverState(Label):
    ABSENT = "absent"
    PREPARING = "preparing"
    STAGING = "staging"
    VOTED = "voted"
    COMMITTING = "committing"
    COMMITTED = "committed"
    TORN = "torn"
    DRAINING = "draining"
    OUT = "out"


class LeaseState(Label):
    PARKED = "parked"
    HELD = "held"
    STUCK = "stuck"
    RELEASED = "released"


class Cause(Label):
    """Why something changes its state."""

    CONNECTED = "connected"
    DROPPED = "dropped"
    SILENCE = "silence"
    HEARD = "heard"
    ADMITTED = "admitted"
    RESTORED = "restored"
    UNLISTED = "unlisted"
    DECIDED = "decided"
    ENDED = "ended"
    BEGAN = "began"
    VOTED = "voted"
    COMMIT_SENT = "commit sent"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REMOVED = "removed"
    DRAINED = "drained"
    FORWARDED = "forwarded"
    RELEASED = "released"
    DRAIN_OVERDUE = "drain overdue"


AnyState = PeerState | RoundState | ReceiverState | LeaseState

_P, _R, _W, _L, _C = PeerState, RoundState, ReceiverState, LeaseState, Cause

TRANSITIONS: dict[tuple[AnyState, Cause], AnyState] = {
    # peers
    (_P.LIVE, _C.DROPPED): _P.AWAY,
    (_P.LIVE, _C.SILENCE): _P.SILENT,
    (_P.AWAY, _C.SILENCE): _P.SILENT,
    (_P.AWAY, _C.CONNECTED): _P.LIVE,
    (_P.SILENT, _C.CONNECTED): _P.LIVE,
    (_P.SILENT, _C.HEARD): _P.LIVE,
    (_P.SILENT, _C.DROPPED): _P.SILENT,
    (_P.LIVE, _C.CONNECTED): _P.LIVE,
    # rounds
    (_R.OPENING, _C.ADMITTED): _R.STAGING,
    (_R.OPENING, _C.ENDED): _R.FINISHED,
    (_R.OPENING, _C.RESTORED): _R.RESTORING,
    (_R.RESTORING, _C.RESTORED): _R.STAGING,
    (_R.RESTORING, _C.UNLISTED): _R.OPENING,
    (_R.RESTORING, _C.DECIDED): _R.COMMITTING,
    (_R.RESTORING, _C.ENDED): _R.FINISHED,
    (_R.STAGING, _C.DECIDED): _R.COMMITTING,
    (_R.STAGING, _C.ENDED): _R.FINISHED,
    (_R.COMMITTING, _C.ENDED): _R.FINISHED,
    # receivers
    (_W.ABSENT, _C.RESTORED): _W.PREPARING,
    (_W.ABSENT, _C.REMOVED): _W.OUT,
    (_W.ABSENT, _C.SUCCEEDED): _W.COMMITTED,
    (_W.ABSENT, _C.FAILED): _W.TORN,
    (_W.PREPARING, _C.BEGAN): _W.STAGING,
    (_W.PREPARING, _C.REMOVED): _W.DRAINING,
    (_W.STAGING, _C.VOTED): _W.VOTED,
    (_W.STAGING, _C.REMOVED): _W.DRAINING,
    (_W.VOTED, _C.COMMIT_SENT): _W.COMMITTING,
    (_W.VOTED, _C.REMOVED): _W.DRAINING,
    (_W.COMMITTING, _C.SUCCEEDED): _W.COMMITTED,
    (_W.COMMITTING, _C.FAILED): _W.TORN,
    (_W.COMMITTING, _C.REMOVED): _W.OUT,
    (_W.DRAINING, _C.DRAINED): _W.OUT,
    # leases
    (_L.PARKED, _C.FORWARDED): _L.HELD,
    (_L.PARKED, _C.RELEASED): _L.RELEASED,
    (_L.HELD, _C.RELEASED): _L.RELEASED,
    (_L.HELD, _C.DRAIN_OVERDUE): _L.STUCK,
    (_L.STUCK, _C.RELEASED): _L.RELEASED,
}
"""Every change of state that can happen: (from, cause) -> to. A test fails on an unreached one."""

IN_ROUND = frozenset(
    {ReceiverState.PREPARING, ReceiverState.STAGING, ReceiverState.VOTED, ReceiverState.COMMITTING}
)
"""Receivers that still take part."""
UNVOTED = frozenset({ReceiverState.PREPARING, ReceiverState.STAGING})


class Trainer(Struct):
    """What is particular to a trainer's peer."""

    group: str
    rank: int
    world_size: int
    distribution: Distribution
    # Living offers by number: the buffers and the body, repeated to late joiners.
    offers: dict[int, OfferEntry] = field(default_factory=dict)
    # Buffers to be retired once nobody has them mapped.
    retiring: set[int] = field(default_factory=set)
    # How the bytes of its last batch travel.
    via: list[str] = field(default_factory=list)


class OfferEntry(Struct):
    buffers: list[int]
    nbytes: int
    body: bytes
    via: list[str] = field(default_factory=list)


class Announced(Struct):
    """The round in progress as a worker told of it in its Hello, and since."""

    key: RoundKey
    # What is staged, with the digests that were said of it.
    staged: dict[LeaseKey, list[Proof]]
    voted: bool
    decided: bool = False
    receivers: list[ReceiverId] = field(default_factory=list)
    tally: Tally | None = None


class Worker(Struct):
    """What is particular to a worker's peer."""

    # As rounds list it; nobody changes it: one is enough for all of them.
    id: ReceiverId
    replica: str
    member: int
    size: int
    # False once its place in the replica was given to another instance.
    placed: bool
    # The version of its last successful commit (0: none), and whether its weights are in doubt.
    version: int
    torn: bool
    committed: CommitNote | None
    # Rounds that it said it is out of.
    out: set[RoundKey]
    note: TakeNote
    # trainer instance -> buffers that it takes.
    takes: dict[str, set[int]]
    # The round that it is in, as it said; read when a restarted broker resumes the round.
    announced: Announced | None = None
    # The round whose commit it was told to be torn; repeated until a later one commits.
    torn_round: RoundKey | None = None
    # It is out of this round, of which it may have written some bytes or all, and has not said yet
    # what it is at.
    doubt: RoundKey | None = None


class Peer(Struct):
    """An agent: one run of a trainer or of a worker, known by its instance."""

    instance: str
    channel: str
    session: int
    state: PeerState
    # When it was last heard, and when its silence began to matter; seconds, monotonic.
    heard: float
    host: str
    device: str
    processes: list[Process]
    locked: bool
    software: str
    trainer: Trainer | None = None
    worker: Worker | None = None

    @property
    def pid(self) -> int:
        return self.processes[0].pid

    @property
    def readers(self) -> list[Process] | None:
        """Of a relay: the processes that read for it, as far as they can be named."""
        return None if self.worker is None else self.worker.id.readers


class Relay(Struct):
    """A worker for which other processes read, living or not; `relays.py` says what of it."""

    channel: str
    replica: str
    member: int
    pid: int
    # Who reads for it; empty: they cannot be named.
    readers: list[Process]
    # Its own processes have ended. It is kept as long as others may read for it.
    ended: bool = False
    # Restart: nobody has said yet what it holds.
    unheard: bool = False


class RankEntry(Struct):
    """One rank's part in a round."""

    # The instance that opened; None: this rank has not opened (or announced) the call yet.
    instance: str | None = None
    # Its manifest (None: not closed) and how many of its batches have really arrived.
    total: int | None = None
    received: int = 0
    # Its batches that are parked or held; those of stuck leases are not counted.
    outstanding: int = 0
    # It asked for the round to be void, and has no answer yet.
    void: bool = False
    # It knows the round's result: it was told and has opened a later call, or it is gone.
    acknowledged: bool = False

    @property
    def closed(self) -> bool:
        return self.total is not None and self.received == self.total


class Lease(Struct, gc=False):
    """The promise that a batch's bytes stay put until all its holders are done."""

    rank: int
    seq: int
    # The trainer's instance; empty once that is gone or has left.
    trainer: str
    buffers: list[int]
    registered: bool
    nbytes: int
    state: LeaseState
    # Who may still read: instances. Empty and not recovering means released.
    holders: set[str]
    # The table and handles, forwarded unread; None before it came, and after release.
    body: bytes | None
    # False where only an announcement told of it and the batch itself has not come again yet.
    arrived: bool
    at: float
    released_at: float = 0.0
    # What a receiver that has read its buffers can say of them, in a verified round.
    proofs: list[Proof] = field(default_factory=list)
    # How its bytes travel, as its trainer says.
    via: list[str] = field(default_factory=list)


class Receiver(Struct, gc=False):
    """A worker's part in a round."""

    id: ReceiverId
    state: ReceiverState
    # Batches sent to it, and those of them that it still holds.
    sent: int = 0
    owed: int = 0
    # When it last moved; its phase's limit counts from here. Seconds, monotonic.
    progress: float = 0.0
    beat: int = 0
    fate: Fate | None = None
    code: Code | None = None
    reason: str = ""
    # It keeps a lease although its drain is overdue.
    stuck: bool = False
    told_torn: bool = False
    ready_at: float = 0.0
    voted_at: float = 0.0
    committed_at: float = 0.0
    out_at: float = 0.0
    prepare_us: int = 0
    copy_us: int = 0
    commit_us: int = 0
    nbytes: int = 0
    # What it made of the names, as its vote said.
    tally: Tally | None = None


class Note(Struct, frozen=True):
    """Something worth telling in a round's story."""

    at: float
    text: str


class Round(Struct):
    """One attempt to make one version."""

    channel: str
    group: str
    call: int
    terms: Terms
    distribution: Distribution
    state: RoundState
    # Place in the queue for admission: first come, first served.
    arrival: int
    ranks: dict[int, RankEntry]
    receivers: dict[str, Receiver] = field(default_factory=dict)
    # The list given in Prepare and Opened; None: not admitted, or not known since a restart.
    listed: list[ReceiverId] | None = None
    leases: dict[LeaseKey, Lease] = field(default_factory=dict)
    # Replicas that the round does not serve, and those that have the version already.
    unserved: list[ReplicaResult] = field(default_factory=list)
    # Replicas that were incomplete or silent at admission: no part of the round, but named.
    left_out: list[ReplicaResult] = field(default_factory=list)
    # Receivers in PREPARING or STAGING / in COMMITTING; kept to make each step cheap.
    waiting_votes: int = 0
    waiting_commits: int = 0
    # All ranks closed, all their batches forwarded, and every receiver told its total.
    closed: bool = False
    # Restart: its ranks (or a rank and a worker) announced different terms; why it cannot go on.
    conflict: str = ""
    # Restart: someone silent may have been told to commit it; it cannot be said to have failed.
    doubtful: bool = False
    # Restart: the result as one of its ranks was told it.
    told: RoundResult | None = None
    result: RoundResult | None = None
    opened_at: float = 0.0
    admitted_at: float = 0.0
    decided_at: float = 0.0
    finished_at: float = 0.0
    progress: float = 0.0
    notes: list[Note] = field(default_factory=list)

    @property
    def key(self) -> RoundKey:
        return (self.group, self.call)

    @property
    def version(self) -> int:
        return self.terms.version


class Group(Struct):
    """The trainers of a channel that open rounds together."""

    id: str
    world_size: int
    distribution: Distribution
    ranks: dict[int, str]
    last_call: int = 0

    @property
    def label(self) -> str:
        """The name that the launcher gave, without what makes it this run's own."""
        return self.id.partition("#")[0]


class Replica(Struct):
    """The workers that switch together; `members` maps a place to an instance."""

    name: str
    size: int
    members: dict[int, str] = field(default_factory=dict)


class Channel(Struct):
    """A named stream of versions."""

    name: str
    group: Group | None = None
    replicas: dict[str, Replica] = field(default_factory=dict)
    rounds: dict[RoundKey, Round] = field(default_factory=dict)
    # The highest version that was decided, or that an agent announced.
    last_version: int = 0
    # The trainers must be told of the replicas again.
    members_changed: bool = False
    # Ended rounds, for their story; the oldest are dropped.
    history: list[Round] = field(default_factory=list)


class Settings(Struct, frozen=True):
    """What configuration decides for the ledger."""

    durations: Durations = Durations()
    window: int = 64
    max_offer_bytes: int = 256 * 1024 * 1024
    max_peers: int = 1024
    max_body: int = 64 * 1024 * 1024
    kill_stuck: bool = False
    history: int = 32


class State(Struct):
    """Everything."""

    epoch: str
    settings: Settings
    # Until then, or until all of `expected` have announced themselves, nothing is decided,
    # admitted or released. None: not recovering.
    recovering_until: float | None = None
    expected: set[str] = field(default_factory=set)
    # Restart: who was found to be gone, though it had not announced itself.
    gone: set[str] = field(default_factory=set)
    # Workers for which others read, by instance; and those that have ended and may be read for.
    relays: dict[str, Relay] = field(default_factory=dict)
    # No round is admitted: the broker was drained, or is about to end.
    stopping: bool = False
    peers: dict[str, Peer] = field(default_factory=dict)
    channels: dict[str, Channel] = field(default_factory=dict)
    # trainer instance -> buffer -> workers that have it mapped.
    mappings: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    arrivals: int = 0
    # The next time at which a deadline may have passed.
    next_check: float = 0.0
