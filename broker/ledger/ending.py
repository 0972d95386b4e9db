"""How a round ends: who is out, the decision, the result, and when it is forgotten."""

from __future__ import annotations

from ...protocol import messages as m
from ...protocol.records import Code, Fate, Outcome, ReplicaResult
from . import leases
from .book import Book, cut, in_round, who
from .effects import Ended
from .results import build_result
from .state import (
    IN_ROUND,
    Cause,
    Channel,
    Group,
    LeaseState,
    Peer,
    Receiver,
    ReceiverState,
    Round,
    RoundKey,
    RoundState,
)

# See `book.py` for why they have names of their own.
_FINISHED, _VOTED, _COMMIT_SENT = RoundState.FINISHED, ReceiverState.VOTED, Cause.COMMIT_SENT
_RELEASED, _DRAINING = LeaseState.RELEASED, ReceiverState.DRAINING

# ---------------------------------------------------------------- ways out


def remove(
    book: Book,
    rnd: Round,
    receiver: Receiver,
    fate: Fate,
    code: Code,
    text: str,
    *,
    told: type[m.Abort | m.Expelled] | None,
) -> None:
    """Takes a receiver out of the round; its leases stay until it has drained or is gone."""
    if receiver.state not in IN_ROUND and receiver.state is not ReceiverState.ABSENT:
        return
    text = cut(text)
    # It has not said what it has written, nor, if it was to commit, whether it did.
    in_doubt = receiver.sent and (told is not None or receiver.state is ReceiverState.COMMITTING)
    receiver.fate, receiver.code, receiver.reason = fate, code, text
    receiver.out_at = book.now
    book.move_receiver(rnd, receiver, Cause.REMOVED)
    book.arm(book.now + book.durations.drain_s)
    instance = receiver.id.instance
    peer = book.state.peers.get(instance)
    if in_doubt and peer is not None and peer.worker is not None:
        peer.worker.doubt = rnd.key
        book.channel(rnd.channel).members_changed = True
    if told is not None and receiver.state is ReceiverState.DRAINING:
        book.send(instance, told(book.epoch, instance, rnd.group, rnd.call, code, text))


def remove_replica(
    book: Book,
    rnd: Round,
    receiver: Receiver,
    fate: Fate,
    code: Code,
    text: str,
    *,
    said: bool = False,
) -> None:
    """Takes a receiver out, and with it (before the decision) its replica.

    `said`: it said so itself, or is gone: nothing to tell it.
    """
    if receiver.state in IN_ROUND or receiver.state is ReceiverState.ABSENT:
        take_out(book, rnd, receiver, fate, code, text, said=said)
        after_removal(book, rnd)


def take_out(
    book: Book,
    rnd: Round,
    receiver: Receiver,
    fate: Fate,
    code: Code,
    text: str,
    *,
    said: bool = False,
) -> None:
    """As `remove_replica`, without a look at what becomes of the round; `after_removal` follows."""
    remove(book, rnd, receiver, fate, code, text, told=None if said else m.Expelled)
    book.note(rnd, f"{who(receiver)} is out: {fate.value}: {text}", failed=True)
    if rnd.state is RoundState.STAGING:
        for other in rnd.receivers.values():
            if other.id.replica == receiver.id.replica and other.state in IN_ROUND:
                reason = f"{who(receiver)} is out: {text}"
                remove(book, rnd, other, Fate.EXPELLED, Code.MEMBER_OUT, reason, told=m.Abort)


def after_removal(book: Book, rnd: Round) -> None:
    """Looks whether the round can still go on, and whether it was only waiting for that one."""
    if rnd.state is RoundState.COMMITTING:
        finish_if_all_answered(book, rnd)
    elif rnd.state is RoundState.STAGING:
        out = [r for r in rnd.receivers.values() if r.fate is not None]
        if rnd.terms.strict and out:
            fail(book, rnd, Code.STRICT, f"strict: {who(out[0])} is out: {out[0].reason}")
        elif enough(book, rnd):
            maybe_decide(book, rnd)
        else:
            reasons = "; ".join(sorted({r.reason for r in out if r.code is not Code.MEMBER_OUT}))
            least = rnd.terms.min_replicas
            few = "no replica remains" if least == 1 else f"fewer than {least} replicas remain"
            text = f"{few}: {reasons}"
            fail(book, rnd, Code.TOO_FEW_REPLICAS, text)


def enough(book: Book, rnd: Round) -> bool:
    """Whether enough replicas remain: those in the round, and those at its version already."""
    replicas = {receiver.id.replica for receiver in in_round(rnd)}
    already = sum(result.fate is Fate.COMMITTED for result in rnd.unserved)
    return len(replicas) + already >= rnd.terms.min_replicas


def fail(book: Book, rnd: Round, code: Code, text: str) -> None:
    """Ends the round before its decision: Abort to all that are in it."""
    if rnd.state is RoundState.COMMITTING or rnd.state is RoundState.FINISHED:
        return
    for receiver in list(rnd.receivers.values()):
        if receiver.state in IN_ROUND:
            remove(book, rnd, receiver, Fate.ABORTED, code, text, told=m.Abort)
    finish(book, rnd, Outcome.UNRESOLVED if rnd.doubtful else Outcome.FAILED, text, code)


def lost_rank(book: Book, rnd: Round, peer: Peer, code: Code, text: str) -> None:
    """A rank is gone: nobody to release to, and before the decision no round without it.

    Its leases end without a Release: one that leaves while others read must not hear otherwise.
    """
    instance = peer.instance
    assert peer.trainer is not None
    for number, rank in rnd.ranks.items():
        mine = rnd.group == peer.trainer.group and number == peer.trainer.rank
        if rank.instance == instance or (rank.instance is None and mine):
            rank.acknowledged = True
    for lease in rnd.leases.values():
        if lease.trainer == instance and lease.state is not LeaseState.RELEASED:
            lease.holders.clear()
            lease.trainer = ""
            leases.end(book, rnd, lease)
    for receiver in rnd.receivers.values():
        receiver.owed = sum(receiver.id.instance in x.holders for x in rnd.leases.values())
    if rnd.state in (RoundState.OPENING, RoundState.STAGING):
        fail(book, rnd, code, text)
    maybe_reap(book, rnd)


# ---------------------------------------------------------------- decision and end


def maybe_decide(book: Book, rnd: Round) -> None:
    """Decides once every rank closed and every remaining receiver voted complete.

    The first Commit sent is the decision: from here on nothing fails the round.
    """
    if rnd.state is not RoundState.STAGING or not rnd.closed or rnd.waiting_votes:
        return
    if book.recovering or not enough(book, rnd):
        return
    decide(book, rnd)


def decide(book: Book, rnd: Round) -> None:
    book.move_round(rnd, Cause.DECIDED)
    rnd.decided_at = book.now
    channel = book.channel(rnd.channel)
    book.arm(book.now + (rnd.terms.commit_s or book.durations.commit_s))
    for receiver in rnd.receivers.values():
        if receiver.state is _VOTED:
            channel.last_version = max(channel.last_version, rnd.version)
            instance = receiver.id.instance
            book.move_receiver(rnd, receiver, _COMMIT_SENT)
            book.send(instance, m.Commit(book.epoch, instance, rnd.group, rnd.call))
    finish_if_all_answered(book, rnd)


def finish_if_all_answered(book: Book, rnd: Round) -> None:
    if rnd.state is not RoundState.COMMITTING or rnd.waiting_commits:
        return
    finish(book, rnd, None, "", None)


def finish(book: Book, rnd: Round, outcome: Outcome | None, reason: str, code: Code | None) -> None:
    """Ends the round: the result goes to every rank; it is kept until each of them has it.

    `outcome` None: what the receivers' fates make of a decided round.
    """
    channel = book.channel(rnd.channel)
    book.move_round(rnd, Cause.ENDED)
    rnd.finished_at = book.now
    rnd.result = rnd.told or build_result(book, channel, rnd, outcome, cut(reason), code)
    failed = rnd.result.outcome is not Outcome.COMMITTED
    if failed:
        results = {result.replica: result for result in rnd.result.replicas}
        for receiver in rnd.receivers.values():
            tell_torn(book, rnd, receiver, results.get(receiver.id.replica))
    # Also where a decided round has its reason from what became of the receivers.
    why = rnd.result.reason
    book.note(rnd, f"{rnd.result.outcome.value}{why and ': ' + why}", failed=failed, log=failed)
    for lease in list(rnd.leases.values()):
        if lease.state is LeaseState.PARKED:
            book.move_lease(rnd, lease, Cause.FORWARDED)
        leases.settle(book, rnd, lease)
    tell_all_finished(book, channel, rnd)
    ranks = [(number, rank.instance) for number, rank in rnd.ranks.items() if rank.instance]
    book.do(Ended(channel.name, rnd.result, ranks))
    book.kick = True
    maybe_reap(book, rnd)


def tell_torn(book: Book, rnd: Round, receiver: Receiver, result: ReplicaResult | None) -> None:
    """Tells who committed that its replica did not: all or none, or torn and said so."""
    if receiver.state is not ReceiverState.COMMITTED or receiver.told_torn:
        return
    if result is None or result.fate is Fate.COMMITTED:
        return
    receiver.told_torn = True
    instance = receiver.id.instance
    peer = book.state.peers.get(instance)
    if peer is not None and peer.worker is not None:
        peer.worker.torn = True
        peer.worker.torn_round = rnd.key
        book.send(instance, m.Torn(book.epoch, instance, rnd.group, rnd.call, result.reason))


def tell_all_finished(book: Book, channel: Channel, rnd: Round) -> None:
    group = channel.group
    for number, rank in rnd.ranks.items():
        instance = None if group is None or group.id != rnd.group else group.ranks.get(number)
        if instance is None:
            rank.acknowledged = True
        else:
            tell_finished(book, rnd, instance)


def tell_finished(book: Book, rnd: Round, instance: str) -> None:
    assert rnd.result is not None
    book.send(instance, m.Finished(book.epoch, instance, rnd.result))


def acknowledge(book: Book, channel: Channel, group: Group, peer: Peer, call: int) -> None:
    """A rank that opens a call has the results of all before it."""
    assert peer.trainer is not None
    for key, rnd in list(channel.rounds.items()):
        if key[0] == group.id and key[1] < call and rnd.state is RoundState.FINISHED:
            for number, rank in rnd.ranks.items():
                # Who never opened it waits for no result; the newest is kept for it all the same.
                if number == peer.trainer.rank or rank.instance is None:
                    rank.acknowledged = True
            maybe_reap(book, rnd)


def maybe_reap(book: Book, rnd: Round) -> None:
    """Forgets a round that nobody needs any more; its story is kept for a while."""
    if rnd.state is not _FINISHED or book.recovering:
        return
    if not all(rank.acknowledged for rank in rnd.ranks.values()):
        return
    if any(lease.state is not _RELEASED for lease in rnd.leases.values()):
        return
    if any(r.stuck or r.state is _DRAINING for r in rnd.receivers.values()):
        return  # Those that are silent may read, or may have committed: they ask when they speak.
    channel = book.channel(rnd.channel)
    key: RoundKey = rnd.key
    if channel.rounds.pop(key, None) is not None:
        channel.history.append(rnd)
        del channel.history[: -book.state.settings.history]
