"""Fixtures for tests with a real broker: its place, brokers, processes and raw agents."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest
import zmq

from .raw_agents import Child, Raw, Spawn, Threaded, config_for


@pytest.fixture
def url() -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="tl-")
    yield f"ipc://{directory}/b.sock"
    shutil.rmtree(directory)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made
        while Raw.made:
            Raw.made.pop().close()


@pytest.fixture
def raw(context: zmq.Context[zmq.Socket[bytes]], url: str) -> Callable[[], Raw]:
    return lambda: Raw(context, url)


@pytest.fixture
def threaded(url: str) -> Iterator[Threaded]:
    made = Threaded(config_for(url))
    yield made
    made.stop()
    if made.error is not None:
        raise made.error


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    children: list[Child] = []

    def start(*words: str, **options: object) -> Child:
        children.append(Child(*words, **options))
        return children[-1]

    yield start
    for child in children:
        child.close()
