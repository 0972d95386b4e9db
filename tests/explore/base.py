"""The ground of a small world: its agents, its broker, and the links that join them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tensorlease.agents import core as agent
from tensorlease.agents import work as jobs
from tensorlease.agents.relay_core import RelayCore
from tensorlease.agents.trainer_core import TrainerCore
from tensorlease.agents.worker_core import WorkerCore
from tensorlease.broker.ledger import Ledger, Settings
from tensorlease.broker.ledger import effects as fx
from tensorlease.broker.ledger.state import AnyState, Cause
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import (
    Distribution,
    Durations,
    LiveNote,
    Process,
)

from .parts import Action, Budget, Link, Shape, TrainerApp, Violation, WorkerApp

_LATE_UP = (m.Staged, m.Vote, m.Committed, m.Drained, m.Batch, m.Open)
_LATE_DOWN = (m.Deliver, m.Prepare, m.Commit, m.Release, m.Abort)
CHANNELS = ("policy", "critic")


class Base:
    """Agents, broker and links, and how messages and effects move between them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.now = 0.0
        self.runs = 0
        self.seen: set[tuple[AnyState, Cause]] = set()
        self.ledger: Ledger | None = None
        self.budget = Budget.of(shape)
        self.trainers = [
            self._trainer(c * shape.trainers + rank, rank, c)
            for c in range(shape.channels)
            for rank in range(shape.trainers)
        ]
        self.workers = [
            self._worker(c * shape.workers + place, place, c)
            for c in range(shape.channels)
            for place in range(shape.workers)
        ]
        # Places in the lists for those that are yet to be born.
        for _ in range(shape.trainer_heirs):
            self.trainers.append(self._trainer(len(self.trainers), 0, 0))
            self.trainers[-1].alive = False
        for _ in range(shape.worker_heirs):
            self.workers.append(self._worker(len(self.workers), 0, 0))
            self.workers[-1].alive = False
        # Links are numbered like agents: trainers first.
        self.first_worker = len(self.trainers)
        self.links = [Link() for _ in self.agents()]
        # The ledger is validated after each action; `search` does so for each new one.
        self.validates = True
        # Agents whose state or link an action touched; `search` writes only those again.
        self.dirty: set[int] = set()
        # Deaths that the broker has yet to be told of.
        self.unnoticed: set[str] = set()
        # Whose death the broker shall be told of.
        self.watched: set[str] = set()
        # Agents whose place a new instance has taken.
        self.inherited: set[str] = set()
        # Counts what may let in those who were turned away; and the count at each one's Hello.
        self.changes = 0
        # The agent that acts alone until it has said Hello (see `reduced`).
        self.lock: int | None = None
        self.asked: dict[int, int] = {}
        # Workers whose last Hello said that they are in a round.
        self.inside: set[str] = set()
        self.start_broker()
        for index, app in enumerate(self.agents()):
            if app.alive:
                self.connect(index)
        self.settle_quietly()

    def _trainer(self, index: int, rank: int, channel: int) -> TrainerApp:
        shape = self.shape
        device = f"cpu:{rank}" if shape.colocated else "cpu:0"
        me = _identity(f"a{index:x}", index + 1, channel, device)
        distribution = Distribution.COLOCATED if shape.colocated else Distribution.ASSEMBLED
        core = TrainerCore(me, rank, shape.trainers, "run", distribution)
        app = TrainerApp(core=core, memory=dict.fromkeys(range(shape.batches), 0))
        if shape.registered:
            buffers = list(range(shape.batches))
            core.offer(0, buffers, len(buffers), b"")
        return app

    def _worker(self, index: int, place: int, channel: int) -> WorkerApp:
        shape = self.shape
        device = f"cpu:{place % shape.trainers}" if shape.colocated else "cpu:0"
        pid = 257 + (index if index >= shape.channels * shape.workers else place)
        me = _identity(f"b{index:x}", pid, channel, device)
        seat = ("engine", place, shape.workers) if shape.together else (f"engine{place}", 0, 1)
        if not shape.relays:
            return WorkerApp(core=WorkerCore(me, *seat))
        # Each server has processes of its own, whoever leads it.
        readers = [Process(513 + place, 1)] if shape.relays == "named" else []
        return WorkerApp(core=RelayCore(me, *seat, readers=readers))

    def settle_quietly(self) -> None:
        """Lets everyone join and plan before anything is published or goes wrong."""
        while True:
            calm = [a for a in self.actions() if a[0] in ("up", "down", "work")]
            if not calm:
                break
            self.act(calm[0])

    # ------------------------------------------------------------ names

    def agents(self) -> list[TrainerApp | WorkerApp]:
        return [*self.trainers, *self.workers]

    def index_of(self, instance: str) -> int:
        for index, app in enumerate(self.agents()):
            if app.core.me.instance == instance:
                return index
        raise KeyError(instance)

    def trainer_of(self, instance: str) -> TrainerApp:
        return next(app for app in self.trainers if app.core.me.instance == instance)

    def worker_of(self, instance: str) -> WorkerApp | None:
        return next((app for app in self.workers if app.core.me.instance == instance), None)

    def sources(self, app: WorkerApp) -> list[int]:
        """Returns the ranks whose batches this worker wants."""
        if self.shape.colocated:
            return [int(app.core.me.device.partition(":")[2])]
        return list(range(self.shape.trainers))

    def run(self, effects: Iterable[fx.Effect], source: int | None = None) -> None:
        """Carries out what the ledger asks."""
        for effect in effects:
            match effect:
                case fx.Send(message=m.Members() | m.BeatOk()):
                    pass  # news for people, and signs of life; nothing here depends on them
                case fx.Send():
                    link = self.links[self._touch(effect.to)]
                    if link.open:
                        link.down.append((effect.message, effect.body))
                case fx.Answer() if source is not None:
                    self.links[source].down.append((effect.message, None))
                case fx.BeginSession() if source is not None:
                    self.links[source].open = True
                case fx.EndSession():
                    self.links[self._touch(effect.instance)].open = False
                    self._try_again()
                case fx.Unwatch():
                    self.watched.discard(effect.instance)
                case fx.Watch():
                    self.watched.add(effect.instance)
                    if not self.agents()[self.index_of(effect.instance)].alive:
                        self.unnoticed.add(effect.instance)
                case fx.WatchReaders():
                    watched = self.worker_of(effect.instance)
                    assert watched is not None
                    self._touch(effect.instance)
                    watched.readers_watched = bool(effect.readers)
                case fx.Kill():
                    index = self._touch(effect.instance)
                    if self.agents()[index].alive:
                        self._die(index)
                case _:
                    pass

    def _touch(self, instance: str) -> int:
        index = self.index_of(instance)
        self.dirty.add(index)
        return index

    def _try_again(self) -> None:
        """Something has changed: who was turned away says Hello again."""
        self.changes += 1
        for index, app in enumerate(self.agents()):
            if app.turned_away is not None:
                app.turned_away = None
                self.dirty.add(index)

    def start_broker(self, _: int = 0) -> None:
        self.runs += 1
        living = [app.core.me.instance for app in self.agents() if app.alive]
        # Who died without a goodbye has left its lock behind, free; who was never born, none.
        fallen = [
            app.core.me.instance
            for app in self.agents()
            if not app.alive and not app.left and app.core.session.number
        ]
        expected = [*living, *fallen] if living and self.runs > 1 else []
        settings = Settings(
            _durations(self.shape.silent_s), window=8, kill_stuck=self.shape.kill_stuck
        )
        notes = {
            app.core.me.instance: msgspec.msgpack.decode(app.core.live_note, type=LiveNote)
            for app in self.workers
            if app.core.me.instance in expected and app.core.live_note
        }
        self.ledger = Ledger(
            f"{self.runs:016x}", settings, now=self.now, expected=expected, relays_noted=notes
        )
        for app in self.workers:
            app.readers_watched = False
        self.unnoticed = set(fallen)
        self.watched.clear()
        for link in self.links:
            link.open = False
        self._try_again()

    def kill_broker(self, _: int) -> None:
        """What it sent may still arrive; what was under way to it is lost with the connection."""
        assert self.ledger is not None
        self.seen |= self.ledger.book.seen
        self.ledger = None
        self.budget.broker_deaths -= 1
        for link in self.links:
            link.open = False
            if not self.shape.late:
                link.up.clear()

    def connect(self, index: int) -> None:
        """The agent notices, closes its connection with all that is in it, and says Hello."""
        app, link = self.agents()[index], self.links[index]
        assert self.ledger is not None
        self._cut(link)
        self.asked[index] = self.changes
        app.core.disconnected()
        hello = app.core.hello()
        app.turned_away = None
        self.inside.discard(hello.instance)
        if isinstance(hello, m.WorkerHello) and hello.round is not None:
            self.inside.add(hello.instance)
        self.run(self.ledger.hello(hello, self.now), index)

    def _cut(self, link: Link) -> None:
        if self.shape.late:
            link.late_up = [x for x in link.up if isinstance(x[0], _LATE_UP)][-1:]
            # An agent closes its old connection before it says Hello in another: what comes late
            # to an agent comes from a broker that has died.
            epoch = "" if self.ledger is None else self.ledger.state.epoch
            late: list[tuple[m.FromBroker, bytes | None]] = [
                (message, body)
                for message, body in link.down
                if isinstance(message, _LATE_DOWN) and message.epoch != epoch
            ]
            link.late_down = late[-1:]
        link.up.clear()
        link.down.clear()

    def drop(self, index: int) -> None:
        """The broker drops a session whole."""
        assert self.ledger is not None
        self.budget.drops -= 1
        self.links[index].open = False
        if not self.shape.late:
            self.links[index].up.clear()
        instance = self.agents()[index].core.me.instance
        self.run(self.ledger.session_lost(instance, self.now))

    def up(self, index: int) -> None:
        message, body = self.links[index].up.pop(0)
        self._take(index, message, body)

    def late_up(self, index: int) -> None:
        message, body = self.links[index].late_up.pop(0)
        self._take(index, message, body)

    def again_up(self, index: int) -> None:
        """The broker is handed the same message twice."""
        self.budget.repeats -= 1
        message, body = self.links[index].up[0]
        self._take(index, message, body)

    def _take(self, index: int, message: m.FromAgent, body: bytes | None) -> None:
        assert self.ledger is not None
        instance = self.agents()[index].core.me.instance
        self.run(self.ledger.message(instance, message, body or b"", self.now), index)

    def down(self, index: int) -> None:
        message, body = self.links[index].down.pop(0)
        self._give(index, message, body)

    def late_down(self, index: int) -> None:
        message, body = self.links[index].late_down.pop(0)
        self._give(index, message, body)

    def again_down(self, index: int) -> None:
        """The agent is handed the same message twice."""
        self.budget.repeats -= 1
        message, body = self.links[index].down[0]
        self._give(index, message, body)

    def _give(self, index: int, message: m.FromBroker, body: bytes | None) -> None:
        app = self.agents()[index]
        app.core.receive(message, body)
        self.collect(index)

    def collect(self, index: int) -> None:
        """Carries out what a core asks."""
        for effect in self.agents()[index].core.take_effects():
            self.apply(index, effect)

    def apply(self, index: int, effect: agent.Effect) -> None:
        app, link = self.agents()[index], self.links[index]
        match effect:
            case agent.Post():
                # What goes into a dead connection comes out nowhere.
                if link.open or self.shape.late:
                    link.up.append((effect.message, effect.body))
            case agent.Reconnect():
                link.open = False
            case agent.TurnedAway():
                if not effect.retry:
                    raise Violation(f"turned away for good: {effect.text}")
                if self.asked[index] == self.changes:
                    app.turned_away = effect.code
            case agent.Farewell():
                app.alive, app.left, app.leaving = False, True, False
                link.up.clear()
                link.down.clear()
                ledger, instance = self.ledger, app.core.me.instance
                expected = ledger is not None and instance in ledger.state.expected
                if expected or instance in self.watched:
                    # A broker that did not hear the goodbye sees the lock let go.
                    self.unnoticed.add(instance)
            case _ if isinstance(app, TrainerApp):
                self._on_trainer(app, effect)
            case _:
                pass

    # ------------------------------------------------------------ what others add

    def actions(self) -> list[Action]:
        raise NotImplementedError

    def act(self, action: Action) -> None:
        raise NotImplementedError

    def _on_trainer(self, app: TrainerApp, effect: agent.Effect) -> None:
        raise NotImplementedError

    def is_done(self, app: TrainerApp) -> bool:
        raise NotImplementedError

    def _die(self, index: int) -> None:
        raise NotImplementedError

    def _next_version(self, heir: TrainerApp) -> int | None:
        raise NotImplementedError

    def _is_vacant(self, app: TrainerApp | WorkerApp) -> bool:
        raise NotImplementedError


def job_of(app: WorkerApp) -> jobs.Work | None:
    return app.core.running or (app.core.queue[0] if app.core.queue else None)


def _durations(silent_s: int) -> Durations:
    return Durations(
        open_s=20.0,
        prepare_s=10.0,
        stage_s=10.0,
        commit_s=10.0,
        drain_s=10.0,
        recovery_s=5.0,
        silent_s=float(silent_s),
    )


def _identity(name: str, pid: int, channel: int, device: str) -> agent.Identity:
    return agent.Identity(
        (name * 16)[:16], CHANNELS[channel], "host", device, [Process(pid, 1)], True, "test"
    )
