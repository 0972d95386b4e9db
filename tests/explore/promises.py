"""The promises as code: what must hold while a small world runs, and once it is at rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorlease.agents import work as jobs
from tensorlease.broker.ledger.state import RoundState
from tensorlease.protocol.records import Code, Fate, Outcome, RoundResult

from .parts import TrainerApp, Violation, WorkerApp

if TYPE_CHECKING:
    from .base import Base

DECIDED = (Outcome.COMMITTED, Outcome.MIXED)

# ---------------------------------------------------------------- while it runs


def check_write(world: Base, app: TrainerApp, buffer: int) -> None:
    """P1: whoever reads this buffer now reads for a round that can never commit."""
    for worker in world.workers:
        if worker.orphaned is not None:
            trainer, call, _, buffers = worker.orphaned
            mine = trainer == app.core.me.instance and buffer in buffers
            if mine and call not in app.licensed:
                raise Violation(f"P1: buffer {buffer} is written while a relay's readers read it")
        job = worker.core.running
        if not worker.alive or worker.reading is None or not isinstance(job, jobs.CopyWork):
            continue
        batch = job.batch
        mine = batch.trainer == app.core.me.instance and buffer in batch.buffers
        if mine and batch.call not in app.licensed:
            raise Violation(f"P1: buffer {buffer} is written while {batch} is read")


def check_release(world: Base, app: TrainerApp, call: int, seq: int) -> None:
    """P1: nobody reads the batch any more."""
    for worker in world.workers:
        if worker.orphaned is not None and worker.orphaned[:3] == (app.core.me.instance, call, seq):
            raise Violation(f"P1: batch {seq} of call {call} released under a relay's readers")
        running = worker.core.running
        if worker.alive and worker.reading is not None and isinstance(running, jobs.CopyWork):
            batch = running.batch
            if (batch.trainer, batch.call, batch.seq) == (app.core.me.instance, call, seq):
                raise Violation(f"P1: batch {seq} of call {call} released under a reader")


def check_read(world: Base, app: WorkerApp, job: jobs.CopyWork) -> None:
    """P1: nobody begins to read after the release; rule 5: one round for each process."""
    trainer = world.trainer_of(job.batch.trainer)
    entry = trainer.core.state.calls.get(job.batch.call)
    lease = None if entry is None else entry.leases.get(job.batch.seq)
    licensed = job.batch.call in trainer.licensed
    released = entry is None or (lease is not None and lease.released)
    if trainer.alive and released and not licensed:
        raise Violation(f"P1: a read of {job.batch} begins after its release")
    mine = app.core.me.processes[0].pid
    for other in world.workers:
        theirs = other.core.running
        # A broker that has restarted may not know yet who reads by the word of the one before.
        same = isinstance(theirs, jobs.CopyWork) and theirs.batch.epoch == job.batch.epoch
        reads = other.alive and other.reading is not None and same
        if other is not app and reads and other.core.me.processes[0].pid == mine:
            raise Violation(f"rule 5: process {mine} reads for two rounds")


def check_commit(world: Base, app: WorkerApp, job: jobs.CommitWork) -> None:
    """P3: never a wrong weight: all of the version, nothing of another, nothing mixed."""
    ranks = world.sources(app)
    wanted = {(rank, seq) for rank in ranks for seq in range(world.shape.batches)}
    if set(app.staged) != wanted or set(app.staged.values()) != {job.version}:
        raise Violation(f"P3: version {job.version} commits with {app.staged}")


def check_hooks(app: WorkerApp) -> None:
    """Rule 17: each prepare is followed by exactly one commit or abort."""
    for before, after in zip(app.hooks, app.hooks[1:], strict=False):
        if (before == "prepare") == (after == "prepare"):
            raise Violation(f"rule 17: hooks ran as {app.hooks}")
    del app.hooks[:-2]


def check_outcome(world: Base, app: TrainerApp, call: int, result: RoundResult) -> None:
    """P5: ranks hear the same, and what they hear is what happened."""
    for trainer in world.trainers:
        other = trainer.results.get(call)
        if not trainer.alive or other is None or other.group != result.group:
            continue
        known = {other.outcome, result.outcome} - {Outcome.UNRESOLVED}
        if len(known) > 1:
            raise Violation(f"P5: call {call} is {other.outcome} and {result.outcome}")
    _check_replicas(result)
    if result.outcome is Outcome.UNRESOLVED:
        _check_silence(world, result)
        return
    key = (result.group, call)
    fates = {receiver.instance: receiver.fate for receiver in result.receivers}
    # Of a replica that has the version already, the result names no receivers.
    already = {r.replica: r.fate for r in result.replicas}
    for worker in world.workers:
        instance = worker.core.me.instance
        fate = fates.get(instance)
        if fate is Fate.COMMITTED and key not in worker.committed:
            raise Violation(f"P5: {instance} is said to have committed {key}")
        if not worker.alive:
            continue
        if fate is None:
            fate = already.get(worker.core.replica)
        if key in worker.committed and fate not in (Fate.COMMITTED, Fate.UNKNOWN):
            raise Violation(f"P5: {instance} committed {key}, told {fate}")
        if fates.get(instance) is Fate.LOST and not worker.leaving:
            raise Violation(f"P5: {instance} lives and is said to be lost to {key}")


def _check_silence(world: Base, result: RoundResult) -> None:
    """Rule 19: only who lives and says nothing leaves a round unresolved, never who has died.

    (Who has left in peace may be on a list still, and nothing tells a new broker of it.)
    """
    shape = world.shape
    if not (shape.stops or shape.expulsions or shape.leaves):
        raise Violation(f"rule 19: {result.outcome}, and nobody was silent: {result.reason}")


def _check_replicas(result: RoundResult) -> None:
    """The outcome is what the replicas make of it, and a replica what its receivers do."""
    served = [r for r in result.replicas if r.fate is not Fate.UNSERVED]
    committed = [r for r in served if r.fate is Fate.COMMITTED]
    match result.outcome:
        case Outcome.COMMITTED:
            right = bool(committed) and len(committed) == len(result.replicas)
        case Outcome.MIXED:
            right = bool(committed) and len(committed) < len(result.replicas)
        case Outcome.FAILED:
            right = not any(r.fate is Fate.COMMITTED for r in result.receivers) or any(
                r.fate is Fate.TORN for r in result.replicas
            )
        case _:
            right = True
    if not right:
        raise Violation(f"P5: {result.outcome} with {result.replicas}")
    for replica in result.replicas:
        of = [r.fate for r in result.receivers if r.replica == replica.replica]
        if of and (replica.fate is Fate.COMMITTED) != all(f is Fate.COMMITTED for f in of):
            raise Violation(f"P5: replica {replica} with receivers {of}")


# ---------------------------------------------------------------- at rest


def check_ended(world: Base) -> None:
    """P2: with somebody stopped, or nobody: every round has an end, and who acts knows it."""
    assert world.ledger is not None
    for rnd in world.ledger.book.rounds():
        if rnd.state is not RoundState.FINISHED:
            raise Violation(f"P2: the ledger keeps {rnd.key} {rnd.state}")
    for channel in world.ledger.state.channels.values():
        # The last that each rank opened, and the newest of all, are kept until they are known.
        kept = [
            r.key
            for r in channel.rounds.values()
            if all(x.holders == set() for x in r.leases.values())
        ]
        if len(kept) > 1 + world.shape.trainers:
            raise Violation(f"P7: the ledger keeps ended rounds {kept}")
    for app in world.trainers:
        if app.acts and app.turned_away is None:
            for call in app.core.state.calls.values():
                if not call.ended:
                    raise Violation(f"P2: call {call.call} never ended for rank {app.core.rank}")
                if call.void and not call.voided:
                    raise Violation(f"P2: void of call {call.call} is not answered")


def check_rest(world: Base) -> None:
    """P2, P3 and P7, once nothing more happens: all ended, all released, all or none."""
    check_ended(world)
    for app in world.trainers:
        for call, result in app.results.items():
            # Again: a worker may have done by now what it had not when this was heard.
            check_outcome(world, app, call, result)
        if app.alive and app.turned_away is not Code.FOREIGN_GROUP:
            _check_trainer(world, app)
    for worker in world.workers:
        if worker.alive and worker.turned_away is not Code.PLACE_TAKEN:
            _check_worker(world, worker)
    _check_ledger(world)


def _check_trainer(world: Base, app: TrainerApp) -> None:
    if app.turned_away is not None or not app.core.connected:
        raise Violation(f"P2: rank {app.core.rank} is not connected: {app.turned_away}")
    if app.leaving:
        raise Violation(f"P2: rank {app.core.rank} waits for the answer to its goodbye")
    if not world.is_done(app):
        raise Violation(f"P2: rank {app.core.rank} is not done: {app.core.state.calls}")
    for call in app.core.state.calls.values():
        if not call.released:
            raise Violation(f"P1/P7: call {call.call} keeps {call.leases}")


def _check_worker(world: Base, app: WorkerApp) -> None:
    core = app.core
    instance = core.me.instance
    if app.turned_away is not None or not core.connected:
        raise Violation(f"P2: {instance} is not connected: {app.turned_away}")
    if app.leaving:
        raise Violation(f"P2: {instance} waits for the answer to its goodbye")
    if core.state.round is not None or core.queue or core.running:
        raise Violation(f"P2: {instance} stays in {core.state.round}, with {core.queue}")
    if app.hooks[-1:] == ["prepare"]:
        raise Violation(f"rule 17: {instance} stays prepared")
    note = core.state.committed
    if core.current and note is not None and note.ok:
        # P3: who serves a version does so because its whole replica committed it.
        key = (note.group, note.call)
        for id in note.receivers:
            other = world.worker_of(id.instance)
            if other is not None and not other.alive and not any(t.alive for t in world.trainers):
                continue  # Nobody is left who knows of the round, and the replica is not whole.
            if id.replica == core.replica and other is not None and key not in other.committed:
                raise Violation(
                    f"P3: {instance} is at {core.current}, but {id.instance} of its replica"
                    f" did not commit {key}"
                )


def _check_ledger(world: Base) -> None:
    assert world.ledger is not None
    state = world.ledger.state
    living = {app.core.me.instance for app in world.agents() if app.alive}
    if set(state.peers) - living:
        raise Violation(f"P7: the ledger keeps the dead {set(state.peers) - living}")
    for channel in state.channels.values():
        if channel.rounds and channel.group is None:
            raise Violation(f"P7: the ledger keeps rounds {list(channel.rounds)} of nobody")
        for replica in channel.replicas.values():
            version, _ = world.ledger.book.current(channel, replica)
            at = {
                w.core.current
                for w in world.workers
                if w.alive and w.core.me.instance in replica.members.values()
            }
            if version and at != {version}:
                raise Violation(f"P3: {replica.name} counts as {version}, is at {at}")
    for trainer, buffers in state.mappings.items():
        if any(workers - living for workers in buffers.values()):
            raise Violation(f"P7: a dead worker has buffers of {trainer} mapped")
        if trainer not in living:
            raise Violation(f"P7: buffers of the dead trainer {trainer} stay mapped")
    if state.gone or state.expected or state.recovering_until is not None:
        raise Violation(f"P7: left of the restart: {state.gone} {state.expected}")


def check_retired(world: Base) -> None:
    """P7: after every trainer has taken its buffers back; who was turned away could not."""
    away = set()
    for app in world.trainers:
        if app.turned_away is not None:
            away.add(app.core.me.instance)
        elif app.alive and (app.core.state.retiring or set(app.memory) - app.retired):
            raise Violation(f"P7: rank {app.core.rank} waits for {app.core.state.retiring}")
    for worker in world.workers:
        mapped = set(worker.core.state.mappings) - away
        if worker.alive and worker.turned_away is None and mapped:
            raise Violation(f"P7: {worker.core.me.instance} has buffers of {mapped} mapped")
    assert world.ledger is not None
    if set(world.ledger.state.mappings) - away:
        raise Violation(f"P7: the ledger keeps mappings {world.ledger.state.mappings}")


def check_base_line(world: Base) -> None:
    """P7: after everyone has left, the ledger knows nobody and keeps nothing."""
    assert world.ledger is not None
    state = world.ledger.state
    for app in world.agents():
        if app.alive and app.turned_away is None:
            raise Violation(f"P2: {app.core.me.instance} waits for the answer to its goodbye")
    if state.peers or state.mappings or state.gone or state.expected or state.relays:
        raise Violation(
            f"P7: left over: {list(state.peers)} {state.mappings} {state.gone} {state.relays}"
        )
    for channel in state.channels.values():
        if channel.rounds or channel.replicas or channel.group is not None:
            raise Violation(f"P7: left over: {list(channel.rounds)} {channel.replicas}")
