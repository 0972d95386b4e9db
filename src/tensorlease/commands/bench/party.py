"""A trainer and workers made of bare sockets: they say what real agents say, and copy nothing.

All of them live in one thread, which reads their sockets one after the other: that takes less than
polling them, and the same for a broker and for the relay.
"""

from __future__ import annotations

import resource
import secrets
from types import TracebackType
from typing import Self

import msgspec
import zmq

from tensorlease.agents.process import this_host, this_process
from tensorlease.protocol import messages as m
from tensorlease.protocol.codec import decode_from_broker, encode
from tensorlease.protocol.errors import DeadlineError, RefusedError
from tensorlease.protocol.limits import PROTOCOL_VERSION
from tensorlease.protocol.records import Distribution, TakeNote, Terms

from .relay import Kind

LIMIT_MS = 60_000
CHANNEL = "bench"
DEVICE = "cpu:0"
SOFTWARE = "tensorlease bench"
SPOKEN = (PROTOCOL_VERSION, PROTOCOL_VERSION)


class Party:
    """One trainer and some workers, of a channel of their own.

    Args:
        url: The broker, or the relay.
        workers: How many workers, each a replica of its own.
        body: What the trainer hands over in each round.
    """

    def __init__(self, url: str, workers: int, body: bytes) -> None:
        raise_descriptors()
        self._url = url
        self._body = body
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, workers + 16)
        self._kind = msgspec.msgpack.Decoder(Kind)
        self._trainer = self._socket()
        self._workers = [self._socket() for _ in range(workers)]
        instance = secrets.token_hex(8)
        self._group = f"bench#{instance[:8]}"
        self._trainer_hello = encode(_trainer_hello(instance, self._group))
        self._call = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for socket in (self._trainer, *self._workers):
            socket.close(linger=0)
        self._context.term()

    def join(self) -> None:
        """All say Hello at once, and are welcomed.

        Raises:
            RefusedError: One of them is not welcome.
            DeadlineError: One gets no answer.
        """
        for number, socket in enumerate(self._workers):
            socket.send(encode(_worker_hello(secrets.token_hex(8), f"replica-{number}")))
        self._trainer.send(self._trainer_hello)
        for socket in (*self._workers, self._trainer):
            self._until(socket, "welcome")

    def round(self) -> None:
        """One whole round: all of them stage, and commit.

        Raises:
            RefusedError: Something else than that became of it.
            DeadlineError: It does not end.
        """
        self._call += 1
        call, group = self._call, self._group
        trainer, until = self._trainer, self._until
        trainer.send(encode(m.Open(1, call, Terms(call))))
        batch = m.Batch(1, call, 0, [1], False, len(self._body), 1)
        trainer.send_multipart([encode(batch), self._body])
        staged = encode(m.Staged(1, group, call, 0, 0, True))
        for socket in self._workers:
            until(socket, "prepare", "open")
            until(socket, "deliver", "batch")
            socket.send(staged)
        committed = encode(m.Committed(1, group, call, True))
        for socket in self._workers:
            until(socket, "commit")
            socket.send(committed)
        self.finished = until(trainer, "finished")

    def result(self) -> m.Finished:
        """What a broker said of the last round; a relay says nothing of it."""
        message = decode_from_broker(self.finished)
        assert isinstance(message, m.Finished)
        return message

    def _socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, LIMIT_MS)
        socket.setsockopt(zmq.SNDTIMEO, LIMIT_MS)
        socket.connect(self._url)
        return socket

    def _until(self, socket: zmq.Socket[bytes], *kinds: str) -> bytes:
        """The next envelope of one of these kinds."""
        while True:
            try:
                frame = socket.recv()
            except zmq.Again:
                text = f"{self._url}: no {kinds[0]!r} came in {LIMIT_MS / 1000:g} s"
                raise DeadlineError(text) from None
            while socket.get(zmq.RCVMORE):
                socket.recv()
            kind = self._kind.decode(frame).kind
            if kind in kinds:
                return frame
            if kind in _BAD:
                raise RefusedError(f"{self._url}: {decode_from_broker(frame)}", kind)


_BAD = frozenset({"refused", "open-refused", "abort", "expelled", "who-are-you", "stopping"})


def raise_descriptors() -> None:
    """Lets this process open as many files as it may: some hundred sockets need two each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _trainer_hello(instance: str, group: str) -> m.TrainerHello:
    return m.TrainerHello(
        session=1,
        protocol=SPOKEN,
        instance=instance,
        channel=CHANNEL,
        group=group,
        rank=0,
        world_size=1,
        distribution=Distribution.COLOCATED,
        host=this_host(),
        device=DEVICE,
        processes=[this_process()],
        locked=False,
        software=SOFTWARE,
        last_call=0,
        rounds=[],
    )


def _worker_hello(instance: str, replica: str) -> m.WorkerHello:
    return m.WorkerHello(
        session=1,
        protocol=SPOKEN,
        instance=instance,
        channel=CHANNEL,
        replica=replica,
        member=0,
        size=1,
        host=this_host(),
        device=DEVICE,
        processes=[this_process()],
        locked=False,
        software=SOFTWARE,
        version=0,
        torn=False,
        committed=None,
        round=None,
        out=[],
        mappings=[],
        take=TakeNote([], [], False, []),
    )
