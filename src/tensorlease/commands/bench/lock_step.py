"""What is widely done: one buffer, its handle pickled, and REQ/REP, a bucket at a time in lock step.

The trainer packs tensors into its buffer, waits for the device, sends a pickled list of what lies where
and waits for every worker's answer before it packs again. The buffer is made once and kept over all
rounds; each worker gets a handle of its own (torch counts one opening for each export) and maps it once.
A tensor that does not fit goes in several pieces.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

import torch
import zmq

from tensorlease.protocol.errors import DeadlineError

from .peers import ALIGNMENT, LIMIT_S, PeerError, Tensors, device_of, export, synchronize

NAME = "lock-step"

Piece = tuple[str, int, int, int]
"""Of the tensor of this name, from this byte, so many bytes, which lie at this byte of the buffer."""


def pack(sizes: Mapping[str, int], nbytes: int) -> Iterator[list[Piece]]:
    """What goes into a buffer of `nbytes`, one time after the other; `sizes` are in bytes."""
    bucket: list[Piece] = []
    filled = 0
    for name, size in sizes.items():
        begin = 0
        while begin < size:
            if filled >= nbytes:
                yield bucket
                bucket, filled = [], 0
            count = min(size - begin, nbytes - filled)
            bucket.append((name, begin, count, filled))
            begin += count
            filled += -(-count // ALIGNMENT) * ALIGNMENT
    if bucket:
        yield bucket


class LockStepSender:
    """The trainer's side: binds a REQ socket for each worker."""

    def __init__(
        self, source: Tensors, nbytes: int, urls: Sequence[str], told: Sequence[Connection]
    ) -> None:
        self._device = device_of(source)
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._context = zmq.Context()
        self._told = told
        self._sockets = []
        for url in urls:
            socket = self._context.socket(zmq.REQ)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDTIMEO, round(LIMIT_S * 1000))
            socket.bind(url)
            self._sockets.append(socket)
            socket.send(bytes(ForkingPickler.dumps(export(self._buffer))))
        self._wait()
        flat = {name: tensor.view(-1).view(torch.uint8) for name, tensor in source.items()}
        self._buckets = [
            (
                bucket,
                [
                    (self._buffer[offset : offset + count], flat[name][begin : begin + count])
                    for name, begin, count, offset in bucket
                ],
            )
            for bucket in pack({name: tensor.nbytes for name, tensor in source.items()}, nbytes)
        ]

    def send(self) -> None:
        """One round."""
        for bucket, copies in self._buckets:
            for slot, part in copies:
                slot.copy_(part)
            synchronize(self._device)
            for socket in self._sockets:
                socket.send_pyobj(bucket)
            self._wait()

    def _wait(self) -> None:
        for socket, told in zip(self._sockets, self._told, strict=True):
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(told.fileno(), zmq.POLLIN)
            ready = dict(poller.poll(round(LIMIT_S * 1000)))
            if socket not in ready:
                if ready:
                    raise PeerError(f"{NAME}: a worker has ended, or failed")
                raise DeadlineError(f"{NAME}: a worker does not answer in {LIMIT_S:g} s")
            if words := socket.recv():
                raise PeerError(f"{NAME}: a worker failed:\n{words.decode()}")

    def close(self) -> None:
        """Gives back what it holds; torch frees the buffer when the workers have unmapped it."""
        for socket in self._sockets:
            socket.close()
        self._context.term()
        self._buckets.clear()
        del self._buffer


def serve(url: str, target: Tensors, told: Connection) -> None:
    """A worker's side: answers until there are words for it."""
    flat = {name: tensor.view(-1).view(torch.uint8) for name, tensor in target.items()}
    device = device_of(target)
    buffer: torch.Tensor | None = None

    def take(frame: bytes) -> None:
        nonlocal buffer
        if buffer is None:
            rebuild, args = pickle.loads(frame)
            buffer = rebuild(*args)
            return
        bucket: list[Piece] = pickle.loads(frame)
        for name, begin, count, offset in bucket:
            flat[name][begin : begin + count].copy_(buffer[offset : offset + count])
        synchronize(device)

    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(url)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(told.fileno(), zmq.POLLIN)
        told.send("ready")
        while ready := dict(poller.poll(round(LIMIT_S * 1000))):
            if socket not in ready:
                return
            words = b""
            try:
                take(socket.recv())
            except Exception:  # noqa: BLE001 - the trainer is told
                words = traceback.format_exc().encode()
            socket.send(words)
    raise DeadlineError(f"{NAME}: the trainer says nothing in {LIMIT_S:g} s")
