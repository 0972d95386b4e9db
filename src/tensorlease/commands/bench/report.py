"""What a benchmark found: figures, the goals that they are held against, and how both are shown."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import click
import msgspec
from msgspec import Struct, field
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MISSED = 1
"""The exit code of `--check` where a goal is missed."""

F = TypeVar("F", bound=Callable[..., object])


class Figure(Struct):
    """One cell: the median of what was measured, and its least and greatest."""

    row: str
    name: str
    """The column, with its unit."""
    median: float
    least: float
    greatest: float
    count: int
    """How many values it is of."""
    table: str = ""
    """The title of its table; empty: rows that have a column in common are in one."""


class Goal(Struct):
    """What a row must reach: `value` at most `limit`, or at least."""

    row: str
    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether it is reached; a value that is no number reaches nothing."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        word = "reached" if self.met else "MISSED"
        return f"{self.row}: {self.name} {self.value:.2f} (goal {sign} {self.limit:g}): {word}"


class Report(Struct):
    """All of a run, as `--json` prints it."""

    command: str
    date: str
    machine: str
    load: tuple[float, float]
    """The load average of the last minute, before and after."""
    figures: list[Figure] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, row: str, name: str, values: Sequence[float], table: str = "") -> float:
        """Adds a figure; returns its median. Raises `ValueError` where nothing was measured."""
        if not values:
            raise ValueError(f"{row}: no value of {name} was measured")
        median = statistics.median(values)
        count = len(values)
        self.figures.append(Figure(row, name, median, min(values), max(values), count, table))
        return median

    @property
    def missed(self) -> list[Goal]:
        """The goals that are not reached."""
        return [goal for goal in self.goals if not goal.met]


def new_report(command: str) -> Report:
    """An empty report of this machine, at this time; `finish` ends it."""
    load = os.getloadavg()[0]
    date = datetime.datetime.now().astimezone().strftime("%Y-%m-%d")
    return Report(command, date, machine(), (load, load))


def machine() -> str:
    """One line: processor, cores that this process may use, kernel, Python."""
    model = "unknown processor"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
        model = names[0] if names else model
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}, {platform.system()}, Python {platform.python_version()}"


def finish(report: Report, *, as_json: bool, check: bool) -> int:
    """Prints a report; returns the exit code: `MISSED` where `check` finds a goal missed."""
    report.load = (report.load[0], os.getloadavg()[0])
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        show(report, Console(width=max(100, Console().width)))
    if not check:
        return 0
    for goal in report.missed:
        click.echo(f"missed: {goal}", err=True)
    return MISSED if report.missed else 0


def show(report: Report, console: Console) -> None:
    """Prints a report as a table, and a line for each goal and note."""
    before, after = report.load
    console.print(f"{report.command}", highlight=False)
    console.print(
        f"{report.date}, {report.machine}, load {before:.1f} to {after:.1f}", highlight=False
    )
    for rows in _tables(report.figures):
        columns = list(dict.fromkeys(figure.name for figure in rows))
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("")
        for column in columns:
            table.add_column(column, justify="right", overflow="fold")
        cells = {(figure.row, figure.name): cell(figure) for figure in rows}
        for row in dict.fromkeys(figure.row for figure in rows):
            table.add_row(escape(row), *(cells.get((row, column), "") for column in columns))
        console.print()
        if rows[0].table:
            console.print(rows[0].table, highlight=False, markup=False)
        console.print(table)
    if report.goals or report.notes:
        console.print()
    for goal in report.goals:
        console.print(str(goal), style="" if goal.met else "red", highlight=False, markup=False)
    for note in report.notes:
        console.print(note, highlight=False, markup=False)


def _tables(figures: list[Figure]) -> list[list[Figure]]:
    """Figures by their table's title, and then where rows have no column in common."""
    titled: dict[str, list[Figure]] = {}
    for figure in figures:
        titled.setdefault(figure.table, []).append(figure)
    return [table for rows in titled.values() for table in _parted(rows)]


def _parted(figures: list[Figure]) -> list[list[Figure]]:
    names: dict[str, set[str]] = {}
    for figure in figures:
        names.setdefault(figure.row, set()).add(figure.name)
    tables: list[tuple[set[str], list[str]]] = []
    for row, columns in names.items():
        for seen, rows in tables:
            if seen & columns:
                seen |= columns
                rows.append(row)
                break
        else:
            tables.append((set(columns), [row]))
    return [[figure for figure in figures if figure.row in rows] for _, rows in tables]


def cell(figure: Figure) -> str:
    """A figure for people: `0.75 (0.70 to 0.91)`, or one number where there is no spread."""
    if figure.count == 1:
        return number(figure.median)
    return f"{number(figure.median)} ({number(figure.least)} to {number(figure.greatest)})"


def number(value: float) -> str:
    """Three digits that count; none behind the point from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def options(command: F) -> F:
    """Gives a command `--json` and `--check`."""
    check = click.option(
        "--check", is_flag=True, help="Exit with 1, naming the row, where a goal is missed."
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print a report as JSON.")
    return as_json(check(command))
