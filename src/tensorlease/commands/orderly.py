"""What commands need so that they end in order, and say what happens in one line."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import NoReturn, TypeVar

import click

from tensorlease.protocol.errors import TensorleaseError

T = TypeVar("T")

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_S = 0.2
_DONE = 0
"""Beside the numbers of signals: the work has ended."""


def end_at_sigterm() -> None:
    """From now on SIGTERM ends this program as Ctrl+C does, with 143; SIGHUP, too, with 129."""
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _terminated)


def run_orderly(
    make: Callable[[], T],
    work: Callable[[T], object],
    stop: Callable[[T], object],
    *own: type[Exception],
) -> None:
    """Runs what a command does with its agent, so that no signal cuts it off in the middle.

    The work has a thread of its own, which signals do not reach: an exception that one raises there
    is lost in a finalizer, in an import or in a library's own code, or leaves half of a step
    undone. Agents log lines without tracebacks meanwhile.

    Args:
        make: Makes what is worked with; imports that take long belong here.
        work: What is to be done with that.
        stop: Makes it end soon; called at Ctrl+C or SIGTERM. At a second one it is not waited for.
        own: Errors of hooks that are not logged: the command ends by them, and says them itself.

    Raises:
        SystemExit: A signal has ended it; the code is 128 and its number.
    """
    told: SimpleQueue[int] = SimpleQueue()  # Which alone a signal's handler may put to.
    errors: list[BaseException] = []
    stopping = threading.Event()
    made: list[T] = []
    turn = threading.Lock()

    def run() -> None:
        # The kernel may give a signal to any thread that takes it; only the main one looks.
        signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
        try:
            one = make()
            with turn:  # Either it is stopped from here, or it is there to be.
                made.append(one)
                if stopping.is_set():
                    stop(one)
            work(one)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
        finally:
            told.put(_DONE)

    with _plain_log(own, stopping), _signals(told):
        threading.Thread(target=run, daemon=True, name="tensorlease-work").start()
        number = _next(told)
        if number != _DONE:
            with turn:
                stopping.set()
                for one in made:
                    stop(one)
            impatient = _next(told) != _DONE
            # What it could not finish for that; all else that it raises is a defect.
            if impatient or (errors and isinstance(errors[0], TensorleaseError)):
                click.echo("interrupted" if number == signal.SIGINT else "terminated", err=True)
                sys.exit(128 + number)
        if errors:
            raise errors.pop()


def _next(told: SimpleQueue[int]) -> int:
    """Waits for the next word; looks now and then, since a signal that comes just before the
    waiting begins does not end it: its handler runs only when Python code does.
    """
    while True:
        with suppress(Empty):
            return told.get(timeout=LOOK_S)


@contextmanager
def _plain_log(own: tuple[type[Exception], ...], stopping: threading.Event) -> Iterator[None]:
    """Agents' lines go to stderr; none once the user has it stopped, whose doing the rest is."""

    def plain(record: logging.LogRecord) -> bool:
        if stopping.is_set():
            return False
        error = record.exc_info[1] if record.exc_info else None
        record.exc_info = None
        return not isinstance(error, own)

    log = logging.getLogger("tensorlease.agents")
    handler = logging.StreamHandler()
    handler.addFilter(plain)
    propagate, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate


@contextmanager
def _signals(told: SimpleQueue[int]) -> Iterator[None]:
    """Puts the numbers of signals that would end the program, save those that it ignores."""
    former = {number: signal.getsignal(number) for number in _NUMBERS}
    heard = [number for number, handler in former.items() if handler is not signal.SIG_IGN]
    try:
        for number in heard:
            signal.signal(number, lambda number, _: told.put(number))
        yield
    finally:
        for number in heard:
            signal.signal(number, former[number])


def _terminated(number: int, frame: object = None) -> NoReturn:
    sys.exit(128 + number)
