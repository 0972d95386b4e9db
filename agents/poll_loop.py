"""The one background thread of a process: it owns every socket of every agent here.

It begins with the first connection and ends with the last. Nothing of a user ever runs in it:
hooks and copies belong to the application's threads, so that agents beat whatever these do.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from typing import Protocol

import zmq

log = logging.getLogger("tensorlease.agents")

THREAD_NAME = "tensorlease"
MAX_WAIT_S = 3600.0

Ready = Mapping[object, int]
"""What the poller found: a socket, and its events."""


class Served(Protocol):
    """A connection, as the loop sees it."""

    def turn(self, loop: PollLoop, ready: Ready) -> float | None:
        """Does everything that is due, without waiting.

        Returns when it must be called again at the latest (monotonic seconds), or None: it has
        ended, its sockets are closed.
        """

    def crashed(self, error: Exception) -> None:
        """`turn` raised, which is a defect: ends the connection, tells who waits."""


class PollLoop:
    """A thread that waits on all sockets at once."""

    def __init__(self) -> None:
        self.context = zmq.Context(io_threads=1)
        self.poller = zmq.Poller()
        self.served: list[Served] = []
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.poller.register(self._event, zmq.POLLIN)
        # Guards `_event` against a wake-up that comes when the thread has ended. Reentrant: the
        # finalizer of an agent wakes too, and may run anywhere.
        self._waking = threading.RLock()
        self._closed = False
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Makes every connection have its turn soon; may be called from any thread."""
        with self._waking:
            if not self._closed:
                os.eventfd_write(self._event, 1)

    def end(self) -> None:
        """Ends the thread though there are connections left, as the interpreter ends."""
        self._ending = True
        self.wake()

    def join(self, timeout: float) -> None:
        """Waits until the thread has ended, at most `timeout` seconds."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            ready: Ready = {}
            while (due := self._turns(ready)) is not None and not self._ending:
                wait_s = min(MAX_WAIT_S, max(0.0, due - time.monotonic()))
                ready = dict(self.poller.poll(math.ceil(wait_s * 1000)))
                if self._event in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._event)
        except Exception as error:
            log.exception("the poll loop ends by a defect")
            with _guard:
                _forget(self)
            for served in self.served:
                served.crashed(error)
        finally:
            self._close()

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
        self.context.destroy(linger=0)


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
