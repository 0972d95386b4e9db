"""The bridge of a stock server is killed while the server reads: the memory is kept until it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tensorlease.agents import RoundHandle
from tensorlease.protocol.records import Fate

from ..broker.raw_agents import Threaded, eventually
from ..procs import Spawned
from .fake_stock_vllm import FakeStockVLLM, Segments
from .fake_vllm import Gate
from .sources import StockSource as Source
from .sources import stock_at as at

pytestmark = pytest.mark.program

ENGINE = """
import subprocess, sys
engine = subprocess.Popen(["VLLM::EngineCore", "600"], executable="/bin/sleep", stdout=subprocess.DEVNULL)
print(engine.pid, flush=True)
sys.stdin.read()
"""
PROGRAM = [sys.executable, "-P", "-m", "tensorlease.cli"]


class Scene:
    """A server that is led, and a trainer that publishes to it."""

    def __init__(self, url: str, segments: Segments) -> None:
        self.url = url
        self.server = FakeStockVLLM(segments)
        self.server.start()
        self.source = Source(url)
        # Processes that read for it, below one that may end before them.
        self.above: subprocess.Popen[bytes] | None = None
        self.readers: list[int] = []
        self.bridges: list[subprocess.Popen[bytes]] = []
        self.stall: Gate = self.server.stall()

    def name_readers(self) -> int:
        """Gives the server a process that reads for it, which a bridge finds; returns its pid."""
        words = [sys.executable, "-c", ENGINE]
        self.above = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        assert self.above.stdout is not None
        self.readers.append(int(self.above.stdout.readline()))
        return self.readers[-1]

    def replace(self) -> None:
        """Another server listens where it did, while what reads for the former one lives on."""
        self.end_above()
        self.name_readers()

    def end_above(self) -> None:
        if self.above is not None:
            self.above.kill()
            self.above.communicate()

    def kill_readers(self) -> None:
        while self.readers:
            os.kill(self.readers.pop(), signal.SIGKILL)

    def bridge(self) -> subprocess.Popen[bytes]:
        words = ["bridge", "vllm", "--channel=policy", "--mode=ipc"]
        words += [f"--url={self.server.url}", f"--endpoint={self.url}"]
        self.bridges.append(subprocess.Popen([*PROGRAM, *words]))
        return self.bridges[-1]

    def kill_bridge_in_an_update(self) -> RoundHandle:
        """Publishes a version; its bridge is killed while the server reads."""
        bridge = self.bridge()
        self.source.trainer.wait_ready(timeout=30.0)
        handle = self.source.trainer.publish_nowait(1)
        assert self.stall.came.wait(20.0)
        bridge.kill()
        bridge.wait()
        return handle

    def reason(self) -> str:
        """Returns why the server's replica is not ready; empty: it is, or is not there."""
        return next((each.reason for each in self.source.trainer.replicas.values()), "")

    def status(self) -> str:
        words = [*PROGRAM, "status", f"--endpoint={self.url}"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30.0)
        return done.stdout

    def close(self) -> None:
        self.stall.go.set()
        for process in self.bridges:
            process.kill()
            process.wait()
        self.kill_readers()
        self.end_above()
        self.server.die()
        self.source.trainer.close(0.5)


@pytest.fixture
def scene(broker: Threaded, url: str, segments: Segments) -> Iterator[Scene]:
    made = Scene(url, segments)
    yield made
    made.close()


def test_it_is_lost_at_once_and_the_next_bridge_finds_out_that_nothing_is_read_any_more(
    scene: Scene,
) -> None:
    source, server = scene.source, scene.server
    handle = scene.kill_bridge_in_an_update()
    result = handle.finished.wait(20.0)
    assert [each.fate for each in result.receivers.values()] == [Fate.LOST]
    assert "who read for it cannot be named" in result.reason
    assert server.paused
    eventually(lambda: handle.stuck)
    assert not source.trainer.may_write()
    assert "which has ended: who read for it cannot be named" in scene.status()
    seen = len(server.calls)
    bridge = scene.bridge()
    eventually(lambda: "whether anything still reads" in scene.reason(), 30.0)
    eventually(lambda: "/finish_weight_update" in server.calls[seen:])
    assert not handle.released.done
    assert not source.trainer.may_write()
    scene.stall.go.set()
    handle.released.wait(20.0)
    assert source.publish(2).ok
    assert at(server, 2)
    bridge.terminate()
    assert bridge.wait(20.0) == 0


def test_the_memory_comes_back_when_the_servers_processes_have_ended(scene: Scene) -> None:
    pid = scene.name_readers()
    handle = scene.kill_bridge_in_an_update()
    result = handle.finished.wait(20.0)
    assert f"pid {pid} may still be reading for it" in result.reason
    eventually(lambda: handle.stuck)
    assert handle.stuck[0].readers == [pid]
    assert not scene.source.trainer.may_write()
    scene.kill_readers()
    handle.released.wait(20.0)
    assert scene.source.trainer.may_write()


def test_a_new_servers_word_is_none_for_processes_of_the_one_that_it_replaced(
    scene: Scene,
) -> None:
    scene.name_readers()
    handle = scene.kill_bridge_in_an_update()
    handle.finished.wait(20.0)
    scene.stall.go.set()
    scene.replace()
    # The new one would answer at once; what the former had read has not ended.
    bridge = scene.bridge()
    eventually(lambda: "whether anything still reads" in scene.reason(), 30.0)
    bridge.terminate()
    assert bridge.wait(20.0) == 0
    assert "/finish_weight_update" not in scene.server.calls
    assert not handle.released.done
    scene.kill_readers()
    handle.released.wait(20.0)


@pytest.mark.parametrize("first", ["bridge", "broker"])
def test_a_broker_that_is_killed_too_and_started_again_keeps_it_all_the_same(
    start_broker: Callable[..., Spawned], url: str, segments: Segments, first: str
) -> None:
    broker = start_broker(recovery=3.0)
    scene = Scene(url, segments)
    pid = scene.name_readers()
    try:
        if first == "bridge":
            handle = scene.kill_bridge_in_an_update()
            handle.finished.wait(20.0)
            broker.kill()
        else:
            bridge = scene.bridge()
            scene.source.trainer.wait_ready(timeout=30.0)
            handle = scene.source.trainer.publish_nowait(1)
            assert scene.stall.came.wait(20.0)
            calls = scene.source.trainer._core.state.calls
            eventually(lambda: calls[1].receivers is not None)
            broker.kill()
            bridge.kill()
            bridge.wait()
        start_broker(recovery=3.0)
        # The new one has settled the bridge's death, and says what it keeps.
        eventually(lambda: handle.stuck and handle.stuck[0].readers == [pid], 20.0)
        result = handle.finished.wait(20.0)
        assert [each.fate for each in result.receivers.values()] == [Fate.LOST]
        assert not handle.released.done
        assert not scene.source.trainer.may_write()
        scene.stall.go.set()
        scene.bridge()
        handle.released.wait(30.0)
        assert scene.source.publish(2).ok
        assert at(scene.server, 2)
    finally:
        scene.close()
