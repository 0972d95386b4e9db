"""Who polls the sockets of a process's agents: a thread that waits for them, else one of its own.

One thread at a time has the *seat*: it polls every socket of every agent here, and alone touches
them. A thread of the application that waits for something of an agent takes it meanwhile, so that
what comes is seen where it is waited for: to wake another thread for each message took as long as
all the rest of a small round. While nobody waits, a thread in the background has it: nothing of a
user ever runs there, so that agents beat whatever hooks and copies do. It begins with the first
connection and ends with the last.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

import zmq

from ..protocol.busy_poll import CPU_LIMIT, BusyPoll, lasts_s
from ..protocol.errors import ConfigError
from .descriptors import check_descriptors
from .interrupts import HeldBack

log = logging.getLogger("tensorlease.agents")

THREAD_NAME = "tensorlease"
IDLE_THREADS: Final = "tensorlease-copy"
"""How the names of threads begin that copy for who waits, and do nothing meanwhile."""
BUSY_POLL: Final = "TENSORLEASE_BUSY_POLL"
"""The variable that says whether who waits sleeps; the broker reads it, too."""
MAX_WAIT_S = 3600.0
TICK_S = 20e-3
"""So long after a thread has left the seat the one in the background takes it: who waits again
before that finds it free."""
MAX_CLAIM_S = 1.0
"""How long a thread that waits tries to have the seat at a time."""

Ready = Mapping[object, int]
"""What the poller found: a socket, and its events."""


class Served(Protocol):
    """A connection, as the loop sees it."""

    def turn(self, loop: PollLoop, ready: Ready) -> float | None:
        """Does everything that is due, without waiting.

        Returns when it must be called again at the latest (monotonic seconds), or None: it has
        ended, its sockets are closed.
        """

    def flush(self) -> None:
        """Sends what waits to be sent."""

    def crashed(self, error: Exception) -> None:
        """`turn` raised, which is a defect: ends the connection, tells who waits."""


class PollLoop:
    """Waits on all sockets at once, in one thread at a time."""

    def __init__(self) -> None:
        # For so long after something came or went a thread of the application does not sleep.
        self._busy_s = lasts_s(_busy_poll(), len(os.sched_getaffinity(0)), _cpu_limit())
        self._stirred_at = 0.0
        self.context = zmq.Context(io_threads=1)
        self.poller = zmq.Poller()
        self.served: list[Served] = []
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.poller.register(self._event, zmq.POLLIN)
        # Guards `_event` against a wake-up that comes when all has ended. Reentrant: the
        # finalizer of an agent wakes too, and may run anywhere.
        self._waking = threading.RLock()
        self._closed = False
        self._ending = False
        # When a turn is due, in monotonic seconds; None: there is nobody left to have one.
        self._due: float | None = 0.0
        # Held by who polls, and how often it was taken by a thread of the application.
        self._seat = threading.Lock()
        self._times_taken = 0
        # The thread of the application that polls; None: the background thread does, or nobody.
        self._driver: int | None = None
        # Threads that wait to have the seat: the background thread gives it up.
        self._claims: set[int] = set()
        # The background thread sleeps until this is written to, by who leaves the seat.
        self._asleep = False
        self._bed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Starts the background thread."""
        self._thread.start()

    def wake(self) -> None:
        """Makes every connection have its turn soon; may be called from any thread."""
        with self._waking:
            if not self._closed:
                os.eventfd_write(self._event, 1)

    def send(self, served: Served) -> None:
        """Has what waits to be sent sent: by this thread, unless another one polls."""
        with HeldBack():
            if self._seat.acquire(blocking=False):
                try:
                    served.flush()
                    self._stirred_at = time.monotonic()
                finally:
                    self._leave()
                return
        self.wake()

    def changed(self) -> None:
        """Something may have come to pass that a thread waits for, which may be at the poll."""
        if self._driver not in (None, threading.get_ident()):
            self.wake()

    def end(self) -> None:
        """Ends all though there are connections left, as the interpreter ends."""
        self._ending = True
        self.wake()

    def join(self, timeout: float) -> None:
        """Waits until the background thread has ended, at most `timeout` seconds."""
        self._thread.join(timeout)

    # ------------------------------------------------------------ threads of the application

    @property
    def vacant(self) -> bool:
        """Whether `drive` may have the seat: no other thread of the application does."""
        return self._driver is None and self._due is not None and not self._ending

    def drive(self, seconds: float, over: Callable[[], bool]) -> bool:
        """Polls, once, in place of the background thread, for at most so many seconds.

        What comes is dealt with when this returns. To be called without a connection's lock.

        Args:
            seconds: The longest wait.
            over: Whether there is nothing to wait for any more, asked when nobody else polls.

        Returns:
            Whether it did so; else another thread polls.
        """
        with HeldBack(self.wake):
            if not self._sit(min(seconds, MAX_CLAIM_S)):
                return False
            try:
                if not over():
                    for served in list(self.served):
                        served.flush()
                    if self._due is not None:
                        left = self._due - time.monotonic()
                        self._due = self._turns(self._poll(min(seconds, left)))
            except Exception as error:
                log.exception("the poll loop ends by a defect")
                self._crash(error)
            finally:
                self._leave()
        return True

    def _sit(self, seconds: float) -> bool:
        """Takes the seat, from the background thread if that has it; waits so long at most."""
        me = threading.get_ident()
        sits = self._seat.acquire(blocking=False)
        if not sits and self.vacant:
            self._claims.add(me)
            self.wake()
            sits = self._seat.acquire(timeout=seconds)
            self._claims.discard(me)
        if sits:
            self._driver = me
            self._times_taken += 1
        return sits

    def _leave(self) -> None:
        self._driver = None
        self._seat.release()
        if self._asleep or self._due is None:
            with self._waking:
                if not self._closed:
                    os.eventfd_write(self._bed, 1)

    # ------------------------------------------------------------ the background thread

    def _run(self) -> None:
        try:
            bed = select.poll()
            bed.register(self._bed, select.POLLIN)
            seen = self._times_taken
            while self._due is not None and not self._ending:
                if seen != self._times_taken:
                    seen = self._times_taken
                    bed.poll(TICK_S * 1000)
                elif self._seat.acquire(blocking=False):
                    # It was free for a while.
                    try:
                        self._drive_on()
                    finally:
                        self._seat.release()
                    bed.poll(TICK_S * 1000)
                else:
                    # One thread has it since a while: who leaves it says so.
                    self._asleep = True
                    if self._seat.locked():
                        bed.poll()
                    self._asleep = False
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bed)
        except Exception as error:
            log.exception("the poll loop ends by a defect")
            self._crash(error)
        finally:
            with self._seat:
                self._close()

    def _drive_on(self) -> None:
        """Polls until another thread wants to, or there is nobody left."""
        ready: Ready = {}
        while True:
            self._due = self._turns(ready)
            if self._due is None or self._ending or self._claims:
                return
            ready = self._poll(self._due - time.monotonic())

    def _poll(self, seconds: float) -> Ready:
        wait_s = min(MAX_WAIT_S, max(0.0, seconds))
        found = self._poll_busily(wait_s) if self._busy_s and self._driver is not None else []
        ready = dict(found or self.poller.poll(math.ceil(wait_s * 1000)))
        if ready:
            self._stirred_at = time.monotonic()
        if self._event in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)
        return ready

    def _poll_busily(self, wait_s: float) -> list[tuple[object, int]]:
        """Looks without sleeping, as long as what was stirred last may soon be answered.

        Not where other threads run Python: they would wait for the interpreter for milliseconds.
        """
        until = min(time.monotonic() + wait_s, self._stirred_at + self._busy_s)
        if time.monotonic() < until and _others_run():
            return []
        while time.monotonic() < until:
            if found := self.poller.poll(0):
                return list(found)
        return []

    def _crash(self, error: Exception) -> None:
        self._due = None
        with _guard:
            _forget(self)
        for served in self.served:
            served.crashed(error)

    def _turns(self, ready: Ready) -> float | None:
        """Gives every connection its turn; None once there is none left."""
        due = math.inf
        for served in list(self.served):
            try:
                next_due = served.turn(self, ready)
            except Exception as error:
                log.exception("an agent's connection ends by a defect")
                served.crashed(error)
                next_due = None
            if next_due is None:
                with _guard:
                    self.served.remove(served)
            else:
                due = min(due, next_due)
        with _guard:
            if self.served:
                return due
            _forget(self)
            return None

    def _close(self) -> None:
        with self._waking:
            self._closed = True
            os.close(self._event)
            os.close(self._bed)
        self.context.destroy(linger=0)


def check() -> None:
    """Raises `ConfigError` if no agent can connect here, whatever broker there is.

    This process may not open as many files as an agent needs, or the environment has a word for
    busy polling that there is not.
    """
    _busy_poll()
    check_descriptors(_current is None)


def _busy_poll() -> BusyPoll:
    word = os.environ.get(BUSY_POLL) or BusyPoll.AUTO.value
    try:
        return BusyPoll(word)
    except ValueError:
        choices = ", ".join(choice.value for choice in BusyPoll)
        raise ConfigError(f"${BUSY_POLL} is {word!r}: must be one of {choices}") from None


def _others_run() -> bool:
    """Whether there are threads in this process beside this one, and ours that sleep meanwhile."""
    me = threading.current_thread()
    others = [each.name for each in threading.enumerate() if each is not me]
    return any(name != THREAD_NAME and not name.startswith(IDLE_THREADS) for name in others)


def _cpu_limit() -> str:
    try:
        return Path(CPU_LIMIT).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


# The loop of this process; it is replaced when its last connection has ended.
_guard = threading.RLock()
_current: PollLoop | None = None
# Loops of a parent process: never touched, never collected (pyzmq would complain of the latter).
_inherited: list[PollLoop] = []


def serve(served: Served) -> PollLoop:
    """Gives a connection to the process's loop, which is started if there is none."""
    global _current
    with _guard:
        loop = _current
        if loop is None:
            loop = _current = PollLoop()
            loop.served.append(served)
            loop.start()
            return loop
        loop.served.append(served)
    loop.wake()
    return loop


def current_loop() -> PollLoop | None:
    """The loop of this process, if any agent here has a connection."""
    return _current


def _forget(loop: PollLoop) -> None:
    global _current
    if _current is loop:
        _current = None


def _start_anew() -> None:
    """In a forked child: the parent's thread is not here, and its lock may have been held."""
    global _guard, _current
    _guard = threading.RLock()
    if _current is not None:
        _inherited.append(_current)
        _current = None


os.register_at_fork(after_in_child=_start_anew)
