"""How a ring round goes: it waits, fails, is left, and keeps its memory within bounds."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tensorlease.agents import (
    RoundInfo,
    RoundResult,
    TrainerAgent,
    WorkerAgent,
    filling,
    ring_round,
)
from tensorlease.agents.errors import ExportError
from tensorlease.agents.ring import Slots
from tensorlease.agents.ring_memory import RingMemory
from tensorlease.protocol.errors import (
    ClosedError,
    DeadlineError,
    NoBrokerError,
    RefusedError,
    TensorleaseError,
)
from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import Threaded, config_for, eventually
from .rings import RING, SLOT, Held, Start, same
from .serving import serving

if TYPE_CHECKING:
    from torch import Tensor

    from tensorlease.agents.placement import Placed

torch = pytest.importorskip("torch")

# ---------------------------------------------------------------- back-pressure


def test_the_next_tensor_is_made_only_when_a_slot_can_be_written_and_the_last_is_dropped_by_then(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    held = Held()
    target = {f"w{i}": torch.zeros(SLOT // 4) for i in range(8)}
    start_worker("r", target, held)
    made: list[weakref.ref[Tensor]] = []
    most = 0

    def gathered() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for i in range(8):
            tensor = torch.full((SLOT // 4,), float(i))
            made.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in made))
            yield f"w{i}", tensor
            del tensor

    results = []
    thread = threading.Thread(
        target=lambda: results.append(ring_trainer.publish_stream(1, gathered(), timeout=20.0))
    )
    thread.start()
    assert held.came.wait(20.0)
    # Two slots are out, the third tensor was made when the second slot was still being written.
    eventually(lambda: ring_trainer.ring.out == 2)
    assert len(made) <= 3
    held.go.set()
    thread.join(20.0)
    assert results[0].ok
    gc.collect()
    assert most == 1
    assert [float(target[f"w{i}"][-1]) for i in range(8)] == list(range(8))


def test_a_slot_that_does_not_come_back_in_time_is_an_error_that_names_who_reads(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    held = Held()
    start_worker("r", {"w": torch.zeros(SLOT)}, held)
    r = ring_trainer.open_round(1, timeout=0.5)
    with pytest.raises(DeadlineError, match=r"version 1 .*r/0 \(pid"), r:
        r.send("w", torch.ones(SLOT))
    held.go.set()
    assert ring_trainer.publish_stream(2, {"w": torch.ones(SLOT)}, timeout=20.0).ok
    assert ring_trainer.ring.free == 2


def test_a_round_that_is_not_over_in_time_goes_on(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    held = Held()
    target = {"w": torch.zeros(3)}
    start_worker("r", target, held)
    r = ring_trainer.open_round(1, timeout=0.3)
    with pytest.raises(DeadlineError, match=r"version 1 .*not finished"), r:
        r.send("w", torch.ones(3))
    held.go.set()
    assert r.handle is not None
    assert r.handle.result(20.0).ok
    r.handle.released.wait(20.0)
    assert target["w"].tolist() == [1, 1, 1]


def test_without_a_broker_each_wait_ends_by_its_limit_and_says_so(
    broker: Threaded, url: str
) -> None:
    trainer = TrainerAgent("policy", endpoint=url, ring=RING)
    r = trainer.open_round(1, timeout=0.5)
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="no slot of the ring came back .* no broker"), r:
        r.send("v", torch.ones(SLOT // 4))
        broker.stop()
        eventually(lambda: not trainer.connected)
        r.send("w", torch.ones(SLOT))
    with pytest.raises(NoBrokerError), trainer.open_round(2, timeout=0.3):
        raise AssertionError
    assert time.monotonic() - began < 20.0
    # To the next one it says that the round is void, and goodbye.
    again = Threaded(config_for(url))
    eventually(lambda: trainer.ring.free == 2)
    trainer.close()
    again.stop()


# ---------------------------------------------------------------- ways out


@pytest.mark.parametrize("sent", [0, 1, 2, 3])
def test_an_exception_in_the_block_voids_the_round_and_the_next_one_works(
    ring_trainer: TrainerAgent, start_worker: Start, sent: int
) -> None:
    target = {f"w{i}": torch.zeros(SLOT // 4) for i in range(4)}
    worker = start_worker("r", target)
    reasons: list[str] = []
    commits: list[int] = []
    worker.on_abort(lambda info, reason, torn: reasons.append(reason))
    worker.on_commit(lambda info: commits.append(info.version))
    ring_trainer.wait_ready(1, 20.0)
    source = {name: torch.full_like(tensor, 7.0) for name, tensor in target.items()}
    with pytest.raises(KeyError, match="mine"), ring_trainer.open_round(1, timeout=20.0) as r:
        for name in list(source)[:sent]:
            r.send(name, source[name])
        r.flush()
        raise KeyError("mine")
    if r.handle is not None:
        assert r.handle.result(20.0).outcome is Outcome.FAILED
        assert "made the round void" in r.handle.result(20.0).reason

    assert ring_trainer.publish_stream(2, source, timeout=20.0).ok
    assert commits == [2]
    assert len(reasons) <= 1
    assert same(source, target)
    assert ring_trainer.last_version == 2
    assert (ring_trainer.ring.free, ring_trainer.ring.slots) == (2, 2)


@pytest.mark.parametrize("bad", ["sparse", "out of memory"])
def test_the_seventh_of_twenty_that_cannot_be_sent_ends_the_round_by_name_and_the_next_works(
    ring_trainer: TrainerAgent, start_worker: Start, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    target = {f"w{i}": torch.zeros(SLOT // 8) for i in range(1, 21)}
    worker = start_worker("r", target)
    commits: list[int] = []
    worker.on_commit(lambda info: commits.append(info.version))
    ring_trainer.wait_ready(1, 20.0)
    source = {name: torch.ones_like(tensor) for name, tensor in target.items()}
    if bad == "sparse":
        given = {**source, "w7": torch.eye(3).to_sparse()}
        with pytest.raises(ExportError, match="tensor 'w7' .*layout"):
            ring_trainer.publish_stream(1, given, timeout=20.0)
    else:
        fill = filling.fill

        def failing(slot: Tensor, offset: int, placed: Placed, *rest: Any) -> None:
            if placed.name == "w7":
                raise RuntimeError("out of memory")
            fill(slot, offset, placed, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(ring_round, "fill", failing)
            with pytest.raises(ExportError, match="tensor 'w7' .*out of memory") as caught:
                ring_trainer.publish_stream(1, source, timeout=20.0)
        assert isinstance(caught.value.__cause__, RuntimeError)

    assert (worker.version, commits) == (0, [])
    eventually(lambda: (ring_trainer.ring.free, ring_trainer.ring.slots) == (2, 2))
    assert ring_trainer.publish_stream(2, source, timeout=20.0).ok
    assert commits == [2]
    assert same(source, target)


@pytest.mark.parametrize("hook", ["prepare", "stage", "commit", "abort"])
def test_a_worker_that_raises_in_any_hook_is_named_and_gives_each_slot_back(
    ring_trainer: TrainerAgent, start_worker: Start, worker: WorkerAgent, hook: str
) -> None:
    good = {f"w{i}": torch.zeros(SLOT // 4) for i in range(5)}
    start_worker("good", good)
    failing: set[str] = {hook} if hook != "abort" else {"stage", "abort"}
    calls: list[tuple[str, int]] = []

    def meet(name: str, version: int) -> None:
        calls.append((name, version))
        if name in failing:
            raise RuntimeError(f"no {name}")

    loaded: dict[str, float] = {}

    def load(info: RoundInfo, tensors: list[tuple[str, Tensor]]) -> None:
        meet("stage", info.version)
        loaded.update((name, float(tensor[0])) for name, tensor in tensors)

    worker.on_prepare(lambda info: meet("prepare", info.version))
    worker.on_stage(load)
    worker.on_commit(lambda info: meet("commit", info.version))
    worker.on_abort(lambda info, reason, torn: meet("abort", info.version))
    with serving(worker):
        ring_trainer.wait_ready(2, 20.0)
        source = {name: torch.full_like(tensor, 1.0) for name, tensor in good.items()}
        result = ring_trainer.publish_stream(1, source, timeout=20.0)

        assert result.outcome is Outcome.MIXED
        first = "stage" if hook == "abort" else hook
        assert f"RuntimeError: no {first}" in result.receivers["a/0"].reason
        assert result.replicas["a"].fate is (Fate.TORN if hook == "commit" else Fate.EXPELLED)
        assert result.replicas["a"].current == 0
        assert result.replicas["good"].current == 1
        assert (ring_trainer.ring.free, ring_trainer.ring.slots) == (2, 2)
        last = "commit" if hook == "commit" else "abort"
        eventually(lambda: calls[-1:] == [(last, 1)])
        failing.clear()
        ring_trainer.wait_ready(2, 20.0)
        result = ring_trainer.publish_stream(2, source, timeout=20.0, min_replicas=2)
        assert result.ok
    assert [name for name, version in calls if version == 1].count(last) == 1
    assert calls[-1] == ("commit", 2)
    assert loaded == dict.fromkeys(good, 1.0)
    assert (ring_trainer.ring.free, ring_trainer.ring.slots) == (2, 2)


def test_a_round_that_fails_meanwhile_lets_the_block_end_and_says_why(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    start_worker("r", {"w": torch.zeros(3, dtype=torch.float64), "v": torch.zeros(SLOT)})
    asked = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        asked.append("w")
        yield "w", torch.ones(3)
        r.flush()
        assert r.handle is not None
        r.handle.result(20.0)
        asked.append("v")
        yield "v", torch.ones(SLOT)
        asked.append("u")
        yield "u", torch.ones(SLOT)

    with ring_trainer.open_round(1, timeout=20.0) as r:
        r.send_all(gathered())
        assert r.ended
        r.send("u", torch.ones(SLOT))
    assert r.result is not None
    assert r.result.outcome is Outcome.FAILED
    assert "'w' is float64 here and float32" in r.result.reason
    assert asked == ["w", "v"]
    assert ring_trainer.ring.free == 2


def test_a_round_that_the_broker_refuses_raises_why_and_gives_its_slots_back(
    ring_trainer: TrainerAgent, start_worker: Start, url: str
) -> None:
    start_worker("r", {"w": torch.zeros(3)})
    ring_trainer.publish_stream(5, {"w": torch.ones(3)}, timeout=20.0).raise_for_status()
    with pytest.raises(RefusedError, match="version 4 is below 5"), ring_trainer.open_round(4):
        raise AssertionError
    # One that only the broker can refuse.
    ring_trainer._core.state.last_version = 0
    with (
        pytest.raises(RefusedError, match="version 3"),
        ring_trainer.open_round(3, timeout=20.0) as r,
    ):
        r.send("w", torch.ones(3))
    assert ring_trainer.ring.free == 2
    assert ring_trainer.publish_stream(6, {"w": torch.ones(3)}, timeout=20.0).ok


def test_a_round_whose_call_is_taken_is_opened_again_with_what_was_handed_out(
    ring_trainer: TrainerAgent, start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = {f"w{i}": torch.zeros(SLOT // 4) for i in range(4)}
    start_worker("r", target)
    source = {name: torch.randn_like(tensor) for name, tensor in target.items()}
    ring_trainer.publish_stream(1, source, timeout=20.0).raise_for_status()
    ring_trainer.publish_stream(2, source, timeout=20.0).raise_for_status()
    later = ring_trainer._core.next_call
    calls = [1]
    monkeypatch.setattr(ring_trainer._core, "next_call", lambda: calls.pop() if calls else later())
    source = {name: torch.randn_like(tensor) for name, tensor in target.items()}

    result = ring_trainer.publish_stream(3, source, timeout=20.0).raise_for_status()

    assert result.call == 3
    assert same(source, target)
    assert ring_trainer.ring.free == 2


def test_a_slot_whose_file_was_removed_is_made_anew(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    target = {"w": torch.zeros(3)}
    start_worker("r", target)
    ring_trainer.publish_stream(1, {"w": torch.ones(3)}, timeout=20.0).raise_for_status()
    directory = os.environ["TENSORLEASE_SHM_DIR"]
    for name in os.listdir(directory):
        os.unlink(os.path.join(directory, name))
    late = {"w": torch.zeros(3)}
    start_worker("late", late)
    assert ring_trainer.publish_stream(2, {"w": torch.full((3,), 2.0)}, timeout=20.0).ok
    assert late["w"].tolist() == target["w"].tolist() == [2, 2, 2]
    eventually(lambda: ring_trainer.ring.slots == 2)


# ---------------------------------------------------------------- registered tensors beside it


def test_what_is_registered_is_part_of_a_ring_round_too(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    registered = torch.ones(5)
    ring_trainer.register({"kept": registered})
    target = {"kept": torch.zeros(5), "sent": torch.zeros(SLOT)}
    start_worker("r", target, strict=False)
    for version in (1, 2):
        registered.fill_(version)
        with ring_trainer.open_round(version, timeout=20.0) as r:
            r.send("sent", torch.full((SLOT,), float(version)))
        assert r.result is not None
        r.result.raise_for_status()
        assert ring_trainer.may_write()
        assert target["kept"].tolist() == [version] * 5
        assert float(target["sent"].sum()) == version * SLOT
    # And alone, where nothing is sent: a worker that wants what is sent as well does not vote.
    with ring_trainer.open_round(3, timeout=20.0) as r:
        pass
    assert r.result is not None
    assert r.result.receivers["r/0"].batches == 1


def test_a_subset_is_what_is_sent_and_all_of_it_must_be(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    registered = torch.ones(5)
    ring_trainer.register({"kept": registered})
    target = {"kept": torch.zeros(5), "lora": torch.zeros(3), "base": torch.zeros(3)}
    worker = start_worker("r", target, strict=False)
    everything = {"lora": torch.ones(3), "base": torch.ones(3)}
    ring_trainer.publish_stream(1, everything, timeout=20.0).raise_for_status()

    with (
        pytest.raises(ExportError, match="'lora' is among the names of subset=, and was not sent"),
        ring_trainer.open_round(2, timeout=20.0, subset=["lora", "base"]) as r,
    ):
        with pytest.raises(ExportError, match="'kept' is not among the names"):
            r.send("kept", torch.ones(5))
        r.send("base", torch.full((3,), 9.0))
    registered.fill_(7)
    lora = {"lora": torch.full((3,), 2.0)}
    ring_trainer.publish_stream(3, everything, timeout=20.0).raise_for_status()
    registered.fill_(8)
    ring_trainer.publish_stream(4, lora, timeout=20.0, subset=["lora"]).raise_for_status()

    assert worker.version == 4
    assert {name: float(t[0]) for name, t in target.items()} == {"kept": 7, "lora": 2, "base": 1}


# ---------------------------------------------------------------- memory


def test_the_memory_of_a_ring_is_its_slots_in_every_round_and_none_when_it_is_freed(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    directory = os.environ["TENSORLEASE_SHM_DIR"]

    def in_use() -> int:
        return sum(os.path.getsize(os.path.join(directory, name)) for name in os.listdir(directory))

    target = {"w": torch.zeros(10, SLOT // 4)}
    start_worker("r", target)
    peaks = []
    for version in range(1, 4):
        with ring_trainer.open_round(version, timeout=20.0) as r:
            for row in range(10):
                r.send(f"row{row}", torch.ones(SLOT // 4))
                peaks.append(in_use())
            r.send("w", torch.full((10, SLOT // 4), float(version)))
        assert r.result is not None
        r.result.raise_for_status()
        assert r.batches == 20
    assert set(peaks) == {2 * SLOT}
    assert ring_trainer.ring.nbytes == 2 * SLOT

    ring_trainer.free_ring(20.0)

    assert (in_use(), ring_trainer.ring.slots) == (0, 0)
    ring_trainer.free_ring()
    assert ring_trainer.publish_stream(4, {"w": torch.ones(10, SLOT // 4)}, timeout=20.0).ok


@pytest.fixture
def ranks(broker: Threaded, url: str) -> Iterator[list[TrainerAgent]]:
    """Two ranks of one group, each with a ring of its own."""
    made = [
        TrainerAgent(
            "policy", rank=rank, world_size=2, endpoint=url, ring=RING, distribution="assembled"
        )
        for rank in range(2)
    ]
    yield made
    for trainer in made:
        trainer.close(timeout=0.5)


def at_once(calls: list[Callable[[], object]]) -> list[object]:
    """What each returns or raises, each in a thread of its own."""
    found: list[object] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            found[place] = calls[place]()
        except TensorleaseError as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    return found


def test_each_rank_has_the_bytes_of_its_slots_at_every_release_and_none_after_the_round(
    ranks: list[TrainerAgent], start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = os.environ["TENSORLEASE_SHM_DIR"]
    peaks: dict[str, list[int]] = {rank.instance: [] for rank in ranks}

    def in_use(instance: str) -> int:
        names = [name for name in os.listdir(directory) if f"-{instance[:8]}-" in name]
        return sum(os.path.getsize(os.path.join(directory, name)) for name in names)

    assert [in_use(rank.instance) for rank in ranks] == [0, 0]
    released = Slots.released

    def noted(slots: Slots, call: int, seq: int) -> int | None:
        surplus = released(slots, call, seq)
        (owner,) = (rank.instance for rank in ranks if rank._ring.slots is slots)
        peaks[owner].append(in_use(owner))
        return surplus

    monkeypatch.setattr(Slots, "released", noted)
    target = {f"{rank}.{row}": torch.zeros(SLOT // 4) for rank in range(2) for row in range(10)}
    start_worker("r", target)

    def publish(rank: int) -> RoundResult:
        source = ((f"{rank}.{row}", torch.full((SLOT // 4,), float(row))) for row in range(10))
        return ranks[rank].publish_stream(1, source, timeout=20.0)

    results = at_once([lambda: publish(0), lambda: publish(1)])

    assert [isinstance(result, RoundResult) and result.ok for result in results] == [True, True]
    assert [float(t[0]) for t in target.values()] == [*range(10), *range(10)]
    assert list(peaks.values()) == [[2 * SLOT] * 10] * 2
    at_once([rank.free_ring for rank in ranks])
    assert [in_use(rank.instance) for rank in ranks] == [0, 0]


def test_a_round_in_which_no_rank_sent_anything_fails_and_no_worker_commits(
    ranks: list[TrainerAgent], start_worker: Start
) -> None:
    worker = start_worker("r", {"w": torch.zeros(2)})
    commits: list[int] = []
    worker.on_commit(lambda info: commits.append(info.version))
    ranks[0].wait_ready(0, 20.0)

    results = at_once([lambda r=r: r.publish_stream(1, {}, timeout=20.0) for r in ranks])  # type: ignore[misc]

    assert [isinstance(r, RoundResult) and r.outcome for r in results] == [Outcome.FAILED] * 2
    assert {str(r.reason) for r in results if isinstance(r, RoundResult)} == {
        "no replica remains: not covered: the round brought nothing that this worker wants"
    }
    assert (worker.version, commits) == (0, [])
    pieces = at_once(
        [
            lambda: ranks[0].publish_stream(2, {"w": torch.ones(2)}, timeout=20.0),
            lambda: ranks[1].publish_stream(2, {}, timeout=20.0),
        ]
    )
    assert [isinstance(r, RoundResult) and r.ok for r in pieces] == [True, True]
    assert commits == [2]


def test_a_rank_that_sends_nothing_at_all_is_named_to_the_other_and_no_worker_hears_of_the_round(
    ranks: list[TrainerAgent], start_worker: Start
) -> None:
    held = Held(going=True)
    start_worker("r", {"w": torch.zeros(2)}, held)
    ranks[0].wait_ready(0, 20.0)
    ranks[1].wait_ready(0, 20.0)

    result = ranks[0].publish_stream(1, {"w": torch.ones(2)}, timeout=20.0, open_s=0.3)

    assert result.outcome is Outcome.FAILED
    assert "rank 1 did not open call 1 in time" in result.reason
    assert held.calls == 0
    assert ranks[0].ring.free == 2


def test_slots_that_are_still_mapped_when_the_limit_has_passed_are_named(
    ring_trainer: TrainerAgent, start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker("r", {"w": torch.zeros(3)})
    ring_trainer.publish_stream(1, {"w": torch.ones(3)}, timeout=20.0).raise_for_status()
    gone = RingMemory.gone
    monkeypatch.setattr(RingMemory, "gone", lambda ring, numbers: None)
    with pytest.raises(DeadlineError, match=r"slots \[0, 1\] of the ring"):
        ring_trainer.free_ring(0.1)
    monkeypatch.setattr(RingMemory, "gone", gone)
    ring_trainer._ring.gone([0, 1])
    assert ring_trainer.ring.slots == 0


def test_closing_the_trainer_in_a_round_ends_it_and_removes_the_slots(
    broker: Threaded, url: str, start_worker: Start
) -> None:
    start_worker("r", {"w": torch.zeros(3)})
    trainer = TrainerAgent("policy", endpoint=url, ring=RING)
    with pytest.raises(ClosedError), trainer.open_round(1, timeout=20.0) as r:
        r.send("w", torch.ones(3))
        trainer.close(timeout=0.1)
        r.send("v", torch.ones(3))
    assert os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) == []


def test_closing_it_while_a_slot_is_filled_ends_the_round_by_name(
    broker: Threaded, url: str, start_worker: Start
) -> None:
    start_worker("r", {"w": torch.zeros(3)})
    trainer = TrainerAgent("policy", endpoint=url, ring=RING)
    with pytest.raises(ClosedError), trainer.open_round(1, timeout=20.0) as r:
        r.send("w", torch.ones(3))
        trainer.close(timeout=0.1)
    assert os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) == []


def test_closing_it_while_slots_are_made_frees_them(
    broker: Threaded, url: str, start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker("r", {"w": torch.zeros(3)})
    trainer = TrainerAgent("policy", endpoint=url, ring=RING)
    make = RingMemory.make

    def closing(ring: RingMemory, count: int) -> object:
        trainer.close(timeout=0.1)
        return make(ring, count)

    monkeypatch.setattr(RingMemory, "make", closing)
    with pytest.raises(ClosedError):
        trainer.publish_stream(1, {"w": torch.ones(3)}, timeout=20.0)
    assert os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) == []


def test_a_replica_that_is_put_out_leaves_the_others_in_the_round(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    def raising(_: object) -> None:
        raise RuntimeError("no room in the engine")

    target = {"w": torch.zeros(2 * SLOT)}
    start_worker("bad", {"w": torch.zeros(2 * SLOT)}, raising)
    start_worker("good", target)
    ring_trainer.wait_ready(2, 20.0)
    result = ring_trainer.publish_stream(
        1, {"w": torch.ones(2 * SLOT)}, timeout=20.0, min_replicas=1
    )
    assert result.outcome is Outcome.MIXED
    assert result.replicas["bad"].fate is Fate.EXPELLED
    assert "no room in the engine" in result.receivers["bad/0"].reason
    assert float(target["w"].sum()) == 2 * SLOT
    assert ring_trainer.ring.free == 2
