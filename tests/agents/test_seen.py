"""What a worker remembers of ring batches, and that it never copies by what does not hold any more."""

from __future__ import annotations

import pytest

from tensorlease.agents import RingOptions, TrainerAgent
from tensorlease.agents.seen import MOST_BYTES, SeenBatch, SeenBatches

from ..broker.raw_agents import Threaded
from .conftest import StartWorker

torch = pytest.importorskip("torch")

BATCH = SeenBatch([], None, frozenset(), frozenset())


def test_the_batches_that_were_used_last_are_kept_within_a_limit_of_bytes() -> None:
    seen = SeenBatches()
    third = bytes(MOST_BYTES // 3)
    for name in ("a", "b", "c"):
        seen.keep(name, third, BATCH)
    assert seen.find("a", third) is BATCH
    seen.keep("d", third, BATCH)
    assert [seen.find(name, third) is BATCH for name in ("a", "b", "c", "d")] == [
        *(True, False, True, True)
    ]
    seen.keep("e", bytes(MOST_BYTES + 1), BATCH)
    assert not any(seen.find(name, third) for name in ("a", "c", "d"))


def test_a_trainer_that_has_gone_is_forgotten() -> None:
    seen = SeenBatches()
    seen.keep("a", b"1", BATCH)
    seen.keep("b", b"1", BATCH)
    seen.forget("a")
    assert seen.find("a", b"1") is None and seen.find("b", b"1") is BATCH
    seen.clear()
    assert seen.find("b", b"1") is None


def test_the_same_tensors_again_are_planned_once_and_arrive_each_time(
    broker: Threaded, url: str, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorlease.agents.sink import AttachedTensors

    plans: list[object] = []
    plan = AttachedTensors.plan

    def counted(self: AttachedTensors, *args: object, **options: object) -> object:
        if options.get("partial"):
            plans.append(self)
        return plan(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(AttachedTensors, "plan", counted)
    sent = {f"t{n}": torch.zeros(3000 + n) for n in range(12)}
    held = {name: torch.ones_like(tensor) for name, tensor in sent.items()}
    worker = start_worker("a", held)
    planned: list[int] = []
    with TrainerAgent("policy", endpoint=url, ring=RingOptions(1, 65_536)) as trainer:
        trainer.wait_ready(1, 20.0)
        for version in range(1, 9):
            for tensor in sent.values():
                tensor.fill_(version)
            # Other tensors in between: what is remembered must not be taken for them.
            given = dict(reversed(sent.items())) if version == 5 else sent
            before = len(plans)
            result = trainer.publish_stream(version, given, verify=version == 7, timeout=20.0)
            result.raise_for_status()
            assert result.receivers["a/0"].applied == len(sent)
            planned.append(len(plans) - before)
            assert all(torch.equal(held[name], tensor) for name, tensor in sent.items())
        # Three batches a round, which all have the one slot.
        assert planned == [3, 0, 0, 0, 3, 0, 3, 0]
    assert worker.version == 8
