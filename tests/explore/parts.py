"""What a small world is made of: its shape, what may go wrong, links, and the applications."""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorlease.agents.trainer_core import TrainerCore
from tensorlease.agents.worker_core import WorkerCore
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, RoundResult

GARBAGE = -1
"""What a trainer writes as soon as it may."""
STALE = -2
"""What a worker reads that has other memory mapped, or reads none at all."""
MIXED = -3
"""What a worker has read of memory that was written meanwhile."""

Action = tuple[str, int]
"""What happens, and to whom (an index; 0 where it concerns nobody in particular)."""


class Violation(AssertionError):
    """A promise is broken."""


@dataclass(frozen=True)
class Shape:
    """Which world to build, and how much may go wrong in it."""

    name: str
    # In each channel.
    trainers: int = 1
    workers: int = 2
    batches: int = 1
    # Channels with agents of their own; worker i of each runs in the same process.
    channels: int = 1
    # Workers of one replica (True), or each a replica of its own.
    together: bool = False
    registered: bool = True
    # Trainer i and every worker whose number is i modulo the trainers share a device.
    colocated: bool = False
    min_replicas: int = 1
    strict: bool = False
    # Rounds to publish one after another; a failed one is tried again, so many times.
    rounds: int = 1
    retries: int = 0
    # Budgets of faults.
    broker_deaths: int = 0
    worker_deaths: int = 0
    trainer_deaths: int = 0
    expulsions: int = 0
    drops: int = 0
    voids: int = 0
    hook_failures: int = 0
    # Rounds are verified, and so many reads are of other bytes than were published.
    misreads: int = 0
    repeats: int = 0
    stops: int = 0
    leaves: int = 0
    # Workers are relays: what reads for one that dies goes on, and can be named ("named"), or not.
    relays: str = ""
    # New instances that take the place of a dead (or stopped) one.
    trainer_heirs: int = 0
    worker_heirs: int = 0
    # Who the worker deaths may hit: an index, or anyone.
    victim: int | None = None
    # Messages of ended sessions may arrive late (one each way for each agent).
    late: bool = False
    # After how many seconds an agent that says nothing counts as silent; far off by default.
    silent_s: int = 80_000
    kill_stuck: bool = False


@dataclass
class Budget:
    """How many faults of each kind may still happen."""

    broker_deaths: int
    worker_deaths: int
    trainer_deaths: int
    expulsions: int
    drops: int
    voids: int
    hook_failures: int
    misreads: int
    repeats: int
    stops: int
    leaves: int

    @classmethod
    def of(cls, shape: Shape) -> Budget:
        return cls(**{name: getattr(shape, name) for name in cls.__dataclass_fields__})


@dataclass
class Link:
    """The connection of one agent: what is under way in both directions."""

    up: list[tuple[m.FromAgent, bytes | None]] = field(default_factory=list)
    down: list[tuple[m.FromBroker, bytes | None]] = field(default_factory=list)
    # The broker still has this connection; it is a new one after each Hello.
    open: bool = False
    late_up: list[tuple[m.FromAgent, bytes | None]] = field(default_factory=list)
    late_down: list[tuple[m.FromBroker, bytes | None]] = field(default_factory=list)


@dataclass
class App:
    """What both kinds of application have in common."""

    alive: bool = True
    # Its process is stopped: it neither sends nor takes, and is not gone.
    stopped: bool = False
    # It was refused; it tries again when something has changed.
    turned_away: Code | None = None
    # It is about to leave, has said goodbye, and has got the answer (and is no longer alive).
    leaving: bool = False
    said_bye: bool = False
    left: bool = False

    @property
    def acts(self) -> bool:
        return self.alive and not self.stopped


@dataclass
class TrainerApp(App):
    """A training loop: publish, wait, write as soon as it may, publish again."""

    core: TrainerCore = field(kw_only=True)
    # It took the place of another, and learns from its peers what is to be published next.
    heir: bool = False
    version: int = 0
    tries: int = 0
    call: int | None = None
    # buffer -> its bytes, as one number: the version that they belong to.
    memory: dict[int, int] = field(default_factory=dict)
    results: dict[int, RoundResult] = field(default_factory=dict)
    done: bool = False
    voided: bool = False
    # Calls for which it has the licence to write early: what is read of them never counts.
    licensed: set[int] = field(default_factory=set)
    retired: set[int] = field(default_factory=set)


@dataclass
class WorkerApp(App):
    """An inference worker: what it copied of the round at hand, and what it serves."""

    core: WorkerCore = field(kw_only=True)
    # (rank, seq) -> the version whose bytes were read; None: bytes changed while it read.
    staged: dict[tuple[int, int], int | None] = field(default_factory=dict)
    reading: int | None = None
    # What is read for it still, though it has died: the batch (trainer, call, seq) and its buffers.
    orphaned: tuple[str, int, int, tuple[int, ...]] | None = None
    # Who read for it has ended too; and the broker waits for that.
    readers_ended: bool = False
    readers_watched: bool = False
    # Rounds whose commit hook succeeded.
    committed: dict[tuple[str, int], int] = field(default_factory=dict)
    hooks: list[str] = field(default_factory=list)
