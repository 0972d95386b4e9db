"""What the applications in a small world do: training loops, and workers that serve."""

from __future__ import annotations

from tensorlease.agents import core as agent
from tensorlease.agents import trainer_core as tc
from tensorlease.agents import work as jobs
from tensorlease.agents.relay_core import RelayCore
from tensorlease.protocol.records import (
    Code,
    OfferRef,
    Outcome,
    Proof,
    RoundResult,
    Taken,
    TakeNote,
    Terms,
)

from . import promises
from .base import Base
from .parts import GARBAGE, MIXED, STALE, TrainerApp, Violation, WorkerApp


def _proofs(buffer: int, value: int) -> list[Proof]:
    """The digest of a buffer whose bytes are one number."""
    return [Proof(buffer, value.to_bytes(8, "big", signed=True))]


class Apps(Base):
    """Adds the training loops and the workers."""

    # ------------------------------------------------------------ the training loops

    def publish(self, index: int) -> None:
        app, shape = self.trainers[index], self.shape
        if app.heir:
            app.version = self._next_version(app) or 1
        elif app.tries == 0:
            app.version += 1
        app.voided = False
        verify = bool(shape.misreads)
        terms = Terms(app.version, shape.min_replicas, shape.strict, verify=verify)
        slots = self._slots(app)
        for buffer in slots:
            self._write(app, buffer, app.version)
        app.call = app.core.open(terms)
        for seq, buffer in enumerate(slots):
            app.core.batch(
                app.call,
                [buffer],
                registered=shape.registered,
                nbytes=1,
                body=None if shape.registered else b"",
                last=seq == shape.batches - 1,
                proofs=_proofs(buffer, app.version) if verify else (),
            )
        self.collect(index)

    def _slots(self, app: TrainerApp) -> list[int]:
        """The registered buffers, or slots of the ring that nobody reads; new ones if need be."""
        if self.shape.registered:
            return sorted(app.memory)
        free = [buffer for buffer in sorted(app.memory) if app.core.may_write(buffer)]
        free += range(len(app.memory), len(app.memory) + self.shape.batches)
        return free[: self.shape.batches]

    def _write(self, app: TrainerApp, buffer: int, value: int) -> None:
        promises.check_write(self, app, buffer)
        app.memory[buffer] = value

    def void(self, index: int) -> None:
        app = self.trainers[index]
        assert app.call is not None
        self.budget.voids -= 1
        app.voided = True
        app.core.void(app.call)
        self.collect(index)

    def broker_gone(self, index: int) -> None:
        """The trainer sees that the broker is gone (its lock is free): that too is a licence."""
        self.trainers[index].core.broker_gone()
        self.collect(index)

    def _on_trainer(self, app: TrainerApp, effect: agent.Effect) -> None:
        match effect:
            case tc.Released():
                promises.check_release(self, app, effect.call, effect.seq)
                self._scribble(app, effect.call, effect.seq)
            case tc.RoundVoided():
                app.licensed.add(effect.call)
                self._scribble(app, effect.call, None)
            case tc.RoundFinished():
                self._on_finished(app, effect.call, effect.result)
            case tc.RoundRefused():
                if effect.code is not Code.CALL_ENDED:
                    raise Violation(f"refused: {effect.text}")
                self._scribble(app, effect.call, None)
                app.call = None
                app.tries += 1
            case tc.BuffersRetired():
                app.retired.update(effect.buffers)
            case tc.RetireDenied() if all(c.released for c in app.core.state.calls.values()):
                raise Violation(f"not retired: {effect.text}")
            case _:
                pass

    def _scribble(self, app: TrainerApp, call: int, seq: int | None) -> None:
        """Writes what it now may (all of a call, or one batch), unless a newer call uses it."""
        calls = app.core.state.calls
        entry = calls.get(call)
        if entry is None:
            return
        newer = {
            buffer
            for other in calls.values()
            if other.call != call and other.call not in app.licensed
            for lease in other.leases.values()
            if not lease.released
            for buffer in lease.buffers
        }
        for lease in entry.leases.values():
            for buffer in lease.buffers:
                if seq in (None, lease.seq) and buffer not in newer:
                    self._write(app, buffer, GARBAGE)

    def _on_finished(self, app: TrainerApp, call: int, result: RoundResult) -> None:
        app.results[call] = result
        promises.check_outcome(self, app, call, result)
        if app.call != call:
            return
        app.call = None
        if result.outcome in (Outcome.COMMITTED, Outcome.MIXED):
            app.tries = 0
            app.done = app.version >= self.shape.rounds
        else:
            app.tries += 1
            app.done = app.tries > self.shape.retries

    def retire(self, index: int) -> None:
        """Takes all its memory back; it is free once nobody has it mapped."""
        app = self.trainers[index]
        app.core.retire(sorted(app.memory))
        self.collect(index)

    # ------------------------------------------------------------ the workers

    def work(self, index: int) -> None:
        """The application's thread goes one step: begins a copy, ends it, or runs a hook."""
        app = self.workers[index]
        self._work(app, ok=True)
        self.collect(self.first_worker + index)

    def fail(self, index: int) -> None:
        self.budget.hook_failures -= 1
        app = self.workers[index]
        if app.core.running is None and isinstance(app.core.queue[0], jobs.CopyWork):
            self._work(app, ok=True)
        self._work(app, ok=False)
        self.collect(self.first_worker + index)

    def misread(self, index: int) -> None:
        """A worker copies other bytes than were published, and believes that they are right."""
        self.budget.misreads -= 1
        app = self.workers[index]
        if app.reading is None:
            self._work(app, ok=True)
        job = app.core.running
        assert isinstance(job, jobs.CopyWork)
        self._end_copy(app, job, ok=True, stale=True)
        self.collect(self.first_worker + index)

    def _work(self, app: WorkerApp, *, ok: bool) -> None:
        core = app.core
        job = core.running or core.next_work()
        match job:
            case jobs.PrepareWork():
                app.staged.clear()
                app.hooks.append("prepare")
                core.prepared(ok, "broken")
            case jobs.CopyWork() if app.reading is None:
                promises.check_read(self, app, job)
                app.reading = self.trainer_of(job.batch.trainer).memory[job.batch.buffers[0]]
            case jobs.CopyWork():
                self._end_copy(app, job, ok)
            case jobs.CommitWork():
                app.hooks.append("commit")
                if ok:
                    promises.check_commit(self, app, job)
                    app.committed[job.key] = job.version
                core.committed(ok, "" if ok else "broken")
            case jobs.AbortWork():
                app.hooks.append("abort")
                core.aborted()
            case jobs.PlanWork():
                self._plan(app)
            case jobs.UnmapWork():
                core.unmapped()
            case jobs.UnreadWork():
                assert isinstance(core, RelayCore)
                core.found_out(True)
            case _:
                raise AssertionError(job)
        promises.check_hooks(app)

    def _end_copy(
        self, app: WorkerApp, job: jobs.CopyWork, ok: bool, *, stale: bool = False
    ) -> None:
        batch = job.batch
        now = self.trainer_of(batch.trainer).memory[batch.buffers[0]]
        value = STALE if stale else now if now == app.reading else MIXED
        app.staged[batch.rank, batch.seq] = None if value == MIXED else value
        app.reading = None
        wanted = len(self.sources(app)) * self.shape.batches
        app.core.copied(
            ok,
            text="broken",
            covered=len(app.staged) == wanted,
            missing="some",
            proofs=_proofs(batch.buffers[0], value) if self.shape.misreads else (),
        )

    def _plan(self, app: WorkerApp) -> None:
        """Takes of every rank what it offered last."""
        takes: dict[int, tuple[str, set[int]]] = {}
        for offer in app.core.state.offers:
            rank = self.trainer_of(offer.trainer).core.rank
            old, numbers = takes.get(rank, ("", set()))
            more = numbers if old == offer.trainer else set()
            takes[rank] = offer.trainer, {*offer.buffers, *more}
        note = TakeNote(
            [OfferRef(offer.trainer, offer.number) for offer in app.core.state.offers],
            [Taken(trainer, sorted(numbers)) for trainer, numbers in takes.values()],
            set(self.sources(app)) <= set(takes),
            [],
        )
        app.core.planned(note, dict(takes.values()))
