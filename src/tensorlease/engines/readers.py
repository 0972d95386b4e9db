"""Which processes of a server read for it: as far as this host shows them to this user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tensorlease.protocol.procfs import start_time_ticks
from tensorlease.protocol.records import Process

from .ancestors import TITLE

MAX_READERS: Final = 60
"""An agent names 64 processes at most."""
_LISTENS: Final = "0A"


def readers_of(port: int) -> list[Process]:
    """Returns the engine's processes below whoever listens at a port; none that cannot be seen."""
    listeners = _holders(_listening(port))
    if not listeners:
        return []
    parents: dict[int, int] = {}
    for pid in _pids():
        try:
            parents[pid] = int(_stat(pid).rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # It has ended meanwhile.
    below = (pid for pid in parents if _is_below(pid, parents, listeners))
    found = [process for pid in below if (process := _engines(pid)) is not None]
    return found if len(found) <= MAX_READERS else []


def living(processes: Sequence[Process]) -> list[int]:
    """Returns the pids of those that have not ended."""
    left: list[int] = []
    for process in processes:
        try:
            text = _stat(process.pid)
            zombie = text.rpartition(")")[2].split()[0] in ("Z", "X")
            if start_time_ticks(text) == process.start and not zombie:
                left.append(process.pid)
        except (OSError, ValueError, IndexError):
            continue
    return left


def are_over(processes: Sequence[Process]) -> bool:
    """Whether all of these have ended; of those in another PID namespace that cannot be seen."""
    if any(process.namespace != _namespace("self") for process in processes):
        return False
    return not living(processes)


def _listening(port: int) -> set[str]:
    """Returns what /proc calls the sockets that listen at a port."""
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found


def _holders(sockets: set[str]) -> set[int]:
    found: set[int] = set()
    for pid in _pids() if sockets else ():
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue  # Another user's, or it has ended.
        for name in names:
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}") in sockets:
                    found.add(pid)
    return found


def _is_below(pid: int, parents: dict[int, int], ancestors: set[int]) -> bool:
    seen: set[int] = set()
    while pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
        if pid in ancestors:
            return True
    return False


def _engines(pid: int) -> Process | None:
    """Returns a process that calls itself one of vLLM's engine."""
    try:
        if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(TITLE):
            return None
        return Process(pid, start_time_ticks(_stat(pid)), _namespace(pid))
    except (OSError, ValueError):
        return None


def _namespace(pid: int | str) -> int:
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _stat(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace")
