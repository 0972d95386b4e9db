"""Verified rounds, with real agents: wrong bytes, and bytes that were never read, are found."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tensorlease.agents import (
    RingOptions,
    RoundInfo,
    StillLeasedError,
    TrainerAgent,
    WorkerAgent,
)
from tensorlease.agents.copy_plan import Copied, CopyPlan
from tensorlease.agents.mappings import process_mappings
from tensorlease.agents.verifying import Reading
from tensorlease.protocol.errors import ConfigError, DeadlineError
from tensorlease.protocol.records import Fate, Outcome, Proof

from ..broker.raw_agents import Threaded, eventually
from .conftest import StartWorker
from .stages import Views

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")


@pytest.fixture
def ring(broker: Threaded, url: str) -> Iterator[TrainerAgent]:
    """A trainer with nothing registered, and slots of 4 KiB."""
    with TrainerAgent("policy", endpoint=url, ring=RingOptions(3, 4096)) as trainer:
        yield trainer


def model() -> dict[str, Tensor]:
    """Tensors of several dtypes, one of them tied, one without elements."""
    tensors = {
        "embed": torch.randn(50, 7),
        "bias": torch.randn(33).to(torch.bfloat16),
        "steps": torch.arange(5),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
    }
    return tensors | {"head": tensors["embed"]}


def like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_equal(held: dict[str, Tensor], sent: dict[str, Tensor]) -> None:
    assert {n: t.tolist() for n, t in held.items()} == {n: t.tolist() for n, t in sent.items()}


def test_what_is_right_is_taken_by_every_way(
    broker: Threaded, url: str, start_worker: StartWorker
) -> None:
    sent = model()
    held = like(sent)
    start_worker("a", held)
    with TrainerAgent("policy", endpoint=url, ring=RingOptions(3, 4096)) as trainer:
        buffers = trainer.register(sent)
        trainer.wait_ready()
        trainer.publish(1, verify=True).raise_for_status()
        assert_equal(held, sent)
        sent["embed"].add_(1)
        trainer.publish_nowait(2, verify=True, snapshot=True).result(10.0).raise_for_status()
        assert_equal(held, sent)
        sent["bias"].add_(1)
        trainer.publish(3, verify=True, subset=["bias", "head"]).raise_for_status()
        assert_equal(held, sent)
        with trainer.open_round(4, verify=True) as ring:  # with what is registered beside
            ring.send("extra", torch.randn(1000))
        assert ring.result is not None
        ring.result.raise_for_status()
        buffers.close()


def test_values_that_come_again_are_what_is_there(
    ring: TrainerAgent, start_worker: StartWorker
) -> None:
    first, second = model(), model()
    held = like(first)
    start_worker("a", held)
    for version, values in enumerate((first, second, first), start=1):
        with ring.open_round(version, verify=True) as r:
            r.send_all({n: t for n, t in values.items() if n != "head"}, tied={"embed": ["head"]})
        assert r.result is not None
        r.result.raise_for_status()
        assert_equal(held, values)


@pytest.mark.parametrize("registered", [True, False])
def test_a_byte_that_changes_before_it_is_read_is_found_and_nothing_is_applied(
    broker: Threaded, url: str, start_worker: StartWorker, registered: bool
) -> None:
    weights, held = torch.ones(2000), torch.zeros(2000)
    other = torch.zeros(2000)
    with TrainerAgent("policy", endpoint=url, ring=RingOptions(2, 65_536)) as trainer:
        if registered:
            trainer.register({"layer.w": weights})

        def spoil(round: RoundInfo) -> None:
            ring = trainer._ring_round
            if ring is None:
                weights[1000] = 77
            else:
                eventually(lambda: ring.batches)
                (number,) = ring._bodies
                trainer._ring._views[number][1000] = 77

        start_worker("a", {"layer.w": held}, prepare=spoil)
        start_worker("b", {"layer.w": other})
        trainer.wait_ready(2)
        if registered:
            result = trainer.publish(1, verify=True)
        else:
            with trainer.open_round(1, verify=True) as r:
                r.send("layer.w", weights)
            assert r.result is not None
            result = r.result
        outcome = result.receivers["a/0"]
        assert outcome.fate is Fate.EXPELLED
        assert "tensor 'layer.w' has other bytes in buffer" in outcome.reason
        assert held.count_nonzero() == 0
        # Where this is not asked for, wrong bytes are taken.
        weights.fill_(2)
        if registered:
            trainer.publish(2).raise_for_status()
            assert held[1000] == 77


def test_a_worker_that_copies_nothing_is_found(
    trainer: TrainerAgent, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = torch.zeros(3)
    start_worker("a", {"w": held})
    trainer.wait_ready()
    monkeypatch.setattr(CopyPlan, "copy", lambda *args: Copied(12, 1))
    assert trainer.publish(1).ok  # That is what an update looks like of which nothing arrives.
    result = trainer.publish(2, verify=True)
    assert result.outcome is Outcome.FAILED
    assert "tensor 'w' was copied from buffer 0, and is not what lies there" in result.reason


@pytest.mark.parametrize("proofs", [[], [Proof(0, b"made up.")]])
def test_a_worker_that_acknowledges_without_reading_is_found(
    trainer: TrainerAgent,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    proofs: list[Proof],
) -> None:
    start_worker("a", {"w": torch.zeros(3)})
    trainer.wait_ready()
    monkeypatch.setattr(Reading, "read", lambda self: proofs)
    result = trainer.publish(1, verify=True)
    assert result.outcome is Outcome.FAILED
    text = "has read other bytes" if proofs else "without a digest of buffer 0"
    assert text in result.reason


def test_a_copy_that_converts_is_compared_with_what_it_is_of(
    broker: Threaded, url: str, worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, held = torch.randn(40, 30), torch.zeros(30, 40, dtype=torch.bfloat16)
    values[0, 0] = float("nan")
    worker.attach({"w": held.t()}, cast="worker")
    thread = threading.Thread(target=worker.run)
    thread.start()
    with TrainerAgent("policy", endpoint=url) as trainer:
        buffers = trainer.register({"w": values})
        trainer.wait_ready()
        trainer.publish(1, verify=True).raise_for_status()
        assert held.t().nan_to_num().tolist() == values.bfloat16().nan_to_num().tolist()
        from tensorlease.agents import copy_plan

        def lossy(target: Tensor, source: Tensor) -> None:
            if target.numel() == 1200 and not target.is_contiguous():
                target.zero_()
            else:
                target.copy_(source)

        monkeypatch.setattr(copy_plan, "convert", lossy)
        assert "is not what lies there" in trainer.publish(2, verify=True).reason
        buffers.close()
    worker.stop()
    thread.join(10.0)


def test_a_callback_gets_only_what_is_right(
    ring: TrainerAgent, worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[str] = []

    def load(round: RoundInfo, tensors: Views) -> None:
        got.extend(name for name, _ in tensors)

    def spoil(round: RoundInfo) -> None:
        sent = ring._ring_round
        if round.version == 2 and sent is not None:
            eventually(lambda: sent.batches)
            (number,) = sent._bodies
            ring._ring._views[number][:100] = 0

    worker.on_prepare(spoil)
    worker.on_stage(load, names=["b"])
    thread = threading.Thread(target=worker.run)
    thread.start()
    for version in (1, 2):
        with ring.open_round(version, verify=True) as r:
            r.send("a", torch.ones(100))
            r.send("b", torch.ones(100))
        assert r.result is not None
        if version == 1:
            r.result.raise_for_status()
            assert got == ["b"]
        else:  # also where it is another tensor of the batch
            assert "tensor 'a' has other bytes" in r.result.reason
    assert got == ["b"]
    worker.stop()
    thread.join(10.0)


def test_late_ones_are_verified_too(
    trainer: TrainerAgent, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker("a", {"w": torch.zeros(3)})
    trainer.wait_ready()
    trainer.publish(1, verify=True).raise_for_status()
    seen: list[bool] = []
    read = Reading.read

    def noting(self: Reading) -> list[Proof]:
        seen.append(True)
        return read(self)

    monkeypatch.setattr(Reading, "read", noting)
    with trainer.unchanged():
        late = start_worker("b", {"w": torch.zeros(3)})
        assert late.wait_for(1, timeout=20.0) == 1
    assert len(seen) == 2


def test_verify_is_yes_or_no(trainer: TrainerAgent) -> None:
    with pytest.raises(ConfigError, match="verify 'all': must be True or False"):
        trainer.publish(1, verify="all")  # type: ignore[arg-type]


# ---------------------------------------------------------------- what became of the names


def test_how_many_names_were_applied_and_skipped_is_in_the_result(
    ring: TrainerAgent, start_worker: StartWorker
) -> None:
    names = [f"w{n}" for n in range(100)]
    start_worker("most", {name: torch.zeros(4) for name in names[1:]})
    start_worker("none", {"other": torch.zeros(4)}, strict=False)
    start_worker("more", {name: torch.zeros(4) for name in (*names, "lacking")})
    ring.wait_ready(3)
    with ring.open_round(1) as r:
        r.send_all((name, torch.ones(4)) for name in names)
    result = r.result
    assert result is not None and result.outcome is Outcome.MIXED
    most = result.receivers["most/0"]
    assert (most.fate, most.applied, most.skipped) == (Fate.COMMITTED, 99, 1)
    assert (most.unwanted, result.unwanted) == (("w0",), {"most": ("w0",)})
    assert "not wanted by any worker of most: w0" in str(result)
    assert result.receivers["none/0"].fate is Fate.EXPELLED
    assert result.receivers["more/0"].fate is Fate.EXPELLED
    assert "lacking: 0 of 4 elements filled" in result.receivers["more/0"].reason
    with ring.open_round(2, strict=True) as r:
        r.send_all((name, torch.ones(4)) for name in names)
    assert r.result is not None and r.result.outcome is Outcome.FAILED


def test_a_name_is_unwanted_where_no_member_of_the_replica_wants_it(
    ring: TrainerAgent, start_worker: StartWorker
) -> None:
    start_worker("pair", {"x": torch.zeros(4)}, member=0, size=2)
    start_worker("pair", {"y": torch.zeros(4)}, member=1, size=2)
    ring.wait_ready()
    with ring.open_round(1) as r:
        r.send_all((name, torch.ones(4)) for name in ("x", "y", "z"))
    assert r.result is not None
    r.result.raise_for_status()
    assert r.result.receivers["pair/1"].unwanted == ("x", "z")
    assert r.result.unwanted == {"pair": ("z",)}


def test_a_subset_that_no_worker_of_a_replica_wants_is_no_version(
    broker: Threaded, url: str, start_worker: StartWorker
) -> None:
    for member, name in enumerate(("x", "y")):
        start_worker("pair", {name: torch.zeros(4)}, member=member, size=2)
    with TrainerAgent("policy", endpoint=url) as trainer:
        buffers = trainer.register({name: torch.ones(4) for name in ("x", "y", "z")})
        trainer.wait_ready()
        trainer.publish(1).raise_for_status()
        trainer.publish(2, subset=["x"]).raise_for_status()
        result = trainer.publish(3, subset=["z"])
        assert result.outcome is Outcome.FAILED
        assert "no worker of the replica applied anything; the names sent were z" in result.reason
        buffers.close()


def test_what_was_found_wrong_does_not_keep_the_memory_mapped(
    trainer: TrainerAgent, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.zeros(3)
    trainer.register({"more": weights})
    kept: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", kept.append)
    log = logging.getLogger("tensorlease.agents")
    log.addHandler(handler)
    try:
        worker = start_worker("a", {"more": torch.zeros(3)}, lambda round: weights.add_(1))
        trainer.wait_ready()
        assert not trainer.publish(1, verify=True).ok
        worker.close()
        assert any(record.exc_info for record in kept)
        assert process_mappings().held() == []
    finally:
        log.removeHandler(handler)


def test_a_name_that_nobody_offers_is_not_applied(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    start_worker("a", {"w": torch.zeros(3), "mispelt": torch.zeros(3)}, strict=False)
    trainer.wait_ready()
    trainer.register({"x": torch.ones(2)})
    result = trainer.publish(1)
    assert result.ok
    assert (result.receivers["a/0"].applied, result.receivers["a/0"].skipped) == (1, 1)


def test_who_has_committed_is_not_named_as_one_that_may_still_read(
    broker: Threaded, url: str, start_worker: StartWorker
) -> None:
    kept: list[object] = []
    start_worker("done", {"w": torch.zeros(3)})
    with (
        TrainerAgent("policy", endpoint=url) as trainer,
        WorkerAgent("policy", endpoint=url, replica="keeper") as keeper,
    ):
        keeper.on_stage(lambda round, tensors: kept.append(tensors))
        thread = threading.Thread(target=keeper.run)
        thread.start()
        buffers = trainer.register({"w": torch.ones(3)})
        trainer.wait_ready(2)
        handle = trainer.publish_nowait(1)
        assert handle.result(20.0).outcome is Outcome.MIXED
        with pytest.raises(StillLeasedError) as caught:
            trainer.wait_writable(timeout=0.05)
        assert [holder.replica for holder in caught.value.holders] == ["keeper"]
        assert "done/0" not in str(caught.value)
        with pytest.raises(DeadlineError, match=r"not released by keeper/0 \(pid \d+\);"):
            handle.released.wait(0.01)
        kept.clear()
        handle.released.wait(20.0)
        keeper.stop()
        thread.join(10.0)
        buffers.close()


def test_what_is_found_wrong_before_it_is_written_leaves_the_worker_at_its_version(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    weights, held = torch.zeros(3), torch.zeros(3)
    trainer.register({"more": weights})
    torn: list[bool] = []
    worker = start_worker("a", {"more": held}, lambda round: spoil(round.version))
    worker.on_abort(lambda round, reason, is_torn: torn.append(is_torn))

    def spoil(version: int) -> None:
        if version == 2:
            weights[1] = 77

    trainer.wait_ready()
    assert trainer.publish(1, verify=True).ok
    assert trainer.publish(2, verify=True).outcome is Outcome.FAILED
    eventually(lambda: torn == [False])
    assert (worker.version, held.tolist()) == (1, [0.0] * 3)
    eventually(lambda: trainer.replicas["a"].current == 1)
    assert trainer.publish(3, verify=True, subset=["more"], base=1).ok


def test_late_ones_are_not_served_where_there_are_no_digests_for_them(
    trainer: TrainerAgent, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    start_worker("a", {"w": torch.zeros(3)})
    trainer.wait_ready()
    trainer.publish_nowait(1, verify=True, snapshot=True).result(20.0).raise_for_status()
    with trainer.unchanged() as span:
        late = start_worker("b", {"w": torch.zeros(3)})
        eventually(lambda: "there are no digests for it; publish it again" in caplog.text)
        assert (late.version, list(span.results)) == (0, [])
    assert trainer.publish(1, verify=True).ok
    assert late.wait_for(1, timeout=20.0) == 1


# ---------------------------------------------------------------- a ring, and who is not strict


def test_who_is_not_strict_keeps_what_a_ring_does_not_bring(
    ring: TrainerAgent, start_worker: StartWorker
) -> None:
    held = {"a": torch.zeros(3), "never": torch.full((3,), 7.0)}
    worker = start_worker("a", held, strict=False)
    ring.wait_ready()
    for version in (1, 2):
        with ring.open_round(version) as r:
            r.send("a", torch.full((3,), float(version)))
        assert r.result is not None
        r.result.raise_for_status()
        assert r.result.receivers["a/0"].applied == 1
    assert {n: t.tolist() for n, t in held.items()} == {"a": [2.0] * 3, "never": [7.0] * 3}
    with ring.open_round(3) as r:
        r.send("other", torch.ones(3))
    assert r.result is not None and r.result.outcome is Outcome.FAILED
    assert "applied anything; the names sent were other" in r.result.reason
    assert worker.version == 2
