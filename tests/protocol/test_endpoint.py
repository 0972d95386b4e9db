"""Addresses: what is read, what is refused and how, and where both sides look."""

from __future__ import annotations

import pytest

from tensorlease.protocol.endpoint import (
    MAX_IPC_PATH_BYTES,
    Endpoint,
    EndpointError,
    Transport,
    candidates,
    parse_endpoint,
    socket_name,
)


def test_an_ipc_address_and_its_plain_path_are_the_same_endpoint() -> None:
    expected = Endpoint(Transport.IPC, path="/run/x/broker.sock")
    assert parse_endpoint("ipc:///run/x/broker.sock") == expected
    assert parse_endpoint("/run//x/./broker.sock") == expected
    assert expected.url == "ipc:///run/x/broker.sock"
    assert expected.lock_path == "/run/x/broker.sock.lock"
    assert expected.live_directory == "/run/x/broker.sock.live"
    assert expected.directory == "/run/x"


def test_tcp_on_the_loopback_is_read_and_has_no_places_in_the_file_system() -> None:
    endpoint = parse_endpoint("tcp://localhost:5555")
    assert endpoint == Endpoint(Transport.TCP, host="127.0.0.1", port=5555)
    assert str(endpoint) == "tcp://127.0.0.1:5555"
    assert (endpoint.lock_path, endpoint.live_directory) == ("", "")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("udp://127.0.0.1:5", "transport 'udp'"),
        ("", "absolute"),
        ("run/broker.sock", "absolute"),
        ("ipc://*", "absolute"),
        ("ipc://@name", "abstract"),
        ("ipc:///run/x/", "directory"),
        ("ipc:///run/x/..", "directory"),
        ("/run/a\nb", "control characters"),
        ("/run/a\0b", "control characters"),
        ("tcp://127.0.0.1", "expected tcp://"),
        ("tcp://127.0.0.1:0", "port '0'"),
        ("tcp://127.0.0.1:65536", "port '65536'"),
        ("tcp://127.0.0.1:+5", "port"),
        ("tcp://127.0.0.1:٥", "port"),
        ("tcp://*:5555", "numeric loopback"),
        ("tcp://host:5555", "numeric loopback"),
        ("tcp://0.0.0.0:5555", "CURVE"),
        ("tcp://10.0.0.1:5555", "CURVE"),
        ("tcp://[::1]:5555", "IPv4"),
    ],
)
def test_an_address_that_cannot_work_is_refused_and_says_why(address: str, words: str) -> None:
    with pytest.raises(EndpointError) as caught:
        parse_endpoint(address)
    assert words in str(caught.value)
    assert repr(address) in str(caught.value)
    assert caught.value.address == address


def test_a_path_of_107_bytes_is_accepted_and_one_of_108_refused_with_the_numbers() -> None:
    longest = "/" + "a" * (MAX_IPC_PATH_BYTES - 1)
    assert parse_endpoint(longest).path == longest
    with pytest.raises(EndpointError) as caught:
        parse_endpoint(longest + "a")
    assert "108 bytes" in str(caught.value)
    assert "at most 107" in str(caught.value)
    assert longest + "a" in str(caught.value)


def test_a_path_is_measured_in_bytes_not_characters() -> None:
    with pytest.raises(EndpointError, match="121 bytes"):
        parse_endpoint("/" + "é" * 60)


def test_the_socket_of_a_job_is_short_stable_and_its_own() -> None:
    assert socket_name() == "broker.sock"
    assert socket_name("My Job/1") == "my-job-1-4fc8611bbb.sock" == socket_name("My Job/1")
    assert socket_name("my job 1") != socket_name("My Job/1")
    assert len(socket_name("x" * 1000)) <= 40
    assert "/" not in socket_name("../../etc")
    assert socket_name("日本").startswith("job-")


def test_an_explicit_address_comes_before_the_variable_and_both_exclude_all_else() -> None:
    environ = {"TENSORLEASE_ENDPOINT": "/env/b.sock", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert [e.path for e in candidates(environ, 7, "/given/b.sock")] == ["/given/b.sock"]
    assert [e.path for e in candidates(environ, 7)] == ["/env/b.sock"]


def test_without_an_address_the_users_places_come_before_the_systems() -> None:
    places = [endpoint.path for endpoint in candidates({"XDG_RUNTIME_DIR": "/xdg"}, 7)]
    assert places == [
        "/xdg/tensorlease/broker.sock",
        "/run/user/7/tensorlease/broker.sock",
        "/tmp/tensorlease-7/broker.sock",
        "/run/tensorlease/broker.sock",
    ]


def test_the_usual_runtime_directory_is_looked_at_once() -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert candidates(environ, 7) == candidates({}, 7)


def test_a_job_has_the_same_socket_by_argument_and_by_variable() -> None:
    by_variable = candidates({"TENSORLEASE_JOB": "a"}, 7)
    assert by_variable == candidates({}, 7, job="a")
    assert not set(by_variable) & set(candidates({}, 7, job="b"))
    assert not set(by_variable) & set(candidates({"TENSORLEASE_JOB": "a"}, 8)[:-1])
