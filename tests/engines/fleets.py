"""A trainer, and fake servers that take its versions in one of the ways that there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tensorlease.agents import RoundResult, TrainerAgent
from tensorlease.engines import VLLMControl
from tensorlease.protocol.records import ReplicaState

from .fake_stock_vllm import FakeStockVLLM
from .fake_vllm import FakeVLLM
from .sources import Source, StockSource, at, stock_at

WAYS = ["plugin", "sleep", "control", "unpacked", "packed", "ring"]
"""Our backend, led by a bridge; asleep meanwhile; led by the trainer. vLLM's backend `ipc`."""
STOCK = ("unpacked", "packed", "ring")


class Fleet:
    """Starts servers, publishes to all of them, and knows what they have."""

    def __init__(
        self, way: str, source: Source | StockSource, request: pytest.FixtureRequest
    ) -> None:
        self.way = way
        self.servers: list[FakeVLLM] = []
        self._source = source
        self._request = request
        self._control: VLLMControl | None = None
        self._names: dict[FakeVLLM, str] = {}

    @property
    def trainer(self) -> TrainerAgent:
        """Who publishes."""
        return self._source.trainer

    def start(self, name: str) -> FakeVLLM:
        """Starts a server that is led."""
        server: FakeVLLM
        if self.way in STOCK:
            lead = self._request.getfixturevalue("stock_led")
            server = lead(name, packed=self.way != "unpacked")
        elif self.way == "control":
            server = FakeVLLM(2)
            server.start()
            name = server.url.removeprefix("http://")
        else:
            server = self._request.getfixturevalue("led")(name, 2, sleep=self.way == "sleep")
        self.servers.append(server)
        self._names[server] = name
        return server

    def name_of(self, server: FakeVLLM) -> str:
        """Returns what its replica is called."""
        return self._names[server]

    def state_of(self, server: FakeVLLM) -> ReplicaState | None:
        """Returns what the broker last said of its replica."""
        return self.trainer.replicas.get(self.name_of(server))

    def publish(self, version: int, replicas: int = 1, value: int | None = None) -> RoundResult:
        """Publishes a version, whose values are the version or `value`, to so many servers."""
        if self.way == "control":
            self.control.wait_ready(self.trainer, 20.0)
        return self._source.publish(version, replicas, value=value)

    def has(self, server: FakeVLLM, version: int, value: int | None = None) -> bool:
        """Whether it has the version's bytes and label, and answers requests."""
        if isinstance(server, FakeStockVLLM):
            return stock_at(server, version, value)
        return at(server, version, value)

    @property
    def control(self) -> VLLMControl:
        """What leads the servers that were started before it was first asked for."""
        if self._control is None:
            self._control = VLLMControl(*(server.url for server in self.servers), update_s=20.0)
        return self._control

    def close(self) -> None:
        """Ends all of it."""
        if self._control is not None:
            self._control.close()
            for server in self.servers:
                server.die()
        self.trainer.close(0.5)


@contextmanager
def fleet_of(way: str, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A fleet that is led in this way."""
    url = request.getfixturevalue("url")
    request.getfixturevalue("broker")
    source: Source | StockSource
    if way in STOCK:
        request.getfixturevalue("stock_led")
        source = StockSource(url, ring=way == "ring")
    else:
        request.getfixturevalue("led")
        source = Source(url)
    fleet = Fleet(way, source, request)
    try:
        yield fleet
    finally:
        fleet.close()
