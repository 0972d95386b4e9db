"""Agents that have no connection yet after a restart: are they still alive? And readers of relays.

Those whose live lock is held must announce themselves; those whose lock is free, or who are
named in other agents' announcements, may be dead already. None has a connection that the kernel could vouch for, so they are looked at
now and then: by their lock, and by the processes named for them.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from ..protocol.procfs import start_time_ticks
from ..protocol.records import Process
from .locks import LiveLocks, LockState

POLL_S = 0.25
SETTLE_S = 1.0
"""A lock falls before the kernel has torn down the GPU contexts of its process.

So whose lock is free when the broker starts is told gone within `SETTLE_S + POLL_S` at most.
"""


class _Absentee(Struct):
    processes: tuple[Process, ...]
    # Loop time at which its lock was first seen free; None while it is not.
    free_since: float | None = None


class Absentees:
    """Watches agents without a connection, and tells once for each that is gone.

    Args:
        loop: The event loop, in whose thread everything happens.
        locks: The live locks.
        on_gone: Called with the instance and how it is known.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        locks: LiveLocks,
        on_gone: Callable[[str, str], None],
    ) -> None:
        self._loop = loop
        self._locks = locks
        self._on_gone = on_gone
        self._absent: dict[str, _Absentee] = {}
        self._poll: asyncio.TimerHandle | None = None
        self._namespace = own_namespace()

    def add(self, instance: str, processes: Sequence[Process] = ()) -> None:
        """Watch an instance; what is known of it already is told soon, never from in here."""
        known = self._absent.get(instance)
        if known is None:
            self._absent[instance] = _Absentee(tuple(processes))
        elif processes:
            # Its lock may have been seen free already: that time counts.
            known.processes = tuple(processes)
        if self._poll is None:
            self._poll = self._loop.call_later(0, self._look)

    def discard(self, instance: str) -> None:
        """It has a connection now, or does not matter any more."""
        self._absent.pop(instance, None)

    def close(self) -> None:
        """Watch nobody any more."""
        self._absent.clear()
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None

    def _look(self) -> None:
        self._poll = None
        for instance, absentee in list(self._absent.items()):
            how = self._gone(instance, absentee)
            # What is done about one may end the watch of another.
            if how and self._absent.pop(instance, None) is not None:
                self._on_gone(instance, how)
        if self._absent and self._poll is None:
            self._poll = self._loop.call_later(POLL_S, self._look)

    def _gone(self, instance: str, absentee: _Absentee) -> str:
        """How it is known that the instance is gone; empty when it is not known."""
        if absentee.processes and all(map(self._is_over, absentee.processes)):
            return "its process ended"
        if self._locks.state(instance) is not LockState.FREE:
            absentee.free_since = None
            return ""
        now = self._loop.time()
        if absentee.free_since is None:
            absentee.free_since = now
        # Other processes of it hold no lock; those that are seen must have ended too.
        others = absentee.processes[1:]
        settled = now - absentee.free_since >= SETTLE_S
        return "its live lock is free" if settled and all(map(self._is_over, others)) else ""

    def _is_over(self, process: Process) -> bool:
        return is_over(process, self._namespace)


class ReaderWatch:
    """Watches the processes that read for relays that have ended.

    Args:
        loop: The event loop, in whose thread everything happens.
        on_gone: Called once for each relay all of whose readers are gone: its instance, and how
            that is known. Never for one whose readers cannot be named, or are not to be seen here.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_gone: Callable[[str, str], None]
    ) -> None:
        self._loop = loop
        self._on_gone = on_gone
        self._readers: dict[str, tuple[Process, ...]] = {}
        self._poll: asyncio.TimerHandle | None = None
        self._namespace = own_namespace()

    def add(self, instance: str, readers: Sequence[Process]) -> None:
        """Watch the readers of an instance; what is known already is told soon, not from in here."""
        if readers:
            self._readers[instance] = tuple(readers)
            if self._poll is None:
                self._poll = self._loop.call_later(0, self._look)

    def discard(self, instance: str) -> None:
        """It does not matter any more."""
        self._readers.pop(instance, None)

    def close(self) -> None:
        """Watch nobody any more."""
        self._readers.clear()
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None

    def _look(self) -> None:
        self._poll = None
        for instance, readers in list(self._readers.items()):
            if all(is_over(process, self._namespace) for process in readers):
                self._readers.pop(instance, None)
                pids = ", ".join(str(process.pid) for process in readers)
                self._on_gone(instance, f"the processes that read for it have ended (pid {pids})")
        if self._readers and self._poll is None:
            self._poll = self._loop.call_later(POLL_S, self._look)


def is_over(process: Process, namespace: int) -> bool:
    """Whether this very process has provably ended; `namespace`: the broker's own, of PIDs."""
    if not process.start or not process.namespace or process.namespace != namespace:
        return False
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        text = Path(f"/proc/{process.pid}/stat").read_text(errors="replace")
        if start_time_ticks(text) != process.start:
            return True
    except (OSError, ValueError):
        pass
    else:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)
    return False


def own_namespace() -> int:
    """Returns the inode number of this process's PID namespace; 0: not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
