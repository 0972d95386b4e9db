"""The command `tensorlease`: runs a command line and turns every failure into one line and a code.

Exit codes: 0 done; 1 it failed, and the line on stderr says why, or, without one, the reader of
stdout left (`tensorlease status | head`); 2 it cannot work as called (a wrong option, a wrong
setting, an extra that is not installed); 130 interrupted. A command may return a code of its own.
What remains is a defect, and shows its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .protocol.errors import ConfigError, TensorleaseError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FAILED = 1
MISUSED = 2
INTERRUPTED = 130

_PIP_LINES = {
    "click": "pip install 'tensorlease[broker]'",
    "prometheus_client": "pip install 'tensorlease[broker]'",
    "rich": "pip install 'tensorlease[broker]'",
    "safetensors": "pip install 'tensorlease[broker,files]'",
    "uvloop": "pip install 'tensorlease[broker]'",
    "numpy": "pip install numpy",
    "torch": "pip install torch",
}
"""Packages that an install may lack, and the line that brings each."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        args: The words after `tensorlease`; None takes those of this process.

    Returns:
        The exit code of the process.

    Raises:
        ModuleNotFoundError: A module is missing that no extra would bring.
    """
    words = list(sys.argv[1:] if args is None else args)
    try:
        with _guarded_stdout():
            return _attempt(words)
    except _StdoutError as error:
        _discard(error.descriptor)
        if error.number != errno.EPIPE:
            _say(f"cannot write to stdout: {os.strerror(error.number)}")
        return FAILED


def _attempt(words: list[str]) -> int:
    try:
        return _run(words)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _PIP_LINES:
            raise
        _say(f"this needs {missing}, which is not installed: {_PIP_LINES[missing]}")
        return MISUSED
    except ConfigError as error:
        for problem in error.problems:
            _say(str(problem))
        return MISUSED
    except TensorleaseError as error:
        _say(str(error))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(words: list[str]) -> int:
    import click

    from .command_table import build

    try:
        outcome: object = build().main(words, prog_name="tensorlease", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return MISUSED
    except click.ClickException as error:
        _say(error.format_message())
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    return outcome if isinstance(outcome, int) else 0


def _say(message: str) -> None:
    try:
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    except OSError:
        _discard(sys.stderr.fileno())  # The exit code says what can be said.


def _discard(descriptor: int) -> None:
    """What is left for a file that cannot be written goes nowhere: the flush at exit must not fail."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)


class _StdoutError(Exception):
    """This process's stdout cannot be written.

    No `OSError`: click, rich and commands must not take it for one of their own.
    """

    def __init__(self, descriptor: int, number: int) -> None:
        super().__init__(os.strerror(number))
        self.descriptor = descriptor
        self.number = number


class _Stdout(io.FileIO):
    """Tells its own errors from all others."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            raise _StdoutError(self.fileno(), error.errno or errno.EIO) from error
        if written is None:  # Somebody who shares it made it non-blocking.
            raise _StdoutError(self.fileno(), errno.EAGAIN)
        return written


@contextlib.contextmanager
def _guarded_stdout() -> Iterator[None]:
    """Whoever writes to this process's stdout meanwhile, by whatever library: see `_StdoutError`."""
    former = sys.stdout
    if former is None:  # It is closed (`>&-`): nobody wants to know.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    elif former is sys.__stdout__ and isinstance(former, io.TextIOWrapper):
        former.flush()
        guarded = io.TextIOWrapper(
            io.BufferedWriter(_Stdout(former.fileno(), "w", closefd=False)),
            former.encoding,
            former.errors,
            line_buffering=former.line_buffering or former.write_through,
        )
        with contextlib.redirect_stdout(guarded):
            try:
                yield
            finally:
                guarded.flush()
    else:
        yield  # Another program's, or a test's.


if __name__ == "__main__":
    sys.exit(main())
