"""Few file descriptors: as many as before after any number of rounds, and too few are said."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from typing import Any

import pytest

from tensorlease.agents import TrainerAgent, WorkerAgent
from tensorlease.agents.descriptors import FIRST_AGENT, FURTHER_AGENT, check_descriptors
from tensorlease.protocol.errors import ConfigError

from .. import procs
from ..procs import Spawn, Spawned

torch = pytest.importorskip("torch")

TENSORS, ROUNDS = 400, 5
LIMIT = 256


def opened(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def limited(url: str, function: Callable[[str], object]) -> object:
    """In a child: does something where only so many files may be open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    return function(url)


def train(url: str) -> list[int]:
    """Publishes many tensors; returns how many files were open after each round."""
    weights = {f"w{n}": torch.zeros(10) for n in range(TENSORS)}
    counts = []
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(weights)
        for version in range(1, ROUNDS + 1):
            for number, tensor in enumerate(weights.values()):
                tensor.fill_(version * 1000 + number)
            trainer.publish(version, timeout=30.0).raise_for_status()
            counts.append(opened())
            procs.say(version)
            procs.hear()
    return counts


def serve(url: str) -> tuple[list[int], bool]:
    """Takes them, and keeps a copy of every round; also returns whether all were right."""
    weights = {f"w{n}": torch.zeros(10) for n in range(TENSORS)}
    counts: list[int] = []
    kept: list[list[Any]] = []
    with WorkerAgent("policy", endpoint=url) as worker:
        worker.attach(weights)
        while worker.version < ROUNDS:
            if worker.step(timeout=30.0) is not None:
                kept.append([tensor.clone() for tensor in weights.values()])
                counts.append(opened())
    right = [
        torch.equal(tensor, torch.full((10,), version * 1000.0 + number))
        for version, tensors in enumerate(kept, 1)
        for number, tensor in enumerate(tensors)
    ]
    return counts, len(right) == ROUNDS * TENSORS and all(right)


def test_many_tensors_need_few_descriptors_and_no_more_with_each_round(
    spawn: Spawn, url: str
) -> None:
    broker = spawn(limited, url, procs.serve_broker)
    assert broker.hear() == "ready"
    worker = spawn(limited, url, serve)
    trainer = spawn(limited, url, train)
    of_broker = []
    for version in range(1, ROUNDS + 1):
        assert trainer.hear() == version
        of_broker.append(opened(broker.pid))
        trainer.say("go on")
    of_worker, right = worker.result()
    of_trainer = trainer.result()
    assert right
    # The first round maps; what is open then does not grow (one that served the beginning may go).
    for counts in (of_trainer, of_worker, of_broker):
        assert len(counts) == ROUNDS and counts[0] == max(counts), counts
        assert counts[0] < 64


def too_few(url: str) -> tuple[str, str, bool]:
    """What a first agent says where too few files may be open, and a second with some more."""
    tensor = torch.ones(3)
    address = tensor.data_ptr()
    said = []
    with TrainerAgent("policy", endpoint=url) as trainer, WorkerAgent(endpoint=url) as worker:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened() + FIRST_AGENT - 2, LIMIT))
        try:
            trainer.register({"w": tensor})
        except ConfigError as error:
            said.append(str(error))
        unmoved = tensor.data_ptr() == address
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened() + FIRST_AGENT, LIMIT))
        trainer.register({"w": tensor})
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened() + FURTHER_AGENT - 2, LIMIT))
        try:
            worker.attach({"w": torch.zeros(3)})
        except ConfigError as error:
            said.append(str(error))
    first, second = said
    return first, second, unmoved


def test_too_few_descriptors_are_said_before_anything_begins(
    start_broker: Callable[..., Spawned], spawn: Spawn, url: str
) -> None:
    start_broker()
    first, second, unmoved = spawn(too_few, url).result()
    assert f"an agent needs {FIRST_AGENT} file descriptors" in first and "ulimit -n" in first
    assert f"an agent needs {FURTHER_AGENT} file descriptors" in second
    assert unmoved


def test_without_a_limit_or_without_proc_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: infinite)
    check_descriptors(first=True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1, 1))
    with pytest.raises(ConfigError):
        check_descriptors(first=True)

    def no_proc(path: str) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(os, "listdir", no_proc)
    check_descriptors(first=True)
