"""Workers that cannot open a trainer's GPU memory, or may not: known before a round, by name.

Their driver answers as a test says; the agents, the broker and the processes are real.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from tensorlease.agents import (
    DeadlineError,
    Outcome,
    TrainerAgent,
    WorkerAgent,
    cuda,
    cuda_reasons,
    mappings,
)
from tensorlease.agents.memory import MappedMemory
from tensorlease.protocol.handles import CUDA_FORMAT, CudaIpcHandle

from .. import procs
from ..broker.raw_agents import Threaded, eventually
from ..command_lines import command
from ..procs import Spawn
from .conftest import StartWorker
from .fake_cuda import UUIDS, FakeDriver, take_place

OPEN = "cuIpcOpenMemHandle_v2"


def other_namespace(fake: FakeDriver, _: pytest.MonkeyPatch) -> None:
    fake.fails[OPEN] = "CUDA_ERROR_INVALID_CONTEXT"


def other_gpus(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    fake.uuids, fake.fails[OPEN] = [UUIDS[1]], "CUDA_ERROR_INVALID_VALUE"
    patch.setenv("CUDA_VISIBLE_DEVICES", "1")


def other_instance(fake: FakeDriver, _: pytest.MonkeyPatch) -> None:
    fake.uuids, fake.names = [UUIDS[1]], ["NVIDIA H200 MIG 1g.18gb"]


def no_ipc(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    fake.fails[OPEN] = "CUDA_ERROR_INVALID_HANDLE"
    patch.setattr(cuda_reasons, "platform", lambda: "WSL2")


Case = Callable[[FakeDriver, pytest.MonkeyPatch], None]


def worker_that_cannot(url: str, case: Case) -> None:
    """In a child: a worker to which what is offered is memory of GPU 0, which it cannot open."""
    fake = FakeDriver()
    patch = pytest.MonkeyPatch()
    take_place(fake, patch)
    patch.setattr(cuda_reasons, "platform", lambda: "")
    case(fake, patch)

    def open_handle(handle: object, source: str, number: int) -> MappedMemory:
        made = CudaIpcHandle(CUDA_FORMAT, UUIDS[0], bytes(64), 2**21, 0, bytes(64))
        return cuda.CudaMapping(made, None)

    patch.setattr(mappings, "open_handle", open_handle)
    held = torch.zeros(3)
    with WorkerAgent("policy", endpoint=url, replica="a") as worker:
        worker.attach({"w": held})
        procs.say("attached")
        while worker.step(timeout=0.1) is None and not procs._link.poll():  # type: ignore[union-attr]
            pass
        procs.say(held.tolist())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (other_namespace, ["different PID namespaces", "--pid=host --ipc=host"]),
        (other_gpus, [UUIDS[0], UUIDS[1], "CUDA_VISIBLE_DEVICES=1 hides it"]),
        (other_instance, [UUIDS[0], f"MIG instance {UUIDS[1]}", "on one instance"]),
        (no_ipc, ["as far as is known, WSL2 has no CUDA IPC"]),
    ],
)
def test_a_worker_that_cannot_open_it_is_named_before_the_first_round_and_hurts_no_other(
    broker: Threaded,
    url: str,
    spawn: Spawn,
    start_worker: StartWorker,
    case: Case,
    words: list[str],
) -> None:
    process = spawn(worker_that_cannot, url, case)
    assert process.hear() == "attached"
    held = {"w": torch.zeros(3)}
    start_worker("b", held)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": torch.ones(3)})
        eventually(lambda: named(trainer))
        with pytest.raises(DeadlineError) as error:
            trainer.wait_ready(2, 0.2)
        for word in [*words, "a", 'share="shm"']:
            assert word in str(error.value)
        trainer.wait_ready(1, 20.0)
        result = trainer.publish(1)
        assert result.outcome is Outcome.MIXED
        assert held["w"].tolist() == [1.0] * 3 and set(result.receivers) == {"b/0"}
        assert all(word in result.replicas["a"].reason for word in words)
        (channel,) = msgspec.json.decode(command("status", "--json", "--endpoint", url).out)[
            "channels"
        ]
        reasons = {replica["replica"]: replica["reason"] for replica in channel["replicas"]}
        assert all(word in reasons["a"] for word in words) and reasons["b"] == ""
        process.say("end")
        assert process.hear() == [0.0] * 3


def named(trainer: TrainerAgent) -> bool:
    states = trainer.replicas
    return "a" in states and "GPU" in states["a"].reason


# ------------------------------------------------------------------- what IPC does without


NUMBERS = {
    "x86_64": {"ptrace": 101, "process_vm_readv": 310, "kcmp": 312, "pidfd_getfd": 438},
    "aarch64": {"ptrace": 117, "process_vm_readv": 270, "kcmp": 272, "pidfd_getfd": 438},
}
"""System calls that a container's default profile refuses."""


class Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("first", ctypes.POINTER(Instruction)))


def refuse(numbers: list[int]) -> None:
    """These system calls of this process fail with EPERM from now on (seccomp(2))."""
    lines = [(0x20, 0, 0, 0)]  # Loads the number of the call.
    for left, number in enumerate(reversed(numbers)):
        lines.insert(1, (0x15, left + 1, 0, number))  # Equal: on to the refusal.
    lines += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]
    made = (Instruction * len(lines))(*(Instruction(*line) for line in lines))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    program = Program(len(lines), made)
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, os.strerror(ctypes.get_errno())


def confined(url: str, kind: str) -> list[float] | dict[int, tuple[str, ...]]:
    """In a child that may fetch no descriptor from another process: an agent's part of a round."""
    refuse(list(NUMBERS[platform.machine()].values()))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.syscall(438, 0, 0, 0) == -1 and ctypes.get_errno() == 1
    if kind == "worker":
        held = torch.zeros(3)
        with WorkerAgent("policy", endpoint=url, replica="a") as worker:
            worker.attach({"w": held})
            worker.wait_for(1, timeout=20.0)
            return held.tolist()
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": torch.ones(3)})
        trainer.wait_ready(1, 20.0)
        return trainer.publish(1).raise_for_status().via


@pytest.mark.skipif(platform.machine() not in NUMBERS, reason="knows no numbers of system calls")
def test_a_round_passes_no_descriptor_so_a_containers_profile_refuses_nothing(
    broker: Threaded, url: str, spawn: Spawn
) -> None:
    children = [spawn(confined, url, kind) for kind in ("worker", "trainer")]
    assert children[1].result() == {0: ("shm",)}
    assert children[0].result() == [1.0] * 3


def sharing_of_torch() -> list[object]:
    """What torch's own sharing hangs on, which other software replaces."""
    from multiprocessing.reduction import ForkingPickler

    from torch.multiprocessing import reductions

    return [
        dict(ForkingPickler._extra_reducers),  # type: ignore[attr-defined]
        reductions.reduce_tensor,
        reductions.reduce_storage,
        reductions.rebuild_cuda_tensor,
    ]


def clean_worker(url: str) -> tuple[bool, list[float]]:
    """In a child: a worker; says whether torch's own sharing is as it was."""
    before, held = sharing_of_torch(), torch.zeros(3)
    with WorkerAgent("policy", endpoint=url, replica="a") as worker:
        worker.attach({"w": held})
        worker.wait_for(1, timeout=20.0)
    return sharing_of_torch() == before, held.tolist()


def test_a_trainer_with_hooks_of_its_own_needs_none_in_the_worker_and_ours_has_none(
    broker: Threaded, url: str, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hook(*_: object) -> None:
        raise AssertionError("torch's own sharing was used")

    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", hook)
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_storage", hook)
    before = sharing_of_torch()
    process = spawn(clean_worker, url)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": torch.ones(3)})
        trainer.wait_ready(1, 20.0)
        trainer.publish(1).raise_for_status()
    assert process.result() == (True, [1.0] * 3)
    assert sharing_of_torch() == before


def worker_of(url: str, replica: str, name: str) -> None:
    """In a child: a worker that wants a tensor of this name; it takes part in nothing."""
    with WorkerAgent("policy", endpoint=url, replica=replica) as worker:
        worker.attach({name: torch.zeros(3)}, strict=False)
        procs.say("attached")
        while worker.step(timeout=0.1) is None and not procs._link.poll():  # type: ignore[union-attr]
            pass


def test_handles_that_a_worker_never_opens_keep_no_memory(
    broker: Threaded, url: str, spawn: Spawn
) -> None:
    children = [spawn(worker_of, url, "other", "x"), spawn(worker_of, url, "dead", "w")]
    for child in children:
        assert child.hear() == "attached"
    segments = Path(os.environ["TENSORLEASE_SHM_DIR"])
    with TrainerAgent("policy", endpoint=url) as trainer:
        buffers = trainer.register({"w": torch.ones(3)})
        children[1].stop()  # It may have opened it, and says nothing any more.
        eventually(lambda: "other" in trainer.replicas and trainer.replicas["other"].reason)
        assert len(os.listdir(segments)) == 1
        children[1].kill()
        trainer.unregister(buffers, 20.0)
        assert os.listdir(segments) == []
        children[0].say("end")
