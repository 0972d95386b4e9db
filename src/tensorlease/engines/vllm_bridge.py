"""Leads a vLLM server through the rounds of a channel, as member 0 of its replica.

The server's workers, with the backend `tensorlease`, are the other members: they take the tensors.
This one takes none. It tells the server when an update begins and ends, and holds its traffic in
between. While the server is away the replica has no leader, and so is in no round.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from typing import Any, ClassVar, Final

from tensorlease.agents import RoundInfo, WorkerAgent
from tensorlease.agents.loading import UNTOUCHED
from tensorlease.protocol.errors import ClosedError, NoBrokerError, RefusedError, TensorleaseError
from tensorlease.protocol.records import Code

from .leadership import leading
from .member import UpdateError
from .rarely import Rarely
from .vllm_hold import Hold
from .vllm_plugin import BACKEND
from .vllm_server import Ahead, ControlledServer, ServerError, VLLMServer

LOOK_S: Final = 1.0
"""Between two looks whether the server is there."""
SILENT_S: Final = 30.0
"""A server that takes connections and answers none for so long counts as gone."""
CONTROL_S: Final = 60.0
"""How long the server may take for what moves no weights."""
SLEEP_S: Final = 180.0
"""How long a step of sleeping and waking may take: all weights go to the host, and come back."""
MARGIN_S: Final = 10.0
"""By so much longer than its workers wait, the answer to an update is waited for."""
HEARD_S: Final = 0.5
"""By so much later than from its server a leader may hear that a round has failed."""
END_S: Final = 5.0
"""How long the thread that looks is waited for."""

OTHER_BACKEND: Final = ("unexpected keyword argument", "Weight transfer not configured")
"""What vLLM says of an init that is for another backend."""
MOST_SHOWN: Final = 160
"""Characters of that which an error shows."""

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
        recorded: Whether its workers record what the model's loader does, and copy from then on.
        sleep: Whether it sleeps during an update, with its weights awake; see `Hold`.
    """

    def __init__(
        self,
        server: ControlledServer,
        channel: str,
        replica: str,
        *,
        endpoint: str = "",
        device: str = "cpu:0",
        update_s: float = 300.0,
        pause: str = "keep",
        recorded: bool = True,
        sleep: bool = False,
    ) -> None:
        self.server: Final = server
        self.replica: Final = replica
        self.away = ""
        """Why the server is not led, while it does not answer, or refuses."""
        self._channel = channel
        self._endpoint = endpoint
        self._device = device
        self._update_s = update_s
        self.hold: Final = Hold(server, pause, sleep, lambda: SLEEP_S if sleep else CONTROL_S)
        self._recorded = recorded
        self._sleep = sleep
        self._workers = 0
        self._said, self._waits = Rarely(), Rarely()
        # What becomes of the call of `/update_weights`, until the round is decided.
        self._update: Future[None] | None = None
        # The request that ends it, but for its last byte.
        self._finish: Ahead | None = None
        # The server has half of a version, or may have: it must not answer requests.
        self._half = False
        # Whether it had before the update at hand.
        self._had_half = False
        # Its workers may have recorded a load: then they copy as soon as an update has begun.
        self._may_copy = False
        # When it was told to hold requests, and to begin the update at hand.
        self._held_at = self._begun_at = 0.0
        self._ending = threading.Event()
        # Guards the next.
        self._lock = threading.Lock()
        # The agent, while the server is there.
        self._worker: WorkerAgent | None = None

    _leaves_parts: ClassVar[bool] = False
    """Whether what the server's layers have kept of an update that failed is loaded with the next."""

    @property
    def leads(self) -> bool:
        """Whether it has joined the channel for the server."""
        worker = self._worker
        return worker is not None and not worker.closed

    def run(self) -> None:
        """Serves rounds, whenever the server is there, until `stop`.

        Raises:
            ConfigError: Another leads the server.
            TensorleaseError: What ends the agent: no broker, a place that is taken.
        """
        with leading(self.server.address, self._ending):
            self._run()

    def _run(self) -> None:
        looking = threading.Thread(target=self._look, name="tensorlease-look", daemon=True)
        looking.start()
        joined = False
        try:
            while self._await_server():
                try:
                    self._serve()
                    joined = True
                except ServerError as error:  # It has gone again, or is none.
                    self.away = str(error)
                    if self._said.due(self.away):
                        log.error("%s", error)
                    self._ending.wait(LOOK_S)
                except NoBrokerError as error:
                    if not joined:
                        raise
                    if self._said.due(str(error)):
                        log.error("%s", error)
                    self._ending.wait(LOOK_S)
        finally:
            self._ending.set()
            looking.join(END_S)

    def stop(self) -> None:
        """Has `run` return soon."""
        self._ending.set()
        with self._lock:
            if self._worker is not None:
                self._worker.stop()

    # ------------------------------------------------------------ the server comes and goes

    def _await_server(self) -> bool:
        """Waits for the server; False: it is to end."""
        while not self._ending.is_set():
            if not (ails := self.server.ails()):
                return True
            self.away = ails
            if self._waits.due(ails):
                log.warning("waits: %s", ails)
            self._ending.wait(LOOK_S)
        return False

    def _serve(self) -> None:
        """Leads the server until it goes, or `stop` is called."""
        self._workers = self.server.world_size()
        size = 1 + self._workers
        init = {"channel": self._channel, "replica": self.replica, "size": size}
        init["endpoint"] = self._endpoint
        if not self._recorded:
            init["recorded"] = False
        self._post_init(init, BACKEND, "ipc")
        self._may_copy = False
        if self._sleep and self.server.cannot_sleep():
            log.warning(
                "%s was started without --enable-sleep-mode: its memory stays where it is in updates",
                self.server.url,
            )
        worker = WorkerAgent(
            self._channel,
            replica=self.replica,
            member=0,
            size=size,
            endpoint=self._endpoint,
            device=self._device,
        )
        self._lead(worker, worker.attend)

    def _post_init(self, init: dict[str, Any], backend: str, other: str) -> None:
        """Has the server's workers begin with weight transfer.

        Args:
            init: What its backend is told.
            backend: Which that must be.
            other: The mode of a bridge for the other one.
        """
        try:
            self.server.post("/init_weight_transfer_engine", {"init_info": init}, CONTROL_S)
        except ServerError as error:
            if not any(text in error.answer for text in OTHER_BACKEND):
                raise
            raise ServerError(
                f"{self.server.url} has another weight-transfer backend than {backend!r}: start it with"
                f' --weight-transfer-config \'{{"backend": "{backend}"}}\', or lead it by'
                f" `tensorlease bridge vllm --mode {other}` if it has that one's"
                f" ({error.answer[:MOST_SHOWN]})",
                refused=True,
                answer=error.answer,
            ) from None

    def _lead(self, worker: WorkerAgent, join: Callable[[], None]) -> None:
        """Has member 0 join and serve, until the server goes, or `stop` is called."""
        # Another leader may have held it, for half of a version.
        self._half = self.server.is_paused()
        with worker:
            worker.on_prepare(self._prepare)
            worker.on_commit(self._commit)
            worker.on_abort(self._abort)
            try:
                join()
            except RefusedError as error:
                if error.code != Code.PLACE_TAKEN.value:
                    raise
                who = str(error).partition(";")[0]
                text = f"{self.server.url} is led by another, or its name is taken: {who}; end that one"
                raise RefusedError(text, error.code) from None
            with self._lock:
                self._worker = worker
                self.away = ""
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
                # A server that is to end waits until what it has half of was asked for, or dropped.
                self._drop_finish()

    def _look(self) -> None:
        """Has the replica leave the channel when the server does not answer any more."""
        while not self._ending.wait(LOOK_S):
            if self._worker is not None and (ails := self.server.ails(SILENT_S)):
                self._leave(ails)

    def _leave(self, why: str) -> None:
        with self._lock:
            worker = self._worker
        if worker is not None and not self._ending.is_set():
            log.error("%s", why)
            worker.close(0.0)  # With more it would see the round at hand to its end.

    # ------------------------------------------------------------ hooks

    def _prepare(self, info: RoundInfo) -> None:
        self._settle()
        self._begin()
        self._may_copy = self._recorded
        self._update = update = Future[None]()
        sending = threading.Thread(
            target=self._send, args=(update, info.version), name="tensorlease-update", daemon=True
        )
        sending.start()
        # Of a round of some tensors, workers that want none vote before they are at it.
        if isinstance(self.server, VLLMServer) and not info.subset:
            body = {"weight_version": str(info.version)}
            self._finish = self.server.ahead("/finish_weight_update", body)

    def _begin(self) -> None:
        """Pauses the server and begins an update; undone if the round has failed meanwhile."""
        half = self._half
        self._held_at = time.monotonic()
        try:
            self.hold.begin()
            self._require_round()
            self._start()
            try:
                self._require_round()
            except UpdateError:
                # Nothing was loaded: what there was, whole or not, is put back. What workers have
                # copied by now is not.
                self.server.post("/finish_weight_update", None, CONTROL_S)
                if not self._may_copy:
                    self._half = half
                raise
        except TensorleaseError:
            if not self._half:
                with contextlib.suppress(ServerError):  # The next round tries again.
                    self.hold.undo()
            raise

    def _require_round(self) -> None:
        """Raises if the round has failed meanwhile: the server's workers would wait for nothing."""
        if self._worker is None or not self._worker.goes_on:
            raise UpdateError(f"the round failed before {self.server.url} had begun with it")

    def _start(self) -> None:
        """Begins an update; one that failed may still be open, and has to be finished before."""
        half, self._half = self._half, True
        self._had_half = half
        self._begun_at = time.monotonic()
        try:
            self.server.post("/start_weight_update", None, CONTROL_S)
            if half and self._leaves_parts:
                # What layers have kept of the update that failed must not be mixed with this one's.
                self.server.post("/finish_weight_update", None, CONTROL_S)
                self.server.post("/start_weight_update", None, CONTROL_S)
        except ServerError as error:
            try:
                self.server.post("/finish_weight_update", None, CONTROL_S)
            except ServerError as second:
                # None was open, and none has begun; but of several workers some may have, and copy.
                if error.refused and second.refused and not (self._may_copy and self._workers > 1):
                    self._half = half
                raise error from None
            self.server.post("/start_weight_update", None, CONTROL_S)

    def _send(self, update: Future[None], version: int) -> None:
        """Has the server's workers take the version, and waits until they have.

        Where they cannot, the round is left if it goes on: only a goodbye takes back the vote.
        """
        body = {"update_info": {"version": version, "timeout": self._update_s}}
        try:
            self.server.post("/update_weights", body, self._update_s + MARGIN_S)
        except ServerError as error:
            awaited = self._update is update
            if UNTOUCHED in error.answer:
                self._let_go()
            update.set_exception(error)
            if awaited and self._goes_on(update):
                self._leave(str(error))
        else:
            update.set_result(None)

    def _let_go(self) -> None:
        """The server goes on: its worker has said that nothing was written.

        Of several workers one says so, and is not asked what others have.
        """
        if self._workers == 1 and not self._had_half:
            with contextlib.suppress(ServerError):
                self.hold.undo()
                self._half = False

    def _goes_on(self, update: Future[None]) -> bool:
        """Whether the round of an update that failed does: mostly it has failed before."""
        deadline = time.monotonic() + HEARD_S
        while self._update is update and (worker := self._worker) is not None and worker.goes_on:
            if time.monotonic() > deadline:
                return True
            time.sleep(HEARD_S / 50)
        return False

    def _commit(self, info: RoundInfo) -> None:
        update, self._update = self._update, None
        finish, self._finish = self._finish, None
        assert update is not None
        if finish is not None:
            # Its workers have voted while they were at the update: the server does this after it.
            finish.send()
        try:
            update.result(self._update_s + MARGIN_S)
        except BaseException:
            if finish is not None:
                finish.drop()
            raise
        if finish is not None:
            finish.answer(CONTROL_S)
        else:
            body = {"weight_version": str(info.version)}
            self.server.post("/finish_weight_update", body, CONTROL_S)
        self._go_on(info.version, time.monotonic())

    def _go_on(self, version: int, finished_at: float) -> None:
        """Has the server answer requests again, now that its weights are those of the version."""
        self._forget_prompts()
        self._half = False
        self.hold.end()
        log.info(
            "%s has version %d: %.1f ms from start to finish, held for %.1f ms",
            self.server.url,
            version,
            (finished_at - self._begun_at) * 1e3,
            (time.monotonic() - self._held_at) * 1e3,
        )

    def _forget_prompts(self) -> None:
        """Drops what the server has worked out for the beginnings of prompts, with old weights."""
        path = "/reset_prefix_cache"
        answer = self.server.post(path, None, CONTROL_S)
        if _succeeded(answer):
            return
        # Requests that were under way hold parts of it: they are worked out anew, too.
        answer = self.server.post(path, None, CONTROL_S, reset_running_requests="true")
        if not _succeeded(answer):
            raise ServerError(
                f"{self.server.url}{path} answered {answer!r:.80}: prompts would be answered from"
                " what was worked out with the weights before",
                refused=True,
            )

    def _abort(self, info: RoundInfo, reason: str, torn: bool) -> None:
        self._settle()
        if self._half:
            log.error(
                "%s has half of version %d (%s), and is %s: it answers no request until a round"
                " commits",
                self.server.url,
                info.version,
                reason if len(reason) <= MOST_SHOWN else f"{reason[:MOST_SHOWN]} ...",
                self.hold.state.value,
            )

    def _settle(self) -> None:
        """Waits for the answer to an update whose round has failed; not when it is to end."""
        self._drop_finish()
        update, self._update = self._update, None
        deadline = time.monotonic() + self._update_s + MARGIN_S
        while update is not None and not self._ending.is_set() and time.monotonic() < deadline:
            try:
                update.result(LOOK_S)
            except NotYetError:
                continue
            except ServerError:
                pass  # The round says why.
            return

    def _drop_finish(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish.drop()


def _succeeded(answer: object) -> bool:
    """Whether an answer says so; older versions answer nothing."""
    return not isinstance(answer, dict) or answer.get("success") is not False
