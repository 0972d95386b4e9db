"""What of a broker's status needs a look: pure, for `status --exit-code` and for people."""

from __future__ import annotations

from collections.abc import Iterator

from tensorlease.broker.queries import (
    ChannelStatus,
    LeaseStatus,
    ReplicaStatus,
    RoundStatus,
    Status,
)

from .units import size

MAX_BATCHES = 4
"""Of one holder, by their numbers."""
CONDITIONS = (
    "a lease is stuck, an agent is silent, a replica is torn, in doubt or not ready,"
    " the last round of a channel failed or left a replica behind that is still there and not at"
    " its version, or the broker admits no round"
    " (drained, ending, or waiting for agents of the former one)"
)
"""When something needs a look, in words."""


def concerns(seen: Status) -> list[str]:
    """A line for each thing that needs a look, the most pressing first; none: all is well."""
    found = [line for channel in seen.channels for line in _stuck(channel)]
    if seen.ending:
        found.append(
            "the broker was told to end: it admits no round, and ends when those under way have ended"
        )
    elif seen.stopping:
        found.append("the broker is drained: it admits no round until `tensorlease drain --undo`")
    if seen.recovering_s:
        found.append(
            f"the broker was restarted and waits {seen.recovering_s:.1f} s more for"
            f" {len(seen.expected)} agents of the former one; until then no round is admitted"
        )
    for channel in seen.channels:
        found += _agents(channel)
        found += _last_round(channel)
    return found


def stuck_leases(rnd: RoundStatus) -> Iterator[str]:
    """A line for all stuck leases of a round with the same holders: since when, what, and who."""
    held: dict[tuple[str, ...], list[LeaseStatus]] = {}
    for lease in rnd.leases:
        if lease.state == "stuck":
            held.setdefault(tuple(lease.holders), []).append(lease)
    for holders, leases in held.items():
        numbers = [f"{lease.rank}.{lease.seq}" for lease in leases]
        more = f" and {len(numbers) - MAX_BATCHES} more" if len(numbers) > MAX_BATCHES else ""
        what = f"{'batch' if len(numbers) == 1 else 'batches'} {', '.join(numbers[:MAX_BATCHES])}{more}"
        yield (
            f"stuck for {max(lease.age_s for lease in leases):.0f} s: {what} of version"
            f" {rnd.version} ({size(sum(lease.nbytes for lease in leases))}), held by"
            f" {', '.join(holders)}"
        )


def _stuck(channel: ChannelStatus) -> Iterator[str]:
    for rnd in channel.rounds:
        for line in stuck_leases(rnd):
            yield f"channel {channel.name}: {line}"


def _agents(channel: ChannelStatus) -> Iterator[str]:
    group = channel.group
    for rank in group.ranks if group is not None else ():
        if rank.state == "silent":
            yield (
                f"channel {channel.name}: trainer rank {rank.place} (pid {rank.pid}) is silent"
                f" for {rank.heard_s:.0f} s"
            )
    for replica in channel.replicas:
        if words := weights(replica):
            yield f"channel {channel.name}: replica {replica.replica} is {words}"
        # A channel without a trainer is ready for nothing, and that is no fault of its replicas.
        elif not replica.ready and group is not None:
            yield f"channel {channel.name}: replica {replica.replica} is not ready: {replica.reason}"


def _last_round(channel: ChannelStatus) -> Iterator[str]:
    if not (channel.ended and (channel.group or channel.replicas)):
        return  # Where nobody is any more nothing is to be done.
    last = channel.ended[0]
    # A mixed one is over when those that it left behind are at the version, or gone.
    over = ("committed", "empty") if last.behind else ("committed", "empty", "mixed")
    if last.outcome not in over:
        why = f": {last.reason}" if last.reason else ""
        yield f"channel {channel.name}: the last round, of version {last.version}, {_ended(last.outcome)}{why}"


def _ended(outcome: str) -> str:
    return "failed" if outcome == "failed" else f"ended {outcome}"


def weights(replica: ReplicaStatus) -> str:
    """What is wrong with a replica's weights: torn, or in doubt and why; empty: nothing."""
    doubts = [worker for worker in replica.members if worker.doubt]
    if doubts:
        worker = doubts[0]
        return (
            f"in doubt: worker {replica.replica}/{worker.place} (pid {worker.pid}) was put out of"
            f" {worker.doubt} and has not said what it wrote"
        )
    return "torn: at no version until a later round commits" if replica.torn else ""
