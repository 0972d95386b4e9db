"""Shards of two ranks on two GPUs, to a worker with whole tensors on each: three ways, in turns.

    tensorlease run -- python benchmarks/two_gpus.py

*Link*: each GPU copies half of the bytes from the other one, both at once, in single copies.
*Assembled*: each rank has its shards registered (rows, as FSDP2 cuts them), and each worker pulls what
it wants of both. *Gather and pack*: each rank gathers every tensor, packs it into a buffer that is kept,
and hands that to the worker on its GPU in lock step. What the workers hold is compared with what was
published. `--device cpu` shows that it works, and nothing of the speed.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tensorlease import TrainerAgent, WorkerAgent
from tensorlease.commands.bench.gpu_shapes import shapes_of
from tensorlease.commands.bench.report import machine

CHANNEL = "two-gpus"
LIMIT_S = 300.0
WARMING = 3
Shapes = Mapping[str, tuple[int, ...]]


class Party:
    """A process, and the link by which it is told what to do."""

    def __init__(self, function: Callable[..., None], *args: object) -> None:
        context = mp.get_context("spawn")
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=function, args=(theirs, *args), daemon=True)
        self._process.start()

    def tell(self, *words: object) -> None:
        self._link.send(words)

    def hear(self) -> Any:
        if not self._link.poll(LIMIT_S):
            raise SystemExit(f"process {self._process.pid} says nothing for {LIMIT_S:.0f} s")
        return self._link.recv()

    def end(self) -> None:
        self.tell("end")
        self._process.join(20.0)
        self._process.terminate()


def told(link: Connection) -> tuple[Any, ...]:
    """Returns what this process is told next; ends it where nobody tells it anything any more."""
    if not link.poll(LIMIT_S):
        raise SystemExit(f"nothing was told for {LIMIT_S:.0f} s")
    words: tuple[Any, ...] = link.recv()
    return words


def device_of(kind: str, place: int) -> torch.device:
    return torch.device("cuda", place) if kind == "cuda" else torch.device("cpu")


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rank(
    link: Connection,
    beside: Connection,
    kind: str,
    place: int,
    shapes: Shapes,
    store: str,
    packed: int,
) -> None:
    """A trainer with its half of the rows of each tensor."""
    device = device_of(kind, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=place,
        world_size=2,
    )
    torch.manual_seed(place)
    shards = {
        name: torch.empty(
            (shape[0] // 2, *shape[1:]), dtype=torch.bfloat16, device=device
        ).normal_()
        for name, shape in shapes.items()
    }
    regions = {
        name: (shape, (place * (shape[0] // 2), *(0,) * (len(shape) - 1)))
        for name, shape in shapes.items()
    }
    buffer = torch.empty(packed, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        buffer.share_memory_()
    beside.send(buffer)
    where = f"gpu-{place}"
    with TrainerAgent(
        CHANNEL, rank=place, world_size=2, distribution="assembled", device=where
    ) as trainer:
        trainer.register(shards, regions=regions)
        trainer.wait_ready(2, timeout=LIMIT_S)
        link.send("ready")
        while (words := told(link))[0] != "end":
            if words[0] == "assembled":
                result = trainer.publish(words[1], timeout=LIMIT_S).raise_for_status()
                link.send([r.copy_s for r in result.receivers.values()])
            elif words[0] == "gather":
                gather(beside, shards, shapes, buffer)
                link.send(None)
            else:
                for tensor in shards.values():
                    tensor.add_(1)
                settle(device)
                link.send([digest(tensor) for tensor in shards.values()])
    dist.destroy_process_group()


def gather(
    beside: Connection, shards: Mapping[str, torch.Tensor], shapes: Shapes, buffer: torch.Tensor
) -> None:
    """Gathers each tensor, packs it, and has the worker beside copy each full buffer."""
    end, inside = 0, list[tuple[str, int, int, int]]()

    def hand_over() -> None:
        settle(buffer.device)
        beside.send(inside)
        told(beside)

    for name, shard in shards.items():
        whole = torch.empty(shapes[name], dtype=shard.dtype, device=shard.device)
        dist.all_gather_into_tensor(whole, shard)
        flat, begin = whole.view(-1).view(torch.uint8), 0
        while begin < len(flat):  # What is larger than the buffer goes in parts.
            count = min(len(flat) - begin, len(buffer) - end)
            buffer[end : end + count].copy_(flat[begin : begin + count])
            inside.append((name, begin, end, count))
            begin, end = begin + count, end + count
            if end == len(buffer):
                hand_over()
                end, inside = 0, []
    if inside:
        hand_over()
    beside.send(None)


def digest(tensor: torch.Tensor) -> int:
    """Of a tensor's bits, weighed by their rows' places."""
    bits = tensor.contiguous().view(torch.int16).view(tensor.shape[0], -1).long().sum(1)
    return int((bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum()) + int(bits.sum())


def worker(link: Connection, beside: Connection, kind: str, place: int, shapes: Shapes) -> None:
    """Whole tensors on one GPU; takes versions, or what the rank beside it has packed."""
    device = device_of(kind, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    held = {n: torch.zeros(s, dtype=torch.bfloat16, device=device) for n, s in shapes.items()}
    buffer: torch.Tensor = beside.recv()
    where = f"gpu-{place}"
    with WorkerAgent(CHANNEL, replica=where, device=where) as agent:
        agent.attach(held)
        while True:
            while not link.poll():
                agent.step(timeout=0.01)
            words = told(link)
            if words[0] == "end":
                return
            if words[0] == "gather":
                link.send(None)
                while (inside := beside.recv()) is not None:
                    for name, begin, at, count in inside:
                        flat = held[name].view(-1).view(torch.uint8)
                        flat[begin : begin + count].copy_(buffer[at : at + count])
                    settle(device)
                    beside.send(None)
            elif words[0] == "zero":
                for tensor in held.values():
                    tensor.zero_()
                settle(device)
                link.send(None)
            else:
                link.send([[digest(half) for half in t.chunk(2)] for t in held.values()])


def link_floor(kind: str, total: int) -> Callable[[], float]:
    """Half of the bytes from each device to the other one, both at once; returns seconds."""
    devices = [device_of(kind, place) for place in (0, 1)]
    sources = [torch.ones(total // 2, dtype=torch.uint8, device=device) for device in devices]
    targets = [torch.zeros_like(source) for source in reversed(sources)]

    def copy() -> float:
        for device in devices:
            settle(device)
        began = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        for device in devices:
            settle(device)
        return time.perf_counter() - began

    return copy


class Benchmark:
    """Two ranks, and a worker beside each."""

    def __init__(self, kind: str, shapes: Shapes, packed: int, store: str) -> None:
        self.version = 0
        self.copies: list[float] = []
        context = mp.get_context("spawn")
        pairs = [context.Pipe() for _ in (0, 1)]
        self.ranks = [
            Party(rank, ours, kind, n, shapes, store, packed) for n, (ours, _) in enumerate(pairs)
        ]
        self.workers = [
            Party(worker, theirs, kind, n, shapes) for n, (_, theirs) in enumerate(pairs)
        ]
        for each in self.ranks:
            each.hear()

    def assembled(self) -> float:
        """One round; returns seconds."""
        self.version += 1
        began = time.perf_counter()
        for each in self.ranks:
            each.tell("assembled", self.version)
        self.copies = max(each.hear() for each in self.ranks)
        return time.perf_counter() - began

    def gather(self) -> float:
        """One hand-over by gathering and packing; returns seconds."""
        for each in self.workers:
            each.tell("gather")
            each.hear()
        began = time.perf_counter()
        for each in self.ranks:
            each.tell("gather")
        for each in self.ranks:
            each.hear()
        return time.perf_counter() - began

    def check(self, way: Callable[[], float]) -> None:
        """Ends the program unless both workers get by this way what both ranks have now."""
        for each in self.workers:
            each.tell("zero")
            each.hear()
        for each in self.ranks:
            each.tell("fresh")
        sent = [each.hear() for each in self.ranks]
        way()
        for each in self.workers:
            each.tell("digests")
            if each.hear() != [list(halves) for halves in zip(*sent, strict=True)]:
                raise SystemExit(f"{way.__name__}: a worker holds other values than were sent")

    def end(self) -> None:
        for each in (*self.ranks, *self.workers):
            each.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b", help="whose shapes")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--packed-mib", type=int, default=512, help="of the packing buffer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers-of", type=int, default=1, help="take one tensor in so many")
    options = parser.parse_args()
    if options.device == "cuda" and torch.cuda.device_count() < 2:
        raise SystemExit("this needs two GPUs; --device cpu shows that it works")
    shapes = dict(list(shapes_of(options.model).items())[:: options.layers_of])
    total = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        store = os.path.join(directory, "ranks")
        bench = Benchmark(options.device, shapes, options.packed_mib * 2**20, store)
        floor = link_floor(options.device, total)
        ways = {"link": floor, "assembled": bench.assembled, "gather and pack": bench.gather}
        took: dict[str, list[float]] = {name: [] for name in ways}
        copies: list[float] = []
        for turn in range(-WARMING, options.rounds):
            for name in sorted(ways, reverse=bool(turn % 2)):
                seconds = ways[name]()
                if turn >= 0:
                    took[name].append(seconds)
            if turn >= 0:
                copies.append(max(bench.copies))
        for way in (bench.assembled, bench.gather):
            bench.check(way)
        bench.end()
    medians = {name: statistics.median(times) for name, times in took.items()}
    print(machine())
    print(f"{options.model}: {len(shapes)} tensors, {total / 1e9:.2f} GB, {options.device}")
    for name, times in took.items():
        least, most, median = min(times) * 1e3, max(times) * 1e3, medians[name] * 1e3
        ratio = medians[name] / medians["link"]
        print(f"{name:16}{median:9.2f} ms  ({least:.2f} to {most:.2f})  {ratio:5.2f} x the link")
    print(f"the slower worker's copy alone: {statistics.median(copies) * 1e3:.2f} ms")
    ours = medians["assembled"]
    print(f"assembled / link             {ours / medians['link']:.2f} (goal <= 1.5)")
    print(f"gather and pack / assembled  {medians['gather and pack'] / ours:.2f} (goal >= 2)")
    print("what the workers hold was compared with what was sent, by both ways")


if __name__ == "__main__":
    main()
