"""What messages are made of: the enumerations and the records inside them."""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

from .limits import (
    MAX_ORPHANS,
    BufferNumber,
    BufferNumbers,
    Bytes,
    Call,
    Count,
    Digest,
    InstanceId,
    Micros,
    Name,
    Pid,
    Pids,
    Rank,
    Seconds,
    Text,
    Ticks,
    Version,
    VersionOrNone,
    Ways,
    WorldSize,
)


class Distribution(enum.Enum):
    """Which trainers' batches a worker takes."""

    COLOCATED = "colocated"
    """Those of the one trainer on its own device; each rank holds whole tensors."""
    ASSEMBLED = "assembled"
    """The regions it wants, from whichever ranks hold them."""


class Phase(enum.Enum):
    """What a worker is doing, as its beats say."""

    IDLE = "idle"
    PREPARING = "preparing"
    STAGING = "staging"
    VOTED = "voted"
    COMMITTING = "committing"
    DRAINING = "draining"


class Outcome(enum.StrEnum):
    """What became of a round."""

    COMMITTED = "committed"
    """Every replica that took part is at the version."""
    MIXED = "mixed"
    """Some replicas are, and others are not."""
    FAILED = "failed"
    """None is, and none will be by this round."""
    EMPTY = "empty"
    """No replica was there, and none was asked for."""
    UNRESOLVED = "unresolved"
    """The broker died in it, and who could have said what became of it is silent or gone."""


class Fate(enum.StrEnum):
    """What became of a receiver, or of a replica, in a round."""

    COMMITTED = "committed"
    """It is at the version."""
    TORN = "torn"
    """Its commit hook failed, or another member's: in doubt until a later round commits."""
    LOST = "lost"
    """It is gone: its process ended, or it left."""
    EXPELLED = "expelled"
    """It was put out: it refused, was late, or another member of its replica was out."""
    STUCK = "stuck"
    """Put out while silent but living: it keeps what it may be reading."""
    UNKNOWN = "unknown"
    """It voted, and has not said in time whether it committed."""
    ABORTED = "aborted"
    """The round ended through no fault of this one; it keeps no part of the version as current."""
    UNSERVED = "unserved"
    """A complete replica that the round could not serve; the reason says why."""


class Code(enum.Enum):
    """Why something was refused or ended. `docs/protocol.md` explains each one."""

    BAD_MESSAGE = "bad-message"
    BAD_VERSION = "bad-protocol-version"
    BROKER_FULL = "broker-full"
    FORBIDDEN = "forbidden"
    FOREIGN_GROUP = "foreign-group"
    WORLD_SIZE = "world-size"
    RANK_TAKEN = "rank-taken"
    PLACE_TAKEN = "place-taken"
    REPLICA_SIZE = "replica-size"
    DISTRIBUTION = "distribution"
    INSTANCE_TAKEN = "instance-taken"
    WRONG_JOB = "wrong-job"
    UNPROVEN_PROCESS = "unproven-process"
    STALE_SESSION = "stale-session"
    BUSY = "busy"
    CALL_ENDED = "call-ended"
    CALL_GAP = "call-gap"
    VERSION_NOT_RISING = "version-not-rising"
    VERSION_BELOW_WORKER = "version-below-worker"
    VERSIONS_DIFFER = "versions-differ"
    TERMS_DIFFER = "terms-differ"
    NO_ROUND = "no-round"
    WINDOW = "window"
    LEASED = "leased"
    UNKNOWN_BUFFER = "unknown-buffer"
    MANIFEST = "manifest"
    INCOMPLETE = "incomplete"
    UNREADABLE = "unreadable"
    NOT_VERIFIED = "not-verified"
    NOTHING_APPLIED = "nothing-applied"
    NO_SOURCE = "no-source"
    NOT_AT_BASE = "not-at-base"
    PREPARE_FAILED = "prepare-failed"
    COPY_FAILED = "copy-failed"
    COMMIT_FAILED = "commit-failed"
    WITHDRAWN = "withdrawn"
    DEADLINE = "deadline"
    MEMBER_OUT = "member-out"
    TOO_FEW_REPLICAS = "too-few-replicas"
    TRAINER_LOST = "trainer-lost"
    TRAINER_LEFT = "trainer-left"
    WORKER_LOST = "worker-lost"
    WORKER_LEFT = "worker-left"
    VOID = "void"
    STRICT = "strict"
    UNRESOLVED = "unresolved"
    STOPPING = "stopping"


class Fields(Struct, array_like=True, frozen=True, gc=False):
    """Base of what travels inside messages."""


class Process(Fields, frozen=True):
    """A process that opens handles for an agent.

    `start` is its start time in clock ticks after boot (`/proc/PID/stat`, field 22), `namespace`
    the inode number of its PID namespace; 0 where the platform does not tell.
    """

    pid: Pid
    start: Ticks
    namespace: Ticks = 0


Processes = Annotated[list[Process], Meta(min_length=1, max_length=64)]
Readers = Annotated[list[Process], Meta(max_length=64)]


class ReceiverId(Fields, frozen=True):
    """A receiver of a round, with the processes that read for it."""

    instance: InstanceId
    replica: Name
    member: Rank
    processes: Processes
    readers: Readers | None = None
    """Of a relay: the processes that read instead of it; none: they cannot be named."""


Receivers = Annotated[list[ReceiverId], Meta(max_length=65_536)]


class RoundRef(Fields, frozen=True):
    """A round of the agent's channel: (group, call)."""

    group: Name
    call: Call


class Terms(Fields, frozen=True):
    """What a trainer asks of a round; every rank of a call asks the same.

    Durations are in seconds; 0 takes the broker's own.
    """

    version: Version
    min_replicas: Count = 1
    strict: bool = False
    """One receiver that refuses or is lost fails the round."""
    subset: bool = False
    base: VersionOrNone = 0
    """For a subset round: replicas must be current at this version."""
    open_s: Annotated[float, Meta(ge=0, le=86_400.0)] = 0.0
    prepare_s: Annotated[float, Meta(ge=0, le=86_400.0)] = 0.0
    stage_s: Annotated[float, Meta(ge=0, le=86_400.0)] = 0.0
    commit_s: Annotated[float, Meta(ge=0, le=86_400.0)] = 0.0
    verify: bool = False
    """Workers compute digests of what they read, and one that does not agree is out."""


class Taken(Fields, frozen=True):
    """Buffers of one trainer that a worker takes or has mapped."""

    trainer: InstanceId
    buffers: BufferNumbers


class OfferRef(Fields, frozen=True):
    """One Offer: the trainer's instance and the offer's number."""

    trainer: InstanceId
    number: Count


class Proof(Fields, frozen=True):
    """The digest of a buffer's bytes, by which a worker shows that it has read them."""

    buffer: BufferNumber
    digest: Digest


Proofs = Annotated[list[Proof], Meta(max_length=65_536)]


class Tally(Fields, frozen=True):
    """What a worker made of the names that a round carried."""

    applied: Count
    """Names of which it took all that it wants."""
    skipped: Count
    """Names of which it wanted nothing."""
    unwanted: Annotated[list[Text], Meta(max_length=64)] = []
    """Those, in order; none where they are more than 64."""


class BatchRef(Fields, frozen=True):
    """A batch within a round: (rank, sequence number)."""

    rank: Rank
    seq: Count
    proofs: Proofs = []
    """What was said with its Staged, where the round is verified."""


class Holder(Fields, frozen=True):
    """Who holds a lease: the worker `replica`/`member`, its instance id and its process (`pid`)."""

    instance: InstanceId
    replica: Name
    member: Rank
    pid: Pid
    readers: Pids | None = None
    """It was a relay, and has ended: these may read still; none: they cannot be named."""


class Orphan(Fields, frozen=True):
    """A relay that has ended, while the processes that read for it may not be done."""

    instance: InstanceId
    readers: Readers


OrphanList = Annotated[list[Orphan], Meta(max_length=MAX_ORPHANS)]


class LiveNote(Fields, frozen=True):
    """What a relay writes into its live file: what its death alone does not prove."""

    channel: Name
    replica: Name
    member: Rank
    pid: Pid
    readers: Readers


class ReceiverResult(Fields, frozen=True):
    """What became of one receiver; times in microseconds, as it measured them itself."""

    instance: InstanceId
    replica: Name
    member: Rank
    pid: Pid
    fate: Fate
    reason: Text = ""
    prepare_us: Micros = 0
    copy_us: Micros = 0
    commit_us: Micros = 0
    batches: Count = 0
    nbytes: Bytes = 0
    tally: Tally | None = None


class ReplicaResult(Fields, frozen=True):
    """What became of one replica: its fate, with the reason where it did not commit.

    `current` is the version it reports (0: none).
    """

    replica: Name
    fate: Fate
    current: VersionOrNone = 0
    reason: Text = ""


class SourceResult(Fields, frozen=True):
    """How what a rank has sent travelled."""

    rank: Rank
    via: Ways


class RoundResult(Fields, frozen=True):
    """The end of a round; times in microseconds on the broker's monotonic clock."""

    group: Name
    call: Call
    version: Version
    outcome: Outcome
    reason: Text
    replicas: list[ReplicaResult]
    receivers: list[ReceiverResult]
    nbytes: Bytes = 0
    opening_us: Micros = 0
    staging_us: Micros = 0
    committing_us: Micros = 0
    code: Code | None = None
    """Why the round ended before its decision; None: it was decided."""
    left_out: list[ReplicaResult] = []
    """Replicas that were incomplete or silent when the receivers were fixed: no part of it."""
    sources: list[SourceResult] = []
    """Each rank that has said how its batches travel."""


class LeaseNote(Fields, frozen=True):
    """A trainer's note of one batch in its announcement."""

    seq: Count
    buffers: BufferNumbers
    registered: bool
    nbytes: Bytes
    released: bool
    proofs: Proofs = []
    via: Ways = []


class TrainerRound(Fields, frozen=True):
    """A round as one rank knows it, announced in its Hello."""

    call: Call
    terms: Terms
    receivers: Receivers | None
    leases: list[LeaseNote]
    total: Count | None = None
    """Its manifest: the number of its batches, once closed."""
    void: bool = False
    result: RoundResult | None = None
    """What it was told, if it was."""


class WorkerRound(Fields, frozen=True):
    """The round in progress as one worker knows it, announced in its Hello."""

    group: Name
    call: Call
    terms: Terms
    receivers: Receivers
    staged: list[BatchRef]
    reading: list[BatchRef]
    voted: bool
    decided: bool = False
    """It was told to commit: the round was decided, whether its hook has run or not."""
    tally: Tally | None = None
    """What was said with its vote."""


class CommitNote(Fields, frozen=True):
    """The last round whose commit hook a worker ran, how it went, and who was on its list."""

    group: Name
    call: Call
    version: Version
    ok: bool
    text: Text = ""
    receivers: Receivers = []


class TakeNote(Fields, frozen=True):
    """What a worker takes of the offers it has seen."""

    seen: list[OfferRef]
    takes: list[Taken]
    complete: bool
    missing: list[Text]


class Durations(Fields, frozen=True):
    """The broker's durations in seconds."""

    open_s: Seconds = 60.0
    prepare_s: Seconds = 60.0
    stage_s: Seconds = 30.0
    commit_s: Seconds = 60.0
    drain_s: Seconds = 10.0
    recovery_s: Seconds = 10.0
    beat_s: Seconds = 1.0
    silent_s: Seconds = 5.0


class ReplicaState(Fields, frozen=True):
    """A replica as the broker sees it now."""

    replica: Name
    size: WorldSize
    """How many members it has when it is complete."""
    members: list[Rank]
    """Those that are there."""
    current: VersionOrNone
    """The version that all of them are at; 0: none."""
    torn: bool
    """In doubt: partly overwritten, or not switched by all members."""
    ready: bool
    """Complete, connected, beating, and with a source for all that it wants."""
    reason: Text = ""
    """What it lacks."""


class QueryKind(enum.Enum):
    """What a Query asks for."""

    STATUS = "status"
    STORY = "story"
    DRAIN = "drain"
    RESUME = "resume"
