"""Who stands where in the rounds of a channel, and who keeps the others waiting. Pure."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from tensorlease.broker.queries import ChannelStatus, RoundStatus

ORDER = ("preparing", "staging", "voted", "committing", "committed")
"""The stages of a receiver, as it goes through them."""
IDLE = "idle"
AT_REST = frozenset({"committed", "torn", "out"})
"""Stages that end a receiver's part; so it belongs to nobody's waiting."""


class Row(Struct):
    """A worker, and what it does in the round that it is in."""

    worker: str
    """`replica/member`"""
    pid: int
    version: str
    stage: str
    owed: int
    """Batches that it still holds."""
    nbytes: int
    still_s: float
    """Since it last made progress; 0: it is in no round."""
    note: str
    straggles: bool = False
    bad: bool = False


def stragglers(rnd: RoundStatus) -> set[str]:
    """The instances that are behind, where at least half of the receivers are further."""
    places = {
        receiver.instance: ORDER.index(receiver.state)
        for receiver in rnd.receivers
        if receiver.state in ORDER
    }
    if len(places) < 2:
        return set()
    behind = {name for name, place in places.items() if place == min(places.values())}
    return behind if 2 * (len(places) - len(behind)) >= len(places) else set()


def stages(rnd: RoundStatus) -> str:
    """How many receivers are in each stage: `1 preparing, 3 voted`."""
    counts = Counter(receiver.state for receiver in rnd.receivers)
    known = [state for state in ORDER if counts[state]]
    others = sorted(set(counts) - set(ORDER))
    return ", ".join(f"{counts[state]} {state}" for state in [*known, *others])


def rows(channel: ChannelStatus, versions: dict[str, str]) -> list[Row]:
    """Every worker of a channel; stuck and straggling ones first, then who has stood still longest.

    Args:
        channel: Its status.
        versions: What each replica is at.
    """
    found: dict[str, Row] = {}
    for replica in channel.replicas:
        for worker in replica.members:
            note = f"silent for {worker.heard_s:.0f} s" if worker.state == "silent" else ""
            if not note and not replica.ready and channel.group is not None:
                note = replica.reason
            found[worker.instance] = Row(
                f"{replica.replica}/{worker.place}",
                worker.pid,
                versions[replica.replica],
                IDLE,
                0,
                0,
                0.0,
                note,
                bad=bool(note),
            )
    for rnd in channel.rounds:
        behind = stragglers(rnd)
        for receiver in rnd.receivers:
            ended = rnd.state == "finished" and receiver.state in AT_REST and not receiver.stuck
            known = found.get(receiver.instance)
            if ended and known is not None:
                continue
            name = f"{receiver.replica}/{receiver.member}"
            row = known or Row(name, receiver.pid, "", "", 0, 0, 0.0, "", bad=True)
            row.stage = "stuck" if receiver.stuck else receiver.state
            row.owed, row.nbytes = receiver.owed, receiver.nbytes
            row.still_s = receiver.moved_s
            row.straggles = receiver.instance in behind
            row.bad = row.bad or receiver.stuck or bool(receiver.reason)
            row.note = "; ".join(text for text in (row.note, receiver.reason) if text)
            found[receiver.instance] = row
    return sorted(found.values(), key=lambda row: (not row.bad, not row.straggles, -row.still_s))
