"""Every message, as a tagged struct. `docs/protocol.md` says when each is sent and answered.

A message is one envelope frame (a struct of this module, msgpack, array-like: the order of the
fields is the wire format, new ones are appended with a default) and, for the messages in
`WITH_BODY`, one body frame that the broker forwards unread.

What agents send carries the number of the session that their Hello opened, never a sender: the
broker knows the sender by the connection. What the broker sends carries its epoch and the
addressee's instance; an agent drops everything else.
"""

from __future__ import annotations

from msgspec import field

from .limits import (
    BufferNumbers,
    Bytes,
    Call,
    Count,
    EpochId,
    InstanceId,
    Instances,
    Job,
    Label,
    LastCall,
    Micros,
    Name,
    OptionalName,
    Rank,
    SessionNumber,
    Text,
    VersionOrNone,
    Ways,
    WorldSize,
)
from .records import (
    Code,
    CommitNote,
    Distribution,
    Durations,
    Fields,
    Holder,
    OrphanList,
    Phase,
    Processes,
    Proofs,
    QueryKind,
    Readers,
    Receivers,
    ReplicaState,
    RoundRef,
    RoundResult,
    Taken,
    TakeNote,
    Tally,
    Terms,
    TrainerRound,
    WorkerRound,
)

# agents to broker


class AgentMessage(Fields, frozen=True):
    """Base of what agents send."""

    session: SessionNumber


class TrainerHello(AgentMessage, frozen=True, tag="trainer-hello"):
    """Opens a trainer's session and announces all that it knows."""

    protocol: tuple[Count, Count]
    instance: InstanceId
    channel: Name
    group: OptionalName
    rank: Rank
    world_size: WorldSize
    distribution: Distribution
    host: Label
    device: Label
    processes: Processes
    locked: bool
    software: Text
    last_call: LastCall
    rounds: list[TrainerRound]
    last_version: VersionOrNone = 0
    """The highest version that it knows a replica to have committed."""
    job: Job = ""


class WorkerHello(AgentMessage, frozen=True, tag="worker-hello"):
    """Opens a worker's session and announces all that it knows."""

    protocol: tuple[Count, Count]
    instance: InstanceId
    channel: Name
    replica: Name
    member: Rank
    size: WorldSize
    host: Label
    device: Label
    processes: Processes
    locked: bool
    software: Text
    version: VersionOrNone
    torn: bool
    committed: CommitNote | None
    round: WorkerRound | None
    out: list[RoundRef]
    mappings: list[Taken]
    take: TakeNote
    job: Job = ""
    readers: Readers | None = None
    """Of a relay, for which other processes read: these; none: they cannot be named."""


class Open(AgentMessage, frozen=True, tag="open"):
    call: Call
    terms: Terms


class Batch(AgentMessage, frozen=True, tag="batch"):
    """`registered`: the buffers were offered; else the body carries the batch's own table."""

    call: Call
    seq: Count
    buffers: BufferNumbers
    registered: bool
    nbytes: Bytes
    total: Count | None = None
    proofs: Proofs = field(default_factory=list)
    """In a verified round: one for each buffer. The broker keeps them from the workers."""
    via: Ways = field(default_factory=list)
    """How the bytes of its buffers travel; said in the result."""


class Close(AgentMessage, frozen=True, tag="close"):
    call: Call
    total: Count


class Void(AgentMessage, frozen=True, tag="void"):
    call: Call


class Offer(AgentMessage, frozen=True, tag="offer"):
    number: Count
    buffers: BufferNumbers
    nbytes: Bytes
    via: Ways = field(default_factory=list)
    """How the bytes of its buffers travel; shown in the status."""


class Retire(AgentMessage, frozen=True, tag="retire"):
    buffers: BufferNumbers


class Ready(AgentMessage, frozen=True, tag="ready"):
    group: Name
    call: Call


class Staged(AgentMessage, frozen=True, tag="staged"):
    """Device work done and no view left of this batch; `vote`: all of the round is staged."""

    group: Name
    call: Call
    rank: Rank
    seq: Count
    vote: bool = False
    proofs: Proofs = field(default_factory=list)
    """In a verified round: one for each of its buffers that the worker takes."""
    tally: Tally | None = None
    """With a vote."""


class Vote(AgentMessage, frozen=True, tag="vote"):
    group: Name
    call: Call
    tally: Tally | None = None


class Reject(AgentMessage, frozen=True, tag="reject"):
    """This worker is out of the round, and reads nothing of it any more; unless `reading`."""

    group: Name
    call: Call
    code: Code
    text: Text
    torn: bool = False
    reading: bool = False
    """Something of it still looks into the memory: it keeps its leases until it says Drained."""


class Committed(AgentMessage, frozen=True, tag="committed"):
    group: Name
    call: Call
    ok: bool
    text: Text = ""
    prepare_us: Micros = 0
    copy_us: Micros = 0
    commit_us: Micros = 0
    version: VersionOrNone = 0


class Drained(AgentMessage, frozen=True, tag="drained"):
    group: Name
    call: Call
    torn: bool


class Take(AgentMessage, frozen=True, tag="take"):
    note: TakeNote


class Unmapped(AgentMessage, frozen=True, tag="unmapped"):
    trainer: InstanceId
    buffers: BufferNumbers


class Unread(AgentMessage, frozen=True, tag="unread"):
    """Nothing reads any more for these relays of its replica, which have ended."""

    instances: Instances


class Beat(AgentMessage, frozen=True, tag="beat"):
    phase: Phase = Phase.IDLE
    progress: Count = 0


class Bye(AgentMessage, frozen=True, tag="bye"):
    """The agent reads and writes nothing any more and waits for ByeOk."""


class Query(Fields, frozen=True, tag="query"):
    """Asks the broker something outside any session; answered by Reply with a JSON body."""

    id: Count
    kind: QueryKind
    channel: OptionalName = ""
    version: VersionOrNone = 0


FromAgent = (
    TrainerHello
    | WorkerHello
    | Open
    | Batch
    | Close
    | Void
    | Offer
    | Retire
    | Ready
    | Staged
    | Vote
    | Reject
    | Committed
    | Drained
    | Take
    | Unmapped
    | Unread
    | Beat
    | Bye
    | Query
)

# ---------------------------------------------------------------- broker to agents


class BrokerMessage(Fields, frozen=True):
    """Base of what the broker sends."""

    epoch: EpochId
    to: InstanceId


class Welcome(BrokerMessage, frozen=True, tag="welcome"):
    session: SessionNumber
    protocol: Count
    group: OptionalName
    last_call: LastCall
    last_version: VersionOrNone
    durations: Durations
    window: Count
    """Batches that a rank may have unreleased at a time, stuck ones not counted."""
    max_body: Bytes


class Refused(BrokerMessage, frozen=True, tag="refused"):
    """The session was not opened. `retry`: the same Hello may succeed later."""

    code: Code
    text: Text
    retry: bool


class WhoAreYou(Fields, frozen=True, tag="who-are-you"):
    """The broker does not know this connection: open a new session."""

    epoch: EpochId


class Opened(BrokerMessage, frozen=True, tag="opened"):
    call: Call
    receivers: Receivers


class OpenRefused(BrokerMessage, frozen=True, tag="open-refused"):
    call: Call
    code: Code
    text: Text
    last_call: LastCall
    last_version: VersionOrNone


class Release(BrokerMessage, frozen=True, tag="release"):
    call: Call
    seq: Count


class Stuck(BrokerMessage, frozen=True, tag="stuck"):
    """These silent but living receivers keep the lease."""

    call: Call
    seq: Count
    holders: list[Holder]


class Voided(BrokerMessage, frozen=True, tag="voided"):
    """The answer to Void: the round can no longer commit, or (`decided`) it was decided before."""

    call: Call
    decided: bool


class Finished(BrokerMessage, frozen=True, tag="finished"):
    result: RoundResult


class Retired(BrokerMessage, frozen=True, tag="retired"):
    """Nobody has these buffers mapped any more."""

    buffers: BufferNumbers


class RetireRefused(BrokerMessage, frozen=True, tag="retire-refused"):
    buffers: BufferNumbers
    code: Code
    text: Text


class Members(BrokerMessage, frozen=True, tag="members"):
    """The channel's replicas, sent to its trainers whenever one changes.

    `offers`: one more than the highest number of this trainer's offers that was known by then.
    """

    replicas: list[ReplicaState]
    offers: Count = 0


class Prepare(BrokerMessage, frozen=True, tag="prepare"):
    group: Name
    call: Call
    terms: Terms
    receivers: Receivers


class Deliver(BrokerMessage, frozen=True, tag="deliver"):
    """A batch on its way to a worker; `total`, once known, is how many the worker gets in all."""

    group: Name
    call: Call
    rank: Rank
    seq: Count
    trainer: InstanceId
    buffers: BufferNumbers
    registered: bool
    nbytes: Bytes
    total: Count | None = None


class Total(BrokerMessage, frozen=True, tag="total"):
    group: Name
    call: Call
    total: Count


class Commit(BrokerMessage, frozen=True, tag="commit"):
    group: Name
    call: Call


class Abort(BrokerMessage, frozen=True, tag="abort"):
    """The round failed, or the worker's replica is out of it through another member."""

    group: Name
    call: Call
    code: Code
    text: Text


class Expelled(BrokerMessage, frozen=True, tag="expelled"):
    """The worker itself is out of the round."""

    group: Name
    call: Call
    code: Code
    text: Text


class Torn(BrokerMessage, frozen=True, tag="torn"):
    """Another member's commit failed: this worker's replica is not current."""

    group: Name
    call: Call
    text: Text


class Offered(BrokerMessage, frozen=True, tag="offered"):
    trainer: InstanceId
    rank: Rank
    device: Label
    number: Count
    buffers: BufferNumbers


class Unmap(BrokerMessage, frozen=True, tag="unmap"):
    trainer: InstanceId
    buffers: BufferNumbers


class TrainerGone(BrokerMessage, frozen=True, tag="trainer-gone"):
    """This trainer instance will write and offer nothing any more: unmap what it lent."""

    trainer: InstanceId


class Orphans(BrokerMessage, frozen=True, tag="orphans"):
    """All relays of its replica that have ended while what reads for them may not be done."""

    orphans: OrphanList


class BeatOk(BrokerMessage, frozen=True, tag="beat-ok"):
    pass


class ByeOk(BrokerMessage, frozen=True, tag="bye-ok"):
    pass


class Stopping(BrokerMessage, frozen=True, tag="stopping"):
    """The broker ends; agents keep their state and look for its successor."""


class Reply(Fields, frozen=True, tag="reply"):
    epoch: EpochId
    id: Count
    code: Code | None = None


FromBroker = (
    Welcome
    | Refused
    | WhoAreYou
    | Opened
    | OpenRefused
    | Release
    | Stuck
    | Voided
    | Finished
    | Retired
    | RetireRefused
    | Members
    | Prepare
    | Deliver
    | Total
    | Commit
    | Abort
    | Expelled
    | Torn
    | Offered
    | Unmap
    | TrainerGone
    | Orphans
    | BeatOk
    | ByeOk
    | Stopping
    | Reply
)

WITH_BODY: frozenset[type[Fields]] = frozenset({Batch, Offer, Deliver, Offered, Reply})
"""The messages that a body frame follows; it may be empty for a registered Batch."""
