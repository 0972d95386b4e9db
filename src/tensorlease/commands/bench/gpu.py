"""The command `tensorlease bench gpu`."""

from __future__ import annotations

import contextlib
import gc
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import click
import torch

from . import peers
from .gpu_rows import COPY, Measured, add_goals, add_rows
from .gpu_shapes import MODELS, Shapes, shapes_of
from .gpu_ways import KINDS, Running, Way, ways
from .gpu_workers import DTYPE, Place, placed, sums
from .peers import synchronize
from .report import MISSED, Report, finish, new_report, options

PART_BYTES = 4 * 2**30
"""Copied at once where the memory is too small for all of it twice."""
MOST_STAGED = 40 * 10**9
"""Bytes of a model for which all ways are measured; a larger one is only registered."""
WARMING = 3
"""Rounds of a turn that do not count."""


class Settings(NamedTuple):
    """How it is measured."""

    rounds: int
    """Of each way, in all turns together."""
    turns: int
    workers: int
    device: torch.device

    @property
    def in_a_turn(self) -> int:
        """Rounds of each turn."""
        return -(-self.rounds // self.turns)


@click.command()
@click.option(
    "--model",
    "models",
    type=click.Choice(MODELS),
    multiple=True,
    default=MODELS[:3],
    show_default=True,
    help="Whose shapes; may be given again.",
)
@click.option("--rounds", type=click.IntRange(min=3), default=15, show_default=True)
@click.option(
    "--turns",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="How often each way is set up; the rounds are shared among them.",
)
@click.option(
    "--ring-mib",
    type=click.IntRange(min=4),
    multiple=True,
    default=(256, 1024),
    show_default=True,
    help="Of all slots of a ring together, and of a peer's buffers; may be given again.",
)
@click.option(
    "--buffer-mib",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Of the buffer in lock step; measured with four times as much, too.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    help="All on the one GPU; with 2 only the peers are goals.",
)
@click.option("--only", type=click.Choice(KINDS), multiple=True, help="May be given again.")
@options
def gpu(
    models: tuple[str, ...],
    rounds: int,
    turns: int,
    ring_mib: tuple[int, ...],
    buffer_mib: int,
    workers: int,
    only: tuple[str, ...],
    as_json: bool,
    check: bool,
) -> int:
    """Measure rounds on one GPU, to workers in processes of their own, against one copy of the bytes.

    Registered tensors, and rings of 1, 2, 4 and 8 slots that have --ring-mib together; from publish
    to the result, the commit and the release included. Beside them what is done without a broker:
    one pickled handle in lock step over REQ/REP, pickled handles of all tensors over HTTP, and the
    transfers of verl, sglang and checkpoint-engine, if they are installed. Random bytes in bfloat16;
    what the workers hold is compared with what was sent after each turn. All take turns, each round
    of a way with one copy.
    """
    if not torch.cuda.is_available():
        raise click.UsageError(
            "this needs a GPU that torch sees: torch.cuda.is_available() is false"
        )
    device = torch.device("cuda", 0)
    words = [f"--model {model}" for model in models]
    words += [f"--rounds {rounds} --turns {turns}", *(f"--ring-mib {mib}" for mib in ring_mib)]
    words += [f"--buffer-mib {buffer_mib} --workers {workers}", *(f"--only {k}" for k in only)]
    report = new_report(f"tensorlease bench gpu {' '.join(words)}")
    settings = Settings(rounds, turns, workers, device)
    whole = True
    for model in models:
        shapes = shapes_of(model)
        if (lacks := lacking(shapes, settings)) > 0:
            report.notes.append(f"{model}: not measured, {lacks / 1e9:.1f} GB do not fit")
            whole = False
            continue
        chosen = ways(ring_mib, buffer_mib, only, device)
        whole &= measure(report, model, shapes, chosen, settings)
        tidy(device)
    report.notes.append(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    )
    add_peers(report, only)
    return finish(report, as_json=as_json, check=check) or (0 if whole else MISSED)


def lacking(shapes: Shapes, settings: Settings) -> int:
    """Bytes of the device's memory that all sets of the tensors, and the floor, need beyond it."""
    total = sum(math.prod(shape) for shape in shapes.values()) * DTYPE.itemsize
    needed = total * (1 + settings.workers) + 2 * min(total, PART_BYTES)
    return needed - torch.cuda.get_device_properties(settings.device).total_memory


def add_peers(report: Report, only: Sequence[str]) -> None:
    """Notes which peers are there, and which are not, of those that were asked for."""
    asked = [name for name in peers.NAMES if not only or name in only]
    there = [peers.version_of(name) for name in asked if peers.path_of(name) is not None]
    missing = [name for name in asked if peers.path_of(name) is None]
    if there:
        report.notes.append(f"the others: {', '.join(there)}")
    if missing:
        report.notes.append(f"not installed, and not compared with: {', '.join(missing)}")


def measure(
    report: Report, model: str, shapes: Shapes, chosen: Sequence[Way], settings: Settings
) -> bool:
    """Adds a table for one model; returns whether every way of ours has worked.

    A way that fails is noted, and not tried again; the others go on with a new broker and new
    workers.
    """
    device = settings.device
    source = {name: random(shape, device) for name, shape in shapes.items()}
    total = sum(tensor.nbytes for tensor in source.values())
    if total > MOST_STAGED:
        chosen = [way for way in chosen if way.kind == "registered"]
    copy, sent = floor(total, device), sums(source)
    measured = Measured({COPY: [], **{way.name: [] for way in chosen}}, {})
    with contextlib.ExitStack() as stack:
        place: Place | None = None
        for turn in range(settings.turns):
            for way in reversed(chosen) if turn % 2 else chosen:
                if way.name in measured.failed:
                    continue
                if place is None:
                    place = stack.enter_context(placed(shapes, settings.workers, device))
                try:
                    place.clear()
                    with way.begin(place, source) as running:
                        copying, taken = take_turns(copy, running, settings.in_a_turn, device)
                    place.compare(sent)
                except Exception as error:  # noqa: BLE001 - noted; the other ways go on
                    measured.failed[way.name] = why(model, way, error, place)
                    place = None
                    stack.close()
                else:
                    measured.took[COPY] += copying
                    measured.took[way.name] += taken
                tidy(device)
    many = f", {settings.workers} workers" if settings.workers > 1 else ""
    table = f"{model}: {len(shapes)} tensors, {total / 1e9:.2f} GB{many}"
    medians = add_rows(report, model, table, measured)
    add_goals(report, model, medians, chosen, settings.workers)
    return not any(way.ours and way.name in measured.failed for way in chosen)


def why(model: str, way: Way, error: BaseException, place: Place) -> str:
    """The last line of what failed, for a note; says all of it on stderr."""
    words = ["".join(traceback.format_exception(error)), *(w.complaint() for w in place.workers)]
    click.echo(f"{model}: {way.name} failed:", err=True)
    for each in filter(None, words):
        click.echo(each, err=True)
    lines = [each.strip().splitlines()[-1] for each in words if each.strip()]
    return "; ".join(lines)


def tidy(device: torch.device) -> None:
    """Gives memory back that other ways may need."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def random(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=DTYPE, device=device).normal_()


def floor(total: int, device: torch.device) -> Callable[[], object]:
    """One copy of so many bytes within the device."""
    source = torch.ones(min(total, PART_BYTES), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def copy() -> None:
        for begin in range(0, total, PART_BYTES):
            count = min(PART_BYTES, total - begin)
            target[:count].copy_(source[:count])
        synchronize(device)

    return copy


def take_turns(
    copy: Callable[[], object], running: Running, rounds: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """How long one copy takes, and one round, in seconds; they take turns after some warming up."""
    took: Mapping[bool, list[float]] = {False: [], True: []}
    for turn in range(-WARMING, rounds):
        for way in (False, True) if turn % 2 else (True, False):
            synchronize(device)
            start = time.perf_counter()
            if way:
                running.round()
            else:
                copy()
            if turn >= 0:
                took[way].append(time.perf_counter() - start)
            if way:
                running.settle()
    return took[False], took[True]
