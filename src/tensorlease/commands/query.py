"""Asks a broker something, outside any session."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import click
import msgspec
import zmq

from tensorlease.agents.discovery import NotFoundError, find_broker, one_line
from tensorlease.broker.queries import Status
from tensorlease.protocol.codec import decode_from_broker, encode
from tensorlease.protocol.endpoint import Endpoint
from tensorlease.protocol.errors import DeadlineError, NoBrokerError, RefusedError
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


class NowhereError(NoBrokerError):
    """A command finds no broker.

    Attributes:
        where: Where it looked, and why there is none, in one line.
        way_out: What to do, in one line.
    """

    def __init__(self, where: str, way_out: str) -> None:
        super().__init__(f"{where}; {way_out}")
        self.where = where
        self.way_out = way_out


def find(endpoint: str, job: str) -> Endpoint:
    """As `find_broker`, with the way out for a command: it asks, or works with, others' broker.

    Raises:
        NowhereError: Nothing listens.
        EndpointError: An address that cannot work.
    """
    try:
        return find_broker(endpoint, job)
    except NotFoundError as error:
        elsewhere = "if one runs elsewhere, name it by --endpoint ADDRESS (the first line of its log has it)"
        if error.variable:
            elsewhere += f", or unset {error.variable} to look in the usual places"
        start = error.start and f"else start one by `{error.start}`"
        ways = (error.denied, elsewhere, start)
        raise NowhereError(one_line(error.where), "; ".join(way for way in ways if way)) from error


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
            NowhereError: Nothing listens.
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
            place = find(self._endpoint, self._job)
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
