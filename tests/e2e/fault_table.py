"""Kills and stops each party at every place, for real, and prints docs/faults.md.

python -m tests.e2e.fault_table > docs/faults.md
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tensorlease.agents.results import RoundResult

from . import test_kill_broker as broker
from . import test_kill_trainer as trainer
from . import test_kill_worker as worker
from . import test_ring_faults as ring
from . import test_stop_worker as stopped
from .parties import World, making_world

TEXTS = Path(__file__).with_name("faults.txt")
COMMAND = "python -m tests.e2e.fault_table > docs/faults.md"

Row = tuple[str, ...]


def table(head: Row, rows: Iterable[Row]) -> str:
    """A table in Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def place_words(name: str) -> str:
    """`sent:Staged:1` in words."""
    what, message, _ = name.split(":")
    words = {
        "sending": f"before it sends `{message}`",
        "sent": f"after it sent `{message}`",
        "received": f"after it handled `{message}`",
        "in": f"in its {message} hook" if message != "copy" else "before it copies a batch",
    }
    return words[what]


def broker_rows(world: World) -> list[Row]:
    every = broker.every
    done = broker.kill_at(world, every(broker.STEADY), every(broker.SLOW), every(broker.RESTART))
    rows: list[Row] = []
    for text, seconds in done:
        name, _, how = text.partition(", ")
        number = name.rpartition(":")[2]
        place = f"{place_words(name)}, number {number}" + (f"; {how}" if how else "")
        rows.append((place, "committed by all, no agent restarted", f"{seconds:.2f}"))
    return rows


def worker_rows(world: World) -> list[Row]:
    rows: list[Row] = []

    def note(place: worker.Place, result: RoundResult, seconds: float) -> None:
        late = "; the batch is late" if place.late else ""
        dead = result.receivers["a/0"]
        why = "its process ended" if "its process ended" in dead.reason else "-"
        rows.append(
            (
                place_words(place.name) + late,
                result.outcome.value,
                result.replicas["a"].fate.value,
                dead.fate.value,
                why,
                f"{seconds:.3f}",
            )
        )

    worker.kill_at(world, worker.PLACES, note)
    return rows


def trainer_rows(world: World) -> list[Row]:
    rows: list[Row] = []

    def note(place: trainer.Place, result: RoundResult, seconds: float) -> None:
        busy = f"; a worker is held: {place_words(place.busy)}" if place.busy else ""
        fates = sorted({r.fate.value for r in result.receivers.values()})
        rows.append(
            (
                place_words(place.name) + busy,
                result.outcome.value,
                ", ".join(fates) or "none was prepared",
                f"{seconds:.3f}",
            )
        )

    trainer.kill_at(world, trainer.PLACES, note)
    return rows


def stopped_rows(world: World) -> list[Row]:
    rows: list[Row] = []

    def note(place: stopped.Place, result: RoundResult, seconds: float) -> None:
        rows.append(
            (
                place_words(place.name) if place.name else "before the round",
                result.outcome.value,
                result.receivers["a/0"].fate.value,
                result.receivers["a/0"].reason,
                f"{seconds:.2f}",
            )
        )

    stopped.stop_at(world, stopped.PLACES, note)
    return rows


HOW = {"kill": "is killed", "stop": "is stopped", "raise": "raises"}


def ring_place(fault: ring.Fault) -> str:
    """Where a worker meets with a fault, in words."""
    if not fault.place:
        return "before the round"
    words = place_words(fault.place)
    number = fault.place.rpartition(":")[2]
    words += "" if number == "1" else f", {'the last' if number == 'last' else f'number {number}'}"
    words += f", when its {fault.after} has raised" if fault.after else ""
    return words + ("; the other is held before it copies its last" if fault.busy else "")


def ring_worker_rows(world: World) -> list[Row]:
    rows: list[Row] = []

    def note(fault: ring.Fault, result: RoundResult, seconds: float) -> None:
        receiver = result.receivers["a/0"]
        rows.append(
            (
                HOW[fault.how],
                ring_place(fault),
                result.outcome.value,
                receiver.fate.value,
                re.sub(r" \(pid \d+\)", "", receiver.reason) or "-",
                "kept until it goes on" if fault.stuck else "back at once",
                f"{seconds:.3f}",
            )
        )

    ring.worker_faults(world, ring.EVERY_FAULT, note)
    return rows


def ring_trainer_rows(world: World) -> list[Row]:
    rows: list[Row] = []

    def held(busy: str) -> str:
        return f"; the worker is held: {place_words(busy)}" if busy else ""

    def row(place: str, result: RoundResult, seconds: float) -> None:
        reason = re.sub(r" \(pid \d+\)", "", result.reason) or "-"
        rows.append((place, result.outcome.value, reason, f"{seconds:.3f}"))

    def died(death: ring.Death, result: RoundResult, seconds: float) -> None:
        number = death.place.rpartition(":")[2]
        which = (
            "" if number == "1" else f", {'the last' if number == 'last' else f'number {number}'}"
        )
        row(f"is killed {place_words(death.place)}{which}{held(death.busy)}", result, seconds)

    def left(leaving: ring.Leaving, result: RoundResult, seconds: float) -> None:
        count = leaving.count
        sent = f"after {count} of {ring.OF_RANK_1} tensors" if count else "before it sends anything"
        row(f"leaves its block {sent}{held(leaving.busy)}", result, seconds)

    ring.trainer_deaths(world, ring.DEATHS, died)
    with making_world() as another:
        ring.trainer_leavings(another, ring.LEAVINGS, left)
    return rows


def in_a_world(make: Callable[[World], list[Row]]) -> list[Row]:
    with making_world() as world:
        rows = make(world)
    sys.stderr.write(f"{make.__name__}: {len(rows)}\n")
    return rows


def document() -> str:
    """The whole document."""
    release = ".".join(platform.release().split(".")[:2])  # Not whose build it is.
    machine = f"{os.cpu_count()} cores, Linux {release}, Python {platform.python_version()}"
    return TEXTS.read_text().format(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=COMMAND,
        machine=machine,
        broker=table(
            ("the broker dies", "the round", "seconds to its end"), in_a_world(broker_rows)
        ),
        worker=table(
            (
                "the worker dies",
                "the round",
                "its replica",
                "itself",
                "cause",
                "seconds to the end",
            ),
            in_a_world(worker_rows),
        ),
        trainer=table(
            ("rank 1 dies", "the round", "the receivers", "seconds until rank 0 hears"),
            in_a_world(trainer_rows),
        ),
        stopped=table(
            ("the worker stops", "the round", "itself", "reason", "seconds to the end"),
            in_a_world(stopped_rows),
        ),
        ring_worker=table(
            (
                "the worker",
                "where",
                "the round",
                "itself",
                "reason",
                "its slot",
                "seconds to the end",
            ),
            in_a_world(ring_worker_rows),
        ),
        ring_trainer=table(
            ("rank 1", "the round", "reason", "seconds until rank 0 hears"),
            in_a_world(ring_trainer_rows),
        ),
    )


if __name__ == "__main__":
    sys.stdout.write(document())
