"""A process that has agents and forks: data loaders, above all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tensorlease.agents import RoundHandle, TrainerAgent, WorkerAgent
from tensorlease.protocol.errors import ClosedError

from ..procs import Spawned

torch = pytest.importorskip("torch")
pytestmark = [
    # Python 3.12 warns of any fork of a process with threads; this is about such a fork.
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    # The machine may have fewer processors than there are loaders.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

LOADERS = 4


class Samples:
    """Its items say what became of each use of the parent's agents, in a data loader's process."""

    def __init__(self, trainer: TrainerAgent, worker: WorkerAgent, handle: RoundHandle) -> None:
        self.trainer, self.worker, self.handle = trainer, worker, handle

    def __len__(self) -> int:
        return 2 * LOADERS

    def __getitem__(self, index: int) -> tuple[int, list[str]]:
        trainer, worker, handle = self.trainer, self.worker, self.handle
        calls: list[Callable[[], Any]] = [
            lambda: trainer.publish(2),
            lambda: trainer.wait_ready(),
            lambda: trainer.register({"v": torch.ones(1)}),
            lambda: trainer.unregister(),
            lambda: handle.result(10.0),
            lambda: worker.step(10.0),
            lambda: worker.stop(),
        ]
        said = []
        for call in calls:
            try:
                said.append(repr(call()))
            except ClosedError as error:
                said.append(str(error))
        trainer.close()
        worker.close()
        return os.getpid(), said


def test_data_loaders_neither_use_nor_end_the_agents_that_were_there_before_them(
    start_broker: Callable[..., Spawned], url: str
) -> None:
    start_broker()
    weights, copy = torch.ones(4), torch.zeros(4)
    with (
        TrainerAgent("policy", endpoint=url) as trainer,
        WorkerAgent("policy", endpoint=url, replica="a") as worker,
    ):
        trainer.register({"w": weights})
        worker.attach({"w": copy})
        thread = threading.Thread(target=worker.run)
        thread.start()
        handle = trainer.publish_nowait(1)
        assert handle.result(10.0).ok
        segments = os.listdir(os.environ["TENSORLEASE_SHM_DIR"])
        loader = torch.utils.data.DataLoader(
            Samples(trainer, worker, handle),
            batch_size=None,
            num_workers=LOADERS,
            multiprocessing_context="fork",
        )

        items = list(loader)
        assert len({pid for pid, _ in items} - {os.getpid()}) == LOADERS
        for _, said in items:
            assert [("created in another process" in text) for text in said] == [True] * 7
        assert os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) == segments != []
        assert trainer.connected and worker.connected
        for agent in (trainer, worker):
            lock = agent._connection._lock
            assert lock is not None and lock.held
        weights.fill_(2.0)
        assert trainer.publish(2, timeout=20.0).ok
        assert copy.tolist() == [2.0] * 4
        worker.stop()
        thread.join(10.0)
