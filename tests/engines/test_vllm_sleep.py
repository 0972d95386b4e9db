"""A server sleeps during an update, but for its weights; each failure leaves a state that is named."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tensorlease.engines import vllm_bridge
from tensorlease.engines.vllm_bridge import VLLMBridge
from tensorlease.engines.vllm_hold import Hold, HoldState
from tensorlease.engines.vllm_server import ServerError, VLLMServer
from tensorlease.protocol.records import Fate

from ..broker.raw_agents import Threaded, eventually
from .fake_vllm import FakeVLLM
from .sources import Source, at, is_fate

SLEEP = "/sleep?level=1&mode=keep"
WEIGHTS = "/wake_up?tags=weights"
REST = "/wake_up?tags=kv_cache&tags=scheduling"
ALL = "/wake_up"
UPDATE = [
    SLEEP,
    WEIGHTS,
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    REST,
]


@pytest.fixture
def server(broker: Threaded, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVLLM]:
    """A server that is led, and sleeps during updates."""
    monkeypatch.setattr(vllm_bridge, "LOOK_S", 0.1)
    made = FakeVLLM(2)
    made.start()
    made.leader = VLLMBridge(
        VLLMServer(made.url), "policy", "a", endpoint=url, update_s=20.0, sleep=True
    )
    thread = threading.Thread(target=made.leader.run)
    thread.start()
    yield made
    made.leader.stop()
    thread.join(20.0)
    made.die()


def test_it_sleeps_wakes_its_weights_is_updated_and_wakes_the_rest(
    source: Source, server: FakeVLLM
) -> None:
    for version in (1, 2):
        server.calls.clear()
        assert source.publish(version).ok
        assert [call for call in server.calls if "/init" not in call] == UPDATE
        assert at(server, version)
        assert not server.sleeping
        assert server.leader.hold.state is HoldState.SERVING


def test_one_that_sleeps_already_is_updated_too(source: Source, server: FakeVLLM) -> None:
    assert source.publish(1).ok
    VLLMServer(server.url).post("/sleep", None, 5.0, level="1")
    assert server.sleeping
    assert source.publish(2).ok
    assert at(server, 2)
    assert not server.sleeping


@pytest.mark.parametrize(
    ("fails", "fate", "said", "left", "sleeping"),
    [
        ([SLEEP], Fate.EXPELLED, "left serving", HoldState.SERVING, set()),
        ([WEIGHTS], Fate.EXPELLED, "left asleep", HoldState.SERVING, set()),
        ([SLEEP, ALL], Fate.EXPELLED, "left serving", HoldState.SERVING, set()),
        (
            [WEIGHTS, ALL],
            Fate.EXPELLED,
            "left asleep",
            HoldState.ASLEEP,
            {"weights", "kv_cache"},
        ),
        (["/update_weights"], Fate.LOST, "", HoldState.WEIGHTS_AWAKE, {"kv_cache"}),
        (["/finish_weight_update"], Fate.TORN, "", HoldState.WEIGHTS_AWAKE, {"kv_cache"}),
        (
            [REST],
            Fate.TORN,
            "left held with its weights awake and without KV cache",
            HoldState.WEIGHTS_AWAKE,
            {"kv_cache"},
        ),
    ],
)
def test_each_place_that_fails_leaves_a_state_that_is_named_and_the_next_round_repairs_it(
    source: Source,
    server: FakeVLLM,
    fails: list[str],
    fate: Fate,
    said: str,
    left: HoldState,
    sleeping: set[str],
) -> None:
    assert source.publish(1).ok
    server.fails = dict.fromkeys(fails, "engine core died")
    result = source.publish(2)
    assert is_fate(result.receivers["a/0"].fate, fate), result
    if said:
        assert result.receivers["a/0"].reason.endswith(f"engine core died; the server is {said}")
    eventually(lambda: server.leader.hold.state is left and server.sleeping == sleeping)
    # What is asleep, or has half of a version, answers no request.
    assert server.paused is (left is not HoldState.SERVING)
    server.fails.clear()
    assert source.publish(3).ok
    assert at(server, 3)
    assert not server.sleeping


def test_a_server_that_does_not_answer_may_be_in_either_state() -> None:
    server = FakeVLLM()
    server.start()
    hold = Hold(VLLMServer(server.url), "keep", True, lambda: 0.3)
    gate = server.hold("/sleep")
    try:
        with pytest.raises(ServerError, match=r"in 0\.3 s; the server is left serving, or asleep"):
            hold.begin()
    finally:
        gate.go.set()
        server.die()


def test_a_server_that_is_paused_already_is_left_so_whatever_it_answers() -> None:
    server = FakeVLLM()
    server.start()
    try:
        hold = Hold(VLLMServer(server.url), "keep", False, lambda: 5.0)
        hold.begin()
    finally:
        server.die()
    with pytest.raises(ServerError, match=r"; the server is left paused$"):
        hold.begin()


def test_a_server_that_says_that_it_sleeps_on_is_not_taken_for_one_that_goes_on() -> None:
    server = FakeVLLM()
    server.start()
    try:
        hold = Hold(VLLMServer(server.url), "keep", True, lambda: 5.0)
        hold.begin()
        server.sleeping = {"weights"}  # Of the two tags the other is awake: none wakes.
        with pytest.raises(ServerError, match="answered 'sleeping'; the server is left held"):
            hold.end()
        hold.undo()
        assert not server.sleeping
    finally:
        server.die()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_server_without_sleep_mode_is_named(
    broker: Threaded, url: str, enabled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = FakeVLLM()
    server.info = {"vllm_config": {"model_config": {"enable_sleep_mode": enabled}}}
    server.start()
    bridge = VLLMBridge(VLLMServer(server.url), "policy", "a", endpoint=url, sleep=True)
    thread = threading.Thread(target=bridge.run)
    thread.start()
    eventually(lambda: bridge.leads)
    bridge.stop()
    thread.join(20.0)
    server.die()
    assert ("without --enable-sleep-mode" in caplog.text) is not enabled
