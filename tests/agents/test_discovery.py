"""Where agents look for a broker, and what they say when there is none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorlease.agents.discovery import find_broker, one_line
from tensorlease.protocol.endpoint import EndpointError
from tensorlease.protocol.errors import NoBrokerError


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's own, with a name that leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        yield Path(directory)


def listening(path: Path) -> socket.socket:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[socket.socket]:
    with listening(tmp_path / "tensorlease" / "broker.sock") as server:
        yield server


def test_the_first_place_that_answers_is_taken(tmp_path: Path, server: socket.socket) -> None:
    found = find_broker(environ={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert found.path == server.getsockname()
    assert find_broker(found.url, environ={}) == found
    assert find_broker(environ={"TENSORLEASE_ENDPOINT": found.path}) == found


def test_a_broker_on_tcp_is_found() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert find_broker(address).url == address
    with pytest.raises(NoBrokerError, match=f"{address}: connection refused"):
        find_broker(address)


def test_every_place_is_named_with_its_reason_and_the_command_that_starts_a_broker(
    tmp_path: Path,
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with pytest.raises(NoBrokerError) as caught:
        find_broker(environ=environ, job="a job without a broker")
    message = str(caught.value)
    assert f"ipc://{tmp_path}/tensorlease/a-job-without-a-" in message
    assert "ipc:///run/tensorlease/" in message
    assert message.count("no such file or directory") == message.count("ipc://")
    assert "`tensorlease run -- COMMAND`" in message
    first, *others, _, last = message.splitlines()
    assert first.startswith(f"no broker answers at ipc://{tmp_path}/tensorlease/a-job-without-a-")
    assert [line.count("ipc://") for line in (first, *others)] == [1] * message.count("ipc://")
    # The place has the name of the job, and a broker without it would listen elsewhere.
    assert last.strip() == "tensorlease broker --job 'a job without a broker'"
    assert ", nor at ipc:///run/tensorlease/" in one_line(message)


@pytest.mark.parametrize("address", ["", None])
def test_a_variable_that_is_set_to_nothing_is_as_one_that_is_not_set(
    tmp_path: Path, server: socket.socket, address: str | None
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    if address is not None:
        environ["TENSORLEASE_ENDPOINT"] = address
    assert find_broker(environ=environ).path == server.getsockname()


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        (" ", "must be absolute"),
        ("broker.sock", "must be absolute"),
        ("ipc:///run/tensorlease/", "names a directory"),
        ("udp://127.0.0.1:1", "transport 'udp' is not supported"),
        ("tcp://127.0.0.1", "expected tcp://127.0.0.1:PORT"),
    ],
)
def test_an_address_of_the_environment_that_cannot_work_names_the_variable(
    address: str, problem: str
) -> None:
    with pytest.raises(EndpointError, match=problem) as caught:
        find_broker(environ={"TENSORLEASE_ENDPOINT": address})
    assert "(it is from $TENSORLEASE_ENDPOINT)" in str(caught.value)
    with pytest.raises(EndpointError, match=problem) as caught:
        find_broker(address, environ={"TENSORLEASE_ENDPOINT": "/a"})
    assert "TENSORLEASE_ENDPOINT" not in str(caught.value)


def test_only_the_place_that_the_environment_names_is_tried_and_the_error_says_so(
    tmp_path: Path, server: socket.socket
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "TENSORLEASE_ENDPOINT": f"{tmp_path}/other.sock"}
    with pytest.raises(NoBrokerError) as caught:
        find_broker(environ=environ)
    message = str(caught.value)
    assert "other.sock: no such file or directory (of $TENSORLEASE_ENDPOINT)" in message
    assert message.count("ipc://") == 2
    assert message.endswith(f"\n  tensorlease broker --endpoint ipc://{tmp_path}/other.sock")


def test_a_directory_or_a_file_in_the_sockets_place_is_told_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoBrokerError, match="this is a directory and no socket"):
        find_broker(str(tmp_path))
    with pytest.raises(NoBrokerError, match="this is a file and no socket"):
        find_broker(f"{tmp_path}/file")


def test_no_command_is_named_that_could_not_start_a_broker_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoBrokerError) as caught:
        find_broker(f"{tmp_path}/file")
    assert "tensorlease broker" not in str(caught.value)
    with pytest.raises(NoBrokerError) as caught:
        find_broker(environ={"XDG_RUNTIME_DIR": str(tmp_path), "TENSORLEASE_JOB": "none"})
    assert str(caught.value).endswith("\n  tensorlease broker --job none")


def test_a_job_beside_an_endpoint_of_the_environment_is_said_not_to_count(tmp_path: Path) -> None:
    environ = {"TENSORLEASE_ENDPOINT": f"{tmp_path}/other.sock"}
    with pytest.raises(NoBrokerError, match=r"\$TENSORLEASE_ENDPOINT, beside which a job does not"):
        find_broker(job="mine", environ=environ)


def test_a_socket_that_a_dead_broker_left_is_no_broker(tmp_path: Path) -> None:
    listening(tmp_path / "d" / "broker.sock").close()
    with pytest.raises(NoBrokerError, match="connection refused, the socket of a broker that has"):
        find_broker(f"{tmp_path}/d/broker.sock")


def test_a_broker_whose_queue_of_connections_is_full_is_found_in_time(tmp_path: Path) -> None:
    path = tmp_path / "broker.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(0)
        waiting = []
        for _ in range(3):
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            client.connect_ex(str(path))
            waiting.append(client)
        before = time.monotonic()
        assert find_broker(str(path)).path == str(path)
        assert time.monotonic() - before < 5
        for client in waiting:
            client.close()


PROGRAM = """
import os, sys
from tensorlease.agents.discovery import find_broker, one_line
os.setgroups([]); os.setgid(54322); os.setuid(54321)
for address, environ in ((sys.argv[1], {}), ("", {"XDG_RUNTIME_DIR": sys.argv[2]})):
    try:
        print(find_broker(address, "alone", environ).path)
    except Exception as error:
        print(type(error).__name__, error.hopeless, one_line(error))
"""


@pytest.mark.root
@pytest.mark.process
def test_a_forbidden_socket_is_told_as_permission_denied(server: socket.socket) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            server.getsockname(),
            str(Path(server.getsockname()).parents[1]),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    forbidden, some = done.stdout.splitlines()
    assert forbidden.startswith("NotFoundError True"), done
    assert f"{server.getsockname()}: permission denied" in forbidden
    assert "socket-group" in forbidden and "tensorlease run" not in forbidden
    # Elsewhere a broker may still come.
    assert some.startswith("NotFoundError False"), done
    assert "permission denied" in some and "socket-group" in some and "tensorlease run" in some


@pytest.mark.root
def test_a_directory_in_tmp_that_another_user_made_first_is_not_trusted() -> None:
    directory = Path(f"/tmp/tensorlease-test-{os.getpid()}")
    try:
        with listening(directory / "broker.sock"):
            os.chown(directory, 54321, 54321)
            with pytest.raises(NoBrokerError, match="belongs to uid 54321, another user"):
                find_broker(f"{directory}/broker.sock")
    finally:
        (directory / "broker.sock").unlink(missing_ok=True)
        directory.rmdir()
