"""Leads a vLLM server through the rounds of a channel, as member 0 of its replica.

The server's workers, with the backend `tensorlease`, are the other members: they take the tensors.
This one takes none. It tells the server when an update begins and ends, and holds its traffic in
between. While the server is away the replica has no leader, and so is in no round.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from tensorlease.agents import RoundInfo, WorkerAgent
from tensorlease.protocol.errors import ClosedError, TensorleaseError

from .vllm_server import ServerError, VLLMServer

LOOK_S: Final = 1.0
"""Between two looks whether the server is there."""
SILENT_S: Final = 30.0
"""A server that takes connections and answers none for so long counts as gone."""
CONTROL_S: Final = 60.0
"""How long the server may take for what moves no weights."""
MARGIN_S: Final = 10.0
"""By so much longer than its workers wait, the answer to an update is waited for."""
END_S: Final = 5.0
"""How long the thread that looks is waited for."""

log = logging.getLogger("tensorlease.engines")


class VLLMBridge:
    """One server's leader.

    Args:
        server: The server; it may come later, and go and come again.
        channel: The stream of versions.
        replica: The name that server and leader have there.
        endpoint: The broker's address.
        device: Label of the server's devices.
        update_s: How long an update may take, in seconds.
        pause: What becomes of requests meanwhile: "keep", "wait" or "abort"; see vLLM's `/pause`.
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
        self.replica: Final = replica
        self._channel = channel
        self._endpoint = endpoint
        self._device = device
        self._update_s = update_s
        self._pause = pause
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tensorlease-update")
        # The call of `/update_weights` that is under way, until the round is decided.
        self._update: Future[Any] | None = None
        self._ending = threading.Event()
        # Guards the next.
        self._lock = threading.Lock()
        # The agent, while the server is there.
        self._worker: WorkerAgent | None = None

    def run(self) -> None:
        """Serves rounds, whenever the server is there, until `stop`.

        Raises:
            TensorleaseError: What ends the agent: no broker, a place that is taken.
        """
        looking = threading.Thread(target=self._look, name="tensorlease-look", daemon=True)
        looking.start()
        try:
            while self._await_server():
                with contextlib.suppress(ServerError):  # It has gone again; looks once more.
                    self._serve()
        finally:
            self._ending.set()
            looking.join(END_S)
            self._pool.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Has `run` return soon."""
        self._ending.set()
        with self._lock:
            if self._worker is not None:
                self._worker.stop()

    # ------------------------------------------------------------ the server comes and goes

    def _await_server(self) -> bool:
        """Waits for the server; False: it is to end."""
        said = False
        while not self._ending.is_set():
            if self.server.is_healthy():
                return True
            if not said:
                log.info("waits for %s", self.server.url)
                said = True
            self._ending.wait(LOOK_S)
        return False

    def _serve(self) -> None:
        """Leads the server until it goes, or `stop` is called."""
        try:
            size = 1 + self.server.world_size()
            init = {"channel": self._channel, "replica": self.replica, "size": size}
            init["endpoint"] = self._endpoint
            self.server.post("/init_weight_transfer_engine", {"init_info": init}, CONTROL_S)
        except ServerError as error:
            log.error("%s", error)
            self._ending.wait(LOOK_S)
            raise
        worker = WorkerAgent(
            self._channel,
            replica=self.replica,
            member=0,
            size=size,
            endpoint=self._endpoint,
            device=self._device,
        )
        with worker:
            worker.on_prepare(self._prepare)
            worker.on_commit(self._commit)
            worker.on_abort(self._abort)
            worker.attend()
            with self._lock:
                self._worker = worker
                if self._ending.is_set():
                    return
            log.info("%s has joined %s as %s", self.server.url, self._channel, self.replica)
            try:
                worker.run()
            except ClosedError:
                pass  # The server has gone.
            finally:
                with self._lock:
                    self._worker = None

    def _look(self) -> None:
        """Has the replica leave the channel when the server does not answer any more."""
        while not self._ending.wait(LOOK_S):
            if self._worker is not None and not self.server.is_healthy(SILENT_S):
                self._leave(f"{self.server.url} does not answer any more")

    def _leave(self, why: str) -> None:
        with self._lock:
            worker = self._worker
        if worker is not None and not self._ending.is_set():
            log.error("%s", why)
            worker.close(0.0)  # With more it would see the round at hand to its end.

    # ------------------------------------------------------------ hooks

    def _prepare(self, info: RoundInfo) -> None:
        server = self.server
        self._settle()
        paused = server.is_paused()
        server.post("/pause", None, CONTROL_S, mode=self._pause)
        try:
            self._start()
        except ServerError:
            if not paused:  # Else it was held before, for half of a version.
                server.post("/resume", None, CONTROL_S)
            raise
        update = {"version": info.version, "timeout": self._update_s}
        self._update = self._pool.submit(
            server.post, "/update_weights", {"update_info": update}, self._update_s + MARGIN_S
        )
        self._update.add_done_callback(self._answered)

    def _start(self) -> None:
        """Begins an update; one that failed may still be open, and has to be finished before."""
        try:
            self.server.post("/start_weight_update", None, CONTROL_S)
        except ServerError:
            with contextlib.suppress(ServerError):
                self.server.post("/finish_weight_update", None, CONTROL_S)
                self.server.post("/start_weight_update", None, CONTROL_S)
                return
            raise

    def _answered(self, update: Future[Any]) -> None:
        """Leaves a round that the server cannot finish: only a goodbye takes the vote back."""
        error = None if update.cancelled() else update.exception()
        if error is not None and self._update is update:
            self._leave(str(error))

    def _commit(self, info: RoundInfo) -> None:
        server = self.server
        update, self._update = self._update, None
        assert update is not None
        update.result(self._update_s + MARGIN_S)
        server.post("/finish_weight_update", {"weight_version": str(info.version)}, CONTROL_S)
        # What it has worked out for the beginnings of prompts is of the old weights.
        server.post("/reset_prefix_cache", None, CONTROL_S)
        server.post("/resume", None, CONTROL_S)

    def _abort(self, info: RoundInfo, reason: str, torn: bool) -> None:
        if self._update is not None:
            self._settle()
            log.error(
                "%s has half of version %d (%s): it answers no request until a round commits",
                self.server.url,
                info.version,
                reason,
            )

    def _settle(self) -> None:
        """Waits for the answer to an update whose round has failed."""
        update, self._update = self._update, None
        if update is not None:
            with contextlib.suppress(TensorleaseError):  # The round says why.
                update.result(self._update_s + MARGIN_S)
