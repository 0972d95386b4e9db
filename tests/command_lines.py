"""Command lines in processes of tests: what they print, how they end, and what memory they take."""

from __future__ import annotations

import contextlib
import io
import re
import resource
import threading
from pathlib import Path
from typing import NamedTuple

from tensorlease import cli


class Done(NamedTuple):
    """What became of a command in a process."""

    code: int
    out: str
    err: str


class Measured(NamedTuple):
    """What it took, in bytes: resident memory, before and at most; and at most without files."""

    before: int
    most: int
    without_files: int


def command(*words: str) -> Done:
    """In a child: runs a command line."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
    texts = []
    for stream in (out, err):
        stream.seek(0)
        texts.append(stream.read())
    return Done(code, *texts)


def command_with_small_files(most: int, *words: str) -> Done:
    """In a child, which cannot make files of more than so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    return command(*words)


def memory() -> dict[str, int]:
    """Bytes of each field of this process's memory."""
    text = Path("/proc/self/status").read_text()
    return {
        name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)
    }


def measured_command(*words: str) -> tuple[Done, Measured]:
    """In a child: runs a command line, and looks at its memory meanwhile."""
    import tensorlease.commands.push  # noqa: F401 - so that it is there before

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, most, ended = memory(), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.005):
            now = memory()
            most = max(most, now["RssAnon"] + now["RssShmem"])

    looking = threading.Thread(target=look)
    looking.start()
    done = command(*words)
    ended.set()
    looking.join()
    return done, Measured(before["VmRSS"], memory()["VmHWM"], most)
