"""The least that could stand in a broker's place: it hands messages on, and knows nothing.

    python -m tensorlease.commands.bench.relay ipc:///path

Its messages cross the socket as a broker's do in a steady round, the commit included, over the same
kind of socket, read in the same way, by the same event loop. Of an envelope it decodes the kind; what
it hands on it sends as it came; it counts the answers. It tracks no lease, knows no round, checks
nothing and survives nothing: one trainer, workers that never fail.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec
import zmq
from msgspec import Struct

from tensorlease.broker.config import UvloopChoice
from tensorlease.broker.loops import choose_loop

DRAIN_BUDGET = 256
_NOW = int(zmq.NOBLOCK)
_NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE = int(zmq.RCVMORE)


class Kind(Struct, array_like=True, frozen=True):
    """As much of an envelope as is needed to hand it on."""

    kind: str


def envelope(kind: str) -> bytes:
    """What the relay says itself."""
    return msgspec.msgpack.encode(Kind(kind))


WELCOME = envelope("welcome")
OPENED, RELEASE, COMMIT, FINISHED = map(envelope, ("opened", "release", "commit", "finished"))


class Relay:
    """Hands on what one trainer says to all workers, and says when all of them have answered."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: zmq.Socket[bytes]) -> None:
        self._loop = loop
        self._socket = socket
        self._decode = msgspec.msgpack.Decoder(Kind).decode
        self._trainer = b""
        self._workers: list[bytes] = []
        # Answers that are still to come.
        self._awaited = 0

    def drain(self) -> None:
        """Receives what is there; the socket's descriptor is edge-triggered."""
        socket = self._socket
        receive = socket.recv
        for _ in range(DRAIN_BUDGET):
            try:
                route = receive(_NOW)
            except zmq.Again:
                return
            frame, body = receive(), None
            if socket.get(_RCVMORE):
                body = receive()
            self._received(route, frame, body)
        self._loop.call_soon(self.drain)

    def _received(self, route: bytes, frame: bytes, body: bytes | None) -> None:
        kind = self._decode(frame).kind
        if kind == "staged":
            self._awaited -= 1
            if not self._awaited:
                self._send_all(COMMIT)
                self._send(self._trainer, RELEASE)
        elif kind == "committed":
            self._awaited -= 1
            if not self._awaited:
                self._send(self._trainer, FINISHED)
        elif kind == "open":
            self._send_all(frame)
            self._send(self._trainer, OPENED)
        elif kind == "batch":
            self._send_all(frame, body)
        elif kind == "worker-hello":
            self._workers.append(route)
            self._send(route, WELCOME)
        elif kind == "trainer-hello":
            self._trainer = route
            self._send(route, WELCOME)

    def _send_all(self, frame: bytes, body: bytes | None = None) -> None:
        self._awaited = len(self._workers)
        for route in self._workers:
            self._send(route, frame, body)

    def _send(self, route: bytes, frame: bytes, body: bytes | None = None) -> None:
        socket = self._socket
        socket.send(route, _NOW_MORE)
        if body is None:
            socket.send(frame, _NOW)
        else:
            socket.send(frame, _NOW_MORE)
            socket.send(body, _NOW)


async def serve(url: str) -> None:
    """Relays until SIGTERM."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    with zmq.Context(io_threads=1) as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 0)
        relay = Relay(loop, socket)
        socket.bind(url)
        loop.add_reader(socket.FD, relay.drain)
        loop.call_soon(relay.drain)
        await ended.wait()
        loop.remove_reader(socket.FD)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=choose_loop(UvloopChoice.AUTO)) as runner:
        runner.run(serve(sys.argv[1]))
