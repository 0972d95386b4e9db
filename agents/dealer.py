"""A DEALER socket in the poll loop: one session's way to the broker, and what waits to go it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

import zmq

from .poll_loop import PollLoop, Ready

# As plain numbers: what pyzmq has takes longer than the call.
_IN: Final = int(zmq.POLLIN)
_EVENTS: Final = int(zmq.EVENTS)
_NOW: Final = int(zmq.NOBLOCK)
READ_BUDGET = 200
"""Messages read in one turn, so that other agents of the process get theirs."""


class Dealer:
    """A socket and its monitor. Only the poll thread touches it; nothing here waits.

    Args:
        loop: The loop that polls it.
        url: Where the broker listens.
    """

    def __init__(self, loop: PollLoop, url: str) -> None:
        self._poller = loop.poller
        self._socket = loop.context.socket(zmq.DEALER)
        self._socket.linger = 0
        # Nothing is queued for a broker that is not there, to reach another one later.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        # A connection is a session: ZMQ must not make a new one by itself.
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        # Closed: it never came to be connected, for the broker ended meanwhile.
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._socket.connect(url)
        # The socket is polled for room to send, too.
        self._wants_room = False
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def receive(self, ready: Ready) -> Iterator[list[bytes]]:
        """Yields the frames of each message that is there."""
        if ready.get(self._socket, 0) & _IN:
            for _ in range(READ_BUDGET):
                # To ask takes a fifth of what it takes to fail.
                if not int(self._socket.getsockopt(_EVENTS)) & _IN:
                    return
                yield self._socket.recv_multipart(_NOW)

    def is_lost(self, ready: Ready) -> bool:
        """Whether the broker's side was closed."""
        return self._monitor in ready

    def send(self, messages: deque[list[bytes]]) -> None:
        """Sends what the socket takes; the loop comes back when it can take more."""
        while messages:
            try:
                self._socket.send_multipart(messages[0], _NOW)
            except zmq.Again:
                break
            messages.popleft()
        if bool(messages) is not self._wants_room:
            self._wants_room = bool(messages)
            flags = zmq.POLLIN | zmq.POLLOUT if self._wants_room else zmq.POLLIN
            self._poller.modify(self._socket, flags)

    def close(self) -> None:
        """Closes it; what was not sent is dropped."""
        self._poller.unregister(self._monitor)
        self._poller.unregister(self._socket)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
