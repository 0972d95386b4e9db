"""Real processes for tests, forked from a server that has imported torch and tensorlease already.

    def child(url: str) -> int: ...            # at the top of a test module
    process = spawn(child, url)                # the fixture of tests/agents/conftest.py
    process.result(10.0)                       # what it returned; its traceback if it raised

A child talks with its test by `procs.say` and `procs.hear`, the test by `process.hear` and
`process.say`. `process.kill()`, `.stop()`, `.go_on()` send signals; `.join()` gives the exit code.
Everything has a deadline, and what still runs when a test ends is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parent.parent)
DEADLINE_S = 30.0
PRELOAD = [
    "torch",
    "pytest",
    "tensorlease.agents.trainer",
    "tensorlease.agents.worker",
    "tensorlease.broker.server",
]

_link: Connection | None = None


def say(words: Any) -> None:
    """In a child: tells the test something."""
    assert _link is not None
    _link.send(("said", words))


def hear(timeout_s: float = DEADLINE_S) -> Any:
    """In a child: waits for what the test says."""
    assert _link is not None
    if not _link.poll(timeout_s):
        raise TimeoutError(f"the test said nothing in {timeout_s} s")
    return _link.recv()


def _main(
    link: Connection,
    environ: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    global _link
    _link = link
    # The server, from which this was forked, has the environment of its own start.
    os.environ.clear()
    os.environ.update(environ)
    # A shell that begins the tests in its background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pid = os.getpid()
    try:
        result = function(*args)
    except BaseException:
        if os.getpid() == pid:  # and not a child that the function has forked
            link.send(("raised", traceback.format_exc()))
        raise
    link.send(("returned", result))


class Spawned:
    """A child of a test."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        context = _context()
        self._link, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_main, args=(theirs, dict(os.environ), function, args), daemon=True
        )
        with _importable():
            self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self._process.is_alive()

    def say(self, words: Any) -> None:
        """Tells the child something."""
        self._link.send(words)

    def hear(self, timeout_s: float = DEADLINE_S) -> Any:
        """Waits for what the child says next; its exception fails the test."""
        kind, words = self._next(timeout_s)
        assert kind == "said", f"it has ended: {words}"
        return words

    def result(self, timeout_s: float = DEADLINE_S) -> Any:
        """Waits for what the child's function returns; passes over what it says."""
        deadline = time.monotonic() + timeout_s
        while True:
            kind, words = self._next(max(0.0, deadline - time.monotonic()))
            if kind == "returned":
                return words

    def _next(self, timeout_s: float) -> tuple[str, Any]:
        assert self._link.poll(timeout_s), f"no word from pid {self.pid} in {timeout_s:.1f} s"
        try:
            kind, words = self._link.recv()
        except EOFError:
            raise AssertionError(f"pid {self.pid} ended with {self.join()}") from None
        assert kind != "raised", f"pid {self.pid} raised:\n{words}"
        return kind, words

    def kill(self) -> int:
        """SIGKILL; returns the exit code."""
        os.kill(self.pid, signal.SIGKILL)
        return self.join()

    def stop(self) -> None:
        """SIGSTOP: it lives, and does nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Sends any other signal."""
        os.kill(self.pid, number)

    def join(self, timeout_s: float = DEADLINE_S) -> int:
        """Waits for its end; returns its exit code, negative for a signal's number."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, f"pid {self.pid} still runs after {timeout_s} s"
        return code

    def close(self) -> None:
        """Ends it if it still runs."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(DEADLINE_S)
        self._link.close()
        self._process.close()


Spawn = Callable[..., Spawned]


@contextlib.contextmanager
def spawning() -> Iterator[Spawn]:
    """Gives the function that starts children, and ends them all."""
    made: list[Spawned] = []

    def spawn(function: Callable[..., Any], *args: Any) -> Spawned:
        made.append(Spawned(function, args))
        return made[-1]

    try:
        yield spawn
    finally:
        for process in made:
            process.close()


def _context() -> ForkServerContext:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Lets children import test modules by the names that pytest gave them."""
    sys.path.append(ROOT)
    try:
        yield
    finally:
        sys.path.remove(ROOT)


# ---------------------------------------------------------------- a broker in a process


def serve_broker(url: str, durations: dict[str, float] | None = None) -> None:
    """A broker as a child: says "ready" when it listens, and runs until it is stopped."""
    import asyncio

    from tensorlease.broker.config import BrokerConfig, Durations, Limits
    from tensorlease.broker.server import Broker

    async def main() -> None:
        config = BrokerConfig(
            endpoints=(url,),
            limits=Limits(max_agents=64),
            durations=Durations(**(durations or {})),
        )
        broker = Broker(config, environ={})
        serving = asyncio.ensure_future(broker.serve())
        waiting = asyncio.ensure_future(broker.started.wait())
        await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not serving.done():
            say("ready")
        await serving

    asyncio.run(main())


def broker_process(spawn: Spawn, url: str, durations: dict[str, float] | None = None) -> Spawned:
    """Starts a broker in a process; it listens when this returns."""
    process = spawn(serve_broker, url, durations)
    assert process.hear() == "ready"
    return process
