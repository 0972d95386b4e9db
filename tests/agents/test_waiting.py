"""What a wait that lasts says in the log, and when."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tensorlease.agents import DeadlineError, StillLeasedError, TrainerAgent, WorkerAgent, waiting
from tensorlease.agents.waiting import Wait, seconds

from ..broker.raw_agents import Threaded, eventually
from .conftest import StartWorker
from .rings import SLOT, Held

if TYPE_CHECKING:
    from torch import Tensor

# ---------------------------------------------------------------- the pure part


def said_at(until: int, deadline: float = float("inf"), *, quiet: bool = False) -> list[int]:
    """Seconds after its beginning at which a wait says something, looked at once a second."""
    wait = Wait(100.0, 100.0 + deadline, quiet=quiet)
    return [after for after in range(until) if wait.due(100.0 + after)]


def test_a_wait_says_something_after_5_s_after_30_s_and_then_once_a_minute() -> None:
    assert said_at(300) == [5, 30, 90, 150, 210, 270]
    assert said_at(300, quiet=True) == []


def test_after_a_stall_it_does_not_catch_up() -> None:
    wait = Wait(0.0, 1000.0)
    assert [now for now in (0.0, 200.0, 201.0, 259.0, 260.0) if wait.due(now)] == [200.0, 260.0]


def test_it_wakes_twice_a_second_to_say_something_and_at_its_deadline() -> None:
    wait = Wait(100.0, 140.0)
    assert (wait.pause(100.0), wait.pause(104.75), wait.pause(105.5)) == (0.5, 0.25, 0.0)
    assert wait.due(105.5)
    assert (wait.pause(105.5), wait.pause(129.75)) == (0.5, 0.25)
    assert wait.due(130.0)
    assert (wait.pause(130.0), wait.pause(139.75), wait.pause(150.0)) == (0.5, 0.25, 0.0)
    assert (wait.over(139.9), wait.over(140.0)) == (False, True)
    assert wait.lasted(150.0) == 40.0


def test_times_are_said_as_people_read_them() -> None:
    spans = (0.0, 0.00001, 0.05003, 0.19998, 1.52, 5.003, 9.97, 59.98, 3600.2)
    assert [seconds(span) for span in spans] == [
        *("0 s", "0 s", "0.05 s", "0.2 s", "1.5 s", "5 s", "10 s", "60 s", "3600 s")
    ]


# ---------------------------------------------------------------- the waits of agents

torch = pytest.importorskip("torch")
quick = pytest.mark.usefixtures("quick_lines")


@pytest.fixture
def quick_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_LINE_S", 0.05)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns the lines of waits that have lasted, so far."""
    caplog.set_level(logging.INFO, "tensorlease")

    def read() -> list[str]:
        found = [record for record in caplog.records if "still waits: " in record.getMessage()]
        assert all(record.levelno == logging.WARNING for record in found)
        return [record.getMessage() for record in found]

    return read


Lines = Callable[[], list[str]]


@quick
def test_wait_ready_says_early_which_replica_finds_no_source_for_what(
    trainer: TrainerAgent, start_worker: StartWorker, lines: Lines
) -> None:
    start_worker("engine0", {"other.name": torch.zeros(3)})
    eventually(lambda: "engine0" in trainer.replicas)
    with pytest.raises(DeadlineError):
        trainer.wait_ready(timeout=1.5)
    (line,) = lines()
    assert line.startswith(
        f"trainer {trainer.instance} of channel 'policy' still waits: no replica of"
    )
    assert "engine0" in line
    assert "other.name: not offered" in line


@quick
def test_publish_says_whom_it_waits_for_by_name_and_pid_and_once_for_all_that_time(
    trainer: TrainerAgent, start_worker: StartWorker, lines: Lines
) -> None:
    hook = Held()
    worker = start_worker("a", {"w": torch.zeros(3)}, hook)
    trainer.wait_ready()
    publishing = threading.Thread(target=trainer.publish, args=(1,))
    publishing.start()
    assert hook.came.wait(10.0)
    eventually(lambda: lines())
    hook.go.set()
    publishing.join(10.0)
    line = lines()[0]
    assert "version 1 (call 1) is not finished after" in line
    assert trainer.instance in line
    pid = worker._core.me.processes[0].pid
    assert f"a/0 (pid {pid})" in line or "not admitted yet" in line


@quick
async def test_a_coroutine_that_waits_says_so_too(
    trainer: TrainerAgent, start_worker: StartWorker, lines: Lines
) -> None:
    hook = Held()
    start_worker("a", {"w": torch.zeros(3)}, hook)
    await asyncio.to_thread(trainer.wait_ready)
    publishing = asyncio.create_task(trainer.apublish(1))
    await asyncio.to_thread(eventually, lambda: lines())
    hook.go.set()
    assert (await publishing).ok
    line = lines()[0]
    assert "version 1 (call 1) is not finished" in line


@quick
def test_a_wait_for_a_slot_says_whose_release_is_missing(
    ring_trainer: TrainerAgent, start_worker: StartWorker, lines: Lines
) -> None:
    hook = Held()
    target = {f"w{i}": torch.zeros(SLOT // 4) for i in range(4)}
    start_worker("a", target, hook)

    def sent() -> None:
        with ring_trainer.open_round(1) as r:
            for name in target:
                r.send(name, torch.ones(SLOT // 4))

    sending = threading.Thread(target=sent)
    sending.start()
    assert hook.came.wait(10.0)
    eventually(
        lambda: any("no slot of the ring" in line and "a/0 (pid " in line for line in lines())
    )
    hook.go.set()
    sending.join(10.0)
    assert ring_trainer.last_version == 1


@quick
def test_a_step_that_waits_says_who_reads_and_how_to_give_the_round_up(
    trainer: TrainerAgent, start_worker: StartWorker, lines: Lines
) -> None:
    hook = Held()
    start_worker("a", {"w": torch.zeros(3)}, hook)
    trainer.wait_ready()
    handle = trainer.publish_nowait(1)
    assert hook.came.wait(10.0)
    eventually(lambda: trainer._core.state.calls[1].receivers)
    with pytest.raises(StillLeasedError):
        trainer.wait_writable(timeout=0.3)
    hook.go.set()
    assert handle.result(10.0).ok
    (line,) = lines()
    assert "a/0 (pid " in line
    assert line.endswith("trainer.void(1)")


@quick
def test_a_trainer_that_closes_with_rounds_under_way_names_them_and_the_workers(
    broker: Threaded,
    url: str,
    start_worker: StartWorker,
    lines: Lines,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer, hook = TrainerAgent("policy", endpoint=url), Held()
    trainer.register({"w": torch.ones(3)})
    start_worker("a", {"w": torch.zeros(3)}, hook)
    trainer.wait_ready()
    trainer.publish_nowait(1)
    assert hook.came.wait(10.0)
    eventually(lambda: trainer._core.state.calls[1].receivers)
    trainer.close(timeout=0.2)
    hook.go.set()
    (line,) = lines()
    assert "its rounds have not ended" in line
    (last,) = [r.getMessage() for r in caplog.records if "0.2 s after close()" in r.getMessage()]
    assert "version 1: " in last
    assert "a/0 (pid " in last


@quick
def test_a_worker_without_work_says_nothing(
    trainer: TrainerAgent, worker: WorkerAgent, lines: Lines
) -> None:
    target: dict[str, Tensor] = {"w": torch.zeros(3)}
    worker.attach(target)
    assert worker.step(0.3) is None
    with pytest.raises(DeadlineError):
        worker.wait_for(1, timeout=0.3)
    assert lines() == []


@quick
def test_an_agent_that_is_not_let_in_says_at_once_why(
    trainer: TrainerAgent, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    second = TrainerAgent("policy", endpoint=url, connect_timeout=0.3)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "tensorlease"), pytest.raises(Exception, match="rank 0"):
        second.register({"w": torch.ones(3)})
    second.close(timeout=0.0)
    said = [r for r in caplog.records if "is held by pid" in r.getMessage()]
    assert len(said) == 1
    assert time.monotonic() - began < 5.0
