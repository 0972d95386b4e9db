"""What `tensorlease bench gpu` makes of the times that it took: rows, and goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan

from .gpu_ways import MIB, Way
from .report import Goal, Report

COPY = "one copy"
LIMIT, LIMIT_MS = 1.15, 0.5
"""Times the floor, and milliseconds beside that."""
LIMIT_RING = 2.5
"""Times the floor."""
LIMIT_SLOTS = 1.3
"""Times as fast as with one slot."""
LIMIT_PEERS = 3.0
"""Times as fast as the fastest of them."""
RING_MODEL = "qwen3-8b"
"""Whose rings have goals."""


@dataclass
class Measured:
    """Seconds of each round, by the name of the way; and why a way failed."""

    took: dict[str, list[float]]
    failed: dict[str, str]


def add_rows(report: Report, model: str, table: str, measured: Measured) -> dict[str, float]:
    """Adds a table; returns the medians in milliseconds. A way that failed has a note, and no row."""
    medians: dict[str, float] = {}
    for name, times in measured.took.items():
        if name not in measured.failed and times:
            values = [taken * 1e3 for taken in times]
            medians[name] = report.add(name, "ms", values, table)
    for name in medians:
        if name != COPY:
            ratios = [taken * 1e3 / medians[COPY] for taken in measured.took[name]]
            report.add(name, "times one copy", ratios, table)
    for name, why in measured.failed.items():
        report.notes.append(f"{model}: {name} failed, and is not compared with: {why}")
    return medians


def add_goals(
    report: Report, model: str, medians: Mapping[str, float], ways: Sequence[Way], workers: int
) -> None:
    """Holds our ways against one copy, against each other and against the fastest peer.

    With several workers only against the peer. One of ours that has failed reaches no goal.
    """

    def goal(row: str, name: str, value: float, limit: float, *, at_least: bool = False) -> None:
        report.goals.append(Goal(f"{model}: {row}", name, value, limit, at_least))

    copy = medians.get(COPY, nan)
    for way in ways:
        mine = medians.get(way.name, nan)
        if way.kind == "registered":
            if workers == 1:
                goal(
                    way.name,
                    f"median in ms, {LIMIT:g} x one copy + {LIMIT_MS:g}",
                    mine,
                    LIMIT * copy + LIMIT_MS,
                )
            if peer := _fastest(medians, ways):
                value = medians[peer] / mine
                goal(way.name, f"times as fast as {peer}", value, LIMIT_PEERS, at_least=True)
        if way.kind == "ring" and way.slots == 4 and model == RING_MODEL:
            if workers == 1:
                goal(way.name, "times one copy", mine / copy, LIMIT_RING)
                one = f"ring of 1, {way.staging // MIB} MiB"
                value = medians.get(one, nan) / mine
                goal(way.name, "times as fast as one slot", value, LIMIT_SLOTS, at_least=True)
            if peer := _fastest(medians, ways, way.staging):
                value = medians[peer] / mine
                goal(way.name, f"times as fast as {peer}", value, 1.0, at_least=True)


def _fastest(
    medians: Mapping[str, float], ways: Sequence[Way], staging: int | None = None
) -> str | None:
    """The fastest peer that was measured; `staging`: with so many bytes to copy through."""
    names = [
        way.name
        for way in ways
        if way.peer and way.name in medians and staging in (None, way.staging)
    ]
    return min(names, key=lambda name: medians[name], default=None)
