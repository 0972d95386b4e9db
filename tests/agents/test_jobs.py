"""Jobs of one host: each finds its own broker, whatever the others do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tensorlease.agents import TrainerAgent, WorkerAgent
from tensorlease.broker.config import BrokerConfig
from tensorlease.protocol.endpoint import runtime_directories, socket_name
from tensorlease.protocol.errors import RefusedError
from tensorlease.protocol.records import Code

from ..broker.raw_agents import Threaded, config_for
from .serving import serving

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's runtime directory, and a place for segments."""
    monkeypatch.delenv("TENSORLEASE_ENDPOINT", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    segments = tmp_path / "shm"
    segments.mkdir()
    monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(segments))
    yield tmp_path
    assert os.listdir(segments) == []


def test_two_jobs_with_the_same_channel_and_names_never_meet(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(runtime)}
    with ExitStack() as stack:
        brokers: dict[str, Threaded] = {}
        workers: dict[str, WorkerAgent] = {}
        trainers: dict[str, TrainerAgent] = {}
        tensors: dict[str, Tensor] = {}
        for job, value in (("one", 1.0), ("two", 2.0)):
            brokers[job] = Threaded(BrokerConfig(job=job), environ)
            stack.callback(brokers[job].stop)
            monkeypatch.setenv("TENSORLEASE_JOB", job)
            trainers[job] = stack.enter_context(TrainerAgent("policy"))
            trainers[job].register({"w": torch.full((3,), value)})
            workers[job] = stack.enter_context(WorkerAgent("policy", replica="engine"))
            tensors[job] = torch.zeros(3)
            workers[job].attach({"w": tensors[job]})
            stack.enter_context(serving(workers[job]))
        for job in ("two", "one"):
            result = trainers[job].publish(1, timeout=20.0).raise_for_status()
            assert list(result.receivers) == ["engine/0"]
            known = brokers[job].broker.ledger.state.peers
            assert set(known) == {trainers[job].instance, workers[job].instance}
        for job, value in (("one", 1.0), ("two", 2.0)):
            assert tensors[job].tolist() == [value] * 3
            assert (runtime / "tensorlease" / socket_name(job)).exists()


def test_the_default_place_names_the_user_and_the_job() -> None:
    places = {
        f"{runtime_directories({}, uid)[-1]}/{socket_name(job)}"
        for uid in (1000, 1001)
        for job in ("", "one", "two", "One", "one ")
    }
    assert len(places) == 10
    assert all("-1000/" in place or "-1001/" in place for place in places)


def test_a_broker_of_another_job_refuses_an_agent_whatever_address_it_was_given(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Threaded(replace(config_for(url), job="blue"))
    try:
        monkeypatch.setenv("TENSORLEASE_JOB", "red")
        with (
            WorkerAgent("policy", endpoint=url) as worker,
            pytest.raises(RefusedError, match="of job 'blue', and the agent is of job 'red'") as no,
        ):
            worker.attach({"w": torch.zeros(3)})
            worker.step(5.0)
        assert no.value.code == Code.WRONG_JOB.value
        for mine in ("blue", ""):
            monkeypatch.setenv("TENSORLEASE_JOB", mine)
            with WorkerAgent("policy", endpoint=url) as worker:
                worker.attach({"w": torch.zeros(3)})
                assert worker.step(0.0) is None
    finally:
        served.stop()
