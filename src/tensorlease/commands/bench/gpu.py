"""The command `tensorlease bench gpu`."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection

import click
import torch

from tensorlease.agents import RingOptions, TrainerAgent, WorkerAgent

from .report import Goal, Report, finish, new_report, options
from .service import broker_words, serving

LIMIT, LIMIT_MS = 1.15, 0.5
"""Times the floor, and milliseconds beside that."""
LIMIT_RING = 2.5
PART_BYTES = 4 * 2**30
"""Copied at once where the memory is too small for all of it twice."""
SUM_ELEMENTS = 2**24
"""Of a tensor, summed up at once."""
MOST_RING = 40 * 10**9
"""Bytes of a model that is sent through rings, too."""
LIMIT_S = 300.0
CHANNEL = "bench"
SHAPES = ("opt-125m", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b")

Shapes = Mapping[str, tuple[int, ...]]


@click.command()
@click.option(
    "--model",
    "models",
    type=click.Choice(SHAPES),
    multiple=True,
    default=SHAPES[:3],
    show_default=True,
    help="Whose shapes; may be given again.",
)
@click.option("--rounds", type=click.IntRange(min=3), default=15, show_default=True)
@click.option("--ring-mib", type=click.IntRange(min=4), default=1024, show_default=True)
@options
def gpu(models: tuple[str, ...], rounds: int, ring_mib: int, as_json: bool, check: bool) -> int:
    """Measure rounds on one GPU, to a worker in a process of its own, against one copy of the bytes.

    Registered tensors, and rings of 1, 2, 4 and 8 slots that have --ring-mib together; from publish
    to the result, the commit and the release included. Random bytes in bfloat16; what the worker
    holds is compared with what was sent. All take turns.
    """
    if not torch.cuda.is_available():
        raise click.UsageError(
            "this needs a GPU that torch sees: torch.cuda.is_available() is false"
        )
    words = " ".join(f"--model {model}" for model in models)
    report = new_report(f"tensorlease bench gpu {words} --rounds {rounds} --ring-mib {ring_mib}")
    for model in models:
        measure(report, model, rounds, ring_mib * 2**20)
    report.notes.append(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    )
    return finish(report, as_json=as_json, check=check)


def measure(report: Report, model: str, rounds: int, ring_bytes: int) -> None:
    """Adds the rows of one model."""
    shapes = shapes_of(model)
    source = {name: random(shape) for name, shape in shapes.items()}
    total = sum(tensor.nbytes for tensor in source.values())
    report.notes.append(f"{model}: {len(shapes)} tensors, {total / 1e9:.2f} GB")
    copy = floor(total)
    at_once, ours = f"{model}: one copy", f"{model}: registered"
    took: dict[str, list[float]] = {at_once: []}

    def take_turns(name: str, way: Callable[[], object]) -> None:
        for each, times in turns({at_once: copy, name: way}, rounds).items():
            took.setdefault(each, []).extend(times)

    with broker() as url, pulling(url, shapes) as worker:
        with publishing(url, source) as publish:
            take_turns(ours, publish)
        for slots in () if total > MOST_RING else (1, 2, 4, 8):
            ring = RingOptions(slots, ring_bytes // slots // 4096 * 4096, device="cuda:0")
            with streaming(url, source, ring) as publish:
                take_turns(f"{model}: ring of {slots}", publish)
        compare(model, source, worker)
    medians = {
        name: report.add(name, "ms", [taken * 1e3 for taken in times])
        for name, times in took.items()
    }
    for name in medians:
        if name != at_once:
            ratios = [taken * 1e3 / medians[at_once] for taken in took[name]]
            report.add(name, "times one copy", ratios)
    goal = LIMIT * medians[at_once] + LIMIT_MS
    report.goals.append(Goal(ours, "median in ms, 1.15 x one copy + 0.5", medians[ours], goal))
    if model == "qwen3-8b":
        four, one = f"{model}: ring of 4", f"{model}: ring of 1"
        value = medians[four] / medians[at_once]
        report.goals.append(Goal(four, "times one copy", value, LIMIT_RING))
        value = medians[one] / medians[four]
        report.goals.append(Goal(four, "times as fast as one slot", value, 1.3, at_least=True))


def shapes_of(model: str) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of a model's tensors."""
    if model == "opt-125m":
        return opt(768, 12, 3072, 50272, 2050)
    if model == "qwen3-0.6b":
        return qwen3(1024, 28, 3072, 151936, 16, 8, tied=True)
    if model == "qwen3-8b":
        return qwen3(4096, 36, 12288, 151936, 32, 8)
    return qwen3(2048, 48, 768, 151936, 32, 4, experts=128)


def opt(
    width: int, layers: int, inner: int, vocabulary: int, positions: int
) -> dict[str, tuple[int, ...]]:
    """OPT: its published configuration."""
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocabulary, width),
        "embed_positions.weight": (positions, width),
        "final_layer_norm.weight": (width,),
        "final_layer_norm.bias": (width,),
    }
    for layer in range(layers):
        at = f"layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found[f"{at}.self_attn.{part}.weight"] = (width, width)
            found[f"{at}.self_attn.{part}.bias"] = (width,)
        for part, shape in (("fc1", (inner, width)), ("fc2", (width, inner))):
            found[f"{at}.{part}.weight"] = shape
            found[f"{at}.{part}.bias"] = shape[:1]
        for part in ("self_attn_layer_norm", "final_layer_norm"):
            found[f"{at}.{part}.weight"] = (width,)
            found[f"{at}.{part}.bias"] = (width,)
    return found


def qwen3(
    width: int,
    layers: int,
    inner: int,
    vocabulary: int,
    heads: int,
    groups: int,
    *,
    tied: bool = False,
    experts: int = 0,
) -> dict[str, tuple[int, ...]]:
    """Qwen3: its published configurations; heads are 128 wide."""
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocabulary, width),
        "norm.weight": (width,),
    }
    if not tied:
        found["lm_head.weight"] = (vocabulary, width)
    for layer in range(layers):
        at = f"layers.{layer}"
        for part, rows in (("q_proj", heads), ("k_proj", groups), ("v_proj", groups)):
            found[f"{at}.self_attn.{part}.weight"] = (rows * 128, width)
        found[f"{at}.self_attn.o_proj.weight"] = (width, heads * 128)
        for part in ("q_norm", "k_norm"):
            found[f"{at}.self_attn.{part}.weight"] = (128,)
        for part in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{part}.weight"] = (width,)
        if experts:
            found[f"{at}.mlp.gate.weight"] = (experts, width)
        for expert in range(max(1, experts)):
            where = f"{at}.mlp.experts.{expert}" if experts else f"{at}.mlp"
            found[f"{where}.gate_proj.weight"] = (inner, width)
            found[f"{where}.up_proj.weight"] = (inner, width)
            found[f"{where}.down_proj.weight"] = (width, inner)
    return found


def random(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def floor(total: int) -> Callable[[], object]:
    """One device-to-device copy of so many bytes."""
    source = torch.ones(min(total, PART_BYTES), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)

    def copy() -> None:
        for begin in range(0, total, PART_BYTES):
            count = min(PART_BYTES, total - begin)
            target[:count].copy_(source[:count])
        torch.cuda.synchronize()

    return copy


def turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """How long each takes, in seconds; they take turns, after three of each that do not count."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-3, rounds):
        for name in sorted(ways, reverse=bool(turn % 2)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            ways[name]()
            if turn >= 0:
                took[name].append(time.perf_counter() - start)
    return took


@contextlib.contextmanager
def broker() -> Iterator[str]:
    """A broker in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        url = f"ipc://{directory}/broker.sock"
        with serving(url, broker_words(url, 2)):
            yield url


_versions = itertools.count(1)


@contextlib.contextmanager
def publishing(url: str, source: Mapping[str, torch.Tensor]) -> Iterator[Callable[[], object]]:
    """A trainer whose tensors are registered."""
    with TrainerAgent(CHANNEL, endpoint=url) as trainer:
        trainer.register(source)
        trainer.wait_ready(1, timeout=LIMIT_S)
        yield lambda: trainer.publish(next(_versions), timeout=LIMIT_S).raise_for_status()


@contextlib.contextmanager
def streaming(
    url: str, source: Mapping[str, torch.Tensor], ring: RingOptions
) -> Iterator[Callable[[], object]]:
    """A trainer that sends everything through its ring."""
    with TrainerAgent(CHANNEL, endpoint=url, ring=ring) as trainer:
        trainer.wait_ready(1, timeout=LIMIT_S)

        def publish() -> None:
            trainer.publish_stream(next(_versions), source, timeout=LIMIT_S).raise_for_status()

        yield publish


@contextlib.contextmanager
def pulling(url: str, shapes: Shapes) -> Iterator[Connection]:
    """A worker in a process of its own; told "sums", it says what it holds."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=pull, args=(url, dict(shapes), theirs), daemon=True)
    worker.start()
    try:
        yield ours
    finally:
        worker.terminate()
        worker.join(LIMIT_S)


def pull(url: str, shapes: Shapes, told: Connection) -> None:
    """A process: a worker that takes every version, until it is asked what it has."""
    target = {
        name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        for name, shape in shapes.items()
    }
    with WorkerAgent(CHANNEL, endpoint=url) as worker:
        worker.attach(target)
        while not told.poll():
            worker.step(timeout=0.1)
        told.send(sums(target))


def compare(model: str, source: Mapping[str, torch.Tensor], worker: Connection) -> None:
    """Raises `click.ClickException` unless the worker holds what was sent."""
    worker.send("sums")
    if not worker.poll(LIMIT_S):
        raise click.ClickException(f"{model}: the worker does not answer")
    if worker.recv() != sums(source):
        raise click.ClickException(f"{model}: the worker holds other values than were sent")


def sums(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Of each tensor's bits, weighed by their places."""
    found: list[int] = []
    for tensor in tensors.values():
        every, total = tensor.view(-1).view(torch.int16), 0
        for begin in range(0, every.numel(), SUM_ELEMENTS):
            bits = every[begin : begin + SUM_ELEMENTS].long()
            weights = torch.arange(1, bits.numel() + 1, device=bits.device)
            total += (begin + 1) * int((bits * weights).sum())
        found.append(total)
    return found
