"""Arguments are judged before anything happens: nothing of what was refused reaches a broker."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tensorlease.agents.arguments import RoundOptions, deadline_of, label_of, terms_of
from tensorlease.agents.trainer import TrainerAgent
from tensorlease.agents.worker import WorkerAgent
from tensorlease.protocol.errors import ConfigError

from .fake_cuda import UUIDS, FakeDriver, take_place


class Whole:
    """An integer that is no int, as numpy's are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize("version", [1.0, "1", None, [1], math.nan, torch.tensor(1.5)])
def test_a_version_that_is_no_whole_number_is_refused(version: Any) -> None:
    with pytest.raises(ConfigError, match="version .* whole number"):
        terms_of(version, {})


@pytest.mark.parametrize("version", [Whole(3), torch.tensor(3)])
def test_a_whole_number_of_another_type_becomes_an_int(version: Any) -> None:
    assert type(terms_of(version, {"min_replicas": version}).version) is int
    assert type(terms_of(version, {"min_replicas": version}).min_replicas) is int
    trainer = TrainerAgent(rank=version, world_size=Whole(4))  # type: ignore[arg-type]
    assert (trainer.rank, trainer.world_size) == (3, 4)
    assert type(trainer.rank) is type(trainer.world_size) is int
    worker = WorkerAgent(replica="a", member=version, size=Whole(4), version=version)  # type: ignore[arg-type]
    assert [type(n) for n in (worker.member, worker.size, worker.version)] == [int, int, int]
    trainer.close()
    worker.close()


@pytest.mark.parametrize(
    "options",
    [
        {"min_replicas": 1.5},
        {"min_replicas": "1"},
        {"min_replicas": -1},
        {"strict": "yes"},
        {"strict": 1},
        {"open_s": "3"},
        {"open_s": math.nan},
        {"prepare_s": math.inf},
        {"stage_s": None},
        {"commit_s": -1},
    ],
)
def test_an_option_that_cannot_be_is_refused_by_its_name(options: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        terms_of(1, options)


def test_an_option_that_does_not_exist_is_refused_with_those_that_do() -> None:
    options: Any = {"stage": 5.0}
    with pytest.raises(ConfigError, match="'stage'.*stage_s") as error:
        terms_of(1, options)
    assert all(name in str(error.value) for name in RoundOptions.__annotations__)


@pytest.mark.parametrize("timeout", [math.nan, math.inf, -1, "1", None, 1e300])
def test_a_limit_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        deadline_of(timeout)
    with pytest.raises(ConfigError, match="connect_timeout"):
        TrainerAgent(connect_timeout=timeout)


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("channel", {"channel": None}),
        ("channel", {"channel": b"policy"}),
        ("endpoint", {"endpoint": b"ipc:///x"}),
        ("rank", {"rank": "0"}),
        ("rank", {"rank": 0.0}),
        ("rank", {"rank": True, "world_size": 2}),
        ("world size", {"world_size": 1.0}),
        ("group", {"group": 5}),
    ],
)
def test_a_trainer_that_cannot_be_is_refused(what: str, arguments: Any) -> None:
    with pytest.raises(ConfigError, match=what):
        TrainerAgent(**arguments)


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("member", {"member": "0"}),
        ("size", {"size": 1.5}),
        ("replica", {"replica": 5}),
        ("version", {"version": 1.5}),
        ("version", {"version": None}),
    ],
)
def test_a_worker_that_cannot_be_is_refused(what: str, arguments: Any) -> None:
    with pytest.raises(ConfigError, match=what):
        WorkerAgent(**arguments)


def test_a_hook_that_cannot_be_called_is_refused_when_it_is_given() -> None:
    nothing: Any = None
    with WorkerAgent() as worker:
        for give in (worker.on_prepare, worker.on_commit, worker.on_abort):
            with pytest.raises(ConfigError, match="on_.* None"):
                give(nothing)


def test_a_gpu_is_called_by_its_uuid_whatever_its_number_is_in_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeDriver()
    take_place(fake, monkeypatch)
    fake.uuids = [UUIDS[1], UUIDS[0]]  # As CUDA_VISIBLE_DEVICES=1,0 has it.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [label_of(f"cuda:{number}") for number in range(2)] == fake.uuids
    assert label_of(torch.device("cuda", 0)) == UUIDS[1]
    assert label_of("cuda") == label_of(torch.device("cuda")) == UUIDS[0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert label_of("cuda") == UUIDS[1]
    assert label_of(f"GPU-{UUIDS[0].upper()}") == label_of(UUIDS[0]) == UUIDS[0]
    fake.fails["cuDeviceGet"] = "CUDA_ERROR_INVALID_DEVICE"
    with pytest.raises(ConfigError, match="device 'cuda:7' is no GPU that this process sees"):
        TrainerAgent(device="cuda:7")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_what_is_no_gpu_is_called_as_it_is(device: str | torch.device) -> None:
    assert label_of(device) == "cpu:0"
    assert label_of("cpu:1") == "cpu:1"
    assert label_of("cuda-like") == "cuda-like"


@pytest.mark.parametrize(
    "device",
    ["cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cuda:\u0663", "cuda:0\n", f"cuda:{2**32}"]
    + ["cuda:" + "9" * 5000],
)
def test_a_gpu_whose_number_is_none_is_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_place(FakeDriver(), monkeypatch)
    with pytest.raises(ConfigError, match="device 'cuda:.* is no GPU: .* `nvidia-smi -L`"):
        label_of(device)


@pytest.mark.parametrize("device", [None, 0, True, 1.5, b"cpu", []])
def test_a_device_that_is_none_is_refused(device: Any) -> None:
    with pytest.raises(ConfigError, match=r"device .*: must be a text, .* or a torch.device"):
        WorkerAgent(device=device)


def test_without_a_driver_a_gpus_number_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(ConfigError, match="'cuda:0' is no GPU .* `nvidia-smi -L`"):
        WorkerAgent(device="cuda:0")
