"""What a client of vLLM's control endpoints says when something is wrong."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tensorlease import cli
from tensorlease.engines import vllm_server
from tensorlease.engines.vllm_server import ServerError, VLLMServer
from tensorlease.protocol.errors import ConfigError

from ..broker.raw_agents import eventually
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


def test_a_connection_is_used_again_for_a_moment(
    fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = VLLMServer(fake.url)
    for _ in range(3):
        server.post("/resume", None, 10.0)
    assert len(set(fake.askers)) == 1
    monkeypatch.setattr(vllm_server, "IDLE_S", 0.0)
    server.post("/resume", None, 10.0)
    assert len(set(fake.askers)) == 2


def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10.0)
        closed = threading.Semaphore(0)

        def say() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)
                closed.release()

        saying = threading.Thread(target=say)
        saying.start()
        server = VLLMServer(f"http://127.0.0.1:{listening.getsockname()[1]}")
        for _ in range(2):
            assert server.post("/resume", None, 10.0) is None
            assert closed.acquire(timeout=10.0)
        saying.join()


@contextmanager
def closing(*counts: int) -> Iterator[VLLMServer]:
    """A server that closes its n-th connection when it is asked once more than so many times."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull"

    def say(listening: socket.socket) -> None:
        for count in counts:
            connection, _ = listening.accept()
            with connection:
                for _ in range(count):
                    connection.recv(4096)
                    connection.sendall(answer)
                connection.settimeout(1.0)
                with suppress(TimeoutError):
                    connection.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10.0)
        saying = threading.Thread(target=say, args=(listening,))
        saying.start()
        yield VLLMServer(f"http://127.0.0.1:{listening.getsockname()[1]}")
        saying.join()


def test_what_a_connection_that_is_closed_when_it_is_used_again_was_to_ask_is_asked_anew() -> None:
    with closing(1, 0, 1) as server:
        assert server.post("/resume", None, 10.0) is None
        with pytest.raises(ServerError, match="/resume cannot be reached"):
            server.post("/resume", None, 10.0)  # Once, and no more.
        assert server.post("/resume", None, 10.0) is None
    with closing(1, 1) as server:
        for _ in range(2):
            assert server.post("/resume", None, 10.0) is None


def test_who_closes_a_new_connection_or_an_old_one_later_was_asked_for_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(0) as server, pytest.raises(ServerError, match="/resume cannot be reached"):
        server.post("/resume", None, 10.0)
    monkeypatch.setattr(vllm_server, "AT_ONCE_S", 0.0)
    with closing(1) as server:
        assert server.post("/resume", None, 10.0) is None
        with pytest.raises(ServerError, match="/resume cannot be reached"):
            server.post("/resume", None, 10.0)


def test_a_server_does_what_it_was_asked_for_ahead_when_the_end_is_sent(fake: FakeVLLM) -> None:
    server = VLLMServer(fake.url)
    version = {"weight_version": "7"}
    server.post("/start_weight_update", None, 10.0)
    ahead = server.ahead("/finish_weight_update", version)
    server.ahead("/finish_weight_update", version).drop()
    assert not server.ails()  # By now it has seen both.
    assert fake.calls == ["/start_weight_update"]
    ahead.send()
    assert ahead.answer(10.0) == {"message": "Weight update finished"}
    assert fake.label == "7"
    again = server.ahead("/finish_weight_update", version)
    again.send()
    with pytest.raises(ServerError, match="/finish_weight_update answered 500: .* without") as said:
        again.answer(10.0)
    assert said.value.refused


def test_what_is_dropped_is_so_though_a_process_that_was_forked_has_the_connection_too(
    fake: FakeVLLM,
) -> None:
    ahead = VLLMServer(fake.url).ahead("/pause", {})
    forked = os.dup(ahead._connection.sock.fileno())
    try:
        ahead.drop()
        eventually(lambda: fake.dropped == ["/pause"])
    finally:
        os.close(forked)
    assert not fake.calls


def test_what_was_asked_for_ahead_of_a_server_that_has_gone_is_asked_of_the_next_one() -> None:
    fake = FakeVLLM()
    fake.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            server = VLLMServer(f"http://127.0.0.1:{listening.getsockname()[1]}")
            ahead = server.ahead("/pause", {})
            connection, _ = listening.accept()
            connection.close()
        fake.die()
        fake.port = server.port
        fake.start()
        ahead.send()
        assert ahead.answer(10.0) == {"status": "paused"}
        assert fake.calls == ["/pause"]
    finally:
        fake.die()
    with pytest.raises(ServerError, match="/pause cannot be reached") as said:
        VLLMServer(server.url).ahead("/pause", {}).answer(10.0)
    assert said.value.absent


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


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "must be like http://127"),
        ("127.0.0.1:8000", "must be like http://127"),
        ("https://there", "must be like http://127"),
        ("http://there:1/v1", "give its address alone, http://there:1"),
        ("http://there?x=1", "give its address alone, http://there"),
    ],
)
def test_what_is_no_address_of_a_server_is_refused(
    url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=said):
        VLLMServer(url)
    assert cli.main(["bridge", "vllm", f"--url={url}"]) == 2
    assert said in capsys.readouterr().err
