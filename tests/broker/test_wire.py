"""The wire under bad bytes, strangers, peers that do not read, and many agents at once."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from tensorlease.broker import wire
from tensorlease.broker.config import Limits, UvloopChoice
from tensorlease.protocol import messages as m
from tensorlease.protocol.codec import encode
from tensorlease.protocol.records import (
    Code,
    QueryKind,
)

from .raw_agents import (
    Raw,
    Spawn,
    Threaded,
    agent_process,
    broker_process,
    config_for,
    eventually,
    listens,
    trainer_hello,
    worker_hello,
)

# ---------------------------------------------------------------- rubbish and strangers


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("/tmp/tensorlease-was-unpickled",)


def bad_frames() -> list[tuple[str, list[bytes]]]:
    hello = msgspec.msgpack.decode(encode(worker_hello()))
    device = hello.index("cpu:0")
    return [
        ("nothing", [b""]),
        ("no msgpack", [b"\xc1\xff\x00"]),
        ("a pickle", [pickle.dumps(Bomb())]),
        ("a map", [msgspec.msgpack.encode({"op": "hello"})]),
        ("an unknown message", [msgspec.msgpack.encode(["shutdown", 1])]),
        ("nested deeply", [b"\x91" * 100_000]),
        # The last two have a default.
        ("one field short", [msgspec.msgpack.encode(hello[:-3])]),
        (
            "a dict for a device",
            [msgspec.msgpack.encode([*hello[:device], {"cuda": 0}, *hello[device + 1 :]])],
        ),
        ("a negative session", [msgspec.msgpack.encode(["beat", -1])]),
        ("not UTF-8", [b"\x92\xa4be\xff\xff\x01"]),
        ("three frames", [encode(m.Beat(1)), b"", b""]),
        ("an empty frame first", [b"", encode(m.Beat(1))]),
        ("a body where none is", [encode(m.Beat(1)), b"body"]),
        ("a message of the broker's", [encode(m.ByeOk("0" * 16, "0" * 16))]),
    ]


def test_bad_bytes_of_every_kind_are_refused_by_name_and_disturb_nobody(
    threaded: Threaded, raw: Callable[[], Raw]
) -> None:
    healthy, joined = raw(), raw()
    healthy.join(worker_hello("healthy"))
    joined.join(worker_hello("joined"))
    texts = {}
    for name, frames in bad_frames():
        stranger = raw()
        stranger.socket.send_multipart(frames)
        refused = stranger.receive(m.Refused)
        assert refused.code is Code.BAD_MESSAGE
        texts[name] = refused.text
        joined.socket.send_multipart(frames)
        healthy.beat()
    assert "'device'" in texts["a dict for a device"]
    assert "'session'" in texts["a negative session"]
    assert not Path("/tmp/tensorlease-was-unpickled").exists()
    # Its answers are limited in rate, and its session goes on.
    joined.beat()
    status = healthy.status()
    assert (status.agents, status.counters.bad_messages) == (2, 2 * len(texts))
    assert threaded.sent.count(("sent", "Refused")) < 2 * len(texts)


def test_a_body_that_is_too_large_is_refused(
    url: str, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    running = Threaded(config_for(url, Limits(max_agents=8, max_body_bytes=4096)))
    try:
        agent = Raw(context, url)
        agent.join(trainer_hello())
        agent.send(m.Offer(1, 0, [0], 1), b"x" * 5000)
        assert "max-body-bytes is 4096" in agent.receive(m.Refused).text
        agent.beat()
    finally:
        running.stop()


@pytest.mark.root
@pytest.mark.process
def test_another_user_is_refused_even_where_it_can_connect(
    url: str, threaded: Threaded, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    path = Path(url.removeprefix("ipc://"))
    path.parent.chmod(0o755)
    path.chmod(0o666)
    stranger = agent_process(spawn, url, "r0", "stranger")
    assert stranger.line().startswith("Refused")
    status = raw().status()
    assert (status.agents, status.counters.refusals) == (0, 1)


def test_over_tcp_the_user_is_known_and_the_session_works(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    running = Threaded(config_for(url))
    try:
        agent = Raw(context, url)
        agent.join(worker_hello())
        agent.beat()
        assert agent.status().recovering_s > 0  # Nothing tells how the last broker ended.
    finally:
        running.stop()


# ---------------------------------------------------------------- peers that do not read


def test_a_peer_that_never_reads_delays_nobody(
    url: str, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HIGH_WATER_MARK", 16)
    running = Threaded(config_for(url, Limits(max_agents=64, max_queue_messages=64)))
    try:
        trainer = Raw(context, url)
        trainer.join(trainer_hello())
        workers = [Raw(context, url, hwm=0 if number else 1) for number in range(10)]
        for number, worker in enumerate(workers):
            worker.join(worker_hello(f"r{number}"))
        times = []
        for number in range(500):
            trainer.send(m.Offer(1, number, [number], 1), b"t" * 4000)
            began = time.monotonic()
            workers[1].beat()
            times.append(time.monotonic() - began)
        assert sorted(times)[round(0.99 * len(times))] < 0.1
        for number in range(500):
            message = workers[2].receive(m.Offered)
            assert message.number == number
        trainer.beat()
        counters = trainer.status().counters
        assert (counters.lost_sessions, counters.unsent_messages) == (1, 0)
    finally:
        running.stop()


@pytest.mark.process
def test_the_session_of_a_stopped_peer_is_dropped_whole(
    url: str,
    context: zmq.Context[zmq.Socket[bytes]],
    spawn: Spawn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "HIGH_WATER_MARK", 16)
    running = Threaded(config_for(url, Limits(max_agents=64, max_queue_messages=100)))
    try:
        trainer, healthy = Raw(context, url), Raw(context, url)
        trainer.join(trainer_hello())
        healthy.join(worker_hello("healthy"))
        stopped = agent_process(spawn, url, "stopped")
        assert stopped.line().startswith("Welcome")
        stopped.signal(signal.SIGSTOP)
        count = 1500
        for number in range(count):
            trainer.send(m.Offer(1, number, [number], 1), b"t" * 500)
            trainer.send(m.Retire(1, [number]))
        for number in range(count):
            assert healthy.receive(m.Offered).number == number
        status = healthy.status()
        assert status.counters.lost_sessions == 1
        states = {r.replica: r.members[0].state for r in status.channels[0].replicas}
        assert states == {"healthy": "live", "stopped": "away"}
        stopped.signal(signal.SIGCONT)
        # All that was sent before it was dropped, in order, then the question, and nothing else.
        numbers = []
        while (line := stopped.line()) != "WhoAreYou":
            word, _, number_text = line.partition(" ")
            assert word == "Offered", line
            numbers.append(int(number_text))
        assert numbers == list(range(len(numbers)))
        assert len(numbers) < count
    finally:
        running.stop()


class Heard:
    """What a wire alone, without sessions, received."""

    def __init__(self) -> None:
        self.route: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.more = False

    def received(
        self, route: bytes, envelope: bytes, body: bytes | None, frame: zmq.Frame | None
    ) -> None:
        self.route.set_result(route)

    def malformed(self, route: bytes, text: str) -> None:
        raise AssertionError(text)

    def lost(self, route: bytes, why: str) -> None:
        raise AssertionError(why)

    def expects(self) -> bool:
        return self.more


async def test_a_queue_that_is_full_ends_the_session_instead_of_losing_a_message(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HIGH_WATER_MARK", 16)
    heard = Heard()
    sender = wire.Wire(
        asyncio.get_running_loop(), heard, set(), Limits(max_agents=8, max_queue_messages=64)
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.setsockopt(zmq.LINGER, 0)
        try:
            sender.bind(url)
            sender.start()
            peer.connect(url)
            peer.send(b"here I am")
            route = await asyncio.wait_for(heard.route, 10)
            # More than the queue, the pipes and the kernel's buffers hold.
            assert any(not sender.send(route, b"%d" % n, b"x" * 4000) for n in range(2000))
            assert sender.unsent == (0, 0)
        finally:
            sender.close(0)


@pytest.mark.parametrize(
    ("more", "busy_s", "sleeps"), [(True, 0.3, False), (False, 0.3, True), (True, 0.0, True)]
)
async def test_while_more_is_expected_the_socket_is_looked_at_again_and_again(
    url: str, monkeypatch: pytest.MonkeyPatch, more: bool, busy_s: float, sleeps: bool
) -> None:
    looks: list[float] = []
    look = wire.Wire._soon

    def noted(self: wire.Wire) -> None:
        looks.append(time.monotonic())
        look(self)

    monkeypatch.setattr(wire.Wire, "_soon", noted)
    loop, heard = asyncio.get_running_loop(), Heard()
    heard.more = more
    socket_ = wire.Wire(loop, heard, set(), Limits(max_agents=8), busy_s)
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        try:
            socket_.bind(url)
            socket_.start()
            peer.connect(url)
            peer.send(b"here I am")
            await asyncio.wait_for(heard.route, 10)
            came = time.monotonic()
            await asyncio.sleep(0.6)
        finally:
            socket_.close(0)
    assert (len(looks) < 20) is sleeps
    assert all(at < came + busy_s + 0.2 for at in looks)


# ---------------------------------------------------------------- many


@pytest.mark.process
@pytest.mark.parametrize("loop", [UvloopChoice.OFF, UvloopChoice.ON])
def test_every_message_of_many_agents_is_answered_on_either_loop(
    url: str, spawn: Spawn, raw: Callable[[], Raw], loop: UvloopChoice
) -> None:
    broker_process(spawn, url, "--uvloop", loop.value)
    agents = [raw() for _ in range(8)]
    for number, agent in enumerate(agents):
        agent.join(worker_hello(f"r{number}"))
    each, window = 1000, 16
    chance = random.Random(45)
    sent, answered = [0] * 8, [0] * 8
    poller = zmq.Poller()
    places = {agent.socket: number for number, agent in enumerate(agents)}

    def ask(number: int) -> None:
        sent[number] += 1
        if chance.random() < 0.5:
            agents[number].send(m.Beat(1))
        else:
            name = "x" * chance.randrange(128)
            agents[number].send(m.Query(1, QueryKind.STORY, name, 1))

    for number, agent in enumerate(agents):
        poller.register(agent.socket, zmq.POLLIN)
        for _ in range(window):
            ask(number)
    while sum(answered) < 8 * each:
        ready = poller.poll(1000)
        assert ready, f"stalled for a second after {answered}"
        for socket_, _ in ready:
            number = places[socket_]
            agents[number].receive_any()
            answered[number] += 1
            if sent[number] < each:
                ask(number)
    assert answered == [each] * 8


@pytest.mark.process
def test_agents_beyond_the_limit_are_told_that_the_broker_is_full(
    url: str, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        limited = ["-c", LIMITED, "128", "1024", "broker", "--endpoint", url]
        full = spawn(*limited, "--limits-max-agents", "1000")
        code, errors = full.end()
        assert code == 2 and "needs 2128 file descriptors, this process may open 1024" in errors
        child = spawn(*limited, "--limits-max-agents", "60")
        eventually(lambda: listens(url))
        waiting = [raw() for _ in range(300)]
        for number, agent in enumerate(waiting):
            agent.send(worker_hello(f"r{number}"))
        welcome = []
        refused = 0
        deadline = time.monotonic() + 20
        while waiting and time.monotonic() < deadline:
            for agent in list(waiting):
                if not agent.socket.poll(1):
                    continue
                waiting.remove(agent)
                message, _ = agent.receive_any()
                if isinstance(message, m.Welcome):
                    welcome.append(agent)
                else:
                    assert isinstance(message, m.Refused) and message.code is Code.BROKER_FULL
                    assert "max-agents is 60" in message.text
                    refused += 1
                    agent.close()
        assert (len(welcome), refused) == (60, 240)
        welcome[0].beat()
        assert child.process.poll() is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


LIMITED = """
import resource, sys
from tensorlease.cli import main
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
sys.exit(main(sys.argv[3:]))
"""
