"""What a client of vLLM's control endpoints says when something is wrong."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tensorlease import cli
from tensorlease.engines.vllm_server import ServerError, VLLMServer
from tensorlease.protocol.errors import ConfigError

from .fake_vllm import FakeVLLM


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    made = FakeVLLM(world_size=3)
    made.start()
    yield made
    made.die()


def test_it_asks_what_a_bridge_has_to_know(fake: FakeVLLM) -> None:
    server = VLLMServer(fake.url + "/")
    assert not server.ails()
    assert server.world_size() == 3
    assert server.is_paused() is False
    server.post("/pause", None, 10.0, mode="keep")
    assert server.is_paused() is True


def test_an_error_has_the_endpoint_and_what_the_server_says(fake: FakeVLLM) -> None:
    server = VLLMServer(fake.url)
    with pytest.raises(
        ServerError, match=rf"{fake.url}/pause\?mode=gently answered 400: mode gent"
    ):
        server.post("/pause", None, 10.0, mode="gently")
    with pytest.raises(ServerError, match="answered 500: start_weight_update must be called"):
        server.post("/update_weights", {"update_info": {"version": 1, "timeout": 1.0}}, 10.0)
    with pytest.raises(ServerError, match="/nowhere answered 404"):
        server.post("/nowhere", None, 10.0)


def test_who_does_not_answer_is_named_with_the_limit(fake: FakeVLLM) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServerError, match=rf"{url}/resume has not answered in 0\.1 s"):
            VLLMServer(url).post("/resume", None, 0.1)
    fake.die()
    with pytest.raises(ServerError, match=f"{fake.url}/resume cannot be reached"):
        VLLMServer(fake.url).post("/resume", None, 10.0)
    assert VLLMServer(fake.url).ails().startswith(f"{fake.url} does not answer: /health cannot be")


@pytest.mark.parametrize("device", ["cuda:0", "cuda", "0", "GPU-1,GPU-1"])
def test_a_device_that_is_no_gpu_of_the_hosts_is_refused(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bridge", "vllm", "--url=http://127.0.0.1:9", "--mode=ipc", f"--device={device}"]
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert f"--device {device}: " in said
    assert "UUID" in said or "named once" in said


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "https://there", "http://there/v1"])
def test_what_is_no_address_of_a_server_is_refused(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="must be like http://127"):
        VLLMServer(url)
    assert cli.main(["bridge", "vllm", f"--url={url}"]) == 2
    assert "must be like http://127" in capsys.readouterr().err
