"""Who is there: hellos, places, groups, offers, mappings, silence, departure and death."""

from __future__ import annotations

from ...protocol import messages as m
from ...protocol.limits import PROTOCOL_VERSION
from ...protocol.records import Code, Fate, ReceiverId, TakeNote
from . import announcements, ending, leases, offers, recovery, relays, rounds
from .admission import lacks_source
from .book import Book, cut
from .effects import Answer, BeginSession, EndSession, Sweep, Unwatch, Watch
from .orphans import is_orphan, reading
from .state import (
    Cause,
    Channel,
    Group,
    Peer,
    PeerState,
    ReceiverState,
    Replica,
    Round,
    Trainer,
    Worker,
)

Hello = m.TrainerHello | m.WorkerHello
# See `book.py` for why it has a name of its own.
_SILENT = PeerState.SILENT
MAX_LABEL = 119
"""Characters of a launcher's name that a group keeps: with `#` and 8 digits it is a name still."""


def on_hello(book: Book, message: Hello) -> None:
    """Opens a session, or refuses it by name. All that the agent announces is idempotent."""
    known = book.state.peers.get(message.instance)
    refusal = _refusal(book, message, known)
    if refusal is not None:
        code, text, retry = refusal
        if known is None:
            # It is in no round: nothing of it has to be waited for.
            book.state.expected.discard(message.instance)
            _reads_nothing(book, message)
        _answer_refused(book, message, code, text, retry)
        recovery.end_if_all_announced(book)
        return
    if known is None:
        peer = _new_peer(book, message)
        book.do(Watch(peer.instance, peer.processes, peer.locked))
    else:
        peer = known
        book.move_peer(peer, Cause.CONNECTED)
    peer.session, peer.heard = message.session, book.now
    book.do(BeginSession(peer.instance))
    book.state.expected.discard(peer.instance)
    _reads_nothing(book, message)
    channel = book.channel(peer.channel)
    if isinstance(message, m.TrainerHello):
        _welcome(book, channel, peer, _join_group(book, channel, peer, message))
        announcements.trainer_announced(book, channel, peer, message)
    else:
        _join_replica(book, channel, peer)
        _welcome(book, channel, peer, channel.group)
        announcements.worker_announced(book, channel, peer, message)
        offers._repeat_offers(book, channel, peer)
        relays.tell_orphans(book, peer)
    book.arm(book.now + book.durations.silent_s)
    channel.members_changed = True
    book.kick = True
    recovery.end_if_all_announced(book)


def _reads_nothing(book: Book, message: Hello) -> None:
    """While nobody knew what it was, it counted as one that may be reading: not any more."""
    told = message.round if isinstance(message, m.WorkerHello) else None
    inside = None if told is None else (told.group, told.call)
    known = message.instance in book.state.peers
    for rnd in book.rounds():
        receiver = rnd.receivers.get(message.instance)
        if rnd.key == inside or (known and receiver is not None):
            continue
        if receiver is None:
            leases.drop_all(book, rnd, message.instance)
        else:
            rounds.drained(book, rnd, receiver)


def _refusal(book: Book, message: Hello, known: Peer | None) -> tuple[Code, str, bool] | None:
    low, high = message.protocol
    if not low <= PROTOCOL_VERSION <= high:
        text = f"the broker speaks protocol {PROTOCOL_VERSION}, the agent {low} to {high}"
        return Code.BAD_VERSION, text, False
    if known is not None:
        if message.session <= known.session:
            text = f"session {message.session} after {known.session}"
            return Code.STALE_SESSION, text, False
        if known.channel != message.channel or _place(known) != _place_of(message):
            return Code.INSTANCE_TAKEN, f"instance {message.instance} is another agent's", False
        return None
    if len(book.state.peers) >= book.state.settings.max_peers:
        text = f"the broker is full: max-agents is {book.state.settings.max_peers}"
        return Code.BROKER_FULL, text, True
    # A refused Hello leaves nothing behind, not even its channel.
    channel = book.state.channels.get(message.channel) or Channel(message.channel)
    if isinstance(message, m.TrainerHello):
        return _trainer_refusal(book, channel, message)
    return _worker_refusal(book, channel, message)


def _place(peer: Peer) -> tuple[str, int, int]:
    if peer.trainer is not None:
        return "", peer.trainer.rank, peer.trainer.world_size
    assert peer.worker is not None
    return peer.worker.replica, peer.worker.member, peer.worker.size


def _place_of(message: Hello) -> tuple[str, int, int]:
    if isinstance(message, m.TrainerHello):
        return "", message.rank, message.world_size
    return message.replica, message.member, message.size


def _trainer_refusal(
    book: Book, channel: Channel, message: m.TrainerHello
) -> tuple[Code, str, bool] | None:
    if message.rank >= message.world_size:
        text = (
            f"rank {message.rank} of {message.world_size} on channel {channel.name!r}: ranks go from"
            f" 0 to {message.world_size - 1}"
        )
        return Code.WORLD_SIZE, text, False
    if book.recovering and not _is_named(message.group):
        text = "the broker has restarted and listens for the trainers that were there"
        return Code.BUSY, text, True
    group = channel.group
    if group is None:
        return None
    if message.group and group.id != message.group and group.label != message.group[:MAX_LABEL]:
        text = (
            f"channel {channel.name!r} is held by group {group.id} ({_ranks(book, group)}): end these"
            " processes, or take another channel"
        )
        return Code.FOREIGN_GROUP, text, True
    holder = group.ranks.get(message.rank)
    if holder is not None:
        pid = book.state.peers[holder].pid
        text = (
            f"rank {message.rank} of channel {channel.name!r} is held by pid {pid} ({holder}): let one"
            " process alone publish, with rank=0, world_size=1, or give each a rank= of its own and"
            " all the same world_size=; trainers of different weights take different channels"
        )
        return Code.RANK_TAKEN, text, True
    if message.world_size != group.world_size:
        text = (
            f"world size {message.world_size}; group {group.id} has {group.world_size}"
            f" ({_ranks(book, group)}): give all ranks of channel {channel.name!r} the same"
            " world_size=, or take another channel"
        )
        return Code.WORLD_SIZE, text, True
    if message.distribution is not group.distribution:
        text = (
            f"{message.distribution.value}; group {group.id} is {group.distribution.value}"
            f" ({_ranks(book, group)}): give all ranks of channel {channel.name!r} the same"
            " distribution="
        )
        return Code.DISTRIBUTION, text, False
    return None


def _is_named(group: str) -> bool:
    """Whether a broker gave this name: only a trainer that was welcomed before knows one."""
    return "#" in group


def _ranks(book: Book, group: Group) -> str:
    peers = book.state.peers
    return ", ".join(f"rank {r}: pid {peers[i].pid}" for r, i in sorted(group.ranks.items()))


def _worker_refusal(
    book: Book, channel: Channel, message: m.WorkerHello
) -> tuple[Code, str, bool] | None:
    if message.member >= message.size:
        text = (
            f"member {message.member} of {message.size} of replica {message.replica!r}: members go"
            f" from 0 to {message.size - 1}"
        )
        return Code.REPLICA_SIZE, text, False
    replica = channel.replicas.get(message.replica)
    if replica is None:
        return None
    if replica.size != message.size:
        text = (
            f"replica {replica.name!r} has {replica.size} members, not {message.size}: give all of"
            " them the same size=, or this worker another replica="
        )
        return Code.REPLICA_SIZE, text, True
    holder = replica.members.get(message.member)
    if holder is not None and not _expelled_as_silent(book, channel, holder):
        pid = book.state.peers[holder].pid
        text = (
            f"member {message.member} of replica {replica.name!r} is held by pid {pid} "
            f"({holder}); give this worker another replica or member"
        )
        return Code.PLACE_TAKEN, text, True
    return None


def _expelled_as_silent(book: Book, channel: Channel, instance: str) -> bool:
    """A silent worker that was put out of a round has lost its place, not its leases."""
    return book.state.peers[instance].state is PeerState.SILENT and any(
        instance in rnd.receivers and rnd.receivers[instance].state is ReceiverState.DRAINING
        for rnd in channel.rounds.values()
    )


def _answer_refused(book: Book, message: Hello, code: Code, text: str, retry: bool) -> None:
    """Refused goes to the connection that asked; an open session of that name is not touched."""
    book.do(Answer(m.Refused(book.epoch, message.instance, code, cut(text), retry)))


def _new_peer(book: Book, message: Hello) -> Peer:
    peer = Peer(
        instance=message.instance,
        channel=message.channel,
        session=message.session,
        state=PeerState.LIVE,
        heard=book.now,
        host=message.host,
        device=message.device,
        processes=list(message.processes),
        locked=message.locked,
        software=message.software,
    )
    if isinstance(message, m.TrainerHello):
        peer.trainer = Trainer(
            message.group, message.rank, message.world_size, message.distribution
        )
    else:
        peer.worker = Worker(
            id=ReceiverId(
                peer.instance, message.replica, message.member, peer.processes, message.readers
            ),
            replica=message.replica,
            member=message.member,
            size=message.size,
            placed=False,
            version=message.version,
            torn=message.torn,
            committed=message.committed,
            out=set(),
            note=TakeNote([], [], False, []),
            takes={},
        )
        relays.joined(book, peer)
    book.state.peers[peer.instance] = peer
    return peer


def _join_group(book: Book, channel: Channel, peer: Peer, message: m.TrainerHello) -> Group:
    trainer = peer.trainer
    assert trainer is not None
    group = channel.group
    if group is None:
        id = message.group
        if not _is_named(id):
            # Launchers use the same name for every run: a group of its own each time.
            id = f"{id[:MAX_LABEL] or 'group'}#{peer.instance[:8]}"
        last = max((call for name, call in channel.rounds if name == id), default=0)
        group = Group(id, message.world_size, message.distribution, {}, last)
        channel.group = group
    trainer.group = group.id
    group.ranks[trainer.rank] = peer.instance
    group.last_call = max(group.last_call, message.last_call)
    return group


def _join_replica(book: Book, channel: Channel, peer: Peer) -> None:
    worker = peer.worker
    assert worker is not None
    replica = channel.replicas.get(worker.replica)
    if replica is None:
        replica = channel.replicas[worker.replica] = Replica(worker.replica, worker.size)
    holder = replica.members.get(worker.member)
    if holder == peer.instance:
        return
    if holder is not None:
        if not _expelled_as_silent(book, channel, holder):
            return
        old = book.state.peers[holder].worker
        assert old is not None
        old.placed = False
    replica.members[worker.member] = peer.instance
    worker.placed = True


def _last_call(channel: Channel, group: Group | None, peer: Peer) -> int:
    if group is None:
        return 0
    if peer.trainer is None:
        return group.last_call
    return rounds.last_call_for(channel, group, peer.trainer.rank)


def _welcome(book: Book, channel: Channel, peer: Peer, group: Group | None) -> None:
    book.send(
        peer.instance,
        m.Welcome(
            book.epoch,
            peer.instance,
            peer.session,
            PROTOCOL_VERSION,
            group.id if group is not None else "",
            _last_call(channel, group, peer),
            channel.last_version,
            book.durations,
            book.state.settings.window,
            book.state.settings.max_body,
        ),
    )


# ---------------------------------------------------------------- leaving


def on_beat(book: Book, peer: Peer, message: m.Beat) -> None:
    book.send(peer.instance, m.BeatOk(book.epoch, peer.instance))
    if peer.worker is None:
        return
    for rnd in book.channel(peer.channel).rounds.values():
        receiver = rnd.receivers.get(peer.instance)
        if receiver is not None and receiver.beat != message.progress:
            receiver.beat = message.progress
            if receiver.state is ReceiverState.STAGING:
                receiver.progress = book.now


def on_bye(book: Book, peer: Peer) -> None:
    """The agent reads and writes nothing any more; ByeOk goes when its lease holders were told."""
    bye = m.ByeOk(book.epoch, peer.instance)
    code = Code.TRAINER_LEFT if peer.trainer is not None else Code.WORKER_LEFT
    depart(book, peer, code, f"{describe(peer)} left", farewell=bye)


def on_gone(book: Book, instance: str, how: str) -> None:
    """All processes of this agent are provably gone; others read for a relay, and may not be."""
    peer = book.state.peers.get(instance)
    book.state.expected.discard(instance)
    relays.end(book, instance)
    if peer is not None:
        code = Code.TRAINER_LOST if peer.trainer is not None else Code.WORKER_LOST
        depart(book, peer, code, f"{describe(peer)} is gone: {how}", farewell=None)
        book.do(Sweep(instance))
    else:
        _note_gone(book, instance)
        for rnd in list(book.rounds()):
            _drop_receiver(book, rnd, instance, Code.WORKER_LOST, f"is gone: {how}")
        if not book.recovering:
            offers.tell_trainer_gone(book, instance)
    relays.settle(book, instance)
    recovery.end_if_all_announced(book)


def _note_gone(book: Book, instance: str) -> None:
    """Rounds that are yet to be restored must know that this one reads nothing any more."""
    if book.recovering and not is_orphan(book.state, instance):
        book.state.gone.add(instance)


def describe(peer: Peer) -> str:
    if peer.trainer is not None:
        return f"trainer rank {peer.trainer.rank} (pid {peer.pid})"
    assert peer.worker is not None
    return f"worker {peer.worker.replica}/{peer.worker.member} (pid {peer.pid})"


def depart(book: Book, peer: Peer, code: Code, text: str, *, farewell: m.ByeOk | None) -> None:
    """Forgets an agent: its rounds, leases, mappings, place; tells whom it concerns."""
    instance = peer.instance
    channel = book.channel(peer.channel)
    if farewell is not None:
        book.state.relays.pop(instance, None)
    _note_gone(book, instance)
    if peer.trainer is not None:
        group = channel.group
        if group is not None and group.ranks.get(peer.trainer.rank) == instance:
            del group.ranks[peer.trainer.rank]
        for rnd in list(channel.rounds.values()):
            ending.lost_rank(book, rnd, peer, code, text)
        offers.tell_trainer_gone(book, instance)
        if group is not None and not group.ranks:
            channel.group = None
    else:
        worker_peer = peer.worker
        assert worker_peer is not None
        replica = channel.replicas.get(worker_peer.replica)
        for rnd in list(channel.rounds.values()):
            _drop_receiver(book, rnd, instance, code, text)
        if replica is not None and replica.members.get(worker_peer.member) == instance:
            del replica.members[worker_peer.member]
            if not replica.members:
                del channel.replicas[replica.name]
        for trainer in list(book.state.mappings):
            offers.unmapped(book, trainer, set(book.state.mappings[trainer]), instance)
    if farewell is not None:
        book.send(instance, farewell)
    del book.state.peers[instance]
    book.do(EndSession(instance))
    book.do(Unwatch(instance))
    if peer.trainer is not None and book.state.relays:
        relays.forget_idle(book)
    channel.members_changed = True
    book.kick = True


def _drop_receiver(book: Book, rnd: Round, instance: str, code: Code, text: str) -> None:
    """It is gone, and reads nothing any more; unless others read for it."""
    receiver = rnd.receivers.get(instance)
    orphan = is_orphan(book.state, instance)
    if orphan and leases.holds_any(rnd, instance):
        text = f"{text}; {reading(book.state, instance)}, so that its leases are kept"
    if receiver is not None:
        ending.remove_replica(book, rnd, receiver, Fate.LOST, code, text, said=True)
        if receiver.fate is Fate.UNKNOWN:
            receiver.fate, receiver.reason = Fate.LOST, text
    if receiver is not None and orphan:
        relays.keep(book, rnd, receiver)
    elif receiver is not None:
        rounds.drained(book, rnd, receiver)
    elif not orphan:
        leases.drop_all(book, rnd, instance)


def on_session_lost(book: Book, instance: str) -> None:
    """The connection was dropped whole; the agent is asked for a new Hello when it is heard."""
    peer = book.state.peers.get(instance)
    if peer is not None:
        book.drop_session(peer)


def look_for_silence(book: Book) -> None:
    """Marks agents that were not heard for too long; only heartbeats see a stopped process."""
    limit = book.durations.silent_s
    for peer in book.state.peers.values():
        if peer.state is PeerState.SILENT:
            continue
        if book.now - peer.heard >= limit:
            book.move_peer(peer, Cause.SILENCE)
            book.channel(peer.channel).members_changed = True
            book.kick = True
        else:
            book.arm(peer.heard + limit)


def heard(book: Book, peer: Peer) -> None:
    peer.heard = book.now
    if peer.state is _SILENT:
        book.move_peer(peer, Cause.HEARD)
        book.arm(book.now + book.durations.silent_s)
        book.channel(peer.channel).members_changed = True
        book.kick = True


def tell_members(book: Book, channel: Channel) -> None:
    """Tells the channel's trainers which replicas there are, after a change."""
    channel.members_changed = False
    if channel.group is None:
        return
    states = [
        book.replica_state(channel, replica, _sources(book, channel, replica))
        for _, replica in sorted(channel.replicas.items())
    ]
    for instance in channel.group.ranks.values():
        trainer = book.state.peers[instance].trainer
        offers = max(trainer.offers, default=-1) + 1 if trainer is not None else 0
        book.send(instance, m.Members(book.epoch, instance, states, offers))


def _sources(book: Book, channel: Channel, replica: Replica) -> str:
    if channel.group is None:
        return "the channel has no trainer"
    for instance in replica.members.values():
        lacks = lacks_source(book, channel.group, book.state.peers[instance])
        if lacks:
            return lacks
    return ""
