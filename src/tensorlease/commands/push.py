"""The command `tensorlease push`: a directory of safetensors files becomes a version."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from tensorlease.agents.results import ReceiverOutcome, RoundResult, UnreleasedError
from tensorlease.agents.ring import RingOptions
from tensorlease.protocol.errors import DeadlineError
from tensorlease.protocol.limits import MAX_VERSION
from tensorlease.protocol.records import Distribution, Fate, Outcome

from .checkpoint import Checkpoint, read_checkpoint
from .meter import Meter
from .orderly import run_orderly
from .query import find

if TYPE_CHECKING:
    from tensorlease.agents import TrainerAgent

SLOTS = 4
LEAST_RING, MOST_RING = 16 * 2**20, 256 * 2**20
"""Bytes of all slots, if nothing is said: a sixteenth of the model, between these."""
CLOSE_S = 10.0
"""Longest goodbye."""
DTYPES = ("bfloat16", "float16", "float32", "float64")


class ReplicaReport(Struct):
    """What became of a replica, in the output of `--json`."""

    fate: Fate
    version: int
    """That it is at; 0: none."""
    reason: str


class PushReport(Struct):
    """The output of `--json`."""

    version: int
    outcome: Outcome
    reason: str
    tensors: int
    nbytes: int
    seconds: float
    """From the opening of the round to its end."""
    replicas: dict[str, ReplicaReport]
    receivers: list[ReceiverOutcome]


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--channel", default="default", show_default=True, help="The stream of versions.")
@click.option(
    "--version",
    type=click.IntRange(1, MAX_VERSION),
    help="The version that it becomes.  [default: the channel's last and 1]",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 2**31 - 1),
    default=1,
    show_default=True,
    help="How many replicas to wait for; with fewer it fails.",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Convert floats of two bytes and more.")
@click.option(
    "--ring-mib",
    type=click.IntRange(1, 2**20),
    help="MiB of shared memory that it goes through.  [default: a 16th of the model, 16 to 256]",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="Where that memory is: cpu, or a GPU (cuda:0) whose workers then copy from it.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.0, 86_400.0),
    default=120.0,
    show_default=True,
    help="Seconds of each wait: for replicas, for a slot, for the end.",
)
@click.option("--endpoint", default="", metavar="ADDRESS", help="The broker's address.")
@click.option("--job", default="", help="The job whose broker is meant.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def push(
    directory: Path,
    channel: str,
    version: int | None,
    replicas: int,
    dtype: str | None,
    ring_mib: int | None,
    device: str,
    timeout_s: float,
    endpoint: str,
    job: str,
    as_json: bool,
) -> None:
    """Make a version of the *.safetensors files in DIRECTORY, and say who took it.

    All files are checked before anything is published. What belongs to the model is said by
    model.safetensors.index.json, if it is there; else all files do. Ends with 0 only if every
    replica that the round was for is at the version; interrupted, no replica is.
    """
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    console = Console(stderr=True)

    def make() -> tuple[Checkpoint, TrainerAgent]:
        from tensorlease.agents import TrainerAgent

        _require(device)
        checkpoint = read_checkpoint(directory)
        for note in checkpoint.notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        # Assembled: workers on every device get it, and large tensors can be sent in pieces.
        return checkpoint, TrainerAgent(
            channel,
            rank=0,
            world_size=1,
            group="",
            endpoint=find(endpoint, job).url,
            distribution=Distribution.ASSEMBLED,
            ring=_ring(checkpoint, ring_mib, device),
        )

    def work(made: tuple[Checkpoint, TrainerAgent]) -> None:
        checkpoint, trainer = made
        with ExitStack() as stack:
            # The goodbye takes no longer than anything else: the broker may be stopped.
            stack.callback(trainer.close, min(CLOSE_S, timeout_s))
            _wait(trainer, replicas, timeout_s, console)
            number = version or trainer.last_version + 1
            try:
                result = send(checkpoint, trainer, number, replicas, dtype, timeout_s, console)
            except UnreleasedError as error:
                _show(checkpoint, error.result, as_json)
                raise
            _show(checkpoint, result, as_json)
            result.raise_for_status()

    run_orderly(make, work, lambda made: made[1].close(0.0))


def send(
    checkpoint: Checkpoint,
    trainer: TrainerAgent,
    version: int,
    replicas: int,
    dtype: str | None,
    timeout_s: float,
    console: Console,
) -> RoundResult:
    """Sends all tensors through the trainer's ring, as one version; returns what became of it.

    Raises:
        CheckpointError: A file has changed meanwhile; the round is void.
        TensorleaseError: See `TrainerAgent.open_round`.
    """
    import torch

    kind = None if dtype is None else getattr(torch, dtype)
    most = trainer.ring.slot_bytes
    what = f"version {version} of {trainer.channel}"
    with (
        trainer.open_round(version, timeout=timeout_s, dtype=kind, min_replicas=replicas) as r,
        Meter(what, checkpoint.nbytes, console) as meter,
    ):
        for part in checkpoint.parts(most):
            r.send(part.stored.name, part.tensor, region=part.region)
            meter.advance(part.tensor.nbytes)
            if r.ended:
                break
    assert r.result is not None
    return r.result


def _wait(trainer: TrainerAgent, replicas: int, timeout_s: float, console: Console) -> None:
    who = "a replica" if replicas == 1 else f"{replicas} replicas"
    with console.status(Text(f"waits for {who} of {trainer.channel}")):
        try:
            trainer.wait_ready(replicas, timeout_s)
        except DeadlineError as error:
            if trainer.replicas or not trainer.connected:
                raise
            raise DeadlineError(
                f"{error}: start one in this channel; of an engine's server `tensorlease bridge` is"
                " one, whose log says whether it waits for the server"
            ) from None


def _require(device: str) -> None:
    """Refuses a device that is no place for a ring, or that torch does not see."""
    import torch

    ordinal = RingOptions(device=device).ordinal
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if ordinal is not None and ordinal >= count:
        raise click.UsageError(f"--device {device}: torch sees {count} GPUs here")


def _ring(checkpoint: Checkpoint, mib: int | None, device: str) -> RingOptions:
    chosen = min(max(checkpoint.nbytes // 16, LEAST_RING), MOST_RING)
    nbytes = chosen if mib is None else mib * 2**20
    # Whole pages, so that a slot has room for what is aligned.
    return RingOptions(SLOTS, nbytes // SLOTS // 4096 * 4096, device=device)


def _show(checkpoint: Checkpoint, result: RoundResult, as_json: bool) -> None:
    if not as_json:
        click.echo(result)
        return
    report = PushReport(
        result.version,
        result.outcome,
        result.reason,
        len(checkpoint.tensors),
        result.nbytes,
        result.seconds,
        {
            name: ReplicaReport(replica.fate, replica.current, replica.reason)
            for name, replica in result.replicas.items()
        },
        list(result.receivers.values()),
    )
    click.echo(msgspec.json.encode(report))
