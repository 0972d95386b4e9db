"""The lock by which an agent proves that it lives, and by whose fall its death is proved."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat

from ..protocol.errors import ClosedError, ConfigError, NoBrokerError


class LiveLock:
    """A lock on a file named by the agent's instance, in the broker's live directory.

    Take it before Hello, let go after the last read (after ByeOk). It is a POSIX record lock, which
    the kernel gives to the process: it falls when the process ends, whatever ended it, and a forked
    child (a data loader) neither inherits it nor can lose it for the parent. An flock would live on
    in such a child.

    The price: *any* close of *any* descriptor of that file in this process drops it. Nobody else
    has a reason to open it.

    The file gets its name only when it is locked, so that nobody ever sees a living agent's file
    without its lock.

    Args:
        directory: The broker's live directory.
        instance: The agent's instance.
        note: What the file says to a broker that finds it when the agent has ended.
    """

    def __init__(self, directory: str, instance: str, note: bytes = b"") -> None:
        self._note = note
        self.path = f"{directory}/{instance}"
        self._unlocked_path = f"{directory}/.{instance}"
        # Locked files, the newest last; older ones are those whose name someone removed.
        self._descriptors: list[int] = []
        # The process that the lock belongs to.
        self._pid = 0

    @property
    def held(self) -> bool:
        """Whether this very process holds the lock; False in a forked child."""
        return bool(self._descriptors) and self._pid == os.getpid()

    def acquire(self) -> None:
        """Take the lock, or see that it is still in place.

        Call it before every Hello: a broker that started anew looks for the file, and cleaners of
        temporary directories or an ended login session may have removed it.

        Raises:
            ClosedError: This is a forked child of the process that the lock belongs to.
            NoBrokerError: There is no live directory.
            ConfigError: The file cannot be made; names the path and the system's reason.
        """
        if self._pid not in (0, os.getpid()):
            raise ClosedError(
                f"the lock {self.path} belongs to process {self._pid}, from which this one was"
                " forked; make an agent of its own here"
            )
        self._pid = os.getpid()
        if self._in_place():
            return
        try:
            self._descriptors.append(self._make())
        except FileNotFoundError as error:
            raise NoBrokerError(
                f"no directory {os.path.dirname(self.path)}: the broker makes it when it starts;"
                " is another broker's endpoint meant?"
            ) from error
        except OSError as error:
            raise ConfigError(f"cannot lock {self.path}: {error.strerror}") from error

    def release(self) -> None:
        """Remove the file and let go; does nothing in a forked child."""
        if self.held:
            if self._in_place():
                with contextlib.suppress(OSError):  # The broker removes what nobody holds.
                    os.unlink(self.path)
            self._drop_descriptors()

    def _in_place(self) -> bool:
        if not self._descriptors:
            return False
        mine = os.fstat(self._descriptors[-1])
        try:
            there = os.lstat(self.path)
        except OSError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def _make(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._unlocked_path)  # Left by a try that was cut short.
        descriptor = os.open(self._unlocked_path, flags, 0o600)
        try:
            if os.stat(os.path.dirname(self.path)).st_mode & stat.S_ISGID:
                os.fchmod(descriptor, 0o640)  # The broker, of the same group, has to open it.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.write(descriptor, self._note) < len(self._note):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.rename(self._unlocked_path, self.path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _drop_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
