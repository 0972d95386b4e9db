"""Proof that a process is gone: by pidfd where the kernel shows it, else by its live lock.

A pidfd becomes readable when the whole process has ended, its GPU contexts included, and cannot
mean another process that got the same number later. A live lock falls somewhat earlier in the exit,
hence the wait after it.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import logging
import os
import select
import signal
from collections.abc import Callable, Sequence

from ..protocol.errors import TensorleaseError
from ..protocol.procfs import effective_uid, start_time_ticks
from ..protocol.records import Process
from .credentials import PeerCredentials
from .locks import LiveLocks, LockState

log = logging.getLogger("tensorlease.broker")


class Proof(enum.Enum):
    """How the death of an instance would be proved."""

    PIDFD = "pidfd"
    LOCK = "lock"
    NONE = "none"
    """Not at all: it leaves by goodbye, or its leases become stuck."""


class UnprovenProcessError(TensorleaseError):
    """What an agent says of its processes is not what the kernel says.

    Attributes:
        instance: The agent's instance.
        pid: The process.
    """

    def __init__(self, instance: str, pid: int, problem: str) -> None:
        super().__init__(f"process {pid} of instance {instance}: {problem}")
        self.instance = instance
        self.pid = pid


class _Watched:
    """One instance under watch."""

    def __init__(self, processes: tuple[Process, ...]) -> None:
        self.processes = processes
        # pid by open pidfd; a process leaves when it has ended.
        self.descriptors: dict[int, int] = {}
        # The process that said Hello is not visible here: its lock has to fall.
        self.by_lock = False
        # Another process is not visible here. It holds no lock, so it is never taken for gone.
        self.unprovable = False
        # Loop time at which the lock was first seen free; None while it is held.
        self.free_since: float | None = None


class ProcessWatch:
    """Watches the processes of all instances, and tells once for each that all of them are gone.

    Args:
        loop: The broker's event loop; everything happens in its thread.
        locks: The live locks.
        on_gone: Called in the loop with the instance.
        poll_s: Seconds between two looks at the locks, for those that have no pidfd.
        settle_s: Seconds that a lock must have been free: the kernel lets go of it before it has
            torn down the GPU contexts of the process.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        locks: LiveLocks,
        on_gone: Callable[[str], None],
        *,
        poll_s: float = 0.5,
        settle_s: float = 1.0,
    ) -> None:
        self._loop = loop
        self._locks = locks
        self._on_gone = on_gone
        self._poll_s = poll_s
        self._settle_s = settle_s
        self._watched: dict[str, _Watched] = {}
        self._poll: asyncio.TimerHandle | None = None
        self._own_namespace = _namespace_inode()

    def admit(self, instance: str, processes: Sequence[Process], peer: PeerCredentials) -> Proof:
        """Start to watch the processes that an agent's Hello names; the first said it.

        A repeated Hello with the same processes changes nothing.

        Raises:
            UnprovenProcessError: A process is gone, is another one than was named, or belongs to
                another user; nothing is watched then.
            OSError: The broker is out of descriptors.
        """
        wanted = tuple(processes)
        watched = self._watched.get(instance)
        if watched is not None and watched.processes == wanted and not watched.by_lock:
            return self.proof(instance)
        owner = self._locks.owner(instance)
        if owner not in (None, peer.uid):
            raise UnprovenProcessError(
                instance, wanted[0].pid, f"its live lock belongs to uid {owner}, not {peer.uid}"
            )
        holder = self._locks.holder(instance)
        if peer.pid and holder and holder != peer.pid:
            # Its agent lives and has no session just now; the name is kept for it.
            raise UnprovenProcessError(
                instance, peer.pid, f"its live lock is held by process {holder}"
            )
        fresh = _Watched(wanted)
        try:
            fresh.by_lock = not self._open_first(instance, wanted[0], peer, fresh)
            if fresh.by_lock and self._locks.state(instance) is LockState.FREE:
                raise UnprovenProcessError(
                    instance, wanted[0].pid, "holds no lock on its live file"
                )
            for process in wanted[1:]:
                if not self._open_other(instance, process, peer, fresh):
                    fresh.unprovable = True
        except BaseException:
            _close(fresh.descriptors)
            raise
        self.forget(instance)
        if fresh.by_lock and self._locks.keep(instance) is not LockState.MISSING:
            self._start_poll()
        self._watched[instance] = fresh
        for descriptor in fresh.descriptors:
            self._loop.add_reader(descriptor, self._ended, instance, descriptor)
        return self.proof(instance)

    def proof(self, instance: str) -> Proof:
        """How the death of an instance would be proved."""
        watched = self._watched.get(instance)
        if watched is None or watched.unprovable:
            return Proof.NONE
        if not watched.by_lock:
            return Proof.PIDFD
        missing = self._locks.state(instance) is LockState.MISSING
        return Proof.NONE if missing else Proof.LOCK

    def kill(self, instance: str) -> list[int]:
        """Send SIGKILL to all processes of an instance that the broker has a pidfd of.

        Returns:
            The pids that were signalled; empty when none can be.
        """
        watched = self._watched.get(instance)
        signalled = []
        for descriptor, pid in watched.descriptors.items() if watched else ():
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            except OSError as error:
                log.warning("cannot kill process %d: %s", pid, error.strerror)
            else:
                signalled.append(pid)
        return signalled

    def forget(self, instance: str) -> None:
        """Stop to watch an instance: it said goodbye, or all of it is gone."""
        watched = self._watched.pop(instance, None)
        if watched is None:
            return
        for descriptor in watched.descriptors:
            self._loop.remove_reader(descriptor)
        _close(watched.descriptors)
        self._locks.forget(instance)

    def close(self) -> None:
        """Forget everybody."""
        for instance in list(self._watched):
            self.forget(instance)
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None

    def _open_first(
        self, instance: str, process: Process, peer: PeerCredentials, fresh: _Watched
    ) -> bool:
        """Open the process that said Hello; False where the kernel does not show it here."""
        if peer.pid == 0:
            return False
        if self._comparable(process) and process.pid != peer.pid:
            raise UnprovenProcessError(
                instance, process.pid, f"the kernel says that process {peer.pid} is connected"
            )
        return self._open(instance, peer.pid, process.start, fresh)

    def _open_other(
        self, instance: str, process: Process, peer: PeerCredentials, fresh: _Watched
    ) -> bool:
        """Open a process that the agent names besides; False where it cannot be seen from here."""
        if not self._comparable(process):
            return False
        opened = self._open(instance, process.pid, process.start, fresh)
        # Any pid can be named, and the broker may be told to kill it.
        uid = effective_uid(_read_proc(process.pid, "status"))
        if uid != peer.uid:
            raise UnprovenProcessError(
                instance, process.pid, f"belongs to uid {uid}, the agent to uid {peer.uid}"
            )
        return opened

    def _comparable(self, process: Process) -> bool:
        """Whether the pid that an agent names means the same process here."""
        return bool(process.namespace) and process.namespace == self._own_namespace

    def _open(self, instance: str, pid: int, start: int, fresh: _Watched) -> bool:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise UnprovenProcessError(instance, pid, "is gone") from None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return False  # An old kernel, or a sandbox that forbids it.
        fresh.descriptors[descriptor] = pid
        # Read after the pidfd was opened: if the number was taken over before, the time differs.
        stat = _read_proc(pid, "stat")
        if not stat:
            if _is_readable(descriptor):
                raise UnprovenProcessError(instance, pid, "is gone")
            del fresh.descriptors[descriptor]  # /proc hides it (hidepid): nothing to compare.
            os.close(descriptor)
            return False
        if start_time_ticks(stat) != start:
            raise UnprovenProcessError(instance, pid, "is another process than the one named")
        return True

    def _ended(self, instance: str, descriptor: int) -> None:
        watched = self._watched[instance]
        self._loop.remove_reader(descriptor)
        del watched.descriptors[descriptor]
        os.close(descriptor)
        if not (watched.descriptors or watched.by_lock or watched.unprovable):
            self._tell(instance)

    def _start_poll(self) -> None:
        if self._poll is None:
            self._poll = self._loop.call_later(self._poll_s, self._look_at_locks)

    def _look_at_locks(self) -> None:
        self._poll = None
        now = self._loop.time()
        by_lock = [(name, watched) for name, watched in self._watched.items() if watched.by_lock]
        for instance, watched in by_lock:
            if self._locks.state(instance) is not LockState.FREE:
                watched.free_since = None
            elif watched.free_since is None:
                watched.free_since = now
            elif now - watched.free_since >= self._settle_s and not (
                watched.descriptors or watched.unprovable
            ):
                self._tell(instance)
        if any(watched.by_lock for watched in self._watched.values()):
            self._start_poll()

    def _tell(self, instance: str) -> None:
        self.forget(instance)
        self._on_gone(instance)


def _close(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _read_proc(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _namespace_inode() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
