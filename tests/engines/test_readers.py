"""Which processes read for a server: those of its engine, as far as /proc shows them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tensorlease.engines.readers import living, readers_of

from ..broker.raw_agents import eventually

SERVER = """
import socket, subprocess, sys
listening = socket.create_server(("127.0.0.1", 0))
engine = subprocess.Popen(["VLLM::EngineCore", "60"], executable="/bin/sleep")
other = subprocess.Popen(["helper", "60"], executable="/bin/sleep")
print(listening.getsockname()[1], engine.pid, flush=True)
sys.stdin.read()
for each in (engine, other):
    each.kill()
    each.wait()
"""


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """A server's port, and the pid of its engine."""
    words = [sys.executable, "-c", SERVER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port, pid = map(int, process.stdout.readline().split())
        yield port, pid
        process.communicate()


def test_the_engine_below_a_listener_is_found_until_it_has_ended(server: tuple[int, int]) -> None:
    port, pid = server
    # It is another program until it has been executed.
    eventually(lambda: [process.pid for process in readers_of(port)] == [pid])
    found = readers_of(port)
    assert living(found) == [pid]
    subprocess.run(["kill", "-KILL", str(pid)], check=True)
    eventually(lambda: living(found) == [])


def test_where_nobody_listens_there_is_none(server: tuple[int, int]) -> None:
    assert readers_of(1) == []
