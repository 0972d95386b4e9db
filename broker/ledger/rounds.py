"""A round from its opening to its end: batches, votes, the decision, and every way out of it."""

from __future__ import annotations

from ...protocol import messages as m
from ...protocol.records import (
    Code,
    CommitNote,
    Fate,
    Outcome,
    Proof,
    ReceiverId,
    Tally,
    Terms,
)
from . import ending, leases
from .book import MAX_SHOWN, Book, who
from .state import (
    IN_ROUND,
    Cause,
    Channel,
    Group,
    Lease,
    LeaseState,
    Peer,
    RankEntry,
    Receiver,
    ReceiverState,
    Round,
    RoundKey,
    RoundState,
    Trainer,
    Worker,
)

MAX_OUT = 64
"""Rounds that are remembered of each worker as those that it is out of."""
_UNADMITTED = (RoundState.OPENING, RoundState.RESTORING)
# See `book.py` for why they have names of their own.
_PREPARING, _STAGING = ReceiverState.PREPARING, ReceiverState.STAGING
_COMMITTING, _OUT = ReceiverState.COMMITTING, ReceiverState.OUT
_BEGAN, _VOTED = Cause.BEGAN, Cause.VOTED

# ---------------------------------------------------------------- from trainers


def on_open(book: Book, peer: Peer, message: m.Open) -> None:
    """A rank opens its next call; the last rank to do so puts the round into the queue."""
    channel = book.channel(peer.channel)
    group = channel.group
    assert group is not None and peer.trainer is not None
    ending.acknowledge(book, channel, group, peer, message.call)
    rnd = channel.rounds.get((group.id, message.call))
    if rnd is None:
        code, text = _opening_refusal(channel, group, message)
        if code is not None:
            refuse_open(book, channel, group, peer, message.call, code, text)
            return
        rnd = new_round(book, channel, group, message.call, message.terms)
    opened(book, rnd, peer, message.terms)


def _opening_refusal(channel: Channel, group: Group, message: m.Open) -> tuple[Code | None, str]:
    if message.call <= group.last_call:
        return Code.CALL_ENDED, f"call {message.call} is over; the last was {group.last_call}"
    if message.call > group.last_call + 1:
        return Code.CALL_GAP, f"call {message.call} follows {group.last_call}; calls count by one"
    if message.terms.version < channel.last_version:
        return Code.VERSION_NOT_RISING, (
            f"version {message.terms.version} of channel {channel.name!r} is below "
            f"{channel.last_version}, its last; publish {channel.last_version + 1} or higher"
        )
    return None, ""


def refuse_open(
    book: Book, channel: Channel, group: Group, peer: Peer, call: int, code: Code, text: str
) -> None:
    assert peer.trainer is not None
    last_call = last_call_for(channel, group, peer.trainer.rank)
    book.send(
        peer.instance,
        m.OpenRefused(book.epoch, peer.instance, call, code, text, last_call, channel.last_version),
    )


def last_call_for(channel: Channel, group: Group, rank: int) -> int:
    """The last call that this rank has no part in any more; what it opens next follows it.

    A call that the other ranks have opened, and that waits for this one, is still to come.
    """
    waiting = [
        rnd.call
        for rnd in channel.rounds.values()
        if rnd.group == group.id
        and rnd.state in _UNADMITTED
        and rnd.listed is None
        and rnd.told is None
        and (rank not in rnd.ranks or rnd.ranks[rank].instance is None)
    ]
    return min(waiting, default=group.last_call + 1) - 1


def new_round(book: Book, channel: Channel, group: Group, call: int, terms: Terms) -> Round:
    """Makes the round of this call, which no rank has opened yet."""
    book.state.arrivals += 1
    rnd = Round(
        channel=channel.name,
        group=group.id,
        call=call,
        terms=terms,
        distribution=group.distribution,
        state=RoundState.OPENING,
        arrival=book.state.arrivals,
        ranks={rank: RankEntry() for rank in range(group.world_size)},
        opened_at=book.now,
        progress=book.now,
    )
    channel.rounds[rnd.key] = rnd
    group.last_call = max(group.last_call, call)
    book.arm(book.now + (terms.open_s or book.durations.open_s))
    return rnd


def opened(book: Book, rnd: Round, peer: Peer, terms: Terms) -> None:
    """Notes that this rank has opened (or announced) the round."""
    assert peer.trainer is not None
    rank = rnd.ranks[peer.trainer.rank]
    if rnd.state is RoundState.FINISHED:
        if rank.instance is None:
            # Too late: its batches still come, and come back; then it has to hear the result.
            rank.instance, rank.acknowledged = peer.instance, False
        ending.tell_finished(book, rnd, peer.instance)
        return
    if rank.instance == peer.instance:
        return
    rank.instance = peer.instance
    if terms == rnd.terms:
        book.kick = True
        return
    if terms.version != rnd.version:
        code, other, mine = Code.VERSIONS_DIFFER, str(rnd.version), str(terms.version)
    else:
        code, other, mine = Code.TERMS_DIFFER, str(rnd.terms), str(terms)
    if rnd.state in (RoundState.OPENING, RoundState.STAGING):
        others = sorted(r for r, e in rnd.ranks.items() if e.instance not in (None, peer.instance))
        ending.fail(
            book,
            rnd,
            code,
            f"ranks disagree on call {rnd.call}: rank {peer.trainer.rank} opened {mine}, "
            f"rank {', '.join(map(str, others))} opened {other}",
        )


def on_batch(book: Book, peer: Peer, message: m.Batch, body: bytes | None) -> None:
    """A batch is ready: park it, forward it, or (a repeat) say again what became of it."""
    assert peer.trainer is not None
    rnd = _round_of(book, peer, message.call)
    number = peer.trainer.rank
    if rnd is None or rnd.ranks[number].instance != peer.instance:
        channel = book.channel(peer.channel)
        assert channel.group is not None
        text = f"no round of call {message.call} is open for rank {number}"
        refuse_open(book, channel, channel.group, peer, message.call, Code.NO_ROUND, text)
        return
    rank = rnd.ranks[number]
    lease = rnd.leases.get((number, message.seq))
    if lease is not None and lease.arrived:
        leases.repeat_release(book, rnd, lease, peer.instance)
        return
    # Of a restored lease a round may have been admitted before its batch came: nobody has it yet.
    parked = lease is not None and lease.state is LeaseState.PARKED
    fresh = lease is None or (parked and rnd.state is RoundState.STAGING)
    if lease is None:
        lease = Lease(
            rank=number,
            seq=message.seq,
            trainer=peer.instance,
            buffers=list(message.buffers),
            registered=message.registered,
            nbytes=message.nbytes,
            state=LeaseState.PARKED if rnd.state in _UNADMITTED else LeaseState.HELD,
            holders=set(),
            body=None,
            arrived=False,
            at=book.now,
            proofs=message.proofs,
            via=message.via,
        )
        rnd.leases[(number, message.seq)] = lease
        rank.outstanding += 1
    lease.arrived = True
    peer.trainer.via = message.via
    rank.received += 1
    if lease.state is LeaseState.RELEASED:
        # Of a restored round, and everyone had staged it: its body is not wanted any more, but the
        # round may have waited for it to close.
        leases.repeat_release(book, rnd, lease, peer.instance)
    else:
        lease.body = body or None
    rnd.progress = book.now
    if not _batch_is_right(book, rnd, peer, rank, message):
        leases.settle(book, rnd, lease)
        return
    if message.total is not None:
        rank.total = message.total
    if rnd.state is RoundState.STAGING:
        if fresh:
            final = all(entry.closed for entry in rnd.ranks.values())
            leases.forward(book, rnd, lease, final=final)
        else:
            leases.redeliver(book, rnd, lease)
        leases.close_if_complete(book, rnd, told=lease if fresh else None)
        ending.maybe_decide(book, rnd)
    elif rnd.state is not RoundState.OPENING:
        leases.settle(book, rnd, lease)


def _batch_is_right(book: Book, rnd: Round, peer: Peer, rank: RankEntry, message: m.Batch) -> bool:
    assert peer.trainer is not None
    window = book.state.settings.window
    total = message.total if message.total is not None else rank.total
    if rnd.state in (RoundState.FINISHED, RoundState.RESTORING):
        # Over, or yet to be worked out: it may have been decided before.
        return True
    if message.registered and not _offered(peer.trainer).issuperset(message.buffers):
        code, text = Code.UNKNOWN_BUFFER, "a batch names buffers that were not offered"
    elif rank.outstanding > window:
        code, text = Code.WINDOW, f"more than {window} batches unreleased at a time"
    elif total is not None and (
        message.seq >= total or rank.received > total or rank.total not in (None, total)
    ):
        code, text = Code.MANIFEST, f"batch {message.seq} of a manifest of {total}"
    elif rnd.terms.verify and [p.buffer for p in message.proofs] != message.buffers:
        code = Code.NOT_VERIFIED
        text = f"batch {message.seq} of a verified round has no digest for each of its buffers"
    else:
        return True
    if rnd.state is not RoundState.COMMITTING:
        ending.fail(book, rnd, code, f"rank {peer.trainer.rank}: {text}")
    return False


def _offered(trainer: Trainer) -> set[int]:
    return {n for offer in trainer.offers.values() for n in offer.buffers}


def on_close(book: Book, peer: Peer, message: m.Close) -> None:
    """The manifest of a rank whose last batch did not carry it."""
    assert peer.trainer is not None
    rnd = _round_of(book, peer, message.call)
    if rnd is None or rnd.state in (RoundState.COMMITTING, RoundState.FINISHED):
        return
    rank = rnd.ranks[peer.trainer.rank]
    if rank.instance != peer.instance:
        return
    if rnd.state is not RoundState.RESTORING:
        text = ""
        if rank.received > message.total:
            text = f"closes with {message.total} batches after {rank.received}"
        elif rank.total not in (None, message.total):
            text = f"closes with {message.total} batches, and said {rank.total} before"
        if text:
            ending.fail(book, rnd, Code.MANIFEST, f"rank {peer.trainer.rank} {text}")
            return
    rank.total = message.total
    rnd.progress = book.now
    leases.close_if_complete(book, rnd)
    ending.maybe_decide(book, rnd)


def on_void(book: Book, peer: Peer, message: m.Void) -> None:
    """A trainer must write before the release: the round can never commit, or did so before."""
    assert peer.trainer is not None
    rnd = _round_of(book, peer, message.call)
    if rnd is None:
        book.send(peer.instance, m.Voided(book.epoch, peer.instance, message.call, False))
    elif rnd.state is RoundState.RESTORING or book.recovering:
        rnd.ranks[peer.trainer.rank].void = True
    else:
        if rnd.state in (RoundState.OPENING, RoundState.STAGING):
            ending.fail(book, rnd, Code.VOID, f"rank {peer.trainer.rank} made the round void")
        tell_voided(book, rnd, peer.instance)


def tell_voided(book: Book, rnd: Round, instance: str) -> None:
    decided = rnd.state is RoundState.COMMITTING or (
        rnd.result is not None and rnd.result.outcome in (Outcome.COMMITTED, Outcome.MIXED)
    )
    book.send(instance, m.Voided(book.epoch, instance, rnd.call, decided))


def _round_of(book: Book, peer: Peer, call: int) -> Round | None:
    channel = book.channel(peer.channel)
    return None if channel.group is None else channel.rounds.get((channel.group.id, call))


# ---------------------------------------------------------------- from workers


def on_ready(book: Book, peer: Peer, message: m.Ready) -> None:
    rnd = book.channel(peer.channel).rounds.get((message.group, message.call))
    receiver = None if rnd is None else rnd.receivers.get(peer.instance)
    if rnd is not None and receiver is not None and receiver.state is ReceiverState.PREPARING:
        began(book, rnd, receiver)


def began(book: Book, rnd: Round, receiver: Receiver) -> None:
    book.move_receiver(rnd, receiver, _BEGAN)
    receiver.ready_at = book.now
    book.arm(book.now + (rnd.terms.stage_s or book.durations.stage_s))


def on_staged(book: Book, peer: Peer, message: m.Staged) -> None:
    """A receiver is done with a batch; with its last one comes its vote."""
    rnd = book.channel(peer.channel).rounds.get((message.group, message.call))
    _remember(peer, message)
    if rnd is None:
        return
    lease = rnd.leases.get((message.rank, message.seq))
    owed = lease is not None and peer.instance in lease.holders
    if lease is not None:
        leases.drop_holder(book, rnd, lease, peer.instance)
    receiver = rnd.receivers.get(peer.instance)
    if receiver is None:
        return
    receiver.progress = book.now
    if receiver.state is _PREPARING:
        began(book, rnd, receiver)
    if lease is not None and owed:
        require_proof(book, rnd, receiver, lease, message.proofs)
    if message.vote:
        voted(book, rnd, receiver, message.tally)
    ending.maybe_reap(book, rnd)


def require_proof(
    book: Book, rnd: Round, receiver: Receiver, lease: Lease, said: list[Proof]
) -> None:
    """Puts a receiver out that has not shown that it read what was published."""
    if text := leases.unproven(book, rnd, lease, receiver.id.instance, said):
        ending.remove_replica(book, rnd, receiver, Fate.EXPELLED, Code.NOT_VERIFIED, text)


def _remember(peer: Peer, message: m.Staged | m.Vote) -> None:
    """Keeps a worker's announcement up to date until a restarted broker resumes its round."""
    assert peer.worker is not None
    said = peer.worker.announced
    if said is not None and said.key == (message.group, message.call):
        if isinstance(message, m.Staged):
            said.staged[message.rank, message.seq] = message.proofs
        if isinstance(message, m.Vote) or message.vote:
            said.voted, said.tally = True, message.tally


def on_vote(book: Book, peer: Peer, message: m.Vote) -> None:
    _remember(peer, message)
    rnd = book.channel(peer.channel).rounds.get((message.group, message.call))
    receiver = None if rnd is None else rnd.receivers.get(peer.instance)
    if rnd is None or receiver is None:
        return
    if receiver.state is ReceiverState.PREPARING:
        began(book, rnd, receiver)
    voted(book, rnd, receiver, message.tally)


def voted(book: Book, rnd: Round, receiver: Receiver, tally: Tally | None) -> None:
    """All of it is staged and covers what the receiver wants."""
    if receiver.state is not _STAGING or not rnd.closed or receiver.owed:
        return
    book.move_receiver(rnd, receiver, _VOTED)
    receiver.voted_at, receiver.tally = book.now, tally
    if text := idle(rnd, receiver):
        code = Code.NOTHING_APPLIED
        ending.remove_replica(book, rnd, receiver, Fate.EXPELLED, code, text)
    ending.maybe_decide(book, rnd)


def idle(rnd: Round, receiver: Receiver) -> str:
    """Says that every member of a replica has voted, and none has applied anything; else empty.

    One member may well have nothing of a subset; a worker that does not say counts as one that has.
    """
    if receiver.tally is None or receiver.tally.applied:
        return ""
    mates = [r for r in rnd.receivers.values() if r.id.replica == receiver.id.replica]
    if all(
        mate.state is ReceiverState.VOTED and mate.tally is not None and not mate.tally.applied
        for mate in mates
    ):
        names = ", ".join(receiver.tally.unwanted[:MAX_SHOWN]) or "of other workers"
        return f"no worker of the replica applied anything; the names sent were {names}"
    return ""


def on_reject(book: Book, peer: Peer, message: m.Reject) -> None:
    """A receiver cannot go on; its replica is out, and it reads nothing of the round any more.

    One that is still `reading` keeps its leases until it says Drained, as if it had been expelled.
    """
    if not message.reading:
        _note_out(book, peer, (message.group, message.call), message.torn)
    elif peer.worker is not None:
        peer.worker.torn = peer.worker.torn or message.torn
    rnd = book.channel(peer.channel).rounds.get((message.group, message.call))
    receiver = None if rnd is None else rnd.receivers.get(peer.instance)
    if rnd is not None and receiver is not None:
        code, text = message.code, message.text
        ending.remove_replica(book, rnd, receiver, Fate.EXPELLED, code, text, said=True)
        if not message.reading:
            drained(book, rnd, receiver)
    elif rnd is not None and not message.reading:
        leases.drop_all(book, rnd, peer.instance)


def on_committed(book: Book, peer: Peer, message: m.Committed) -> None:
    """A commit hook ran; only its success makes the version this worker's own."""
    worker = peer.worker
    assert worker is not None
    key = (message.group, message.call)
    rnd = book.channel(peer.channel).rounds.get(key)
    version = message.version if rnd is None else rnd.version
    told = _receivers_of(rnd, worker, key)
    note = CommitNote(*key, version, message.ok, message.text, told)
    receiver = None if rnd is None else rnd.receivers.get(peer.instance)
    if receiver is None or receiver.state is _OUT:
        # A round that it announced and that is unknown here may yet be restored.
        restoring = book.recovering or (rnd is None and bool(told))
        restoring = restoring or (rnd is not None and rnd.state is RoundState.RESTORING)
        _committed_late(book, peer, note, counts=restoring)
    if rnd is None or receiver is None:
        return
    if receiver.state is not _OUT:
        _note_commit(peer, note)
    receiver.prepare_us = message.prepare_us
    receiver.copy_us = message.copy_us
    receiver.commit_us = message.commit_us
    if receiver.state is _COMMITTING:
        committed(book, rnd, receiver, message.ok, message.text)
        ending.finish_if_all_answered(book, rnd)


def _receivers_of(rnd: Round | None, worker: Worker, key: RoundKey) -> list[ReceiverId]:
    """Returns who was on the list of a round that this worker committed: a rank that has been away
    for longer than the round was kept may yet ask.
    """
    said, known = worker.announced, worker.committed
    if rnd is not None and rnd.listed is not None:
        return rnd.listed
    if said is not None and said.key == key:
        return said.receivers
    if known is not None and (known.group, known.call) == key:
        return known.receivers
    return []


def _committed_late(book: Book, peer: Peer, note: CommitNote, *, counts: bool) -> None:
    """The word of an earlier broker, or too late: unless the round is yet to be restored, it
    ended without this worker, and its replica did not switch.
    """
    worker = peer.worker
    assert worker is not None
    key, known = (note.group, note.call), worker.committed
    if known is not None and (known.group, known.call) == key:
        return  # A repetition.
    if note.ok and worker.size > 1 and not counts:
        worker.torn_round = key
        text = "it committed when the round had ended without it"
        book.send(peer.instance, m.Torn(book.epoch, peer.instance, *key, text))
    _note_commit(peer, note)
    book.channel(peer.channel).members_changed = True
    for member in book.members_of(peer):
        tell_if_torn(book, member)


def _note_commit(peer: Peer, note: CommitNote) -> None:
    worker = peer.worker
    assert worker is not None
    worker.committed = note
    worker.announced = worker.doubt = None
    if note.ok and worker.torn_round != (note.group, note.call):
        worker.version, worker.torn = note.version, False
    else:
        worker.torn = True


def committed(book: Book, rnd: Round, receiver: Receiver, ok: bool, text: str) -> None:
    book.move_receiver(rnd, receiver, Cause.SUCCEEDED if ok else Cause.FAILED)
    receiver.committed_at = book.now
    receiver.fate = Fate.COMMITTED if ok else Fate.TORN
    if not ok:
        receiver.code, receiver.reason = Code.COMMIT_FAILED, text
        book.note(rnd, f"{who(receiver)}: commit hook failed: {text}", failed=True)


def on_drained(book: Book, peer: Peer, message: m.Drained) -> None:
    """The worker reads nothing of this round any more: device synchronised, views dropped."""
    _note_out(book, peer, (message.group, message.call), message.torn)
    rnd = book.channel(peer.channel).rounds.get((message.group, message.call))
    receiver = None if rnd is None else rnd.receivers.get(peer.instance)
    if rnd is not None and receiver is not None:
        if receiver.state in IN_ROUND:
            text = "left the round by itself"
            ending.remove_replica(
                book, rnd, receiver, Fate.EXPELLED, Code.WITHDRAWN, text, said=True
            )
        drained(book, rnd, receiver)
    elif rnd is not None:
        leases.drop_all(book, rnd, peer.instance)
    book.kick = True


def _note_out(book: Book, peer: Peer, key: RoundKey, torn: bool) -> None:
    worker = peer.worker
    assert worker is not None
    if worker.doubt == key or (torn and not worker.torn):
        book.channel(peer.channel).members_changed = True
        worker.doubt = None
    worker.torn = worker.torn or torn
    worker.out.add(key)
    if len(worker.out) > MAX_OUT:
        worker.out = {(group, call) for group, call in worker.out if group == key[0]}
        worker.out -= set(sorted(worker.out)[:-MAX_OUT])
    if worker.announced is not None and worker.announced.key == key:
        worker.announced = None
    for other in book.members_of(peer):
        tell_if_torn(book, other)


def tell_if_torn(book: Book, peer: Peer) -> None:
    """Tells who committed, by the word of an earlier broker, a round that another member of its
    replica is out of.
    """
    worker = peer.worker
    assert worker is not None
    note = worker.committed
    if note is None or not note.ok or worker.torn_round == (note.group, note.call):
        return
    key = (note.group, note.call)
    others = [other.worker for other in book.members_of(peer) if other is not peer]
    if any(other is not None and _did_not_commit(other, key) for other in others):
        worker.torn, worker.torn_round = True, key
        text = "another member of the replica is out of the round, or its commit hook failed"
        book.send(peer.instance, m.Torn(book.epoch, peer.instance, *key, text))


def _did_not_commit(worker: Worker, key: RoundKey) -> bool:
    """Whether it says that it is out of this round, or that its commit hook failed."""
    note = worker.committed
    failed = note is not None and not note.ok and (note.group, note.call) == key
    return failed or key in worker.out


def drained(book: Book, rnd: Round, receiver: Receiver) -> None:
    """Takes an expelled or aborted receiver from all leases; it can be in other rounds again."""
    if receiver.state is ReceiverState.DRAINING:
        book.move_receiver(rnd, receiver, Cause.DRAINED)
    if receiver.stuck:
        receiver.stuck = False
        book.channel(rnd.channel).members_changed = True
    leases.drop_all(book, rnd, receiver.id.instance)
    book.kick = True
    ending.maybe_reap(book, rnd)
