"""What tests of callbacks share: a model that loads weights, and rounds of batches."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from tensorlease.agents import TrainerAgent, WorkerAgent
from tensorlease.agents.results import RoundHandle
from tensorlease.agents.source import RegisteredBuffers, register
from tensorlease.protocol.records import Terms
from tensorlease.protocol.tables import BatchBody, encode_body

from ..broker.raw_agents import eventually
from .serving import work_until

if TYPE_CHECKING:
    from torch import Tensor


Views = list[tuple[str, "Tensor"]]


class Model:
    """What an engine is to a worker: it loads pairs, and counts."""

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.calls: list[list[str]] = []

    def load_weights(self, pairs: Any) -> set[str]:
        names: list[str] = []
        for name, tensor in pairs:
            self.loaded[name] = tensor.clone()
            names.append(name)
        self.calls.append(names)
        return set(names)


def publish(trainer: TrainerAgent, worker: WorkerAgent, version: int) -> Any:
    handle = trainer.publish_nowait(version)
    work_until(worker, lambda: handle.finished.done)
    return handle.result(0)


class Batches:
    """Sends tensors that exist only for a round, in batches of its own making."""

    def __init__(self, trainer: TrainerAgent) -> None:
        from tensorlease.agents.shm import ShmMemory

        self._trainer = trainer
        self._memory = ShmMemory(trainer.instance)
        self._numbers = itertools.count()
        self.made: list[RegisteredBuffers] = []

    def publish(self, version: int, batches: list[dict[str, Tensor]], **options: Any) -> Any:
        """Sends one round; returns its handle when all of it was handed out, or it has ended."""
        trainer, core = self._trainer, self._trainer._core
        trainer.wait_ready(timeout=10.0)
        handle = RoundHandle(trainer, version, trainer._missing)
        with trainer._connection.acting():
            handle.call = core.open(Terms(version, **options))
            trainer._handles[handle.call] = handle
        for index, tensors in enumerate(batches):
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            made = register(copies, memory=self._memory, numbers=self._numbers)
            self.made.append(made)
            eventually(lambda: self._out(handle.call) < 8)
            body = encode_body(BatchBody(made.buffers))
            with trainer._connection.acting():
                if handle.finished.done:
                    break  # As a ring round does: nobody takes it any more.
                last = index == len(batches) - 1
                core.batch(
                    handle.call,
                    made.numbers,
                    registered=False,
                    nbytes=made.nbytes,
                    body=body,
                    last=last,
                )
        return handle

    def _out(self, call: int) -> int:
        """How many batches are not released."""
        leases = self._trainer._core.state.calls[call].leases.values()
        return sum(not lease.released for lease in leases)
