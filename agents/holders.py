"""Names who keeps leases: a worker that is silent, or what reads for one that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..protocol.records import Holder

if TYPE_CHECKING:
    from .results import RoundResult


def name_of(holder: Holder) -> str:
    """Names a holder, and those who may be reading instead of one that has ended."""
    who = f"{holder.replica}/{holder.member} (pid {holder.pid}"
    if holder.readers is None:
        return f"{who})"
    pids = ", ".join(map(str, holder.readers))
    which = f"{'pids' if len(holder.readers) > 1 else 'pid'} {pids}" if pids else "others"
    return f"{who}, which has ended: {which} may still be reading for it)"


def keeps(holder: Holder, result: RoundResult | None) -> str:
    """Says that it keeps what it holds, and why it is out of the round, if that has ended."""
    outcome = None if result is None else result.receivers.get(f"{holder.replica}/{holder.member}")
    said = f"{name_of(holder)} keeps its lease"
    if outcome is None or outcome.pid != holder.pid or not outcome.reason:
        return said
    return f"{said}: {outcome.reason}"
