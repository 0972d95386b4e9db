"""Proof of death: soon after it, never before it, and of the right process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tensorlease.agents.live import LiveLock
from tensorlease.broker.credentials import PeerCredentials
from tensorlease.broker.liveness import ProcessWatch, Proof, UnprovenProcessError
from tensorlease.broker.locks import LiveLocks, LockState
from tensorlease.protocol.procfs import start_time_ticks
from tensorlease.protocol.records import Process

pytestmark = pytest.mark.process

INSTANCE = "0123456789abcdef"
OTHER = "fedcba9876543210"
POLL_S, SETTLE_S = 0.02, 0.1
ENOUGH_LOOKS = 10
"""More than `SETTLE_S` holds."""
NAMESPACE = os.stat("/proc/self/ns/pid").st_ino

AGENT = """
import sys
from tensorlease.agents.live import LiveLock
lock = LiveLock(sys.argv[1], sys.argv[2])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""
SLEEPER = "import sys; print('up', flush=True); sys.stdin.read()"

Start = Callable[..., "subprocess.Popen[str]"]


class Gone:
    """Who was told to be gone, and when."""

    def __init__(self) -> None:
        self.instances: list[str] = []
        self._told = asyncio.Event()

    def __call__(self, instance: str) -> None:
        self.instances.append(instance)
        self._told.set()

    async def wait(self, limit_s: float = 10.0) -> float:
        """Seconds until the first is told."""
        before = time.monotonic()
        async with asyncio.timeout(limit_s):
            await self._told.wait()
        return time.monotonic() - before


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python program that says a line when it is up; it is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(
        program: str, *arguments: str | Path, user: int | None = None
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)]
            if user is None
            else ["setpriv", "--reuid", str(user), "--clear-groups", "sh", "-c", "echo up; read x"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
async def gone() -> Gone:
    return Gone()


class CountedLocks(LiveLocks):
    """Live locks that can be waited for until they were looked at."""

    def __init__(self, directory: str) -> None:
        super().__init__([directory])
        self._looked = asyncio.Event()

    def state(self, instance: str) -> LockState:
        self._looked.set()
        return super().state(instance)

    async def looked_at(self, times: int) -> None:
        """Waits for that many further looks."""
        async with asyncio.timeout(10):
            for _ in range(times):
                self._looked.clear()
                await self._looked.wait()


@pytest.fixture
async def locks(tmp_path: Path) -> CountedLocks:
    return CountedLocks(str(tmp_path))


@pytest.fixture
async def watch(locks: CountedLocks, gone: Gone) -> AsyncIterator[ProcessWatch]:
    before = len(os.listdir("/proc/self/fd"))
    loop = asyncio.get_running_loop()
    watch = ProcessWatch(loop, locks, gone, poll_s=POLL_S, settle_s=SETTLE_S)
    yield watch
    watch.close()
    locks.close()
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors were left open"


def named(pid: int, start: int | None = None, namespace: int = NAMESPACE) -> Process:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return Process(pid, start_time_ticks(stat) if start is None else start, namespace)


def seen(pid: int) -> PeerCredentials:
    return PeerCredentials(os.getuid(), os.getgid(), pid)


async def turns() -> None:
    """Lets the loop handle every descriptor that is ready now."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_killed_process_is_told_at_once(
    watch: ProcessWatch, gone: Gone, start: Start
) -> None:
    process = start(SLEEPER)
    assert watch.admit(INSTANCE, [named(process.pid)], seen(process.pid)) is Proof.PIDFD
    process.kill()
    assert await gone.wait() < 0.5
    assert gone.instances == [INSTANCE]
    assert watch.proof(INSTANCE) is Proof.NONE


async def test_an_agent_is_gone_only_when_all_its_processes_are(
    watch: ProcessWatch, gone: Gone, start: Start
) -> None:
    first, second = start(SLEEPER), start(SLEEPER)
    processes = [named(first.pid), named(second.pid)]
    assert watch.admit(INSTANCE, processes, seen(first.pid)) is Proof.PIDFD
    first.kill()
    first.wait(timeout=10)
    await turns()
    assert gone.instances == []
    second.kill()
    await gone.wait()
    assert gone.instances == [INSTANCE]


async def test_a_stopped_process_is_not_gone(watch: ProcessWatch, gone: Gone, start: Start) -> None:
    process = start(SLEEPER)
    watch.admit(INSTANCE, [named(process.pid)], seen(process.pid))
    process.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED)
    await turns()
    assert gone.instances == []
    process.kill()
    await gone.wait()


async def test_another_start_time_means_another_process_and_is_refused(
    watch: ProcessWatch, start: Start
) -> None:
    process = start(SLEEPER)
    with pytest.raises(UnprovenProcessError, match="another process") as caught:
        watch.admit(INSTANCE, [named(process.pid, start=5)], seen(process.pid))
    assert (caught.value.instance, caught.value.pid) == (INSTANCE, process.pid)
    assert watch.proof(INSTANCE) is Proof.NONE


async def test_a_process_that_is_gone_already_is_refused(watch: ProcessWatch, start: Start) -> None:
    process = start(SLEEPER)
    claim = named(process.pid)
    process.kill()
    process.wait(timeout=10)
    with pytest.raises(UnprovenProcessError, match="is gone"):
        watch.admit(INSTANCE, [claim], seen(process.pid))


async def test_a_pid_that_is_not_the_connected_one_is_refused(
    watch: ProcessWatch, start: Start
) -> None:
    process = start(SLEEPER)
    with pytest.raises(UnprovenProcessError, match=f"process {os.getpid()} is connected"):
        watch.admit(INSTANCE, [named(process.pid)], seen(os.getpid()))


@pytest.mark.root
async def test_a_process_of_another_user_is_refused_so_that_it_cannot_be_killed_through_us(
    watch: ProcessWatch, start: Start
) -> None:
    mine, foreign = start(SLEEPER), start("", user=54321)
    with pytest.raises(UnprovenProcessError, match="belongs to uid 54321"):
        watch.admit(INSTANCE, [named(mine.pid), named(foreign.pid)], seen(mine.pid))
    assert watch.kill(INSTANCE) == []


@pytest.mark.root
async def test_a_live_lock_of_another_user_is_refused(
    watch: ProcessWatch, start: Start, tmp_path: Path
) -> None:
    process = start(AGENT, tmp_path, INSTANCE)
    os.chown(tmp_path / INSTANCE, 54321, -1)
    with pytest.raises(UnprovenProcessError, match="live lock belongs to uid 54321"):
        watch.admit(INSTANCE, [named(process.pid)], seen(process.pid))


async def test_an_instance_whose_live_lock_another_process_holds_is_refused(
    watch: ProcessWatch, locks: CountedLocks, start: Start, tmp_path: Path
) -> None:
    agent, other = start(AGENT, tmp_path, INSTANCE), start(SLEEPER)
    for claim in (named(other.pid), named(other.pid, namespace=1)):
        with pytest.raises(UnprovenProcessError, match=f"held by process {agent.pid}"):
            watch.admit(INSTANCE, [claim], seen(other.pid))
    assert locks.holder(INSTANCE) == agent.pid
    assert watch.admit(INSTANCE, [named(agent.pid)], seen(agent.pid)) is Proof.PIDFD
    with pytest.raises(UnprovenProcessError, match=f"held by process {agent.pid}"):
        watch.admit(INSTANCE, [named(other.pid)], seen(other.pid))
    agent.kill()
    agent.wait(timeout=10)
    assert locks.holder(INSTANCE) is None
    assert locks.holder(OTHER) is None


async def test_hello_again_changes_nothing_and_other_processes_replace_the_former(
    watch: ProcessWatch, gone: Gone, start: Start
) -> None:
    first, second = start(SLEEPER), start(SLEEPER)
    one, two = named(first.pid), named(second.pid)
    watch.admit(INSTANCE, [one], seen(first.pid))
    descriptors = os.listdir("/proc/self/fd")
    watch.admit(INSTANCE, [one], seen(first.pid))
    assert os.listdir("/proc/self/fd") == descriptors
    watch.admit(INSTANCE, [one, two], seen(first.pid))
    first.kill()
    first.wait(timeout=10)
    await turns()
    assert gone.instances == []
    second.kill()
    await gone.wait()


async def test_who_said_goodbye_is_not_told_as_gone(
    watch: ProcessWatch, gone: Gone, start: Start
) -> None:
    process, other = start(SLEEPER), start(SLEEPER)
    watch.admit(INSTANCE, [named(process.pid)], seen(process.pid))
    watch.admit(OTHER, [named(other.pid)], seen(other.pid))
    watch.forget(INSTANCE)
    process.kill()
    process.wait(timeout=10)
    other.kill()
    await gone.wait()
    assert gone.instances == [OTHER]


async def test_killing_signals_every_process_of_the_agent(
    watch: ProcessWatch, gone: Gone, start: Start
) -> None:
    first, second = start(SLEEPER), start(SLEEPER)
    watch.admit(INSTANCE, [named(first.pid), named(second.pid)], seen(first.pid))
    assert watch.kill(INSTANCE) == [first.pid, second.pid]
    await gone.wait()
    assert first.wait(timeout=10) == second.wait(timeout=10) == -signal.SIGKILL
    assert watch.kill(INSTANCE) == []


@pytest.mark.parametrize("support", ["no pid", "no pidfd"])
async def test_where_no_pidfd_can_be_had_the_lock_tells(
    watch: ProcessWatch,
    locks: CountedLocks,
    gone: Gone,
    start: Start,
    tmp_path: Path,
    support: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = start(AGENT, tmp_path, INSTANCE)
    if support == "no pidfd":

        def missing(pid: int, flags: int = 0) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", missing)
    peer = seen(0 if support == "no pid" else process.pid)
    claim = named(process.pid, namespace=0 if support == "no pid" else NAMESPACE)
    assert watch.admit(INSTANCE, [claim], peer) is Proof.LOCK
    assert watch.admit(INSTANCE, [claim], peer) is Proof.LOCK
    await locks.looked_at(ENOUGH_LOOKS)
    assert gone.instances == []
    assert watch.kill(INSTANCE) == []
    process.kill()
    assert await gone.wait() >= SETTLE_S
    assert gone.instances == [INSTANCE]


async def test_a_removed_live_file_does_not_make_its_agent_gone(
    watch: ProcessWatch, locks: CountedLocks, gone: Gone, start: Start, tmp_path: Path
) -> None:
    process = start(AGENT, tmp_path, INSTANCE)
    assert watch.admit(INSTANCE, [named(process.pid, namespace=0)], seen(0)) is Proof.LOCK
    (tmp_path / INSTANCE).unlink()
    await locks.looked_at(ENOUGH_LOOKS)
    assert gone.instances == []
    process.kill()
    await gone.wait()


async def test_an_invisible_agent_without_a_live_file_is_never_told_as_gone(
    watch: ProcessWatch, gone: Gone, start: Start
) -> None:
    process = start(SLEEPER)
    assert watch.admit(INSTANCE, [named(process.pid, namespace=0)], seen(0)) is Proof.NONE
    process.kill()
    process.wait(timeout=10)
    await turns()
    assert gone.instances == []


async def test_an_invisible_agent_that_does_not_hold_its_lock_is_refused(
    watch: ProcessWatch, start: Start, tmp_path: Path
) -> None:
    process = start(SLEEPER)
    (tmp_path / INSTANCE).touch()
    with pytest.raises(UnprovenProcessError, match="holds no lock"):
        watch.admit(INSTANCE, [named(process.pid, namespace=0)], seen(0))


async def test_a_further_process_that_cannot_be_seen_is_never_taken_for_gone(
    watch: ProcessWatch, gone: Gone, start: Start
) -> None:
    process, hidden = start(SLEEPER), start(SLEEPER)
    claims = [named(process.pid), named(hidden.pid, namespace=7)]
    assert watch.admit(INSTANCE, claims, seen(process.pid)) is Proof.NONE
    process.kill()
    hidden.kill()
    process.wait(timeout=10)
    await turns()
    assert gone.instances == []


async def test_an_agent_in_the_brokers_own_process_keeps_its_lock_while_watched(
    watch: ProcessWatch, locks: CountedLocks, gone: Gone, tmp_path: Path
) -> None:
    mine = LiveLock(str(tmp_path), INSTANCE)
    mine.acquire()
    assert watch.admit(INSTANCE, [named(os.getpid())], seen(os.getpid())) is Proof.PIDFD
    assert watch.admit(INSTANCE, [named(os.getpid(), namespace=0)], seen(0)) is Proof.LOCK
    await locks.looked_at(ENOUGH_LOOKS)
    assert gone.instances == []
    watch.forget(INSTANCE)
    mine.release()


async def test_running_out_of_descriptors_is_told_and_leaves_nothing_open(
    watch: ProcessWatch, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(SLEEPER), start(SLEEPER)
    claims = [named(first.pid), named(second.pid)]
    pidfd_open = os.pidfd_open

    def exhausted(pid: int, flags: int = 0) -> int:
        if pid == second.pid:
            raise OSError(24, "Too many open files")
        return pidfd_open(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", exhausted)
    with pytest.raises(OSError, match="Too many open files"):
        watch.admit(INSTANCE, claims, seen(first.pid))
    assert watch.proof(INSTANCE) is Proof.NONE
