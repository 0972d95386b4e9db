"""Offers, what workers take of them, and who has which buffer mapped."""

from __future__ import annotations

from ...protocol import messages as m
from ...protocol.records import Code, Distribution, Taken, TakeNote
from .book import Book, cut
from .state import (
    Channel,
    LeaseState,
    OfferEntry,
    Peer,
)

# ---------------------------------------------------------------- offers and takes


def on_offer(book: Book, peer: Peer, message: m.Offer, body: bytes) -> None:
    """Keeps the offer and passes it to the workers that may take of it."""
    trainer = peer.trainer
    assert trainer is not None
    if message.number in trainer.offers:
        return
    kept = sum(len(offer.body) for offer in trainer.offers.values())
    limit = book.state.settings.max_offer_bytes
    if kept + len(body) > limit:
        text = (
            f"the tables of this trainer's offers have {kept + len(body)} bytes; the broker's "
            f"max-offer-bytes is {limit}"
        )
        book.end_session(peer, Code.BROKER_FULL, text)
        return
    trainer.offers[message.number] = OfferEntry(
        list(message.buffers), message.nbytes, body, message.via
    )
    channel = book.channel(peer.channel)
    for replica in channel.replicas.values():
        for instance in replica.members.values():
            _send_offer(book, peer, message.number, book.state.peers[instance])
    channel.members_changed = True


def _send_offer(book: Book, peer: Peer, number: int, to: Peer) -> None:
    """A colocated worker is offered what the trainer on its own device has, nothing else."""
    trainer = peer.trainer
    assert trainer is not None
    same_device = (to.host, to.device) == (peer.host, peer.device)
    if trainer.distribution is Distribution.COLOCATED and not same_device:
        return
    offer = trainer.offers[number]
    book.send(
        to.instance,
        m.Offered(
            book.epoch,
            to.instance,
            peer.instance,
            trainer.rank,
            peer.device,
            number,
            offer.buffers,
        ),
        offer.body,
    )
    book.map(peer.instance, offer.buffers, to.instance)


def _repeat_offers(book: Book, channel: Channel, peer: Peer) -> None:
    """A worker that says Hello is told of every living offer that it has not seen."""
    worker = peer.worker
    assert worker is not None
    seen = {(ref.trainer, ref.number) for ref in worker.note.seen}
    if channel.group is None:
        return
    for _, instance in sorted(channel.group.ranks.items()):
        source = book.state.peers[instance]
        assert source.trainer is not None
        for number in source.trainer.offers:
            if (instance, number) not in seen:
                _send_offer(book, source, number, peer)


def on_take(book: Book, peer: Peer, message: m.Take) -> None:
    take_note(peer, message.note)
    for taken in message.note.takes:
        # What was given back after an earlier plan may be taken, and mapped, after all.
        book.map(taken.trainer, taken.buffers, peer.instance)
    book.channel(peer.channel).members_changed = True
    book.kick = True


def take_note(peer: Peer, note: TakeNote) -> None:
    worker = peer.worker
    assert worker is not None
    worker.note = note
    worker.takes = {taken.trainer: set(taken.buffers) for taken in note.takes}


# ---------------------------------------------------------------- mappings


def on_retire(book: Book, peer: Peer, message: m.Retire) -> None:
    """Asks who has the buffers mapped to unmap them; refused while a lease names one."""
    trainer = peer.trainer
    assert trainer is not None
    wanted = set(message.buffers)
    channel = book.channel(peer.channel)
    for rnd in channel.rounds.values():
        for lease in rnd.leases.values():
            held = lease.trainer == peer.instance and not wanted.isdisjoint(lease.buffers)
            if held and lease.state is not LeaseState.RELEASED:
                names = ", ".join(sorted(lease.holders)) or "a round that waits"
                text = f"buffers of batch {lease.seq} of call {rnd.call} are leased to {names}"
                book.send(
                    peer.instance,
                    m.RetireRefused(
                        book.epoch, peer.instance, message.buffers, Code.LEASED, cut(text)
                    ),
                )
                return
    trainer.retiring |= wanted
    for instance in _who_knows(book, peer.instance):
        # Who gave a buffer back still knows its offer, and could take of it again.
        known = wanted & _seen_buffers(book, peer, instance)
        book.map(peer.instance, sorted(known), instance)
    for number, offer in list(trainer.offers.items()):
        if wanted.issuperset(offer.buffers):
            del trainer.offers[number]
    mapped = book.state.mappings.get(peer.instance, {})
    workers = sorted({w for buffer in wanted for w in mapped.get(buffer, ())})
    for instance in workers:
        tell_unmap(book, peer.instance, instance, wanted)
    retired_if_free(book, peer)


def _who_knows(book: Book, trainer: str) -> list[str]:
    """Returns the workers that have buffers of this trainer mapped, or have seen its offers."""
    mapped = {w for who in book.state.mappings.get(trainer, {}).values() for w in who}
    seen = {
        instance
        for instance, peer in book.state.peers.items()
        if peer.worker is not None and any(r.trainer == trainer for r in peer.worker.note.seen)
    }
    return sorted(mapped | seen)


def _seen_buffers(book: Book, owner: Peer, worker: str) -> set[int]:
    peer = book.state.peers[worker]
    assert peer.worker is not None and owner.trainer is not None
    offers = owner.trainer.offers
    return {
        number
        for ref in peer.worker.note.seen
        if ref.trainer == owner.instance and ref.number in offers
        for number in offers[ref.number].buffers
    }


def tell_unmap(book: Book, trainer: str, worker: str, buffers: set[int]) -> None:
    mapped = book.state.mappings.get(trainer, {})
    numbers = sorted(b for b in buffers if worker in mapped.get(b, ()))
    if numbers:
        book.send(worker, m.Unmap(book.epoch, worker, trainer, numbers))


def on_unmapped(book: Book, peer: Peer, message: m.Unmapped) -> None:
    unmapped(book, message.trainer, set(message.buffers), peer.instance)


def unmapped(book: Book, trainer: str, buffers: set[int], worker: str) -> None:
    mapped = book.state.mappings.get(trainer)
    if mapped is None:
        return
    for buffer in buffers:
        if buffer in mapped:
            mapped[buffer].discard(worker)
            if not mapped[buffer]:
                del mapped[buffer]
    if not mapped:
        del book.state.mappings[trainer]
    owner = book.state.peers.get(trainer)
    if owner is not None:
        retired_if_free(book, owner)


def tell_trainer_gone(book: Book, trainer: str) -> None:
    """Asks who knows buffers of a trainer that is gone to unmap and forget them."""
    for worker in _who_knows(book, trainer):
        book.send(worker, m.TrainerGone(book.epoch, worker, trainer))


def restore_mappings(book: Book, peer: Peer, mappings: list[Taken]) -> None:
    """Takes over what a worker says it has mapped; that ends what it does not say."""
    said = {taken.trainer: set(taken.buffers) for taken in mappings}
    for trainer in list(book.state.mappings):
        buffers = book.state.mappings[trainer]
        gone = {b for b, who in buffers.items() if peer.instance in who} - said.get(trainer, set())
        unmapped(book, trainer, gone, peer.instance)
    for trainer, numbers in said.items():
        if not numbers:
            continue
        book.map(trainer, sorted(numbers), peer.instance)
        owner = book.state.peers.get(trainer)
        # One that holds its lock lives, though it has not announced itself yet.
        if owner is None and not book.recovering and trainer not in book.state.expected:
            book.send(peer.instance, m.TrainerGone(book.epoch, peer.instance, trainer))
        elif owner is not None and owner.trainer is not None and owner.trainer.retiring:
            tell_unmap(book, trainer, peer.instance, owner.trainer.retiring)


def retired_if_free(book: Book, peer: Peer) -> None:
    """Tells the trainer which of its retiring buffers nobody has mapped any more."""
    trainer = peer.trainer
    if trainer is None or not trainer.retiring or book.recovering:
        return
    mapped = book.state.mappings.get(peer.instance, {})
    free = sorted(buffer for buffer in trainer.retiring if buffer not in mapped)
    if free:
        trainer.retiring.difference_update(free)
        book.send(peer.instance, m.Retired(book.epoch, peer.instance, free))
