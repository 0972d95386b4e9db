"""Admission: which replicas a round gets, and when. First come, first served per process."""

from __future__ import annotations

from msgspec import Struct, field

from ...protocol import messages as m
from ...protocol.records import Code, Distribution, Fate, Process, ReplicaResult
from . import ending, leases
from .book import MAX_SHOWN, Book, cut
from .state import (
    IN_ROUND,
    Cause,
    Channel,
    Group,
    LeaseState,
    Peer,
    PeerState,
    Receiver,
    ReceiverState,
    Replica,
    Round,
    RoundState,
)

# See `book.py` for why they have names of their own.
_AWAY, _COLOCATED = PeerState.AWAY, Distribution.COLOCATED
_BUSY = IN_ROUND | {ReceiverState.DRAINING}


class Survey(Struct):
    """The replicas of a channel, seen from one round."""

    # Complete, connected and with all their sources.
    ready: list[Replica] = field(default_factory=list)
    # Will be ready or not in a bounded time (reconnecting, or yet to answer an offer): why.
    waiting: list[str] = field(default_factory=list)
    # Not served: with the version already, or without a source.
    unserved: list[ReplicaResult] = field(default_factory=list)
    # Not complete, or silent: they are not part of the round.
    incomplete: list[ReplicaResult] = field(default_factory=list)

    def already(self) -> int:
        return sum(result.fate is Fate.COMMITTED for result in self.unserved)


def survey(book: Book, channel: Channel, rnd: Round) -> Survey:
    """Sorts the channel's replicas for this round."""
    seen = Survey()
    for name in sorted(channel.replicas):
        replica = channel.replicas[name]
        lacks = book.missing(channel, replica)
        current, torn = book.current(channel, replica)
        peers = [book.state.peers[instance] for instance in replica.members.values()]
        workers = [peer.worker for peer in peers if peer.worker is not None]
        if lacks:
            seen.incomplete.append(ReplicaResult(name, Fate.UNSERVED, current, lacks))
        elif current == rnd.version and not torn:
            text = "has this version already"
            seen.unserved.append(ReplicaResult(name, Fate.COMMITTED, current, text))
        elif rnd.terms.subset and current != rnd.terms.base and not _drains(channel, replica):
            text = _not_at_base(rnd, current)
            seen.unserved.append(ReplicaResult(name, Fate.UNSERVED, current, text))
        elif any(w.announced is not None and w.announced.key == rnd.key for w in workers):
            # An earlier broker had begun the round with it; it is told to leave.
            seen.waiting.append(f"replica {name} has yet to leave the round")
        elif any(rnd.key in worker.out for worker in workers):
            text = f"{Code.WITHDRAWN.value}: was in the round before the broker's restart"
            seen.unserved.append(ReplicaResult(name, Fate.UNSERVED, current, text))
        else:
            _sort_by_sources(book, channel.group, replica, peers, current, seen)
    return seen


def _not_at_base(rnd: Round, current: int) -> str:
    """Says so, and how the replica can be served all the same."""
    other = f", or with base={current}" if 0 < current < rnd.version else ""
    here = f"at version {current}, not {rnd.terms.base}"
    return f"{Code.NOT_AT_BASE.value}: {here}: publish all tensors{other}"


def _drains(channel: Channel, replica: Replica) -> bool:
    """Whether it is about to say what it wrote of an earlier round, and so what it is at."""
    receivers = (
        rnd.receivers.get(i) for rnd in channel.rounds.values() for i in replica.members.values()
    )
    return any(r is not None and r.state is ReceiverState.DRAINING for r in receivers)


def _sort_by_sources(
    book: Book,
    group: Group | None,
    replica: Replica,
    peers: list[Peer],
    current: int,
    seen: Survey,
) -> None:
    assert group is not None
    away = [peer for peer in peers if peer.state is _AWAY]
    lacks = [text for peer in peers if (text := lacks_source(book, group, peer))]
    if away:
        seen.waiting.append(f"replica {replica.name} reconnects")
    elif lacks and any(text == AWAITED for text in lacks):
        seen.waiting.append(f"replica {replica.name} {AWAITED}")
    elif lacks:
        text = f"{Code.NO_SOURCE.value}: {lacks[0]}"
        seen.unserved.append(ReplicaResult(replica.name, Fate.UNSERVED, current, cut(text)))
    else:
        seen.ready.append(replica)


AWAITED = "has yet to answer an offer (is its run() or step() being called?)"


def lacks_source(book: Book, group: Group, peer: Peer) -> str:
    """Says which source this worker lacks; empty if it has all.

    Colocated: exactly one trainer on its device. Where trainers have offered buffers, the worker
    must have said of every offer that is meant for it that all it wants is there.
    """
    worker = peer.worker
    assert worker is not None
    trainers = [book.state.peers[i] for i in group.ranks.values() if i in book.state.peers]
    if group.distribution is _COLOCATED:
        beside = [t for t in trainers if (t.host, t.device) == (peer.host, peer.device)]
        if len(beside) != 1:
            devices = ", ".join(sorted({t.device for t in trainers})) or "none"
            count = "no trainer" if not beside else f"{len(beside)} trainers"
            here = f"{count} on device {peer.device}"
            return f"{here}; trainers are on {devices} (an agent's `device` says where it is)"
        trainers = beside
    elif any(t.host != peer.host for t in trainers):
        return f"a trainer on another host than {peer.host}"
    offers = {
        (t.instance, number)
        for t in trainers
        if t.trainer is not None
        for number in t.trainer.offers
    }
    if not offers:
        return ""
    if not offers <= {(ref.trainer, ref.number) for ref in worker.note.seen}:
        return AWAITED
    if not worker.note.complete:
        lacks = "; ".join(worker.note.missing[:5]) or "the trainers offer nothing that it wants"
        return f"member {worker.member} finds no source: {lacks}"
    return ""


def try_admit(book: Book) -> None:
    """Admits what can be admitted, in the order of arrival.

    A round that waits for busy processes keeps later rounds from them, so none starves and two
    channels on one engine cannot wait for each other.
    """
    if book.recovering or book.state.stopping:
        return
    opening = [r for r in book.rounds() if r.state is RoundState.OPENING and _all_opened(r)]
    if not opening:
        return
    claimed = busy_processes(book)
    for rnd in sorted(opening, key=lambda r: r.arrival):
        channel = book.channel(rnd.channel)
        if channel.group is None or channel.group.id != rnd.group:
            continue
        seen = survey(book, channel, rnd)
        wanted = _processes(book, seen.ready)
        if len(seen.ready) + seen.already() < rnd.terms.min_replicas:
            if _all_above_base(rnd, seen):
                open_overdue(book, rnd)
            continue
        if seen.waiting or wanted & claimed:
            claimed |= wanted
            continue
        admit(book, channel, rnd, seen)
        claimed |= wanted


def _all_above_base(rnd: Round, seen: Survey) -> bool:
    """Whether every replica is above a subset's base: versions only rise, so none will be at it."""
    others = seen.ready or seen.waiting or seen.incomplete
    above = [r.fate is Fate.UNSERVED and r.current > rnd.terms.base for r in seen.unserved]
    return rnd.terms.subset and not others and bool(above) and all(above)


def _all_opened(rnd: Round) -> bool:
    return all(rank.instance is not None for rank in rnd.ranks.values())


def _processes(book: Book, replicas: list[Replica]) -> set[Process]:
    return {
        process
        for replica in replicas
        for instance in replica.members.values()
        for process in book.state.peers[instance].processes
    }


def busy_processes(book: Book) -> set[Process]:
    """Returns the processes that take part in a round or have not drained an ended one.

    Those of receivers that never announced themselves after a restart are among them.
    """
    return {
        process
        for rnd in book.rounds()
        for receiver in rnd.receivers.values()
        if receiver.state in _BUSY or receiver.stuck
        for process in receiver.id.processes
    }


def _why_busy(book: Book, channel: Channel, replica: Replica) -> str:
    """Says what keeps a replica's processes: an ended round that it still reads, or another."""
    for rnd in channel.rounds.values():
        for instance in replica.members.values():
            receiver = rnd.receivers.get(instance)
            if receiver is not None and receiver.state is ReceiverState.DRAINING:
                return f"still reading version {rnd.version} (call {rnd.call})"
    return "its processes are busy with another round"


def admit(book: Book, channel: Channel, rnd: Round, seen: Survey) -> None:
    """Fixes the receivers, tells them and the ranks, and forwards what was parked."""
    book.move_round(rnd, Cause.ADMITTED)
    rnd.admitted_at = rnd.progress = book.now
    rnd.unserved, rnd.left_out = seen.unserved, seen.incomplete
    peers = [
        book.state.peers[instance]
        for replica in seen.ready
        for _, instance in sorted(replica.members.items())
    ]
    rnd.listed = [peer.worker.id for peer in peers if peer.worker is not None]
    book.arm(book.now + (rnd.terms.prepare_s or book.durations.prepare_s))
    for id in rnd.listed:
        receiver = Receiver(id, ReceiverState.PREPARING, progress=book.now)
        rnd.receivers[id.instance] = receiver
        rnd.waiting_votes += 1
        prepare(book, rnd, receiver)
    for number, rank in rnd.ranks.items():
        assert rank.instance is not None, number
        tell_opened(book, rnd, rank.instance)
    for lease in list(rnd.leases.values()):
        if lease.state is LeaseState.PARKED and lease.arrived:
            # More of them may follow: Total says how many they are.
            leases.forward(book, rnd, lease, final=False)
    leases.close_if_complete(book, rnd)
    ending.maybe_decide(book, rnd)


def prepare(book: Book, rnd: Round, receiver: Receiver) -> None:
    assert rnd.listed is not None
    instance = receiver.id.instance
    book.send(
        instance,
        m.Prepare(book.epoch, instance, rnd.group, rnd.call, rnd.terms, rnd.listed),
    )


def tell_opened(book: Book, rnd: Round, instance: str) -> None:
    assert rnd.listed is not None
    book.send(instance, m.Opened(book.epoch, instance, rnd.call, rnd.listed))


def open_overdue(book: Book, rnd: Round) -> None:
    """The open limit has passed: go with who is free, or fail naming who is missing."""
    channel = book.channel(rnd.channel)
    if book.state.stopping:
        ending.fail(
            book, rnd, Code.STOPPING, "the broker admits no round any more: it is drained, or ends"
        )
        return
    missing = [str(number) for number, rank in rnd.ranks.items() if rank.instance is None]
    if missing:
        more = f" and {len(missing) - MAX_SHOWN} more" if len(missing) > MAX_SHOWN else ""
        names = ", ".join(missing[:MAX_SHOWN]) + more
        text = f"rank {names} did not open call {rnd.call} in time"
        ending.fail(book, rnd, Code.DEADLINE, text)
        return
    seen = survey(book, channel, rnd)
    busy = busy_processes(book)
    free = [replica for replica in seen.ready if not _processes(book, [replica]) & busy]
    for replica in seen.ready:
        if replica not in free:
            text = _why_busy(book, channel, replica)
            seen.waiting.append(f"replica {replica.name}: {text}")
            current = book.current(channel, replica)[0]
            seen.unserved.append(ReplicaResult(replica.name, Fate.UNSERVED, current, text))
    seen.ready = free
    if len(free) + seen.already() >= rnd.terms.min_replicas:
        admit(book, channel, rnd, seen)
        return
    rnd.unserved = [r for r in seen.unserved if r.fate is Fate.UNSERVED]
    rnd.left_out = seen.incomplete
    ending.fail(book, rnd, Code.TOO_FEW_REPLICAS, too_few(rnd, seen))


def too_few(rnd: Round, seen: Survey) -> str:
    """Says who is ready, or at the version already, and why each other replica is not."""
    at_it = [r for r in seen.unserved if r.fate is Fate.COMMITTED]
    ready = [replica.name for replica in seen.ready]
    ready += [f"{r.replica} {r.reason}" for r in at_it]
    count, least = len(ready), rnd.terms.min_replicas
    reasons = [f"replica {r.replica} {r.reason}" for r in seen.incomplete] + seen.waiting
    reasons += [f"replica {r.replica}: {r.reason}" for r in rnd.unserved if r.reason]
    if not ready:
        why = "; ".join(reasons) or "no worker has joined the channel"
        return f"0 of at least {least} replicas were ready in time: {why}"
    more = f" and {count - MAX_SHOWN} more" if count > MAX_SHOWN else ""
    names = ", ".join(ready[:MAX_SHOWN]) + more
    why = "; ".join(reasons) or "no other has joined the channel"
    was = "replicas was" if count == 1 else "replicas were"
    return f"{count} of at least {least} {was} ready in time ({names}); {why}"
