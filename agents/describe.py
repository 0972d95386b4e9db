"""What a trainer says of a round that takes long: whom it waits for, as far as it can know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..protocol.records import Fate, ReceiverId, ReplicaState
from .results import RoundHandle
from .trainer_core import Call

MAX_SHOWN: Final = 8
"""Replicas that are ready and named."""


def describe_replicas(states: Iterable[ReplicaState]) -> str:
    """Names each replica of the channel, and what it lacks."""
    ready = "is complete (its process may still be at another round, or in a hook)"
    texts = [f"{s.replica} {ready if s.ready else s.reason}" for s in states]
    return "; ".join(texts) or "no worker has joined the channel"


def readers(call: Call, handle: RoundHandle | None) -> list[ReceiverId]:
    """Returns who may still read a round's batches, as far as its trainer can know.

    Who has run its commit hook had taken in everything before.
    """
    result = None if handle is None else handle.finished.reached
    if result is None:
        return list(call.receivers or [])
    done = {
        (outcome.name, outcome.pid)
        for outcome in result.receivers.values()
        if outcome.fate in (Fate.COMMITTED, Fate.TORN, Fate.LOST)
    }
    every = list(call.receivers or [])
    left = [r for r in every if (f"{r.replica}/{r.member}", r.processes[0].pid) not in done]
    return left or every


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


def describe_call(call: Call | None, handle: RoundHandle, states: Iterable[ReplicaState]) -> str:
    """Says whom a round waits for; `call`: None where it is not known any more."""
    if call is None or (call.receivers is None and not call.ended):
        return f"not admitted yet; replicas: {describe_replicas(states)}"
    left = readers(call, handle)
    names = ", ".join(f"{r.replica}/{r.member} (pid {r.processes[0].pid})" for r in left)
    if handle.stuck:
        return ", ".join(
            f"{h.replica}/{h.member} (pid {h.pid}) is silent and keeps its lease"
            for h in handle.stuck
        )
    if out := [str(seq) for seq, lease in call.leases.items() if not lease.released]:
        which = "" if len(left) == 1 else "all of "
        return f"batch {', '.join(out)} is not released by {which}{names or 'its receivers'}"
    return f"not all of {names or 'its receivers'} have voted and committed"
