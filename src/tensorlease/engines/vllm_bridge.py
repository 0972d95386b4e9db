"""Leads a vLLM server through the rounds of a channel, as member 0 of its replica.

The server's workers, with the backend `tensorlease`, are the other members: they take the tensors.
This one takes none. It tells the server when an update begins and ends, holds its traffic in
between, and joins it again when it was restarted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from tensorlease.agents import RoundInfo, WorkerAgent
from tensorlease.protocol.errors import TensorleaseError

from .vllm_server import ServerError, VLLMServer

LOOK_S: Final = 1.0
"""Between two looks whether the server is there."""
CONTROL_S: Final = 60.0
"""How long the server may take for what moves no weights."""
MARGIN_S: Final = 10.0
"""By so much longer than its workers wait, the answer to an update is waited for."""

log = logging.getLogger("tensorlease.engines")


class VLLMBridge:
    """One server's leader.

    Args:
        server: The server; it must answer already.
        channel: The stream of versions.
        replica: The name that server and leader have there.
        endpoint: The broker's address.
        device: Label of the server's devices.
        update_s: How long an update may take, in seconds.
        pause: What becomes of requests meanwhile: "keep", "wait" or "abort"; see vLLM's `/pause`.

    Raises:
        ServerError: The server does not answer.
        TensorleaseError: The broker cannot be reached, or refuses.
    """

    def __init__(
        self,
        server: VLLMServer,
        channel: str,
        replica: str,
        *,
        endpoint: str = "",
        device: str = "cpu:0",
        update_s: float = 300.0,
        pause: str = "keep",
    ) -> None:
        self.server: Final = server
        self._update_s = update_s
        self._pause = pause
        size = 1 + server.world_size()
        self._init = {"channel": channel, "replica": replica, "size": size, "endpoint": endpoint}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tensorlease-update")
        # The call of `/update_weights` that is under way.
        self._update: Future[Any] | None = None
        # The server has no whole weights: its traffic is held until a round has repaired it.
        self.held = False
        self._ending = threading.Event()
        self.worker = WorkerAgent(
            channel, replica=replica, member=0, size=size, endpoint=endpoint, device=device
        )
        self.worker.on_prepare(self._prepare)
        self.worker.on_commit(self._commit)
        self.worker.on_abort(self._abort)
        self.worker.attend()

    def run(self) -> None:
        """Serves rounds until `stop`; in a thread beside it, looks whether the server is there."""
        looking = threading.Thread(target=self._look, name="tensorlease-look", daemon=True)
        looking.start()
        try:
            self.worker.run()
        finally:
            self._ending.set()
            looking.join(CONTROL_S)
            self._pool.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Has `run` return soon."""
        self._ending.set()
        self.worker.stop()

    def close(self) -> None:
        """Leaves the channel."""
        self.stop()
        self.worker.close()

    # ------------------------------------------------------------ hooks

    def _prepare(self, info: RoundInfo) -> None:
        server = self.server
        self._settle()
        server.post("/pause", None, CONTROL_S, mode=self._pause)
        try:
            server.post("/start_weight_update", None, CONTROL_S)
        except ServerError:
            self._resume()
            raise
        self.held = True
        update = {"version": info.version, "timeout": self._update_s}
        self._update = self._pool.submit(
            server.post, "/update_weights", {"update_info": update}, self._update_s + MARGIN_S
        )

    def _commit(self, info: RoundInfo) -> None:
        server, update = self.server, self._update
        assert update is not None
        update.result(self._update_s + MARGIN_S)
        self._update = None
        server.post("/finish_weight_update", {"weight_version": str(info.version)}, CONTROL_S)
        # What it has worked out for the beginnings of prompts is of the old weights.
        server.post("/reset_prefix_cache", None, CONTROL_S)
        self.held = False
        server.post("/resume", None, CONTROL_S)

    def _abort(self, info: RoundInfo, reason: str, torn: bool) -> None:
        self._settle()
        if self.held:
            log.error(
                "%s is held at half of version %d (%s) until a round commits",
                self.server.url,
                info.version,
                reason,
            )

    def _settle(self) -> None:
        """Waits for the answer to an update that nobody waited for."""
        update, self._update = self._update, None
        if update is not None:
            with contextlib.suppress(TensorleaseError):  # The round says why.
                update.result(self._update_s + MARGIN_S)

    def _resume(self) -> None:
        if not self.held:
            with contextlib.suppress(ServerError):
                self.server.post("/resume", None, CONTROL_S)

    # ------------------------------------------------------------ the server

    def _look(self) -> None:
        """Has the server's workers join the channel, whenever the server has come up anew."""
        joined = False
        while not self._ending.is_set():
            try:
                if not self.server.is_healthy():
                    if joined:
                        log.warning("%s does not answer any more", self.server.url)
                    joined = False
                elif not joined:
                    self.held = False  # A new process has what it was started with.
                    self.server.post(
                        "/init_weight_transfer_engine", {"init_info": self._init}, CONTROL_S
                    )
                    joined = True
                    log.info("%s has joined as %s", self.server.url, self._init["replica"])
            except TensorleaseError as error:
                log.warning("%s", error)
            self._ending.wait(LOOK_S)
