"""What the broker tells systemd about itself (sd_notify); nothing where systemd did not ask."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Sends state to the socket named by `$NOTIFY_SOCKET`: a path, or abstract with a leading `@`.

    Losing a notification never disturbs the broker: each call says whether it was sent.

    Args:
        environ: The environment to read.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_interval_s = _watchdog_interval(environ)
        """Seconds within which systemd wants a sign of life; None when it wants none."""
        self._socket: socket.socket | None = None
        if address.startswith(("/", "@")):
            self._socket = socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            )

    def ready(self, status: str = "") -> bool:
        """The broker serves; also after `reloading`."""
        return self._send("READY=1", *_status(status))

    def status(self, text: str) -> bool:
        """One line for `systemctl status`."""
        return self._send(*_status(text))

    def reloading(self) -> bool:
        """The configuration is being read again; `ready` follows."""
        return self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "") -> bool:
        """The broker has begun to end."""
        return self._send("STOPPING=1", *_status(status))

    def watchdog(self) -> bool:
        """A sign of life; send it from the main loop, twice in each `watchdog_interval_s`."""
        return self._send("WATCHDOG=1")

    def close(self) -> None:
        """Close the socket; later calls do nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return False
        return True


def _status(text: str) -> tuple[str, ...]:
    return (f"STATUS={' '.join(text.split())}",) if text else ()


def _watchdog_interval(environ: Mapping[str, str]) -> float | None:
    microseconds = environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdigit() or int(microseconds) == 0:
        return None
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # Meant for another process.
    return int(microseconds) / 1e6
