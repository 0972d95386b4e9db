"""Agents without a connection: when they are known to be gone, and when they are not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tensorlease.agents.live import LiveLock
from tensorlease.agents.process import this_process
from tensorlease.broker import absentees as module
from tensorlease.broker.absentees import Absentees, ReaderWatch
from tensorlease.broker.locks import LiveLocks
from tensorlease.protocol.procfs import start_time_ticks
from tensorlease.protocol.records import Process

INSTANCE = "a" * 16
DEADLINE_S = 10.0


class Told:
    """What was reported, and a way to wait for the first report."""

    def __init__(self) -> None:
        self.gone: dict[str, str] = {}
        self.any = asyncio.Event()

    def __call__(self, instance: str, how: str) -> None:
        self.gone[instance] = how
        self.any.set()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


def process_of(child: subprocess.Popen[bytes]) -> Process:
    start = start_time_ticks(Path(f"/proc/{child.pid}/stat").read_text())
    return Process(child.pid, start, this_process().namespace)


async def looked_at(told: Told, locks: LiveLocks, *processes: Process) -> dict[str, str]:
    """What is known after a few looks, or as soon as something is."""
    watch = Absentees(asyncio.get_running_loop(), locks, told)
    watch.add(INSTANCE, processes)
    try:
        async with asyncio.timeout(1.0):
            await told.any.wait()
    except TimeoutError:
        pass
    finally:
        watch.close()
    return told.gone


@pytest.mark.process
async def test_a_process_that_ended_is_told_once(sleeper: subprocess.Popen[bytes]) -> None:
    told, process = Told(), process_of(sleeper)
    watch = Absentees(asyncio.get_running_loop(), LiveLocks([]), told)
    watch.add(INSTANCE, [process])
    sleeper.kill()
    async with asyncio.timeout(DEADLINE_S):
        await told.any.wait()
    assert told.gone == {INSTANCE: "its process ended"}
    watch.close()


async def test_a_living_process_is_not_gone() -> None:
    assert await looked_at(Told(), LiveLocks([]), this_process()) == {}


async def test_another_process_of_the_same_number_is_not_the_one() -> None:
    me = this_process()
    other = msgspec.structs.replace(me, start=me.start + 1)
    assert INSTANCE in await looked_at(Told(), LiveLocks([]), other)


async def test_a_process_of_another_namespace_is_never_taken_for_gone() -> None:
    foreign = Process(2**22 - 1, 1, this_process().namespace + 1)
    assert await looked_at(Told(), LiveLocks([]), foreign) == {}


async def test_a_lock_that_stays_free_is_proof_and_one_that_is_held_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.3)
    (tmp_path / INSTANCE).touch()
    told = await looked_at(Told(), LiveLocks([str(tmp_path)]))
    assert told == {INSTANCE: "its live lock is free"}
    lock = LiveLock(str(tmp_path), INSTANCE)
    lock.acquire()
    assert await looked_at(Told(), LiveLocks([str(tmp_path)])) == {}
    lock.release()


async def test_the_time_for_which_a_lock_was_seen_free_counts_when_its_processes_become_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.3)
    told = Told()
    (tmp_path / INSTANCE).touch()
    hidden = Process(2**22 - 1, 1, this_process().namespace + 1)
    watch = Absentees(asyncio.get_running_loop(), LiveLocks([str(tmp_path)]), told)
    watch.add(INSTANCE)
    async with asyncio.timeout(DEADLINE_S):
        while not told.gone:
            # Each agent that announces its round names them once more.
            await asyncio.sleep(0.05)
            watch.add(INSTANCE, [hidden])
    assert told.gone == {INSTANCE: "its live lock is free"}
    watch.close()


async def test_who_has_announced_itself_is_looked_at_no_more(tmp_path: Path) -> None:
    told = Told()
    me = this_process()
    watch = Absentees(asyncio.get_running_loop(), LiveLocks([]), told)
    watch.add(INSTANCE, [msgspec.structs.replace(me, start=1)])
    watch.discard(INSTANCE)
    watch.add("b" * 16, [msgspec.structs.replace(me, start=1)])
    async with asyncio.timeout(DEADLINE_S):
        await told.any.wait()
    assert list(told.gone) == ["b" * 16]
    watch.close()


# ---------------------------------------------------------------- readers of relays


@pytest.mark.process
async def test_readers_are_told_as_gone_when_all_of_them_are(
    sleeper: subprocess.Popen[bytes],
) -> None:
    told, process = Told(), process_of(sleeper)
    watch = ReaderWatch(asyncio.get_running_loop(), told)
    ended = msgspec.structs.replace(process, start=process.start + 1)
    watch.add(INSTANCE, [ended, process])
    watch.add("b" * 16, [])
    watch.add("c" * 16, [ended])
    async with asyncio.timeout(DEADLINE_S):
        await told.any.wait()
    assert told.gone.keys() == {"c" * 16}
    told.any.clear()
    sleeper.kill()
    async with asyncio.timeout(DEADLINE_S):
        await told.any.wait()
    assert told.gone.keys() == {INSTANCE, "c" * 16}
    assert f"have ended (pid {process.pid}, {process.pid})" in told.gone[INSTANCE]
    watch.close()


@pytest.mark.process
async def test_readers_of_another_pid_namespace_and_those_let_go_are_never_told(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    told, process = Told(), process_of(sleeper)
    watch = ReaderWatch(asyncio.get_running_loop(), told)
    sleeper.kill()
    sleeper.wait()
    elsewhere = msgspec.structs.replace(process, namespace=1)
    for name, reader in (("b", elsewhere), ("c", process), ("d", process)):
        watch.add(name * 16, [reader])
    watch.discard("c" * 16)
    async with asyncio.timeout(DEADLINE_S):
        await told.any.wait()
    assert told.gone.keys() == {"d" * 16}
    watch.close()
