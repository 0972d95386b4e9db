"""What a round took its time for: the parts of its critical path, and one sentence that names them.

Pure functions over one round of the ledger. Three things have an end that everybody waits for: the
admission, the last vote, the last commit. Who was last in each is on the critical path, and what it
measured itself (its hooks, its copies) says what it did meanwhile; what is left is the broker's,
with the way of the messages and whatever kept the processes from running.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from msgspec import Struct

from ..protocol.records import Fate, Outcome
from .ledger.state import Receiver, ReceiverState, Round, RoundState

NEGLIGIBLE = 0.005
"""A part of less than this share of the whole is not worth a word."""
MAX_REASON = 200
"""Characters of a failed round's reason in its sentence."""

_NOT_THEIR_DOING = (None, Fate.COMMITTED, Fate.ABORTED)


class Stage(Enum):
    """What is waited for."""

    ADMISSION = "admission"
    PREPARE = "prepare"
    BATCHES = "batches"
    COPY = "copy"
    COMMIT = "commit"
    BROKER = "broker"


class Part(Struct, frozen=True):
    """A part of the critical path."""

    stage: Stage
    seconds: float
    who: str = ""
    """`replica/member`, or `rank N`; empty for the admission and the broker."""


class _Wait(Struct):
    """Who was last in a stage, and until when (monotonic seconds)."""

    receiver: Receiver
    until: float


def parts(rnd: Round, now: float) -> list[Part]:
    """The parts, which add up to the time that the round took, the longest first.

    Args:
        rnd: A round, ended or under way.
        now: Monotonic seconds; a round under way ends here.
    """
    end = rnd.finished_at or now
    began = rnd.opened_at or end
    # A round that was restored after its decision was never admitted here.
    admitted = rnd.admitted_at or (began if rnd.decided_at or rnd.receivers else end)
    decided = rnd.decided_at or end
    found = [Part(Stage.ADMISSION, admitted - began)]
    if rnd.admitted_at or rnd.receivers:
        found += _staging(rnd, admitted, decided)
    if rnd.decided_at:
        found += _committing(rnd, decided, end)
    found = [part for part in found if part.seconds > 0]
    rest = max(0.0, end - began) - sum(part.seconds for part in found)
    if rest > 0:
        found.append(Part(Stage.BROKER, rest))
    return sorted(found, key=lambda part: -part.seconds)


def _staging(rnd: Round, admitted: float, decided: float) -> Iterator[Part]:
    """From the admission until the decision, or until the round ended without one."""
    last, last_rank = admitted, 0
    for lease in rnd.leases.values():
        if lease.at > last:
            last, last_rank = lease.at, lease.rank
    wait = _last_to_vote(rnd, decided)
    if wait is None or (not rnd.decided_at and wait.receiver.fate in _NOT_THEIR_DOING):
        for number, rank in sorted(rnd.ranks.items()):
            if not rnd.decided_at and not rank.closed:
                last, last_rank = decided, number
                break
    if wait is None:
        yield Part(Stage.BATCHES, last - admitted, f"rank {last_rank}")
        return
    receiver = wait.receiver
    who = name(receiver)
    measured = receiver.prepare_us or receiver.copy_us
    ready_at = receiver.ready_at or wait.until
    prepare_s = receiver.prepare_us / 1e6 if measured else ready_at - admitted
    prepared = min(admitted + max(0.0, prepare_s), wait.until)
    yield Part(Stage.PREPARE, prepared - admitted, who)
    reading = min(max(prepared, last), wait.until)
    # What it copied before the last batch came, it copied while it waited for that.
    yield Part(Stage.BATCHES, reading - prepared, f"rank {last_rank}")
    copy_s = receiver.copy_us / 1e6 if measured else wait.until - reading
    yield Part(Stage.COPY, min(copy_s, wait.until - reading), who)


def _last_to_vote(rnd: Round, decided: float) -> _Wait | None:
    """Who voted last, was put out last, or has not voted."""
    waits = []
    for receiver in rnd.receivers.values():
        out_at = receiver.out_at
        if receiver.voted_at:
            waits.append(_Wait(receiver, receiver.voted_at))
        elif out_at and receiver.fate not in _NOT_THEIR_DOING:
            waits.append(_Wait(receiver, min(out_at, decided)))
        elif not rnd.decided_at:
            waits.append(_Wait(receiver, decided))
    guilty = [wait for wait in waits if wait.receiver.fate not in _NOT_THEIR_DOING]
    if rnd.state is RoundState.FINISHED and not rnd.decided_at and guilty:
        waits = guilty  # The others did not vote because these were put out.
    # Of several that have not voted: who has stood still for longest.
    return max(waits, key=lambda wait: (wait.until, -wait.receiver.progress), default=None)


def _committing(rnd: Round, decided: float, end: float) -> Iterator[Part]:
    waits = []
    for receiver in rnd.receivers.values():
        if receiver.committed_at:
            waits.append(_Wait(receiver, receiver.committed_at))
        elif receiver.out_at > decided:
            waits.append(_Wait(receiver, receiver.out_at))
        elif receiver.state is ReceiverState.COMMITTING:
            waits.append(_Wait(receiver, end))
    if not waits:
        return
    wait = max(waits, key=lambda wait: wait.until)
    took_s = max(0.0, wait.until - decided)
    if wait.receiver.committed_at:
        took_s = min(took_s, wait.receiver.commit_us / 1e6)
    yield Part(Stage.COMMIT, took_s, name(wait.receiver))


def sentence(rnd: Round, now: float) -> str:
    """Names the critical path: `round 7 took 41 ms: 33 ms waiting for a/2's prepare, 7 ms copy`.

    Args:
        rnd: A round, ended or under way.
        now: Monotonic seconds.
    """
    whole_s = max(0.0, (rnd.finished_at or now) - (rnd.opened_at or now))
    found = parts(rnd, now)
    worth = [part for part in found if part.seconds >= NEGLIGIBLE * whole_s] or found
    named = ""
    words = []
    for part in worth:
        words.append(f"{amount(part.seconds)} {_words(part, named)}")
        named = part.who or named
    text = f"{_verdict(rnd)} {amount(whole_s)}{': ' if words else ''}{', '.join(words)}"
    result = rnd.result
    if result is not None and result.reason and not rnd.decided_at:
        reason = result.reason
        text += f"; {reason[:MAX_REASON]}{'…' if len(reason) > MAX_REASON else ''}"
    return text


def _verdict(rnd: Round) -> str:
    name = f"round {rnd.version}"
    if rnd.result is None:
        return f"{name} has been under way for"
    match rnd.result.outcome:
        case Outcome.COMMITTED:
            return f"{name} took"
        case Outcome.FAILED:
            return f"{name} failed after"
        case outcome:
            return f"{name} ended {outcome.value} after"


def _words(part: Part, named: str) -> str:
    """`named`: who was named last; it is not named again."""
    whose = "" if part.who == named else f"{part.who}'s "
    match part.stage:
        case Stage.ADMISSION:
            return "waiting to be admitted"
        case Stage.PREPARE:
            return f"waiting for {part.who}'s prepare"
        case Stage.BATCHES:
            return f"waiting for {part.who}'s batches"
        case Stage.COPY:
            return f"{whose}copy"
        case Stage.COMMIT:
            return f"{whose}commit"
        case Stage.BROKER:
            return "broker"


def name(receiver: Receiver) -> str:
    """A receiver as people know it: `replica/member`."""
    return f"{receiver.id.replica}/{receiver.id.member}"


def amount(seconds: float) -> str:
    """A time for people: `0.42 ms`, `7.2 ms`, `41 ms`, `3.1 s`, `95 s`."""
    ms = seconds * 1000
    if ms < 9.95:
        return f"{ms:.2g} ms" if ms >= 0.01 else "0 ms"
    if ms < 999.5:
        return f"{ms:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
