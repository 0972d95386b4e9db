"""The broker's process of `tensorlease run`: `python -m tensorlease.private_broker PID DIRECTORY ...`

PID is the process that it ends with, DIRECTORY what it removes if that process could not: it was
killed. All else is handed to `tensorlease broker`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys

from .cli import main
from .commands.private_broker import end_with


def serve(parent: int, directory: str, words: list[str]) -> int:
    """Runs the broker until it is told to end, or its parent has ended; returns the exit code."""
    try:
        # Until the broker's own handler is in place: in order too.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        end_with(parent, signal.SIGTERM)
        return main(["broker", *words])
    finally:
        if os.getppid() != parent:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
