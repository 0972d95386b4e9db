"""Orphans: relays that have ended while others may read for them. See `relays.py`."""

from __future__ import annotations

from ...protocol.records import Holder
from .state import Channel, Relay, Replica, State


def is_orphan(state: State, instance: str) -> bool:
    """Whether it has ended, and others may read for it still."""
    relay = state.relays.get(instance)
    return relay is not None and relay.ended


def reading(state: State, instance: str) -> str:
    """Says who may read for an orphan; empty for all others."""
    if not is_orphan(state, instance):
        return ""
    pids = ", ".join(str(process.pid) for process in state.relays[instance].readers)
    if not pids:
        return "who read for it cannot be named, and may not be done"
    return f"{'pids' if ',' in pids else 'pid'} {pids} may still be reading for it"


def holder(state: State, instance: str) -> Holder | None:
    """Names an orphan to a trainer; None for all others."""
    if not is_orphan(state, instance):
        return None
    relay = state.relays[instance]
    pids = [process.pid for process in relay.readers]
    return Holder(instance, relay.replica, relay.member, relay.pid, pids)


def orphans_of(state: State, channel: Channel, replica: Replica) -> list[Relay]:
    """Returns the orphans that keep a replica of relays out of rounds until they are let go."""
    if not state.relays or state.relays.keys().isdisjoint(replica.members.values()):
        return []
    return [
        relay
        for relay in state.relays.values()
        if relay.ended and (relay.channel, relay.replica) == (channel.name, replica.name)
    ]


def unheard(state: State, channel: str) -> set[str]:
    """Returns the orphans of which nobody has said what they hold: it may be any batch."""
    return {
        instance
        for instance, relay in state.relays.items()
        if relay.ended and relay.unheard and relay.channel == channel
    }
