"""Names who keeps leases: a worker that is silent, or what reads for one that has ended."""

from __future__ import annotations

from ..protocol.records import Holder


def name_of(holder: Holder) -> str:
    """Names a holder, and those who may be reading instead of one that has ended."""
    who = f"{holder.replica}/{holder.member} (pid {holder.pid}"
    if holder.readers is None:
        return f"{who})"
    pids = ", ".join(map(str, holder.readers))
    which = f"{'pids' if len(holder.readers) > 1 else 'pid'} {pids}" if pids else "others"
    return f"{who}, which has ended: {which} may still be reading for it)"


def keeps(holder: Holder) -> str:
    """Says why it keeps what it holds."""
    silent = "is silent and " if holder.readers is None else ""
    return f"{name_of(holder)} {silent}keeps its lease"
