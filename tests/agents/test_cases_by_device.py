"""Field cases again with tensors of a GPU where there is one; on the CPU the same tests run anywhere."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tensorlease.agents import (
    ExportError,
    RingOptions,
    RoundInfo,
    TrainerAgent,
    WorkerAgent,
    mappings,
)
from tensorlease.agents.mappings import process_mappings
from tensorlease.protocol.records import Fate, Outcome

from .. import procs
from ..broker.raw_agents import Threaded
from ..procs import Spawn
from .rings import Start

if TYPE_CHECKING:
    from torch import Tensor

    from tensorlease.agents.memory import MappedMemory
    from tensorlease.protocol.handles import Handle

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

SLOT = 64 * 1024
MIB = 2**20
Kinds = dict[str, tuple[tuple[int, ...], str]]


def ring_on(device: str) -> RingOptions:
    return RingOptions(2, SLOT, device="cpu" if device == "cpu" else "cuda:0")


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """SHA-256 of each tensor's bytes."""
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        found[name] = hashlib.sha256(ctypes.string_at(plain.data_ptr(), plain.nbytes)).hexdigest()
    return found


def kinds(tensors: dict[str, Tensor]) -> Kinds:
    return {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}


def follower(url: str, wanted: Kinds, device: str, tie: bool = False) -> None:
    """In a child: takes versions, and says of each what it holds; goes on, or ends, as it is told."""
    held = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        for name, (shape, dtype) in wanted.items()
    }
    if tie:
        held["head"] = held["embedding"]
    with WorkerAgent("policy", endpoint=url) as worker:
        worker.attach(held)
        procs.say("attached")
        while (version := worker.step(timeout=procs.DEADLINE_S)) is not None:
            procs.say((version, digests(held)))
            if procs.hear() == "end":
                break


@pytest.fixture
def trainer(url: str, broker: Threaded, device: str) -> Iterator[TrainerAgent]:
    agent = TrainerAgent("policy", endpoint=url, ring=ring_on(device))
    yield agent
    agent.close(timeout=0.5)


def used(device: str) -> int:
    """Bytes that are taken of the directory of shared memory, or of the GPU."""
    if device == "cpu":
        return sum(each.stat().st_size for each in os.scandir(os.environ["TENSORLEASE_SHM_DIR"]))
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info()
    return int(whole - free)


def test_the_memory_of_a_ring_is_its_slots_and_none_when_it_is_freed(
    url: str, broker: Threaded, start_worker: Start, device: str
) -> None:
    """C03, C79: however much is sent, one tensor and the slots are there; they can be given back."""
    # What else takes memory of a GPU meanwhile is less than this, and than eight of the tensors.
    slot, slack = (SLOT, 0) if device == "cpu" else (32 * MIB, 128 * MIB)
    held = {f"w{n}": torch.zeros(slot // 4, device=device) for n in range(16)}
    made: list[weakref.ref[Tensor]] = []
    taken: list[int] = []

    def tensors(version: int) -> Iterator[tuple[str, Tensor]]:
        for n, name in enumerate(held):
            assert not any(each() is not None for each in made)
            taken.append(used(device))
            tensor = torch.full((slot // 4,), 100.0 * version + n, device=device)
            made.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    ring = RingOptions(2, slot, device="cpu" if device == "cpu" else "cuda:0")
    with TrainerAgent("policy", endpoint=url, ring=ring) as trainer:
        start_worker("r", held)
        trainer.wait_ready(1, 20.0)
        before = used(device)
        for version in (1, 2, 3, 4):
            assert trainer.publish_stream(version, tensors(version), timeout=20.0).ok
            assert trainer.ring.nbytes == 2 * slot
            assert all(t.eq(100.0 * version + n).all() for n, t in enumerate(held.values()))
        assert before < max(taken) <= before + 2 * slot + slack
        trainer.free_ring(20.0)
        assert trainer.ring.nbytes == 0
        assert used(device) <= before + slack // 4


def test_memory_is_written_again_only_when_the_slowest_receiver_is_done(
    trainer: TrainerAgent, url: str, spawn: Spawn, start_worker: Start, device: str
) -> None:
    """C05: one of two workers is held back in each round; both have the published values."""
    sent = {"w": torch.zeros(1000, device=device)}
    held = {"w": torch.zeros(1000, device=device)}
    go = threading.Semaphore(0)
    start_worker("slow", held, lambda _: go.acquire(timeout=20.0))
    other = spawn(follower, url, kinds(sent), device)
    assert other.hear() == "attached"
    trainer.register(sent)
    trainer.wait_ready(2, 20.0)
    for version in range(1, 11):
        sent["w"].fill_(version)
        published = digests(sent)
        handle = trainer.publish_nowait(version, timeout=20.0)
        assert not handle.released.done
        go.release()
        handle.released.wait(20.0)
        sent["w"].fill_(-1)
        assert handle.result(20.0).ok
        assert other.hear() == (version, published)
        assert digests(held) == published
        other.say("end" if version == 10 else "go on")


def test_tensors_that_are_dropped_right_after_publishing_arrive_whole(
    trainer: TrainerAgent, url: str, spawn: Spawn, device: str
) -> None:
    """C09: the agent keeps them until the registration ends."""
    sent = {f"w{i}": torch.full((5000,), float(i), device=device) for i in range(5)}
    published = digests(sent)
    process = spawn(follower, url, kinds(sent), device)
    assert process.hear() == "attached"
    buffers = trainer.register(sent)
    trainer.wait_ready(1, 20.0)
    handle = trainer.publish_nowait(1, timeout=20.0)
    kept = weakref.ref(sent["w0"])
    sent.clear()
    gc.collect()
    others = [torch.full((5000,), -1.0, device=device) for _ in range(20)]
    assert process.hear() == (1, published)
    assert kept() is not None and len(others) == 20
    process.say("end")
    assert handle.result(20.0).ok
    buffers.close()


def test_thousands_of_small_tensors_go_in_as_many_batches_as_their_bytes_fill_slots(
    trainer: TrainerAgent, start_worker: Start, device: str
) -> None:
    """C13: and not in one for each."""
    dtypes = (torch.bfloat16, torch.float32, torch.int8)
    sent = {
        f"w{i}": torch.full((10 + i % 7,), i % 100, dtype=dtypes[i % 3], device=device)
        for i in range(1000)
    }
    held = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    start_worker("r", held)
    trainer.wait_ready(1, 20.0)
    with trainer.open_round(1, timeout=20.0) as r:
        r.send_all(sent)
    assert r.result is not None and r.result.ok
    assert r.batches <= 1000 * 256 // SLOT + 1
    assert digests(held) == digests(sent)


def test_tensors_of_the_cpu_larger_than_a_slot_go_beside_those_of_the_device(
    trainer: TrainerAgent, url: str, spawn: Spawn, device: str
) -> None:
    """C18: also those that are not contiguous."""
    sent = {
        "large on the cpu": torch.rand(3, SLOT // 4),
        "large": torch.rand(5, SLOT // 8, device=device),
        "turned": torch.rand(300, 70, device=device).t(),
        "turned on the cpu": torch.rand(300, 100).t(),
        "small on the cpu": torch.arange(7),
    }
    process = spawn(follower, url, kinds(sent), device)
    assert process.hear() == "attached"
    trainer.wait_ready(1, 20.0)
    for version in (1, 2, 3):
        assert trainer.publish_stream(version, sent, timeout=20.0).ok
        assert process.hear() == (version, digests(sent))
        process.say("end" if version == 3 else "go on")


def test_tensors_around_the_size_of_a_slot_arrive_whole_in_any_order_and_mix_of_dtypes(
    trainer: TrainerAgent, start_worker: Start, device: str
) -> None:
    """C67: also those that are not contiguous, and larger than all slots together."""
    sizes = (SLOT - 16, SLOT, SLOT + 16, 5 * SLOT, 2 * SLOT - 16, 48)
    dtypes = (torch.bfloat16, torch.int8, torch.float64)
    sent: dict[str, Tensor] = {}
    for place, nbytes in enumerate(sizes * 2):
        raw = torch.arange(nbytes, device=device) * (31 + place) % 251
        flat = raw.to(torch.uint8).view(dtypes[place % 3])
        sent[f"w{place}"] = flat if place < len(sizes) else flat.view(2, -1).t()
    held = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        for name, tensor in sent.items()
    }
    start_worker("r", held)
    trainer.wait_ready(1, 20.0)
    for version, order in enumerate((sent, dict(reversed(sent.items()))), 1):
        for tensor in held.values():
            tensor.zero_()
        assert trainer.publish_stream(version, order, timeout=20.0).ok
        assert digests(held) == digests(sent)


def receiver(url: str, device: str) -> None:
    """In a child: tries to hand on what it gets views of."""
    ring = ring_on(device)
    with (
        WorkerAgent("policy", endpoint=url) as worker,
        TrainerAgent("other", endpoint=url, ring=ring) as other,
    ):

        def hand_on(_: RoundInfo, tensors: list[tuple[str, Tensor]]) -> None:
            for tensor in (each for _, each in tensors):
                for what in (lambda t: other.register({"w": t}), lambda t: send(other, t)):
                    with pytest.raises(ExportError, match="clone it"):
                        what(tensor)
                copy = tensor.clone()
                other.register({"w": copy})
                procs.say(digests({"w": copy}))

        worker.on_stage(hand_on)
        procs.say("attached")
        assert worker.step(procs.DEADLINE_S) == 1


def send(other: TrainerAgent, tensor: Tensor) -> None:
    with other.open_round(1, timeout=20.0) as r:
        r.send("w", tensor)


def test_what_was_received_is_not_handed_on_and_its_clone_is(
    trainer: TrainerAgent, url: str, spawn: Spawn, device: str
) -> None:
    """C27."""
    process = spawn(receiver, url, device)
    assert process.hear() == "attached"
    sent = {"w": torch.rand(1000, device=device)}
    trainer.register(sent)
    trainer.wait_ready(1, 20.0)
    assert trainer.publish(1, timeout=20.0).ok
    assert process.hear() == digests(sent)
    process.result()


def test_empty_tensors_scalars_views_and_tied_names_arrive_as_what_they_are(
    trainer: TrainerAgent, url: str, spawn: Spawn, device: str
) -> None:
    """C35, C36, C71: nothing is exported for the empty ones; bytes of views and ties count once."""
    whole = torch.rand(4, 1000, device=device)
    sent = {
        "empty": torch.empty(0, 4, device=device),
        "scalar": torch.tensor(2.5, device=device),
        "row": whole[1],
        "rows": whole[2:4],
        "embedding": torch.rand(10, 10, device=device),
    }
    sent["head"] = sent["embedding"]
    buffers = trainer.register(sent)
    assert buffers.nbytes == 4 + 3000 * 4 + 400
    process = spawn(follower, url, kinds(sent), device, True)
    assert process.hear() == "attached"
    trainer.wait_ready(1, 20.0)
    for version in (1, 2, 3):
        with torch.no_grad():
            whole.add_(1)
            sent["embedding"].mul_(2)
        assert trainer.publish(version, timeout=20.0).ok
        assert process.hear() == (version, digests(sent))
        process.say("end" if version == 3 else "go on")


def test_a_weight_never_comes_without_its_scale(
    trainer: TrainerAgent, start_worker: Start, url: str, device: str
) -> None:
    """C72: a round that lacks the scale writes neither, and says which is missing."""
    eighth = getattr(torch, "float8_e4m3fn", torch.int8)

    def weight(value: float) -> Tensor:
        made: Tensor = torch.full((100,), value, device=device).to(eighth)
        return made

    held = {"w": weight(0.0), "s": torch.zeros(1, device=device)}
    with WorkerAgent("policy", endpoint=url, replica="r") as worker:
        worker.attach(held, together=[("w", "s")])
        thread = threading.Thread(target=worker.run)
        thread.start()
        trainer.wait_ready(1, 20.0)
        both = {"w": weight(1.0), "s": torch.full((1,), 0.37, device=device)}
        assert trainer.publish_stream(1, both, timeout=20.0).ok
        with trainer.open_round(2, timeout=20.0) as r:
            r.send("w", weight(2.0))
        assert r.result is not None and r.result.outcome is Outcome.FAILED
        assert "s: not sent" in str(r.result)
        assert digests(held) == digests(both)
        both = {"w": weight(3.0), "s": both["s"] * 2}
        assert trainer.publish_stream(3, both, timeout=20.0).ok
        assert digests(held) == digests(both)
        worker.stop()
        thread.join(10.0)


def test_two_workers_of_one_process_map_a_trainers_memory_once(
    url: str, broker: Threaded, spawn: Spawn, trainer: TrainerAgent, device: str
) -> None:
    """C78: a target and a draft model, say."""
    sent = {"w": torch.rand(1000, device=device), "draft": torch.rand(10, device=device)}
    process = spawn(two_in_one, url, kinds(sent), device)
    assert process.hear() == "attached"
    trainer.register(sent)
    trainer.wait_ready(2, 20.0)
    assert trainer.publish(1, timeout=20.0).ok
    opened, mapped, held = process.result()
    assert held == digests(sent)
    assert opened == mapped  # A GPU's allocator may put them into two allocations.
    assert len(mapped) == 1 or device != "cpu"


def two_in_one(
    url: str, wanted: Kinds, device: str
) -> tuple[list[tuple[str, int]], list[tuple[str, int]], object]:
    """In a child: two workers, each with one of the tensors.

    Returns what was opened, as often as it was, what was mapped, and the values.
    """
    opened: list[tuple[str, int]] = []
    open_handle = mappings.open_handle

    def noted(handle: Handle, source: str, number: int) -> MappedMemory:
        opened.append((source, number))
        return open_handle(handle, source, number)

    mappings.open_handle = noted
    held = {n: torch.zeros(shape, device=device) for n, (shape, _) in wanted.items()}
    workers = [WorkerAgent("policy", endpoint=url, replica=name) for name in held]
    for worker, name in zip(workers, held, strict=True):
        worker.attach({name: held[name]})
    procs.say("attached")
    threads = [threading.Thread(target=worker.wait_for, args=(1, 20.0)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    mapped = process_mappings().held()
    for worker in workers:
        worker.close()
    assert process_mappings().held() == []
    return sorted(opened), mapped, digests(held)


def test_a_verified_round_puts_out_who_did_not_read_what_was_published(
    trainer: TrainerAgent, start_worker: Start, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C80: `committed` is not said of a worker whose bytes are others."""
    from tensorlease.agents import copy_plan

    sent = {"w": torch.rand(1000, device=device)}
    held = {"w": torch.zeros(1000, device=device)}
    start_worker("r", held)
    trainer.register(sent)
    trainer.wait_ready(1, 20.0)
    assert trainer.publish(1, timeout=20.0, verify=True).ok
    assert digests(held) == digests(sent)
    copy = copy_plan.CopyPlan.copy

    def forgets(self: copy_plan.CopyPlan, *args: object) -> object:
        copied = copy(self, *args)  # type: ignore[arg-type]
        held["w"][500] = -1
        return copied

    monkeypatch.setattr(copy_plan.CopyPlan, "copy", forgets)
    sent["w"].mul_(2)
    result = trainer.publish(2, timeout=20.0, verify=True)
    assert result.outcome is Outcome.FAILED
    assert [r.fate for r in result.receivers.values()] == [Fate.EXPELLED]
    assert "'w'" in str(result)
