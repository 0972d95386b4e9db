"""A vLLM server as its control endpoints show it: what a client may ask of it, with a deadline."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol
from urllib.parse import urlencode, urlsplit

from tensorlease.protocol.errors import ConfigError, TensorleaseError

MOST_SHOWN: Final = 200
"""Characters of an answer that an error shows."""
OTHERS: Final = ("/health", "/v1/")
"""What a server has without `VLLM_SERVER_DEV_MODE`, too."""
CONNECT_S: Final = 1.0
"""For what need not be there yet."""
IDLE_S: Final = 1.0
"""For so long a connection may lie idle and be used again; vLLM closes it after 5 s."""
AT_ONCE_S: Final = 0.5
"""Who closes a connection in that time after a request has not begun with what takes long."""
CLOSED: Final = (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected)
"""What that looks like."""
LOCAL: Final = ("127.0.0.1", "localhost", "::1")
"""Hosts that are this one."""


class ServerError(TensorleaseError):
    """A vLLM server did not do what it was asked to; names it, the endpoint, and the answer.

    Attributes:
        refused: It has said no. Else it may have done, or still do, what it was asked to.
        absent: Nothing listens at its address.
        closed: It has closed the connection at once, and has said nothing.
        answer: All that it has said, of which the message shows the beginning.
    """

    def __init__(
        self,
        text: str,
        *,
        refused: bool = False,
        absent: bool = False,
        closed: bool = False,
        answer: str = "",
    ) -> None:
        super().__init__(text)
        self.answer = answer
        self.refused = refused
        self.absent = absent
        self.closed = closed


class ControlledServer(Protocol):
    """What a leader asks of a server; `VLLMServer` says what each does."""

    @property
    def url(self) -> str:
        """Its address, or what it is called."""
        ...

    @property
    def address(self) -> str:
        """Where it listens, however its URL is written; empty: not known."""
        ...

    def ails(self, timeout: float = ...) -> str:
        """Returns why it cannot be used; empty: it answers."""
        ...

    def world_size(self, timeout: float = ...) -> int:
        """Returns how many workers it has."""
        ...

    def is_paused(self, timeout: float = ...) -> bool:
        """Whether it holds its requests."""
        ...

    def cannot_sleep(self, timeout: float = ...) -> bool:
        """Whether it says that it was started without sleep mode."""
        ...

    def post(
        self, path: str, body: dict[str, Any] | None, timeout: float, **query: str | list[str]
    ) -> Any:
        """Has it do what the endpoint does; raises `ServerError` where it does not."""


class VLLMServer:
    """One server, started with `VLLM_SERVER_DEV_MODE=1`.

    Args:
        url: Its address, `http://127.0.0.1:8000` say.

    Raises:
        ConfigError: That is no address of one.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"a server's URL, {url!r}: {error}") from None
        if parts.scheme != "http" or not host:
            raise ConfigError(f"a server's URL, {url!r}: must be like http://127.0.0.1:8000")
        if parts.path.strip("/") or parts.query or parts.fragment:
            raise ConfigError(
                f"a server's URL, {url!r}: give its address alone, http://{parts.netloc}"
            )
        self.url: Final = f"http://{parts.netloc}"
        self.address: Final = name_of(self.url)
        """`127.0.0.1:8000`: what it is called in its channel, however its URL is written."""
        self.host: Final = host
        self.port: Final = port or 80
        self._lock = threading.Lock()
        # A connection that has been answered on, if there is one, and when.
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        weakref.finalize(self, _close, self._idle)

    def ails(self, timeout: float = 5.0) -> str:
        """Returns why it cannot be used; empty: it answers that it can."""
        try:
            self._ask("GET", "/health", None, timeout)
        except ServerError as error:
            if not error.refused:
                return f"{self.url} does not answer: {str(error).removeprefix(self.url)}"
            return f"{error} (is it a vLLM server, and has its engine ended?)"
        return ""

    def world_size(self, timeout: float = 10.0) -> int:
        """Returns how many workers it has, those of all data-parallel ranks."""
        return int(self._get("/get_world_size?include_dp=true", "world_size", timeout, 1))

    def is_paused(self, timeout: float = 10.0) -> bool:
        """Whether it holds its requests."""
        return bool(self._get("/is_paused", "is_paused", timeout))

    def cannot_sleep(self, timeout: float = 60.0) -> bool:
        """Whether it says that it was started without `--enable-sleep-mode`; older ones do not."""
        try:
            found = self.get("/server_info?config_format=json", timeout)
            return found["vllm_config"]["model_config"]["enable_sleep_mode"] is False
        except (ServerError, KeyError, TypeError):
            return False

    def post(
        self, path: str, body: dict[str, Any] | None, timeout: float, **query: str | list[str]
    ) -> Any:
        """Returns the answer's JSON.

        Args:
            path: The endpoint.
            body: JSON that it is given, if any.
            timeout: Limit in seconds.
            query: Its parameters; of several values in a list.

        Raises:
            ServerError: It cannot be reached, does not answer in time, or refuses.
        """
        return self._ask(
            "POST", f"{path}?{urlencode(query, doseq=True)}" if query else path, body, timeout
        )

    def ahead(self, path: str, body: dict[str, Any]) -> Ahead:
        """Sends a request but for its last byte, so that the server has little left to do then."""
        return Ahead(self, path, body)

    def get(self, path: str, timeout: float) -> Any:
        """Returns the answer's JSON; raises `ServerError` as `post` does."""
        return self._ask("GET", path, None, timeout)

    def _take(self, timeout: float) -> http.client.HTTPConnection:
        """Returns a connection that was used just now, if there is one, or a new one."""
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        if idle is not None:
            connection, since = idle
            # One that the server has closed can be read.
            if time.monotonic() - since < IDLE_S and not _can_be_read(connection.sock):
                connection.sock.settimeout(timeout)
                return connection
            connection.close()
        return self._new(timeout)

    def _new(self, timeout: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def _put_back(self, connection: http.client.HTTPConnection, over: threading.Event) -> None:
        """Keeps a connection for a moment, unless the server closes it, or another is kept."""
        with self._lock:
            if not self._idle and connection.sock is not None and not over.is_set():
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    def _get(self, path: str, name: str, timeout: float, least: int = 0) -> int:
        answer = self.get(path, timeout)
        value = answer.get(name) if isinstance(answer, dict) else None
        if not isinstance(value, int) or value < least:
            raise ServerError(f"{self.url}{path} answered {answer!r:.80}: is it a vLLM server?")
        return value

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        connection = self._take(timeout)
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"} if content is not None else {}

        def ask() -> None:
            connection.request(method, path, content, headers)

        kept = connection.sock is not None
        try:
            return self._answer(connection, path, ask, timeout)
        except ServerError as error:
            # A server may close what lies idle just when it is used again: it was asked for nothing.
            if not (kept and error.closed):
                raise
        connection = self._new(timeout)
        return self._answer(connection, path, ask, timeout)

    def _answer(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        ask: Callable[[], None],
        timeout: float,
    ) -> Any:
        """Sends a request by `ask`, and returns the answer's JSON; raises as `post` does."""
        # The connection's own limit is for each of its steps.
        over = threading.Event()
        sockets: list[socket.socket] = []
        began = time.monotonic()
        limit = threading.Timer(timeout, _cut, (sockets, over))
        limit.daemon = True
        limit.start()
        try:
            if connection.sock is None:
                connection.connect()
            assert connection.sock is not None
            # The connection forgets it where the server is to close it.
            sockets.append(connection.sock)
            if over.is_set():
                raise TimeoutError
            ask()
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
            if over.is_set():  # It was cut off: perhaps not all of it.
                raise TimeoutError
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if isinstance(error, TimeoutError) or over.is_set():
                said = f"has not answered in {timeout:g} s"
            else:
                said = f"cannot be reached ({str(error) or type(error).__name__})"
            absent = isinstance(error, ConnectionRefusedError)
            closed = isinstance(error, CLOSED) and time.monotonic() - began < AT_ONCE_S
            raise ServerError(f"{self.url}{path} {said}", absent=absent, closed=closed) from None
        finally:
            limit.cancel()
        self._put_back(connection, over)
        if answer.status != http.HTTPStatus.OK:
            said = _message(text)
            if said.lstrip().startswith("<"):
                said = "a page of HTML"
            shown = " ".join(said.split())[:MOST_SHOWN]
            if answer.status == http.HTTPStatus.NOT_FOUND and not path.startswith(OTHERS):
                shown = f"{shown}: start the server with VLLM_SERVER_DEV_MODE=1"
            raise ServerError(
                f"{self.url}{path} answered {answer.status}: {shown}",
                refused=True,
                answer=said,
            )
        try:
            return json.loads(text) if text else None
        except (ValueError, RecursionError):
            raise ServerError(f"{self.url}{path} answered no JSON: {text[:MOST_SHOWN]}") from None


class Ahead:
    """A request that the server has all but the last byte of.

    Args:
        server: The server.
        path: The endpoint.
        body: JSON that it is given.
    """

    def __init__(self, server: VLLMServer, path: str, body: dict[str, Any]) -> None:
        self._server = server
        self._path = path
        self._body = body
        content = json.dumps(body).encode()
        self._last = content[-1:]
        self._sent = False
        self._connection = http.client.HTTPConnection(server.host, server.port, timeout=CONNECT_S)
        try:
            self._connection.putrequest("POST", path)
            self._connection.putheader("Content-Type", "application/json")
            self._connection.putheader("Content-Length", str(len(content)))
            self._connection.endheaders(content[:-1])
        except (OSError, http.client.HTTPException):
            self._connection.close()  # `answer` says why.

    def send(self) -> None:
        """Has the server do it; once."""
        sock = self._connection.sock
        # If it was closed, or refused, before it was asked for anything, `answer` asks anew.
        if sock is not None and not _can_be_read(sock):
            with contextlib.suppress(OSError):
                sock.sendall(self._last)
                self._sent = True

    def answer(self, timeout: float) -> Any:
        """Returns, and raises, as `VLLMServer.post` does; after `send`.

        Args:
            timeout: Limit in seconds, from now on.
        """
        connection = self._connection
        if not self._sent:
            connection.close()
            return self._server.post(self._path, self._body, timeout)
        connection.sock.settimeout(timeout)
        return self._server._answer(connection, self._path, lambda: None, timeout)

    def drop(self) -> None:
        """The server is to do nothing."""
        if self._connection.sock is not None:
            # A process that was forked meanwhile has it open, too.
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def name_of(url: str) -> str:
    """Returns what a server is called in its channel: the same for each way to write its URL."""
    if not url.startswith("http://"):
        return url
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname in LOCAL else parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or 80}"


def _close(idle: list[tuple[http.client.HTTPConnection, float]]) -> None:
    for connection, _ in idle:
        connection.close()


def _can_be_read(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _cut(sockets: list[socket.socket], over: threading.Event) -> None:
    over.set()
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _message(text: str) -> str:
    """Returns what vLLM says is wrong; else all that it says."""
    try:
        answer = json.loads(text)
        return str(answer["detail"] if "detail" in answer else answer["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return text
