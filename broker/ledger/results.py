"""The result of a round: each replica and receiver, what became of it, and how long it took."""

from __future__ import annotations

from ...protocol.records import (
    Code,
    Fate,
    Outcome,
    ReceiverResult,
    ReplicaResult,
    RoundResult,
    SourceResult,
)
from . import leases
from .book import Book, cut
from .state import Channel, Receiver, ReceiverState, Round

_WORST_FIRST = (
    Fate.TORN,
    Fate.STUCK,
    Fate.LOST,
    Fate.UNKNOWN,
    Fate.EXPELLED,
    Fate.ABORTED,
    Fate.COMMITTED,
)
# See `book.py` for why it has a name of its own.
_COMMITTED = Fate.COMMITTED


def build_result(
    book: Book,
    channel: Channel,
    rnd: Round,
    outcome: Outcome | None,
    reason: str,
    code: Code | None,
) -> RoundResult:
    """Returns the result; `outcome` None: what the fates of a decided round make of it."""
    receivers = [_receiver_result(rnd, receiver) for receiver in rnd.receivers.values()]
    by_replica: dict[str, list[ReceiverResult]] = {}
    for result in receivers:
        by_replica.setdefault(result.replica, []).append(result)
    replicas = [_replica_result(book, channel, name, of) for name, of in by_replica.items()]
    replicas += rnd.unserved
    if outcome is None:
        outcome, reason = _outcome(replicas)
    return RoundResult(
        rnd.group,
        rnd.call,
        rnd.version,
        outcome,
        reason,
        replicas,
        receivers,
        sum(lease.nbytes for lease in rnd.leases.values()),
        _us(rnd.opened_at, rnd.admitted_at or rnd.finished_at),
        _us(rnd.admitted_at, rnd.decided_at or rnd.finished_at),
        _us(rnd.decided_at, rnd.finished_at),
        code,
        rnd.left_out,
        _sources(rnd),
    )


def _sources(rnd: Round) -> list[SourceResult]:
    found: dict[int, set[str]] = {}
    for lease in rnd.leases.values():
        if lease.via:
            found.setdefault(lease.rank, set()).update(lease.via)
    return [SourceResult(rank, sorted(via)) for rank, via in sorted(found.items())]


def _receiver_result(rnd: Round, receiver: Receiver) -> ReceiverResult:
    id = receiver.id
    return ReceiverResult(
        id.instance,
        id.replica,
        id.member,
        id.processes[0].pid,
        _fate(rnd, receiver),
        receiver.reason,
        receiver.prepare_us,
        receiver.copy_us,
        receiver.commit_us,
        receiver.sent,
        receiver.nbytes,
        receiver.tally,
    )


def _fate(rnd: Round, receiver: Receiver) -> Fate:
    """A receiver that keeps a lease although its drain is overdue is stuck, whatever the cause;
    but one that may have committed is unknown, and one that has ended is lost.
    """
    if (
        receiver.stuck
        and receiver.fate not in (Fate.UNKNOWN, Fate.LOST)
        and leases.holds_any(rnd, receiver.id.instance)
    ):
        return Fate.STUCK
    if receiver.fate is not None:
        return receiver.fate
    return Fate.UNKNOWN if receiver.state is ReceiverState.ABSENT else Fate.ABORTED


def _replica_result(
    book: Book, channel: Channel, name: str, members: list[ReceiverResult]
) -> ReplicaResult:
    replica = channel.replicas.get(name)
    if all(result.fate is _COMMITTED for result in members):
        current = 0 if replica is None else book.current(channel, replica)[0]
        return ReplicaResult(name, _COMMITTED, current, "")
    fates = {result.fate for result in members}
    fate = next(f for f in _WORST_FIRST if f in fates)
    if _COMMITTED in fates:
        fate = Fate.TORN
    reasons = [
        f"member {r.member}: {r.fate.value}" + (f": {r.reason}" if r.reason else "")
        for r in members
        if r.fate is not Fate.COMMITTED
    ]
    current = 0 if replica is None or fate is Fate.TORN else book.current(channel, replica)[0]
    return ReplicaResult(name, fate, current, cut("; ".join(reasons)))


def _outcome(replicas: list[ReplicaResult]) -> tuple[Outcome, str]:
    committed = [r for r in replicas if r.fate is _COMMITTED]
    others = [r for r in replicas if r.fate is not _COMMITTED]
    reason = cut("; ".join(f"replica {r.replica}: {r.fate.value}: {r.reason}" for r in others))
    if not replicas:
        return Outcome.EMPTY, "no replica to receive it"
    if not others:
        return Outcome.COMMITTED, ""
    if committed:
        return Outcome.MIXED, reason
    return Outcome.FAILED, reason


def _us(start: float, end: float) -> int:
    return max(0, round((end - start) * 1e6)) if start and end else 0
