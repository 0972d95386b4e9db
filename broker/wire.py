"""The one ROUTER socket: receives until nothing is left, sends without ever waiting.

One object owns the socket and nobody else touches it. Its descriptor is edge-triggered, and a send
may eat the edge of a message that came in: so it is read until EAGAIN, and looked at again after
every send made outside of the reading.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import time
from collections import deque
from collections.abc import Container
from typing import Protocol

import zmq
from msgspec import Struct

from ..protocol.limits import MAX_ENVELOPE_BYTES
from .config import Limits

DRAIN_BUDGET = 256
"""Messages read before other callbacks of the loop get their turn."""
ZERO_COPY_BYTES = 65_536
"""From this size on, sending a body without copying it is faster (and it is sent many times)."""
HIGH_WATER_MARK = 1000
"""Messages that libzmq keeps per peer and direction; what exceeds it is queued here."""
FIRST_RETRY_S = 0.001
LAST_RETRY_S = 0.05
"""A retry that moved nothing doubles the wait, up to this."""
# Plain numbers: combining flags of an enum costs more than a receive.
_NOW = int(zmq.NOBLOCK)
_NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE = int(zmq.RCVMORE)

BACKLOG = 1024
HANDSHAKE_MS = 10_000
OVERSIZE = 2**20
"""Bytes above the limits that are still received, so that the sender can be told."""


class WireEvents(Protocol):
    """Who hears what the socket received."""

    def received(
        self, route: bytes, envelope: bytes, body: bytes | None, frame: zmq.Frame | None
    ) -> None:
        """A message of one or two frames; `frame` is its envelope's, for an unknown route only."""

    def malformed(self, route: bytes, text: str) -> None:
        """A message of more frames than any has."""

    def lost(self, route: bytes, why: str) -> None:
        """Queued messages of this route were dropped: it is unreachable."""

    def expects(self) -> bool:
        """Whether more messages will come soon, and are waited for."""
        ...


class _Sent(enum.Enum):
    DONE = "done"
    FULL = "full"
    UNREACHABLE = "unreachable"


class _Unsent(Struct):
    """What one peer did not take yet, in order."""

    messages: deque[tuple[bytes, bytes | None]]
    nbytes: int = 0


class Wire:
    """Sends and receives for the broker.

    A route is the routing id that libzmq gave to a connection: an address, no identity.

    Args:
        loop: The event loop, in whose thread everything happens.
        events: Who is told.
        known: The routes whose peer is known already: asking the kernel needs a frame object, so
            it is made for the others only.
        limits: Sizes of messages and queues.
        busy_s: For so long after a message, while more are expected, the socket is looked at again
            and again without sleeping.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        events: WireEvents,
        known: Container[bytes],
        limits: Limits,
        busy_s: float = 0.0,
    ) -> None:
        self._loop = loop
        self._events = events
        self._known = known
        self._limits = limits
        self._busy_s = busy_s
        # Until when it does not sleep, in monotonic seconds.
        self._awake_until = 0.0
        self._context = zmq.Context(io_threads=1)
        self._socket = _router(self._context, limits)
        # Inside `drain`: a send need not schedule another look.
        self._draining = False
        # A look at the socket is scheduled.
        self._scheduled = False
        self._closed = False
        # After a defect: perhaps in the middle of a message, whose rest would be waited for.
        self._halted = False
        # Queues of the routes that are not empty.
        self._unsent: dict[bytes, _Unsent] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = FIRST_RETRY_S
        self.messages_received = 0
        self.messages_sent = 0

    def bind(self, url: str) -> None:
        """Listen at `url` too."""
        self._socket.bind(url)

    def start(self) -> None:
        """Begin to receive."""
        self._loop.add_reader(self._socket.FD, self.drain)
        self.look_again()

    def drain(self, budget: int = DRAIN_BUDGET) -> bool:
        """Receive up to `budget` messages; True when none is left, else it goes on by itself."""
        if self._closed or self._halted:
            return True
        receive = self._socket.recv
        self._draining = True
        try:
            for count in range(budget):
                try:
                    route = receive(_NOW)
                except zmq.Again:
                    if self._busy_s:
                        self._stay_awake(came=count > 0)
                    return True
                self._read(route)
                if self._closed:
                    return True
        finally:
            self._draining = False
        self.look_again()
        return False

    def _stay_awake(self, *, came: bool) -> None:
        """Has the socket be looked at again at once, if more is expected soon."""
        if came and self._events.expects():
            self._awake_until = time.monotonic() + self._busy_s
        if self._awake_until and time.monotonic() < self._awake_until:
            self.look_again()
        else:
            self._awake_until = 0.0

    def look_again(self) -> None:
        """Have the socket read soon: its descriptor may have lost the edge."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._soon)

    def send(self, route: bytes, envelope: bytes, body: bytes | None = None) -> bool:
        """Send a message, or queue it behind those that the peer did not take yet.

        Returns:
            False when the peer is unreachable or its queue is full. Then all that was queued is
            dropped, and nothing may be sent to this route any more.
        """
        if self._unsent and route in self._unsent:
            # Tried at every send, so that a burst fills no queue of a peer that reads.
            if not self._flush(route):
                return False
            if route in self._unsent:
                return self._enqueue(route, envelope, body)
        sent = self._try(route, envelope, body)
        if not self._draining:
            self.look_again()
        if sent is _Sent.FULL:
            return self._enqueue(route, envelope, body)
        return sent is _Sent.DONE

    def send_or_drop(self, route: bytes, envelope: bytes, body: bytes | None = None) -> bool:
        """Send a message that nobody depends on, to a connection without a session."""
        if route in self._unsent:
            return False
        sent = self._try(route, envelope, body)
        if not self._draining:
            self.look_again()
        return sent is _Sent.DONE

    def forget(self, route: bytes) -> None:
        """Drop what is queued for this route."""
        self._unsent.pop(route, None)

    @property
    def unsent(self) -> tuple[int, int]:
        """Messages and bytes in all queues."""
        queues = self._unsent.values()
        return sum(len(q.messages) for q in queues), sum(q.nbytes for q in queues)

    def halt(self) -> None:
        """Receive nothing any more: a defect has left what was read half done."""
        self._halted = True

    def close(self, linger_s: float) -> None:
        """Close the socket; what libzmq has taken is sent for at most `linger_s`."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.FD)
        if self._retry is not None:
            self._retry.cancel()
        for route in list(self._unsent):
            self._flush(route)
        self._unsent.clear()
        self._socket.close(linger=round(linger_s * 1000))
        self._context.term()

    def _soon(self) -> None:
        self._scheduled = False
        self.drain()

    def _read(self, route: bytes) -> None:
        """Receive the rest of a message whose routing id was received."""
        socket = self._socket
        frame: zmq.Frame | None = None
        if route in self._known:
            envelope = socket.recv()
        else:
            frame = socket.recv(copy=False)
            envelope = frame.bytes
        body: bytes | None = None
        frames = 1
        while socket.get(_RCVMORE):
            body = socket.recv()
            frames += 1
        self.messages_received += 1
        if self._unsent and route in self._unsent and not self._flush(route):
            self._events.lost(route, "is unreachable")
        if frames > 2:
            self._events.malformed(route, f"a message of {frames} frames; there are one or two")
        else:
            self._events.received(route, envelope, body, frame)

    def _try(self, route: bytes, envelope: bytes, body: bytes | None) -> _Sent:
        socket = self._socket
        try:
            # Only the first frame can fail: libzmq takes the others of a message with it.
            socket.send(route, _NOW_MORE)
            if body is None:
                socket.send(envelope, _NOW)
            else:
                socket.send(envelope, _NOW_MORE)
                socket.send(body, _NOW, copy=len(body) < ZERO_COPY_BYTES)
        except zmq.Again:
            return _Sent.FULL
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return _Sent.UNREACHABLE
            raise
        self.messages_sent += 1
        return _Sent.DONE

    def _enqueue(self, route: bytes, envelope: bytes, body: bytes | None) -> bool:
        queue = self._unsent.get(route)
        if queue is None:
            queue = self._unsent[route] = _Unsent(deque())
        queue.messages.append((envelope, body))
        queue.nbytes += len(envelope) + len(body or b"")
        limits = self._limits
        if len(queue.messages) > limits.max_queue_messages or queue.nbytes > limits.max_queue_bytes:
            del self._unsent[route]
            return False
        self._start_retry()
        return True

    def _flush(self, route: bytes) -> bool:
        """Send what a peer takes now; False when it is unreachable."""
        queue = self._unsent[route]
        while queue.messages:
            envelope, body = queue.messages[0]
            sent = self._try(route, envelope, body)
            if sent is _Sent.FULL:
                return True
            if sent is _Sent.UNREACHABLE:
                del self._unsent[route]
                return False
            queue.messages.popleft()
            queue.nbytes -= len(envelope) + len(body or b"")
        del self._unsent[route]
        return True

    def _start_retry(self) -> None:
        # A full ROUTER pipe cannot be waited for: there is no event when it has room again.
        if self._retry is None:
            self._retry = self._loop.call_later(self._retry_s, self._retry_all)

    def _retry_all(self) -> None:
        self._retry = None
        before = self.messages_sent
        lost = [route for route in list(self._unsent) if not self._flush(route)]
        self.look_again()
        moved = self.messages_sent > before
        self._retry_s = FIRST_RETRY_S if moved else min(2 * self._retry_s, LAST_RETRY_S)
        if self._unsent:
            self._start_retry()
        for route in lost:
            self._events.lost(route, "is unreachable")


def _router(context: zmq.Context[zmq.Socket[bytes]], limits: Limits) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    # Without it, what cannot be sent vanishes without a word.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # With it, any peer could take over another's routing id.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    largest = max(limits.max_body_bytes, MAX_ENVELOPE_BYTES)
    socket.setsockopt(zmq.MAXMSGSIZE, largest + OVERSIZE)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 0)
    return socket
