"""Publishing without waiting: stragglers, and snapshots."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tensorlease.agents import (
    SkippedError,
    StillLeasedError,
    Stragglers,
    TrainerAgent,
    WorkerAgent,
)
from tensorlease.agents.errors import SharedMemoryError
from tensorlease.agents.results import RoundHandle
from tensorlease.protocol.errors import ConfigError, DeadlineError, RefusedError
from tensorlease.protocol.records import Fate, Holder, Outcome

from ..broker.raw_agents import Threaded, eventually
from .conftest import StartWorker

torch = pytest.importorskip("torch")


@pytest.fixture
def trainer(broker: Threaded, url: str) -> Iterator[TrainerAgent]:
    agent = TrainerAgent("policy", endpoint=url)
    yield agent
    agent.close(timeout=0.5)


class Gate:
    """A prepare hook that waits until it is let go; only for the versions that it is given."""

    def __init__(self, *versions: int) -> None:
        self.versions = versions
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, info: object) -> None:
        if not self.versions or getattr(info, "version", 0) in self.versions:
            self.entered.set()
            assert self.go_on.wait(20.0)

    def wait_for(self, trainer: TrainerAgent) -> None:
        """Waits until a worker is at it, and the trainer has heard who takes part."""
        assert self.entered.wait(10.0)
        calls = trainer._core.state.calls
        eventually(lambda: all(call.receivers or call.ended for call in calls.values()))


# ---------------------------------------------------------------- stragglers


def test_wait_is_for_the_earlier_round(trainer: TrainerAgent, start_worker: StartWorker) -> None:
    gate = Gate(1)
    trainer.register({"w": torch.ones(3)})
    start_worker("a", {"w": torch.zeros(3)}, gate)
    first = trainer.publish_nowait(1)
    gate.wait_for(trainer)
    with pytest.raises(DeadlineError, match="version 2 was not opened"):
        trainer.publish_nowait(2, timeout=0.05)
    threading.Timer(0.1, gate.go_on.set).start()
    second = trainer.publish_nowait(2, timeout=10.0)
    assert first.result(0.0).ok
    assert second.result(10.0).ok


def test_skip_publishes_nothing_while_a_round_is_under_way_and_the_newest_reaches_all(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    gate, weights = Gate(1), torch.full((3,), 1.0)
    slow, fast = torch.zeros(3), torch.zeros(3)
    trainer.register({"w": weights})
    workers = [start_worker("slow", {"w": slow}, gate), start_worker("fast", {"w": fast})]
    trainer.wait_ready(2)
    first = trainer.publish_nowait(1, stragglers="skip")
    gate.wait_for(trainer)
    for version in (2, 3):
        skipped = trainer.publish_nowait(version, stragglers=Stragglers.SKIP)
        assert skipped.skipped
        assert skipped.over
        skipped.released.wait(0.0)
        with pytest.raises(SkippedError, match=rf"version {version} was .*slow/0 \(pid") as caught:
            skipped.result(0.0)
        assert caught.value.version == version
        with pytest.raises(ConfigError):
            trainer.void(skipped)
    gate.go_on.set()
    assert first.result(10.0).ok
    assert not first.skipped
    trainer.wait_writable()
    weights.fill_(4.0)
    assert trainer.publish_nowait(4, stragglers="skip").result(10.0).ok
    assert [worker.version for worker in workers] == [4, 4]
    assert slow.tolist() == fast.tolist() == [4.0] * 3


def test_skip_leaves_out_who_is_busy_and_the_result_says_so(
    broker: Threaded, url: str, trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    # In this one process whoever serves one channel is busy for the other.
    gate = Gate()
    trainer.register({"w": torch.ones(3)})
    start_worker("a", {"w": torch.zeros(3)}, gate)
    with (
        TrainerAgent("critic", endpoint=url) as critic,
        WorkerAgent("critic", endpoint=url, replica="c") as other,
    ):
        critic.register({"v": torch.ones(3)})
        other.attach({"v": torch.zeros(3)})
        serving = threading.Thread(target=other.run)
        serving.start()
        critic.wait_ready()
        trainer.wait_ready()
        handle = trainer.publish_nowait(1)
        gate.wait_for(trainer)
        result = critic.publish_nowait(1, stragglers="skip", quorum=0).result(10.0)
        assert result.outcome is Outcome.FAILED
        assert result.replicas["c"].fate is Fate.UNSERVED
        assert "busy with another round" in result.replicas["c"].reason
        too_few = critic.publish_nowait(2, stragglers="skip").result(10.0)
        assert too_few.outcome is Outcome.FAILED
        assert "replica c: its processes are busy" in too_few.reason
        gate.go_on.set()
        assert handle.result(10.0).ok
        assert critic.publish_nowait(3, stragglers="skip").result(10.0).ok
        assert other.version == 3
        other.stop()
        serving.join(10.0)


def test_fail_refuses_at_once_naming_who_is_waited_for(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    gate = Gate(1)
    trainer.register({"w": torch.ones(3)})
    start_worker("a", {"w": torch.zeros(3)}, gate)
    trainer.wait_ready()
    first = trainer.publish_nowait(1, stragglers="fail")
    gate.wait_for(trainer)
    with pytest.raises(RefusedError, match=r"version 2 was not published: .*a/0 \(pid") as caught:
        trainer.publish_nowait(2, stragglers="fail")
    assert caught.value.code == "busy"
    gate.go_on.set()
    assert first.result(10.0).ok


def test_fail_makes_a_round_that_one_straggler_fails_for_all(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("not today")

    trainer.register({"w": torch.ones(3)})
    start_worker("bad", {"w": torch.zeros(3)}, refuse)
    good = start_worker("good", {"w": torch.zeros(3)})
    trainer.wait_ready(2)
    result = trainer.publish_nowait(1, stragglers="fail").result(10.0)
    assert (result.outcome, good.version) == (Outcome.FAILED, 0)
    assert "not today" in result.reason


def test_a_quorum_is_the_least_number_of_replicas(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    trainer.register({"w": torch.ones(3)})
    start_worker("a", {"w": torch.zeros(3)})
    trainer.wait_ready()
    result = trainer.publish_nowait(1, quorum=2, stragglers="skip").result(10.0)
    assert result.outcome is Outcome.FAILED
    assert result.reason.startswith("1 of at least 2 replicas")
    assert trainer.publish_nowait(2, quorum=1).result(10.0).ok


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stragglers": "leave"}, "must be one of 'wait', 'skip', 'fail'"),
        ({"quorum": 2, "min_replicas": 2}, "give one of them"),
        ({"quorum": 1.5}, "quorum 1.5"),
        ({"stragglers": "fail", "strict": False}, "leave strict=False out"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_sent(
    options: dict[str, object], text: str, url: str
) -> None:
    with TrainerAgent("policy", endpoint=url) as trainer, pytest.raises(ConfigError, match=text):
        trainer.publish_nowait(1, **options)  # type: ignore[arg-type]


def test_several_ranks_may_not_skip_and_are_told_the_way_out(url: str) -> None:
    with (
        TrainerAgent("policy", rank=1, world_size=2, endpoint=url) as trainer,
        pytest.raises(ConfigError, match="2 ranks.*'wait' with a short open_s on all ranks"),
    ):
        trainer.publish_nowait(1, stragglers="skip")


def test_after_a_skipped_version_nobody_is_served_what_was_never_published(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    gate, weights = Gate(1), torch.full((3,), 1.0)
    trainer.register({"w": weights})
    start_worker("a", {"w": torch.zeros(3)}, gate)
    trainer.wait_ready()
    # The memory is released before the round has ended: then the weights may be those of 2.
    first = trainer.publish_nowait(1)
    gate.wait_for(trainer)
    assert trainer.publish_nowait(2, stragglers="skip").skipped
    gate.go_on.set()
    assert first.result(10.0).ok
    with trainer.unchanged() as span:
        assert span.version == 0
        late = start_worker("late", {"w": torch.zeros(3)})
        trainer.wait_ready(2)
        with pytest.raises(DeadlineError):
            late.wait_for(1, timeout=0.2)
        assert trainer.publish(2).ok
        assert (span.version, late.version) == (2, 2)


def test_of_a_void_round_that_is_still_read_nobody_waits_for_ever_once_another_has_begun(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    gate = Gate(1)
    trainer.register({"w": torch.ones(3)})
    start_worker("a", {"w": torch.zeros(3)}, gate)
    trainer.wait_ready()
    handle = trainer.publish_nowait(1)
    gate.wait_for(trainer)
    assert trainer.void(handle) is False
    assert not handle.result(10.0).ok
    trainer.publish_nowait(2, min_replicas=0, open_s=0.1).result(10.0)
    with pytest.raises(RefusedError, match=r"version 1 \(call 1\) was void"):
        handle.released.wait(5.0)
    gate.go_on.set()


# ---------------------------------------------------------------- snapshots


def test_of_a_snapshot_workers_get_the_values_of_its_moment_whatever_is_written_since(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    gate = Gate(1)
    weights = {
        "w": torch.full((1000,), 1.0),
        "tied": torch.empty(0),
        "scale": torch.tensor(1.0),
        "empty": torch.empty(0, 4),
    }
    weights["tied"] = weights["w"]
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    trainer.register(weights)
    start_worker("a", target, gate)
    trainer.wait_ready()
    handle = trainer.publish_nowait(1, snapshot=True)
    gate.wait_for(trainer)
    # No step waits for it.
    assert not handle.released.done
    trainer.wait_writable(timeout=0.0)
    weights["w"].fill_(-1.0)
    weights["scale"].fill_(-1.0)
    gate.go_on.set()
    assert handle.result(10.0).ok
    assert target["w"].unique().tolist() == target["tied"].unique().tolist() == [1.0]
    assert target["scale"].item() == 1.0
    assert handle.result(0.0).nbytes == 1000 * 4 + 4


def test_snapshots_use_the_same_memory_again_once_it_is_released(
    trainer: TrainerAgent, start_worker: StartWorker, url: str
) -> None:
    weights, target, gate = torch.zeros(1000), torch.zeros(1000), Gate(3)
    trainer.register({"w": weights})
    worker = start_worker("a", {"w": target}, gate)
    seen, buffers = [], []
    for version in (1, 2, 3, 4):
        weights.fill_(version)
        handle = trainer.publish_nowait(version, snapshot=True)
        if version == 3:
            gate.wait_for(trainer)
            with pytest.raises(DeadlineError):
                trainer.publish_nowait(4, snapshot=True, timeout=0.05)
            gate.go_on.set()
        assert handle.result(10.0).ok
        assert handle.carries is not None
        buffers.append(handle.carries.buffers)
        seen.append(target.unique().tolist())
    assert seen == [[1.0], [2.0], [3.0], [4.0]]
    assert buffers == [buffers[0]] * 4
    assert set(buffers[0]).isdisjoint(trainer._registry.numbers)
    assert len(worker._intake._mapped[trainer.instance]) == 2


def test_what_is_registered_later_is_in_the_next_snapshot(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    first, second = torch.full((3,), 1.0), torch.full((3,), 2.0)
    target = {"first": torch.zeros(3), "second": torch.zeros(3)}
    trainer.register({"first": first})
    assert trainer.publish_nowait(1, snapshot=True, quorum=0).result(10.0).outcome is Outcome.EMPTY
    trainer.register({"second": second})
    worker = start_worker("a", target)
    handle = trainer.publish_nowait(2, snapshot=True)
    assert handle.result(10.0).ok
    assert [tensor.tolist() for tensor in target.values()] == [[1.0] * 3, [2.0] * 3]
    assert worker.version == 2
    eventually(lambda: not trainer._core.state.retiring)


def test_a_snapshot_may_be_of_a_subset(trainer: TrainerAgent, start_worker: StartWorker) -> None:
    weights = {name: torch.full((3,), 1.0) for name in ("base", "adapter")}
    target = {name: torch.zeros(3) for name in weights}
    trainer.register({"base": weights["base"]})
    trainer.register({"adapter": weights["adapter"]})
    start_worker("a", target)
    assert trainer.publish_nowait(1, snapshot=True).result(10.0).ok
    for tensor in weights.values():
        tensor.fill_(2.0)
    handle = trainer.publish_nowait(2, snapshot=True, subset=["adapter"])
    weights["adapter"].fill_(-1.0)
    assert handle.result(10.0).ok
    assert [tensor[0].item() for tensor in target.values()] == [1.0, 2.0]
    assert handle.result(0.0).nbytes == 12


def test_a_snapshot_without_room_is_named_and_leaves_nothing_and_opens_nothing(
    trainer: TrainerAgent, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathlib import Path

    trainer.register({"big": torch.zeros(20 * 2**20), "small": torch.zeros(3)})
    start_worker("a", {"small": torch.zeros(3)})
    allocate = trainer._registry.allocate
    calls: list[int] = []

    def second_fails(nbytes: int, ordinal: int | None) -> object:
        calls.append(nbytes)
        if len(calls) > 1:
            raise SharedMemoryError(Path("/dev/shm"), nbytes, 0)
        return allocate(nbytes, ordinal)

    before = trainer._core.next_call()
    with monkeypatch.context() as patch:
        patch.setattr(trainer._snapshot, "_allocate", second_fails)
        with pytest.raises(SharedMemoryError, match="enlarge it"):
            trainer.publish_nowait(1, snapshot=True)
    assert trainer._core.next_call() == before
    assert trainer._snapshot.buffers == []
    assert trainer.publish_nowait(1, snapshot=True).result(10.0).ok


def test_a_former_snapshot_that_is_still_read_is_named(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    weights = torch.ones(3)
    trainer.register({"w": weights})
    start_worker("a", {"w": torch.zeros(3)})
    handle = trainer.publish_nowait(1, snapshot=True)
    assert handle.result(10.0).ok
    call = trainer._core.state.calls[handle.call]
    # As if its worker were silent.
    call.leases[0].released = False
    kept = RoundHandle(trainer, 1, trainer._missing)
    kept.finished.reach(handle.result(0.0))
    kept.note_stuck(0, [Holder("0123456789abcdef", "a", 0, 77)])
    trainer._handles[handle.call] = kept
    with pytest.raises(
        StillLeasedError, match=r"former snapshot.*version 1.* a/0 \(pid 77\) keeps its lease"
    ):
        trainer.publish_nowait(2, snapshot=True, timeout=0.05)
    with pytest.raises(RefusedError, match="version 1"):
        trainer.publish_nowait(2, snapshot=True, stragglers="fail")
    assert trainer.publish_nowait(2, snapshot=True, stragglers="skip").skipped
    assert trainer.publish(2).ok
    call.leases[0].released = True


# ---------------------------------------------------------------- several ranks


@pytest.fixture
def ranks(broker: Threaded, url: str) -> Iterator[list[TrainerAgent]]:
    """Four trainers of one group, each with a quarter of `w`."""
    made = [TrainerAgent("policy", rank=rank, world_size=4, endpoint=url) for rank in range(4)]
    for rank, trainer in enumerate(made):
        trainer.register({"w": torch.full((2,), float(rank))}, regions={"w": ((8,), (2 * rank,))})
    yield made
    for trainer in made:
        trainer.close(timeout=0.5)


def test_a_worker_that_is_ready_too_late_fails_the_round_of_all_ranks_with_one_reason(
    ranks: list[TrainerAgent], start_worker: StartWorker
) -> None:
    handles = [rank.publish_nowait(1, open_s=0.3) for rank in ranks]
    results = [handle.result(10.0) for handle in handles]
    assert {(result.outcome, result.call) for result in results} == {(Outcome.FAILED, 1)}
    (reason,) = {result.reason for result in results}
    assert reason == "0 of at least 1 replicas were ready in time: no worker has joined the channel"
    assert all(handle.released.done for handle in handles)
    target = torch.zeros(8)
    start_worker("late", {"w": target})
    results = [handle.result(10.0) for handle in [rank.publish_nowait(1) for rank in ranks]]
    assert {(result.outcome, result.call) for result in results} == {(Outcome.COMMITTED, 2)}
    assert target.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_what_one_rank_gives_up_ends_for_all_ranks_with_one_reason(
    ranks: list[TrainerAgent], start_worker: StartWorker
) -> None:
    gate = Gate()
    worker = start_worker("a", {"w": torch.zeros(8)}, gate)
    handles = [rank.publish_nowait(1) for rank in ranks]
    gate.wait_for(ranks[2])
    assert ranks[2].void(handles[2]) is False
    results = [handle.result(10.0) for handle in handles]
    assert {result.outcome for result in results} == {Outcome.FAILED}
    (reason,) = {result.reason for result in results}
    assert reason == "rank 2 made the round void"
    gate.go_on.set()
    for rank in ranks:
        rank.wait_writable(timeout=10.0)
    assert worker.version == 0
