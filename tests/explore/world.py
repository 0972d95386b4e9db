"""A small world: the shipped ledger and cores, joined by queues that lose, delay and repeat.

Everything that can happen is an action. The promises are checked while an action runs, and once
nothing more happens; `Violation` says which one broke. `search` walks through all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tensorlease.agents import work as jobs
from tensorlease.agents.trainer_core import TrainerCore
from tensorlease.broker.ledger.state import RoundState
from tensorlease.protocol import messages as m

from . import promises
from .parts import Action, Link, TrainerApp, Violation, WorkerApp

MOVES = frozenset(
    {
        "up",
        "down",
        "work",
        "connect",
        "publish",
        "notice",
        "start broker",
        "late up",
        "late down",
        "bye",
        "read out",
        "readers end",
        "notice readers",
    }
)
"""What goes on by itself; all else is time or a fault."""
from .base import job_of
from .faults import Faults

_EVERYONE = ("start broker", "kill broker", "tick", "expel")

_READERS = ("read out", "readers end", "notice readers")

_WORKERS = ("work", "fail", "misread", "kill worker", "heir worker", *_READERS)

_BY_ITSELF = ("work", "fail", "misread", "down", "kill worker", "publish", "void", "kill trainer")


class World(Faults):
    """One state of everything, and what can happen next."""

    # ------------------------------------------------------------ what can happen

    def actions(self) -> list[Action]:
        """Returns all that can happen now; nothing means that the world is at rest."""
        found: list[Action] = []
        ledger = self.ledger
        for index, (app, link) in enumerate(zip(self.agents(), self.links, strict=True)):
            if link.late_up and ledger is not None:
                found.append(("late up", index))
            # What a dead one sent may arrive until its death is noticed.
            sent = link.up and (app.alive or app.core.me.instance in self.unnoticed)
            if sent and link.open and ledger is not None:
                found.append(("up", index))
            if not app.acts:
                continue
            if link.down:
                found.append(("down", index))
            if link.late_down:
                found.append(("late down", index))
            if ledger is not None and self._can_connect(app, link):
                found.append(("connect", index))
        for index, worker in enumerate(self.workers):
            if self.shape.relays and not worker.alive:
                self._add_readers(found, index, worker)
            if not worker.acts:
                continue
            if isinstance(job_of(worker), jobs.UnreadWork) and self._is_read_for_others(worker):
                continue  # Those whom it asks do not answer before they are done.
            if (worker.core.queue or worker.core.running) and not worker.said_bye:
                found.append(("work", index))
            elif worker.leaving and not worker.said_bye:
                found.append(("bye", self.first_worker + index))
        for index, trainer in enumerate(self.trainers):
            if trainer.acts and self._wants_to_publish(trainer):
                found.append(("publish", index))
        if ledger is None:
            found.append(("start broker", 0))
        else:
            found += [("notice", self.index_of(instance)) for instance in sorted(self.unnoticed)]
            if not any(a[0] in MOVES for a in found) and self._waits():
                found.append(("tick", 0))
        self._add_faults(found)
        return found

    def _add_readers(self, found: list[Action], index: int, worker: WorkerApp) -> None:
        """What those do that read for a worker that has died."""
        if worker.orphaned is not None:
            found.append(("read out", index))
        mortal = self.shape.relays == "named" and worker.core.session.number
        if mortal and not worker.readers_ended:
            found.append(("readers end", index))
        if worker.readers_ended and worker.readers_watched and self.ledger is not None:
            found.append(("notice readers", index))

    def _is_read_for_others(self, heir: WorkerApp) -> bool:
        return any(
            app.orphaned is not None and app.core.replica == heir.core.replica
            for app in self.workers
        )

    def _add_faults(self, found: list[Action]) -> None:
        budget, ledger = self.budget, self.ledger
        for index, worker in enumerate(self.workers):
            if worker.acts and budget.hook_failures and self._can_fail(worker):
                found.append(("fail", index))
            if worker.acts and budget.misreads and isinstance(job_of(worker), jobs.CopyWork):
                found.append(("misread", index))
            if worker.alive and budget.worker_deaths and self.shape.victim in (None, index):
                found.append(("kill worker", index))
        for index, trainer in enumerate(self.trainers):
            if trainer.acts and trainer.call is not None and budget.voids and not trainer.voided:
                found.append(("void", index))
            if trainer.acts and ledger is None and self._can_write_without_broker(trainer):
                found.append(("broker gone", index))
            if trainer.alive and budget.trainer_deaths:
                found.append(("kill trainer", index))
        if ledger is not None and budget.broker_deaths:
            found.append(("kill broker", 0))
        slow = ledger is not None and (self._under_way() or ledger.book.recovering)
        if budget.expulsions and slow:
            found.append(("expel", 0))
        if budget.drops and ledger is not None:
            found += [
                ("drop", index)
                for index, (app, link) in enumerate(zip(self.agents(), self.links, strict=True))
                if link.open and app.alive
            ]
        shape = self.shape
        if shape.repeats or shape.stops or shape.leaves or shape.trainer_heirs + shape.worker_heirs:
            self._add_rare_faults(found)

    def _add_rare_faults(self, found: list[Action]) -> None:
        budget = self.budget
        again = [("again " + name, index) for name, index in found if name in ("up", "down")]
        if budget.repeats:
            found += again
        for index, app in enumerate(self.agents()):
            if app.stopped and app.alive:
                found.append(("go on", index))
            elif app.acts and budget.stops:
                found.append(("stop", index))
            if app.acts and budget.leaves and not app.leaving:
                found.append(("leave", index))
        kinds: tuple[tuple[str, Sequence[TrainerApp | WorkerApp]], ...] = (
            ("heir trainer", self.trainers),
            ("heir worker", self.workers),
        )
        for name, apps in kinds:
            if any(self._is_vacant(app) for app in apps):
                unborn = [i for i, app in enumerate(apps) if self._is_unborn(app)]
                found += [(name, unborn[0])] if unborn else []

    def _is_unborn(self, app: TrainerApp | WorkerApp) -> bool:
        return not app.alive and not app.core.session.number

    def _is_vacant(self, app: TrainerApp | WorkerApp) -> bool:
        """It has died, left or stopped, and nobody has taken its place yet."""
        if self._is_unborn(app) or app.core.me.instance in self.inherited:
            return False
        return not app.alive or (app.stopped and isinstance(app, WorkerApp))

    def _can_connect(self, app: TrainerApp | WorkerApp, link: Link) -> bool:
        if link.open or (app.turned_away is not None and not self._left_its_round(app)):
            return False
        return not any(isinstance(message, m.Refused) for message, _ in link.down)

    def _left_its_round(self, app: TrainerApp | WorkerApp) -> bool:
        """It said, when it was turned away, that it is in a round, and is not any more."""
        core = app.core
        if isinstance(core, TrainerCore) or core.me.instance not in self.inside:
            return False
        return core.state.round is None and core.running is None

    def _can_write_without_broker(self, app: TrainerApp) -> bool:
        return any(
            call.void and not call.voided and call.call not in app.licensed
            for call in app.core.state.calls.values()
        )

    def reduced(self, found: list[Action]) -> list[Action]:
        """Returns a part of what can happen that is enough to meet every violation.

        Three reasons to leave something out; each only turns one order of steps that do not
        touch each other into another order that is still looked at:

        - What an agent does by itself while the broker does not have its connection touches
          nobody else until it says Hello. So such steps are taken in one go, right before that
          (`lock`). Copies, which read what trainers write, do not count as such.
        - Nobody sees whether a broker starts before or after such steps, while nobody can die, or
          write because the broker is gone.
        - What a worker does by itself (take a message in, run a hook) touches nothing that others
          see until its answer is taken in, so its order among what others do does not matter; it
          does while its connection may be lost with what is in it. The same holds for trainers,
          as long as they write only what is released: a read that does not come before the
          release is found all the more surely the earlier the release is taken in.
        """
        if self.lock is not None:
            mine = [action for action in found if self.whose(action) == self.lock]
            if mine:
                return mine
        budget = self.budget
        if self.ledger is None:
            waits = budget.worker_deaths or budget.trainer_deaths or budget.voids
            if not waits and not any(app.voided for app in self.trainers):
                return [("start broker", 0)]
            return found
        if budget.broker_deaths or budget.drops or self.shape.late:
            return found
        for index, worker in enumerate(self.workers):
            link = self.links[self.first_worker + index]
            if not worker.alive or not link.open or isinstance(job_of(worker), jobs.CopyWork):
                continue
            # Its death is its own too: one that others could die instead of it changes nothing.
            some = [a for a in found if self.whose(a) == self.first_worker + index]
            some = [action for action in some if action[0] in _BY_ITSELF]
            if any(name != "kill worker" for name, _ in some):
                return some
        if any(app.licensed for app in self.trainers):
            return found  # They write under readers.
        for index, app in enumerate(self.trainers):
            link = self.links[index]
            if not (app.alive and link.open):
                continue
            if link.down and isinstance(link.down[0][0], m.Voided):
                continue
            some = [action for action in found if self.whose(action) == index]
            some = [action for action in some if action[0] in _BY_ITSELF]
            if any(name in ("down", "publish") for name, _ in some):
                return some
        return found

    def whose(self, action: Action) -> int | None:
        """Returns the index of the agent that does this, or to which it happens."""
        name, index = action
        if name in _EVERYONE:
            return None
        return self.first_worker + index if name in _WORKERS else index

    def _locked_by(self, action: Action) -> int | None:
        """Returns the agent that acts alone after this, until it has said Hello."""
        index = self.whose(action)
        if index is None or action[0] in ("up", "connect", "notice", "drop", "late up"):
            return None
        app = self.agents()[index]
        if not app.alive or self.links[index].open or self.shape.late or self.budget.drops:
            return None
        if isinstance(app, WorkerApp):
            return None if self._may_copy(app) else index
        copies = any(worker.alive and self._may_copy(worker) for worker in self.workers)
        return None if copies or self.shape.trainers > 1 else index

    def _may_copy(self, app: WorkerApp) -> bool:
        """It may read before it says Hello again."""
        link = self.links[self.first_worker + self.workers.index(app)]
        core = app.core
        if any(isinstance(job, jobs.CopyWork) for job in (core.running, *core.queue)):
            return True
        rnd = core.state.round
        waits = rnd is not None and any(b.state.value == "waiting" for b in rnd.batches.values())
        return waits or any(isinstance(message, m.Deliver) for message, _ in link.down)

    def _under_way(self) -> bool:
        assert self.ledger is not None
        return any(
            r.state in (RoundState.STAGING, RoundState.COMMITTING)
            for r in self.ledger.book.rounds()
        )

    def _waits(self) -> bool:
        """Somebody waits for something that only the broker's clock can end."""
        assert self.ledger is not None
        if self.ledger.book.recovering:
            return True
        return any(
            rnd.state is not RoundState.FINISHED
            or any(r.state.value == "draining" and not r.stuck for r in rnd.receivers.values())
            for rnd in self.ledger.book.rounds()
        )

    def _wants_to_publish(self, app: TrainerApp) -> bool:
        if app.done or app.call is not None or "#" not in app.core.state.group:
            return False  # It has nothing to publish, or was never welcomed.
        if any(not call.ended for call in app.core.state.calls.values()):
            return False
        if app.heir and (self._follows_who_is_done(app) or self._next_version(app) is None):
            return False
        return not self.shape.registered or all(app.core.may_write(b) for b in app.memory)

    def _peers(self, one: TrainerApp) -> list[TrainerApp]:
        channel = one.core.me.channel
        return [
            app
            for app in self.trainers
            if app is not one
            and app.alive
            and app.turned_away is None
            and app.core.me.channel == channel
        ]

    def _follows_who_is_done(self, heir: TrainerApp) -> bool:
        return any(peer.done and not peer.heir for peer in self._peers(heir))

    def is_done(self, app: TrainerApp) -> bool:
        """It has nothing to publish any more."""
        return app.done or (app.heir and self._follows_who_is_done(app))

    def _next_version(self, heir: TrainerApp) -> int | None:
        """What one that came later publishes next: as its peers do; None: not yet."""
        peers = self._peers(heir)
        for peer in peers:
            if peer.call is not None and peer.call == heir.core.next_call():
                return peer.version
        if any(peer.call is not None for peer in peers):
            return None
        plans = [peer.version + (peer.tries == 0) for peer in peers if not peer.heir]
        own = heir.version if heir.tries else heir.core.state.last_version + 1
        return max([*plans, own])

    def _can_fail(self, app: WorkerApp) -> bool:
        return isinstance(job_of(app), jobs.PrepareWork | jobs.CopyWork | jobs.CommitWork)

    # ------------------------------------------------------------ doing it

    def act(self, action: Action) -> None:
        """Does one thing; raises `Violation` if that breaks a promise."""
        name, index = action
        if name in _EVERYONE:
            self.dirty.update(range(len(self.links)))
        else:
            self.dirty.add(self.first_worker + index if name in _WORKERS else index)
        listened = self.ledger is not None and self.ledger.book.recovering
        method: Callable[[int], None] = getattr(self, name.replace(" ", "_"))
        method(index)
        self.lock = self._locked_by(action)
        if self.ledger is not None:
            if self.validates:
                self.ledger.validate()
            if listened and not self.ledger.book.recovering:
                self._try_again()

    def run_to_rest(self, limit: int = 5000) -> None:
        """Lets everything go on without further faults, until nothing more happens."""
        for _ in range(limit):
            found = self.actions()
            step = next((a for a in found if a[0] in MOVES or a[0] == "tick"), None)
            if step is None:
                return
            self.act(step)
        raise Violation(f"P2: no rest after {limit} steps: {self.actions()}")

    def end(self) -> None:
        """Runs to rest, wakes who is stopped, and sends all home; each time all must be well."""
        self.run_to_rest()
        promises.check_ended(self)
        for index, app in enumerate(self.agents()):
            if app.stopped and app.alive:
                self.act(("go on", index))
        self.run_to_rest()
        # Who was turned away tries again now and then.
        self._try_again()
        self.run_to_rest()
        self.check_rest()
        for index, trainer in enumerate(self.trainers):
            if trainer.alive:
                self.retire(index)
        self.run_to_rest()
        promises.check_retired(self)
        for _ in self.agents():
            # Who was turned away may come in now, and leaves too.
            for index, app in enumerate(self.agents()):
                if app.alive and app.core.connected and not app.leaving:
                    self.leave(index)
            self.run_to_rest()
        promises.check_base_line(self)

    def check_rest(self) -> None:
        promises.check_rest(self)
