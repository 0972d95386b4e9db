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
    """Returns the nearest ancestor that is no engine core or worker: the server.

    0: this process belongs to none, or it cannot be seen.
    """
    pid = os.getpid()
    try:
        if not _is_below(pid):
            return 0  # The engine is in the user's own process.
        while _is_below(pid):
            pid = _parent_of(pid)
    except (OSError, ValueError, IndexError):
        return 0
    return pid


def call_at_end(pid: int, callback: Callable[[], object]) -> None:
    """Has a thread call `callback` once the process has ended; does nothing where none can tell."""
    if not pid:
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        callback()
        return
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


def _is_below(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(TITLE)


def _parent_of(pid: int) -> int:
    # The name before it is in brackets, and may hold anything.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
