"""Leases: who may still read which batch. A lease ends with its last holder, never before."""

from __future__ import annotations

from ...protocol.messages import Deliver, Release, Stuck, Total
from ...protocol.records import Distribution, Holder, Proof
from .book import Book, in_round
from .effects import Kill
from .orphans import holder as orphan_holder
from .state import (
    UNVOTED,
    Cause,
    Lease,
    LeaseState,
    Receiver,
    ReceiverState,
    Round,
    RoundState,
)

# See `book.py` for why they have names of their own.
_HELD, _VOTED, _ASSEMBLED = LeaseState.HELD, ReceiverState.VOTED, Distribution.ASSEMBLED


def in_scope(book: Book, rnd: Round, lease: Lease, instance: str) -> bool:
    """Whether this worker gets the batch.

    Registered buffers go to who takes one of them; a ring batch goes to all (assembled), or to
    who is on the trainer's own device (colocated).
    """
    peer = book.state.peers.get(instance)
    if peer is None or peer.worker is None:
        return False
    if lease.registered:
        taken = peer.worker.takes.get(lease.trainer)
        return taken is not None and any(number in taken for number in lease.buffers)
    if rnd.distribution is _ASSEMBLED:
        return True
    trainer = book.state.peers.get(lease.trainer)
    return trainer is not None and (trainer.host, trainer.device) == (peer.host, peer.device)


def forward(book: Book, rnd: Round, lease: Lease, *, final: bool) -> None:
    """Makes everyone in scope a holder and sends the batch; nobody in scope: it comes back.

    `final`: it is the very last of the round, and says how many the receiver gets in all.
    """
    if lease.state is LeaseState.PARKED:
        book.move_lease(rnd, lease, Cause.FORWARDED)
    for receiver in in_round(rnd):
        instance = receiver.id.instance
        if instance in lease.holders or receiver.state is _VOTED:
            continue
        if in_scope(book, rnd, lease, instance):
            lease.holders.add(instance)
            if not receiver.owed:
                # With batches to read it is its own doing alone that counts as progress.
                receiver.progress = book.now
            receiver.sent += 1
            receiver.owed += 1
            receiver.nbytes += lease.nbytes
            deliver(book, rnd, lease, receiver, receiver.sent if final else None)
    settle(book, rnd, lease)


def deliver(book: Book, rnd: Round, lease: Lease, receiver: Receiver, total: int | None) -> None:
    """Sends the batch to one receiver, for the first time or again.

    A batch that carries handles begins a mapping: it ends when the worker says so or is gone.
    """
    instance = receiver.id.instance
    if not lease.registered:
        book.map(lease.trainer, lease.buffers, instance)
    book.send(
        instance,
        Deliver(
            book.epoch,
            instance,
            rnd.group,
            rnd.call,
            lease.rank,
            lease.seq,
            lease.trainer,
            lease.buffers,
            lease.registered,
            lease.nbytes,
            total,
        ),
        lease.body,
    )


def redeliver(book: Book, rnd: Round, lease: Lease) -> None:
    """Sends a restored batch to the receivers in the round that still owe it."""
    for instance in sorted(lease.holders):
        receiver = rnd.receivers.get(instance)
        if receiver is not None and receiver.state in UNVOTED:
            deliver(book, rnd, lease, receiver, None)


def close_if_complete(book: Book, rnd: Round, told: Lease | None = None) -> None:
    """Once every rank closed, tells each receiver how many batches it gets, even zero.

    Who just got `told`, the very last batch, has read the number in it.
    """
    if rnd.closed or rnd.state is not RoundState.STAGING:
        return
    if not all(rank.closed for rank in rnd.ranks.values()):
        return
    rnd.closed = True
    for receiver in in_round(rnd):
        if not receiver.owed:
            receiver.progress = book.now
        instance = receiver.id.instance
        if told is None or instance not in told.holders:
            tell_total(book, rnd, receiver)


def tell_total(book: Book, rnd: Round, receiver: Receiver) -> None:
    instance = receiver.id.instance
    book.send(instance, Total(book.epoch, instance, rnd.group, rnd.call, receiver.sent))


def unproven(book: Book, rnd: Round, lease: Lease, instance: str, said: list[Proof]) -> str:
    """Says why this receiver has not shown that it read the batch; empty: it has, or need not."""
    if not rnd.terms.verify:
        return ""
    buffers = lease.buffers
    peer = book.state.peers.get(instance)
    if lease.registered and peer is not None and peer.worker is not None:
        taken = peer.worker.takes.get(lease.trainer, set())
        buffers = [number for number in buffers if number in taken]
    expected = {proof.buffer: proof.digest for proof in lease.proofs}
    digests = {proof.buffer: proof.digest for proof in said}
    where = f"batch {lease.seq} of rank {lease.rank}"
    for number in buffers:
        if number not in digests:
            return f"says that {where} is staged, without a digest of buffer {number}"
        if digests[number] != expected.get(number):
            return f"has read other bytes than were published: buffer {number} of {where}"
    return ""


def drop_holder(book: Book, rnd: Round, lease: Lease, instance: str) -> None:
    """This receiver is done with the batch, or can provably no longer read it."""
    if instance not in lease.holders:
        return
    lease.holders.discard(instance)
    receiver = rnd.receivers.get(instance)
    if receiver is not None and receiver.owed:
        receiver.owed -= 1
    settle(book, rnd, lease)


def drop_all(book: Book, rnd: Round, instance: str) -> None:
    """This receiver holds nothing of the round any more."""
    for lease in list(rnd.leases.values()):
        drop_holder(book, rnd, lease, instance)


def settle(book: Book, rnd: Round, lease: Lease) -> None:
    """Releases the lease if nobody holds it, or says that only stuck receivers do."""
    if not lease.holders:
        may_release = rnd.state is not RoundState.RESTORING and not book.recovering
        if lease.state in (LeaseState.HELD, LeaseState.STUCK) and may_release:
            release(book, rnd, lease)
        return
    if lease.state is _HELD and all(_is_stuck(rnd, h) for h in lease.holders):
        book.move_lease(rnd, lease, Cause.DRAIN_OVERDUE)
        tell_stuck(book, rnd, lease)
        if book.state.settings.kill_stuck:
            # The death of a relay would prove nothing.
            for instance in sorted(lease.holders - book.state.relays.keys()):
                book.do(Kill(instance))


def end(book: Book, rnd: Round, lease: Lease) -> None:
    book.move_lease(rnd, lease, Cause.RELEASED)
    lease.body = None
    lease.released_at = book.now


def release(book: Book, rnd: Round, lease: Lease) -> None:
    end(book, rnd, lease)
    book.send(lease.trainer, Release(book.epoch, lease.trainer, rnd.call, lease.seq))


def repeat_release(book: Book, rnd: Round, lease: Lease, trainer: str) -> None:
    """Says it again to who may have missed it; not to one that had left while others read."""
    if lease.state is LeaseState.RELEASED and lease.trainer == trainer:
        book.send(trainer, Release(book.epoch, trainer, rnd.call, lease.seq))


def tell_stuck(book: Book, rnd: Round, lease: Lease) -> None:
    holders: list[Holder] = []
    for instance in sorted(lease.holders):
        orphan = orphan_holder(book.state, instance)
        if orphan is not None:
            holders.append(orphan)
        elif instance in rnd.receivers:
            holders.append(holder(rnd.receivers[instance]))
    book.send(lease.trainer, Stuck(book.epoch, lease.trainer, rnd.call, lease.seq, holders))


def mark_stuck(book: Book, rnd: Round, receiver: Receiver) -> None:
    """Its drain is overdue: the round's result and the trainer hear its name."""
    receiver.stuck = True
    book.channel(rnd.channel).members_changed = True
    instance = receiver.id.instance
    for lease in rnd.leases.values():
        if instance in lease.holders:
            settle(book, rnd, lease)


def _is_stuck(rnd: Round, instance: str) -> bool:
    receiver = rnd.receivers.get(instance)
    return receiver is None or receiver.stuck


def holder(receiver: Receiver) -> Holder:
    id = receiver.id
    return Holder(id.instance, id.replica, id.member, id.processes[0].pid)


def holds_any(rnd: Round, instance: str) -> bool:
    return any(instance in lease.holders for lease in rnd.leases.values())
