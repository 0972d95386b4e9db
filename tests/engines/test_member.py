"""A member whose tensors only the engine's thread loads: what `receive` does, and does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tensorlease.agents import RoundResult, TrainerAgent, WorkerAgent
from tensorlease.agents.recorded import RecordedLoad
from tensorlease.engines import member as module
from tensorlease.engines.member import EngineMember, Tensors, UpdateError
from tensorlease.protocol.errors import ConfigError
from tensorlease.protocol.records import Outcome, Phase

from ..broker.raw_agents import eventually
from .conftest import left


class Engine:
    """What is loaded, and by which thread."""

    def __init__(self, worker: WorkerAgent) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.threads: set[int] = set()
        self.fails = ""
        self.member = EngineMember(worker, self.load)

    def load(self, tensors: Tensors) -> None:
        self.threads.add(threading.get_ident())
        if self.fails:
            raise RuntimeError(self.fails)
        self.loaded.update((name, tensor.clone()) for name, tensor in tensors)


@pytest.fixture
def engine(trainer: TrainerAgent, url: str) -> Iterator[Engine]:
    made = Engine(WorkerAgent("policy", replica="engine", endpoint=url))
    trainer.wait_ready()
    yield made
    made.member.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEGIN_S", 0.3)
    monkeypatch.setattr(module, "TOLD_S", 0.3)


def publishing(trainer: TrainerAgent, version: int = 1) -> Callable[[], RoundResult]:
    return lambda: trainer.publish(version, timeout=20.0)


def test_the_thread_that_receives_loads_what_the_round_brings(
    trainer: TrainerAgent, engine: Engine, pool: ThreadPoolExecutor
) -> None:
    for version in (1, 2):
        result = pool.submit(publishing(trainer, version))
        engine.member.receive(version, 20.0)
        assert result.result(20.0).ok
        assert engine.member.worker.version == version
    assert engine.loaded["w"].tolist() == [1.0] * 3
    assert engine.threads == {threading.get_ident()}


def test_what_is_copied_begins_when_the_update_has_begun_and_waits_for_its_version_to_end(
    trainer: TrainerAgent, engine: Engine, pool: ThreadPoolExecutor
) -> None:
    for version in (1, 2):
        result = pool.submit(publishing(trainer, version))
        engine.member.begin(copied=True)
        eventually(lambda: engine.member._round is not None)
        engine.member.receive(version, 20.0)
        assert result.result(20.0).ok
        assert engine.member.worker.version == version


def test_what_has_begun_and_is_another_version_than_the_engine_is_told_is_without_it(
    trainer: TrainerAgent, engine: Engine, pool: ThreadPoolExecutor
) -> None:
    result = pool.submit(publishing(trainer))
    engine.member.begin(copied=True)
    eventually(lambda: engine.member._round is not None)
    with pytest.raises(UpdateError, match="to take version 7, and this is the round of 1"):
        engine.member.receive(7, 20.0)
    assert "the engine has given the update up" in result.result(20.0).reason
    assert not engine.loaded


def test_a_round_that_failed_before_its_version_was_received_is_not_seen_by_the_next(
    ring_trainer: TrainerAgent, url: str, pool: ThreadPoolExecutor
) -> None:
    engine = Engine(WorkerAgent("policy", replica="engine", endpoint=url))
    try:
        ring_trainer.wait_ready()
        engine.member.begin(copied=True)
        with left(ring_trainer, 1):
            eventually(lambda: engine.member._round is not None)
        engine.member.begin(copied=True)
        result = pool.submit(
            lambda: ring_trainer.publish_stream(2, [("w", torch.ones(3))], timeout=20.0)
        )
        eventually(lambda: (taken := engine.member._round) is not None and taken.version == 2)
        engine.member.receive(2, 20.0)
        assert result.result(20.0).ok
    finally:
        engine.member.close()


class Copying:
    """An engine whose loads are recorded, and repeated from the second version on."""

    def __init__(self, worker: WorkerAgent) -> None:
        self.w = torch.zeros(3)
        self.recorded = RecordedLoad(self._load, lambda: {"w": self.w})
        self.member = EngineMember(worker, self.recorded.load, self.recorded)

    def begin(self) -> None:
        """An update begins, as the backend has it begin."""
        recording = self.recorded.begin()
        self.member.begin(copied=recording is not None)

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            self.w.copy_(tensor)


@pytest.fixture
def copying(
    trainer: TrainerAgent, url: str, pool: ThreadPoolExecutor
) -> Iterator[tuple[Copying, torch.Tensor]]:
    """One that has version 1, and what its trainer has registered."""
    made = Copying(WorkerAgent("policy", replica="engine", endpoint=url))
    values = torch.ones(3)
    trainer.unregister(timeout=20.0)
    trainer.register({"w": values})
    trainer.wait_ready()
    made.begin()
    result = pool.submit(publishing(trainer))
    made.member.receive(1, 20.0)
    made.recorded.finish()
    assert result.result(20.0).ok
    yield made, values
    made.member.close()


def copied(
    engine: Copying, values: torch.Tensor, pool: ThreadPoolExecutor, trainer: TrainerAgent
) -> futures.Future[RoundResult]:
    """Publishes version 2; it has been copied, and the engine was not told which one it is."""
    values.fill_(2.0)
    engine.begin()
    result = pool.submit(publishing(trainer, 2))
    eventually(lambda: engine.w.eq(2.0).all().item())
    return result


def test_what_was_copied_is_voted_for_when_the_engine_is_told_which_version_it_is(
    trainer: TrainerAgent, copying: tuple[Copying, torch.Tensor], pool: ThreadPoolExecutor
) -> None:
    engine, values = copying
    result = copied(engine, values, pool, trainer)
    assert not futures.wait([result], 0.2).done
    assert engine.member.worker.version != 2
    engine.member.receive(2, 20.0)
    assert result.result(20.0).ok


def test_an_engine_that_ends_with_a_copy_that_it_was_not_told_of_does_not_wait_nor_vote(
    trainer: TrainerAgent, copying: tuple[Copying, torch.Tensor], pool: ThreadPoolExecutor
) -> None:
    engine, values = copying
    result = copied(engine, values, pool, trainer)
    began = time.monotonic()
    engine.member.close()
    assert time.monotonic() - began < module.CLOSE_S / 2
    assert not engine.member._thread.is_alive()
    assert not result.result(20.0).ok
    assert "the engine ends" in result.result(20.0).reason


def test_who_receives_is_told_that_the_engine_ends_before_the_others_have_voted(
    trainer: TrainerAgent, url: str, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.3)
    let_go = threading.Event()
    engine = Engine(WorkerAgent("policy", replica="engine", size=2, endpoint=url))
    with WorkerAgent("policy", replica="engine", member=1, size=2, endpoint=url) as other:
        other.on_prepare(lambda round: let_go.wait(20.0))
        other.attach({"w": torch.zeros(3)})
        serving = pool.submit(other.run)
        trainer.wait_ready()
        result = pool.submit(publishing(trainer))
        receiving = pool.submit(engine.member.receive, 1, 60.0)
        eventually(lambda: engine.member.worker._core.phase is Phase.VOTED)
        engine.member.close()
        with pytest.raises(UpdateError, match="version 1 did not come: the engine ends"):
            receiving.result(5.0)
        with pytest.raises(UpdateError, match="version 2 does not come: the engine ends"):
            engine.member.receive(2, 60.0)
        let_go.set()
        assert not result.result(20.0).ok
        other.stop()
        serving.result(20.0)


@pytest.mark.usefixtures("soon")
def test_what_was_copied_and_the_engine_is_not_told_of_is_no_version_and_the_next_one_is(
    trainer: TrainerAgent, copying: tuple[Copying, torch.Tensor], pool: ThreadPoolExecutor
) -> None:
    engine, values = copying
    values.fill_(2.0)
    engine.begin()
    failed = trainer.publish(2, timeout=20.0)
    assert "the engine was not told in 0.3 s which version it has got" in failed.reason
    assert "torn" not in failed.reason
    with pytest.raises(UpdateError, match="version 2 did not come|has not begun"):
        engine.member.receive(2, 20.0)
    values.fill_(3.0)
    trainer.wait_ready()
    engine.begin()
    result = pool.submit(publishing(trainer, 3))
    engine.member.receive(3, 20.0)
    assert result.result(20.0).ok
    assert engine.w.tolist() == [3.0] * 3


def test_a_round_that_failed_before_the_engine_was_told_of_it_is_not_waited_for_and_comes_again(
    ring_trainer: TrainerAgent, url: str, pool: ThreadPoolExecutor
) -> None:
    engine = Engine(WorkerAgent("policy", replica="engine", endpoint=url))
    try:
        ring_trainer.wait_ready()
        engine.member.begin(copied=False)
        with left(ring_trainer, 1):
            eventually(lambda: engine.member.worker.goes_on)
        eventually(lambda: engine.member._missed)
        began = time.monotonic()
        with pytest.raises(
            UpdateError, match="failed before the engine was told to take version 1"
        ):
            engine.member.receive(1, 20.0)
        assert time.monotonic() - began < module.BEGIN_S / 3
        engine.member.begin(copied=False)
        result = pool.submit(
            lambda: ring_trainer.publish_stream(1, [("w", torch.ones(3))], timeout=20.0)
        )
        engine.member.receive(1, 20.0)
        assert result.result(20.0).ok
    finally:
        engine.member.close()


@pytest.mark.usefixtures("soon")
def test_who_has_begun_an_update_anew_does_not_vote_for_what_was_copied_in_the_one_before(
    trainer: TrainerAgent, copying: tuple[Copying, torch.Tensor], pool: ThreadPoolExecutor
) -> None:
    engine, values = copying
    result = copied(engine, values, pool, trainer)
    engine.member.end()
    engine.begin()
    with pytest.raises(UpdateError, match="version 2 has not begun"):
        engine.member.receive(2, 20.0)
    failed = result.result(20.0)
    assert "not covered: the engine has given the update up" in failed.reason
    assert "torn" not in failed.reason


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("how", ["ended", "loaded"])
def test_an_update_that_has_ended_or_is_loaded_by_the_engine_lets_no_round_begin(
    trainer: TrainerAgent, engine: Engine, how: str
) -> None:
    engine.member.begin(copied=how == "ended")
    if how == "ended":
        engine.member.end()
    result = trainer.publish(1, timeout=20.0)
    assert "the engine was not told in 0.3 s to take version 1" in result.reason


@pytest.mark.usefixtures("soon")
def test_a_round_that_the_engine_was_not_told_of_is_without_it_and_says_so(
    trainer: TrainerAgent, engine: Engine
) -> None:
    result = trainer.publish(1, timeout=20.0)
    assert result.outcome is Outcome.FAILED
    assert "the engine was not told in 0.3 s to take version 1" in result.reason
    assert not engine.loaded


@pytest.mark.usefixtures("soon")
def test_what_only_the_engine_could_load_is_let_go_when_it_is_not_told_to(
    trainer: TrainerAgent, engine: Engine, pool: ThreadPoolExecutor
) -> None:
    engine.member.begin(copied=True)
    result = trainer.publish(1, timeout=20.0)
    assert "the engine was not told in 0.3 s to load what version 1 brings" in result.reason
    eventually(trainer.may_write)
    assert not engine.loaded
    again = pool.submit(publishing(trainer, 2))
    engine.member.receive(2, 20.0)
    assert again.result(20.0).ok


@pytest.mark.parametrize("copied", [False, True], ids=["not told", "begun"])
def test_an_engine_that_ends_in_a_round_that_it_was_not_told_of_does_not_wait(
    trainer: TrainerAgent, engine: Engine, copied: bool
) -> None:
    if copied:
        engine.member.begin(copied=True)
    handle = trainer.publish_nowait(1, timeout=60.0)
    eventually(lambda: engine.member.worker.goes_on)
    if copied:
        eventually(lambda: engine.member._round is not None)
    began = time.monotonic()
    engine.member.close()
    assert time.monotonic() - began < module.CLOSE_S / 2
    assert not engine.member._thread.is_alive()
    assert "the engine ends" in handle.result(20.0).reason
    handle.released.wait(20.0)


def test_a_round_that_does_not_begin_is_given_up_and_the_next_one_comes(
    trainer: TrainerAgent,
    engine: Engine,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BEGIN_S", 0.3)
    with pytest.raises(UpdateError, match=r"version 7 has not begun after 0\.3 s"):
        engine.member.receive(7, 20.0)
    monkeypatch.setattr(module, "BEGIN_S", 15.0)
    result = pool.submit(publishing(trainer))
    engine.member.receive(1, 20.0)
    assert result.result(20.0).ok


def test_a_round_of_another_version_than_the_engine_was_told_is_without_it(
    trainer: TrainerAgent, engine: Engine, pool: ThreadPoolExecutor
) -> None:
    receiving = pool.submit(engine.member.receive, 9, 20.0)
    eventually(lambda: engine.member._version == 9)
    result = trainer.publish(1, timeout=20.0)
    assert "told to take version 9, and this is the round of 1" in result.reason
    assert not engine.loaded
    trainer.wait_ready()
    assert trainer.publish(9, timeout=20.0).ok
    receiving.result(20.0)
    assert engine.loaded["w"].tolist() == [1.0] * 3


def test_who_waits_for_a_round_that_is_over_does_not_keep_the_engine_out_of_the_next(
    trainer: TrainerAgent, engine: Engine, pool: ThreadPoolExecutor
) -> None:
    waiting = pool.submit(engine.member.receive, 1, 20.0)
    eventually(lambda: engine.member._version)
    result = pool.submit(publishing(trainer, 2))
    with pytest.raises(
        UpdateError, match="version 1 did not come: the round of version 2 has begun"
    ):
        waiting.result(10.0)
    engine.member.begin(copied=False)
    engine.member.receive(2, 20.0)
    assert result.result(20.0).ok


def test_what_the_engine_raises_is_the_reason_on_both_sides_and_the_next_round_works(
    trainer: TrainerAgent, engine: Engine, pool: ThreadPoolExecutor
) -> None:
    engine.fails = "no such parameter"
    result = pool.submit(publishing(trainer))
    with pytest.raises(UpdateError, match=r"version 1 did not come: .*no such parameter"):
        engine.member.receive(1, 20.0)
    assert "no such parameter" in result.result(20.0).reason
    engine.fails = ""
    result = pool.submit(publishing(trainer, 2))
    engine.member.receive(2, 20.0)
    assert result.result(20.0).ok


def test_a_round_that_is_void_ends_what_receives(
    ring_trainer: TrainerAgent, url: str, pool: ThreadPoolExecutor
) -> None:
    engine = Engine(WorkerAgent("policy", replica="engine", endpoint=url))
    try:
        ring_trainer.wait_ready()
        receiving = pool.submit(engine.member.receive, 1, 20.0)
        with left(ring_trainer, 1):
            eventually(lambda: engine.loaded)
        with pytest.raises(UpdateError, match="version 1 did not come: .*void"):
            receiving.result(20.0)
    finally:
        engine.member.close()


def test_who_receives_for_too_long_gives_up_and_the_round_is_without_it(
    ring_trainer: TrainerAgent, url: str, pool: ThreadPoolExecutor
) -> None:
    engine = Engine(WorkerAgent("policy", replica="engine", endpoint=url))
    try:
        ring_trainer.wait_ready()
        receiving = pool.submit(engine.member.receive, 1, 3.0)
        with ring_trainer.open_round(1, timeout=20.0) as r:
            r.send("w", torch.ones(3))
            r.flush()
            with pytest.raises(UpdateError, match=r"is not over after 3 s"):
                receiving.result(20.0)
            r.send("v", torch.ones(3))
        assert r.result is not None
        assert "the engine has given the update up" in r.result.reason
    finally:
        engine.member.close()


def test_only_one_thread_receives(engine: Engine, pool: ThreadPoolExecutor) -> None:
    receiving = pool.submit(engine.member.receive, 1, 1.0)
    eventually(lambda: engine.member._version)
    with pytest.raises(ConfigError, match="version 1 is being received already"):
        engine.member.receive(2, 1.0)
    with pytest.raises(UpdateError):
        receiving.result(20.0)


def test_the_end_of_a_round_that_was_given_up_does_not_end_the_next(
    ring_trainer: TrainerAgent, url: str, pool: ThreadPoolExecutor
) -> None:
    engine = Engine(WorkerAgent("policy", replica="engine", endpoint=url))
    try:
        ring_trainer.wait_ready()
        receiving = pool.submit(engine.member.receive, 1, 3.0)
        with left(ring_trainer, 1):
            with pytest.raises(UpdateError, match="is not over"):
                receiving.result(20.0)
            receiving = pool.submit(engine.member.receive, 2, 20.0)
            eventually(lambda: engine.member._version == 2)
        ring_trainer.wait_ready()
        result = ring_trainer.publish_stream(2, [("w", torch.full((3,), 2.0))], timeout=20.0)
        assert result.ok, result
        receiving.result(20.0)
        assert engine.loaded["w"].tolist() == [2.0] * 3
    finally:
        engine.member.close()


def test_a_round_that_follows_at_once_waits_until_the_engine_has_left_the_one_before(
    ring_trainer: TrainerAgent, url: str, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(WorkerAgent("policy", replica="engine", endpoint=url))
    go, leave = threading.Event(), engine.member._leave
    monkeypatch.setattr(engine.member, "_leave", lambda: (go.wait(20.0), leave()))
    try:
        ring_trainer.wait_ready()
        receiving = pool.submit(engine.member.receive, 1, 20.0)
        with left(ring_trainer, 1):
            eventually(lambda: engine.loaded)
        eventually(lambda: not engine.member.worker.goes_on)
        ring_trainer.wait_ready()
        tensors = [("w", torch.full((3,), 2.0))]
        result = pool.submit(ring_trainer.publish_stream, 2, tensors, timeout=20.0)
        eventually(lambda: engine.member.worker.goes_on)
        go.set()
        with pytest.raises(UpdateError, match="version 1 did not come"):
            receiving.result(20.0)
        engine.member.receive(2, 20.0)
        assert result.result(20.0).ok, result.result()
    finally:
        go.set()
        engine.member.close()
