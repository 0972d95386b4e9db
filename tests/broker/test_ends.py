"""How a broker ends: as PID 1, by a defect in whatever part, and where it cannot even begin."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace

from tensorlease.agents.live import LiveLock
from tensorlease.broker import server
from tensorlease.broker.logs import RepeatHandler
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Outcome, QueryKind, Terms

from .raw_agents import (
    DEADLINE_S,
    Raw,
    Spawn,
    Threaded,
    broker_process,
    config_for,
    eventually,
    listens,
    trainer_hello,
    worker_hello,
)

# ---------------------------------------------------------------- as PID 1


def child_of(pid: int) -> int:
    """The one child of a process."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    eventually(lambda: path.read_text().split())
    return int(path.read_text().split()[0])


def locked(url: str, hello: m.TrainerHello | m.WorkerHello) -> LiveLock:
    """Holds the live lock of an agent that the broker's PID namespace does not show."""
    lock = LiveLock(f"{url.removeprefix('ipc://')}.live", hello.instance)
    lock.acquire()
    return lock


@pytest.mark.root
@pytest.mark.process
@pytest.mark.parametrize(
    ("signals", "limit_s"),
    [
        ([signal.SIGHUP, signal.SIGTERM], 5.0),
        ([signal.SIGTERM, signal.SIGTERM], 2.0),
        ([signal.SIGINT, signal.SIGINT], 2.0),
    ],
    ids=["HUP and TERM", "TERM twice", "INT twice"],
)
def test_as_pid_1_with_a_round_open_it_ends_in_order_and_at_a_second_signal_at_once(
    signals: list[int], limit_s: float, url: str, raw: Callable[[], Raw], spawn: Spawn
) -> None:
    words = ["-m", "tensorlease.cli", "broker", "--endpoint", url]
    outer = spawn(
        "-c",
        "import os, sys; os.execvp('unshare', ['unshare', '--pid', '--fork', '--mount-proc',"
        f" sys.executable, *{words!r}])",
    )
    eventually(lambda: outer.process.poll() is not None or listens(url))
    broker = child_of(outer.pid)
    assert Path(f"/proc/{broker}/status").read_text().split("NSpid:")[1].split()[1] == "1"
    trainer, worker = raw(), raw()
    # It sees the pids of nobody outside of its namespace: their locks stand for them.
    hello, whello = replace(trainer_hello(), locked=True), worker_hello(locked=True)
    locks = [locked(url, hello), locked(url, whello)]
    worker.join(whello)
    group = trainer.join(hello).group
    trainer.send(m.Open(1, 1, Terms(1)))
    worker.receive(m.Prepare)

    began = time.monotonic()
    os.kill(broker, signals[0])
    hung_up = signals[0] == signal.SIGHUP
    if hung_up:
        assert not trainer.status().stopping  # It lives, and admits rounds.
    else:
        eventually(lambda: trainer.status().stopping)
    os.kill(broker, signals[1])
    if hung_up:
        # It waits for the round under way, and ends when that has.
        eventually(lambda: trainer.status().stopping)
        trainer.send(m.Batch(1, 1, 0, [0], False, 1, total=1), b"table")
        worker.receive(m.Deliver)
        worker.send(m.Staged(1, group, 1, 0, 0, vote=True))
        worker.receive(m.Commit)
        worker.send(m.Committed(1, group, 1, True))
        assert trainer.receive(m.Finished).result.outcome is Outcome.COMMITTED
    trainer.receive(m.Stopping)
    worker.receive(m.Stopping)
    code, errors = outer.end()
    assert (code, time.monotonic() - began < limit_s) == (0, True), errors
    for lock in locks:
        lock.release()
    directory = Path(url.removeprefix("ipc://")).parent
    assert [path.name for path in directory.iterdir() if not path.name.endswith(".live")] == []


def test_the_broker_starts_no_process_so_none_is_left_to_be_reaped(url: str, spawn: Spawn) -> None:
    child = broker_process(spawn, url)
    threads = Path(f"/proc/{child.pid}/task")
    assert [x for x in threads.iterdir() if (x / "children").read_text()] == []
    child.signal(signal.SIGTERM)
    assert child.end()[0] == 0


# ---------------------------------------------------------------- by a defect

BREAKS = """
import sys
from tensorlease import cli
from tensorlease.broker import dispatch, wire

calls = 0
former = {part}

def breaks(*args, **more):
    global calls
    calls += 1
    if calls == {at}:
        raise RuntimeError("this part broke")
    return former(*args, **more)

{part} = breaks
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("part", "at"),
    [
        ("dispatch.Dispatcher._tick", 1),
        ("wire.Wire.drain", 2),
        ("wire.Wire._read", 1),
        ("wire.Wire.look_again", 4),
    ],
    ids=["the deadlines", "the receiver", "a message", "the housekeeping"],
)
def test_whatever_part_breaks_once_the_process_ends_at_once_with_an_error(
    part: str, at: int, url: str, tmp_path: Path, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(DEADLINE_S)
        environ = os.environ | {
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "200000",
            "TENSORLEASE_DURATIONS__BEAT": "0.05",
            "TENSORLEASE_DURATIONS__SILENT": "0.1",
        }
        program = BREAKS.format(part=part, at=at)
        child = spawn("-c", program, "broker", "--endpoint", url, env=environ)
        eventually(lambda: child.process.poll() is not None or listens(url))
        agent = raw()
        agent.send(trainer_hello())  # Time and messages go through every part.
        code, errors = child.end()
        assert code == 1
        assert "a defect ends the broker" in errors and "this part broke" in errors
        assert not listens(url)
        listener.setblocking(False)
        said = []
        while True:
            try:
                said.append(listener.recv(4096))
            except BlockingIOError:
                break
        assert b"STOPPING=1" in said[-1]  # No word of a watchdog after it.


def test_a_sweep_that_waits_while_the_broker_ends_is_made(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, go = threading.Event(), threading.Event()
    swept: list[frozenset[str]] = []

    def slow(_: Path, gone: frozenset[str]) -> list[str]:
        came.set()
        assert go.wait(20.0)
        swept.append(gone)
        return []

    monkeypatch.setattr(server, "sweep", slow)
    running = Threaded(config_for(url))
    running.call(lambda: running.broker._sweep("trainer 1"))
    assert came.wait(10.0)
    running.call(lambda: running.broker._sweep("trainer 2"))
    running.call(running.broker.stop)
    eventually(lambda: running.broker._ended.done())
    go.set()
    running.stop()
    assert running.error is None
    assert swept == [frozenset({"trainer 1"}), frozenset({"trainer 2"})]


def test_a_sweep_of_shared_memory_that_breaks_is_said_and_the_next_one_is_made(
    url: str,
    raw: Callable[[], Raw],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    swept: list[frozenset[str]] = []

    def breaks_once(directory: Path, *, gone: frozenset[str]) -> list[str]:
        swept.append(gone)
        if len(swept) == 1:
            raise RuntimeError("this part broke")
        return []

    monkeypatch.setattr(server, "sweep", breaks_once)
    running = Threaded(config_for(url))
    try:
        running.call(lambda: running.broker._sweep("trainer 1"))
        eventually(lambda: len(swept) == 1 and not running.broker._sweeping)
        running.call(lambda: running.broker._sweep("trainer 2"))
        eventually(lambda: len(swept) == 2 and not running.broker._sweeping)
        raw().join(worker_hello())  # It routes.
    finally:
        running.stop()
    assert swept == [frozenset({"trainer 1"}), frozenset({"trainer 2"})]
    assert "cannot look for shared memory of dead trainers: this part broke" in caplog.text


# ---------------------------------------------------------------- where it cannot begin

BEGINS = """
import sys, time
from tensorlease import cli
import tensorlease.broker.command
for path in sys.argv[1:]:
    began = time.monotonic()
    code = cli.main(["broker", "--endpoint", path])
    print(code, time.monotonic() - began < 1.0)
"""
MOUNTS = """
for place in readonly full; do
  mkdir $place && mount -t tmpfs -o size=64k,nr_inodes=20,mode=700 none $place || exit 1
done
mount -o remount,ro readonly
for i in $(seq 40); do touch full/$i 2>/dev/null; done
"$@"
"""


@pytest.mark.root
@pytest.mark.process
def test_a_directory_that_cannot_hold_the_socket_ends_it_within_a_second_by_one_line(
    tmp_path: Path,
) -> None:
    cannot = {
        tmp_path / "readonly" / "b.sock": "Read-only file system",
        tmp_path / "full" / "b.sock": "No space left on device",
        tmp_path / "missing" / "d" / "b.sock": "No such file or directory",
    }
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNTS, "sh", sys.executable, "-c", BEGINS, *cannot],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout.splitlines() == 3 * ["2 True"], done
    for line, (path, reason) in zip(done.stderr.splitlines(), cannot.items(), strict=True):
        assert line.startswith(f"error: endpoint 'ipc://{path}': cannot listen: {reason}")


# ---------------------------------------------------------------- under a flood


def test_a_peer_that_sends_a_thousand_bad_messages_is_a_few_lines_and_disturbs_nobody(
    url: str, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    handler = RepeatHandler(stream)
    log = logging.getLogger("tensorlease")
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "propagate", False)
    running = Threaded(config_for(url))
    try:
        flooding, other = Raw(context, url), Raw(context, url)
        flooding.join(worker_hello("flooding"))
        other.join(worker_hello("other"))
        for n in range(1000):
            flooding.socket.send(b"rubbish %d" % n)
        other.beat()
        eventually(lambda: other.status().counters.bad_messages == 1000)
        assert flooding.receive(m.Refused).code is Code.BAD_MESSAGE
    finally:
        running.stop()
    handler.flush_repeats(everything=True)
    lines = [line for line in stream.getvalue().splitlines() if "bad message" in line]
    assert len(lines) < 20
    assert lines[-1].endswith("(repeated 997 times)")


def test_after_a_defect_nothing_is_read_nor_judged_any_more(
    url: str, raw: Callable[[], Raw]
) -> None:
    """What was read half done would be waited for, and what is known is not to be relied on."""
    served = Threaded(config_for(url))
    agent = raw()
    agent.join(trainer_hello())
    agent.beat()  # All that follows a Hello has come.
    halted = threading.Event()
    ticks: list[float] = []

    def halt() -> None:
        dispatcher = served.broker._dispatcher
        dispatcher.halt()
        dispatcher._ledger.tick = ticks.append  # type: ignore[assignment,method-assign]
        dispatcher._tick()
        halted.set()

    served.call(halt)
    try:
        assert halted.wait(10.0)
        agent.send(m.Query(1, QueryKind.STATUS))
        assert not agent.socket.poll(200)
        assert ticks == []
    finally:
        served.stop()
