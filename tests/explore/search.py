"""Exhaustive search: every state that a small world can reach, once.

A world is frozen to a tuple of bytes, one for each of its parts, so that only what an action
changed is written and read again, and so that equal worlds are found again.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import msgspec

from tensorlease.agents import work as jobs
from tensorlease.agents.core import Session
from tensorlease.agents.trainer_core import TrainerState
from tensorlease.agents.worker_core import WorkerCore
from tensorlease.agents.worker_state import WorkerState
from tensorlease.broker.ledger import Ledger
from tensorlease.broker.ledger.state import State
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import RoundResult

from .parts import Action, Budget, Link, Shape, TrainerApp
from .world import World

Frozen = list[bytes]

_encode = msgspec.msgpack.Encoder().encode
_decode_state = msgspec.msgpack.Decoder(State).decode
Up = list[tuple[m.FromAgent, bytes | None]]
Down = list[tuple[m.FromBroker, bytes | None]]
_decode_link = msgspec.msgpack.Decoder(tuple[Up, Down, bool, Up, Down]).decode
Queue = list[tuple[str, msgspec.Raw]]
Told = dict[int, RoundResult]
_decode_pair = msgspec.msgpack.Decoder(tuple[bytes, bytes]).decode
_decode_trainer = msgspec.msgpack.Decoder(tuple[Session, TrainerState, Queue, bool, Told]).decode
_decode_worker = msgspec.msgpack.Decoder(tuple[Session, WorkerState, Queue, bool, Told]).decode
_WORK: dict[str, msgspec.msgpack.Decoder[jobs.Work]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in jobs.Work.__subclasses__()
}


class Freezer:
    """Freezes one world and lets it become any frozen one."""

    def __init__(self, world: World) -> None:
        self.world = world
        # Equal parts are one object, so that they are compared and hashed fast.
        self._same: dict[bytes, bytes] = {}
        # What the world is, as long as nobody acts in it.
        self._now: Frozen = []
        self._now = self.freeze()

    def freeze(self) -> Frozen:
        """Returns the world as it is; parts that nothing touched are taken over."""
        world, old = self.world, self._now
        dirty, world.dirty = world.dirty, set()
        count = len(world.links)
        if not old:
            dirty = set(range(count))
        parts = [
            b"" if world.ledger is None else self._one(_encode(world.ledger.state)),
            self._one(self._misc()),
        ]
        for index in range(count):
            if index in dirty:
                parts.append(self._one(self._app(index)))
                parts.append(self._one(_freeze_link(world.links[index])))
            else:
                parts += old[2 + 2 * index : 4 + 2 * index]
        self._now = parts
        return parts

    def _one(self, part: bytes) -> bytes:
        return self._same.setdefault(part, part)

    def _misc(self) -> bytes:
        world = self.world
        alive = [app.alive for app in world.agents()]
        fresh = [i for i, at in sorted(world.asked.items()) if at == world.changes]
        known = (world.inherited, world.watched, world.inside)
        heirs = (fresh, *map(sorted, known)) if world.shape.worker_heirs else None
        misc = (world.now, world.runs, world.budget, world.unnoticed, world.lock, heirs, alive)
        return pickle.dumps(misc, 5)

    def _thaw_misc(self, part: bytes) -> None:
        world = self.world
        misc = pickle.loads(part)
        world.now, world.runs, world.budget, world.unnoticed, world.lock, heirs, _ = misc
        if heirs is not None:
            fresh, *known = heirs
            world.asked = {i: world.changes - (i not in fresh) for i in range(len(world.links))}
            world.inherited, world.watched, world.inside = map(set, known)

    def _app(self, index: int) -> bytes:
        app = self.world.agents()[index]
        core = app.core
        told: dict[int, RoundResult] = {}
        queue: list[tuple[str, jobs.Work]] = []
        if isinstance(core, WorkerCore):
            queue = [(type(work).__name__, work) for work in (core.running, *core.queue) if work]
        if isinstance(app, TrainerApp):
            told = app.results
        rest = {name: value for name, value in vars(app).items() if name not in ("core", "results")}
        is_running = isinstance(core, WorkerCore) and core.running is not None
        fast = _encode((core.session, core.state, queue, is_running, told))
        return _encode((fast, pickle.dumps(rest, 5)))

    def thaw(self, frozen: Frozen) -> None:
        """Makes the world what it was; it must not have changed since it was frozen or thawed."""
        world, now = self.world, self._now
        if frozen[0] is not now[0]:
            if not frozen[0]:
                world.ledger = None
            else:
                state = _decode_state(frozen[0])
                if world.ledger is None:
                    world.ledger = Ledger(state.epoch, state.settings, now=0.0)
                world.ledger.book.state = state
        if frozen[1] is not now[1]:
            self._thaw_misc(frozen[1])
        for index in range(len(world.links)):
            if frozen[2 + 2 * index] is not now[2 + 2 * index]:
                self._thaw_app(index, frozen[2 + 2 * index])
            if frozen[3 + 2 * index] is not now[3 + 2 * index]:
                world.links[index] = _thaw_link(frozen[3 + 2 * index])
        self._now = frozen

    def _thaw_app(self, index: int, part: bytes) -> None:
        app = self.world.agents()[index]
        fast, rest = _decode_pair(part)
        app.core.effects.clear()
        vars(app).update(pickle.loads(rest))
        if isinstance(app, TrainerApp):
            app.core.session, app.core.state, _, _, app.results = _decode_trainer(fast)
        else:
            core = app.core
            core.session, core.state, queue, is_running, _ = _decode_worker(fast)
            core.queue = [_WORK[name].decode(raw) for name, raw in queue]
            core.running = core.queue.pop(0) if is_running else None


def _freeze_link(link: Link) -> bytes:
    return _encode((link.up, link.down, link.open, link.late_up, link.late_down))


def _thaw_link(part: bytes) -> Link:
    up, down, is_open, late_up, late_down = _decode_link(part)
    return Link(up, down, is_open, late_up, late_down)


_UNTOLD = frozenset(
    {
        "notes",
        "history",
        "heard",
        "finished_at",
        "at",
        "released_at",
        "ready_at",
        "voted_at",
        "committed_at",
        "out_at",
        "arrival",
        "arrivals",
        "beat",
        "prepare_us",
        "copy_us",
        "commit_us",
        "opening_us",
        "staging_us",
        "committing_us",
        "settings",
        "durations",
        "software",
        "nbytes",
        "next_check",
        "text",
        "reason",
        "missing",
    }
)
"""Fields that change nothing of what can happen: measurements, stories, texts."""
_UNORDERED = frozenset({"listed", "receivers", "replicas", "holders", "unserved", "members"})
"""Lists whose order means nothing."""

Names = dict[object, object]


def canonical(thing: object, names: Names) -> object:
    """Returns something hashable that is equal for equal states, whatever the order of a dict.

    `names`: what to call agents, replicas, processes and members instead.
    """
    if isinstance(thing, str):
        return names.get(thing, thing)
    if isinstance(thing, msgspec.Struct):
        return (
            type(thing).__name__,
            *(_field(f, getattr(thing, f), names) for f in thing.__struct_fields__),
        )
    if isinstance(thing, dict):
        return frozenset((canonical(k, names), canonical(v, names)) for k, v in thing.items())
    if isinstance(thing, set | frozenset):
        return frozenset(canonical(x, names) for x in thing)
    if isinstance(thing, list | tuple):
        return tuple(canonical(x, names) for x in thing)
    if isinstance(thing, Link | Budget):
        return tuple(canonical(x, names) for x in vars(thing).values())
    return thing


def _field(name: str, value: object, names: Names) -> object:
    if name in _UNTOLD:
        return None
    if name in ("pid", "member"):
        return names.get((name, value), value)
    if name == "members" and isinstance(value, dict):
        return frozenset((names.get(("member", k), k), names.get(v, v)) for k, v in value.items())
    if name == "members" and isinstance(value, list):
        return frozenset(names.get(("member", x), x) for x in value)
    if name in _UNORDERED and isinstance(value, list):
        return frozenset(canonical(x, names) for x in value)
    return canonical(value, names)


def _renamings(world: World) -> list[tuple[list[int], Names]]:
    """Returns how workers can trade places without changing what can happen.

    Nothing that the ledger or a core decides depends on which worker of a channel it is, only on
    what became of it: two states that differ in nothing but that are one. Each entry: who stands
    where, and the names that go with it.
    """
    shape, places = world.shape, range(len(world.workers))
    if shape.victim is not None or shape.channels > 1 or shape.worker_heirs or shape.colocated:
        return [(list(places), {})]
    found: list[tuple[list[int], Names]] = []
    for order in permutations(places):
        names: Names = {}
        for old, new in enumerate(order):
            was, now = world.workers[old].core, world.workers[new].core
            names[was.me.instance] = now.me.instance
            names["pid", was.me.processes[0].pid] = now.me.processes[0].pid
            names[was.replica] = now.replica
            if shape.together:
                names["member", was.member] = now.member
        found.append((list(order), names))
    return found


class Fingerprints:
    """Hashes of frozen worlds, each part worked out once; symmetric worlds have the same."""

    def __init__(self, world: World) -> None:
        self._renamings = _renamings(world)
        self._first = 2 + 2 * world.first_worker
        self._parts: dict[bytes, list[int]] = {}

    def of(self, frozen: Frozen) -> int:
        parts = [self._part(i, part) for i, part in enumerate(frozen)]
        first = self._first
        found: list[int] = []
        for which, (order, _) in enumerate(self._renamings):
            mine = [part[which] for part in parts]
            placed = mine[:first] + [0] * (len(mine) - first)
            for old, new in enumerate(order):
                placed[first + 2 * new] = mine[first + 2 * old]
                placed[first + 2 * new + 1] = mine[first + 2 * old + 1]
            found.append(hash(tuple(placed)))
        return min(found)

    def _part(self, index: int, part: bytes) -> list[int]:
        known = self._parts.get(part)
        if known is None:
            thing = self._thing(index, part)
            known = [hash(canonical(thing, names)) for _, names in self._renamings]
            self._parts[part] = known
        return known

    def _thing(self, index: int, part: bytes) -> object:
        if index == 0:
            return _decode_state(part) if part else None
        if index == 1:
            return pickle.loads(part)[:-1]  # Who is alive, the agents' own parts tell.
        if index % 2:
            return _thaw_link(part)
        fast, rest = _decode_pair(part)
        app = pickle.loads(rest)
        if index < self._first:
            return *_decode_trainer(fast), app
        session, state, queue, is_running, _ = _decode_worker(fast)
        work = [_WORK[name].decode(raw) for name, raw in queue]
        return session, state, work, is_running, app


_LEDGERS = ("up", "connect", "drop", "notice", "notice readers")
"""What the ledger takes in."""


class Steps:
    """What an action makes of a world; worked out once for equal parts that it reads.

    An action reads little: most of what an agent does concerns it alone, and the ledger sees its
    own state and the message. Whom it touches follows from what it reads; what becomes of those
    follows from that and from what they were.
    """

    def __init__(self, freezer: Freezer) -> None:
        self._freezer = freezer
        self._world = freezer.world
        shape = self._world.shape
        rare = shape.stops + shape.leaves + shape.trainer_heirs + shape.worker_heirs
        self._simple = shape.channels == 1 and not rare
        self._touched: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._after: dict[tuple[object, ...], tuple[bytes, ...]] = {}

    def take(self, frozen: Frozen, action: Action) -> Frozen:
        """Returns the world after this action. Raises what it raises."""
        reads = self._reads(frozen, action)
        if reads is None:
            return self._act(frozen, action)[0]
        touched = self._touched.get(reads)
        if touched is not None:
            key = reads + self._parts(frozen, touched)
            after = self._after.get(key)
            if after is not None:
                return self._put(frozen, touched, after)
        new, dirty = self._act(frozen, action)
        touched = self._touched.setdefault(reads, dirty)
        assert touched == dirty, f"{action} touches {dirty}, not {touched}"
        key = reads + self._parts(frozen, touched)
        ledger = new[0] if action[0] in _LEDGERS else b""
        self._after[key] = (ledger, new[1], *self._parts(new, touched))
        return new

    def _act(self, frozen: Frozen, action: Action) -> tuple[Frozen, tuple[int, ...]]:
        self._freezer.thaw(frozen)
        self._world.act(action)
        dirty = tuple(sorted(self._world.dirty))
        return self._freezer.freeze(), dirty

    def _parts(self, frozen: Frozen, touched: tuple[int, ...]) -> tuple[bytes, ...]:
        return tuple(part for i in touched for part in frozen[2 + 2 * i : 4 + 2 * i])

    def _put(self, frozen: Frozen, touched: tuple[int, ...], after: tuple[bytes, ...]) -> Frozen:
        new = list(frozen)
        # b"": it does not touch the ledger.
        new[0:2] = after[0] or frozen[0], after[1]
        for place, index in enumerate(touched):
            new[2 + 2 * index : 4 + 2 * index] = after[2 + 2 * place : 4 + 2 * place]
        return new

    def _reads(self, frozen: Frozen, action: Action) -> tuple[object, ...] | None:
        """Returns all parts that decide what the action does, but for those that it touches."""
        name, first = action[0], self._world.first_worker
        whose = self._world.whose(action)
        if whose is None or not self._simple or name.startswith(("late", "again")):
            return None
        if name in _LEDGERS:
            return (action, frozen[0], frozen[1], *frozen[2 + 2 * whose : 4 + 2 * whose])
        if whose < first:
            # Who may write asks who reads; what a trainer hears is compared with what happened.
            return (action, frozen[0] == b"", *frozen[1:])
        # A copy reads the trainers' memory.
        return (action, frozen[0] == b"", frozen[1], *frozen[2 : 2 + 2 * first : 2])


@dataclass
class Tally:
    """How far a search has come."""

    states: int = 1
    transitions: int = 0
    depth: int = 0
    # Everywhere was looked; False: a limit was reached before.
    exhausted: bool = False


def explore(shape: Shape, limit: int = 100_000_000) -> Iterator[tuple[int, int, World]]:
    """Visits every reachable state once; yields (states, depth, world) now and then."""
    for tally, world in search(shape, limit):
        yield tally.states, tally.depth, world


def search(shape: Shape, limit: int = 100_000_000) -> Iterator[tuple[Tally, World]]:
    """Visits every reachable state once, depth first; yields now and then, and at the end.

    Raises what an action raises, with the way there in its notes.
    """
    world = World(shape)
    world.validates = False
    freezer, prints, tally = Freezer(world), Fingerprints(world), Tally()
    steps = Steps(freezer)
    start = freezer.freeze()
    known, valid = {prints.of(start)}, {start[0]}
    stack: list[tuple[Frozen, list[Action], Action | None]] = [(start, world.actions(), None)]
    while stack and tally.states < limit:
        frozen, todo, _ = stack[-1]
        if not todo:
            stack.pop()
            continue
        action = todo.pop()
        try:
            after = steps.take(frozen, action)
            tally.transitions += 1
            print_ = prints.of(after)
            if print_ in known:
                continue
            freezer.thaw(after)
            if after[0] not in valid:
                valid.add(after[0])
                if world.ledger is not None:
                    world.ledger.validate()
            found = world.reduced(world.actions())
            if not found:
                world.check_rest()
        except Exception as error:
            way = [step for _, _, step in stack[1:] if step is not None] + [action]
            error.add_note("way: " + ", ".join(f"{name} {index}" for name, index in way))
            error.add_note(f"shape: {shape}")
            raise
        known.add(print_)
        stack.append((after, found, action))
        tally.states += 1
        tally.depth = max(tally.depth, len(stack))
        if tally.states % 1000 == 0:
            yield tally, world
    tally.exhausted = not stack
    yield tally, world
