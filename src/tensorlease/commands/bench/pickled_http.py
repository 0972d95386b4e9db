"""What engines are given today: pickled handles of all tensors in the body of one POST for each round.

Each tensor is exported anew for each round and each worker, because torch counts one opening for each
export: an export that two open is freed under one of them, and one that is opened again never. The
connection is kept. Who does not know the path, which is random, is not listened to: bodies are unpickled.
"""

from __future__ import annotations

import http.client
import pickle
import socketserver
import traceback
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

from .peers import LIMIT_S, PeerError, Take, Tensors, device_of, export, synchronize

NAME = "http-handles"
HOST = "127.0.0.1"


class HttpSender:
    """The trainer's side: a connection to each worker's port."""

    def __init__(self, source: Tensors, path: str, ports: Sequence[int]) -> None:
        self._source, self._path = source, path
        self._device = device_of(source)
        self._connections = [
            http.client.HTTPConnection(HOST, port, timeout=LIMIT_S) for port in ports
        ]

    def send(self) -> None:
        """One round: each worker copies while the next one's handles are made."""
        synchronize(self._device)
        for connection in self._connections:
            handles = [(name, export(tensor)) for name, tensor in self._source.items()]
            connection.request("POST", self._path, bytes(ForkingPickler.dumps(handles)))
        for connection in self._connections:
            response = connection.getresponse()
            words = response.read()
            if response.status != http.HTTPStatus.OK:
                raise PeerError(f"{NAME}: a worker answers {response.status}\n{words.decode()}")

    def close(self) -> None:
        """Closes the connections."""
        for connection in self._connections:
            connection.close()


def serve(path: str, take: Take, told: Connection) -> None:
    """A worker's side: says its port, and answers until there are words for it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = LIMIT_S
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            if self.path != path:
                self.close_connection = True
                self._answer(http.HTTPStatus.NOT_FOUND)
                return
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                load(body, take)
            except Exception:  # noqa: BLE001 - the trainer is told
                words = traceback.format_exc().encode()
                self._answer(http.HTTPStatus.INTERNAL_SERVER_ERROR, words)
            else:
                self._answer(http.HTTPStatus.OK)

        def _answer(self, status: http.HTTPStatus, words: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(words)))
            self.end_headers()
            self.wfile.write(words)

        def log_message(self, format: str, *args: object) -> None:
            pass

    # http.server's own class would look for the host's name.
    with socketserver.TCPServer((HOST, 0), Handler) as server:
        server.timeout = 0.1
        told.send(server.server_address[1])
        while not told.poll():
            server.handle_request()


def load(body: bytes, take: Take) -> None:
    """Rebuilds what a body's handles stand for, and copies it; nothing of it is mapped after that."""
    take([(name, rebuild(*args)) for name, (rebuild, args) in pickle.loads(body)])
