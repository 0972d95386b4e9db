"""Who writes while somebody reads: each way in which bytes could be written that are promised."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tensorlease.agents import RingOptions, TrainerAgent, WorkerAgent
from tensorlease.agents.results import RoundHandle
from tensorlease.agents.ring_round import RingRound
from tensorlease.protocol.errors import ClosedError, ConfigError, TensorleaseError

from ..broker.raw_agents import Threaded, eventually

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")

LIMIT_S = 20.0


def test_tensors_that_are_asked_back_are_no_less_promised_to_who_reads_them(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    reads, go_on = threading.Event(), threading.Event()

    @worker.on_prepare
    def hold(_: object) -> None:
        reads.set()
        assert go_on.wait(LIMIT_S)

    worker.attach({"w": torch.zeros(3)})
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        handle = trainer.publish_nowait(1)
        assert reads.wait(LIMIT_S)
        with pytest.raises(TensorleaseError):
            trainer.unregister(timeout=0.0)
        assert not trainer.may_write()
        go_on.set()
        assert handle.result(LIMIT_S).ok
    finally:
        go_on.set()
        worker.stop()
        thread.join(LIMIT_S)


def test_nobody_late_gets_what_lies_behind_a_snapshot_or_beside_a_subset(
    trainer: TrainerAgent, other: WorkerAgent
) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    trainer.unregister()
    trainer.register({"w": parameter})
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with trainer.guard(optimizer):
        trainer.publish_nowait(1).result(LIMIT_S).raise_for_status()
        eventually(lambda: trainer._span.version == 1)
        trainer.publish_nowait(2, snapshot=True).result(LIMIT_S).raise_for_status()
        assert trainer._span.version == 0
        trainer.publish_nowait(3).result(LIMIT_S).raise_for_status()
        eventually(lambda: trainer._span.version == 3)
        trainer.publish_nowait(4, subset=["w"]).result(LIMIT_S).raise_for_status()
        assert trainer._span.version == 0


@pytest.mark.parametrize("which", ["all", "the registered", "the snapshot's"])
def test_a_snapshot_whose_memory_was_removed_is_made_anew(
    broker: Threaded, url: str, which: str
) -> None:
    directory = Path(os.environ["TENSORLEASE_SHM_DIR"])
    weights, taken = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    with (
        TrainerAgent(endpoint=url) as trainer,
        WorkerAgent(endpoint=url, replica="a") as worker,
    ):
        trainer.register(weights)
        registered = set(directory.iterdir())
        worker.attach(taken)
        thread = threading.Thread(target=worker.run)
        thread.start()
        for version in (1, 2, 3):
            weights["w"].fill_(version)
            handle = trainer.publish_nowait(version, snapshot=True)
            handle.result(LIMIT_S).raise_for_status()
            handle.released.wait(LIMIT_S)
            assert taken["w"].tolist() == [version] * 3
            if version == 1:
                lying = set(directory.iterdir())
                chosen = {
                    "all": lying,
                    "the registered": registered,
                    "the snapshot's": lying - registered,
                }[which]
                assert chosen
                for path in chosen:
                    path.unlink()
        late = WorkerAgent(endpoint=url, replica="late")
        got = {"w": torch.zeros(3)}
        late.attach(got)
        serving = threading.Thread(target=late.run)
        serving.start()
        trainer.wait_ready(2)
        trainer.publish_nowait(4, snapshot=True).result(LIMIT_S).raise_for_status()
        eventually(lambda: got["w"].tolist() == [3.0] * 3)
        late.close()
        serving.join(LIMIT_S)
        worker.stop()
        thread.join(LIMIT_S)


def test_of_two_rounds_of_a_version_the_one_that_is_still_read_is_voided(
    trainer: TrainerAgent,
) -> None:
    kept, late = (RoundHandle(trainer, 1, lambda _: "") for _ in range(2))
    kept.call, late.call = 1, 2
    trainer._handles = {1: kept, 2: late}
    for milestone in (late.released, late.finished):
        milestone.fail(ClosedError("over"))
    assert trainer._find_handle(1) is kept
    trainer._handles = {}


# ---------------------------------------------------------------- rings


@pytest.fixture(name="ring")
def _ring(broker: Threaded, url: str) -> TrainerAgent:
    return TrainerAgent("policy", endpoint=url, ring=RingOptions(1, 4096))


def test_a_block_that_an_exception_ends_waits_for_the_thread_that_is_inside_send(
    ring: TrainerAgent, worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorlease.agents import filling, ring_round

    writes, go_on = threading.Event(), threading.Event()
    fill = filling.fill

    def slowly(*args: object) -> None:
        writes.set()
        assert go_on.wait(LIMIT_S)
        fill(*args)  # type: ignore[arg-type]

    target = torch.zeros(8)
    worker.attach({"w": target})
    serving = threading.Thread(target=worker.run)
    serving.start()
    monkeypatch.setattr(ring_round, "fill", slowly)
    left = threading.Event()

    def send(r: RingRound, tensor: Tensor) -> None:
        r.send("w", tensor)

    def leave() -> None:
        r = ring.open_round(1, timeout=LIMIT_S)
        thread = threading.Thread(target=send, args=(r, torch.full((8,), -1.0)))
        with pytest.raises(KeyError), r:
            thread.start()
            assert writes.wait(LIMIT_S)
            raise KeyError("gives up")
        thread.join(LIMIT_S)
        left.set()

    leaver = threading.Thread(target=leave)
    leaver.start()
    try:
        assert writes.wait(LIMIT_S)
        assert not left.wait(0.3)
        assert ring.ring.filling == 1
    finally:
        go_on.set()
        leaver.join(LIMIT_S)
    assert left.is_set()
    monkeypatch.setattr(ring_round, "fill", fill)
    with ring.open_round(2, timeout=LIMIT_S) as r:
        r.send("w", torch.ones(8))
    assert r.result is not None
    r.result.raise_for_status()
    assert target.tolist() == [1.0] * 8
    ring.close()
    worker.stop()
    serving.join(LIMIT_S)


def test_what_is_sent_behind_the_last_batch_is_refused_and_not_lost(
    ring: TrainerAgent, worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = torch.zeros(8)
    worker.attach({"w": target})
    serving = threading.Thread(target=worker.run)
    serving.start()
    refused: list[ClosedError] = []
    leave = RingRound._leave

    def send_late(r: RingRound, **options: bool) -> None:
        try:
            r.send("late", torch.ones(8))
        except ClosedError as error:
            refused.append(error)
        leave(r, **options)

    monkeypatch.setattr(RingRound, "_leave", send_late)
    with ring.open_round(1, timeout=LIMIT_S) as r:
        r.send("w", torch.ones(8))
    assert r.result is not None
    r.result.raise_for_status()
    assert len(refused) == 1
    ring.close()
    worker.stop()
    serving.join(LIMIT_S)


def interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """The next call of this method is cut off before its first line."""
    method = getattr(owner, name)

    def interrupted(*_: object, **__: object) -> None:
        monkeypatch.setattr(owner, name, method)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("place", ["_close", "_leave", "_give_up"])
def test_an_interrupt_at_the_end_of_a_block_leaves_the_trainer_usable(
    ring: TrainerAgent, worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    target = torch.zeros(8)
    worker.attach({"w": target})
    serving = threading.Thread(target=worker.run)
    serving.start()

    with pytest.raises(KeyboardInterrupt), ring.open_round(1, timeout=LIMIT_S, stage_s=0.5) as r:
        r.send("w", torch.full((8,), -1.0))
        interrupt_once(monkeypatch, RingRound, place)
        if place == "_give_up":
            raise KeyError("gives up")
    with ring.open_round(2, timeout=LIMIT_S) as r:
        r.send("w", torch.ones(8))
    assert r.result is not None
    r.result.raise_for_status()
    assert target.tolist() == [1.0] * 8
    ring.close()
    worker.stop()
    serving.join(LIMIT_S)


@pytest.mark.parametrize("place", ["_filling", "_fill_shadows"])
def test_an_interrupt_before_shadows_are_filled_leaves_the_trainer_usable(
    broker: Threaded, url: str, worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    target = torch.zeros(3)
    worker.attach({"w": target})
    serving = threading.Thread(target=worker.run)
    serving.start()
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": torch.ones(3)}, shadow=True)
        for version, snapshot in ((1, False), (3, True)):
            interrupt_once(monkeypatch, TrainerAgent, place)
            with pytest.raises(KeyboardInterrupt):
                trainer.publish_nowait(version, snapshot=snapshot)
            done = trainer.publish_nowait(version + 1, timeout=LIMIT_S)
            done.result(LIMIT_S).raise_for_status()
    assert target.tolist() == [1.0] * 3
    worker.stop()
    serving.join(LIMIT_S)


def test_ties_and_subsets_that_are_no_names_are_refused(
    ring: TrainerAgent, trainer: TrainerAgent
) -> None:
    with pytest.raises(ConfigError, match="subset 3: must be names"):
        trainer.publish(2, subset=3)  # type: ignore[arg-type]
    ring.close()
