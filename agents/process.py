"""What this process is to others: its pid, start time, PID namespace and host."""

from __future__ import annotations

import os

from ..protocol.procfs import start_time_ticks
from ..protocol.records import Process

_process: Process | None = None
_host: str | None = None


def this_process() -> Process:
    """This process, as Hello names it; read once for a process, and again after a fork."""
    global _process
    if _process is None or _process.pid != os.getpid():
        _process = Process(os.getpid(), _start_time(), _namespace())
    return _process


def this_host() -> str:
    """The kernel's random id of this boot: the same in all containers of one host."""
    global _host
    if _host is None:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            _host = file.read().strip()
    return _host


def _start_time() -> int:
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        return start_time_ticks(file.read())


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
