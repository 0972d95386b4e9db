"""A worker's core at each point of a round, and what a broker says to it there."""

from __future__ import annotations

from tensorlease.agents.work import (
    CommitWork,
    CopyWork,
    PrepareWork,
    Work,
)
from tensorlease.agents.worker_core import WorkerCore
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import (
    Code,
    Phase,
    Terms,
)

from .cores import (
    EPOCH,
    GROUP,
    IDENTITY,
    ME,
    RECEIVERS,
    TRAINER,
    effects,
    welcome,
)

KEY = (GROUP, 1)
TERMS = Terms(5)


def make(*, version: int = 0, in_place: bool = True) -> WorkerCore:
    """Returns a core that has joined."""
    core = WorkerCore(IDENTITY, "a", 0, 1, version=version, in_place=in_place)
    core.hello()
    welcome(core)
    effects(core)
    return core


def prepare(core: WorkerCore, call: int = 1, *, version: int = 5) -> None:
    core.receive(m.Prepare(EPOCH, ME, GROUP, call, Terms(version), RECEIVERS))


def message(
    seq: int = 0, *, call: int = 1, total: int | None = None, registered: bool = False
) -> m.Deliver:
    return m.Deliver(EPOCH, ME, GROUP, call, 0, seq, TRAINER, [seq], registered, 8, total)


def deliver(
    core: WorkerCore,
    seq: int = 0,
    *,
    call: int = 1,
    total: int | None = None,
    registered: bool = False,
) -> None:
    core.receive(message(seq, call=call, total=total, registered=registered), b"table")


def total(core: WorkerCore, count: int) -> None:
    core.receive(m.Total(EPOCH, ME, GROUP, 1, count))


def commit(core: WorkerCore) -> None:
    core.receive(m.Commit(EPOCH, ME, GROUP, 1))


def abort(core: WorkerCore, call: int = 1) -> None:
    core.receive(m.Abort(EPOCH, ME, GROUP, call, Code.VOID, "void"))


def take(core: WorkerCore, kind: type[Work]) -> Work:
    """Begins the next work, which must be of this kind."""
    work = core.next_work()
    assert isinstance(work, kind), work
    return work


def staging(*, in_place: bool = True, version: int = 0) -> WorkerCore:
    """Returns a core that has prepared for round 1."""
    core = make(in_place=in_place, version=version)
    prepare(core)
    take(core, PrepareWork)
    core.prepared(True)
    effects(core)
    return core


def voted(*, in_place: bool = True, version: int = 0) -> WorkerCore:
    """Returns a core that has staged the one batch of round 1."""
    core = staging(in_place=in_place, version=version)
    deliver(core, total=1)
    take(core, CopyWork)
    core.copied(True, covered=True)
    effects(core)
    return core


def committed(*, ok: bool = True, version: int = 0) -> WorkerCore:
    """Returns a core whose commit hook has run."""
    core = voted(version=version)
    commit(core)
    take(core, CommitWork)
    core.committed(ok, "" if ok else "kernel not found")
    effects(core)
    return core


def phase_of(core: WorkerCore) -> Phase:
    return core.phase


def drained(*, torn: bool, call: int = 1) -> m.Drained:
    return m.Drained(1, GROUP, call, torn)
