"""The agent's lock; that the broker sees it rightly is told in tests/broker/test_locks.py."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorlease.agents.live import LiveLock
from tensorlease.broker.locks import LiveLocks, LockState
from tensorlease.protocol.errors import ClosedError, ConfigError, NoBrokerError

INSTANCE = "0123456789abcdef"


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[LiveLock]:
    lock = LiveLock(str(tmp_path), INSTANCE)
    yield lock
    lock.release()


def test_a_taken_lock_has_one_private_file_of_its_name(tmp_path: Path, lock: LiveLock) -> None:
    assert not lock.held
    lock.acquire()
    assert lock.held
    assert [path.name for path in tmp_path.iterdir()] == [INSTANCE]
    assert stat.S_IMODE((tmp_path / INSTANCE).stat().st_mode) == 0o600


def test_in_a_groups_directory_the_group_can_read_the_file(tmp_path: Path, lock: LiveLock) -> None:
    tmp_path.chmod(0o3770)
    lock.acquire()
    assert stat.S_IMODE((tmp_path / INSTANCE).stat().st_mode) == 0o640


def test_taking_it_again_changes_nothing(tmp_path: Path, lock: LiveLock) -> None:
    lock.acquire()
    inode = (tmp_path / INSTANCE).stat().st_ino
    lock.acquire()
    assert (tmp_path / INSTANCE).stat().st_ino == inode


def test_a_removed_file_is_made_again_and_the_first_lock_stays(
    tmp_path: Path, lock: LiveLock
) -> None:
    lock.acquire()
    seen = LiveLocks([str(tmp_path)])
    seen.keep(INSTANCE)
    (tmp_path / INSTANCE).unlink()
    lock.acquire()
    assert LiveLocks([str(tmp_path)]).state(INSTANCE) is LockState.HELD
    assert seen.state(INSTANCE) is LockState.HELD
    lock.release()
    seen.close()


def test_letting_go_removes_the_file_and_closes_everything(tmp_path: Path, lock: LiveLock) -> None:
    before = len(os.listdir("/proc/self/fd"))
    lock.acquire()
    lock.release()
    lock.release()
    assert not lock.held
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_a_cut_short_try_left_is_no_obstacle(tmp_path: Path, lock: LiveLock) -> None:
    (tmp_path / f".{INSTANCE}").touch()
    lock.acquire()
    assert [path.name for path in tmp_path.iterdir()] == [INSTANCE]


def test_without_the_brokers_directory_there_is_no_broker(tmp_path: Path) -> None:
    with pytest.raises(NoBrokerError, match=f"no directory {tmp_path}/absent"):
        LiveLock(f"{tmp_path}/absent", INSTANCE).acquire()


def test_a_place_that_cannot_be_written_is_named_with_the_systems_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"cannot lock {tmp_path}/file/.*: Not a directory"):
        LiveLock(f"{tmp_path}/file", INSTANCE).acquire()


FORKED = """
import os, sys
from tensorlease.agents.live import LiveLock
from tensorlease.agents.process import this_process
lock = LiveLock(sys.argv[1], sys.argv[2])
lock.acquire()
parent = this_process()
child = os.fork()
if child == 0:
    lock.release()
    try:
        lock.acquire()
    except Exception as error:
        print(type(error).__name__, lock.held)
    assert this_process().pid == os.getpid() != parent.pid
    assert this_process().namespace == parent.namespace
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
print(lock.held, os.listdir(sys.argv[1]) == [sys.argv[2]], this_process() is parent, flush=True)
"""


@pytest.mark.process
def test_a_forked_child_can_neither_let_go_nor_take_over(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path), INSTANCE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.splitlines() == [f"{ClosedError.__name__} False", "True True True"], done
    assert LiveLocks([str(tmp_path)]).state(INSTANCE) is LockState.FREE


EXEC = """
import os, sys
from tensorlease.agents.live import LiveLock
LiveLock(sys.argv[1], sys.argv[2]).acquire()
os.execv("/bin/sh", ["sh", "-c", "echo running; read x"])
"""


@pytest.mark.process
def test_a_program_that_takes_the_place_of_the_agent_does_not_keep_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXEC, str(tmp_path), INSTANCE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        assert LiveLocks([str(tmp_path)]).state(INSTANCE) is LockState.FREE
        assert process.poll() is None
        process.communicate("\n")
