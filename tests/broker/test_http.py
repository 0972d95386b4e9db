"""The HTTP port: metrics, health and state over the loopback, and never a word to anybody else."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tensorlease.broker import http as served_http
from tensorlease.broker.http import ANSWER_S, MAX_CONNECTIONS, parse_http
from tensorlease.broker.meter import MAX_CHANNELS, Meter
from tensorlease.broker.queries import Counters, Status
from tensorlease.broker.settings import SettingsError, load
from tensorlease.protocol import messages as m
from tensorlease.protocol.errors import ConfigError
from tensorlease.protocol.records import QueryKind, Terms

from .raw_agents import (
    DEADLINE_S,
    Raw,
    Threaded,
    config_for,
    eventually,
    trainer_hello,
    worker_hello,
)


@pytest.fixture
def address() -> str:
    return "127.0.0.1:0"


@pytest.fixture
def served(url: str, address: str) -> Iterator[Threaded]:
    """A broker with an HTTP port."""
    made = Threaded(replace(config_for(url), http=address))
    yield made
    made.stop()
    if made.error is not None:
        raise made.error


def get(served: Threaded, path: str, method: str = "GET") -> tuple[int, str]:
    """Returns the status and the text of a page."""
    port = served.broker._http
    assert port is not None
    connection = http.client.HTTPConnection(port.url.removeprefix("http://"), timeout=10.0)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def metrics(served: Threaded) -> dict[str, float]:
    """Returns each sample by its name and labels, as the text says them."""
    status, text = get(served, "/metrics")
    assert status == 200
    lines = [line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, _, value in lines}


def test_a_round_is_counted_once_and_its_rank_was_blocked_for_it(
    served: Threaded, url: str, raw: Callable[[], Raw]
) -> None:
    trainer, worker = raw(), raw()
    worker.join(worker_hello())
    group = trainer.join(trainer_hello()).group
    trainer.send(m.Open(1, 1, Terms(5)))
    trainer.send(m.Batch(1, 1, 0, [0], False, 1000, total=1), b"table")
    worker.receive(m.Deliver)
    now = metrics(served)
    assert now['tensorlease_rounds_under_way{channel="policy",state="staging"}'] == 1
    assert now['tensorlease_leased_bytes{channel="policy",state="held"}'] == 1000
    assert now['tensorlease_agents{kind="worker",state="live"}'] == 1
    worker.send(m.Staged(1, group, 1, 0, 0, vote=True))
    worker.receive(m.Commit)
    worker.send(m.Committed(1, group, 1, True, copy_us=30_000))
    trainer.receive(m.Finished)
    now = metrics(served)
    assert now['tensorlease_rounds_total{channel="policy",outcome="committed"}'] == 1
    assert now['tensorlease_published_bytes_total{channel="policy"}'] == 1000
    assert now['tensorlease_receivers_total{channel="policy",fate="committed"}'] == 1
    assert now['tensorlease_version{channel="policy"}'] == 5
    assert 0 < now['tensorlease_trainer_blocked_seconds_total{channel="policy",rank="0"}'] < 60
    assert now['tensorlease_receiver_seconds_sum{channel="policy",part="copy"}'] == 0.03
    assert now["tensorlease_messages_received_total"] >= 6
    assert not [name for name in now if name.startswith(("python_", "process_"))]


def test_state_is_what_a_status_query_says(served: Threaded, raw: Callable[[], Raw]) -> None:
    agent = raw()
    agent.join(worker_hello("engine0"))
    status, text = get(served, "/api/state")
    told = msgspec.json.decode(text, type=Status)
    assert (status, told.channels[0].replicas[0].replica) == (200, "engine0")


def test_ready_is_who_admits_rounds_and_healthy_who_answers(
    served: Threaded, raw: Callable[[], Raw]
) -> None:
    assert get(served, "/readyz") == (200, "ready\n")
    raw().ask(QueryKind.DRAIN)
    assert get(served, "/readyz") == (503, "stopping\n")
    assert get(served, "/healthz") == (200, "ok\n")


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="needs the IPv6 loopback")
@pytest.mark.parametrize("address", ["[::1]:0"])
def test_the_ipv6_loopback_is_served(served: Threaded) -> None:
    assert get(served, "/healthz") == (200, "ok\n")


def test_a_loop_that_does_not_answer_is_not_healthy(served: Threaded) -> None:
    go_on = threading.Event()
    served.call(lambda: go_on.wait(ANSWER_S + 5))
    try:
        status, text = get(served, "/healthz")
        assert (status, "did not answer" in text) == (503, True)
    finally:
        go_on.set()
    assert get(served, "/healthz")[0] == 200


def test_other_pages_and_methods_are_refused(served: Threaded) -> None:
    status, text = get(served, "/metricz")
    assert status == 404 and "there are /metrics /healthz /readyz /api/state" in text
    assert get(served, "/metrics", "POST")[0] == 501
    assert get(served, "/healthz", "HEAD") == (200, "")


def address_of(served: Threaded) -> tuple[str, int]:
    port = served.broker._http
    assert port is not None
    return "127.0.0.1", int(port.url.rpartition(":")[2])


def connections(stack: contextlib.ExitStack, served: Threaded, count: int) -> list[socket.socket]:
    """Connections that stay open, of which each second one has begun a request."""
    made = [
        stack.enter_context(socket.create_connection(address_of(served), DEADLINE_S))
        for _ in range(count)
    ]
    for each in made[::2]:
        each.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
    return made


def trickle(connection: socket.socket) -> bool:
    """Sends one byte more of a header; returns whether the connection is still open."""
    connection.settimeout(0.02)
    try:
        connection.sendall(b"x")
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def test_rubbish_and_silent_connections_stop_nobody(served: Threaded) -> None:
    with contextlib.ExitStack() as stack:
        connections(stack, served, 8)
        with socket.create_connection(address_of(served)) as rubbish:
            rubbish.sendall(b"\x00\xff" * 1000 + b"\r\n\r\n")
        assert get(served, "/healthz")[0] == 200


def test_more_connections_than_there_may_be_that_trickle_or_are_silent_keep_nobody_away(
    served: Threaded,
) -> None:
    with contextlib.ExitStack() as stack:
        made = connections(stack, served, 2 * MAX_CONNECTIONS)
        for _ in range(3):
            assert get(served, "/healthz") == (200, "ok\n")
        # The oldest have made room, for each other and for those who asked.
        assert not any(trickle(each) for each in made[:MAX_CONNECTIONS])
        assert trickle(made[-2])
        assert trickle(made[-1])


def test_a_byte_now_and_then_does_not_keep_a_connection_open(
    served: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_http, "VISIT_S", 0.5)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        trickling, silent = connections(stack, served, 2)
        eventually(lambda: not trickle(trickling))
        assert time.monotonic() - began >= 0.5
        assert silent.recv(1) == b""


def test_who_has_asked_is_answered_however_many_come_after(
    served: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_http, "ANSWER_S", DEADLINE_S)
    monkeypatch.setattr(served_http, "VISIT_S", DEADLINE_S)
    go_on = threading.Event()
    port = served.broker._http
    assert port is not None
    server = port._server
    served.call(lambda: go_on.wait(DEADLINE_S))
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        try:
            asked = pool.submit(get, served, "/healthz")
            eventually(lambda: any(visit.has_asked for visit in server._visits.values()))
            made = connections(stack, served, 2 * MAX_CONNECTIONS)
            eventually(lambda: not trickle(made[0]))
        finally:
            go_on.set()
        assert asked.result(DEADLINE_S) == (200, "ok\n")


def test_a_connection_is_for_one_request(served: Threaded) -> None:
    with socket.create_connection(address_of(served), DEADLINE_S) as asking:
        asking.sendall(2 * b"GET /healthz HTTP/1.1\r\n\r\n")
        said = b"".join(iter(lambda: asking.recv(4096), b""))
    assert said.startswith(b"HTTP/1.1 200 ") and b"\r\nConnection: close\r\n" in said
    assert said.endswith(b"\r\n\r\nok\n") and said.count(b"HTTP/1.1") == 1


def test_an_address_that_is_taken_is_an_error_with_the_way_out(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = Threaded(replace(config_for(url), http=str(port)))
        made.join()
    assert isinstance(made.error, ConfigError)
    assert "Address already in use; take another port" in str(made.error)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("9400", ("127.0.0.1", 9400)),
        (":9400", ("127.0.0.1", 9400)),
        ("127.0.0.2:1", ("127.0.0.2", 1)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_an_address_of_the_loopback_is_read(text: str, place: tuple[str, int]) -> None:
    assert parse_http(text) == place


@pytest.mark.parametrize("text", ["0.0.0.0:9400", "[::]:1", "example.org:80", "10.0.0.1:80"])
def test_an_address_that_others_can_reach_is_refused_before_anything_starts(text: str) -> None:
    with pytest.raises(SettingsError, match=r"environment: http: .*only the loopback is served"):
        load(None, {"TENSORLEASE_HTTP": text})


@pytest.mark.parametrize("text", ["x", "127.0.0.1:", "1.2.3.4:99999", "-1", "127.0.0.1:٣"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT or PORT"):
        parse_http(text)


def test_channels_become_no_more_labels_than_there_may_be(threaded: Threaded) -> None:
    meter = Meter(threaded.broker.ledger.state, Counters())
    labels = {meter.channel(f"job-{n}") for n in range(1000)}
    assert len(labels) == MAX_CHANNELS + 1
    assert meter.channel("job-0") == "job-0"


def test_every_metric_is_in_the_documents_and_no_other(
    served: Threaded, raw: Callable[[], Raw], document: str
) -> None:
    raw().join(worker_hello())
    status, text = get(served, "/metrics")
    declared = [line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE")]
    names = {name for name, kind in declared if not name.endswith("_created")}
    written = set(re.findall(r"`(tensorlease_[a-z_]+)", document))
    assert (status, names) == (200, written)


@pytest.fixture
def document() -> str:
    return (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
