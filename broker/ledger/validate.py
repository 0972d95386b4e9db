"""Cross-checks of everything the ledger keeps; run after every test that touches it."""

from __future__ import annotations

from .state import (
    IN_ROUND,
    UNVOTED,
    Channel,
    LeaseState,
    ReceiverState,
    Round,
    RoundState,
    State,
)


def validate(state: State) -> None:
    """Raises AssertionError naming what is wrong."""
    for instance, peer in state.peers.items():
        assert peer.instance == instance
        assert (peer.trainer is None) != (peer.worker is None), f"{instance}: kind"
        channel = state.channels[peer.channel]
        if peer.trainer is not None:
            assert channel.group is not None and channel.group.id == peer.trainer.group
            assert channel.group.ranks.get(peer.trainer.rank) == instance
        if peer.worker is not None:
            replica = channel.replicas.get(peer.worker.replica)
            holder = None if replica is None else replica.members.get(peer.worker.member)
            assert (holder == instance) == peer.worker.placed, f"{instance}: place"
        assert (peer.readers is None) == (instance not in state.relays), f"{instance}: relay"
    for instance, relay in state.relays.items():
        assert not (relay.ended and instance in state.peers), f"{instance}: an orphan that lives"
    for name, channel in state.channels.items():
        assert channel.name == name
        _check_channel(state, channel)
    for trainer, buffers in state.mappings.items():
        for number, workers in buffers.items():
            assert workers, f"mapping {trainer}/{number} of nobody"
            assert all(w in state.peers for w in workers), f"mapping {trainer}/{number}: unknown"


def _check_channel(state: State, channel: Channel) -> None:
    if channel.group is not None:
        assert channel.group.ranks, f"{channel.name}: a group of nobody"
        assert all(i in state.peers for i in channel.group.ranks.values())
    for replica in channel.replicas.values():
        assert replica.members and max(replica.members) < replica.size
        assert all(i in state.peers for i in replica.members.values())
    busy: set[str] = set()
    for key, rnd in channel.rounds.items():
        assert rnd.key == key
        _check_round(state, rnd)
        now = {r.id.instance for r in rnd.receivers.values() if r.state in IN_ROUND}
        assert not busy & now, f"a worker in two rounds: {busy & now}"
        busy |= now


def _check_round(state: State, rnd: Round) -> None:
    states = [receiver.state for receiver in rnd.receivers.values()]
    where = f"round {rnd.key} ({rnd.state.value})"
    assert rnd.waiting_votes == sum(s in UNVOTED for s in states), f"{where}: votes"
    committing = sum(s is ReceiverState.COMMITTING for s in states)
    assert rnd.waiting_commits == committing, f"{where}: commits"
    assert (rnd.result is not None) == (rnd.state is RoundState.FINISHED), f"{where}: result"
    if rnd.state is RoundState.FINISHED:
        assert not any(s in IN_ROUND or s is ReceiverState.ABSENT for s in states), where
    if rnd.state is RoundState.OPENING:
        assert not rnd.receivers, where
    if rnd.state is RoundState.COMMITTING:
        assert not rnd.waiting_votes, f"{where}: decided without all votes"
    for number, rank in rnd.ranks.items():
        mine = [lease for lease in rnd.leases.values() if lease.rank == number]
        assert rank.received == sum(lease.arrived for lease in mine), f"{where}: received"
        out = sum(lease.state in (LeaseState.PARKED, LeaseState.HELD) for lease in mine)
        assert rank.outstanding == out, f"{where}: outstanding of rank {number}"
    for key, lease in rnd.leases.items():
        assert key == (lease.rank, lease.seq)
        if lease.state is LeaseState.RELEASED:
            assert not lease.holders and lease.body is None, f"{where}: released yet held"
        elif lease.state is not LeaseState.PARKED and state.recovering_until is None:
            assert lease.holders, f"{where}: batch {key} held by nobody"
    for instance, receiver in rnd.receivers.items():
        assert receiver.id.instance == instance
        held = sum(instance in lease.holders for lease in rnd.leases.values())
        if receiver.state in IN_ROUND:
            assert receiver.owed == held, f"{where}: {instance} owes {receiver.owed}, holds {held}"
        if receiver.state in (ReceiverState.VOTED, ReceiverState.COMMITTING):
            assert not held, f"{where}: {instance} voted and still holds a batch"
        assert (receiver.fate is None) == (
            receiver.state in IN_ROUND or receiver.state is ReceiverState.ABSENT
        ), f"{where}: fate of {instance}"
