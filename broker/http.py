"""The broker's HTTP port: metrics, health and state, for reading alone.

Off unless `http` is set, and on the loopback alone. It has a thread of its own, which asks the
broker's loop for each answer: a loop that does not answer is not healthy, and is not waited for.

A connection is for one request, and has one limit for all of it, which no byte renews. Where as many
are open as may be, the oldest that has not said what it wants makes room: whoever keeps connections
open keeps nobody away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from ..protocol.errors import ConfigError

if TYPE_CHECKING:
    from .meter import Meter

log = logging.getLogger("tensorlease.broker")

ANSWER_S: Final = 2.0
"""How long the loop may take to answer."""
VISIT_S: Final = 10.0
"""How long a connection may be open, from its first moment to the last byte of its answer."""
MAX_CONNECTIONS: Final = 16

TEXT: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"


class Answer(NamedTuple):
    """What a page says."""

    status: int
    kind: str
    body: bytes


Page = Callable[[], Answer]
"""Makes an answer, in the thread of the loop."""


def parse_http(address: str) -> tuple[str, int]:
    """Returns host and port of `HOST:PORT`, or of a port alone; port 0 takes any that is free.

    Raises:
        ConfigError: It is none, or not on the loopback.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65_535 or (colon and not host):
        raise ConfigError(f"http {address!r}: must be HOST:PORT or PORT, 127.0.0.1:9400 say")
    try:
        loopback = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"http {address!r}: only the loopback is served, 127.0.0.1:{port} say: what is shown"
            " names processes, and nobody is asked who they are; let a proxy serve it further"
        )
    return host, int(port)


def load_meter(address: str) -> type[Meter]:
    """What counts for `/metrics`.

    Raises:
        ConfigError: Its library is not installed.
    """
    try:
        from .meter import Meter
    except ImportError as error:
        raise ConfigError(
            f"http = {address!r} needs prometheus-client: pip install 'tensorlease[broker]'"
        ) from error
    return Meter


class HttpPort:
    """Serves pages until it is closed.

    Args:
        address: See `parse_http`.
        pages: By path.
        loop: The broker's.

    Raises:
        ConfigError: The address is taken, or cannot be used.
    """

    def __init__(
        self, address: str, pages: Mapping[str, Page], loop: asyncio.AbstractEventLoop
    ) -> None:
        host, port = parse_http(address)
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise ConfigError(f"http {address!r}: {error.strerror}; take another port") from error
        self._server.pages, self._server.loop = pages, loop
        port = self._server.server_address[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends it; connections that are open are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Visit(Struct):
    """A connection that is open."""

    ends_at: float
    """On the monotonic clock."""
    has_asked: bool = False
    """The head of its request is there."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # With the 5 of its base, a burst of connections has the kernel drop others for a second or more.
    request_queue_size = 128
    pages: Mapping[str, Page]
    loop: asyncio.AbstractEventLoop

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        # The oldest first. With the lock: a connection that is in here has not been closed.
        self._visits: dict[socket.socket, _Visit] = {}
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def process_request(self, request: object, client_address: object) -> None:
        """As its base; where all places are taken, one is made free."""
        assert isinstance(request, socket.socket)
        with self._lock:
            if len(self._visits) >= MAX_CONNECTIONS:
                self._hang_up(min(self._visits, key=lambda each: self._visits[each].has_asked))
            self._visits[request] = _Visit(time.monotonic() + VISIT_S)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Ends, some times a second, the connections whose time is over."""
        now = time.monotonic()
        with self._lock:
            for request in [each for each, visit in self._visits.items() if visit.ends_at <= now]:
                self._hang_up(request)

    def shutdown_request(self, request: object) -> None:
        """As its base."""
        assert isinstance(request, socket.socket)
        with self._lock:
            self._visits.pop(request, None)
        super().shutdown_request(request)

    def note_asked(self, request: socket.socket) -> bool:
        """Takes in that a request's head is there; returns whether its connection is still open."""
        with self._lock:
            visit = self._visits.get(request)
            if visit is not None:
                visit.has_asked = True
            return visit is not None

    def _hang_up(self, request: socket.socket) -> None:
        """Has the thread of a connection find it ended. The lock must be held."""
        del self._visits[request]
        with contextlib.suppress(OSError):  # The other side has left.
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is nothing to log."""

    def answer(self, path: str) -> Answer:
        """Returns what the page says, made by the loop."""
        page = self.pages.get(path)
        if page is None:
            known = " ".join(self.pages)
            return Answer(404, TEXT, f"no {path[:100]}; there are {known}\n".encode())
        made: Future[Answer] = Future()

        def make() -> None:
            try:
                made.set_result(page())
            except Exception as error:  # noqa: BLE001 - told to who asked
                made.set_exception(error)

        try:
            self.loop.call_soon_threadsafe(make)
            return made.result(ANSWER_S)
        except TimeoutError:
            return Answer(
                503, TEXT, f"the broker's loop did not answer in {ANSWER_S:g} s\n".encode()
            )
        except RuntimeError:
            return Answer(503, TEXT, b"the broker has ended\n")
        except Exception:
            log.exception("page %s", path)
            return Answer(500, TEXT, b"a defect; see the broker's log\n")


class _Handler(BaseHTTPRequestHandler):
    server_version = "tensorlease"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answers with a page."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Answers with a page's head."""
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        assert isinstance(self.server, _Server)
        self.close_connection = True
        if not self.server.note_asked(self.connection):
            return  # The head may be cut off.
        answer = self.server.answer(self.path.partition("?")[0])
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        if body:
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Not every look at a page is a line."""
