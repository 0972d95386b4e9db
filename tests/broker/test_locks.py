"""The lock against a second broker, and what the broker sees of the agents' locks."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tensorlease.agents.live import LiveLock
from tensorlease.broker.locks import (
    BrokerLock,
    BrokerRunningError,
    LiveLocks,
    LockState,
    PreviousRun,
)
from tensorlease.protocol.errors import ConfigError
from tensorlease.protocol.records import LiveNote, Process

from .raw_agents import eventually

INSTANCE = "0123456789abcdef"
OTHER = "fedcba9876543210"

BROKER = """
import sys
from tensorlease.broker.locks import BrokerLock
lock = BrokerLock(sys.argv[1])
print(lock.acquire().value, flush=True)
sys.stdin.read()
lock.release(clean=True)
"""
AGENT = """
import sys
from tensorlease.agents.live import LiveLock
lock = LiveLock(sys.argv[1], sys.argv[2])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
lock.release()
"""
# The child keeps everything open that it got by the fork, and says so itself.
FORKING_AGENT = """
import os, sys, time
from tensorlease.agents.live import LiveLock
lock = LiveLock(sys.argv[1], sys.argv[2])
lock.acquire()
if os.fork() == 0:
    print("child", os.getpid(), lock.held, flush=True)
    sys.stdin.read()
    os._exit(0)
while True:
    time.sleep(60)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python program; it is killed at the end if need be."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(timeout=10)


# The lock against a second broker.


@pytest.mark.process
def test_a_second_broker_is_refused_with_the_pid_of_the_first(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "broker.sock.lock"
    first = start(BROKER, path)
    assert said(first) == "none"
    with pytest.raises(BrokerRunningError) as caught:
        BrokerLock(str(path)).acquire()
    assert caught.value.pid == first.pid
    assert f"pid {first.pid}" in str(caught.value)
    assert f"{tmp_path}/broker.sock;" in str(caught.value)


@pytest.mark.process
def test_a_killed_broker_leaves_the_lock_free_and_is_known_to_have_died(
    tmp_path: Path, start: Start
) -> None:
    path = tmp_path / "broker.sock.lock"
    first = start(BROKER, path)
    said(first)
    kill(first)
    lock = BrokerLock(str(path))
    assert lock.acquire() is PreviousRun.UNCLEAN
    lock.release(clean=True)
    assert not path.exists()


def test_a_clean_end_is_known_even_where_the_file_could_not_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "l"
    path.write_text('{"pid":1,"clean":true}\n')
    lock = BrokerLock(str(path))
    assert lock.acquire() is PreviousRun.CLEAN
    lock.release(clean=False)
    assert lock.acquire() is PreviousRun.UNCLEAN
    lock.release(clean=True)


@pytest.mark.parametrize("text", ["{", "not a note"])
def test_a_note_that_cannot_be_read_counts_as_a_death(tmp_path: Path, text: str) -> None:
    path = tmp_path / "l"
    path.write_text(text)
    lock = BrokerLock(str(path))
    assert lock.acquire() is PreviousRun.UNCLEAN
    lock.release(clean=True)


def test_the_lock_holds_within_one_process_too(tmp_path: Path) -> None:
    path = str(tmp_path / "l")
    first, second = BrokerLock(path), BrokerLock(path)
    first.acquire()
    with pytest.raises(BrokerRunningError, match=f"pid {os.getpid()}"):
        second.acquire()
    first.release(clean=True)
    assert second.acquire() is PreviousRun.NONE
    second.release(clean=True)


def test_a_holder_notices_that_its_lock_file_was_removed_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "l"
    lock = BrokerLock(str(path))
    assert not lock.still_held()
    lock.acquire()
    assert lock.still_held()
    path.unlink()
    assert not lock.still_held()
    usurper = BrokerLock(str(path))
    usurper.acquire()
    assert not lock.still_held()
    lock.release(clean=True)
    assert usurper.still_held()
    usurper.release(clean=True)


def test_a_lock_file_removed_between_opening_and_locking_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "l"
    path.touch()
    flock = fcntl.flock
    removed: list[bool] = []

    def removing(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(True)
            path.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removing)
    lock = BrokerLock(str(path))
    lock.acquire()
    assert removed
    assert lock.still_held()
    lock.release(clean=True)


def test_something_else_at_the_locks_place_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="is not a file"):
        BrokerLock(str(tmp_path / "fifo")).acquire()
    (tmp_path / "target").write_text("content")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        BrokerLock(str(tmp_path / "link")).acquire()
    assert (tmp_path / "target").read_text() == "content"


# What the broker sees of the agents' locks.


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[LiveLocks]:
    locks = LiveLocks([str(tmp_path)])
    yield locks
    locks.close()


@pytest.mark.process
@pytest.mark.parametrize("kept", [False, True])
def test_the_lock_of_a_killed_agent_is_free_at_once(
    tmp_path: Path, start: Start, locks: LiveLocks, kept: bool
) -> None:
    agent = start(AGENT, tmp_path, INSTANCE)
    said(agent)
    if kept:
        assert locks.keep(INSTANCE) is LockState.HELD
    assert locks.state(INSTANCE) is LockState.HELD
    assert locks.is_held(INSTANCE)
    kill(agent)
    assert locks.state(INSTANCE) is LockState.FREE


@pytest.mark.process
def test_a_forked_child_that_lives_on_does_not_keep_the_lock(
    tmp_path: Path, start: Start, locks: LiveLocks
) -> None:
    agent = start(FORKING_AGENT, tmp_path, INSTANCE)
    word, child, held = said(agent).split()
    assert (word, held) == ("child", "False")
    assert locks.is_held(INSTANCE)
    kill(agent)
    assert locks.state(INSTANCE) is LockState.FREE
    os.kill(int(child), 0)  # It lives.
    os.kill(int(child), signal.SIGKILL)


@pytest.mark.process
def test_the_end_of_a_forked_child_does_not_free_the_lock(
    tmp_path: Path, start: Start, locks: LiveLocks
) -> None:
    agent = start(FORKING_AGENT, tmp_path, INSTANCE)
    child = int(said(agent).split()[1])
    os.kill(child, signal.SIGKILL)
    stat_file = Path(f"/proc/{child}/stat")
    eventually(lambda: stat_file.read_text().rpartition(")")[2].split()[0] == "Z")
    assert locks.is_held(INSTANCE)


@pytest.mark.process
def test_looking_never_takes_a_lock_nor_breaks_one(
    tmp_path: Path, start: Start, locks: LiveLocks
) -> None:
    agent = start(AGENT, tmp_path, INSTANCE)
    said(agent)
    for _ in range(100):
        assert locks.is_held(INSTANCE)
        assert locks.held_instances() == {INSTANCE}
    (tmp_path / OTHER).touch()
    assert locks.state(OTHER) is LockState.FREE
    mine = LiveLock(str(tmp_path), OTHER)
    mine.acquire()
    assert locks.is_held(OTHER)
    mine.release()


def test_looking_does_not_break_a_lock_of_the_brokers_own_process(
    tmp_path: Path, locks: LiveLocks
) -> None:
    mine = LiveLock(str(tmp_path), INSTANCE)
    mine.acquire()
    for _ in range(3):
        assert locks.is_held(INSTANCE)
        assert locks.held_instances() == {INSTANCE}
        locks.forget(INSTANCE)
    locks.close()
    assert LiveLocks([str(tmp_path)]).is_held(INSTANCE)
    mine.release()
    assert locks.state(INSTANCE) is LockState.FREE
    locks.close()
    assert locks.state(INSTANCE) is LockState.MISSING


@pytest.mark.process
def test_a_removed_file_is_no_proof_of_death_and_a_kept_one_still_answers(
    tmp_path: Path, start: Start, locks: LiveLocks
) -> None:
    agent = start(AGENT, tmp_path, INSTANCE)
    said(agent)
    locks.keep(INSTANCE)
    (tmp_path / INSTANCE).unlink()
    assert locks.state(INSTANCE) is LockState.HELD
    assert LiveLocks([str(tmp_path)]).state(INSTANCE) is LockState.MISSING
    kill(agent)
    assert locks.state(INSTANCE) is LockState.FREE


@pytest.mark.process
def test_a_new_broker_sees_who_lives_and_who_is_gone(
    tmp_path: Path, start: Start, locks: LiveLocks
) -> None:
    living, dying = start(AGENT, tmp_path, INSTANCE), start(AGENT, tmp_path, OTHER)
    said(living)
    said(dying)
    kill(dying)
    (tmp_path / ".0000000000000000").touch()  # Of one that has not locked it yet.
    assert locks.held_instances() == {INSTANCE}
    assert locks.free_instances() == {OTHER}
    assert locks.unsettled_instances(unlocked=False) == {INSTANCE, OTHER}


def test_the_dead_alone_are_nobody_to_wait_for_unless_agents_without_locks_may_be_there(
    tmp_path: Path, locks: LiveLocks
) -> None:
    (tmp_path / OTHER).touch()
    assert locks.unsettled_instances(unlocked=False) == frozenset()
    assert locks.unsettled_instances(unlocked=True) == {OTHER}


@pytest.mark.process
def test_only_the_file_of_a_dead_agent_is_removed(
    tmp_path: Path, start: Start, locks: LiveLocks
) -> None:
    agent = start(AGENT, tmp_path, INSTANCE)
    said(agent)
    assert not locks.remove(INSTANCE)
    assert (tmp_path / INSTANCE).exists()
    kill(agent)
    assert locks.remove(INSTANCE)
    assert not (tmp_path / INSTANCE).exists()
    assert locks.remove(INSTANCE)


def test_an_instance_that_names_another_place_is_never_opened(
    tmp_path: Path, locks: LiveLocks
) -> None:
    inside = tmp_path / "live"
    inside.mkdir()
    (tmp_path / "secret").touch()
    inner = LiveLocks([str(inside)])
    for name in ("../secret", "", ".", "..", "a/b", "a\0b", "x" * 65):
        assert inner.state(name) is LockState.MISSING
        assert inner.owner(name) is None
        assert inner.remove(name)
    assert (tmp_path / "secret").exists()


def test_a_link_or_a_fifo_is_no_live_file(tmp_path: Path, locks: LiveLocks) -> None:
    (tmp_path / "target").touch()
    (tmp_path / INSTANCE).symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / OTHER)
    assert locks.state(INSTANCE) is LockState.MISSING
    assert locks.state(OTHER) is LockState.MISSING


def test_the_owner_of_a_file_is_told(tmp_path: Path, locks: LiveLocks) -> None:
    (tmp_path / INSTANCE).touch()
    assert locks.owner(INSTANCE) == os.geteuid()
    locks.keep(INSTANCE)
    assert locks.owner(INSTANCE) == os.geteuid()
    assert locks.owner(OTHER) is None


def test_a_missing_directory_holds_nobody(tmp_path: Path) -> None:
    locks = LiveLocks([str(tmp_path / "absent")])
    assert locks.held_instances() == frozenset()
    assert locks.state(INSTANCE) is LockState.MISSING


@pytest.mark.process
def test_all_files_are_closed_again(tmp_path: Path, start: Start) -> None:
    agent = start(AGENT, tmp_path, INSTANCE)
    said(agent)
    before = os.listdir("/proc/self/fd")
    locks = LiveLocks([str(tmp_path)])
    locks.keep(INSTANCE)
    locks.held_instances()
    locks.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.root
@pytest.mark.process
def test_the_lock_is_seen_across_pid_namespaces(
    tmp_path: Path, start: Start, locks: LiveLocks
) -> None:
    program = f"""
import subprocess, sys
subprocess.run(["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", {AGENT!r}, *sys.argv[1:]])
"""
    agent = start(program, tmp_path, INSTANCE)
    assert said(agent) == "held"
    assert locks.state(INSTANCE) is LockState.HELD
    assert agent.stdin is not None
    (inner,) = _running(AGENT, tmp_path)
    os.kill(inner, signal.SIGKILL)
    agent.wait(timeout=10)
    assert locks.state(INSTANCE) is LockState.FREE


def _running(program: str, directory: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            mine = os.fsencode(directory) in arguments
            if mine and arguments[1:3] == [b"-c", program.encode()]:
                found.append(int(entry.name))
    return found


# What relays leave in their live files.

NOTE = LiveNote("policy", "a", 0, 7, [Process(71, 9, 3)])


def test_a_live_file_says_who_reads_for_its_relay_and_keeps_its_lock_when_it_is_read(
    tmp_path: Path,
) -> None:
    lock = LiveLock(str(tmp_path), INSTANCE, msgspec.msgpack.encode(NOTE))
    lock.acquire()
    LiveLock(str(tmp_path), OTHER).acquire()
    locks = LiveLocks([str(tmp_path)])
    assert locks.notes() == {INSTANCE: NOTE}
    assert locks.held_instances() == {INSTANCE, OTHER}
    locks.close()


@pytest.mark.process
def test_the_note_of_a_relay_that_was_killed_is_read(tmp_path: Path, start: Start) -> None:
    program = AGENT.replace("sys.argv[2])", "sys.argv[2], bytes.fromhex(sys.argv[3]))")
    relay = start(program, tmp_path, INSTANCE, msgspec.msgpack.encode(NOTE).hex())
    assert said(relay) == "held"
    kill(relay)
    locks = LiveLocks([str(tmp_path)])
    assert locks.free_instances() == {INSTANCE}
    assert locks.notes() == {INSTANCE: NOTE}


def test_a_live_file_that_says_something_else_counts_as_one_that_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / INSTANCE).write_bytes(b"else")
    assert LiveLocks([str(tmp_path)]).notes() == {}
    assert INSTANCE in caplog.text
