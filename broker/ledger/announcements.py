"""What an agent announces in its Hello, and what is still outstanding for it.

All that is answered is idempotent, and repeated at each Hello.
"""

from __future__ import annotations

from ...protocol import messages as m
from ...protocol.records import (
    Code,
    CommitNote,
    Distribution,
    Fate,
    LeaseNote,
    ReceiverId,
    Terms,
    TrainerRound,
)
from . import ending, leases, offers, recovery, relays, rounds
from .admission import prepare, tell_opened
from .book import Book
from .effects import Watch
from .state import (
    IN_ROUND,
    Announced,
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
    RoundState,
)

# ---------------------------------------------------------------- what trainers announce


def trainer_announced(book: Book, channel: Channel, peer: Peer, hello: m.TrainerHello) -> None:
    """Takes in each round that this rank knows, and answers what is outstanding for it."""
    group = channel.group
    assert group is not None
    channel.last_version = max(channel.last_version, hello.last_version)
    for told in hello.rounds:
        if told.result is not None and told.result.outcome in recovery.DECIDED:
            channel.last_version = max(channel.last_version, told.terms.version)
        rnd = channel.rounds.get((group.id, told.call))
        if rnd is not None and rnd.state is RoundState.OPENING and _was_admitted(told):
            # Restored, and parked as nobody knew its receivers: now somebody does.
            book.move_round(rnd, Cause.RESTORED)
        if rnd is not None and rnd.state is not RoundState.RESTORING:
            _answer_trainer(book, rnd, peer, told)
        elif rnd is not None or _may_be_read(book, channel, group, told):
            _restore(book, channel, peer, told)
        else:
            rounds.on_open(book, peer, m.Open(hello.session, told.call, told.terms))
            rnd = channel.rounds.get((group.id, told.call))
            if rnd is not None:
                _answer_trainer(book, rnd, peer, told)


def _may_be_read(book: Book, channel: Channel, group: Group, told: TrainerRound) -> bool:
    """Whether a round that is unknown here may have been begun by an earlier broker."""
    key = (group.id, told.call)
    if book.recovering or _was_admitted(told):
        return True
    notes = [peer.worker.committed for peer in book.state.peers.values() if peer.worker]
    if any(note is not None and (note.group, note.call) == key for note in notes):
        return True
    return told.call > group.last_call and bool(recovery.silent_or_inside(book, channel, key))


def _was_admitted(told: TrainerRound) -> bool:
    return told.receivers is not None or told.result is not None


def _answer_trainer(book: Book, rnd: Round, peer: Peer, told: TrainerRound) -> None:
    """Repeats what this rank may have missed of a round that goes on, or went on without it."""
    assert peer.trainer is not None
    number = peer.trainer.rank
    rank = rnd.ranks.setdefault(number, RankEntry())
    ended = rnd.state is RoundState.FINISHED
    group = book.channel(peer.channel).group
    if group is not None:
        group.last_call = max(group.last_call, told.call)
    if ended and rank.instance is None:
        rank.instance, rank.acknowledged = peer.instance, False
    if rnd.listed is not None and told.receivers is None and told.result is None:
        tell_opened(book, rnd, peer.instance)
    for note in told.leases:
        lease = rnd.leases.get((number, note.seq))
        if note.released:
            continue
        if lease is not None:
            leases.repeat_release(book, rnd, lease, peer.instance)
            if lease.state is LeaseState.STUCK:
                leases.tell_stuck(book, rnd, lease)
        elif ended:
            _learn_lease(book, rnd, peer, note, _may_read(book, rnd, told))
    if ended:
        if told.result is None:
            ending.tell_finished(book, rnd, peer.instance)
        if told.void:
            rounds.tell_voided(book, rnd, peer.instance)
        return
    rounds.opened(book, rnd, peer, told.terms)
    if told.void:
        rounds.on_void(book, peer, m.Void(peer.session, rnd.call))
    elif told.total is not None and rank.total is None:
        rounds.on_close(book, peer, m.Close(peer.session, rnd.call, told.total))


def _may_read(book: Book, rnd: Round, told: TrainerRound) -> set[str]:
    """Returns who may be reading a round that ended before this rank was heard of."""
    readers = {
        instance
        for instance, receiver in rnd.receivers.items()
        if receiver.state is ReceiverState.DRAINING or receiver.stuck
    }
    if rnd.listed is not None:
        return readers
    # It ended with nobody knowing its receivers.
    if told.receivers is not None:
        set_list(book, rnd, told.receivers)
        readers |= {id.instance for id in told.receivers} - set(book.state.peers)
    return readers | recovery.silent_or_inside(book, book.channel(rnd.channel), rnd.key)


def _learn_lease(book: Book, rnd: Round, peer: Peer, note: LeaseNote, holders: set[str]) -> None:
    """A batch of a round that ended before it was heard of here: it was lost, or an earlier broker
    sent it.
    """
    lease = _noted_lease(book, peer, note, LeaseState.HELD, arrived=True)
    lease.holders |= holders
    rnd.leases[lease.rank, lease.seq] = lease
    rank = rnd.ranks[lease.rank]
    rank.received += 1
    rank.outstanding += 1
    leases.settle(book, rnd, lease)


def _noted_lease(
    book: Book, peer: Peer, note: LeaseNote, state: LeaseState, *, arrived: bool
) -> Lease:
    assert peer.trainer is not None
    return Lease(
        rank=peer.trainer.rank,
        seq=note.seq,
        trainer=peer.instance,
        buffers=list(note.buffers),
        registered=note.registered,
        nbytes=note.nbytes,
        state=state,
        holders=set(),
        body=None,
        arrived=arrived,
        at=book.now,
        proofs=note.proofs,
        via=note.via,
    )


def _restore(book: Book, channel: Channel, peer: Peer, told: TrainerRound) -> None:
    """Rebuilds the round from this rank's announcement."""
    group = channel.group
    assert group is not None and peer.trainer is not None
    rnd = channel.rounds.get((group.id, told.call))
    if rnd is None:
        rnd = rounds.new_round(book, channel, group, told.call, told.terms)
        book.move_round(rnd, Cause.RESTORED)
    group.last_call = max(group.last_call, told.call)
    for number in range(group.world_size):
        rnd.ranks.setdefault(number, RankEntry())
    rank = rnd.ranks[peer.trainer.rank]
    if told.terms != rnd.terms:
        rnd.conflict = (
            f"call {rnd.call} was opened with different terms: {describe_terms(rnd.terms)}, and by "
            f"rank {peer.trainer.rank} {describe_terms(told.terms)}"
        )
    rank.instance = peer.instance
    rank.total = told.total
    rank.void = rank.void or told.void
    if told.result is not None:
        rank.acknowledged = True
        rnd.told = told.result
    if told.receivers is not None:
        set_list(book, rnd, told.receivers)
    for other in book.state.peers.values():
        if other.worker is not None:
            _list_of_commit(book, rnd, other.worker.committed)
            said = other.worker.announced
            if said is not None and said.key == rnd.key and said.receivers:
                set_list(book, rnd, said.receivers)
    for note in told.leases:
        key = (peer.trainer.rank, note.seq)
        if key in rnd.leases:
            continue
        state = LeaseState.RELEASED if note.released else LeaseState.PARKED
        rnd.leases[key] = _noted_lease(book, peer, note, state, arrived=note.released)
        if note.released:
            rank.received += 1
        else:
            rank.outstanding += 1
    if not book.recovering:
        recovery.resume(book, channel, rnd)


def set_list(book: Book, rnd: Round, receivers: list[ReceiverId]) -> None:
    """A known list of receivers is restored from whoever has one."""
    if rnd.listed is None:
        rnd.listed = receivers
        for id in receivers:
            if id.instance not in book.state.peers:
                relays.listed(book, rnd, id)
                book.do(Watch(id.instance, id.processes, False))


def _list_of_commit(book: Book, rnd: Round, note: CommitNote | None) -> None:
    if note is not None and (note.group, note.call) == rnd.key and note.receivers:
        set_list(book, rnd, note.receivers)


# ---------------------------------------------------------------- what workers announce


def worker_announced(book: Book, channel: Channel, peer: Peer, hello: m.WorkerHello) -> None:
    """Takes in what this worker is at, and answers what is outstanding for it."""
    worker = peer.worker
    assert worker is not None
    worker.version, worker.torn, worker.committed = hello.version, hello.torn, hello.committed
    channel.last_version = max(channel.last_version, hello.version)
    worker.out = {(ref.group, ref.call) for ref in hello.out}
    worker.doubt = None
    offers.take_note(peer, hello.take)
    offers.restore_mappings(book, peer, hello.mappings)
    _repeat_torn(book, peer)
    for member in book.members_of(peer):
        rounds.tell_if_torn(book, member)
    announced = None
    worker.announced = None
    if hello.round is not None:
        announced = (hello.round.group, hello.round.call)
        staged = {(ref.rank, ref.seq): ref.proofs for ref in hello.round.staged}
        said = hello.round
        worker.announced = Announced(
            announced, staged, said.voted, said.decided, said.receivers, said.tally
        )
        rnd = channel.rounds.get(announced)
        _unpark(book, rnd, hello.round.receivers)
        if rnd is None and book.recovering:
            rnd = _restore_from_worker(book, channel, announced, hello.round.terms)
        if rnd is None:
            _abort_unknown(book, peer, announced)
        elif rnd.state is RoundState.RESTORING:
            set_list(book, rnd, hello.round.receivers)
        elif peer.instance not in rnd.receivers:
            _abort_unknown(book, peer, announced)
    note = hello.committed
    if note is not None:
        _unpark(book, channel.rounds.get((note.group, note.call)), note.receivers)
    for rnd in list(channel.rounds.values()):
        if rnd.state is RoundState.RESTORING:
            _list_of_commit(book, rnd, hello.committed)
            if not book.recovering:
                recovery.resume(book, channel, rnd)
        receiver = rnd.receivers.get(peer.instance)
        if receiver is not None:
            _answer_worker(book, rnd, receiver, peer)
        elif rnd.state is not RoundState.RESTORING and rnd.key != announced:
            leases.drop_all(book, rnd, peer.instance)


def _unpark(book: Book, rnd: Round | None, receivers: list[ReceiverId]) -> None:
    """A round was parked as nobody knew its receivers, some of whom were silent: now one speaks."""
    if rnd is not None and rnd.state is RoundState.OPENING and rnd.doubtful and receivers:
        book.move_round(rnd, Cause.RESTORED)
        set_list(book, rnd, receivers)


def _restore_from_worker(book: Book, channel: Channel, key: tuple[str, int], terms: Terms) -> Round:
    book.state.arrivals += 1
    rnd = Round(
        channel=channel.name,
        group=key[0],
        call=key[1],
        terms=terms,
        distribution=Distribution.COLOCATED,
        state=RoundState.OPENING,
        arrival=book.state.arrivals,
        ranks={},
        opened_at=book.now,
        progress=book.now,
    )
    channel.rounds[key] = rnd
    book.move_round(rnd, Cause.RESTORED)
    return rnd


def _abort_unknown(book: Book, peer: Peer, key: tuple[str, int]) -> None:
    text = "the broker knows no such round, or this worker is not in it"
    book.send(
        peer.instance,
        m.Abort(book.epoch, peer.instance, key[0], key[1], Code.NO_ROUND, text),
    )


def _repeat_torn(book: Book, peer: Peer) -> None:
    """Repeats that a commit was torn, as long as no later one came."""
    worker = peer.worker
    assert worker is not None
    note = worker.committed
    if note is None or worker.torn_round != (note.group, note.call):
        return
    worker.torn = True
    text = "another member of the replica did not commit"
    book.send(peer.instance, m.Torn(book.epoch, peer.instance, note.group, note.call, text))


def _answer_worker(book: Book, rnd: Round, receiver: Receiver, peer: Peer) -> None:
    """Repeats what this receiver may have missed, and learns what of it was missed here."""
    worker = peer.worker
    assert worker is not None
    note, said = worker.committed, worker.announced
    inside = said is not None and said.key == rnd.key
    if note is not None and (note.group, note.call) == rnd.key:
        if receiver.state is ReceiverState.COMMITTING:
            rounds.committed(book, rnd, receiver, note.ok, note.text)
            ending.finish_if_all_answered(book, rnd)
        elif not inside:
            _committed_alone(book, rnd, receiver, peer)
            rounds.drained(book, rnd, receiver)
        return
    if receiver.state in IN_ROUND and rnd.key in worker.out:
        text = "left the round while it was away"
        ending.remove_replica(book, rnd, receiver, Fate.EXPELLED, Code.WITHDRAWN, text, said=True)
        rounds.drained(book, rnd, receiver)
    elif receiver.state in IN_ROUND:
        _repeat_round(book, rnd, receiver, said if inside else None)
    elif inside:
        code, text = receiver.code or Code.NO_ROUND, receiver.reason
        instance = peer.instance
        book.send(instance, m.Expelled(book.epoch, instance, rnd.group, rnd.call, code, text))
    else:
        rounds.drained(book, rnd, receiver)


def _committed_alone(book: Book, rnd: Round, receiver: Receiver, peer: Peer) -> None:
    """It was waited for no longer: it is at the version, but its replica did not switch."""
    worker = peer.worker
    assert worker is not None
    if rnd.result is None or receiver.state is not ReceiverState.OUT or worker.size == 1:
        return
    note, name = worker.committed, receiver.id.replica
    together = any(r.replica == name and r.fate is Fate.COMMITTED for r in rnd.result.replicas)
    if note is not None and note.ok and not together:
        worker.torn_round = rnd.key
        _repeat_torn(book, peer)


def _repeat_round(book: Book, rnd: Round, receiver: Receiver, said: Announced | None) -> None:
    """Sends a receiver in the round all that it still needs of it; all of it is idempotent."""
    instance = receiver.id.instance
    if receiver.state is ReceiverState.COMMITTING:
        book.send(instance, m.Commit(book.epoch, instance, rnd.group, rnd.call))
        return
    if receiver.state is ReceiverState.VOTED:
        return
    prepare(book, rnd, receiver)
    for key, lease in list(rnd.leases.items()):
        if instance not in lease.holders:
            continue
        if said is not None and key in said.staged:
            leases.drop_holder(book, rnd, lease, instance)
            rounds.require_proof(book, rnd, receiver, lease, said.staged[key])
            if receiver.state not in IN_ROUND:
                return
        elif lease.arrived:
            leases.deliver(book, rnd, lease, receiver, None)
    if said is not None and receiver.state is ReceiverState.PREPARING:
        rounds.began(book, rnd, receiver)
    if rnd.closed:
        leases.tell_total(book, rnd, receiver)
    if said is not None and said.voted:
        rounds.voted(book, rnd, receiver, said.tally)


def describe_terms(terms: Terms) -> str:
    return f"version {terms.version} (min_replicas={terms.min_replicas}, strict={terms.strict})"
