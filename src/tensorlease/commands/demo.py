"""The command `tensorlease demo`: a model is trained in some processes and used in others."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import click
import msgspec
from msgspec import Struct
from rich.console import Console

from tensorlease.broker.sweep import sweep
from tensorlease.demo.display import Display, Row
from tensorlease.demo.processes import DemoError, Processes, living
from tensorlease.demo.reports import (
    REPLICAS,
    TRAINERS,
    Plan,
    Progress,
    Published,
    Round,
    Size,
    Wrote,
)
from tensorlease.demo.text import Vocabulary, corpus, find_pieces, windows
from tensorlease.protocol.endpoint import MAX_IPC_PATH_BYTES
from tensorlease.protocol.segments import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE, parse_name

from .orderly import end_at_sigterm

# Sizes that train for half a minute on two cores.
VERSIONS, STEPS, BATCH, HELD_OUT, LINE = 10, 10, 16, 32, 24
# What `--quick` takes in their place.
QUICK_SIZE = Size(width=64, depth=2, heads=2, context=32, vocabulary=512)
QUICK_VERSIONS, QUICK_STEPS = 3, 20


class VersionReport(Struct):
    """One version in the output of `--json`; losses in nats a byte."""

    version: int
    round: Round | None
    held_out: float
    lines: dict[str, str]
    digests: dict[str, str]
    equal: bool


class DemoReport(Struct):
    """The output of `--json`."""

    ok: bool
    text: str
    """The closing sentence."""
    unigram: float
    """Held-out loss of a model that knows only how frequent each token is, in nats a byte."""
    versions: list[VersionReport]
    pids: dict[str, int]
    leftovers: list[str]
    seconds: float


@click.command()
@click.option(
    "--versions", type=click.IntRange(min=2), help="Versions to hand over; the first is untrained."
)
@click.option("--steps", type=click.IntRange(min=1), help="Gradient steps between two versions.")
@click.option("--seed", default=0, show_default=True, help="Of weights, batches and lines.")
@click.option("--quick", is_flag=True, help="A smaller model and fewer versions: some seconds.")
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    default="cpu",
    show_default=True,
    help="Where the weights are; all processes share one GPU.",
)
@click.option("--by-hand", is_flag=True, hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print only a report, as JSON.")
@click.option("--keep-logs", is_flag=True, help="Keep the directory with the processes' logs.")
def demo(
    versions: int | None,
    steps: int | None,
    seed: int,
    quick: bool,
    device: str,
    by_hand: bool,
    as_json: bool,
    keep_logs: bool,
) -> int:
    """Train a small language model and hand each version of it to workers, which write with it.

    Starts a broker of its own, two trainer processes that own half of the parameters each, and two
    replicas of workers: one process alone, and a tensor-parallel pair. Exits with 0 only if every
    worker ends with exactly the trainers' bytes, and the model has learned something.
    """
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    if device == "cuda" and not _has_gpu():
        raise click.UsageError(
            "--device cuda needs a GPU that torch sees: torch.cuda.is_available() is false"
            " (tensorlease doctor says what is missing)"
        )
    began = time.monotonic()
    end_at_sigterm()
    size = QUICK_SIZE if quick else Size()
    train, held_out = corpus()
    vocabulary = Vocabulary(find_pieces(train, size.vocabulary))
    plan = Plan(
        list(vocabulary.pieces),
        msgspec.structs.replace(size, vocabulary=len(vocabulary)),
        versions or (QUICK_VERSIONS if quick else VERSIONS),
        steps or (QUICK_STEPS if quick else STEPS),
        BATCH,
        HELD_OUT,
        LINE,
        seed,
        device,
        by_hand or device == "cuda",
    )
    exam = windows(vocabulary.encode(held_out), size.context + 1, HELD_OUT)
    unigram = vocabulary.unigram_loss(vocabulary.encode(train), exam)
    rows: list[Row] = []
    processes = None
    interrupted = False
    directory = _directory()
    try:
        plan = msgspec.structs.replace(plan, directory=str(directory))
        title = _title(len(train) + len(held_out), unigram, plan.endpoint)
        processes = Processes(plan)
        with processes, Display(None if as_json else Console(), title) as display:
            processes.start()
            pids = ", ".join(f"{name} {pid}" for name, pid in processes.pids.items())
            display.add_title(f"pids: {pids}")
            follow(processes, plan, rows, display)
    except KeyboardInterrupt:
        interrupted = True
    except DemoError as error:
        hint = f"logs: {directory}" if keep_logs else "--keep-logs keeps the processes' logs"
        raise DemoError(f"{error} ({hint})") from None
    finally:
        started = {} if processes is None else processes.pids
        left = leftovers(started, directory, keep_logs)
    if interrupted:
        what = f"left behind: {', '.join(left)}" if left else "no process, segment or file is left"
        click.echo(f"interrupted; {what}", err=True)
        return 130
    ok, text = verdict(rows, plan, unigram, left, time.monotonic() - began)
    if as_json:
        told = [_report(row) for row in rows]
        seconds = time.monotonic() - began
        whole = DemoReport(ok, text, unigram, told, started, left, seconds)
        click.echo(msgspec.json.encode(whole))
    else:
        click.echo(text)
        if keep_logs:
            click.echo(f"logs: {directory}")
    return 0 if ok else 1


def follow(processes: Processes, plan: Plan, rows: list[Row], display: Display) -> None:
    """Collects what the processes tell into a row for each version, and shows it."""
    status = "starting: the processes import torch"
    display.show(rows, status)
    for name, report in processes.reports():
        if isinstance(report, Progress):
            if name == "trainer 0":
                where = f"step {report.step} of {plan.steps} to version {report.version}"
                status = f"training: {where}, loss {report.loss:.3f}"
        elif isinstance(report, Published | Round | Wrote):
            row = _row(rows, report.version)
            if isinstance(report, Published):
                row.digests[name] = report.digest
            elif isinstance(report, Wrote):
                row.digests[name] = report.digest
                row.wrote[name.removeprefix("worker ")] = report
            elif name == "trainer 0":
                row.round = report
        display.show(rows, status)


def verdict(
    rows: list[Row], plan: Plan, unigram: float, left: list[str], seconds: float
) -> tuple[bool, str]:
    """Returns whether all went well, and the closing sentence."""
    if len(rows) < plan.versions or not all(row.complete for row in rows):
        return False, f"FAILED: only {sum(r.complete for r in rows)} of {plan.versions} versions"
    for row in rows:
        if not row.equal:
            parts = ", ".join(f"{name} {digest[:12]}" for name, digest in row.digests.items())
            return False, f"FAILED: version {row.version} is not the same everywhere: {parts}"
    last = rows[-1]
    if not last.held_out < rows[0].held_out:
        return False, (
            f"FAILED: the held-out loss {last.held_out:.3f} is not below that of the first version,"
            f" {rows[0].held_out:.3f}"
        )
    if plan.learns and not last.held_out < unigram:
        return False, (
            f"FAILED: the held-out loss {last.held_out:.3f} is not below the unigram model's"
            f" {unigram:.3f}"
        )
    if left:
        return False, f"FAILED: left behind: {', '.join(left)}"
    digest = last.digests["trainer 0"]
    workers = sum(REPLICAS.values())
    return True, (
        f"OK: after {len(rows)} versions all {workers} workers hold exactly the trainers' bytes"
        f" (sha256 {digest[:16]}...), compared at every version;\n"
        f"    held-out loss {rows[0].held_out:.3f} -> {last.held_out:.3f} nats/byte, unigram model"
        f" {unigram:.3f}; no process, segment or file is left; {seconds:.0f} s"
    )


def leftovers(pids: dict[str, int], directory: Path, keep_logs: bool) -> list[str]:
    """Removes what killed processes could not, and returns what is still there all the same."""
    sweep()
    if not keep_logs:
        shutil.rmtree(directory, ignore_errors=True)
    left = [f"process {pid}" for pid in living(list(pids.values()))]
    place = Path(os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)
    for name in os.listdir(place) if place.is_dir() else ():
        parsed = parse_name(name)
        if parsed is not None and parsed.pid in pids.values():
            left.append(str(place / name))
    if directory.exists() and not keep_logs:
        left.append(str(directory))
    return left


def _row(rows: list[Row], version: int) -> Row:
    for row in rows:
        if row.version == version:
            return row
    rows.append(Row(version))
    return rows[-1]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _directory() -> Path:
    """Makes a private directory whose path leaves room for a socket in it."""
    prefix = "tensorlease-demo-"
    longest = Path(tempfile.gettempdir()) / f"{prefix}12345678" / "broker.sock"
    roomy = len(os.fsencode(longest)) <= MAX_IPC_PATH_BYTES
    return Path(tempfile.mkdtemp(prefix=prefix, dir=None if roomy else "/tmp"))


def _title(nbytes: int, unigram: float, endpoint: str) -> list[str]:
    replicas = " and ".join(f"{name!r} of {size}" for name, size in REPLICAS.items())
    text = f"{nbytes:,} bytes of Python's documentation"
    return [
        f"{TRAINERS} trainers of one model, replicas {replicas}, {text}",
        f"a unigram model loses {unigram:.3f} nats/byte on the held-out text",
        f"beside it, in another terminal: tensorlease top --endpoint {endpoint}",
    ]


def _report(row: Row) -> VersionReport:
    lines = {name: wrote.line for name, wrote in row.wrote.items()}
    return VersionReport(row.version, row.round, row.held_out, lines, row.digests, row.equal)
