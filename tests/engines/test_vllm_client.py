"""An engine behind a client of vLLM's protocol is led as a server is, and its failures are named."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorlease.agents import TrainerAgent, WorkerAgent
from tensorlease.engines import VLLMControl
from tensorlease.engines.member import EngineMember, Tensors
from tensorlease.engines.vllm_client import ClientServer
from tensorlease.engines.vllm_server import ServerError
from tensorlease.protocol.errors import ConfigError
from tensorlease.protocol.records import Fate, Outcome

from .sources import is_fate


class Client:
    """Reaches an engine of one worker in this process; `fails` makes a call raise, once."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.member: EngineMember | None = None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails.pop(name)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._called("init")
        self.close()
        worker = WorkerAgent(member=1, **init_info)
        self.member = EngineMember(worker, self._load)

    def start_weight_update(self) -> None:
        self._called("start")
        assert self.member is not None
        self.member.begin(copied=False)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._called("update")
        assert self.member is not None
        self.member.receive(**update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._called(f"finish {weight_version}")

    def close(self) -> None:
        if self.member is not None:
            self.member.close()

    def _load(self, tensors: Tensors) -> None:
        self.weights.update((name, tensor.clone()) for name, tensor in tensors)


class OldClient(Client):
    """Of a vLLM whose clients take no version."""

    def finish_weight_update(self) -> None:  # type: ignore[override]
        self._called("finish")


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client()
    yield made
    made.close()


def test_an_engine_behind_a_client_is_led_through_rounds(
    trainer: TrainerAgent, client: Client
) -> None:
    with VLLMControl(ClientServer(client, workers=1)) as control:
        for version in (1, 2):
            result = trainer.publish(version, timeout=30.0, control=control)
            assert sorted(result.raise_for_status().receivers) == ["vllm/0", "vllm/1"]
    rounds = [["start", "update", f"finish {version}"] for version in (1, 2)]
    assert client.calls == ["init", *rounds[0], *rounds[1]]
    assert client.weights["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("call", "fate"),
    [("start", Fate.EXPELLED), ("update", Fate.LOST), ("finish 1", Fate.TORN)],
)
def test_what_a_client_raises_is_named_and_the_next_version_repairs_it(
    trainer: TrainerAgent, client: Client, call: str, fate: Fate
) -> None:
    with VLLMControl(ClientServer(client, workers=1)) as control:
        client.fails[call] = RuntimeError("engine core died")
        if call == "start":
            # Its leader finishes what may be open, and begins again: that has to fail, too.
            client.fails["finish None"] = RuntimeError("none is open")
        result = trainer.publish(1, timeout=30.0, control=control)
        assert result.outcome is Outcome.FAILED or result.receivers["vllm/0"].fate is Fate.TORN
        assert is_fate(result.receivers["vllm/0"].fate, fate), result
        if fate is not Fate.LOST:
            assert "engine core died" in result.receivers["vllm/0"].reason
        assert trainer.publish(2, timeout=30.0, control=control).ok


def test_a_client_that_does_not_return_is_given_up(client: Client) -> None:
    server = ClientServer(client, workers=1)
    go = threading.Event()
    client.start_weight_update = go.wait  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(ServerError, match=r"start_weight_update has not answered in 0\.2 s"):
            server.post("/start_weight_update", None, 0.2)
    finally:
        go.set()


def test_a_client_that_takes_no_version_is_not_given_one() -> None:
    client = OldClient()
    ClientServer(client, workers=1).post("/finish_weight_update", {"weight_version": "7"}, 5.0)
    assert client.calls == ["finish"]


def test_what_cannot_tell_how_many_workers_it_has_is_asked_for_it(client: Client) -> None:
    with pytest.raises(ConfigError, match="a Client does not tell how many workers .* workers="):
        ClientServer(client)
    client.handles = [object(), object()]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="the client has 2 engines, and a replica is one"):
        ClientServer(client, workers=1)


def test_a_held_engine_is_not_one_that_the_leader_holds(client: Client) -> None:
    server = ClientServer(client, "policy-engine", workers=4)
    assert (server.url, server.world_size(), server.is_paused()) == ("policy-engine", 4, False)
    for path in ("/pause", "/resume", "/reset_prefix_cache"):
        server.post(path, None, 5.0, mode="keep")
    assert client.calls == []
