"""How far something is: a bar on a terminal, a line now and then elsewhere; both on stderr."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from .units import size

LINE_S = 5.0


class Meter:
    """Counts bytes. To be used in a `with` statement.

    Args:
        what: What is done, before the bar or in each line.
        total: All bytes.
        console: Where it is shown.
        line_s: Seconds between two lines, where there is no terminal.
    """

    def __init__(self, what: str, total: int, console: Console, line_s: float = LINE_S) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._console = console
        self._line_s = line_s
        self._next_line = time.monotonic() + line_s
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._done += nbytes
        self._bar.advance(self._task, nbytes)
        now = time.monotonic()
        if self._console.is_terminal or now < self._next_line:
            return
        self._next_line = now + self._line_s
        self._console.print(
            f"{self._what}: {size(self._done)} of {size(self._total)}",
            markup=False,
            highlight=False,
        )
