"""What a bridge says of a server that it cannot lead: why, what to do, and rarely."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from tensorlease.engines import VLLMControl, rarely, vllm_bridge
from tensorlease.engines.rarely import Rarely
from tensorlease.engines.vllm_bridge import VLLMBridge
from tensorlease.engines.vllm_ipc_bridge import VLLMIpcBridge
from tensorlease.engines.vllm_server import VLLMServer
from tensorlease.protocol.errors import DeadlineError

from ..broker.raw_agents import Threaded, eventually
from .fake_vllm import FakeVLLM
from .sources import Source

NOT_THERE = (404, "Not Found")
OF_IPC = "IPCWeightTransferInitInfo.__init__() got an unexpected keyword argument 'channel'"
OF_OURS = "InitInfo.__init__() got an unexpected keyword argument 'packed'"
NONE = "Weight transfer not configured. Please set weight_transfer_config"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVLLM]:
    monkeypatch.setattr(vllm_bridge, "LOOK_S", 0.02)
    made = FakeVLLM()
    made.start()
    yield made
    made.die()


def said_of(bridge: VLLMBridge, caplog: pytest.LogCaptureFixture, times: int = 1) -> list[str]:
    """What a bridge has said once so much was said, and no more while it looked 20 times again."""
    looks: list[float] = []
    wait = bridge._ending.wait

    def waited(timeout: float | None = None) -> bool:
        looks.append(0.0)
        return wait(timeout)

    bridge._ending.wait = waited  # type: ignore[method-assign]
    caplog.clear()

    def lines() -> list[str]:
        named = [r for r in caplog.records if r.name == "tensorlease.engines"]
        return [record.getMessage() for record in named]

    thread = threading.Thread(target=bridge.run)
    with caplog.at_level(logging.INFO, "tensorlease.engines"):
        thread.start()
        eventually(lambda: len(lines()) >= times)
        seen = len(looks)
        eventually(lambda: len(looks) > seen + 40)
        bridge.stop()
        thread.join(20.0)
    assert not thread.is_alive()
    return lines()


@pytest.mark.parametrize(
    ("mode", "path", "answer", "parts"),
    [
        (
            "plugin",
            "/get_world_size",
            NOT_THERE,
            ("/get_world_size?include_dp=true answered 404", "VLLM_SERVER_DEV_MODE=1"),
        ),
        (
            "plugin",
            "/init_weight_transfer_engine",
            (500, OF_IPC),
            ("another weight-transfer backend than 'tensorlease'", "--mode ipc", "'channel'"),
        ),
        (
            "plugin",
            "/init_weight_transfer_engine",
            (500, NONE),
            ('--weight-transfer-config \'{"backend": "tensorlease"}\'', "not configured"),
        ),
        (
            "ipc",
            "/init_weight_transfer_engine",
            (500, OF_OURS),
            ('\'{"backend": "ipc"}\'', "--mode plugin", "'packed'"),
        ),
        (
            "plugin",
            "/health",
            NOT_THERE,
            ("/health answered 404: Not Found", "is it a vLLM server"),
        ),
        (
            "plugin",
            "/health",
            (404, "<!DOCTYPE HTML>\n<html>"),
            ("/health answered 404: a page of HTML",),
        ),
        ("plugin", "/health", (503, ""), ("/health answered 503", "has its engine ended")),
    ],
)
def test_a_server_that_is_started_otherwise_is_named_once_with_the_way_out(
    server: FakeVLLM,
    caplog: pytest.LogCaptureFixture,
    broker: Threaded,
    url: str,
    mode: str,
    path: str,
    answer: tuple[int, str],
    parts: tuple[str, ...],
) -> None:
    server.always[path] = answer
    kind = VLLMIpcBridge if mode == "ipc" else VLLMBridge
    bridge = kind(VLLMServer(server.url), "policy", "a", endpoint=url)
    (line,) = said_of(bridge, caplog)
    for part in (server.url, *parts):
        assert part in line
    assert bridge.away in line


@pytest.mark.parametrize(
    ("where", "why"), [("127.0.0.1:9", "refused"), ("nohost.invalid:8000", "known|resolution")]
)
def test_one_that_is_not_there_is_named_with_the_reason_and_again_after_a_minute(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broker: Threaded,
    url: str,
    where: str,
    why: str,
) -> None:
    monkeypatch.setattr(vllm_bridge, "LOOK_S", 0.02)

    def bridge() -> VLLMBridge:
        return VLLMBridge(VLLMServer(f"http://{where}"), "policy", "a", endpoint=url)

    (line,) = said_of(bridge(), caplog)
    assert f"http://{where} does not answer: /health cannot be reached" in line
    assert any(part in line for part in why.split("|")), line
    monkeypatch.setattr(rarely, "AGAIN_S", 0.0)
    assert set(said_of(bridge(), caplog, times=2)) == {line}


def test_a_control_says_once_why_no_server_is_led_and_its_error_does(
    server: FakeVLLM,
    caplog: pytest.LogCaptureFixture,
    broker: Threaded,
    url: str,
) -> None:
    server.always["/get_world_size"] = NOT_THERE
    source = Source(url)
    try:
        with (
            VLLMControl(server.url) as control,
            pytest.raises(DeadlineError, match="VLLM_SERVER_DEV_MODE=1"),
        ):
            source.trainer.publish(1, timeout=1.0, control=control)
    finally:
        source.trainer.close(0.5)
    named = [r for r in caplog.records if r.name == "tensorlease.engines"]
    assert len(named) == 1


def test_what_changes_is_said_at_once() -> None:
    said = Rarely()
    assert [said.due(text) for text in ("a", "a", "b", "b", "a")] == [
        True,
        False,
        True,
        False,
        True,
    ]
