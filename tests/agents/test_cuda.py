"""GPU memory through CUDA IPC: other processes copy from it, in the right order, and keep nothing."""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tensorlease.agents import ExportError, RingOptions, RoundInfo, TrainerAgent, WorkerAgent
from tensorlease.agents.cuda_driver import Graph
from tensorlease.protocol.records import Fate

from .. import procs
from ..broker.raw_agents import Threaded, eventually
from ..procs import Spawn, Spawned
from .conftest import StartWorker

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

MIB = 2**20
Shapes = dict[str, tuple[tuple[int, ...], str]]


def model(seed: int = 0) -> dict[str, Tensor]:
    """Tensors of many kinds and sizes, most of them on the GPU."""
    made = torch.Generator("cuda").manual_seed(seed)
    found = {
        f"layer.{n}": torch.randn(257, 64 + n, device="cuda", generator=made).bfloat16()
        for n in range(20)
    }
    found["large"] = torch.randn(3000, 4097, device="cuda", generator=made)
    found["bytes"] = torch.randint(0, 256, (777,), device="cuda", generator=made).to(torch.uint8)
    found["eighth"] = torch.randn(512, device="cuda", generator=made).to(torch.float8_e4m3fn)
    found["scalar"] = torch.tensor(2.5, device="cuda")
    found["empty"] = torch.empty(0, 4, device="cuda")
    found["cpu"] = torch.randn(100)
    return found


def shapes_of(tensors: dict[str, Tensor]) -> Shapes:
    return {name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()}


def digests(tensors: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: sums(tensor) for name, tensor in tensors.items()}


def sums(tensor: Tensor) -> list[float]:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).long()
    places = torch.arange(1, flat.numel() + 1, device=flat.device)
    return [int(flat.sum()), int((flat * (places % 65_521)).sum())]


def follower(url: str, shapes: Shapes, replica: str, device: str = "cuda") -> None:
    """In a child: takes versions; says of each what it holds; ends at "end"."""
    target = {
        name: torch.zeros(
            size, dtype=torch.uint8 if "float8" in kind else _dtype(kind), device=device
        )
        for name, (size, kind) in shapes.items()
    }
    target = {name: t.view(_dtype(shapes[name][1])) for name, t in target.items()}
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    with WorkerAgent("policy", endpoint=url, replica=replica) as worker:
        worker.attach(target)
        procs.say("attached")
        while (version := worker.step(timeout=procs.DEADLINE_S)) is not None:
            procs.say((version, digests(target)))
            if procs.hear() == "end":
                break
    free, _ = torch.cuda.mem_get_info()
    procs.say(("held", torch.cuda.memory_allocated(), free))


def _dtype(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def take(process: Spawned, version: int, sent: dict[str, Tensor], then: str = "go on") -> None:
    got, held = process.hear()
    assert got == version
    assert held == digests(sent)
    process.say(then)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_registered_tensors_of_a_gpu_stay_where_they_are_and_arrive_in_another_process(
    broker: Threaded, url: str, spawn: Spawn, device: str
) -> None:
    sent = model()
    process = spawn(follower, url, shapes_of(sent), "a", device)
    assert process.hear() == "attached"
    where = {name: tensor.data_ptr() for name, tensor in sent.items() if tensor.is_cuda}
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(sent)
        assert {name: sent[name].data_ptr() for name in where} == where
        trainer.wait_ready(1, 30.0)
        for version in range(1, 6):
            for name, tensor in model(version).items():
                sent[name].copy_(tensor)
            trainer.publish(version, verify=version > 3).raise_for_status()
            take(process, version, sent, "end" if version == 5 else "go on")


def replaying(url: str, shapes: Shapes) -> None:
    """In a child: takes three versions; says of each what it holds, and which graphs were launched."""
    target = {
        name: torch.zeros(size, dtype=_dtype(kind), device="cuda")
        for name, (size, kind) in shapes.items()
    }
    launched: list[Graph] = []
    launch = Graph.launch

    def noted(self: Graph, stream: int) -> None:
        launched.append(self)
        launch(self, stream)

    Graph.launch = noted  # type: ignore[method-assign]
    with WorkerAgent("policy", endpoint=url, replica="a") as worker:
        worker.attach(target)
        procs.say("attached")
        every: list[Graph] = []
        for version in (1, 2, 3):
            assert worker.step(timeout=procs.DEADLINE_S) == version
            every += (each for each in launched if each not in every)
            procs.say((version, digests(target), [every.index(each) for each in launched]))
            launched.clear()
            procs.hear()


def test_registered_tensors_are_copied_by_one_graph_that_is_launched_again_in_each_round(
    broker: Threaded, url: str, spawn: Spawn
) -> None:
    sent = {f"w{n}": torch.zeros(MIB + n, device="cuda") for n in range(5)}
    process = spawn(replaying, url, shapes_of(sent))
    assert process.hear() == "attached"
    graphs: list[list[int]] = []
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(sent)
        trainer.wait_ready(1, 30.0)
        for version in (1, 2, 3):
            for n, tensor in enumerate(sent.values()):
                tensor.fill_(10 * version + n)
            trainer.publish(version).raise_for_status()
            got, held, launched = process.hear()
            assert (got, held) == (version, digests(sent))
            graphs.append(launched)
            process.say("go on")
    assert graphs[1] and graphs[1] == graphs[2], graphs


def test_what_a_kernel_still_writes_arrives_though_the_user_synchronises_nothing(
    broker: Threaded, url: str, spawn: Spawn
) -> None:
    sent = {"w": torch.zeros(64 * MIB // 4, device="cuda")}
    process = spawn(follower, url, shapes_of(sent), "a")
    assert process.hear() == "attached"
    rounds = 50
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(sent)
        trainer.wait_ready(1, 30.0)
        for version in range(1, rounds + 1):
            torch.cuda._sleep(400_000_000)  # 200 ms
            sent["w"].fill_(version)
            trainer.publish(version).raise_for_status()
            take(process, version, sent, "end" if version == rounds else "go on")


def sleeper(url: str, shapes: Shapes) -> None:
    """In a child: a worker whose tensors give their memory back before each round, as an engine does."""
    target = {
        name: torch.zeros(size, dtype=_dtype(kind), device="cuda")
        for name, (size, kind) in shapes.items()
    }
    addresses: set[tuple[int, ...]] = set()

    def prepare(_: RoundInfo) -> None:
        sizes = [tensor.untyped_storage().nbytes() for tensor in target.values()]
        for tensor in target.values():
            tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        for tensor, nbytes in zip(target.values(), sizes, strict=True):
            tensor.untyped_storage().resize_(nbytes)
        addresses.add(tuple(tensor.data_ptr() for tensor in target.values()))

    with WorkerAgent("policy", endpoint=url, replica="a") as worker:
        worker.on_prepare(prepare)
        worker.attach(target)
        procs.say("attached")
        while (version := worker.step(timeout=procs.DEADLINE_S)) is not None:
            procs.say((version, digests(target)))
            if procs.hear() == "end":
                break
    procs.say(len(addresses))


def test_memory_that_an_engine_gave_back_and_got_again_at_the_same_place_is_written_all_the_same(
    broker: Threaded, url: str, spawn: Spawn
) -> None:
    sent = {f"w{n}": torch.zeros(32 * MIB + n, dtype=torch.uint8, device="cuda") for n in range(5)}
    process = spawn(sleeper, url, shapes_of(sent))
    assert process.hear() == "attached"
    rounds = 8
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(sent)
        trainer.wait_ready(1, 30.0)
        for version in range(1, rounds + 1):
            for n, tensor in enumerate(sent.values()):
                tensor.fill_(10 * version + n)
            trainer.publish(version).raise_for_status()
            take(process, version, sent, "end" if version == rounds else "go on")
    assert process.hear() < rounds, "no address came again: this shows nothing"


def trainer_that_never_ends_its_kernel(url: str) -> None:
    """In a child: publishes one version, and another one that its GPU is not done with for long."""
    sent = {"w": torch.ones(16 * MIB, dtype=torch.uint8, device="cuda")}
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(sent)
        trainer.wait_ready(1, 30.0)
        trainer.publish(1).raise_for_status()
        procs.say("first")
        torch.cuda._sleep(60 * 1_500_000_000)  # Some 50 s.
        sent["w"].fill_(2)
        trainer.publish_nowait(2)
        procs.say("second")
        procs.hear()


def test_a_trainer_that_is_killed_while_its_gpu_writes_leaves_a_worker_that_takes_the_next(
    broker: Threaded, url: str, spawn: Spawn, start_worker: StartWorker
) -> None:
    held = {"w": torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")}
    worker = start_worker("a", held)
    process = spawn(trainer_that_never_ends_its_kernel, url)
    assert process.hear() == "first"
    assert process.hear() == "second"
    eventually(lambda: worker.goes_on)
    process.kill()
    eventually(lambda: not worker.goes_on)
    assert int(held["w"].sum()) == 16 * MIB  # Not a byte of the second.
    sent = {"w": torch.full((16 * MIB,), 3, dtype=torch.uint8, device="cuda")}
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(sent)
        trainer.wait_ready(1, 30.0)
        trainer.publish(3).raise_for_status()
        assert torch.equal(held["w"], sent["w"])


def test_a_trainer_and_a_worker_of_one_process_need_no_handle(
    broker: Threaded, url: str, start_worker: StartWorker
) -> None:
    sent = model()
    held = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    start_worker("a", held)
    with TrainerAgent("policy", endpoint=url) as trainer:
        buffers = trainer.register(sent)
        trainer.wait_ready(1, 30.0)
        for version in (1, 2, 3):
            sent["large"].add_(1)
            trainer.publish(version).raise_for_status()
            assert digests(held) == digests(sent)
        trainer.unregister(buffers, 10.0)


@pytest.mark.parametrize("verify", [False, True])
def test_a_ring_on_the_gpu_carries_tensors_of_both(
    broker: Threaded, url: str, spawn: Spawn, verify: bool
) -> None:
    sent = model()
    process = spawn(follower, url, shapes_of(sent), "a")
    assert process.hear() == "attached"
    ring = RingOptions(4, MIB, device="cuda:0")
    with TrainerAgent("policy", endpoint=url, ring=ring) as trainer:
        trainer.wait_ready(1, 30.0)
        for version in range(1, 6):
            for name, tensor in model(version).items():
                sent[name].copy_(tensor)
            torch.cuda._sleep(20_000_000)
            sent["large"].add_(1)
            trainer.publish_stream(version, sent, verify=verify).raise_for_status()
            take(process, version, sent, "end" if version == 5 else "go on")


def loader(url: str, keeps: bool) -> None:
    """In a child: gives what comes to a callback, which may keep a view."""
    got: dict[str, Tensor] = {}

    def load(round: RoundInfo, tensors: list[tuple[str, Tensor]]) -> None:
        assert all(tensor.is_cuda for _, tensor in tensors)
        got.update((name, tensor if keeps else tensor.clone()) for name, tensor in tensors)

    with WorkerAgent("policy", endpoint=url, replica="a") as worker:
        worker.on_stage(load)
        procs.say("ready")
        procs.say((worker.step(timeout=5.0), digests(got)))
        got.clear()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_callback_gets_views_of_the_gpu_and_one_that_it_keeps_is_said(
    broker: Threaded, url: str, spawn: Spawn, keeps: bool
) -> None:
    sent = {"a": torch.randn(3 * MIB, device="cuda"), "b": torch.ones(7, device="cuda")}
    process = spawn(loader, url, keeps)
    assert process.hear() == "ready"
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(sent)
        trainer.wait_ready(1, 30.0)
        torch.cuda._sleep(100_000_000)
        sent["a"].add_(1)
        result = trainer.publish(1, timeout=20.0)
        version, held = process.hear()
        if keeps:
            assert not result.ok and version is None
            assert (
                "a" in result.receivers["a/0"].reason and "kept" in result.receivers["a/0"].reason
            )
        else:
            assert result.ok and version == 1
            assert held == digests(sent)


@pytest.mark.parametrize("killing", [False, True], ids=["none is killed", "killed"])
def test_many_rounds_with_workers_that_are_killed_leave_the_memory_as_it_was(
    broker: Threaded, url: str, spawn: Spawn, killing: bool
) -> None:
    rounds = int(os.environ.get("TENSORLEASE_TEST_GPU_ROUNDS", "30"))
    gc.collect()
    before = torch.cuda.memory_allocated()
    sent = {"w": torch.zeros(64 * MIB // 4, device="cuda"), "b": torch.zeros(1000, device="cuda")}
    shapes = shapes_of(sent)
    workers = {name: spawn(follower, url, shapes, name) for name in "abc"}
    for process in workers.values():
        assert process.hear() == "attached"
    used: list[int] = []
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(sent)
        for version in range(1, rounds + 1):
            trainer.wait_ready(3, 30.0)
            sent["w"].fill_(version)
            sent["b"].fill_(-version)
            kills = killing and version % 10 == 0
            if kills:
                torch.cuda._sleep(200_000_000)  # It is in the middle of the copy.
                handle = trainer.publish_nowait(version, min_replicas=1)
                workers["c"].kill()
                result = handle.result(20.0)
                assert result.replicas["c"].fate is not Fate.COMMITTED
            else:
                trainer.publish(version).raise_for_status()
            for name in "ab" if kills else "abc":
                take(workers[name], version, sent, "end" if version == rounds else "go on")
            if kills and version < rounds:
                workers["c"] = spawn(follower, url, shapes, "c")
                assert workers["c"].hear() == "attached"
            assert sums(sent["w"]) == sums(torch.full_like(sent["w"], float(version)))
            if not kills:
                free, _ = torch.cuda.mem_get_info()
                used.append(free)
        assert torch.cuda.memory_allocated() < before + 66 * MIB
    for name in "ab":
        _, allocated, _ = workers[name].hear()
        assert allocated < 66 * MIB
    sys.stdout.write(f"free after each round, MiB: {[u // MIB for u in used]}\n")
    # A new process's context takes what that of a killed one has given back.
    assert min(used[5:]) > used[5] - 16 * MIB
    # Nothing has to wait for workers: torch has nothing to collect for those that were killed.
    sent.clear()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < before + MIB
    assert torch.cuda.memory_reserved() < before + 64 * MIB


def test_a_guard_does_not_wait_for_the_device_while_nobody_reads(
    broker: Threaded, url: str, start_worker: StartWorker
) -> None:
    weight = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    target = torch.zeros(1000, device="cuda")
    start_worker("a", {"w": target})
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": weight})
        trainer.guard(optimizer)
        trainer.wait_ready(1, 30.0)
        for version in (1, 2):
            trainer.publish(version, timeout=20.0).raise_for_status()
            weight.grad = torch.ones_like(weight)
            torch.cuda._sleep(400_000_000)  # 200 ms
            asleep = torch.cuda.Event()
            asleep.record()
            optimizer.step()
            assert not asleep.query()
            assert weight[0].item() == 1.0 - version / 2


def test_a_tensor_of_an_allocation_in_which_others_are_registered_is_its_own(
    broker: Threaded, url: str
) -> None:
    first, second = torch.ones(100, device="cuda"), torch.ones(100, device="cuda")
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"a": first})
        trainer.register({"b": second})
        with pytest.raises(ExportError, match="already registered"):
            trainer.register({"c": first[10:]})


def test_a_snapshot_of_what_lies_on_a_gpu_goes_through_shared_memory(
    broker: Threaded, url: str, start_worker: StartWorker
) -> None:
    sent = {"w": torch.ones(5000, device="cuda")}
    held = {"w": torch.zeros(5000, device="cuda")}
    go = threading.Event()

    def prepare(_: object) -> None:
        assert go.wait(20.0)

    start_worker("a", held, prepare)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(sent)
        go.set()
        trainer.wait_ready(1, 30.0)
        go.clear()
        handle = trainer.publish_nowait(1, snapshot=True)
        sent["w"].fill_(7)
        go.set()
        handle.result(20.0).raise_for_status()
        assert float(held["w"].sum()) == 5000


def test_a_mapping_ends_with_the_registration(broker: Threaded, url: str, spawn: Spawn) -> None:
    from tensorlease.agents import cuda

    sent = {"w": torch.ones(64 * MIB // 4, device="cuda")}
    process = spawn(follower, url, shapes_of(sent), "a")
    assert process.hear() == "attached"
    with TrainerAgent("policy", endpoint=url) as trainer:
        buffers = trainer.register(sent)
        trainer.wait_ready(1, 30.0)
        trainer.publish(1).raise_for_status()
        take(process, 1, sent)
        free, _ = torch.cuda.mem_get_info()
        trainer.unregister(buffers, 20.0)
        del buffers
        sent.clear()
        torch.cuda.empty_cache()
        eventually(lambda: torch.cuda.mem_get_info()[0] >= free + 60 * MIB)
        assert not list(cuda._exports.values())


@pytest.mark.gpu2
def test_a_worker_on_another_gpu_copies_from_the_trainers(
    broker: Threaded, url: str, spawn: Spawn
) -> None:
    sent = model()
    process = spawn(follower, url, shapes_of(sent), "a", "cuda:1")
    assert process.hear() == "attached"
    with TrainerAgent("policy", endpoint=url, ring=RingOptions(3, MIB, device="cuda:0")) as trainer:
        trainer.register(sent)
        trainer.wait_ready(1, 30.0)
        for version in range(1, 6):
            torch.cuda._sleep(50_000_000)
            sent["large"].add_(1)
            trainer.publish(version, verify=version == 5).raise_for_status()
            take(process, version, sent, "end" if version == 5 else "go on")


def half(url: str, rank: int, rows: int) -> None:
    """In a child: a rank with half of the rows on a GPU of its own; publishes what it is told."""
    torch.cuda.set_device(rank)
    mine = torch.zeros(rows, 1000, device=f"cuda:{rank}")
    trainer = TrainerAgent(
        "policy", endpoint=url, rank=rank, world_size=2, group="g", distribution="assembled"
    )
    with trainer:
        trainer.register({"w": mine}, regions={"w": ((2 * rows, 1000), (rank * rows, 0))})
        procs.say("registered")
        while (version := procs.hear()) != "end":
            torch.cuda._sleep(100_000_000)
            mine.fill_(10 * version + rank)
            procs.say(trainer.publish(version, timeout=30.0).ok)


@pytest.mark.gpu2
def test_shards_of_two_gpus_become_one_tensor_without_being_gathered(
    broker: Threaded, url: str, spawn: Spawn
) -> None:
    rows = 20_000
    ranks = [spawn(half, url, rank, rows) for rank in (0, 1)]
    process = spawn(follower, url, {"w": ((2 * rows, 1000), "torch.float32")}, "a", "cuda:1")
    for each, word in ((ranks[0], "registered"), (ranks[1], "registered"), (process, "attached")):
        assert each.hear() == word
    for version in range(1, 6):
        for rank in ranks:
            rank.say(version)
        assert [rank.hear() for rank in ranks] == [True, True]
        halves = [torch.full((rows, 1000), float(10 * version + rank)) for rank in (0, 1)]
        take(process, version, {"w": torch.cat(halves)}, "end" if version == 5 else "go on")
    for rank in ranks:
        rank.say("end")


def test_tensors_of_many_allocations_that_lie_beside_each_other_are_copied_one_by_one(
    broker: Threaded, url: str, spawn: Spawn
) -> None:
    # Each has an allocation of its own, and the driver lays them side by side.
    sent = {f"w{n:02}": torch.full((12 * MIB // 4,), float(n), device="cuda") for n in range(40)}
    addresses = {tensor.data_ptr() for tensor in sent.values()}
    assert any(address + 12 * MIB in addresses for address in addresses)
    process = spawn(follower, url, shapes_of(sent), "a")
    assert process.hear() == "attached"
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(sent)
        trainer.wait_ready(1, 30.0)
        for version in range(1, 4):
            for tensor in sent.values():
                tensor.add_(1)
            trainer.publish(version).raise_for_status()
            take(process, version, sent, "end" if version == 3 else "go on")
