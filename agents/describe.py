"""What a trainer says of a round that takes long: whom it waits for, as far as it can know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..protocol.records import Fate, ReceiverId, ReplicaState
from .holders import keeps
from .results import RoundHandle
from .trainer_core import Call

MAX_SHOWN: Final = 8
"""Replicas that are ready and named."""
WHICH: Final = "a trainer is not told which: `tensorlease status` says whom the round waits for"


def describe_replicas(states: Iterable[ReplicaState]) -> str:
    """Names each replica of the channel, and what it lacks."""
    ready = "is complete (its process may still be at another round, or in a hook)"
    texts = [f"{s.replica} {ready if s.ready else s.reason}" for s in states]
    return "; ".join(texts) or "no worker has joined the channel"


def readers(
    call: Call, handle: RoundHandle | None, states: Iterable[ReplicaState]
) -> list[ReceiverId]:
    """Returns from whom something may be missing, as far as a round's trainer can know.

    It is not told who has voted or staged. Who has run its commit hook had taken in everything
    before: that is in the result, and at times in what is told of the replicas (`states`) earlier.
    """
    result = None if handle is None else handle.finished.reached
    done = (
        set()
        if result is None
        else {
            (outcome.name, outcome.pid)
            for outcome in result.receivers.values()
            if outcome.fate in (Fate.COMMITTED, Fate.TORN, Fate.LOST)
        }
    )
    at_it = {state.replica for state in states if state.current == call.terms.version}
    return [
        r
        for r in call.receivers or []
        if (f"{r.replica}/{r.member}", r.processes[0].pid) not in done and r.replica not in at_it
    ]


def too_few(states: Iterable[ReplicaState], least: int, of: str, after: str) -> str:
    """Says which replicas are ready, though fewer than `least`, and what the others lack.

    `of` and `after`: of which channel, and after how long.
    """
    states = list(states)
    ready = [state.replica for state in states if state.ready]
    lacking = [f"{state.replica} {state.reason}" for state in states if not state.ready]
    if len(ready) >= least:
        # The list is older than the last offer.
        names = ", ".join(ready[:MAX_SHOWN])
        return f"replicas {of} have yet to answer the last offer {after}: {names}"
    if not ready:
        head = "no replica" if least == 1 else f"none of {least} replicas"
        why = "; ".join(lacking) or "no worker has joined the channel"
        return f"{head} {of} is ready {after}: {why}"
    more = f" and {len(ready) - MAX_SHOWN} more" if len(ready) > MAX_SHOWN else ""
    names = ", ".join(ready[:MAX_SHOWN]) + more
    head = f"{len(ready)} of {least} replicas {of} {'is' if len(ready) == 1 else 'are'} ready"
    why = "; ".join(lacking) or "no other has joined the channel"
    return f"{head} ({names}) {after}; {why}"


def not_ready(states: Iterable[ReplicaState], names: frozenset[str], of: str, after: str) -> str:
    """Says which of the replicas with these names are not ready, and what they lack.

    `of` and `after`: of which channel, and after how long.
    """
    known = {state.replica: state for state in states}
    lacking = [
        f"{name} {known[name].reason}" if name in known else f"{name} has not joined"
        for name in sorted(names)
        if name not in known or not known[name].ready
    ]
    if not lacking:
        # The list is older than the last offer.
        lacking = [f"{', '.join(sorted(names)[:MAX_SHOWN])} have yet to answer the last offer"]
    return f"not all of the replicas {of} are ready {after}: {'; '.join(lacking[:MAX_SHOWN])}"


def describe_call(
    call: Call | None, handle: RoundHandle, states: Iterable[ReplicaState], world_size: int
) -> str:
    """Says whom a round waits for; `call`: None where it is not known any more."""
    states = list(states)
    if call is None or (call.receivers is None and not call.ended):
        # A trainer is not told which ranks have opened the call.
        ranks = "" if world_size == 1 else f" (each of the {world_size} ranks has to publish it)"
        return f"not admitted yet{ranks}; replicas: {describe_replicas(states)}"
    if handle.stuck:
        return ", ".join(keeps(holder, handle.finished.reached) for holder in handle.stuck)
    left = readers(call, handle, states)
    names = ", ".join(f"{r.replica}/{r.member} (pid {r.processes[0].pid})" for r in left)
    several = len(left) > 1
    if out := [str(seq) for seq, lease in call.leases.items() if not lease.released]:
        by = f"{'at least one of ' if several else ''}{names or 'all of its receivers'}"
        text = f"batch {', '.join(out)} is not released by {by}"
    elif several:
        text = f"at least one of {names} has not voted or not committed"
    else:
        text = (
            f"{names or 'the broker'} has not {'voted or not committed' if names else 'ended it'}"
        )
    return f"{text} ({WHICH})" if several else text
