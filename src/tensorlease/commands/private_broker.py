"""A broker in a process of its own, in a directory of its own, that ends with this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Self

import click

from tensorlease.protocol.endpoint import (
    ENDPOINT_VARIABLE,
    MAX_IPC_PATH_BYTES,
    parse_endpoint,
    runtime_directories,
    socket_name,
)
from tensorlease.protocol.errors import ConfigError, DeadlineError, NoBrokerError

START_LIMIT_S = 30.0
STOP_LIMIT_S = 6.0
"""The broker itself gives the rounds under way 4 s, and the last messages half a second."""

_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_READY = b"READY=1"
_libc = ctypes.CDLL(None)
# Of systemd, meant for this process or for the command.
_NOT_FOR_THE_BROKER = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")


class PrivateBroker:
    """A broker and its directory; both are gone when the `with` block has ended.

    SIGCHLD must be blocked: the owner waits for its processes, and says by `is_it` or `look` what
    it has seen of this one.

    Args:
        words: Options of `tensorlease broker`.
        unblock: Gives a new process the signals that are blocked here.

    Raises:
        ConfigError: No directory can be made for it.
    """

    def __init__(self, words: list[str], unblock: Callable[[], None]) -> None:
        self._directory = private_directory(os.environ, os.geteuid())
        endpoint = parse_endpoint(f"{self._directory}/{socket_name()}")
        self.endpoint = endpoint.url
        self._live = endpoint.live_directory
        self._status: int | None = None
        self._started_at = time.monotonic()
        # The broker says by it that it listens, as it would to systemd.
        self._news = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            news = f"{self._directory}/ready"
            self._news.bind(news)
            environ = {k: v for k, v in os.environ.items() if k not in _NOT_FOR_THE_BROKER}
            environ.pop(ENDPOINT_VARIABLE, None)
            # A session of its own: what a terminal tells the command must not end the broker.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tensorlease.private_broker"]
                + [str(os.getpid()), self._directory, "--endpoint", self.endpoint, *words],
                env=environ | {"NOTIFY_SOCKET": news},
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                preexec_fn=unblock,  # noqa: PLW1509 - this process has one thread
            )
        except BaseException:
            self._remove()
            raise
        self.pid = process.pid
        process.returncode = 0  # It is waited for by its pid, and not by this object.

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._end()
        finally:
            self._remove()

    # ------------------------------------------------------------ what it is doing

    def ready(self, wait_s: float) -> bool:
        """Whether it listens, or does within `wait_s` seconds.

        Raises:
            NoBrokerError: It was killed.
            DeadlineError: It has taken far too long.
        """
        self._news.settimeout(wait_s)
        with contextlib.suppress(TimeoutError):
            return _READY in self._news.recv(4096).splitlines()
        self.look()
        if self._status is not None and os.WIFSIGNALED(self._status):
            raise NoBrokerError(f"the broker {verb(self._status)} before it listened")
        if time.monotonic() > self._started_at + START_LIMIT_S:
            raise DeadlineError(f"the broker does not listen after {START_LIMIT_S:g} s")
        return False

    @property
    def failed(self) -> int | None:
        """Its exit code, if it has ended; it has said why itself."""
        return None if self._status is None else os.waitstatus_to_exitcode(self._status)

    def is_it(self, pid: int, status: int) -> bool:
        """Takes in that a process has ended; returns whether it was the broker."""
        if pid == self.pid:
            self._status = status
        return pid == self.pid

    def look(self) -> None:
        """Sees which processes have ended."""
        for pid, status in reap():
            self.is_it(pid, status)

    def agents(self) -> int:
        """How many living agents it has; 0 once it has ended."""
        if self._status is not None:
            return 0
        with contextlib.suppress(OSError):
            return sum(not name.startswith(".") for name in os.listdir(self._live))
        return 0

    # ------------------------------------------------------------ the end

    def _end(self) -> None:
        deadline = time.monotonic() + STOP_LIMIT_S
        self.look()
        if self._status is None:
            os.kill(self.pid, signal.SIGTERM)
        while self._status is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return
            signal.sigtimedwait({signal.SIGCHLD}, left_s)
            self.look()

    def _remove(self) -> None:
        self._news.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def private_directory(environ: Mapping[str, str], uid: int) -> str:
    """Makes a directory (mode 0700) for a broker's socket, in the user's runtime directory.

    Raises:
        ConfigError: There is no place for one.
    """
    room = MAX_IPC_PATH_BYTES - len("/run-XXXXXXXX/broker.sock.lock")
    for place in runtime_directories(environ, uid):
        if len(os.fsencode(place)) > room:
            continue
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, 0o700)
            status = os.lstat(place)
            others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == uid and not others:
                return tempfile.mkdtemp(prefix="run-", dir=place)
    try:
        return tempfile.mkdtemp(prefix="tensorlease-run-", dir="/tmp")
    except OSError as error:
        raise ConfigError(
            f"no directory can be made for a broker's socket: {error}; let XDG_RUNTIME_DIR name a"
            " directory of yours"
        ) from error


def reap() -> Iterator[tuple[int, int]]:
    """Yields pid and wait status of each child that has ended, also of those that we were given."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def end_with(parent: int, number: signal.Signals) -> None:
    """Has the kernel send a signal to this process when its parent, with this pid, has ended."""
    _libc.prctl(_DEATH_SIGNAL, int(number))
    if os.getppid() != parent:
        os.kill(os.getpid(), number)  # It ended before that.


def verb(status: int) -> str:
    """What a wait status says: `was killed by SIGKILL`, `ended with code 1`."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def say(text: str) -> None:
    """Tells the user something, in one line on stderr."""
    click.echo(f"tensorlease run: {text}", err=True)
