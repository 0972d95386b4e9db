"""The worker's side: tensors are attached once, versions arrive in them."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from ..protocol import messages as m
from ..protocol.errors import ConfigError, DeadlineError, TensorleaseError
from ..protocol.limits import MAX_VERSION
from .agent import CONNECT_TIMEOUT_S
from .arguments import check_name, check_number, check_place, deadline_of, identity, new_instance
from .core import Effect, Identity
from .intake import Intake
from .mappings import unmap_all
from .performer import Performer, in_a_round
from .work import Work
from .worker_core import WorkerCore
from .worker_setup import WorkerSetup
from .worker_state import Holding, ToldTorn, why_late

if TYPE_CHECKING:
    import torch

log = logging.getLogger("tensorlease.agents")


class WorkerAgent(WorkerSetup):
    """One inference worker of a channel.

        with WorkerAgent("policy", replica="a") as worker:
            worker.attach(model.named_parameters())
            worker.on_commit(lambda round: engine.reset_prefix_cache())
            worker.run()

    Hooks and copies run in the thread that calls `run`, `step` or `wait_for`, one thing at a time.
    With `astep` and `versions`, hooks run in the coroutine's thread and may be coroutine functions,
    while copies run in a thread beside it, so that the event loop goes on. A background thread
    answers the broker meanwhile, and alone says no to rounds that the application never began.

    Args:
        channel: The stream of versions.
        replica: The workers that switch together; default: this worker alone.
        member: Its place in the replica.
        size: How many members the replica has.
        endpoint: The broker's address; default `$TENSORLEASE_ENDPOINT`, else the user's runtime
            directory, else the system's.
        device: Where it is; trainers at the same are beside it. A GPU by its number here ("cuda:0")
            or its UUID; or any label ("cpu:1").
        version: The version that its weights have already (0: none).
        connect_timeout: How long a call waits for a broker, in seconds.

    Raises:
        ConfigError: An argument that cannot work.
    """

    def __init__(
        self,
        channel: str = "default",
        *,
        replica: str | None = None,
        member: int = 0,
        size: int = 1,
        endpoint: str | None = None,
        device: str | torch.device = "cpu:0",
        version: int = 0,
        connect_timeout: float = CONNECT_TIMEOUT_S,
    ) -> None:
        member, size = check_place("member", member, size, "size")
        version = check_number("version", version)
        if not 0 <= version <= MAX_VERSION:
            raise ConfigError(f"version {version}: must be 0 (none) to {MAX_VERSION}")
        if replica is None and size > 1:
            raise ConfigError(f"a replica of {size} members needs a name that they share: replica=")
        instance = new_instance()
        name = f"w-{instance[:8]}" if replica is None else check_name("replica", replica)
        me = identity(channel, instance, device)
        core = self._make_core(me, name, member, size, version)
        self._intake = self._make_intake(me.device)
        # Held by the thread (or coroutine) that does the work.
        self._serving = threading.Lock()
        self._server: int | None = None
        # What `stop` asked for was not done yet; and how often it was called.
        self._stopped = False
        self._stops = 0
        # `close` has given up waiting for the thread that works.
        self._overdue = False
        # Closed, as far as it could be.
        self._parted = False
        # Nothing that the user has given: hooks and models that refer to the worker would keep it.
        give_back = partial(unmap_all, self._intake._mapped)

        def abandoned() -> None:
            # A thread whose coroutine was cancelled may be reading.
            reading = performer()
            if reading is None:
                give_back()
            else:
                reading.part(give_back)

        super().__init__(core, endpoint, connect_timeout, abandoned)
        self._performer = Performer(core, self._connection, self._intake)
        performer = weakref.ref(self._performer)

    def _make_core(
        self, me: Identity, replica: str, member: int, size: int, version: int
    ) -> WorkerCore:
        """Returns its state machine."""
        return WorkerCore(me, replica, member, size, version=version)

    def _make_intake(self, device: str) -> Intake:
        """Returns what takes in what trainers send."""
        return Intake(device)

    # ------------------------------------------------------------ what it knows

    @property
    def replica(self) -> str:
        """The name of the workers that switch together."""
        return self._core.replica

    @property
    def member(self) -> int:
        """Its place in the replica."""
        return self._core.member

    @property
    def size(self) -> int:
        """How many members the replica has."""
        return self._core.size

    @property
    def version(self) -> int:
        """The version that its tensors have; 0 while there is none, or they are torn."""
        return self._core.current

    @property
    def torn(self) -> bool:
        """Whether the tensors are in doubt: partly overwritten, or not switched by all members."""
        return self._core.state.torn

    @property
    def goes_on(self) -> bool:
        """Whether a hook that waits should: the round has not failed, `close` not run out of time."""
        return in_a_round(self._core) and not self._overdue

    @property
    def unwanted(self) -> tuple[str, ...]:
        """Names that trainers offer or have sent in this round, and that are for nobody here."""
        return self._intake.unwanted

    @property
    def holding(self) -> bool:
        """Whether views that `on_stage` kept still look into a trainer's memory.

        Until they are dropped, the trainer must not write there, and no other round begins here.
        """
        return self._performer.holds()

    def __repr__(self) -> str:
        core = self._core
        return (
            f"<WorkerAgent {core.me.instance} channel={core.me.channel!r}"
            f" replica={core.replica!r} member={core.member}/{core.size}>"
        )

    # ------------------------------------------------------------ working

    def run(self, until: int | None = None) -> int:
        """Serves rounds until `stop` or `close` is called, or this version is committed.

        A signal's exception, KeyboardInterrupt say, passes through; so does what ends the agent.

        Returns:
            The version that the tensors have.

        Raises:
            RefusedError: The broker has put this worker out for good.
            ConfigError: Nothing is attached, or another thread runs it; so for `step` and others.
        """
        self._check_attached()
        until = None if until is None else check_number("until", until)
        with self._serve():
            while not self._ended() and (until is None or self.version < until):
                self._work_until_commit(math.inf)
        return self.version

    def step(self, timeout: float = 0.0) -> int | None:
        """Does the work that is there, or comes within `timeout` seconds.

        Returns:
            The version, as soon as one is committed; None if none was.

        Raises:
            RefusedError: The broker has put this worker out for good.
        """
        self._check_attached()
        deadline = deadline_of(timeout)
        with self._serve():
            return self._work_until_commit(deadline)

    def wait_for(self, version: int, timeout: float) -> int:
        """Works until the tensors have this version or a later one, which is returned.

        If another thread runs the worker, waits for that; at most `timeout` seconds.

        Raises:
            DeadlineError: They have not, in time; says where they are, and what they lack.
            RefusedError: The broker has put this worker out for good.
        """
        self._check_attached()
        version = check_number("version", version)
        deadline = deadline_of(timeout)
        if self._serving.locked():
            stops = self._stops
            self._connection.wait_until(
                lambda: self.version >= version or self._stops != stops,
                deadline,
                lambda _: self._late(version, deadline, timeout),
                quiet=True,
            )
            if self.version < version:
                raise self._late(version, deadline, timeout)
            return self.version
        with self._serve():
            while self.version < version:
                if time.monotonic() >= deadline or self._ended():
                    raise self._late(version, deadline, timeout)
                self._work_until_commit(deadline)
        return self.version

    def stop(self) -> None:
        """Makes `run`, and every other call that works or waits, return soon.

        Also from another thread or a signal's handler. If no such call is under way, the next one
        returns; the one after that works again.
        """
        self._check_process()
        with self._connection.mutex:
            self._stopped = True
            self._stops += 1
            self._connection.notify()

    async def astep(self, timeout: float = 0.0) -> int | None:  # noqa: ASYNC109 - as step has it
        """As `step`, for coroutines; copies run in a thread beside the event loop."""
        self._check_attached()
        deadline = deadline_of(timeout)
        with self._serve():
            while (work := await self._await_work(deadline)) is not None:
                if (version := await self._performer.aperform(work)) is not None:
                    return version
        return None

    async def versions(self) -> AsyncIterator[int]:
        """Serves rounds; yields each version that is committed, until `stop` or `close`."""
        self._check_attached()
        stops = self._stops
        while not self._ended() and self._stops == stops:
            version = await self.astep(timeout=3600.0)
            if version is not None:
                yield version

    def close(self, timeout: float = 10.0) -> None:
        """Ends the agent: finishes the round at hand, says goodbye, unmaps.

        What has not ended within `timeout` seconds is left, before its vote by abort; the goodbye
        may take two seconds more, if the broker is slow to answer. A copy is never cut off: if
        another thread is still at one, that thread says goodbye when it is done. The tensors keep
        their bytes. May be called from any thread, a second call waits for the first; does nothing
        in a forked child.

        Raises:
            ConfigError: It was called from a hook of this worker.
        """
        deadline = deadline_of(timeout)
        if self._server == threading.get_ident() and os.getpid() == self._pid:
            raise ConfigError("close() was called from a hook of this worker: call stop() there")
        with self._closing_once(deadline) as closing:
            if not closing:
                return
            with self._connection.mutex:
                self._connection.notify()
            try:
                self._drain_by(deadline)
            finally:
                self._part(deadline)

    # ------------------------------------------------------------ inside

    def _check_attached(self) -> None:
        self._check_here()
        if self._intake.attached is None and self._intake.sink is None:
            raise ConfigError(f"{self!r} has no tensors yet: call attach() or on_stage() first")

    def _late(self, version: int, deadline: float, timeout: float) -> DeadlineError:
        stopped = time.monotonic() < deadline
        when = "when it was stopped" if stopped else f"after {timeout:g} s"
        state = "torn" if self.torn else f"at version {self.version}"
        return DeadlineError(
            f"not at version {version} {when}: this worker is {state}"
            f"{why_late(self._core.state, self.channel)}"
        )

    def _ended(self) -> bool:
        return self._closing or self._stopped

    @contextmanager
    def _serve(self) -> Iterator[None]:
        """Makes the caller the one who works."""
        if not self._serving.acquire(blocking=False):
            raise ConfigError(
                f"{self!r} is run by another thread or coroutine already: wait for what it does there,"
                " or end that by stop()"
            )
        try:
            self._server = threading.get_ident()
            yield
        finally:
            try:
                if self._overdue:
                    self._drain(time.monotonic())
            finally:
                self._server = None
                self._stopped = False
                self._serving.release()

    def _work_until_commit(self, deadline: float) -> int | None:
        while (work := self._next_work(deadline)) is not None:
            if (version := self._performer.perform(work)) is not None:
                return version
        return None

    def _next_work(self, deadline: float) -> Work | None:
        """Waits for the next piece of work; None when there is none in time."""
        found: list[Work] = []
        with self._connection.mutex:
            try:
                self._connection.wait_until(
                    lambda: self._find_work(found), deadline, _NoWork, quiet=True
                )
            except _NoWork:
                return None
        return found[0] if found else None

    async def _await_work(self, deadline: float) -> Work | None:
        found: list[Work] = []
        try:
            await self._connection.await_until(
                lambda: self._find_work(found), deadline, _NoWork, quiet=True
            )
        except _NoWork:
            return None
        return found[0] if found else None

    def _find_work(self, found: list[Work]) -> bool:
        self._look_at_views()
        if self._ended():
            return True
        work = self._performer.left_over() or self._core.next_work()
        if work is not None:
            found.append(work)
        return work is not None

    def _drain(self, deadline: float) -> None:
        """Finishes the round at hand if there is time; else leaves it, and runs its abort hooks."""
        core, connection = self._core, self._connection
        found: list[Work] = []

        def next_or_idle() -> bool:
            self._look_at_views()
            work = self._performer.left_over() or core.next_work()
            if work is not None:
                found.append(work)
            waits = core.state.round is not None and not self._performer.still_read
            return work is not None or (core.running is None and not waits)

        try:
            while True:
                if time.monotonic() >= deadline:
                    with connection.acting():
                        core.withdraw("the worker closes")
                connection.wait_until(next_or_idle, deadline, _NoWork, quiet=True)
                if not found:
                    return
                self._performer.perform(found.pop())
        except TensorleaseError:
            pass  # Out of time, or the connection is broken.
        with connection.acting():
            core.withdraw("the worker closes")
        while (work := core.next_work()) is not None:
            self._performer.perform(work)

    def _drain_by(self, deadline: float) -> None:
        """Drains here, or leaves it to the thread that works, if that has not returned in time."""
        while not self._serving.acquire(timeout=max(0.0, deadline - time.monotonic())):
            if self._overdue:
                if self._core.running is not None:
                    log.warning(
                        "%r: closed while another thread was in a hook or a copy of it", self
                    )
                return
            # That thread looks at it before it lets go: either it drains, or the lock is free now.
            self._overdue = True
        try:
            self._drain(deadline)
        finally:
            self._serving.release()

    def _part(self, deadline: float) -> None:
        """Unmaps and says goodbye, when nothing is read any more.

        While views are kept a goodbye would be a lie: then it goes on holding, and says it later.
        """

        def part() -> None:
            try:
                self._intake.unmap_all()
            finally:
                with self._connection.mutex:
                    self._parted = True
                    held = self._performer.must_hold()
                if held:
                    log.error("%r is closed while %s", self, self._performer.why_held)
                    self._finalizer.detach()
                    _holding.add(self)
                else:
                    self._goodbye(deadline)

        self._performer.part(part)

    def _look_at_views(self) -> None:
        """Sees whether views that were kept are gone by now; under the connection's lock."""
        if self._performer.let_go():
            self._intake.unmap_lingering()
            _holding.discard(self)
            if self._parted:
                self._connection.abandon()

    def _close_at_exit(self, deadline: float) -> None:
        # No hook and no copy any more: what they would touch is being torn down.
        with self._closing_once(deadline) as closing:
            if closing:
                with self._connection.acting():
                    self._core.withdraw("the worker's process ends")
                self._part(min(deadline, time.monotonic() + 1.0))

    # ------------------------------------------------------------ from the connection, under its lock

    def on_message(self, message: m.FromBroker, body: bytes | None) -> None:
        """See `connection.Owner`: keeps the bodies of offers, which the core does not."""
        if isinstance(message, m.Offered) and message.to == self.instance:
            self._intake.offered(message, body)

    def on_effect(self, effect: Effect) -> None:
        """See `connection.Owner`."""
        match effect:
            case ToldTorn(version, text):
                log.warning("%r: version %d is torn: %s", self, version, text)
            case Holding():
                _holding.add(self)
            case _:
                pass

    def on_beat(self) -> None:
        """See `connection.Owner`: the application may have dropped views outside of any call."""
        self._look_at_views()
        self._performer.tell_kept_out()


# Workers whose callbacks have kept views: not to be collected, since that would say goodbye.
_holding: set[WorkerAgent] = set()


class _NoWork(TensorleaseError):
    """Nothing came in time; never leaves this module."""
