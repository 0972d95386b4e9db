"""A server has one leader, by whatever URL, channel or program it is led."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tensorlease.engines import leadership
from tensorlease.engines.leadership import leading
from tensorlease.engines.vllm_bridge import VLLMBridge
from tensorlease.engines.vllm_server import VLLMServer, name_of
from tensorlease.protocol.errors import ConfigError

from ..broker.raw_agents import Threaded, eventually
from .fake_vllm import FakeVLLM
from .sources import Source, at


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "WAIT_S", 0.2)


@pytest.fixture
def source(broker: Threaded, url: str) -> Iterator[Source]:
    made = Source(url)
    yield made
    made.trainer.close(0.5)


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    made = FakeVLLM()
    made.start()
    yield made
    made.die()


def bridge(url: str, channel: str, endpoint: str) -> VLLMBridge:
    server = VLLMServer(url)
    return VLLMBridge(server, channel, server.address, endpoint=endpoint, update_s=20.0)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("http://127.0.0.1:8311", "127.0.0.1:8311"),
        ("http://localhost:8311/", "127.0.0.1:8311"),
        ("http://LocalHost:8311", "127.0.0.1:8311"),
        ("http://[::1]:8311", "127.0.0.1:8311"),
        ("http://localhost", "127.0.0.1:80"),
        ("http://[fe80::1]:8000", "[fe80::1]:8000"),
        ("http://There:8000", "there:8000"),
        ("engine-3", "engine-3"),
    ],
)
def test_a_server_has_one_name_however_its_url_is_written(given: str, name: str) -> None:
    assert name_of(given) == name


@pytest.mark.parametrize(("host", "channel"), [("localhost", "policy"), ("127.0.0.1", "other")])
def test_a_second_leader_is_refused_by_the_firsts_pid_and_takes_nothing_from_it(
    source: Source, server: FakeVLLM, url: str, host: str, channel: str
) -> None:
    first = bridge(server.url, "policy", url)
    thread = threading.Thread(target=first.run)
    thread.start()
    try:
        assert source.publish(1).ok
        second = bridge(f"http://{host}:{server.port}/", channel, url)
        with pytest.raises(ConfigError, match=f"is led by pid {os.getpid()} already") as raised:
            second.run()
        assert f"http://127.0.0.1:{server.port}" in str(raised.value)
        assert server.calls.count("/init_weight_transfer_engine") == 1
        assert source.publish(2).ok
        assert at(server, 2)
    finally:
        first.stop()
        thread.join(20.0)
    assert not thread.is_alive()
    # The place is free again.
    thread = threading.Thread(target=second.run)
    thread.start()
    eventually(lambda: second.leads)
    second.stop()
    thread.join(20.0)
    assert not thread.is_alive()


def test_one_that_ends_soon_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "WAIT_S", 20.0)
    never, came = threading.Event(), threading.Event()

    def follow() -> None:
        with leading("there:1", never):
            came.set()

    with leading("there:1", never):
        thread = threading.Thread(target=follow)
        thread.start()
        assert not came.wait(0.3)
    assert came.wait(10.0)
    thread.join(10.0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_does_not_keep_its_parents_place() -> None:
    never = threading.Event()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with leading("there:2", never):
            child = os.fork()
            if child == 0:
                try:
                    ours.close()
                    theirs.recv(1)  # It lives until the parent has looked.
                finally:
                    os._exit(0)
        try:
            with leading("there:2", never):
                pass
        finally:
            ours.send(b"x")
            os.waitpid(child, 0)


@pytest.mark.program
def test_the_command_says_who_leads_in_one_line(url: str, broker: Threaded) -> None:
    with leading("127.0.0.1:9", threading.Event()):
        program = [sys.executable, "-P", "-m", "tensorlease.cli", "bridge", "vllm"]
        done = subprocess.run(
            [*program, f"--endpoint={url}", "--url=http://localhost:9"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode != 0
    assert done.stderr.count(f"is led by pid {os.getpid()} already") == 1, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
