"""A server that answers on vLLM's control endpoints as vLLM 0.32 does, with members that are real.

Order, bodies, errors and the end of a session after a failed update are those of a real server,
as far as a bridge can see them. `fails` makes an endpoint answer 500, as an engine's defect does.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from tensorlease.agents import WorkerAgent
from tensorlease.engines.member import EngineMember, Tensors
from tensorlease.engines.vllm_bridge import VLLMBridge

MODES = ("abort", "wait", "keep")
BY_WORKERS = ("/start_weight_update", "/update_weights", "/finish_weight_update")


class Refused(Exception):
    """An answer that is no 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Gate:
    """Where a server waits before it does something."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.go = threading.Event()


def _wait_at(gates: dict[str, Gate], path: str) -> None:
    if (gate := gates.pop(path, None)) is not None:
        gate.came.set()
        gate.go.wait(30.0)


class FakeVLLM:
    """One server of `world_size` workers; it listens from `start` to `die`."""

    leader: VLLMBridge
    """Who leads it, if a test has set it."""

    def __init__(self, world_size: int = 1, devices: Sequence[str] = ()) -> None:
        """`devices`: labels of the workers' devices; default: that of a CPU for all."""
        self.world_size = world_size
        self._devices = list(devices) or ["cpu:0"] * world_size
        self.port = 0
        self.members: list[EngineMember] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.calls: list[str] = []
        # What an endpoint answers once, instead of doing it.
        self.fails: dict[str, str] = {}
        # Endpoints that answer as if they had done it.
        self.lies: set[str] = set()
        self._gates: dict[str, Gate] = {}
        self._late: dict[str, Gate] = {}
        # The endpoints that have answered.
        self.answered: list[str] = []
        # Those that were asked for but for the end, by who has changed their mind.
        self.dropped: list[str] = []
        # Addresses that it was asked from.
        self.askers: list[tuple[str, int]] = []
        # What it says of how it was started; None: it is one that does not.
        self.info: dict[str, Any] | None = None
        # What an endpoint answers each time: status and text.
        self.always: dict[str, tuple[int, str]] = {}
        # What a worker raises, once, when it is to load something.
        self.load_fails = ""
        # What a worker raises, once, before anything of a round is written.
        self.prepare_fails = ""
        # Set when something was loaded in the update at hand.
        self.loading = threading.Event()
        self._core = threading.Lock()
        self._begin_anew()
        self._server: ThreadingHTTPServer | None = None

    def _begin_anew(self) -> None:
        self.label = "default"
        self.paused = False
        # Requests under way, which keep what was worked out for them.
        self.running = False
        self.keeps_prompts = False
        self.active = False
        # What sleeps: "weights", "kv_cache".
        self.sleeping: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listens: at the same port as before, if it did."""
        self._begin_anew()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            # Connections are kept.
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                fake._serve(self)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        server.daemon_threads = True
        self._server, self.port = server, server.server_port
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def hold(self, path: str) -> Gate:
        """Has an endpoint wait, once, before it does what it is asked to."""
        gate = self._gates[path] = Gate()
        return gate

    def hold_answer(self, path: str) -> Gate:
        """Has an endpoint wait, once, when it has done what it is asked to."""
        gate = self._late[path] = Gate()
        return gate

    def let_go(self) -> None:
        """Has no endpoint wait any more."""
        for gates in (self._gates, self._late):
            for path in list(gates):
                gates.pop(path).go.set()

    def die(self) -> None:
        """Answers nothing any more, and its workers leave as if they were gone. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        self._end_members()

    def _end_members(self) -> None:
        members, self.members = self.members, []
        for member in members:
            member.worker.close(0.0)
            member.close()

    # ------------------------------------------------------------ answers

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        if self._server is None:
            request.close_connection = True  # It has died.
            return
        parts = urlsplit(request.path)
        length = int(request.headers.get("Content-Length", 0))
        content = request.rfile.read(length)
        if len(content) < length:
            request.close_connection = True
            self.dropped.append(parts.path)
            return
        body = json.loads(content) if length else {}
        query = {key: ",".join(values) for key, values in parse_qs(parts.query).items()}
        if request.command == "POST":
            shown = request.path if parts.path in ("/sleep", "/wake_up") else parts.path
            self.calls.append(shown)
            self.askers.append(request.client_address)
        try:
            _wait_at(self._gates, parts.path)
            if parts.path in self.always:
                raise Refused(*self.always[parts.path])
            for path in (request.path, parts.path):
                if path in self.fails:
                    raise Refused(500, self.fails.pop(path))
            with self._turn(parts.path):
                done = None if parts.path in self.lies else self._answer(parts.path, query, body)
            status, answer = 200, done
        except Refused as refused:
            error = {"message": str(refused), "type": "error", "param": None}
            status, answer = refused.status, {"error": {**error, "code": refused.status}}
        except Exception as error:  # noqa: BLE001
            text = f"Worker failed with error '{error}', please check the stack trace"
            status, answer = 500, {"error": {"message": text, "type": "InternalServerError"}}
        if status == 500:
            request.close_connection = True  # As uvicorn does, without a word of it.
        _wait_at(self._late, parts.path)
        self.answered.append(parts.path)
        content = b"" if answer is None else json.dumps(answer).encode()
        if self._server is None:
            request.close_connection = True  # It has died meanwhile.
            return
        with suppress(ConnectionError):  # Who asked has given up.
            request.send_response(status)
            request.send_header("Content-Length", str(len(content)))
            request.end_headers()
            request.wfile.write(content)

    def _turn(self, path: str) -> AbstractContextManager[object]:
        """What workers are to do, an engine has them do one after the other."""
        return self._core if path in BY_WORKERS else nullcontext()

    def _answer(self, path: str, query: dict[str, str], body: dict[str, Any]) -> Any:
        match path:
            case "/health":
                return None
            case "/get_world_size":
                return {"world_size": self.world_size}
            case "/server_info" if self.info is not None:
                return self.info
            case "/is_paused":
                return {"is_paused": self.paused}
            case "/pause":
                if query.get("mode", "abort") not in MODES:
                    raise Refused(400, f"mode {query['mode']}")
                self.paused = True
                return {"status": "paused"}
            case "/sleep":
                if query.get("mode", "abort") not in MODES:
                    raise Refused(400, f"mode {query['mode']}")
                self.paused = True
                if int(query.get("level", "1")) and "weights" not in self.sleeping:
                    self.sleeping = {"weights", "kv_cache"}
                return {"status": "sleeping", "level": int(query.get("level", "1"))}
            case "/wake_up":
                return self._wake(query.get("tags", ""))
            case "/resume":
                self.paused = False
                return {"status": "resumed"}
            case "/init_weight_transfer_engine":
                self._init(**body["init_info"])
                return {"message": "Weight transfer initialized"}
            case "/start_weight_update":
                if self.active:
                    raise Refused(500, "start_weight_update called while one is already active.")
                self.active = True
                self.loading.clear()
                for member in self.members:
                    member.begin(copied=False)
                return {"message": "Weight update started"}
            case "/update_weights":
                self._update(**body["update_info"])
                return {"message": "Weights updated"}
            case "/finish_weight_update":
                if not self.active:
                    raise Refused(500, "finish_weight_update called without a matching start.")
                self.active = False
                self.label = body.get("weight_version") or self.label
                return {"message": "Weight update finished"}
            case "/reset_prefix_cache":
                if query.get("reset_running_requests") == "true":
                    self.running = False
                return {"success": not (self.running or self.keeps_prompts)}
            case _:
                raise Refused(404, "Not Found")

    def _init(self, channel: str, replica: str, size: int, endpoint: str) -> None:
        for member in self.members:
            member.require_idle()
        self._end_members()
        self.weights = [{} for _ in range(self.world_size)]
        for place, weights in enumerate(self.weights):
            worker = WorkerAgent(
                channel,
                replica=replica,
                member=1 + place,
                size=size,
                endpoint=endpoint,
                device=self._devices[place],
            )
            self.members.append(EngineMember(worker, lambda t, w=weights: self._load(t, w)))  # type: ignore[misc]
            worker.on_prepare(lambda _: self._prepare())

    def _wake(self, given: str) -> dict[str, Any]:
        """As vLLM's executor: of tags, one of which is awake, it wakes none, and says so in its log."""
        tags = [tag for tag in given.split(",") if tag and tag != "scheduling"]
        if not given:
            self.sleeping.clear()
        elif self.sleeping.issuperset(tags):
            self.sleeping.difference_update(tags)
        if not self.sleeping:
            self.paused = False
        return {"status": "sleeping" if self.sleeping else "awake", "tags": given.split(",")}

    def _update(self, version: int, timeout: float) -> None:
        if not self.active:
            raise Refused(500, "start_weight_update must be called before update_weights.")
        if "weights" in self.sleeping:
            raise Refused(500, "a real engine core would end here: its weights are asleep")
        with ThreadPoolExecutor(self.world_size) as pool:
            done = [pool.submit(member.receive, version, timeout) for member in self.members]
        for each in done:
            if each.exception() is not None:
                self.active = False
                raise each.exception()  # type: ignore[misc]

    def _prepare(self) -> None:
        if self.prepare_fails:
            text, self.prepare_fails = self.prepare_fails, ""
            raise RuntimeError(text)

    def _load(self, tensors: Tensors, weights: dict[str, torch.Tensor]) -> None:
        if self.load_fails:
            text, self.load_fails = self.load_fails, ""
            raise RuntimeError(text)
        weights.update((name, tensor.clone()) for name, tensor in tensors)
        self.loading.set()
