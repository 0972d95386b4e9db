"""The broker alone ends phases: open, prepare, stage without progress, commit, drain, recovery."""

from __future__ import annotations

from ...protocol.records import Code, Fate
from . import admission, ending, leases, members, recovery
from .book import Book, who
from .state import PeerState, ReceiverState, Round, RoundState

FAR = float("inf")


def check(book: Book) -> None:
    """Ends every phase whose limit has passed, and arms the next check."""
    book.state.next_check = FAR
    until = book.state.recovering_until
    if until is not None:
        if book.now >= until:
            recovery.end_recovery(book)
        else:
            book.arm(until)
    members.look_for_silence(book)
    for rnd in list(book.rounds()):
        _check_round(book, rnd)


def _passed(book: Book, since: float, limit: float) -> bool:
    if book.now >= since + limit:
        return True
    book.arm(since + limit)
    return False


def _check_round(book: Book, rnd: Round) -> None:
    terms, durations = rnd.terms, book.durations
    # First: what becomes stuck sets the clock of the ranks that waited for it going.
    _check_draining(book, rnd)
    if rnd.state is RoundState.OPENING and not book.recovering:
        if _passed(book, rnd.opened_at, terms.open_s or durations.open_s):
            admission.open_overdue(book, rnd)
    elif rnd.state is RoundState.STAGING:
        _check_staging(book, rnd)
    elif rnd.state is RoundState.COMMITTING and _passed(
        book, rnd.decided_at, terms.commit_s or durations.commit_s
    ):
        for receiver in list(rnd.receivers.values()):
            if receiver.state is ReceiverState.COMMITTING:
                text = "did not answer Commit in time"
                ending.remove_replica(
                    book, rnd, receiver, Fate.UNKNOWN, Code.DEADLINE, text, said=True
                )


def _check_staging(book: Book, rnd: Round) -> None:
    prepare_s = rnd.terms.prepare_s or book.durations.prepare_s
    stage_s = rnd.terms.stage_s or book.durations.stage_s
    owing = False
    for receiver in list(rnd.receivers.values()):
        if receiver.state is ReceiverState.PREPARING:
            owing = True
            if _passed(book, rnd.admitted_at, prepare_s):
                _overdue(book, rnd, receiver.id.instance, f"was not ready in {prepare_s:g} s")
        elif receiver.state is ReceiverState.STAGING and (receiver.owed or rnd.closed):
            owing = True
            if _passed(book, receiver.progress, stage_s):
                text = f"made no progress for {stage_s:g} s"
                _overdue(book, rnd, receiver.id.instance, text)
        if rnd.state is not RoundState.STAGING:
            return
    if _waits_for_drain(rnd):
        # It may come at any time: a look now and then finds the rank that is late after it.
        book.arm(book.now + stage_s)
        return
    if not rnd.closed and not owing and _passed(book, rnd.progress, stage_s):
        late = [str(n) for n, rank in sorted(rnd.ranks.items()) if not rank.closed]
        text = f"rank {', '.join(late)} sent nothing for {stage_s:g} s"
        ending.fail(book, rnd, Code.DEADLINE, text)


def _waits_for_drain(rnd: Round) -> bool:
    """Whether a rank that has yet to send has batches at receivers that are out and may drain still.

    Such a rank may have no memory left to send from: it is late only once these are stuck.
    """
    draining = [
        instance
        for instance, receiver in rnd.receivers.items()
        if receiver.state is ReceiverState.DRAINING and not receiver.stuck
    ]
    return bool(draining) and any(
        not rnd.ranks[lease.rank].closed and not lease.holders.isdisjoint(draining)
        for lease in rnd.leases.values()
    )


def _overdue(book: Book, rnd: Round, instance: str, text: str) -> None:
    receiver = rnd.receivers[instance]
    peer = book.state.peers.get(instance)
    silent = peer is None or peer.state is not PeerState.LIVE
    if silent:
        text += " (silent)"
    receiver.stuck = silent and leases.holds_any(rnd, instance)
    ending.remove_replica(book, rnd, receiver, Fate.EXPELLED, Code.DEADLINE, text)
    if receiver.stuck:
        text = f"{who(receiver)} is silent and keeps its leases: stuck until it goes on, or ends"
        book.note(rnd, text, failed=True)
        leases.mark_stuck(book, rnd, receiver)


def _check_draining(book: Book, rnd: Round) -> None:
    for receiver in list(rnd.receivers.values()):
        if receiver.state is not ReceiverState.DRAINING or receiver.stuck:
            continue
        if _passed(book, receiver.progress, book.durations.drain_s):
            drain_s = f"{book.durations.drain_s:g} s"
            text = f"{who(receiver)} does not drain for {drain_s}: what it reads stays leased"
            book.note(rnd, text, failed=True)
            leases.mark_stuck(book, rnd, receiver)
