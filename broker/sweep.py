"""Removes shared memory segments of trainers that died without doing so themselves."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from ..protocol.segments import (
    DEFAULT_DIRECTORY,
    DIRECTORY_VARIABLE,
    ProcessStat,
    abandoned,
    parse_stat,
)


def sweep(directory: Path | None = None, *, gone: Collection[str] = ()) -> list[str]:
    """Removes the segments of this user whose owner is provably gone; returns their names.

    Called when a trainer was declared gone. Whatever belongs to a living process, to another user
    or to another PID namespace stays, and so does every file that is no segment of ours.

    Args:
        directory: Where segments live; `$TENSORLEASE_SHM_DIR` or /dev/shm by default.
        gone: Instances of trainers that are proved to be gone, by their locks say: their segments
            go too, whatever PID namespace they lived in.
    """
    if directory is None:
        directory = Path(os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)
    removed: list[str] = []
    try:
        names = os.listdir(directory)
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return removed
    uid = os.getuid()
    for name in abandoned(names, uid=uid, namespace=namespace, look=_look, gone=gone):
        path = directory / name
        try:
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == uid:
                path.unlink()
                removed.append(name)
        except OSError:
            continue
    return removed


def _look(pid: int) -> ProcessStat | None:
    """Returns the state of a process, None if there is none; raises `OSError` if it hides."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        raise
