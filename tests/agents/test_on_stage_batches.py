"""Callbacks in rounds of several batches: tensors in pieces, groups, what is for nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tensorlease.agents import RoundInfo, RoundResult, TrainerAgent, WorkerAgent
from tensorlease.agents.ring import RingOptions
from tensorlease.protocol.records import Outcome

from ..broker.raw_agents import Threaded, eventually
from .serving import weights, work_until
from .stages import Batches, Model, Views, publish

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")


@pytest.fixture
def batches(broker: Threaded, url: str) -> Iterator[Batches]:
    """A trainer that has registered nothing."""
    with TrainerAgent("policy", endpoint=url) as trainer:
        made = Batches(trainer)
        yield made
    for buffers in made.made:
        buffers.close()


@pytest.fixture
def running(worker: WorkerAgent) -> Iterator[Callable[[], None]]:
    """Begins to run the worker in a thread."""
    thread = threading.Thread(target=worker.run)
    yield thread.start
    worker.stop()
    thread.join(10.0)


def test_a_round_of_1_7_or_100_batches_gives_the_same_bytes_and_commits_once(
    batches: Batches, worker: WorkerAgent, running: Callable[[], None]
) -> None:
    events: list[tuple[str, int]] = []
    got: dict[str, Tensor] = {}

    def load(round: RoundInfo, tensors: Views) -> None:
        events.append(("stage", round.version))
        got.update((name, tensor.clone()) for name, tensor in tensors)

    worker.on_stage(load)
    worker.on_commit(lambda round: events.append(("commit", round.version)))
    worker.on_abort(lambda round, reason, torn: events.append(("abort", round.version)))
    running()
    names = [f"w{n}" for n in range(100)]
    for version, count in enumerate((1, 7, 100), start=1):
        sent = [
            {name: torch.full((4,), float(n)) for n, name in enumerate(names) if n % count == part}
            for part in range(count)
        ]
        result = batches.publish(version, sent).result(20.0).raise_for_status()
        assert result.receivers["a/0"].batches == count
        assert {name: t.tolist() for name, t in got.items()} == {
            name: [float(n)] * 4 for n, name in enumerate(names)
        }
        assert events == [("stage", version)] * count + [("commit", version)]
        events.clear()
        got.clear()
    assert worker.version == 3


def test_a_tensor_larger_than_a_slot_is_given_once_and_whole(
    broker: Threaded, url: str, worker: WorkerAgent, running: Callable[[], None]
) -> None:
    model = Model()
    worker.on_stage(lambda round, tensors: model.load_weights(tensors))
    running()
    large = torch.arange(5000.0).view(50, 100)
    small = torch.arange(3, dtype=torch.int64)
    with TrainerAgent("policy", endpoint=url, ring=RingOptions(3, 4096)) as trainer:
        for version in range(1, 4):
            with trainer.open_round(version) as ring:
                ring.send("large", large * version)
                ring.send("small", small, tied=("alias",))
            assert ring.result is not None
            result = ring.result.raise_for_status()
            assert result.receivers["a/0"].batches == ring.batches > 4
            assert torch.equal(model.loaded["large"], large * version)
            assert torch.equal(model.loaded["small"], small)
            assert torch.equal(model.loaded["alias"], small)
            assert sorted(name for call in model.calls for name in call) == [
                "alias",
                "large",
                "small",
            ]
            model.calls.clear()
    assert worker.version == 3


def test_the_version_is_the_same_int_on_both_sides_after_each_kind_of_round(
    broker: Threaded, url: str, worker: WorkerAgent, running: Callable[[], None]
) -> None:
    model = Model()
    hooks: list[int] = []
    worker.on_stage(lambda round, tensors: model.load_weights(tensors))
    worker.on_commit(lambda round: hooks.append(round.version))
    running()

    def seen(trainer: TrainerAgent, by: WorkerAgent, result: RoundResult | None) -> list[int]:
        assert result is not None and result.ok
        current = result.replicas[by.replica].current
        found = [by.version, trainer.last_version, result.version, current]
        assert {type(version) for version in found} == {int}
        return found

    with TrainerAgent("policy", endpoint=url) as trainer:
        with trainer.open_round(4) as ring:
            ring.send("w", torch.ones(3))
        assert seen(trainer, worker, ring.result) == [4] * 4
        trainer.register({"w": torch.full((3,), 5.0)})
        assert seen(trainer, worker, trainer.publish(5)) == [5] * 4
        with WorkerAgent("policy", endpoint=url, replica="late") as late:
            mine = weights()
            late.attach(mine)
            again = trainer.publish_nowait(5, min_replicas=2)
            assert late.wait_for(5, 10.0) == 5
            assert seen(trainer, late, again.result(10.0)) == [5] * 4
            assert mine["w"].tolist() == [5.0] * 3
    assert hooks == [4, 5]
    assert {type(version) for version in hooks} == {int}


def test_after_an_aborted_round_there_is_no_commit(
    batches: Batches, worker: WorkerAgent, running: Callable[[], None]
) -> None:
    events: list[str] = []

    def load(round: RoundInfo, tensors: Views) -> None:
        events.append(f"stage {tensors[0][0]}")
        if tensors[0][0] == "w2":
            raise ValueError("no w2")

    worker.on_stage(load)
    worker.on_commit(lambda round: events.append("commit"))
    worker.on_abort(lambda round, reason, torn: events.append("abort"))
    running()
    sent = [{f"w{n}": torch.ones(2)} for n in range(7)]
    result = batches.publish(1, sent).result(10.0)
    assert result.outcome is Outcome.FAILED
    eventually(lambda: "abort" in events)
    assert events == ["stage w0", "stage w1", "stage w2", "abort"]
    assert worker.version == 0


def test_of_100_names_sent_it_is_said_which_are_for_nobody_and_which_are_missing(
    batches: Batches, worker: WorkerAgent, running: Callable[[], None]
) -> None:
    model = Model()
    wanted = [f"w{n}" for n in range(99)]
    worker.on_stage(lambda round, tensors: model.load_weights(tensors), [*wanted, "late"])
    running()
    sent = {name: torch.ones(1) for name in [*wanted, "unknown"]}
    result = batches.publish(1, [sent]).result(10.0)
    assert result.outcome is Outcome.FAILED
    assert result.receivers["a/0"].reason == (
        "not covered: late: not sent in this round; sent and not wanted: unknown"
    )
    assert worker.unwanted == ("unknown",)
    nothing = batches.publish(2, [{"unknown": torch.ones(1)}]).result(10.0)
    assert nothing.outcome is Outcome.FAILED
    assert "w0: not sent in this round" in nothing.reason
    complete = {name: torch.ones(1) for name in [*wanted, "late", "unknown"]}
    assert batches.publish(3, [complete]).result(10.0).ok
    assert worker.version == 3


@pytest.mark.parametrize("attached", [True, False])
def test_a_weight_without_its_scale_is_refused_by_name_and_not_applied(
    batches: Batches, worker: WorkerAgent, running: Callable[[], None], attached: bool
) -> None:
    e8m0, fp8 = torch.float8_e8m0fnu, torch.float8_e4m3fn
    mine = {
        "w": torch.zeros(4, dtype=torch.uint8).view(fp8),
        "w_scale": torch.zeros(1, dtype=torch.uint8).view(e8m0),
        "int4": torch.zeros(4, dtype=torch.uint8),
    }
    given: dict[str, Tensor] = {}

    def load(round: RoundInfo, tensors: Views) -> None:
        given.update((name, tensor.clone()) for name, tensor in tensors)

    if attached:
        worker.attach(mine, together=[("w", "w_scale")])
    else:
        worker.on_stage(load, list(mine), together=[("w", "w_scale")])
    running()
    bytes_of = torch.arange(4, dtype=torch.uint8) + 1
    weight = {"w": bytes_of.clone().view(fp8)}
    scale = {"w_scale": torch.full((1,), 127, dtype=torch.uint8).view(e8m0)}
    packed = {"int4": bytes_of.clone()}

    result = batches.publish(1, [weight, packed]).result(10.0)
    assert result.outcome is Outcome.FAILED
    assert "w_scale: not sent" in result.reason
    assert worker.version == 0
    assert not any(t.view(torch.uint8).any() for name, t in mine.items() if name != "int4")
    assert not given.keys() & {"w", "w_scale"}

    if attached:
        wrong = {"w_scale": torch.ones(1, dtype=torch.uint8)}
        result = batches.publish(2, [{**weight, **wrong}, packed]).result(10.0)
        assert "'w_scale' is float8_e8m0fnu here and uint8 at" in result.reason
        untouched = [mine[name].view(torch.uint8) for name in ("w", "w_scale")]
        assert [raw.any().item() for raw in untouched] == [False, False]
        assert worker.version == 0

    again = [{"w": bytes_of.clone().view(fp8)}, {"int4": bytes_of.clone()}, scale]
    assert batches.publish(3, again).result(10.0).ok
    final = mine if attached else given
    assert final["w"].view(torch.uint8).tolist() == [1, 2, 3, 4]
    assert final["w_scale"].view(torch.uint8).tolist() == [127]
    assert (final["w"].dtype, final["w_scale"].dtype) == (fp8, e8m0)
    assert final["int4"].tolist() == [1, 2, 3, 4]


def test_a_group_of_registered_tensors_that_is_not_complete_is_never_served(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    mine = {"w": torch.zeros(3), "w_scale": torch.zeros(1)}
    worker.attach(mine, strict=False, together=[("w", "w_scale")])
    handle = trainer.publish_nowait(1, open_s=0.3)
    work_until(worker, lambda: handle.finished.done)
    assert "w_scale: not offered, and w must not come without it" in handle.result(0).reason
    assert mine["w"].tolist() == [0.0] * 3
    trainer.register({"w_scale": torch.ones(1)})
    assert publish(trainer, worker, 2).ok
    assert (mine["w"].tolist(), mine["w_scale"].tolist()) == ([1.0] * 3, [1.0])
