"""Shared memory that something else removes under its trainer: the next round has new memory."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorlease.agents import TrainerAgent, WorkerAgent
from tensorlease.agents.errors import SharedMemoryError
from tensorlease.agents.mappings import process_mappings
from tensorlease.protocol.errors import RefusedError

from ..broker.raw_agents import Threaded, eventually

torch = pytest.importorskip("torch")


@pytest.fixture
def served(worker: WorkerAgent) -> Iterator[WorkerAgent]:
    """A worker with `w` and `tied`, in a thread."""
    tensors = {"w": torch.zeros(3), "tied": torch.zeros(3), "none": torch.zeros(0, 4)}
    worker.attach(tensors)
    worker.tensors = tensors  # type: ignore[attr-defined]
    thread = threading.Thread(target=worker.run)
    thread.start()
    yield worker
    worker.stop()
    thread.join(10.0)


def segments() -> list[Path]:
    return sorted(Path(os.environ["TENSORLEASE_SHM_DIR"]).iterdir())


def remove_all() -> None:
    for path in segments():
        path.unlink()


def values(worker: WorkerAgent) -> list[float]:
    return [t[0].item() for name, t in worker.tensors.items() if name != "none"]  # type: ignore[attr-defined]


def test_removed_memory_is_made_anew_for_the_next_round_and_said_once(
    broker: Threaded, url: str, served: WorkerAgent, caplog: pytest.LogCaptureFixture
) -> None:
    weights = torch.ones(3)
    view = weights[1:]
    with TrainerAgent("policy", endpoint=url) as trainer:
        named = {"w": weights, "tied": weights, "none": torch.zeros(0, 4)}
        buffers = trainer.register(named)
        assert trainer.publish(1, timeout=20.0).ok
        first = buffers.numbers
        (path,) = segments()
        remove_all()
        with caplog.at_level(logging.WARNING, "tensorlease.agents"):
            for version in range(2, 5):
                weights.fill_(version)
                assert trainer.publish(version, timeout=20.0).ok
                assert values(served) == [version] * 2
        said = [r.message for r in caplog.records if "was removed by something else" in r.message]
        assert len(said) == 1 and "3 tensors" in said[0]
        assert len(segments()) == 1 and segments() != [path]
        assert not set(first) & set(buffers.numbers)
        # The same tensors as before, whose views look into the new memory too.
        view.fill_(9.0)
        assert weights.tolist() == [4.0, 9.0, 9.0]
        # The worker gives the old memory back, and so does the trainer.
        eventually(
            lambda: {number for _, number in process_mappings().held()} <= set(buffers.numbers)
        )
        eventually(lambda: not trainer._registry.former)
        assert trainer.publish_nowait(5, snapshot=True).result(20.0).ok
        with trainer.open_round(6) as ring_round:
            ring_round.send("other", torch.full((3,), 6.0), tied=["tied to other"])
            ring_round.send("empty", torch.zeros(0, 4))
        assert ring_round.result is not None and ring_round.result.ok
        assert values(served) == [4.0] * 2
        trainer.unregister(buffers, timeout=20.0)
        trainer.free_ring()


def test_without_room_for_new_memory_publish_says_so_and_works_when_there_is(
    broker: Threaded, url: str, served: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.ones(3)
    named = {"w": weights, "tied": weights, "none": torch.zeros(0, 4)}
    with TrainerAgent("policy", endpoint=url) as trainer:
        buffers = trainer.register(named)
        assert trainer.publish(1, timeout=20.0).ok
        remove_all()
        with monkeypatch.context() as patch:
            kind = trainer._registry._kind()

            def full(nbytes: int, number: int) -> object:
                raise SharedMemoryError(Path("/dev/shm"), nbytes, 0)

            patch.setattr(kind, "allocate", full)
            for _ in range(2):
                with pytest.raises(SharedMemoryError, match="0.0 MiB free"):
                    trainer.publish(2, timeout=20.0)
        assert weights.tolist() == [1.0] * 3
        weights.fill_(2.0)
        assert trainer.publish(2, timeout=20.0).ok
        assert values(served) == [2.0, 2.0]
        trainer.unregister(buffers, timeout=20.0)


def test_memory_that_the_broker_did_not_take_back_hurts_no_round_and_is_asked_for_again(
    broker: Threaded, url: str, served: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent worker of another replica kept a lease of it, say."""
    weights = torch.ones(3)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": weights, "tied": weights, "none": torch.zeros(0, 4)})
        assert trainer.publish(1, timeout=20.0).ok
        remove_all()
        former = set(trainer._registry.numbers)
        with monkeypatch.context() as patch:
            patch.setattr(trainer._core, "retire", lambda buffers: None)
            trainer.publish(2, timeout=20.0, open_s=0.5)
        assert trainer._registry.former == former
        weights.fill_(3.0)
        assert trainer.publish(3, timeout=20.0).ok
        assert values(served) == [3.0, 3.0]
        eventually(lambda: not trainer._registry.former)


def test_a_shadow_whose_memory_was_removed_is_made_anew_and_filled(
    broker: Threaded, url: str, worker: WorkerAgent
) -> None:
    master, copy = torch.ones(3), torch.zeros(3, dtype=torch.bfloat16)
    worker.attach({"w": copy})
    thread = threading.Thread(target=worker.run)
    thread.start()
    with TrainerAgent("policy", endpoint=url) as trainer:
        buffers = trainer.register({"w": master}, dtype=torch.bfloat16)
        address = master.data_ptr()
        for version in range(1, 4):
            master.fill_(version)
            assert trainer.publish(version, timeout=20.0).ok
            assert copy.tolist() == [version] * 3
            remove_all()
        assert master.data_ptr() == address
        worker.stop()
        thread.join(10.0)
        assert buffers.missing()


def test_what_was_closed_and_not_unregistered_is_part_of_no_round_and_given_back(
    broker: Threaded, url: str
) -> None:
    with (
        TrainerAgent("policy", endpoint=url) as trainer,
        WorkerAgent("policy", endpoint=url, replica="a") as worker,
    ):
        first, second = torch.ones(3), torch.ones(3)
        kept, closed = trainer.register({"a": first}), trainer.register({"b": second})
        got: dict[str, float] = {}
        worker.on_stage(lambda round, tensors: got.update((n, float(t[0])) for n, t in tensors))
        thread = threading.Thread(target=worker.run)
        thread.start()
        trainer.wait_ready()
        assert trainer.publish(1).ok and got == {"a": 1.0, "b": 1.0}
        got.clear()
        closed.close()
        second.data = torch.full((3,), 7.0)
        first.fill_(2.0)
        assert trainer.publish(2).ok and got == {"a": 2.0}
        eventually(lambda: len(worker._intake._mapped[trainer.instance]) == 1)
        again = trainer.register({"b": second})
        trainer.wait_ready()
        assert trainer.publish(3).ok and got == {"a": 2.0, "b": 7.0}
        for buffers in (kept, again):
            buffers.close()
        with pytest.raises(RefusedError, match="nothing is registered"):
            trainer.publish(4)
        worker.stop()
        thread.join(10.0)
