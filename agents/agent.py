"""What trainers and workers have in common: who they are, and how they end."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from ..protocol import messages as m
from ..protocol.endpoint import candidates
from ..protocol.errors import ClosedError, ConfigError, TensorleaseError
from .arguments import check_timeout
from .connection import Connection
from .core import Effect
from .poll_loop import current_loop
from .trainer_core import TrainerCore
from .worker_core import WorkerCore

log = logging.getLogger("tensorlease.agents")

CONNECT_TIMEOUT_S = 10.0
GOODBYE_S = 2.0
"""The least time that a goodbye to a broker that is there gets, also where a limit has passed."""
EXIT_LIMIT_S = 4.0
"""How long the end of the interpreter waits for rounds under way and for goodbyes."""


C = TypeVar("C", bound=TrainerCore | WorkerCore)


class Agent(Generic[C]):
    """Base of both agents. All methods may be called from any thread.

    Args:
        core: Its state machine, touched only under the connection's lock.
        endpoint: The broker's address; None: where agents look by default.
        connect_timeout: How long a call waits for a broker, in seconds.
        abandoned: Gives back what it holds when nobody has closed it; must not refer to it.

    Raises:
        ConfigError: An address that cannot work.
    """

    def __init__(
        self,
        core: C,
        endpoint: str | None,
        connect_timeout: float,
        abandoned: Callable[[], None] = lambda: None,
    ) -> None:
        self._core: C = core
        self._pid = os.getpid()
        self._closing = False
        # Guards `_closing`; reentrant, since a signal's handler may close too.
        self._close_guard = threading.RLock()
        # The thread that closes, and that it has done.
        self._closer: int | None = None
        self._closed = threading.Event()
        # Says what cannot work now, not at the first call.
        if not isinstance(endpoint, str | None):
            raise ConfigError(f"endpoint {endpoint!r}: must be text, ipc:///path say")
        candidates(os.environ, os.geteuid(), endpoint or "")
        self._given_endpoint = endpoint or ""
        self._connect_timeout = check_timeout("connect_timeout", connect_timeout)
        owner = weakref.ref(self)
        self._connection = Connection(core, endpoint or "", owner, abandoned)
        self._finalizer = weakref.finalize(
            self, _never_closed, self._connection, self._pid, repr(self)
        )
        self._finalizer.atexit = False
        _close_at_exit(self)

    @property
    def channel(self) -> str:
        """The stream of versions that it belongs to."""
        return self._core.me.channel

    @property
    def instance(self) -> str:
        """The random id of this run of the agent."""
        return self._core.me.instance

    @property
    def device(self) -> str:
        """The label of its device; agents with equal labels are beside each other."""
        return self._core.me.device

    @property
    def endpoint(self) -> str:
        """The broker's address; before the first connection what it was given, which may be empty."""
        found = self._connection.endpoint
        return self._given_endpoint if found is None else str(found)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    @property
    def connected(self) -> bool:
        """Whether a broker has welcomed it, and still hears it."""
        return self._core.connected

    def close(self, timeout: float = 10.0) -> None:
        """Ends the agent; see the subclasses."""
        raise NotImplementedError

    def _close_at_exit(self, deadline: float) -> None:
        """As `close`, when the interpreter ends."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_process(self) -> None:
        """Raises `ClosedError` in a forked child, where the agent's thread and locks are not."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self!r} was created in another process ({self._pid}), from which this one was"
                " forked; make an agent of its own here"
            )

    def _check_here(self) -> None:
        """Raises `ClosedError` for an agent that is closed or belongs to another process."""
        self._check_process()
        if self._closing:
            raise ClosedError(f"{self!r} is closed: make a new one to go on")

    @contextmanager
    def _closing_once(self, deadline: float) -> Iterator[bool]:
        """Whether the block shall close the agent: nobody else has begun to, and it lives here.

        If another thread is closing it, waits for that, until `deadline`.
        """
        if os.getpid() != self._pid:
            yield False
            return
        with self._close_guard:
            first, self._closing = not self._closing, True
            if first:
                self._closer = threading.get_ident()
        if not first:
            if self._closer != threading.get_ident():
                self._closed.wait(max(0.0, deadline - time.monotonic()))
            yield False
            return
        try:
            yield True
        finally:
            self._closed.set()

    def _connect(self, deadline: float) -> None:
        """Waits until the broker has welcomed the agent.

        Raises:
            NoBrokerError: There is none; says where it was looked for.
            RefusedError: It refuses this agent, and says why.
        """
        self._connection.start()
        limit = min(deadline, time.monotonic() + self._connect_timeout)
        connection = self._connection
        # Quiet: what keeps a session from coming is said when it is seen.
        connection.wait_until(connection.is_open, limit, connection.unreachable, quiet=True)

    async def _aconnect(self, deadline: float) -> None:
        """As `_connect`, for coroutines."""
        connection = self._connection
        connection.start()
        limit = min(deadline, time.monotonic() + self._connect_timeout)
        await connection.await_until(connection.is_open, limit, connection.unreachable, quiet=True)

    def _goodbye(self, deadline: float) -> None:
        self._finalizer.detach()
        _open_agents.discard(self)
        # Where no broker is, it is tried in the background, and the process's end says it too.
        least_s = GOODBYE_S if self.connected else 0.0
        self._connection.leave(max(least_s, deadline - time.monotonic()))

    # What the connection calls, under its lock.

    def on_message(self, message: m.FromBroker, body: bytes | None) -> None:
        """See `connection.Owner`."""

    def on_effect(self, effect: Effect) -> None:
        """See `connection.Owner`."""

    def on_beat(self) -> None:
        """See `connection.Owner`."""

    def on_broken(self, error: TensorleaseError) -> None:
        """See `connection.Owner`."""


def _never_closed(connection: Connection, pid: int, name: str) -> None:
    """Runs when an agent was collected that nobody had closed."""
    if os.getpid() != pid:
        return
    connection.abandon()
    # Last: a filter may make an error of it, which goes nowhere from here.
    warnings.warn(
        f"{name} was never closed: call close(), or use it in a `with` statement",
        ResourceWarning,
        stacklevel=2,
    )


_open_agents: weakref.WeakSet[Agent[Any]] = weakref.WeakSet()
_exit_hooked_for: int | None = None


def _close_at_exit(agent: Agent[Any]) -> None:
    """Has an agent closed when the interpreter ends.

    Hooks run in reverse order of their registration, and the first `weakref.finalize` registers
    one that would unlink segments: it exists by now, so it runs after ours.
    """
    global _exit_hooked_for
    _open_agents.add(agent)
    if _exit_hooked_for is None:
        atexit.register(_exit)
    _exit_hooked_for = os.getpid()


def _exit() -> None:
    """Says goodbye for all agents that are open, and ends the poll loop, in bounded time."""
    if os.getpid() != _exit_hooked_for:
        return
    deadline = time.monotonic() + EXIT_LIMIT_S
    # Workers first: nobody serves them any more, and trainers of this process wait for them.
    agents = sorted(_open_agents, key=lambda agent: isinstance(agent._core, TrainerCore))
    for agent in agents:
        if agent._pid == os.getpid():
            try:
                agent._close_at_exit(deadline)
            except Exception as error:  # noqa: BLE001 - each agent gets its turn
                log.warning("%r: %s", agent, error)
    loop = current_loop()
    if loop is not None and not sys.is_finalizing():
        loop.end()
        loop.join(2.0)


def _forked() -> None:
    """A forked child has no open agents; those of its parent are the parent's."""
    global _open_agents
    _open_agents = weakref.WeakSet()


os.register_at_fork(after_in_child=_forked)
