"""Fixtures of tests of engines: brokers and trainers as the agents' tests have them; servers that are led."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from tensorlease.agents import TrainerAgent
from tensorlease.engines import vllm_bridge
from tensorlease.engines.vllm_bridge import VLLMBridge
from tensorlease.engines.vllm_ipc_bridge import VLLMIpcBridge
from tensorlease.engines.vllm_server import VLLMServer

from ..agents.conftest import broker, ring_trainer, spawn, start_broker, trainer, url
from ..agents.fake_cuda import UUIDS
from ..broker.raw_agents import Threaded
from .fake_stock_vllm import FakeStockVLLM, Segments, passing_for_gpu
from .fake_vllm import FakeVLLM
from .sources import Source, StockSource

__all__ = ["broker", "left", "ring_trainer", "spawn", "start_broker", "trainer", "url"]

Led = Callable[..., FakeVLLM]
StockLed = Callable[..., FakeStockVLLM]
Leaders = list[tuple[VLLMBridge, threading.Thread]]


@contextmanager
def left(trainer: TrainerAgent, version: int) -> Iterator[None]:
    """A round of which one tensor, `w`, has been sent, and that is void when the block has ended."""
    with (
        pytest.raises(RuntimeError, match="went wrong"),
        trainer.open_round(version, timeout=20.0) as r,
    ):
        r.send("w", torch.ones(3))
        r.flush()
        yield
        raise RuntimeError("training went wrong")


@pytest.fixture
def source(broker: Threaded, url: str) -> Iterator[Source]:
    """A trainer of one tensor."""
    made = Source(url)
    yield made
    made.trainer.close(0.5)


def start_leader(server: FakeVLLM, leader: VLLMBridge, leaders: Leaders) -> None:
    """Has a server led from now on, in a thread."""
    server.leader = leader
    thread = threading.Thread(target=leader.run)
    thread.start()
    leaders.append((leader, thread))


def end_leaders(leaders: Leaders) -> None:
    """Ends them all, and waits for it."""
    for leader, thread in leaders:
        leader.stop()
        thread.join(30.0)
        assert not thread.is_alive()


@pytest.fixture
def led(broker: Threaded, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Led]:
    """Starts servers that are led: `led("a", world_size=2)`."""
    monkeypatch.setattr(vllm_bridge, "LOOK_S", 0.1)
    servers: list[FakeVLLM] = []
    leaders: Leaders = []

    def lead(
        replica: str,
        world_size: int = 1,
        *,
        there: bool = True,
        devices: Sequence[str] = (),
        device: str = "cpu:0",
        server: FakeVLLM | None = None,
        sleep: bool = False,
    ) -> FakeVLLM:
        made = server or FakeVLLM(world_size, devices)
        servers.append(made)
        made.start()
        if not there:
            made.die()
        leader = VLLMBridge(
            VLLMServer(made.url),
            "policy",
            replica,
            endpoint=url,
            device=device,
            update_s=20.0,
            sleep=sleep,
        )
        start_leader(made, leader, leaders)
        return made

    yield lead
    for server in servers:
        server.let_go()
    end_leaders(leaders)
    for server in servers:
        server.die()


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> Segments:
    """Shared memory of this process's trainers passes for that of a GPU."""
    return passing_for_gpu(monkeypatch)


@pytest.fixture(params=["unpacked", "packed", "ring"])
def way(request: pytest.FixtureRequest) -> str:
    """How tensors come to a stock server."""
    return str(request.param)


@pytest.fixture
def stock_source(
    broker: Threaded, url: str, segments: Segments, request: pytest.FixtureRequest
) -> Iterator[StockSource]:
    """What publishes: a ring where the test's way is one."""
    ring = "way" in request.fixturenames and request.getfixturevalue("way") == "ring"
    made = StockSource(url, ring=ring)
    yield made
    made.trainer.close(0.5)


@pytest.fixture
def stock_led(
    broker: Threaded, url: str, segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StockLed]:
    """Starts stock servers that are led: `stock_led("a", packed=True)`."""
    monkeypatch.setattr(vllm_bridge, "LOOK_S", 0.1)
    servers: list[FakeStockVLLM] = []
    leaders: Leaders = []

    def lead(
        replica: str,
        *,
        packed: bool = False,
        most: int = 2**20,
        gpus: Sequence[str] = UUIDS[:1],
        devices: Sequence[str] = ("cpu:0",),
        update_s: float = 20.0,
    ) -> FakeStockVLLM:
        server = FakeStockVLLM(segments, gpus)
        servers.append(server)
        server.start()
        leader = VLLMIpcBridge(
            VLLMServer(server.url),
            "policy",
            replica,
            endpoint=url,
            devices=devices,
            update_s=update_s,
            packed=packed,
            packed_bytes=most,
        )
        start_leader(server, leader, leaders)
        return server

    yield lead
    for server in servers:
        server.let_go()
    end_leaders(leaders)
    for server in servers:
        server.die()
