"""Walks through every state of a list of small worlds, two at a time (`make explore`).

    python tests/explore/run.py [NAME ...]      only the worlds whose name contains one of these

Prints a line for each world; a world in which a promise breaks prints the way there, and the whole
run ends with 1. `replay.py` tells the story of a way.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "explore"

from .parts import Shape
from .search import Tally, search

PROCESSES = 2

WORLDS = [
    # The longest first, so that both processes end at about the same time.
    Shape("broker and worker die", broker_deaths=1, worker_deaths=1),
    Shape("broker and worker die, one replica", together=True, broker_deaths=1, worker_deaths=1),
    Shape("broker dies, expulsion", broker_deaths=1, expulsions=1),
    Shape("broker dies, expulsion, one replica", together=True, broker_deaths=1, expulsions=1),
    Shape("broker dies, void", broker_deaths=1, voids=1),
    Shape("broker dies, void, one replica", together=True, broker_deaths=1, voids=1),
    Shape("broker and trainer die", broker_deaths=1, trainer_deaths=1),
    Shape("broker and trainer die, one replica", together=True, broker_deaths=1, trainer_deaths=1),
    Shape(
        "relay and broker die, heir",
        workers=1,
        relays="unnamed",
        broker_deaths=1,
        worker_deaths=1,
        worker_heirs=1,
    ),
    Shape(
        "relay and broker die, expulsion",
        workers=1,
        relays="named",
        broker_deaths=1,
        worker_deaths=1,
        expulsions=1,
    ),
    Shape("2 trainers, broker dies", trainers=2, workers=1, broker_deaths=1),
    Shape("2 batches", batches=2),
    Shape("2 batches, one replica", batches=2, together=True),
    Shape("2 trainers", trainers=2),
    Shape("2 trainers, one replica", trainers=2, together=True),
    Shape("2 batches, ring", batches=2, registered=False),
    Shape("worker dies", batches=2, worker_deaths=1),
    Shape("worker dies, one replica", batches=2, together=True, worker_deaths=1),
    Shape("trainer dies", trainers=2, trainer_deaths=1),
    Shape("expulsion", batches=2, expulsions=1),
    Shape("void", trainers=2, voids=1),
    Shape("hook fails, one replica", together=True, hook_failures=1),
    Shape("hook fails, broker dies, one replica", together=True, hook_failures=1, broker_deaths=1),
    Shape("misread", batches=2, misreads=1),
    Shape("misread, one replica", together=True, misreads=1),
    Shape("misread, broker dies", misreads=1, broker_deaths=1),
    Shape("misread, broker dies, one replica", together=True, misreads=1, broker_deaths=1),
    Shape("misread, ring, session drops", workers=1, registered=False, misreads=1, drops=1),
    Shape("strict, worker dies, retry", strict=True, worker_deaths=1, retries=1),
    Shape("broker dies", broker_deaths=1),
    Shape("broker dies, ring", workers=1, registered=False, broker_deaths=1),
    Shape("2 rounds, broker dies", workers=1, rounds=2, broker_deaths=1),
    Shape("relay and broker die", workers=1, relays="named", broker_deaths=1, worker_deaths=1),
    Shape("relay and trainer die", workers=1, relays="named", trainer_deaths=1, worker_deaths=1),
    Shape("relay dies, one replica", together=True, relays="named", worker_deaths=1),
    Shape("relay dies, expulsion", relays="named", worker_deaths=1, expulsions=1, victim=0),
    Shape(
        "relay dies, heir, 2 rounds",
        workers=1,
        relays="named",
        worker_deaths=1,
        worker_heirs=1,
        rounds=2,
        retries=1,
    ),
    Shape(
        "relay dies, heir, session drops",
        workers=1,
        relays="unnamed",
        worker_deaths=1,
        worker_heirs=1,
        drops=1,
    ),
    Shape("session drops, late messages", workers=1, drops=1, late=True),
]


@dataclass(frozen=True)
class Report:
    """What became of one world."""

    name: str
    tally: Tally
    seconds: float
    # The promise that broke, and the way there; empty: none.
    violation: str = ""

    def __str__(self) -> str:
        broken = 1 if self.violation else 0
        rest = "" if self.tally.exhausted or broken else " (not all)"
        return (
            f"{self.name:38} {self.tally.states:9,} states {self.tally.transitions:10,} transitions"
            f" {self.seconds:6.1f} s  {broken} violations{rest}"
        )


def walk(shape: Shape) -> Report:
    """Visits every state of one world."""
    start = time.monotonic()
    tally = Tally()
    try:
        for now, _ in search(shape):
            tally = now
    except Exception as error:  # noqa: BLE001
        notes = "\n  ".join(getattr(error, "__notes__", []))
        text = f"{type(error).__name__}: {error}\n  {notes}"
        return Report(shape.name, tally, time.monotonic() - start, text)
    return Report(shape.name, tally, time.monotonic() - start)


def main() -> int:
    wanted = sys.argv[1:]
    worlds = [w for w in WORLDS if not wanted or any(part in w.name for part in wanted)]
    start = time.monotonic()
    reports: list[Report] = []
    # So that nobody goes on alone.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with multiprocessing.get_context("spawn").Pool(PROCESSES, maxtasksperchild=1) as pool:
        for report in pool.imap_unordered(walk, worlds, chunksize=1):
            print(report, flush=True)
            if report.violation:
                print(f"  {report.violation}", flush=True)
            reports.append(report)
    states = sum(report.tally.states for report in reports)
    transitions = sum(report.tally.transitions for report in reports)
    broken = sum(bool(report.violation) for report in reports)
    print(
        f"{len(reports)} worlds, {states:,} states, {transitions:,} transitions,"
        f" {time.monotonic() - start:.0f} s: {broken} violations"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
