"""Signals that come while an agent is at work: their handlers run when it is done, and not before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from tensorlease.agents.interrupts import HeldBack


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Every handler is the former one afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    former = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def notes(into: list[int]) -> Callable[[int, object], None]:
    return lambda number, _: into.append(number)


def test_a_handler_runs_when_the_block_has_ended_and_the_block_hears_of_it() -> None:
    came: list[int] = []
    heard: list[int] = []
    handler = notes(came)
    signal.signal(signal.SIGUSR1, handler)
    with HeldBack(lambda: heard.append(1)):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (came, heard) == ([], [1])
    assert came == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_an_interrupt_leaves_the_block_behind_its_last_line() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    done = []
    with pytest.raises(KeyboardInterrupt), HeldBack():
        os.kill(os.getpid(), signal.SIGINT)
        done.append(1)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_that_raise_leave_none_held_back() -> None:
    def fails(number: int, _: object) -> None:
        raise KeyError(number)

    came: list[int] = []
    also = notes(came)
    signal.signal(signal.SIGTERM, fails)
    signal.signal(signal.SIGUSR1, fails)
    signal.signal(signal.SIGUSR2, also)
    with pytest.raises(KeyError) as raised, HeldBack():
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert raised.value.args[0] in (signal.SIGTERM, signal.SIGUSR1)
    assert isinstance(raised.value.__context__, KeyError)  # The other one ran, too.
    assert came == [signal.SIGUSR2]
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGUSR1) is fails
    assert signal.getsignal(signal.SIGUSR2) is also


def test_what_has_no_handler_of_python_is_left_alone() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with HeldBack():
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_in_another_thread_it_does_nothing() -> None:
    signal.signal(signal.SIGUSR1, handler := notes([]))
    seen: list[object] = []

    def block() -> None:
        with HeldBack():
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert seen == [handler]
