"""The command `tensorlease bench shm`."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection

import click
import torch

from tensorlease.agents import TrainerAgent, WorkerAgent
from tensorlease.agents.mappings import process_mappings
from tensorlease.agents.shm import ShmMemory
from tensorlease.agents.sink import AttachedTensors
from tensorlease.agents.source import register

from . import peers
from .report import Goal, Report, finish, new_report, options
from .service import broker_words, serving

LIMIT = 1.3
"""Times one memcpy."""
LIMIT_PEERS = 2.0
"""Times faster than the fastest of them."""
LIMIT_S = 120.0
SMALL = 256 * 2**20
"""Bytes below which a round's fixed costs are no small part of it."""
CHANNEL = "bench"

Tensors = Mapping[str, torch.Tensor]


@click.command()
@click.option("--mib", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option(
    "--tensors",
    type=click.IntRange(min=1),
    default=300,
    show_default=True,
    help="How many; every tenth is ten times as large as the others.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option(
    "--bucket-mib",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Of the peers' buffers.",
)
@options
def shm(mib: int, tensors: int, rounds: int, bucket_mib: int, as_json: bool, check: bool) -> int:
    """Measure registered tensors in shared memory, to one worker, against one memcpy of the bytes.

    Twice: the worker's copy alone, in this process, and a whole round through a broker to a worker
    in a process of its own, from publish to the result, the commit and the release included. Beside
    them the shared-memory paths of verl, sglang and checkpoint-engine, each driven alone, if they
    are installed. All take turns. The memcpy is torch's `copy_` or one thread's, whichever is
    faster.
    """
    words = f"--mib {mib} --tensors {tensors} --rounds {rounds} --bucket-mib {bucket_mib}"
    report = new_report(f"tensorlease bench shm {words}")
    source = make(mib * 2**20, tensors)
    total = sum(tensor.nbytes for tensor in source.values())
    with contextlib.ExitStack() as stack:
        # Before the trainer's threads begin.
        ways: dict[str, Callable[[], object]] = {}
        found = stack.enter_context(peers.driven(source, bucket_mib * 2**20))
        ways["copy_ of torch"], ways["memcpy, one thread"] = floors(total)
        ways["the worker's copy"] = stack.enter_context(copying(source))
        ways["a round through the broker"] = stack.enter_context(publishing(source))
        ways |= {peer.name: peer.round for peer in found}
        for way in ways.values():
            way()
        took: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds):
            for name in sorted(ways, reverse=bool(turn % 2)):
                took[name].append(seconds(ways[name]))
        for peer in found:
            peer.verify()
    add_rows(report, took, total, [peer.name for peer in found])
    threads = torch.get_num_threads()
    report.notes.append(
        f"{total / 1e9:.2f} GB of float32 in {tensors} tensors, torch {torch.__version__} with"
        f" {threads} threads"
    )
    if total < SMALL:
        report.notes.append(
            f"the goals are for {SMALL / 2**20:.0f} MiB and more: of less, a round's messages, and"
            " whatever else the machine does, take a larger part"
        )
    return finish(report, as_json=as_json, check=check)


def add_rows(report: Report, took: dict[str, list[float]], total: int, others: list[str]) -> None:
    """Adds what each way took, and the goals: two names are those of the memcpy."""
    medians = {}
    for name, times in took.items():
        medians[name] = report.add(name, "ms", [taken * 1e3 for taken in times])
        report.add(name, "GB/s", [total / taken / 1e9 for taken in times])
    floor = min(("copy_ of torch", "memcpy, one thread"), key=lambda name: medians[name])
    report.notes.append(f"the faster memcpy: {floor}")
    for name in ("the worker's copy", "a round through the broker"):
        ratios = [a / b for a, b in zip(took[name], took[floor], strict=True)]
        report.add(name, "times a memcpy", ratios)
        value = medians[name] / medians[floor]
        report.goals.append(Goal(name, "median to that of one memcpy", value, LIMIT))
    ours = "a round through the broker"
    if others:
        fastest = min(others, key=lambda name: medians[name])
        value = medians[fastest] / medians[ours]
        what = f"times as fast as {fastest}"
        report.goals.append(Goal(ours, what, value, LIMIT_PEERS, at_least=True))
    missing = [peer for peer in peers.NAMES if not any(name.startswith(peer) for name in others)]
    if missing:
        report.notes.append(f"not installed, and not compared with: {', '.join(missing)}")


def make(nbytes: int, count: int) -> dict[str, torch.Tensor]:
    """Float32 tensors, `nbytes` in all: nine small ones for each large one."""
    weights = [10 if place % 10 == 0 else 1 for place in range(count)]
    sizes = [max(1, nbytes * weight // sum(weights) // 4) for weight in weights]
    return {f"t{place}": torch.rand(size) for place, size in enumerate(sizes)}


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def floors(total: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """One copy of so many bytes: torch's, with all its threads, and the C library's."""
    flat, other = torch.ones(total, dtype=torch.uint8), torch.zeros(total, dtype=torch.uint8)
    to, of = other.data_ptr(), flat.data_ptr()

    def memcpy() -> None:
        assert other.nbytes == flat.nbytes == total
        ctypes.memmove(to, of, total)

    return lambda: other.copy_(flat), memcpy


@contextlib.contextmanager
def copying(source: Tensors) -> Iterator[Callable[[], object]]:
    """What a worker does with a round's bytes, without a round: it maps once, and copies."""
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    mine = {name: tensor.clone() for name, tensor in source.items()}
    registered = register(mine, memory=ShmMemory("0" * 16), numbers=itertools.count())
    plan = AttachedTensors(target).plan({"trainer": registered.buffers})
    mappings = process_mappings()
    mapped = {
        number: mappings.map("trainer", number, handle)
        for number, handle in plan.handles("trainer").items()
    }
    taken = plan.takes["trainer"]
    try:
        yield lambda: plan.copy("trainer", taken, mapped)
        assert all(torch.equal(source[name], target[name]) for name in source)
    finally:
        mapped.clear()
        for number in taken:
            mappings.unmap("trainer", number)
        registered.close()


@contextlib.contextmanager
def publishing(source: Tensors) -> Iterator[Callable[[], object]]:
    """Whole rounds: a broker and a worker in processes of their own, the trainer in this one."""
    shapes = {name: tensor.numel() for name, tensor in source.items()}
    context = mp.get_context("spawn")
    versions = itertools.count(1)
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        url = f"ipc://{directory}/broker.sock"
        ours, theirs = context.Pipe()
        worker = context.Process(target=pull, args=(url, shapes, theirs), daemon=True)
        with serving(url, broker_words(url, 2)), TrainerAgent(CHANNEL, endpoint=url) as trainer:
            worker.start()
            try:
                trainer.register({name: tensor.clone() for name, tensor in source.items()})
                trainer.wait_ready(1, timeout=LIMIT_S)
                yield lambda: trainer.publish(next(versions), timeout=LIMIT_S).raise_for_status()
                ours.send("sums")
                peers.compare("a round through the broker", source, ours, LIMIT_S)
            finally:
                worker.terminate()
                worker.join(LIMIT_S)


def pull(url: str, sizes: dict[str, int], told: Connection) -> None:
    """A process: a worker that takes every version, until it is asked what it has."""
    target = {name: torch.zeros(size) for name, size in sizes.items()}
    with WorkerAgent(CHANNEL, endpoint=url) as worker:
        worker.attach(target)
        while not told.poll():
            worker.step(timeout=0.1)
        told.send(peers.sums(target))
