"""Log lines and errors name whom they are about, and the way out."""

from __future__ import annotations

import logging
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tensorlease.agents import (
    ClosedError,
    ConfigError,
    DeadlineError,
    ExportError,
    TrainerAgent,
    WorkerAgent,
)

from ..broker.raw_agents import Threaded, eventually
from .conftest import StartWorker
from .serving import weights, work_until

torch = pytest.importorskip("torch")


def raising(*_: object) -> None:
    raise ValueError("no room")


@pytest.mark.parametrize(
    ("give", "name"),
    [
        (WorkerAgent.on_prepare, "its on_prepare"),
        (WorkerAgent.on_commit, "its on_commit"),
        (WorkerAgent.on_stage, "its copy of a batch"),
    ],
)
def test_a_hook_that_raises_is_logged_with_the_worker_the_hook_and_the_version(
    trainer: TrainerAgent,
    worker: WorkerAgent,
    caplog: pytest.LogCaptureFixture,
    give: Callable[[WorkerAgent, Callable[..., None]], object],
    name: str,
) -> None:
    if give is not WorkerAgent.on_stage:
        worker.attach(weights())
    give(worker, raising)
    with caplog.at_level(logging.ERROR, "tensorlease.agents"):
        work_until(worker, lambda: trainer.replicas and trainer.replicas["a"].ready)
        handle = trainer.publish_nowait(1)
        work_until(worker, lambda: handle.finished.done)
    lines = [record.getMessage() for record in caplog.records]
    assert (
        f"worker a/0 of channel 'policy', version 1 (call 1): {name}: ValueError: no room" in lines
    )


def test_a_process_that_sets_up_no_logging_prints_warnings_to_stderr() -> None:
    code = "from tensorlease.agents.poll_loop import log; log.warning('torn')"
    command = [sys.executable, "-P", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=True)
    assert ran.stderr == "torn\n"


@pytest.mark.parametrize(
    ("give", "name"),
    [
        (WorkerAgent.on_prepare, "on_prepare"),
        (WorkerAgent.on_commit, "on_commit"),
        (WorkerAgent.on_stage, "on_stage"),
    ],
)
def test_the_reason_that_travels_names_the_hook_that_raised(
    trainer: TrainerAgent,
    worker: WorkerAgent,
    give: Callable[[WorkerAgent, Callable[..., None]], object],
    name: str,
) -> None:
    if give is not WorkerAgent.on_stage:
        worker.attach(weights())
    give(worker, raising)
    work_until(worker, lambda: trainer.replicas and trainer.replicas["a"].ready)
    handle = trainer.publish_nowait(1)
    work_until(worker, lambda: handle.finished.done)
    result = handle.result()
    assert result.receivers["a/0"].reason == f"{name} raised ValueError: no room"


def test_a_copy_that_fails_is_no_hook_that_raised(
    trainer: TrainerAgent, worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.attach(weights())
    monkeypatch.setattr(worker._intake, "copy", raising)
    work_until(worker, lambda: trainer.replicas and trainer.replicas["a"].ready)
    handle = trainer.publish_nowait(1)
    work_until(worker, lambda: handle.finished.done)
    assert handle.result().receivers["a/0"].reason == "ValueError: no room"


def test_a_round_that_cannot_be_voided_is_refused_with_those_that_can(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    with pytest.raises(ConfigError, match="7 is no round .* of which there is none"):
        trainer.void(7)
    start_worker("a", weights())
    assert trainer.publish(3, timeout=20.0).ok
    with pytest.raises(ConfigError, match="7 is no round .* or a version of 3"):
        trainer.void(7)


def test_what_is_refused_is_named_with_the_way_out(
    broker: Threaded, url: str, trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    with pytest.raises(ConfigError, match=r"no tensors were given to register with <TrainerAgent"):
        trainer.register({})
    with pytest.raises(ConfigError, match=r"no tensors were given to attach to <WorkerAgent"):
        worker.attach({})
    with pytest.raises(ExportError, match="'x' was given twice: give each tensor a name"):
        trainer.register([("x", torch.ones(1)), ("x", torch.ones(1))])
    buffers = trainer.register({"taken": torch.ones(1)})
    trainer.unregister(buffers, timeout=20.0)
    with pytest.raises(ConfigError, match=r"\(taken ...\) are not registered with <TrainerAgent"):
        trainer.unregister(buffers)
    connection = trainer._connection
    trainer.close(timeout=1.0)
    eventually(lambda: connection.stage.value == "ended")
    with pytest.raises(ClosedError, match=f"trainer {trainer.instance} of channel 'policy'"):
        connection.raise_if_broken()
    with pytest.raises(ClosedError, match="is closed: make a new one"):
        trainer.publish(1)


def test_arguments_of_the_wrong_kind_are_refused_with_the_right_one(trainer: TrainerAgent) -> None:
    wrong: Any = {1: torch.ones(1)}
    with pytest.raises(ExportError, match="'1' has no usable name: name 1 is of type int"):
        trainer.register(wrong)
    wrong = {"a": pytest.importorskip("numpy").ones(1)}
    with pytest.raises(ExportError, match=r"'a' is a ndarray, .* torch\.from_numpy"):
        trainer.register(wrong)
    wrong = "bfloat16"
    with pytest.raises(ConfigError, match=r"dtype 'bfloat16': .*, torch\.bfloat16 say"):
        trainer.register({"a": torch.ones(1)}, dtype=wrong)
    with pytest.raises(ExportError, match=r"dtype 'bfloat16', .*, torch\.bfloat16 say"):
        trainer.register({"a": torch.ones(1)}, dtype={"a": wrong})
    with pytest.raises(ConfigError, match=r"dtype 'bfloat16': .*, torch\.bfloat16 say"):
        trainer.open_round(1, dtype=wrong)
    wrong = {"quorum": 3}
    with pytest.raises(ConfigError, match="'quorum': min_replicas is its name .* timeout, min_"):
        trainer.publish(1, **wrong)
    for wrong, hint in (
        ({"replicas": 3}, "'replicas': min_replicas is its name here"),
        ({"stragglers": "skip"}, "'stragglers': publish_nowait has it"),
    ):
        with pytest.raises(ConfigError, match=hint):
            trainer.publish(1, **wrong)
    wrong = {"slots": 3}
    with pytest.raises(ConfigError, match=r"must be RingOptions\(num_ipc_handles=, slot_bytes="):
        TrainerAgent("policy", ring=wrong)


def test_too_few_that_are_ready_are_named_and_the_others_said_to_be_missing(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    with pytest.raises(
        DeadlineError, match=r"^no replica of channel 'policy' is ready after 0\.0\d+ s"
    ):
        trainer.wait_ready(timeout=0.05)
    start_worker("a", weights())
    trainer.wait_ready(timeout=20.0)
    text = (
        r"^1 of 2 replicas of channel 'policy' is ready \(a\) after 0\.0\d+ s; no other has joined"
    )
    with pytest.raises(DeadlineError, match=text):
        trainer.wait_ready(2, timeout=0.05)


def test_replicas_that_are_waited_for_by_name_are_named_with_what_they_lack(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    start_worker("a", weights())
    assert trainer.wait_ready(["a"], timeout=20.0)["a"].ready
    text = (
        r"^not all of the replicas of channel 'policy' are ready after 0\.0\d+ s: b has not joined$"
    )
    with pytest.raises(DeadlineError, match=text):
        trainer.wait_ready({"b", "a"}, timeout=0.05)
    with pytest.raises(ConfigError, match="'a': must be a whole number, or a list of names"):
        trainer.wait_ready("a")


def test_a_worker_that_finds_no_source_says_so_once_by_name(
    trainer: TrainerAgent, worker: WorkerAgent, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        return [line for line in lines if "finds no source" in line]

    worker.attach({"v": torch.zeros(3)})
    with caplog.at_level(logging.WARNING, "tensorlease.agents"):
        work_until(worker, told)
        assert worker._performer._kept_out.due(math.inf) == ()
    (line,) = told()
    assert line.startswith("worker a/0 of channel 'policy': is in no round, since it finds no")
    assert "v: not offered" in line


@pytest.mark.parametrize(
    ("sends", "reason"),
    [
        (torch.ones(3, dtype=torch.float64), r"open_round\(dtype=torch.float32\) or send\(dtype="),
        (torch.ones(3), "v: 0 of 3 elements filled; sent and not wanted: w$"),
    ],
)
def test_what_a_ring_sends_wrongly_is_named_with_the_way_out(
    ring_trainer: TrainerAgent, start_worker: StartWorker, sends: Any, reason: str
) -> None:
    start_worker("a", {"v": torch.zeros(3)})
    ring_trainer.wait_ready()
    with ring_trainer.open_round(1, timeout=10.0) as ring:
        ring.send("w" if sends.dtype is torch.float32 else "v", sends)
    assert ring.result is not None
    assert re.search(reason, ring.result.receivers["a/0"].reason)
