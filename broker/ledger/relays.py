"""Relays: workers for which other processes read. Their own end is no proof that nobody does.

A relay that ends while it holds a batch is an *orphan*: out of its round, by name and at once, and
its place is free; but its leases are kept until all that read for it have provably ended, or until
a later relay of its replica says that nothing is read for it any more, which has asked those
who read. A relay that says goodbye reads nothing, like every worker.
"""

from __future__ import annotations

from ...protocol import messages as m
from ...protocol.limits import MAX_ORPHANS
from ...protocol.records import LiveNote, Orphan, ReceiverId
from . import leases, rounds
from .book import Book, who
from .effects import Unwatch, WatchReaders
from .orphans import is_orphan, reading
from .state import Peer, Receiver, Relay, Round

# ---------------------------------------------------------------- who is a relay


def joined(book: Book, peer: Peer) -> None:
    """A worker joins, for which others may read."""
    worker = peer.worker
    book.state.relays.pop(peer.instance, None)
    if worker is not None and peer.readers is not None:
        book.state.relays[peer.instance] = Relay(
            peer.channel, worker.replica, worker.member, peer.pid, peer.readers
        )


def listed(book: Book, rnd: Round, id: ReceiverId) -> None:
    """A relay that has not announced itself is on the list of a restored round."""
    state, instance = book.state, id.instance
    if id.readers is not None and instance not in state.relays and instance not in state.gone:
        state.relays[instance] = Relay(
            rnd.channel, id.replica, id.member, id.processes[0].pid, id.readers
        )


def noted(note: LiveNote) -> Relay:
    """Returns what a relay's live file says; which batches it holds, nobody has said yet."""
    return Relay(
        note.channel, note.replica, note.member, note.pid, list(note.readers), unheard=True
    )


# ---------------------------------------------------------------- its end


def end(book: Book, instance: str) -> None:
    """Its own processes have ended: if it is a relay, others may read for it still."""
    relay = book.state.relays.get(instance)
    if relay is not None:
        relay.ended = True
        # Rounds that are yet to be restored may be its own.
        relay.unheard = relay.unheard or book.recovering


def keep(book: Book, rnd: Round, receiver: Receiver) -> None:
    """It is out, and holds batches as long as others may read them for it: they are stuck."""
    instance = receiver.id.instance
    if not leases.holds_any(rnd, instance):
        rounds.drained(book, rnd, receiver)
        return
    again = receiver.stuck
    why = reading(book.state, instance)
    book.note(rnd, f"{who(receiver)} keeps its leases: {why}", failed=True)
    leases.mark_stuck(book, rnd, receiver)
    for lease in rnd.leases.values() if again else ():
        if instance in lease.holders:
            leases.tell_stuck(book, rnd, lease)  # It was named as one that lives.


def settle(book: Book, instance: str) -> None:
    """Forgets an ended relay that held nothing; else has its readers watched, and asks its heirs."""
    state = book.state
    relay = state.relays.get(instance)
    if relay is None or not relay.ended:
        return
    if not relay.unheard and not _holds(book, instance):
        del state.relays[instance]
        return
    book.do(WatchReaders(instance, relay.readers))
    tell_heirs(book, relay)


def recovered(book: Book) -> None:
    """The recovery window has closed: if all have spoken, it is known what each orphan holds."""
    if not book.state.expected:
        for relay in book.state.relays.values():
            relay.unheard = relay.unheard and not relay.ended
        forget_idle(book)


def forget_idle(book: Book) -> None:
    """Forgets orphans that hold nothing, or nothing any more, as their trainers have gone."""
    state = book.state
    for instance, relay in list(state.relays.items()) if not book.recovering else ():
        channel = state.channels.get(relay.channel)
        unheard = relay.unheard and (state.expected or (channel is not None and channel.group))
        if relay.ended and not unheard and not _holds(book, instance):
            let_go(book, instance, "it holds nothing")


def _holds(book: Book, instance: str) -> bool:
    return any(leases.holds_any(rnd, instance) for rnd in book.rounds())


# ---------------------------------------------------------------- its heirs


def tell_heirs(book: Book, relay: Relay) -> None:
    """Tells the relays of its replica, if there are any, which of them are orphans now."""
    channel = book.state.channels.get(relay.channel)
    if channel is None:
        return
    channel.members_changed = True
    replica = channel.replicas.get(relay.replica)
    for instance in () if replica is None else replica.members.values():
        tell_orphans(book, book.state.peers[instance])


def tell_orphans(book: Book, peer: Peer) -> None:
    """Tells a relay of all orphans of its replica, none included."""
    worker = peer.worker
    if worker is None or peer.readers is None:
        return
    found = [
        Orphan(instance, relay.readers)
        for instance, relay in book.state.relays.items()
        if relay.ended and (relay.channel, relay.replica) == (peer.channel, worker.replica)
    ]
    book.send(peer.instance, m.Orphans(book.epoch, peer.instance, found[:MAX_ORPHANS]))


def on_unread(book: Book, peer: Peer, message: m.Unread) -> None:
    """A relay has found out that nothing reads any more for those before it."""
    worker = peer.worker
    assert worker is not None
    for instance in message.instances:
        relay = book.state.relays.get(instance)
        if relay is None or not relay.ended or peer.readers is None:
            continue
        if (relay.channel, relay.replica) == (peer.channel, worker.replica):
            let_go(book, instance, f"{worker.replica}/{worker.member} (pid {peer.pid}) says so")


def on_readers_gone(book: Book, instance: str, how: str) -> None:
    """All processes that read for an orphan are provably gone."""
    if is_orphan(book.state, instance):
        let_go(book, instance, how)


def let_go(book: Book, instance: str, how: str) -> None:
    """Nobody reads for this orphan any more: what it holds comes back."""
    relay = book.state.relays.pop(instance)
    if book.recovering:
        book.state.gone.add(instance)
    for rnd in list(book.rounds()):
        if leases.holds_any(rnd, instance):
            name = f"{relay.replica}/{relay.member} (pid {relay.pid})"
            book.note(rnd, f"nothing reads for {name} any more: {how}")
        receiver = rnd.receivers.get(instance)
        if receiver is not None:
            rounds.drained(book, rnd, receiver)
        else:
            leases.drop_all(book, rnd, instance)
    book.do(Unwatch(instance))
    tell_heirs(book, relay)
    book.kick = True
