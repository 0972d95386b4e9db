"""Servers are led by the trainer's own process: what `publish(control=)` waits for, and reports."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from tensorlease.agents import TrainerAgent, WorkerAgent
from tensorlease.engines import VLLMControl, vllm_bridge
from tensorlease.protocol.errors import ClosedError, ConfigError, DeadlineError, RefusedError
from tensorlease.protocol.records import Fate

from ..broker.raw_agents import eventually
from .fake_vllm import FakeVLLM
from .sources import Source, at, is_fate
from .test_vllm_bridge import UPDATE


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeVLLM]]:
    """Two servers that listen, of one and two workers."""
    monkeypatch.setattr(vllm_bridge, "LOOK_S", 0.1)
    made = [FakeVLLM(1), FakeVLLM(2)]
    for server in made:
        server.start()
    yield made
    for server in made:
        server.die()


@pytest.fixture
def control(servers: list[FakeVLLM]) -> Iterator[VLLMControl]:
    """Leads both."""
    with VLLMControl(*(server.url for server in servers), update_s=20.0) as made:
        yield made
    assert all(thread.name != "tensorlease-control" for thread in threading.enumerate())


def names(servers: list[FakeVLLM]) -> list[str]:
    return [server.url.removeprefix("http://") for server in servers]


def test_a_published_version_waits_for_the_servers_and_is_theirs(
    source: Source, servers: list[FakeVLLM], control: VLLMControl
) -> None:
    for version in (1, 2):
        for server in servers:
            server.calls.clear()
        source.trainer.wait_writable(20.0)
        source.write(version)
        result = source.trainer.publish(version, timeout=30.0, control=control)
        assert result.ok, result
        assert sorted(result.replicas) == sorted(names(servers))
        for server in servers:
            assert [call for call in server.calls if "/init" not in call] == UPDATE
            assert at(server, version)


async def test_so_does_one_that_is_published_by_a_coroutine(
    source: Source, servers: list[FakeVLLM], control: VLLMControl
) -> None:
    source.write(1)
    result = await source.trainer.apublish(1, timeout=30.0, control=control)
    assert result.ok, result
    assert all(at(server, 1) for server in servers)


def test_other_ways_to_publish_wait_by_themselves(
    ring_trainer: TrainerAgent, servers: list[FakeVLLM], control: VLLMControl
) -> None:
    control.wait_ready(ring_trainer, 20.0)
    assert sorted(ring_trainer.replicas) == sorted(names(servers))
    ring_trainer.publish_stream(1, [("w", torch.full((3,), 1.0))], timeout=20.0).raise_for_status()
    assert all(at(server, 1) for server in servers)


def test_a_server_that_does_not_answer_is_not_waited_for_and_named_if_there_is_no_other(
    source: Source, servers: list[FakeVLLM], control: VLLMControl
) -> None:
    good, bad = servers
    bad.die()
    source.write(1)
    assert source.trainer.publish(1, timeout=30.0, control=control).ok
    assert at(good, 1)
    good.die()
    eventually(lambda: not any(state.ready for state in source.trainer.replicas.values()))
    with pytest.raises(DeadlineError, match="does not answer") as raised:
        source.trainer.publish(2, timeout=1.0, control=control)
    for server in servers:
        assert server.url in str(raised.value)
    assert source.trainer.last_version == 1
    for server in servers:
        server.start()
    source.write(3)
    # Who has just come again is not known to answer yet: the round itself waits for both.
    assert source.trainer.publish(3, timeout=30.0, control=control, min_replicas=2).ok
    assert all(at(server, 3) for server in servers)


@pytest.mark.parametrize(
    ("path", "fate"),
    [("/update_weights", Fate.LOST), ("/finish_weight_update", Fate.TORN)],
)
def test_a_server_that_fails_is_named_and_the_next_published_version_repairs_it(
    source: Source, servers: list[FakeVLLM], control: VLLMControl, path: str, fate: Fate
) -> None:
    bad = servers[1]
    source.write(1)
    assert source.trainer.publish(1, timeout=30.0, control=control).ok
    bad.fails[path] = "engine core died"
    result = source.trainer.publish(2, timeout=30.0, control=control)
    of_good, of_bad = (f"{name}/0" for name in names(servers))
    assert result.receivers[of_good].fate is Fate.COMMITTED
    assert is_fate(result.receivers[of_bad].fate, fate), result
    assert bad.paused
    source.trainer.wait_writable(20.0)
    source.write(3)
    # No replica is waited for but by the control: the bad one has to join again.
    assert source.trainer.publish(3, timeout=30.0, control=control).ok
    assert all(at(server, 3) for server in servers)


def test_a_place_that_is_taken_is_raised(
    source: Source, url: str, servers: list[FakeVLLM], control: VLLMControl
) -> None:
    (name, _) = names(servers)
    with WorkerAgent("policy", replica=name, size=2, endpoint=url) as taken:
        taken.attend()
        with pytest.raises(RefusedError, match=f"{name} is led by another.*held by pid") as raised:
            source.trainer.publish(1, timeout=20.0, control=control)
    assert "another replica or member" not in str(raised.value)
    frames = [entry.name for entry in raised.traceback]
    assert frames[-1] == "wait_ready"


def test_it_leads_for_one_channel_and_not_after_it_was_closed(
    source: Source, url: str, control: VLLMControl
) -> None:
    assert source.trainer.publish(1, timeout=30.0, control=control).ok
    with TrainerAgent("critic", endpoint=url) as other:
        other.register({"w": torch.ones(3)})
        with pytest.raises(ConfigError, match="leads for channel 'policy' .* not for 'critic'"):
            other.publish(1, timeout=10.0, control=control)
    control.close()
    eventually(lambda: not any(state.ready for state in source.trainer.replicas.values()))
    with pytest.raises(ClosedError, match="make another"):
        source.trainer.publish(2, timeout=10.0, control=control)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_neither_uses_nor_ends_it(
    source: Source, servers: list[FakeVLLM], control: VLLMControl
) -> None:
    assert source.trainer.publish(1, timeout=30.0, control=control).ok
    child = os.fork()
    if child == 0:
        try:
            control.close()
            control._lead_for(source.trainer)
        except ClosedError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert source.trainer.publish(2, timeout=30.0, control=control).ok


def test_addresses_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="no server"):
        VLLMControl()
    with pytest.raises(ConfigError, match="a server's URL, '127.0.0.1:8000': must be like http"):
        VLLMControl("127.0.0.1:8000")
