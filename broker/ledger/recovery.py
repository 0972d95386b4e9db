"""After a restart: nothing from memory, everything from what the agents announce.

While the broker listens (`State.recovering_until`), rounds that were under way are RESTORING: it
collects who opened them, who was on their list, which batches are out, who staged and voted. When
all expected agents have spoken, or at the deadline, `resume` works out each round once.
"""

from __future__ import annotations

from ...protocol import messages as m
from ...protocol.records import (
    Code,
    Fate,
    Outcome,
    ReceiverId,
)
from . import ending, leases, offers, relays, rounds
from .admission import prepare, tell_opened
from .book import Book, in_round, is_out, who
from .orphans import is_orphan, unheard
from .state import (
    IN_ROUND,
    NOBODY,
    UNVOTED,
    Cause,
    Channel,
    Lease,
    LeaseState,
    RankEntry,
    Receiver,
    ReceiverState,
    Round,
    RoundKey,
    RoundState,
)

DECIDED = (Outcome.COMMITTED, Outcome.MIXED)

# ---------------------------------------------------------------- the end of the window


def end_if_all_announced(book: Book) -> None:
    """Everyone who was to announce itself has: no need to wait for the deadline."""
    if book.recovering and not book.state.expected:
        end_recovery(book)


def end_recovery(book: Book) -> None:
    """Works out every restored round; from now on the ledger decides, admits and releases."""
    book.state.recovering_until = None
    for channel in book.state.channels.values():
        for rnd in list(channel.rounds.values()):
            if rnd.state is RoundState.RESTORING:
                resume(book, channel, rnd)
            else:
                _catch_up(book, rnd)
    if book.state.relays:
        relays.recovered(book)
    book.state.gone.clear()
    for peer in book.state.peers.values():
        offers.retired_if_free(book, peer)
    for trainer in list(book.state.mappings):
        if trainer not in book.state.peers and trainer not in book.state.expected:
            offers.tell_trainer_gone(book, trainer)
    book.kick = True


def _catch_up(book: Book, rnd: Round) -> None:
    """Does for a round that is no restored one what had to wait for the end of the window."""
    for number, rank in list(rnd.ranks.items()):
        if rank.void and rank.instance is not None and rnd.state is RoundState.OPENING:
            text = f"rank {number} made the round void"
            ending.fail(book, rnd, Code.VOID, text)
    _answer_voids(book, rnd)
    for lease in list(rnd.leases.values()):
        leases.settle(book, rnd, lease)
    ending.maybe_reap(book, rnd)


def _answer_voids(book: Book, rnd: Round) -> None:
    for rank in rnd.ranks.values():
        if rank.void and rank.instance is not None:
            rank.void = False
            rounds.tell_voided(book, rnd, rank.instance)


def resume(book: Book, channel: Channel, rnd: Round) -> None:
    """Works out one restored round from all that was announced of it."""
    lost = _missing_ranks(book, channel, rnd)
    if rnd.listed is None and rnd.told is None:
        _resume_unlisted(book, rnd)
        return
    for id in rnd.listed or []:
        _restore_receiver(book, rnd, id)
    for key, lease in rnd.leases.items():
        _restore_holders(book, rnd, key, lease)
    _expel_incomplete_replicas(book, rnd)
    decided = _was_decided(book, rnd)
    absent = [r for r in rnd.receivers.values() if r.state is ReceiverState.ABSENT]
    void = [str(number) for number, rank in sorted(rnd.ranks.items()) if rank.void]
    for receiver in absent:
        text = "did not announce itself after the broker's restart"
        ending.remove(book, rnd, receiver, Fate.UNKNOWN, Code.UNRESOLVED, text, told=None)
        receiver.stuck = True
    if decided:
        _roll_forward(book, channel, rnd)
    elif rnd.told is not None:
        _end(book, rnd, rnd.told.outcome, Code.NO_ROUND, rnd.told.reason)
    elif absent or (lost and book.state.expected):
        names = ", ".join(who(r) for r in absent) or f"rank {', '.join(lost)}"
        text = f"after the broker's restart nothing was heard of {names}"
        _end(book, rnd, Outcome.UNRESOLVED, Code.UNRESOLVED, text)
    elif lost:
        text = f"rank {', '.join(lost)} was lost with the broker"
        _end(book, rnd, Outcome.FAILED, Code.TRAINER_LOST, text)
    elif rnd.conflict:
        _end(book, rnd, Outcome.FAILED, Code.VERSIONS_DIFFER, rnd.conflict)
    elif void:
        text = f"rank {', '.join(void)} made the round void"
        _end(book, rnd, Outcome.FAILED, Code.VOID, text)
    else:
        _go_on(book, rnd)
    _answer_voids(book, rnd)
    for lease in list(rnd.leases.values()):
        leases.settle(book, rnd, lease)
    ending.maybe_reap(book, rnd)


def _was_decided(book: Book, rnd: Round) -> bool:
    """One receiver that committed or was told to, or one rank that was told, settles it."""
    if rnd.told is not None:
        return rnd.told.outcome in DECIDED
    return any(
        receiver.state in (ReceiverState.COMMITTED, ReceiverState.TORN)
        or _was_told_to_commit(book, rnd, receiver)
        for receiver in rnd.receivers.values()
    )


def _was_told_to_commit(book: Book, rnd: Round, receiver: Receiver) -> bool:
    peer = book.state.peers.get(receiver.id.instance)
    said = None if peer is None or peer.worker is None else peer.worker.announced
    return said is not None and said.key == rnd.key and said.decided


def _missing_ranks(book: Book, channel: Channel, rnd: Round) -> list[str]:
    group = channel.group
    if group is None or group.id != rnd.group:
        for rank in rnd.ranks.values():
            rank.acknowledged = True
        return ["0"] if not rnd.ranks else [str(number) for number in rnd.ranks]
    for number in range(group.world_size):
        rnd.ranks.setdefault(number, RankEntry())
    rnd.distribution = group.distribution
    return [
        str(number)
        for number, rank in sorted(rnd.ranks.items())
        if rank.instance is None or rank.instance not in book.state.peers
    ]


def _resume_unlisted(book: Book, rnd: Round) -> None:
    """Nobody knows the receivers: the round was never admitted, or only the silent saw it.

    Whoever is expected and still silent may be reading: each of them keeps the batches.
    """
    book.move_round(rnd, Cause.UNLISTED)
    rnd.doubtful = bool(book.state.expected) or bool(_inside(book, rnd.key))
    for lease in rnd.leases.values():
        if lease.state is LeaseState.PARKED:
            lease.holders |= silent_or_inside(book, book.channel(rnd.channel), rnd.key)
    rnd.opened_at = book.now
    book.arm(book.now + (rnd.terms.open_s or book.durations.open_s))
    gone = [
        str(number)
        for number, rank in sorted(rnd.ranks.items())
        if rank.instance is not None and rank.instance not in book.state.peers
    ]
    if rnd.conflict:
        ending.fail(book, rnd, Code.VERSIONS_DIFFER, rnd.conflict)
    elif gone:
        text = f"rank {', '.join(gone)} was lost while the broker was away"
        ending.fail(book, rnd, Code.TRAINER_LOST, text)
    _catch_up(book, rnd)
    book.kick = True


def _restore_receiver(book: Book, rnd: Round, id: ReceiverId) -> None:
    receiver = Receiver(id, ReceiverState.ABSENT, progress=book.now)
    rnd.receivers[id.instance] = receiver
    peer = book.state.peers.get(id.instance)
    if peer is None or peer.worker is None:
        if id.instance in book.state.gone or is_orphan(book.state, id.instance):
            text = "was lost while the broker was away"
            ending.remove(book, rnd, receiver, Fate.LOST, Code.WORKER_LOST, text, told=None)
        return
    worker = peer.worker
    note, said = worker.committed, worker.announced
    if note is not None and (note.group, note.call) == rnd.key:
        rounds.committed(book, rnd, receiver, note.ok, note.text)
    elif rnd.key in worker.out:
        text = "was out of the round before the broker's restart"
        ending.remove(book, rnd, receiver, Fate.EXPELLED, Code.WITHDRAWN, text, told=None)
    else:
        book.move_receiver(rnd, receiver, Cause.RESTORED)
        if said is not None and said.key == rnd.key:
            rounds.began(book, rnd, receiver)
            if said.voted:
                book.move_receiver(rnd, receiver, Cause.VOTED)
                receiver.tally = said.tally


def _restore_holders(book: Book, rnd: Round, key: tuple[int, int], lease: Lease) -> None:
    """Works out who may be reading a batch, and how many each receiver gets."""
    # Who counted as one that may be reading, as long as nobody knew the receivers.
    lease.holders.difference_update(rnd.receivers)
    if lease.state is LeaseState.PARKED:
        book.move_lease(rnd, lease, Cause.FORWARDED)
    for instance, receiver in rnd.receivers.items():
        orphan = is_orphan(book.state, instance)
        if receiver.state is ReceiverState.ABSENT or orphan:
            if lease.state is LeaseState.HELD:
                lease.holders.add(instance)
                receiver.stuck = receiver.stuck or orphan
            continue
        if receiver.state not in IN_ROUND or not leases.in_scope(book, rnd, lease, instance):
            continue
        receiver.sent += 1
        receiver.nbytes += lease.nbytes
        peer = book.state.peers[instance]
        assert peer.worker is not None
        said = peer.worker.announced
        staged = said is not None and said.key == rnd.key and key in said.staged
        voted = receiver.state is ReceiverState.VOTED
        if lease.state is LeaseState.HELD and not staged and not voted:
            lease.holders.add(instance)
            receiver.owed += 1


def _expel_incomplete_replicas(book: Book, rnd: Round) -> None:
    """Out of the round stands across restarts, and for the whole replica.

    Not for a member that was told to commit: it does, and its replica is torn.
    """
    out = {r.id.replica: r for r in rnd.receivers.values() if is_out(r)}
    for receiver in in_round(rnd):
        cause = out.get(receiver.id.replica)
        if cause is not None and not _was_told_to_commit(book, rnd, receiver):
            text = f"{who(cause)} is out: {cause.reason}"
            ending.remove(book, rnd, receiver, Fate.EXPELLED, Code.MEMBER_OUT, text, told=m.Abort)


def _roll_forward(book: Book, channel: Channel, rnd: Round) -> None:
    """The decision was made before the restart: who voted commits, who had not was out."""
    told = {} if rnd.told is None else {r.instance: r.fate for r in rnd.told.receivers}
    for receiver in in_round(rnd):
        # A rank was told that it is out, or it had not voted: no Commit was on its way to it.
        out = told.get(receiver.id.instance, Fate.UNKNOWN) not in (Fate.COMMITTED, Fate.UNKNOWN)
        if out or receiver.state in UNVOTED:
            text = "was out" if out else "had not voted when the round was decided"
            ending.remove(
                book, rnd, receiver, Fate.EXPELLED, Code.MEMBER_OUT, text, told=m.Expelled
            )
    for receiver, code, text in _unfit(book, rnd):
        # The broker before saw what it had staged, if it told it to commit; and then it does.
        if receiver.state in IN_ROUND and not _was_told_to_commit(book, rnd, receiver):
            ending.remove(book, rnd, receiver, Fate.EXPELLED, code, text, told=m.Expelled)
    _expel_incomplete_replicas(book, rnd)
    channel.last_version = max(channel.last_version, rnd.version)
    for number, rank in rnd.ranks.items():
        if rank.instance is None:
            rank.acknowledged = True
            book.note(rnd, f"rank {number} was lost with the broker")
    book.note(rnd, "was decided before the broker's restart: rolled forward")
    ending.decide(book, rnd)


def _end(book: Book, rnd: Round, outcome: Outcome, code: Code, text: str) -> None:
    for receiver in in_round(rnd):
        ending.remove(book, rnd, receiver, Fate.ABORTED, code, text, told=m.Abort)
    ending.finish(book, rnd, outcome, text, code)


def _go_on(book: Book, rnd: Round) -> None:
    """Everyone is there: the round continues where it was."""
    book.move_round(rnd, Cause.RESTORED)
    rnd.admitted_at = rnd.progress = book.now
    book.arm(book.now + book.durations.prepare_s)
    for rank in rnd.ranks.values():
        assert rank.instance is not None
        tell_opened(book, rnd, rank.instance)
    for receiver in in_round(rnd):
        if receiver.state in UNVOTED:
            prepare(book, rnd, receiver)
    for lease in list(rnd.leases.values()):
        if lease.arrived:
            leases.redeliver(book, rnd, lease)
    leases.close_if_complete(book, rnd)
    for receiver, code, text in _unfit(book, rnd):
        if receiver.state in IN_ROUND:
            ending.take_out(book, rnd, receiver, Fate.EXPELLED, code, text)
    ending.after_removal(book, rnd)


def _unfit(book: Book, rnd: Round) -> list[tuple[Receiver, Code, str]]:
    """Returns whom the broker that died would have put out, had it lived to see what they staged."""
    found: list[tuple[Receiver, Code, str]] = []
    for receiver in in_round(rnd):
        instance = receiver.id.instance
        worker = book.state.peers[instance].worker
        said = None if worker is None else worker.announced
        for key, proofs in {} if said is None else said.staged.items():
            lease = rnd.leases.get(key)
            if lease is not None:
                text = leases.unproven(book, rnd, lease, instance, proofs)
            else:
                text = "nobody can say any more what was published" if rnd.terms.verify else ""
            if text:
                found.append((receiver, Code.NOT_VERIFIED, text))
        if receiver.state is ReceiverState.VOTED and (text := rounds.idle(rnd, receiver)):
            found.append((receiver, Code.NOTHING_APPLIED, text))
    return found


def silent_or_inside(book: Book, channel: Channel, key: RoundKey) -> set[str]:
    """Returns who may be reading a round whose receivers nobody knows: who has yet to announce
    itself, who said that it is in the round and has not drained, and orphans that may hold anything.
    """
    silent = book.state.expected - {NOBODY}
    return _inside(book, key) | silent | unheard(book.state, channel.name)


def _inside(book: Book, key: RoundKey) -> set[str]:
    return {
        peer.instance
        for peer in book.state.peers.values()
        if peer.worker is not None
        and peer.worker.announced is not None
        and peer.worker.announced.key == key
    }
