"""Command lines on pseudo-terminals, for tests: what is shown, what is typed, what is left behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tensorlease import cli

from .procs import DEADLINE_S, Spawn

ROWS, COLUMNS = 40, 160
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")


def on_terminal(path: str, *words: str) -> int:
    """In a child: runs a command line whose terminal is at `path`; returns its exit code."""
    os.setsid()
    terminal = os.open(path, os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for descriptor in (0, 1, 2):
        os.dup2(terminal, descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it ends with the process
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        os.environ.pop(name, None)
    os.environ["TERM"] = "xterm-256color"
    try:
        return cli.main(words)
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.stdout.flush()


class Terminal:
    """A command on a terminal of its own. To be used in a `with` statement.

    Args:
        spawn: Starts processes.
        words: What is typed behind `tensorlease`.
        rows: Lines of the terminal.
        run: What runs it in the child.
    """

    def __init__(
        self,
        spawn: Spawn,
        *words: str,
        rows: int = ROWS,
        run: Callable[..., int] = on_terminal,
    ) -> None:
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
        self._before = termios.tcgetattr(self._theirs)
        self.raw = ""
        self._seen = 0
        self.process = spawn(run, os.ttyname(self._theirs), *words)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._ours)
        os.close(self._theirs)

    @property
    def text(self) -> str:
        """All that was shown, without what only moves the cursor or colours."""
        return _CONTROL.sub("", self.raw)

    @property
    def is_as_before(self) -> bool:
        """Whether the terminal has the modes that it had before the command."""
        return termios.tcgetattr(self._theirs) == self._before

    def type(self, keys: bytes) -> None:
        """Presses keys."""
        os.write(self._ours, keys)

    def shows(self, pattern: str, timeout_s: float = 10.0) -> str:
        """Waits until something new is shown that the pattern fits; returns what fits it."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = re.search(pattern, self.text[self._seen :])
            if found is not None:
                self._seen += found.end()
                return found[0]
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{pattern!r} was never shown:\n{self.text[-4000:]}"
            self._read(left_s)

    def end(self) -> int:
        """Waits for its end, and reads the rest; returns its exit code."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.alive:  # It could not end while nobody reads.
            assert time.monotonic() < deadline, self.text[-4000:]
            self._read(0.05)
        while self._read(0.0):
            pass
        code = self.process.result()
        assert isinstance(code, int)
        return code

    def _read(self, wait_s: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], wait_s)
        if ready:
            self.raw += os.read(self._ours, 65536).decode("utf-8", "replace")
        return bool(ready)
