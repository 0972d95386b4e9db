"""A real round trip: a trainer here, a worker in another process, and their bytes compared.

As a program, `python -m tensorlease.commands.doctor_trip ENDPOINT DEVICE`, it is the worker; which
version it waits for it reads from stdin.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tensorlease.agents.discovery import why_not
from tensorlease.broker.queries import DOCTOR_CHANNEL
from tensorlease.protocol.endpoint import parse_endpoint, socket_name
from tensorlease.protocol.errors import DeadlineError, NoBrokerError, TensorleaseError

from .private_broker import private_directory

if TYPE_CHECKING:
    from torch import Tensor

    from tensorlease.agents import TrainerAgent

LIMIT_S = 60.0
"""Of each step."""
LOOK_S = 1.0
"""Between two looks whether the worker's process still runs."""
STOP_S = 6.0
ELEMENTS = 2**20


class TripError(TensorleaseError):
    """The round trip did not go as it should."""


@contextlib.contextmanager
def private_broker() -> Iterator[str]:
    """A broker of its own, which ends with the block; gives its address.

    Raises:
        NoBrokerError: It ended before it listened; says why.
        DeadlineError: It does not listen.
    """
    directory = private_directory(os.environ, os.geteuid())
    endpoint = parse_endpoint(f"{directory}/{socket_name()}")
    words = [str(os.getpid()), directory, "--endpoint", endpoint.url, "--log-level", "error"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tensorlease.private_broker", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while why_not(endpoint, os.geteuid()):
            if process.poll() is not None:
                raise NoBrokerError(f"a private broker ended: {_last_line(process)}")
            if time.monotonic() > deadline:
                raise DeadlineError(f"a private broker does not listen after {LIMIT_S:g} s")
            time.sleep(0.02)
        yield endpoint.url
    finally:
        _end(process)
        shutil.rmtree(directory, ignore_errors=True)


def round_trip(endpoint: str, device: str = "cpu") -> str:
    """Publishes a version to a worker in another process; returns what was seen, in words.

    All of them use one channel, so that a broker keeps no more than that. Of two at a time the
    second waits for the first: its trainer is not let in before the other one, which leaves last.

    Raises:
        TensorleaseError: It did not go through, or other bytes arrived; says which.
    """
    began = time.monotonic()
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, endpoint, device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        import torch

        import tensorlease as tl

        tensors = {
            "whole": torch.arange(ELEMENTS, dtype=torch.int32),
            "half": torch.rand(ELEMENTS // 2).to(torch.bfloat16),
            "scalar": torch.tensor(time.time_ns()),
        }
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        with (
            tl.TrainerAgent(
                DOCTOR_CHANNEL,
                rank=0,
                world_size=1,
                group="",
                endpoint=endpoint,
                connect_timeout=LIMIT_S,
            ) as trainer,
            _ended(worker),  # Before the trainer leaves: the next one must not find it there.
        ):
            trainer.register(tensors)
            version = trainer.last_version + 1
            _tell(worker, version)
            _wait_ready(trainer, worker)
            result = trainer.publish(version, timeout=LIMIT_S, verify=True)
            result.raise_for_status()
            theirs, errors = worker.communicate(timeout=LIMIT_S)
            if worker.returncode:
                last = (errors.strip().splitlines() or ["it said nothing"])[-1]
                raise TripError(f"the worker's process failed: {last}")
            if theirs.strip() != digest(tensors):
                raise TripError("other bytes arrived than were published")
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
        whole_s = time.monotonic() - began
        return (
            f"{nbytes / 2**20:.1f} MiB, all bytes equal; {whole_s:.1f} s with both processes' start"
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"the worker's process does not end after {LIMIT_S:g} s") from error
    finally:
        _end(worker)


def _tell(worker: subprocess.Popen[str], version: int) -> None:
    """The trainer has the channel: the worker may join it."""
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # It has ended, which is seen when it is waited for.
        print(version, file=worker.stdin, flush=True)


def _wait_ready(trainer: TrainerAgent, worker: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            trainer.wait_ready(1, timeout=LOOK_S)
        except DeadlineError as error:
            if worker.poll() is not None:
                raise TripError(f"the worker's process ended: {_last_line(worker)}") from error
            if time.monotonic() > deadline:
                raise
        else:
            return


def digest(tensors: dict[str, Tensor]) -> str:
    """Of all bytes of the tensors."""
    import torch

    made = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        made.update(ctypes.string_at(flat.data_ptr(), flat.numel()))
    return made.hexdigest()


def serve(endpoint: str, device: str) -> None:
    """The worker: takes one version and prints the digest of what arrived."""
    import torch

    import tensorlease as tl

    tensors = {
        "whole": torch.zeros(ELEMENTS, dtype=torch.int32),
        "half": torch.zeros(ELEMENTS // 2, dtype=torch.bfloat16),
        "scalar": torch.tensor(0),
    }
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    told = sys.stdin.readline()
    if not told:
        return  # The trainer was not let in, and says why itself.
    with tl.WorkerAgent(DOCTOR_CHANNEL, endpoint=endpoint, replica="doctor") as worker:
        worker.attach(tensors)
        worker.wait_for(int(told), timeout=LIMIT_S)
    print(digest(tensors))


def _last_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = process.stderr.read().strip().splitlines()
    return said[-1] if said else f"code {process.returncode}, without a word"


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ends a process with the block, if it still runs."""
    try:
        yield
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.communicate()


if __name__ == "__main__":
    serve(*sys.argv[1:])
