"""One leader a server: a second one would take its workers away from the first.

Who leads holds a socket of a name that is made of the server's address. The kernel has such names
for a network namespace, as it has addresses, for all users; it frees one when its holder has gone.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from tensorlease.protocol.errors import ConfigError

WAIT_S: Final = 5.0
"""How long a leader that may be about to end is waited for."""
LOOK_S: Final = 0.1
MOST_NAME: Final = 80
"""Characters of an address in a name: the kernel takes 107 bytes."""
_CREDENTIALS: Final = struct.Struct("3i")

_held: set[socket.socket] = set()


@contextmanager
def leading(address: str, ending: threading.Event) -> Iterator[None]:
    """For as long as a server is led; no other leader of it can come meanwhile.

    Args:
        address: Where the server listens; empty: that is not known, and nothing is held.
        ending: Set: it is not waited for any more.

    Raises:
        ConfigError: Another leads it, and goes on; names its pid.
    """
    if not address:
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        _take(held, address, ending)
        _held.add(held)
        try:
            yield
        finally:
            _held.discard(held)


def _take(held: socket.socket, address: str, ending: threading.Event) -> None:
    name = f"\0tensorlease-leads-{address[-MOST_NAME:]}"
    deadline = time.monotonic() + WAIT_S
    while not ending.is_set():
        try:
            held.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            held.listen()  # From then on the kernel says who it is.
            return
        if time.monotonic() > deadline:
            raise ConfigError(
                f"http://{address} is led by {_holder(name)} already, and a server has one leader,"
                " in one channel: end that one first"
            )
        ending.wait(LOOK_S)


def _holder(name: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        with suppress(OSError):
            asking.connect(name)
            size = _CREDENTIALS.size
            found = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            return f"pid {_CREDENTIALS.unpack(found)[0]}"
    return "another process"


def _forked() -> None:
    """A forked child leads nothing, and must not keep its parent's place."""
    for held in _held:
        held.close()
    _held.clear()


os.register_at_fork(after_in_child=_forked)
