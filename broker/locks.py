"""The lock against a second broker, and the locks by which agents prove that they live.

Both are the kernel's: they vanish with their process, however it ended.
"""

from __future__ import annotations

import enum
import fcntl
import logging
import os
import re
import stat
import struct
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from ..protocol.errors import ConfigError
from ..protocol.records import LiveNote

log = logging.getLogger("tensorlease.broker")


class PreviousRun(enum.Enum):
    """How the broker before this one ended."""

    NONE = "none"
    """There was none, or it ended in order and nobody waits for its return."""
    CLEAN = "clean"
    UNCLEAN = "unclean"
    """It died: agents may hold leases and rounds of it."""


class BrokerRunningError(ConfigError):
    """Another broker serves this place.

    Attributes:
        pid: Its process as it wrote it, or None; valid in its own PID namespace.
        path: The lock file.
    """

    def __init__(self, path: str, pid: int | None) -> None:
        who = f"pid {pid}" if pid else "pid unknown"
        super().__init__(
            f"a broker ({who}) already serves {path.removesuffix('.lock')};"
            " stop it, or give this one another endpoint"
        )
        self.pid = pid
        self.path = path


class LockNote(Struct, frozen=True):
    """What a lock file says about its last holder."""

    pid: int
    clean: bool


class BrokerLock:
    """An exclusive flock on a file beside the socket.

    flock and not a record lock: two brokers in one process must exclude each other too, and the
    broker forks nothing that could inherit it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # The locked file, from acquire to release.
        self._descriptor: int | None = None

    def acquire(self) -> PreviousRun:
        """Take the lock, without waiting.

        Raises:
            BrokerRunningError: Another broker holds it.
            OSError: The file cannot be made or written.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            descriptor = os.open(self.path, flags, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise ConfigError(f"{self.path} is not a file; remove it")
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    note = _read_note(descriptor)
                    raise BrokerRunningError(self.path, note.pid if note else None) from None
                if not is_at(descriptor, self.path):
                    os.close(descriptor)  # Its holder removed it after it was opened: once more.
                    continue
                note = _read_note(descriptor)
                empty = os.fstat(descriptor).st_size == 0
                _write_note(descriptor, LockNote(os.getpid(), clean=False))
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
            if empty:
                return PreviousRun.NONE
            return PreviousRun.CLEAN if note and note.clean else PreviousRun.UNCLEAN

    def still_held(self) -> bool:
        """Whether the lock keeps others away: it is taken, and its file is still at its path."""
        return self._descriptor is not None and is_at(self._descriptor, self.path)

    def release(self, clean: bool) -> None:
        """Let go. After a clean end the file is removed too, if its directory allows it."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            if clean and is_at(descriptor, self.path):
                _write_note(descriptor, LockNote(os.getpid(), clean=True))
                os.unlink(self.path)
        except OSError:
            pass  # The note says enough; and a lock that stays behind keeps nobody away.
        finally:
            os.close(descriptor)


def is_at(descriptor: int, path: str) -> bool:
    """Whether an open file is the one that is now at a path."""
    mine = os.fstat(descriptor)
    try:
        there = os.lstat(path)
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _read_note(descriptor: int) -> LockNote | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=LockNote)
    except msgspec.DecodeError:
        return None  # Empty: its holder has not written yet.


def _write_note(descriptor: int, note: LockNote) -> None:
    text = msgspec.json.encode(note) + b"\n"
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))


class LockState(enum.Enum):
    """What an instance's lock says about its process."""

    HELD = "held"
    """The process lives."""
    FREE = "free"
    """The file is there and nobody holds it: the process that held it is gone."""
    MISSING = "missing"
    """There is no file: it said goodbye, or the file was removed. No proof of anything."""


# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
MAX_NOTE = 65_536
_INSTANCE = re.compile(r"[A-Za-z0-9_-]{1,64}")


class LiveLocks:
    """The broker's view on the locks that agents hold on files named by their instance.

    The locks are record locks, and looking uses `F_OFD_GETLK`, which asks and never takes: an agent
    that is just starting cannot find its lock taken by the broker. The kernel gives such a lock to a
    process, so a forked child does not keep it; `tensorlease.agents.live` says more.

    The lock falls while its process exits, *before* the kernel has torn down the process's GPU
    contexts. Where nothing but the lock tells of a death, wait a while after it fell.
    """

    def __init__(self, directories: Iterable[str]) -> None:
        self._directories = tuple(directories)
        # Files kept open, by instance: they answer even when someone removes the name.
        self._kept: dict[str, int] = {}

    def keep(self, instance: str) -> LockState:
        """Open the file of an instance that said Hello, and keep it open until `forget`."""
        if instance not in self._kept:
            descriptor = self._open(instance)
            if descriptor is None:
                return LockState.MISSING
            self._kept[instance] = descriptor
        return self.state(instance)

    def state(self, instance: str) -> LockState:
        """What the lock of an instance says now."""
        kept = self._kept.get(instance)
        if kept is not None:
            return LockState.HELD if _holder(kept) is not None else LockState.FREE
        descriptor = self._open(instance)
        if descriptor is None:
            return LockState.MISSING
        holder = _holder(descriptor)
        if holder == os.getpid():
            # Closing any descriptor of a file drops all record locks that this process has on it:
            # an agent that lives in the broker's process would lose its own.
            self._kept[instance] = descriptor
        else:
            os.close(descriptor)
        return LockState.FREE if holder is None else LockState.HELD

    def is_held(self, instance: str) -> bool:
        """Whether the process of an instance is known to live."""
        return self.state(instance) is LockState.HELD

    def holder(self, instance: str) -> int | None:
        """The pid that holds the lock of an instance; 0 when not visible here, None for nobody."""
        if self.state(instance) is not LockState.HELD:
            return None
        kept = self._kept.get(instance)
        descriptor = self._open(instance) if kept is None else kept
        if descriptor is None:
            return None
        try:
            return _holder(descriptor)
        finally:
            if descriptor != kept:
                os.close(descriptor)

    def owner(self, instance: str) -> int | None:
        """The uid of the instance's file, or None without one. It must be the peer's."""
        kept = self._kept.get(instance)
        if kept is not None:
            return os.fstat(kept).st_uid
        for path in self._paths(instance):
            try:
                return os.lstat(path).st_uid
            except OSError:
                continue
        return None

    def held_instances(self) -> frozenset[str]:
        """Who lives: at a restart, these agents have yet to announce themselves."""
        return frozenset(name for name in self._names() if self.is_held(name))

    def free_instances(self) -> frozenset[str]:
        """Whose process is gone while their file is still there."""
        return frozenset(name for name in self._names() if self.state(name) is LockState.FREE)

    def unsettled_instances(self, *, unlocked: bool) -> frozenset[str]:
        """Who must announce itself, or be told gone, before a restarted broker decides anything.

        Those whose lock is held, and beside them those whose lock is free: they are dead, but that
        is known only when their locks have stayed free for a while. Alone these are nobody to wait
        for: who could announce what they were in?

        Args:
            unlocked: Agents that hold no lock may be there too.
        """
        held = self.held_instances()
        return held | self.free_instances() if held or unlocked else held

    def notes(self) -> dict[str, LiveNote]:
        """What relays, living or not, have left in their files, by instance."""
        found: dict[str, LiveNote] = {}
        for instance in self._names():
            self.state(instance)  # Keeps open what must not be closed here.
            kept = self._kept.get(instance)
            descriptor = self._open(instance) if kept is None else kept
            if descriptor is None:
                continue
            try:
                if text := os.pread(descriptor, MAX_NOTE, 0):
                    found[instance] = msgspec.msgpack.decode(text, type=LiveNote)
            except (OSError, msgspec.DecodeError) as error:
                log.warning("the live file of %s says nothing readable: %s", instance, error)
            finally:
                if descriptor != kept:
                    os.close(descriptor)
        return found

    def forget(self, instance: str) -> None:
        """Close what `keep` opened, after the instance left or is gone."""
        descriptor = self._kept.get(instance)
        if descriptor is not None and _holder(descriptor) != os.getpid():
            del self._kept[instance]
            os.close(descriptor)

    def remove(self, instance: str) -> bool:
        """Remove the file of a dead instance; True when it is gone, never while it is held.

        The file of a dead agent is the only proof of its death that survives the broker: remove it
        when all who hold something for that agent were told.
        """
        if self.is_held(instance):
            return False
        self.forget(instance)
        for path in self._paths(instance):
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Close all files, but for those whose locks this very process holds."""
        for instance in list(self._kept):
            self.forget(instance)

    def _names(self) -> list[str]:
        names: list[str] = []
        for directory in self._directories:
            try:
                names.extend(name for name in os.listdir(directory) if _INSTANCE.fullmatch(name))
            except OSError:
                continue
        return names

    def _paths(self, instance: str) -> list[str]:
        if not _INSTANCE.fullmatch(instance):
            return []  # It came from a peer, and must not name another place.
        return [f"{directory}/{instance}" for directory in self._directories]

    def _open(self, instance: str) -> int | None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        for path in self._paths(instance):
            try:
                descriptor = os.open(path, flags)
            except OSError:
                continue
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        return None


def _holder(descriptor: int) -> int | None:
    """The pid that holds a lock on the file, 0 when it is not visible here, None for nobody."""
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, question)
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else max(pid, 0)
