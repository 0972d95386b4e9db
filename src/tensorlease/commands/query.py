"""Asks a broker something, outside any session."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import click
import msgspec
import zmq

from tensorlease.agents.discovery import find_broker
from tensorlease.broker.queries import Status
from tensorlease.protocol.codec import decode_from_broker, encode
from tensorlease.protocol.errors import DeadlineError, RefusedError
from tensorlease.protocol.messages import Query, Refused, Reply
from tensorlease.protocol.records import QueryKind

TIMEOUT_S = 5.0

Function = TypeVar("Function", bound=Callable[..., Any])


def broker_options(function: Function) -> Function:
    """The options of a command that asks a broker: `--endpoint`, `--job`, `--timeout`."""
    for option in (
        click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(min=0.0, min_open=True, max=3600.0),
            default=TIMEOUT_S,
            show_default=True,
            help="Seconds that an answer may take.",
        ),
        click.option("--job", default="", help="The job whose broker is meant."),
        click.option("--endpoint", default="", metavar="ADDRESS", help="The broker's address."),
    ):
        function = option(function)
    return function


class Asker:
    """Asks one broker again and again, over one connection. To be used in a `with` statement.

    Args:
        endpoint: The broker's address; empty looks for one where agents do.
        job: The job whose broker is meant, where no endpoint is given.
        timeout_s: How long an answer may take.
    """

    def __init__(self, endpoint: str = "", job: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self._endpoint, self._job, self._timeout_s = endpoint, job, timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._place = ""
        self._asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hang_up()
        self._context.term()

    def ask(self, kind: QueryKind, channel: str = "", version: int = 0) -> tuple[Reply, bytes]:
        """The broker's reply and its JSON body. After an error it connects anew.

        Args:
            kind: What is asked.
            channel: For a story.
            version: For a story.

        Raises:
            NoBrokerError: Nothing listens.
            RefusedError: This user may not ask.
            DeadlineError: The broker does not answer in time.
        """
        try:
            return self._ask(kind, channel, version)
        except BaseException:
            self._hang_up()
            raise

    def status(self) -> Status:
        """What the broker holds; raises what `ask` raises."""
        return msgspec.json.decode(self.ask(QueryKind.STATUS)[1], type=Status)

    def _ask(self, kind: QueryKind, channel: str, version: int) -> tuple[Reply, bytes]:
        deadline = time.monotonic() + self._timeout_s
        if self._socket is None:
            place = find_broker(self._endpoint, self._job)
            self._place = str(place)
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(place.url)
        self._asked += 1
        self._socket.send(encode(Query(self._asked, kind, channel, version)))
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._socket.poll(round(left_s * 1000) + 1):
                text = f"the broker at {self._place} did not answer in {self._timeout_s:g} s"
                raise DeadlineError(f"{text}; is it stopped? --timeout gives it longer")
            frames = self._socket.recv_multipart()
            message = decode_from_broker(frames[0])
            if isinstance(message, Refused):
                text = f"the broker at {self._place} refused: {message.text}"
                raise RefusedError(text, message.code.value)
            if isinstance(message, Reply) and message.id == self._asked:
                return message, frames[1] if len(frames) > 1 else b""

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def ask(
    kind: QueryKind,
    *,
    endpoint: str = "",
    job: str = "",
    channel: str = "",
    version: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> tuple[Reply, bytes]:
    """Asks once: see `Asker`."""
    with Asker(endpoint, job, timeout_s) as asker:
        return asker.ask(kind, channel, version)
