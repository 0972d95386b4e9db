"""Signals reach the broker's loop: each once, also those that come close behind one another."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from tensorlease.broker.config import UvloopChoice
from tensorlease.broker.loops import choose_loop
from tensorlease.broker.signals import Signals


@pytest.mark.parametrize("uvloop", list(UvloopChoice))
def test_a_signal_that_comes_while_another_is_seen_to_is_heard_once(uvloop: UvloopChoice) -> None:
    heard: list[str] = []

    async def main() -> None:
        loop, came = asyncio.get_running_loop(), asyncio.Event()

        def note() -> None:
            heard.append("TERM")
            came.set()

        signals = Signals(loop)
        signals.install({signal.SIGTERM: note})
        # From another thread, when this one sleeps in the loop.
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        await came.wait()
        await asyncio.sleep(0.1)
        signals.restore()

    # It comes just when the loop looks which signals there were.
    former = signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with asyncio.Runner(loop_factory=choose_loop(uvloop)) as runner:
            runner.run(asyncio.wait_for(main(), 20.0))
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert heard == ["TERM"]


@pytest.mark.parametrize("uvloop", list(UvloopChoice))
def test_afterwards_the_handlers_are_those_that_there_were_before(uvloop: UvloopChoice) -> None:
    came: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        signals, heard = Signals(loop), asyncio.Event()
        signals.install({signal.SIGHUP: heard.set})
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(heard.wait(), 10.0)
        signals.restore()

    former = signal.signal(signal.SIGHUP, lambda number, _: came.append(number))
    try:
        with asyncio.Runner(loop_factory=choose_loop(uvloop)) as runner:
            runner.run(main())
        assert not came
        os.kill(os.getpid(), signal.SIGHUP)
        assert came == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_broker_in_a_thread_leaves_signals_alone() -> None:
    former = signal.getsignal(signal.SIGHUP)

    async def main() -> None:
        Signals(asyncio.get_running_loop()).install({signal.SIGHUP: lambda: None})

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGHUP) is former
