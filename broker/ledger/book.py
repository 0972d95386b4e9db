"""The book: the state with a clock, an outbox and the one function that changes states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ...protocol.errors import InternalError
from ...protocol.limits import MAX_TEXT
from ...protocol.messages import FromBroker, Refused
from ...protocol.records import Code, Durations, Fate, ReplicaState
from .effects import Effect, EndSession, Report, Send
from .orphans import orphans_of
from .state import (
    IN_ROUND,
    TRANSITIONS,
    UNVOTED,
    AnyState,
    Cause,
    Channel,
    Lease,
    LeaseState,
    Note,
    Peer,
    PeerState,
    Receiver,
    ReceiverState,
    Replica,
    Round,
    RoundState,
    State,
)

MAX_NOTES = 200
MAX_SHOWN = 8
"""Members or ranks that a text names before it says how many more there are."""
MAX_IDLE_CHANNELS = 64

# Python 3.11 takes a third of a microsecond to find a member of an enum by its name: too long for
# what happens several times for each receiver of a round.
_AWAY, _SILENT = PeerState.AWAY, PeerState.SILENT
_COMMITTING = ReceiverState.COMMITTING


class Book:
    """What the parts of the ledger work on.

    Attributes:
        state: All that is known.
        now: The time of the event being handled, in monotonic seconds.
        effects: What the shell shall do, in order.
        seen: The transitions that happened so far; tests compare it with the table.
        kick: Something was freed or joined: rounds that wait may be admitted.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.now = 0.0
        self.effects: list[Effect] = []
        self.seen: set[tuple[AnyState, Cause]] = set()
        self.kick = False

    # ------------------------------------------------------------ looking up

    @property
    def epoch(self) -> str:
        return self.state.epoch

    @property
    def recovering(self) -> bool:
        return self.state.recovering_until is not None

    @property
    def durations(self) -> Durations:
        return self.state.settings.durations

    def channel(self, name: str) -> Channel:
        """Returns the channel, made on first use."""
        channel = self.state.channels.get(name)
        if channel is None:
            self._forget_idle_channels()
            channel = self.state.channels[name] = Channel(name)
        return channel

    def _forget_idle_channels(self) -> None:
        """Channels that nobody uses any more keep their stories, but not for ever."""
        idle = [
            name
            for name, channel in self.state.channels.items()
            if not (channel.group or channel.replicas or channel.rounds)
        ]
        for name in idle[: max(0, len(idle) - MAX_IDLE_CHANNELS + 1)]:
            del self.state.channels[name]

    def rounds(self) -> Iterator[Round]:
        for channel in self.state.channels.values():
            yield from list(channel.rounds.values())

    def rank_of(self, rnd: Round, instance: str) -> int | None:
        for number, rank in rnd.ranks.items():
            if rank.instance == instance:
                return number
        return None

    # ------------------------------------------------------------ acting

    def send(self, to: str, message: FromBroker, body: bytes | None = None) -> None:
        """Sends if the session is open; what an absent agent misses, its next Hello asks for."""
        peer = self.state.peers.get(to)
        if peer is not None and peer.state is not _AWAY and peer.session:
            self.effects.append(Send(to, message, body))

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def arm(self, deadline: float) -> None:
        """Makes sure that the deadlines are looked at by then."""
        self.state.next_check = min(self.state.next_check, deadline)

    def note(self, rnd: Round, text: str, *, failed: bool = False, log: bool = True) -> None:
        """Puts a line into the round's story, and into the log."""
        if len(rnd.notes) < MAX_NOTES:
            rnd.notes.append(Note(self.now, text))
        if log:
            self.do(Report(f"{rnd.channel} version {rnd.version} call {rnd.call}: {text}", failed))

    def map(self, trainer: str, buffers: list[int], worker: str) -> None:
        """Notes that handles of these buffers are sent to this worker, if it hears them."""
        peer = self.state.peers.get(worker)
        if peer is None or peer.state is _AWAY or not buffers:
            return
        mapped = self.state.mappings.setdefault(trainer, {})
        for buffer in buffers:
            mapped.setdefault(buffer, set()).add(worker)

    # ------------------------------------------------------------ changing states

    def move_peer(self, peer: Peer, cause: Cause) -> None:
        to = self._next(peer.state, cause, peer, None)
        assert isinstance(to, PeerState)
        peer.state = to

    def move_round(self, rnd: Round, cause: Cause) -> None:
        to = self._next(rnd.state, cause, rnd, rnd)
        assert isinstance(to, RoundState)
        rnd.state = to

    def move_lease(self, rnd: Round, lease: Lease, cause: Cause) -> None:
        to = self._next(lease.state, cause, lease, rnd)
        assert isinstance(to, LeaseState)
        rnd.ranks[lease.rank].outstanding += _outstanding(to) - _outstanding(lease.state)
        lease.state = to
        rnd.progress = self.now

    def move_receiver(self, rnd: Round, receiver: Receiver, cause: Cause) -> None:
        """Changes a receiver's state, and keeps the round's counters right."""
        old = receiver.state
        to = self._next(old, cause, receiver, rnd)
        assert isinstance(to, ReceiverState)
        receiver.state = to
        receiver.progress = rnd.progress = self.now
        rnd.waiting_votes += (to in UNVOTED) - (old in UNVOTED)
        rnd.waiting_commits += (to is _COMMITTING) - (old is _COMMITTING)

    def _next(
        self, old: AnyState, cause: Cause, mover: Peer | Round | Lease | Receiver, rnd: Round | None
    ) -> AnyState:
        to = TRANSITIONS.get((old, cause))
        if to is None:
            story = "" if rnd is None else "; its story: " + "; ".join(n.text for n in rnd.notes)
            raise InternalError(f"{_name(mover)}: no transition from {old} by {cause}{story}")
        self.seen.add((old, cause))
        return to

    # ------------------------------------------------------------ sessions

    def drop_session(self, peer: Peer) -> None:
        """The session is dropped whole, never one message of it; the agent says Hello again."""
        if peer.state is not PeerState.AWAY:
            self.move_peer(peer, Cause.DROPPED)
            self.channel(peer.channel).members_changed = True

    def end_session(self, peer: Peer, code: Code, text: str) -> None:
        """Ends the session for good: the agent is told why."""
        self.send(peer.instance, Refused(self.epoch, peer.instance, code, text, False))
        self.do(EndSession(peer.instance))
        self.drop_session(peer)

    # ------------------------------------------------------------ replicas

    def members_of(self, peer: Peer) -> list[Peer]:
        """Returns the workers that have a place in this worker's replica."""
        assert peer.worker is not None
        replica = self.channel(peer.channel).replicas.get(peer.worker.replica)
        return [] if replica is None else [self.state.peers[i] for i in replica.members.values()]

    def current(self, channel: Channel, replica: Replica) -> tuple[int, bool]:
        """Returns the version that all members are at (0: none), and whether it is torn."""
        versions: set[int] = set()
        torn = False
        for instance in replica.members.values():
            worker = self.state.peers[instance].worker
            assert worker is not None
            versions.add(worker.version)
            torn = torn or worker.torn or worker.doubt is not None
        same = len(versions) == 1 and len(replica.members) == replica.size
        version = versions.pop() if same else 0
        if torn:
            return 0, True
        return version, not same and len(replica.members) == replica.size

    def missing(self, channel: Channel, replica: Replica) -> str:
        """Says why the replica is not ready, whatever round comes; empty if it is."""
        lacking = replica.size - len(replica.members)
        if lacking:
            absent = (m for m in range(replica.size) if m not in replica.members)
            shown = _list("member", list(islice(absent, MAX_SHOWN)))
            more = f" and {lacking - MAX_SHOWN} more" if lacking > MAX_SHOWN else ""
            return f"waits for {shown}{more} of {replica.size}"
        peers = self.state.peers
        places = replica.members.items()
        silent = [member for member, instance in places if peers[instance].state is _SILENT]
        if silent:
            return f"{_list('member', sorted(silent))} silent"
        stuck = {
            member
            for rnd in channel.rounds.values()
            for member, instance in places
            if (receiver := rnd.receivers.get(instance)) is not None and receiver.stuck
        }
        if stuck:
            return f"{_list('member', sorted(stuck))} still reading an earlier round"
        if orphans := orphans_of(self.state, channel, replica):
            pids = ", ".join(str(relay.pid) for relay in orphans[:MAX_SHOWN])
            return f"has yet to find out whether anything still reads for pid {pids}, which ended"
        return ""

    def replica_state(self, channel: Channel, replica: Replica, sources: str) -> ReplicaState:
        """Returns the replica as agents and operators see it; `sources`: what it lacks there."""
        current, torn = self.current(channel, replica)
        reason = cut(self.missing(channel, replica) or sources)
        return ReplicaState(
            replica.name,
            replica.size,
            sorted(replica.members),
            current,
            torn,
            not reason,
            reason,
        )


def _name(mover: Peer | Round | Lease | Receiver) -> str:
    match mover:
        case Peer():
            return f"agent {mover.instance}"
        case Round():
            return f"round {mover.key}"
        case Lease():
            return f"lease {(mover.rank, mover.seq)}"
        case Receiver():
            return f"receiver {mover.id.instance}"


def _outstanding(state: LeaseState) -> int:
    return int(state is LeaseState.PARKED or state is LeaseState.HELD)


def _list(what: str, numbers: list[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def cut(text: str) -> str:
    """Returns the text, cut to what a message may carry."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 4] + " ..."


def in_round(rnd: Round) -> list[Receiver]:
    """Returns the receivers that still take part."""
    return [receiver for receiver in rnd.receivers.values() if receiver.state in IN_ROUND]


def is_out(receiver: Receiver) -> bool:
    return receiver.fate is not None and receiver.fate is not Fate.COMMITTED


def who(receiver: Receiver) -> str:
    """Names a receiver the way people look for it."""
    id = receiver.id
    member = f"/{id.member}"
    return f"{id.replica}{member} (pid {id.processes[0].pid})"
