"""What goes wrong in a small world."""

from __future__ import annotations

from tensorlease.agents import work as jobs
from tensorlease.protocol import messages as m

from .apps import Apps
from .base import CHANNELS
from .parts import Link, WorkerApp


class Faults(Apps):
    """Adds the faults."""

    # ------------------------------------------------------------ faults

    def kill_worker(self, index: int) -> None:
        """All agents in its process die with it."""
        self.budget.worker_deaths -= 1
        pid = self.workers[index].core.me.processes[0].pid
        for other, app in enumerate(self.workers):
            if app.alive and app.core.me.processes[0].pid == pid:
                self._die(self.first_worker + other)

    def kill_trainer(self, index: int) -> None:
        self.budget.trainer_deaths -= 1
        self._die(index)

    def _die(self, index: int) -> None:
        """What it sent before may still arrive, before its death is noticed or never."""
        app = self.agents()[index]
        self.dirty.add(index)
        app.alive = False
        if isinstance(app, WorkerApp):
            job = app.core.running
            if self.shape.relays and app.reading is not None and isinstance(job, jobs.CopyWork):
                batch = job.batch
                app.orphaned = (batch.trainer, batch.call, batch.seq, tuple(batch.buffers))
            app.core.running = None
        self.links[index].down.clear()
        self.links[index].late_down.clear()
        self.unnoticed.add(app.core.me.instance)

    def notice(self, index: int) -> None:
        assert self.ledger is not None
        instance = self.agents()[index].core.me.instance
        self.unnoticed.discard(instance)
        self.links[index].open = False
        self.links[index].up.clear()
        self.run(self.ledger.gone(instance, "killed", self.now))

    def read_out(self, index: int) -> None:
        """What was read for a worker that has died has been read."""
        self.workers[index].orphaned = None

    def readers_end(self, index: int) -> None:
        """Who read for a worker that has died has ended, whatever it was at."""
        app = self.workers[index]
        app.orphaned, app.readers_ended = None, True

    def notice_readers(self, index: int) -> None:
        assert self.ledger is not None
        app = self.workers[index]
        app.readers_watched = False
        self.run(self.ledger.readers_gone(app.core.me.instance, "ended", self.now))

    def heir_trainer(self, index: int) -> None:
        """A rank that was restarted joins its group again."""
        old = next(app for app in self.trainers if self._is_vacant(app))
        self.inherited.add(old.core.me.instance)
        channel = CHANNELS.index(old.core.me.channel)
        app = self.trainers[index] = self._trainer(index, old.core.rank, channel)
        app.heir = True
        self.links[index] = Link()

    def heir_worker(self, index: int) -> None:
        """A new worker takes the place of a dead one."""
        old = next(app for app in self.workers if self._is_vacant(app))
        self.inherited.add(old.core.me.instance)
        channel = CHANNELS.index(old.core.me.channel)
        place = old.core.member if self.shape.together else int(old.core.replica[6:])
        self.workers[index] = self._worker(index, place, channel)
        self.links[self.first_worker + index] = Link()

    def stop(self, index: int) -> None:
        self.budget.stops -= 1
        self.agents()[index].stopped = True

    def go_on(self, index: int) -> None:
        self.agents()[index].stopped = False

    def leave(self, index: int) -> None:
        """It closes, out of patience: what has not ended by then goes on without it."""
        app = self.agents()[index]
        self.budget.leaves -= 1
        app.leaving = True
        if isinstance(app, WorkerApp):
            app.core.withdraw("leaves")
            self.collect(index)
        else:
            app.done = True
            self.bye(index)

    def bye(self, index: int) -> None:
        app = self.agents()[index]
        app.said_bye = True
        app.core.bye()
        self.collect(index)

    def expel(self, _: int) -> None:
        """A limit passes although agents live: whoever is slow is put out."""
        self.budget.expulsions -= 1
        self.tick(0)

    def tick(self, _: int) -> None:
        """Time passes to the next deadline; living agents beat."""
        assert self.ledger is not None
        # The first look only finds out which deadline is next.
        self.run(self.ledger.tick(self.now))
        self.now = max(self.now, min(self.ledger.next_check, self.now + 100))
        for index, app in enumerate(self.agents()):
            if app.acts and self.links[index].open and app.core.connected:
                beat = m.Beat(app.core.session.number)
                self.run(self.ledger.message(app.core.me.instance, beat, b"", self.now))
        self.run(self.ledger.tick(self.now))
        self._try_again()
