"""What a client of vLLM's control endpoints says when something is wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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


@contextmanager
def answering(*parts: bytes) -> Iterator[VLLMServer]:
    """A server that says the first parts at once, and the last again and again."""
    ended = threading.Event()

    def say(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.recv(4096)
            for part in parts:
                connection.sendall(part)
            while not ended.wait(0.02):
                connection.sendall(parts[-1])

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=say, args=(listening,))
        thread.start()
        yield VLLMServer(f"http://127.0.0.1:{listening.getsockname()[1]}")
        ended.set()
        thread.join(10.0)
        assert not thread.is_alive()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("length", [b"Content-Length: 1000000\r\n", b""])
def test_an_answer_that_never_ends_is_cut_off_in_time(length: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + length + b"\r\n"
    with (
        answering(head, b" ") as server,
        pytest.raises(ServerError, match=r"has not answered in 0\.3 s"),
    ):
        server.post("/resume", None, 0.3)


def test_an_answer_that_is_no_sense_is_an_error_of_the_server() -> None:
    deep = b"[" * 100_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    with answering(head, deep) as server, pytest.raises(ServerError, match="answered no JSON"):
        server.world_size()
    none = b'HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n{"world_size": 0}'
    with answering(none) as server, pytest.raises(ServerError, match="is it a vLLM server"):
        server.world_size()


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "https://there", "http://there/v1"])
def test_what_is_no_address_of_a_server_is_refused(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="must be like http://127"):
        VLLMServer(url)
    assert cli.main(["bridge", "vllm", f"--url={url}"]) == 2
    assert "must be like http://127" in capsys.readouterr().err
