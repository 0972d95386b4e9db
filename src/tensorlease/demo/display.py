"""Shows the demo: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from msgspec import Struct, field
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from .reports import REPLICAS, Round, Wrote

_WIDTHS = "{:>3}  {:<9} {:>7} {:>6} {:>7} {:>5} {:>6} {:>6} {:>6} {:>8} {}"
_NAMES = "ver outcome workers copied prepare copy commit total train held-out bytes"
HEADER = _WIDTHS.format(*_NAMES.split())
_UNITS = _WIDTHS.format("", "", "", "MiB", "ms", "ms", "ms", "ms", "nats", "per byte", "")
_ROW_LINES = 1 + len(REPLICAS)


class Row(Struct):
    """What is known of one version."""

    version: int
    digests: dict[str, str] = field(default_factory=dict)
    """By the name of the process: what it holds."""
    round: Round | None = None
    wrote: dict[str, Wrote] = field(default_factory=dict)
    """By `replica/member`."""

    @property
    def complete(self) -> bool:
        """Whether the round has ended and all have told what they hold."""
        return self.round is not None and len(self.wrote) == sum(REPLICAS.values())

    @property
    def equal(self) -> bool:
        """Whether all trainers and workers hold the same bytes."""
        return len(set(self.digests.values())) == 1

    @property
    def held_out(self) -> float:
        """The worst loss that a worker measured on the held-out text, in nats a byte."""
        return max((wrote.loss for wrote in self.wrote.values()), default=float("inf"))

    def lines(self) -> list[str]:
        """Returns the row as text."""
        if self.round is None:
            return [f"{self.version:3}  under way"]
        of = self.round.receivers
        times = [(r.prepare_s, r.copy_s, r.commit_s) for r in of] or [(0.0, 0.0, 0.0)]
        slowest = [max(seconds) * 1e3 for seconds in zip(*times, strict=True)]
        cells = _WIDTHS.format(
            self.version,
            self.round.outcome,
            len(of),
            f"{sum(r.nbytes for r in of) / 2**20:.1f}",
            *(f"{ms:.1f}" for ms in (*slowest, self.round.seconds * 1e3)),
            "-" if self.round.loss is None else f"{self.round.loss:.3f}",
            f"{self.held_out:.3f}" if self.complete else "",
            ("equal" if self.equal else "DIFFER") if self.complete else "",
        )
        heads = [(name, self.wrote.get(f"{name}/0")) for name in REPLICAS]
        texts = [f"     {name}  {wrote.line if wrote else ''}" for name, wrote in heads]
        return [cells.rstrip(), *(text.rstrip() for text in texts)]


class Display:
    """What the user sees while the demo runs. A context manager.

    Args:
        console: Where to print; None shows nothing.
        title: Lines above the table.
    """

    def __init__(self, console: Console | None, title: list[str]) -> None:
        self._console = console
        self._title = title
        self._rows: list[Row] = []
        self._printed = 0
        self._status = "starting"
        self._live: Live | None = None
        if console is not None and console.is_terminal:
            self._live = Live(
                console=console, refresh_per_second=8, get_renderable=self._render, screen=False
            )

    def __enter__(self) -> Self:
        if self._console is not None and self._live is None:
            for line in self._title:
                self._print(line)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._status = ""
        if self._live is not None:
            self._live.stop()

    def add_title(self, line: str) -> None:
        """Adds a line above the table."""
        self._title.append(line)
        if self._console is not None and self._live is None:
            for text in (line, HEADER, _UNITS):
                self._print(text)

    def show(self, rows: list[Row], status: str) -> None:
        """Shows these versions, and in one line what goes on now."""
        self._rows, self._status = rows, status
        if self._console is None or self._live is not None:
            return
        for row in rows[self._printed :]:
            if not row.complete:
                break
            self._printed += 1
            for line in row.lines():
                self._print(line)

    def _print(self, line: str) -> None:
        assert self._console is not None
        self._console.print(Text(line), soft_wrap=True)

    def _render(self) -> Group:
        """While it runs only what fits the screen, at the end everything."""
        assert self._console is not None
        rows = self._rows
        if self._status:
            above = sum(1 + len(line) // self._console.width for line in self._title)
            fitting = (self._console.height - above - 4) // _ROW_LINES
            rows = rows[-max(1, fitting) :]
        parts = [Text(HEADER, style="bold"), Text(_UNITS, style="dim")]
        for row in rows:
            first, *others = row.lines()
            parts.append(Text(first, style="bold red" if row.complete and not row.equal else ""))
            parts += [
                Text(line, style="cyan", no_wrap=True, overflow="ellipsis") for line in others
            ]
        if self._status:
            parts.append(Text(self._status, style="dim"))
        for part in parts:
            part.no_wrap, part.overflow = True, "ellipsis"
        return Group(*(Text(line) for line in self._title), *parts)
