"""Workers, hooks and copies that fail: outcomes by name, and the next round works."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tensorlease.agents import RoundInfo, TrainerAgent, WorkerAgent
from tensorlease.agents.errors import AttachError
from tensorlease.agents.mappings import process_mappings
from tensorlease.agents.work import Work
from tensorlease.protocol.errors import ConfigError, DeadlineError
from tensorlease.protocol.records import Fate, Outcome

from .. import procs
from ..broker.raw_agents import Threaded, eventually
from ..procs import Spawn
from .serving import weights, work_until

torch = pytest.importorskip("torch")


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("where", ["prepare", "commit"])
def test_a_hook_that_raises_is_an_outcome_by_name_and_the_next_round_works(
    trainer: TrainerAgent, worker: WorkerAgent, other: WorkerAgent, where: str
) -> None:
    fail = True
    aborted: list[tuple[int, str, bool]] = []
    versions: list[int] = []

    def hook(rnd: RoundInfo) -> None:
        versions.append(rnd.version)
        if fail:
            raise ValueError("the second tensor is odd")

    (worker.on_prepare if where == "prepare" else worker.on_commit)(hook)
    worker.on_abort(lambda rnd, reason, torn: aborted.append((rnd.version, reason, torn)))
    worker.attach(weights())
    handle = trainer.publish_nowait(1)
    work_until(worker, lambda: handle.finished.done)
    result = handle.result(0)
    assert result.outcome is Outcome.MIXED
    assert result.replicas["other"].fate is Fate.COMMITTED
    failed = result.receivers["a/0"]
    assert "ValueError: the second tensor is odd" in failed.reason
    handle.released.wait(5.0)
    if where == "prepare":
        assert failed.fate is Fate.EXPELLED
        work_until(worker, lambda: aborted)
        assert aborted == [(1, "on_prepare raised ValueError: the second tensor is odd", False)]
    else:
        assert failed.fate is Fate.TORN
        assert worker.torn
        assert aborted == []
    assert worker.version == 0
    assert other.version == 1
    # Nor does anybody else take it for current.
    assert (result.replicas["a"].current, result.replicas["other"].current) == (0, 1)
    eventually(lambda: trainer.replicas["other"].current == 1)
    assert trainer.replicas["a"].current == 0
    fail = False
    handle = trainer.publish_nowait(2)
    assert worker.wait_for(2, 10.0) == 2
    assert handle.result(10.0).ok
    assert not worker.torn
    assert handle.result(0).replicas["a"].current == 2
    assert versions == [1, 2]


def test_an_abort_hook_that_raises_stops_neither_the_others_nor_the_next_round(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    fail = True
    called: list[str] = []

    def prepare(rnd: RoundInfo) -> None:
        if fail:
            raise ValueError

    def abort(rnd: RoundInfo, reason: str, torn: bool) -> None:
        called.append(reason)
        raise RuntimeError("cannot wake up")

    worker.on_prepare(prepare)
    worker.on_abort(abort)
    worker.on_abort(abort)
    worker.attach(weights())
    handle = trainer.publish_nowait(1)
    work_until(worker, lambda: len(called) == 2)
    assert called == ["on_prepare raised ValueError"] * 2
    assert handle.result(10.0).outcome is Outcome.FAILED
    fail = False
    trainer.publish_nowait(2)
    assert worker.wait_for(2, 10.0) == 2


def test_a_copy_that_fails_leaves_the_worker_torn_until_the_next_commit(
    trainer: TrainerAgent, worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.attach(weights())
    trainer.publish_nowait(1)
    worker.wait_for(1, 10.0)

    def fail(work: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(worker._intake, "copy", fail)
        handle = trainer.publish_nowait(2)
        work_until(worker, lambda: handle.finished.done)
    result = handle.result(0)
    assert result.outcome is Outcome.FAILED
    assert "MemoryError: no room" in result.reason
    assert worker.torn
    assert worker.version == 0
    trainer.publish_nowait(3)
    assert worker.wait_for(3, 10.0) == 3
    assert not worker.torn


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_program_is_reported_before_it_passes_through(
    trainer: TrainerAgent, worker: WorkerAgent, kind: type[BaseException]
) -> None:
    interrupt = True

    def prepare(rnd: RoundInfo) -> None:
        if interrupt:
            raise kind

    worker.on_prepare(prepare)
    worker.attach(weights())
    handle = trainer.publish_nowait(1)
    with pytest.raises(kind):
        worker.wait_for(1, 10.0)
    assert kind.__name__ in handle.result(5.0).reason
    interrupt = False
    trainer.publish_nowait(2)
    assert worker.wait_for(2, 10.0) == 2


KINDS = ["PlanWork", "PrepareWork", "CopyWork", "CommitWork", "AbortWork"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begun", [False, True])
def test_work_that_an_interrupt_cut_off_is_done_or_reported_by_the_next_call(
    trainer: TrainerAgent,
    worker: WorkerAgent,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    begun: bool,
) -> None:
    aborted: list[int] = []
    worker.on_abort(lambda rnd, reason, torn: aborted.append(rnd.version))
    worker.attach(weights())
    perform = worker._performer.perform
    cut_off: list[str] = []

    def interrupted(work: Work) -> int | None:
        if type(work).__name__ == kind and not cut_off:
            cut_off.append(kind)
            if begun:
                worker._performer._begun = work
                worker._performer._hooks_of(work)
            raise KeyboardInterrupt
        return perform(work)

    def refuse(rnd: RoundInfo) -> None:
        if rnd.version == 1:
            raise ValueError

    if kind == "AbortWork":
        worker.on_prepare(refuse)
    monkeypatch.setattr(worker._performer, "perform", interrupted)
    handle = trainer.publish_nowait(1)
    with pytest.raises(KeyboardInterrupt):
        worker.run()
    work_until(
        worker,
        lambda: (
            handle.finished.done
            and not worker._core.queue
            and worker._core.running is None
            and worker._core.state.round is None
        ),
    )
    committed = kind == "PlanWork" or (not begun and kind != "AbortWork")
    assert handle.result(0).ok is committed
    assert aborted == ([] if committed or begun and kind in ("AbortWork", "CommitWork") else [1])
    trainer.publish_nowait(2)
    assert worker.wait_for(2, 10.0) == 2


def test_a_tensor_of_another_kind_keeps_the_worker_out_and_is_named(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    worker.attach({"w": torch.zeros(3, dtype=torch.float64)})
    worker.step(0.2)
    with pytest.raises(DeadlineError, match="'w'.*float64"):
        trainer.wait_ready(timeout=0.2)
    result = trainer.publish(1, open_s=0.2)
    assert result.outcome is Outcome.FAILED
    assert "'w'" in result.reason


def test_tensors_that_cannot_be_written_are_refused_by_name(worker: WorkerAgent) -> None:
    with pytest.raises(AttachError, match="'w' is expanded"):
        worker.attach({"w": torch.zeros(1).expand(3)})
    with pytest.raises(ConfigError, match="no tensors"):
        worker.attach({})
    with pytest.raises(ConfigError, match="call attach"):
        worker.step()
    worker.attach(weights())
    with pytest.raises(ConfigError, match="has its tensors already"):
        worker.attach(weights())


def test_members_of_a_larger_replica_need_its_name() -> None:
    with pytest.raises(ConfigError, match="replica="):
        WorkerAgent(size=2)
    with pytest.raises(ConfigError, match="member 2"):
        WorkerAgent(replica="a", member=2, size=2)


def dying_worker(url: str) -> None:
    with WorkerAgent("policy", endpoint=url, replica="dying") as worker:
        worker.on_prepare(lambda _: procs.say("preparing"))
        worker.on_prepare(lambda _: threading.Event().wait(30.0))
        worker.attach(weights())
        worker.run()


def test_a_worker_that_is_killed_is_named_and_its_lease_comes_back(
    broker: Threaded, url: str, trainer: TrainerAgent, other: WorkerAgent, spawn: Spawn
) -> None:
    dying = spawn(dying_worker, url)
    trainer.wait_ready(2)
    handle = trainer.publish_nowait(1)
    assert dying.hear() == "preparing"
    began = time.monotonic()
    dying.kill()
    result = handle.result(10.0)
    handle.released.wait(5.0)
    assert time.monotonic() - began < 5.0
    assert result.outcome is Outcome.MIXED
    assert result.receivers["dying/0"].fate is Fate.LOST
    assert result.receivers["other/0"].fate is Fate.COMMITTED


def dying_trainer(url: str) -> None:
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": torch.ones(3)})
        trainer.wait_ready()
        trainer.publish_nowait(1)
        procs.say("published")
        threading.Event().wait(30.0)


def test_a_trainer_that_is_killed_leaves_no_version_no_mapping_and_no_segment(
    broker: Threaded, url: str, worker: WorkerAgent, spawn: Spawn
) -> None:
    dying = spawn(dying_trainer, url)
    aborted: list[str] = []

    def prepare(rnd: RoundInfo) -> None:
        assert dying.hear() == "published"
        dying.kill()
        eventually(lambda: worker._core.state.round and worker._core.state.round.ending)

    worker.on_prepare(prepare)
    worker.on_abort(lambda rnd, reason, torn: aborted.append(reason))
    worker.attach(weights())
    work_until(worker, lambda: aborted)
    assert "gone" in aborted[0]
    assert worker.version == 0
    work_until(worker, lambda: not process_mappings().held())
    # The broker of this test looks at the default place; the next trainer removes what is left.
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": torch.ones(3)})
        names = os.listdir(os.environ["TENSORLEASE_SHM_DIR"])
        assert all(trainer.instance[:8] in name for name in names)
