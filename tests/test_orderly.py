"""What signals do to a command that works with an agent, in real processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from tensorlease.agents import ClosedError
from tensorlease.commands.orderly import run_orderly

from . import procs
from .procs import Spawn, spawning

SIGNALS = pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGINT, "SystemExit(130)"), (signal.SIGTERM, "SystemExit(143)")]
)


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    with spawning() as start:
        yield start


def working(then: str = "ends", ignored: int = 0) -> str:
    """In a child: works until it is stopped; returns how it ended."""
    if ignored:
        signal.signal(ignored, signal.SIG_IGN)
    stopped = threading.Event()

    def make() -> str:
        if then == "made":
            procs.say("working")
            assert procs.hear() == "go on"
        return "it"

    def work(one: str) -> None:
        assert one == "it"
        if then == "made":
            assert stopped.wait(procs.DEADLINE_S)
            raise ClosedError("the agent was closed")
        procs.say("working")
        if then == "goes on":
            procs.hear()
            return
        assert stopped.wait(procs.DEADLINE_S)
        if then == "was closed":
            raise ClosedError("the agent was closed")
        if then == "fails":
            raise ZeroDivisionError
        if then == "hangs":
            threading.Event().wait()

    def stop(one: str) -> None:
        assert one == "it"
        procs.say("stopping")
        stopped.set()

    try:
        run_orderly(make, work, stop)
    except BaseException as error:  # noqa: BLE001 - told to the test
        return repr(error)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return "ended well"


@SIGNALS
def test_a_signal_stops_the_work_and_then_ends_the_command(
    spawn: Spawn, number: int, end: str
) -> None:
    process = spawn(working, "was closed")
    assert process.hear() == "working"
    process.signal(number)
    assert process.result() == end


def masked() -> bool:
    """In a child: whether a thread that the work starts takes none of the signals."""
    found: list[set[int]] = []

    def look() -> None:
        found.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, ())))

    def work(_: object) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    run_orderly(object, work, lambda _: None)
    own = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return found[0] >= {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} and not own


def test_signals_go_to_the_thread_that_looks_for_them(spawn: Spawn) -> None:
    assert spawn(masked).result()


@SIGNALS
def test_a_second_signal_does_not_wait_for_the_work(spawn: Spawn, number: int, end: str) -> None:
    process = spawn(working, "hangs")
    assert process.hear() == "working"
    process.signal(number)
    assert process.hear() == "stopping"
    process.signal(number)
    assert process.result() == end


@pytest.mark.parametrize(
    ("then", "end"), [("ends", "ended well"), ("fails", "ZeroDivisionError()")]
)
def test_work_that_ends_by_itself_after_a_signal_counts(spawn: Spawn, then: str, end: str) -> None:
    process = spawn(working, then)
    assert process.hear() == "working"
    process.signal(signal.SIGINT)
    assert process.result() == end


def test_a_signal_that_was_ignored_before_is_ignored(spawn: Spawn) -> None:
    process = spawn(working, "goes on", int(signal.SIGINT))
    assert process.hear() == "working"
    process.signal(signal.SIGINT)
    process.say("go on")
    assert process.result() == "ended well"


def test_what_the_work_raises_is_raised() -> None:
    def work(_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_orderly(object, work, lambda _: None)


@SIGNALS
def test_a_signal_that_comes_while_it_is_made_stops_it_as_soon_as_it_is(
    spawn: Spawn, number: int, end: str
) -> None:
    process = spawn(working, "made")
    assert process.hear() == "working"
    process.signal(number)
    process.say("go on")
    assert process.result() == end
