"""What the whole suite shares: a test whose machine lacks something is skipped, and says what."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from .examples import EXAMPLES

# Threads that may outlast a test: of servers whose clients are still there, of the one pool of a
# process for copies, of pyzmq, of multiprocessing.
STAY = ("process_request_thread", "tensorlease-copy", "GarbageCollectorThread", "(_serve)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        spawns = "spawn" in getattr(item, "fixturenames", ())
        if spawns and item.get_closest_marker("program") is None:
            item.add_marker("process")
        reason = _lacking(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _lacking(item: pytest.Item) -> str | None:
    if item.get_closest_marker("root") is not None and os.geteuid() != 0:
        return "needs root"
    wanted = max(
        (count for name, count in (("gpu", 1), ("gpu2", 2)) if item.get_closest_marker(name)),
        default=0,
    )
    if wanted == 0:
        return None
    # Only here: torch's import takes longer than all tests that do without it.
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"needs {wanted} CUDA device(s), {found} here" if found < wanted else None


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Each test closes its agents, and ends the threads that it has begun."""
    before = set(threading.enumerate())
    yield from agents_closed(10.0)
    deadline = time.monotonic() + 10.0
    for thread in set(threading.enumerate()) - before:
        if any(name in str(thread) for name in STAY):
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"a thread was left behind: {thread}"


def agents_closed(seconds: float) -> Iterator[None]:
    """Sees to it that what is done meanwhile leaves no agent; not where one was left before."""
    if _shared_threads():  # Who left it was told: nobody else is to be blamed, nor to wait.
        yield
        return
    yield
    await_no_agent(seconds)


def await_no_agent(seconds: float) -> None:
    """Waits until the thread has ended that all agents of a process share; else names those left.

    Where an exception has kept one, the garbage collector ends it.
    """
    for thread in _shared_threads():
        thread.join(seconds / 2)
        if thread.is_alive():
            gc.collect()
            thread.join(seconds / 2)
        assert not thread.is_alive(), f"agents were left behind: {_agents()}"


def _shared_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tensorlease"]


def _agents() -> str:
    from tensorlease.agents.agent import Agent

    # Not what they are taken for: some objects warn when they are asked.
    agents = [each for each in gc.get_objects() if issubclass(type(each), Agent)]
    return ", ".join(f"{each!r}{' (closed)' if each.closed else ''}" for each in agents)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the examples."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def example(name: str) -> ModuleType:
        return importlib.import_module(name)

    return example


@pytest.fixture
def peers_forgotten() -> Iterator[None]:
    """What a test imports of other projects is not there for the next one."""
    yield
    for name in list(sys.modules):
        if name.partition(".")[0] in ("verl", "sglang", "checkpoint_engine"):
            del sys.modules[name]
