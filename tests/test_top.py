"""`tensorlease top` and `status` on a terminal: a round under way, a failed one, a stuck worker."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from tensorlease import cli
from tensorlease.broker.config import Durations
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Outcome, Terms

from .broker.raw_agents import Raw, Threaded, config_for, trainer_hello, worker_hello
from .procs import Spawn, say, spawning
from .terminals import Terminal, on_terminal

PREPARE_S = 1.5
ALTERNATE_SCREEN = "\x1b[?1049"


pytestmark = pytest.mark.program


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    with spawning() as start:
        yield start


@pytest.fixture
def url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        yield f"ipc://{directory}/b.sock"


@pytest.fixture
def broker(url: str) -> Iterator[Threaded]:
    durations = Durations(prepare=PREPARE_S, drain=0.2, silent=20.0)
    made = Threaded(msgspec.structs.replace(config_for(url), durations=durations))
    yield made
    made.stop()
    if made.error is not None:
        raise made.error


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made
        while Raw.made:
            Raw.made.pop().close()


def worker_that_never_answers(url: str) -> None:
    """In a child: joins, says so, and does nothing but read."""
    with zmq.Context() as context:
        agent = Raw(context, url)
        agent.join(worker_hello("bad"))
        say("joined")
        while True:
            message, _ = agent.receive_any(60.0)
            if isinstance(message, m.Deliver):
                say("has its batch")


def test_top_and_status_show_a_round_under_way_a_stuck_worker_and_a_failed_round(
    url: str, broker: Threaded, context: zmq.Context[zmq.Socket[bytes]], spawn: Spawn
) -> None:
    good, trainer = Raw(context, url), Raw(context, url)
    good.join(worker_hello("good"))
    bad = spawn(worker_that_never_answers, url)
    assert bad.hear() == "joined"
    group = trainer.join(trainer_hello()).group
    with (
        Terminal(spawn, "top", "--endpoint", url, "--interval", "0.1") as top,
        Terminal(spawn, "status", "--endpoint", url) as idle,
    ):
        top.shows(r"channel policy: version 0   1 trainers, 2 replicas")
        top.shows(r"bad/0 +\d+ +none +idle")
        assert not top.is_as_before  # Keys are read as they are pressed.
        assert idle.end() == 0 and "look:" not in idle.text

        trainer.send(m.Open(1, 1, Terms(1)))
        trainer.send(m.Batch(1, 1, 0, [0], False, 2**20, total=1), b"table")
        good.receive(m.Deliver)
        good.send(m.Staged(1, group, 1, 0, 0, vote=True))
        assert bad.hear() == "has its batch"
        bad.stop()
        with Terminal(spawn, "status", "--endpoint", url) as status:
            top.shows(
                r"version 1 staging for .* 1 preparing, 1 voted   waits for bad/0 \(pid \d+\)"
            )
            top.shows(rf"bad/0 +{bad.pid} +none +preparing +1 +.* s +the others wait for it")
            assert status.end() == 0
            status.shows(
                rf"version 1 call 1 +staging .*waits for|bad/0 \(pid {bad.pid}\) to prepare"
            )

        good.receive(m.Commit, PREPARE_S + 10)
        good.send(m.Committed(1, group, 1, True))
        assert trainer.receive(m.Finished).result.outcome is Outcome.MIXED
        stuck = rf"batch 0\.0 of version 1 \(1\.0 MiB\), held by bad/0 \(pid {bad.pid}\)"
        top.shows(rf"look: channel policy: stuck for \d s: {stuck}")
        top.shows(rf"bad/0 +{bad.pid} +in doubt +stuck +1 .* was not ready in 1.5 s")
        top.shows(r"round 1 ended mixed after [12]\.\d s: [12]\.\d s waiting for bad/0's prepare")
        with Terminal(spawn, "status", "--exit-code", "--endpoint", url) as status:
            assert status.end() == 1
            status.shows(stuck)
            status.shows(r"replica bad is in doubt: worker bad/0 .* was put out of version 1")

        trainer.send(m.Open(1, 2, Terms(2)))
        good.receive(m.Prepare)
        good.send(m.Reject(1, group, 2, Code.PREPARE_FAILED, "ValueError: no room"))
        assert trainer.receive(m.Finished).result.outcome is Outcome.FAILED
        top.shows(r"look: .*the last round, of version 2, failed: .*ValueError: no room")
        top.shows(r"round 2 failed after [\d.]+ ms: .*ValueError: no room")
        with Terminal(spawn, "status", "--endpoint", url) as status:
            assert status.end() == 0
            status.shows(r"round 2 failed after .*ValueError: no room")

        bad.kill()
        top.shows(r"1 trainers, 1 replicas")
        top.type(b"xq")
        assert top.end() == 0
        assert top.is_as_before
        assert top.raw.count(f"{ALTERNATE_SCREEN}h") == top.raw.count(f"{ALTERNATE_SCREEN}l") == 1
        assert top.raw.rindex("\x1b[?25h") > top.raw.rindex("\x1b[?25l")  # The cursor is back.


def test_an_interrupt_or_a_termination_ends_top_and_the_terminal_is_as_before(
    url: str, broker: Threaded, spawn: Spawn
) -> None:
    with (
        Terminal(spawn, "top", "--endpoint", url) as interrupted,
        Terminal(spawn, "top", "--endpoint", url, rows=5) as terminated,
    ):
        for top in (interrupted, terminated):
            top.shows("no agent has joined yet")
        interrupted.type(b"\x03")
        terminated.process.signal(signal.SIGTERM)
        assert (interrupted.end(), terminated.end()) == (130, 128 + signal.SIGTERM)
        for top in (interrupted, terminated):
            assert top.is_as_before
            assert f"{ALTERNATE_SCREEN}l" in top.raw


def interrupted_while_it_starts(path: str, *words: str) -> int:
    """In a child: Ctrl+C comes when the screen was taken, and nothing was shown yet."""
    from rich.live import Live

    def refresh(live: Live) -> None:
        patch.undo()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Live, "refresh", refresh)
        return on_terminal(path, *words)


def test_an_interrupt_while_top_starts_leaves_the_terminal_as_before(
    url: str, broker: Threaded, spawn: Spawn
) -> None:
    with Terminal(spawn, "top", "--endpoint", url, run=interrupted_while_it_starts) as top:
        assert top.end() == 130
        assert top.is_as_before
        assert top.raw.count(f"{ALTERNATE_SCREEN}h") == top.raw.count(f"{ALTERNATE_SCREEN}l") == 1


def test_top_outlives_its_broker_and_goes_on_with_the_next(
    url: str, spawn: Spawn, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    first = Threaded(config_for(url))
    with Terminal(spawn, "top", "--endpoint", url, "--interval", "0.1", "--timeout", "0.3") as top:
        epoch = top.shows("broker [0-9a-f]{16}")
        first.stop()
        top.shows("no broker answers at|did not answer")
        second = Threaded(config_for(url))
        assert top.shows("broker [0-9a-f]{16}") != epoch
        top.type(b"q")
        assert top.end() == 0
    second.stop()


def test_without_a_terminal_a_look_is_printed_as_text(
    url: str,
    broker: Threaded,
    context: zmq.Context[zmq.Socket[bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    worker = Raw(context, url)
    worker.join(worker_hello("r0"))
    before = worker.status().counters.messages_received
    assert cli.main(["top", "--once", "--endpoint", url]) == 0
    shown = capsys.readouterr().out
    assert "r0/0" in shown and "\x1b" not in shown
    assert worker.status().counters.messages_received == before + 2  # Ours, and one for the look.


@pytest.mark.parametrize("words", [["top", "--once"], ["status"]])
def test_without_a_terminal_nothing_is_cut(
    words: list[str],
    url: str,
    broker: Threaded,
    context: zmq.Context[zmq.Socket[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "engine-" + "x" * 100
    Raw(context, url).join(worker_hello(name))
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*words, "--endpoint", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all("…" not in line for line in lines)
    assert any(f"{name}/0" in line and f" {os.getpid()} " in line for line in lines)


def test_without_a_broker_top_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--endpoint", url]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
