"""Answers to queries: what the ledger holds, made for people and their tools.

Pure functions over the ledger's state. Times in answers are ages in seconds, or seconds since the
round was opened; no clock of the broker means anything elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from ..protocol.records import Fate, Outcome, RoundResult
from .config import Limits
from .critical_path import sentence
from .ledger.admission import lacks_source
from .ledger.book import Book
from .ledger.orphans import reading
from .ledger.state import (
    Channel,
    Lease,
    LeaseState,
    Peer,
    Receiver,
    ReceiverState,
    Round,
    RoundState,
    State,
)
from .stories import Story, with_pid

MAX_LEASES = 200
"""Leases that a round's status names, the oldest first; the counts are of all."""
MAX_ENDED = 5
"""Ended rounds that a channel's status names."""
RATE_S = 10.0
"""What rates are averaged over."""
DOCTOR_CHANNEL = "tensorlease-doctor"
"""The channel of the round trips of `tensorlease doctor`: no status shows it once they have left."""


class Counters(Struct):
    """What was counted since the broker began."""

    messages_received: int = 0
    messages_sent: int = 0
    bad_messages: int = 0
    refusals: int = 0
    lost_sessions: int = 0
    unsent_messages: int = 0
    """In the queues of peers that do not read, now."""
    unsent_bytes: int = 0


class AgentStatus(Struct):
    """A trainer rank or a worker."""

    instance: str
    place: int
    """A trainer's rank, a worker's member number."""
    pid: int
    host: str
    device: str
    state: str
    heard_s: float
    """Since it was last heard."""
    software: str
    doubt: str = ""
    """Of a worker that was put out of a round and has not said what it wrote: which round."""
    via: list[str] = []
    """Of a trainer: how the bytes of what it offers and of its last batch travel: `ipc`, `staging`
    (a copy beside the tensors, by IPC), `shm`."""


class GroupStatus(Struct):
    """The trainers of a channel."""

    id: str
    world_size: int
    distribution: str
    last_call: int
    ranks: list[AgentStatus]


class ReplicaStatus(Struct):
    """Workers that switch together."""

    replica: str
    size: int
    current: int
    torn: bool
    ready: bool
    reason: str
    members: list[AgentStatus]


class ReceiverStatus(Struct):
    """A worker's part in a round under way."""

    instance: str
    replica: str
    member: int
    pid: int
    state: str
    owed: int
    """Batches that it still holds."""
    nbytes: int
    moved_s: float
    """Since it last made progress."""
    stuck: bool
    reason: str


class LeaseStatus(Struct):
    """A batch that is not released."""

    rank: int
    seq: int
    state: str
    nbytes: int
    age_s: float
    holders: list[str]
    """`replica/member (pid N)`, or the instance where no more is known."""


class RoundStatus(Struct):
    """A round under way, or ended with leases that somebody still holds."""

    version: int
    call: int
    group: str
    state: str
    age_s: float
    phase_s: float
    """Since the phase began."""
    waits_for: str
    receivers: list[ReceiverStatus]
    leases: list[LeaseStatus]
    held: int
    held_bytes: int
    stuck: int
    stuck_bytes: int


class EndedStatus(Struct):
    """A round that has ended."""

    version: int
    call: int
    outcome: str
    reason: str
    ended_s: float
    """Since its end."""
    took_s: float
    nbytes: int
    """Of its batches."""
    summary: str
    """What it took its time for."""
    behind: list[str] = []
    """Replicas that it left without its version, are here still, and are not at it by now."""


class ChannelStatus(Struct):
    """A channel."""

    name: str
    last_version: int
    group: GroupStatus | None
    replicas: list[ReplicaStatus]
    rounds: list[RoundStatus]
    ended: list[EndedStatus] = []
    """The last ones, the newest first."""
    rounds_per_s: float = 0.0
    """Rounds that committed, somewhere at least, in the last seconds; and the bytes of their
    batches."""
    bytes_per_s: float = 0.0


class MappingStatus(Struct):
    """A trainer's buffers that workers have mapped."""

    trainer: str
    buffers: int
    workers: list[str]


class Status(Struct):
    """Everything that the broker holds."""

    epoch: str
    stopping: bool
    """No round is admitted: it is drained, or ending."""
    recovering_s: float
    """How long it still listens for announcements after a restart; 0: it does not."""
    expected: list[str]
    """Instances that live and have not announced themselves yet."""
    agents: int
    channels: list[ChannelStatus]
    mappings: list[MappingStatus]
    counters: Counters
    limits: Limits = Limits()
    """What it takes on, under the names of its settings."""
    drained: bool = False
    """It was asked to admit no round, and admits some again when it is asked to."""
    ending: bool = False
    """It was told to end, and ends when the rounds under way have."""


def encode(answer: Status | Story) -> bytes:
    """The answer as JSON."""
    return msgspec.json.encode(answer)


def describe(peer: Peer) -> str:
    """Names an agent the way people look for it."""
    if peer.worker is not None:
        return f"worker {peer.worker.replica}/{peer.worker.member} (pid {peer.pid})"
    rank = peer.trainer.rank if peer.trainer is not None else 0
    return f"trainer rank {rank} (pid {peer.pid})"


def named_in_rounds(state: State) -> set[str]:
    """The instances that rounds which have not ended name, or whose leases they still hold."""
    named = {instance for instance, relay in state.relays.items() if relay.ended}
    for channel in state.channels.values():
        for rnd in channel.rounds.values():
            if rnd.state is not RoundState.FINISHED:
                named.update(rnd.receivers)
                named.update(receiver.instance for receiver in rnd.listed or ())
            for lease in rnd.leases.values():
                named.update(lease.holders)
    return named


# ---------------------------------------------------------------- status


def status(
    state: State,
    now: float,
    counters: Counters | None = None,
    limits: Limits | None = None,
    *,
    ending: bool = False,
) -> Status:
    """What the broker holds.

    Args:
        state: The ledger's; it is not changed.
        now: Monotonic seconds.
        counters: The shell's own.
        limits: What the broker takes on.
        ending: Whether it was told to end.
    """
    until = state.recovering_until
    return Status(
        epoch=state.epoch,
        stopping=state.stopping,
        recovering_s=0.0 if until is None else max(0.0, until - now),
        expected=sorted(state.expected),
        agents=len(state.peers),
        channels=[
            _channel(state, c, now) for _, c in sorted(state.channels.items()) if _is_shown(c)
        ],
        mappings=[
            MappingStatus(trainer, len(buffers), sorted(set().union(*buffers.values())))
            for trainer, buffers in sorted(state.mappings.items())
        ],
        counters=counters or Counters(),
        limits=limits or Limits(),
        drained=state.stopping and not ending,
        ending=ending,
    )


def _is_shown(channel: Channel) -> bool:
    in_use = channel.group or channel.replicas or channel.rounds
    return bool(in_use) or channel.name != DOCTOR_CHANNEL


def _channel(state: State, channel: Channel, now: float) -> ChannelStatus:
    # A finished round stays while a rank has yet to hear its result; worth showing only when held.
    rounds = [
        rnd
        for rnd in channel.rounds.values()
        if rnd.state is not RoundState.FINISHED
        or any(_held(lease) for lease in rnd.leases.values())
    ]
    group = channel.group
    ended = [*channel.history]
    ended += [rnd for rnd in channel.rounds.values() if rnd.result is not None]
    ended.sort(key=lambda rnd: rnd.finished_at)
    rounds_per_s, bytes_per_s = _rates(ended, now)
    return ChannelStatus(
        channel.name,
        channel.last_version,
        None
        if group is None
        else GroupStatus(
            group.id,
            group.world_size,
            group.distribution.value,
            group.last_call,
            [
                _agent(state, state.peers[instance], rank, now)
                for rank, instance in sorted(group.ranks.items())
            ],
        ),
        list(_replicas(state, channel, now)),
        [_round(state, rnd, now) for rnd in sorted(rounds, key=lambda rnd: rnd.arrival)],
        [_ended(state, channel, rnd, now) for rnd in reversed(ended[-MAX_ENDED:])],
        rounds_per_s,
        bytes_per_s,
    )


def _ended(state: State, channel: Channel, rnd: Round, now: float) -> EndedStatus:
    result = rnd.result
    assert result is not None
    return EndedStatus(
        rnd.version,
        rnd.call,
        result.outcome.value,
        result.reason,
        _age(rnd.finished_at, now),
        max(0.0, rnd.finished_at - rnd.opened_at),
        result.nbytes,
        sentence(rnd, now),
        sorted(_behind(Book(state), channel, result)),
    )


def _behind(book: Book, channel: Channel, result: RoundResult) -> Iterator[str]:
    """What another process has joined as, under the same name, is another replica."""
    were = {receiver.instance for receiver in result.receivers}
    for missed in result.replicas:
        replica = channel.replicas.get(missed.replica)
        if missed.fate is Fate.COMMITTED or replica is None:
            continue
        same = missed.fate is Fate.UNSERVED or not were.isdisjoint(replica.members.values())
        if same and book.current(channel, replica)[0] < result.version:
            yield replica.name


def _rates(ended: list[Round], now: float) -> tuple[float, float]:
    """Rounds and bytes a second. Only the last rounds are known: they may be of less time."""
    recent = [
        rnd.result.nbytes
        for rnd in ended
        if rnd.result is not None
        and now - rnd.finished_at <= RATE_S
        and rnd.result.outcome in (Outcome.COMMITTED, Outcome.MIXED)
    ]
    if not recent:
        return 0.0, 0.0
    all_are = len(recent) == len(ended) and len(ended) > 1
    span_s = max(now - ended[0].finished_at, 1e-3) if all_are else RATE_S
    # The oldest only says where the time began.
    count, nbytes = (len(recent) - 1, sum(recent[1:])) if all_are else (len(recent), sum(recent))
    return count / span_s, nbytes / span_s


def _replicas(state: State, channel: Channel, now: float) -> Iterator[ReplicaStatus]:
    book = Book(state)
    for name, replica in sorted(channel.replicas.items()):
        members = [state.peers[i] for _, i in sorted(replica.members.items())]
        sources = "" if channel.group is not None else "the channel has no trainer"
        if channel.group is not None:
            lacks = (lacks_source(book, channel.group, peer) for peer in members)
            sources = next((text for text in lacks if text), "")
        seen = book.replica_state(channel, replica, sources)
        yield ReplicaStatus(
            name,
            replica.size,
            seen.current,
            seen.torn,
            seen.ready,
            seen.reason,
            [
                _agent(state, state.peers[i], place, now)
                for place, i in sorted(replica.members.items())
            ],
        )


def _agent(state: State, peer: Peer, place: int, now: float) -> AgentStatus:
    return AgentStatus(
        peer.instance,
        place,
        peer.pid,
        peer.host,
        peer.device,
        peer.state.value,
        max(0.0, now - peer.heard),
        peer.software,
        _doubt(state, peer),
        _via(peer),
    )


def _via(peer: Peer) -> list[str]:
    trainer = peer.trainer
    if trainer is None:
        return []
    return sorted({*trainer.via, *(way for of in trainer.offers.values() for way in of.via)})


def _doubt(state: State, peer: Peer) -> str:
    key = None if peer.worker is None else peer.worker.doubt
    if key is None:
        return ""
    channel = state.channels[peer.channel]
    rounds = (rnd for rnd in [*channel.rounds.values(), *channel.history] if rnd.key == key)
    return next((f"version {rnd.version}" for rnd in rounds), "an earlier round")


def _held(lease: Lease) -> bool:
    return lease.state is not LeaseState.RELEASED


def _round(state: State, rnd: Round, now: float) -> RoundStatus:
    held = sorted((x for x in rnd.leases.values() if _held(x)), key=lambda lease: lease.at)
    stuck = [lease for lease in held if lease.state is LeaseState.STUCK]
    began = {
        RoundState.STAGING: rnd.admitted_at,
        RoundState.COMMITTING: rnd.decided_at,
        RoundState.FINISHED: rnd.finished_at,
    }.get(rnd.state, 0.0)
    return RoundStatus(
        version=rnd.version,
        call=rnd.call,
        group=rnd.group,
        state=rnd.state.value,
        age_s=_age(rnd.opened_at, now),
        phase_s=_age(began or rnd.opened_at, now),
        waits_for=_waits_for(state, rnd),
        receivers=[_receiver(receiver, now) for receiver in rnd.receivers.values()],
        leases=[
            LeaseStatus(
                lease.rank,
                lease.seq,
                lease.state.value,
                lease.nbytes,
                _age(lease.at, now),
                [_holder(state, rnd, instance) for instance in sorted(lease.holders)],
            )
            for lease in held[:MAX_LEASES]
        ],
        held=len(held),
        held_bytes=sum(lease.nbytes for lease in held),
        stuck=len(stuck),
        stuck_bytes=sum(lease.nbytes for lease in stuck),
    )


def _age(since: float, now: float) -> float:
    return max(0.0, now - since) if since else 0.0


def _receiver(receiver: Receiver, now: float) -> ReceiverStatus:
    id = receiver.id
    return ReceiverStatus(
        id.instance,
        id.replica,
        id.member,
        id.processes[0].pid,
        receiver.state.value,
        receiver.owed,
        receiver.nbytes,
        _age(receiver.progress, now),
        receiver.stuck,
        receiver.reason,
    )


def _holder(state: State, rnd: Round, instance: str) -> str:
    orphan = state.relays.get(instance)
    if orphan is not None and orphan.ended:
        name = f"{orphan.replica}/{orphan.member} (pid {orphan.pid}, which has ended: "
        return f"{name}{reading(state, instance)})"
    receiver = rnd.receivers.get(instance)
    if receiver is not None:
        return with_pid(receiver)
    peer = state.peers.get(instance)
    return instance if peer is None else describe(peer)


def _waits_for(state: State, rnd: Round) -> str:
    """Whom the round waits for, in words."""
    if rnd.state is RoundState.OPENING:
        absent = [str(n) for n, rank in sorted(rnd.ranks.items()) if rank.instance is None]
        if absent:
            return f"rank {', '.join(absent)} to open"
        if state.stopping:
            return "the broker to admit rounds again: it is drained"
        return "enough ready replicas whose processes are free"
    if rnd.state is RoundState.RESTORING:
        return "agents to announce themselves"
    if rnd.state is RoundState.COMMITTING:
        return _names(rnd, {ReceiverState.COMMITTING}, "to commit")
    if rnd.state is RoundState.FINISHED:
        return "the holders of its leases"
    unclosed = [str(n) for n, rank in sorted(rnd.ranks.items()) if not rank.closed]
    parts = [f"rank {', '.join(unclosed)} to close"] if unclosed else []
    preparing = _names(rnd, {ReceiverState.PREPARING}, "to prepare")
    staging = _names(rnd, {ReceiverState.STAGING}, "to stage")
    return "; ".join([*parts, *(part for part in (preparing, staging) if part)])


def _names(rnd: Round, states: set[ReceiverState], what: str) -> str:
    found = [with_pid(receiver) for receiver in rnd.receivers.values() if receiver.state in states]
    if not found:
        return ""
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"{', '.join(found[:8])}{more} {what}"
