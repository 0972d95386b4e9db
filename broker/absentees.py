"""Agents that have no connection yet after a restart: are they still alive?

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
        self._namespace = _own_namespace()

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
        if absentee.processes and all(self._is_over(p) for p in absentee.processes):
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
        """Whether this very process has provably ended."""
        if not process.start or not process.namespace or process.namespace != self._namespace:
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


def _own_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
