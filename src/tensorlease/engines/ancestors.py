"""Which process a vLLM worker belongs to, and when that ends."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

TITLE = b"VLLM::"
"""How the processes below a server call themselves."""


def server_pid() -> int:
    """Returns the nearest ancestor that is no engine core or worker: the server."""
    pid = os.getppid()
    while Path(f"/proc/{pid}/cmdline").read_bytes().startswith(TITLE):
        pid = _parent_of(pid)
    return pid


def call_at_end(pid: int, callback: Callable[[], object]) -> None:
    """Has a thread call `callback` once the process has ended; does nothing where none can tell."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return

    def wait() -> None:
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll()
        finally:
            os.close(descriptor)
        callback()

    threading.Thread(target=wait, name="tensorlease-server", daemon=True).start()


def _parent_of(pid: int) -> int:
    # The name before it is in brackets, and may hold anything.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
