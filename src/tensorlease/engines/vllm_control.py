"""vLLM servers led by the trainer's own process: `tensorlease bridge vllm --mode plugin`, as an object."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Final, Self

from tensorlease.agents import TrainerAgent
from tensorlease.protocol.errors import ClosedError, ConfigError, DeadlineError

from .vllm_bridge import VLLMBridge
from .vllm_server import ControlledServer, VLLMServer, name_of

LOOK_S: Final = 0.05
"""Between two looks whether all servers that answer are led."""
SLICE_S: Final = 0.5
"""Between two looks whether one that is led is not any more."""
CLOSE_S: Final = 10.0


class VLLMControl:
    """Leads vLLM servers through the rounds of a trainer of this process.

        with VLLMControl("http://127.0.0.1:8000") as control:
            trainer.publish(1, control=control).raise_for_status()

    Each server is a replica of its own, named by its address, and has a leader in a thread of this
    process, from the first `publish` with it to `close`: make it once, and on one rank. What
    leaders do, and what becomes of a server that fails, is as with `tensorlease bridge vllm
    --mode plugin`.

    Args:
        servers: Their addresses, or objects that reach them; they may come later, and go and come
            again.
        update_s: How long an update may take, in seconds.
        pause: What becomes of requests meanwhile: "keep", "wait" or "abort"; see vLLM's `/pause`.
        recorded: Whether the servers' workers record what the model's loader does, and copy from
            the second update on.
        sleep: Whether servers sleep during an update, but for their weights.

    Raises:
        ConfigError: No address, or what is none.
    """

    def __init__(
        self,
        *servers: str | ControlledServer,
        update_s: float = 300.0,
        pause: str = "keep",
        recorded: bool = True,
        sleep: bool = False,
    ) -> None:
        if not servers:
            raise ConfigError("no server: give the address of one, http://127.0.0.1:8000 say")
        self._servers: list[ControlledServer] = [
            VLLMServer(server) if isinstance(server, str) else server
            for server in dict.fromkeys(servers)
        ]
        self._update_s = update_s
        self._pause = pause
        self._recorded = recorded
        self._sleep = sleep
        self._pid = os.getpid()
        # Guards the rest.
        self._lock = threading.Lock()
        self._closed = False
        # Of the trainer that it leads for: channel and endpoint; empty before the first round.
        self._place: tuple[str, str] | None = None
        self._bridges: list[VLLMBridge] = []
        self._threads: list[threading.Thread] = []
        # What has ended a leader.
        self._error: Exception | None = None

    def wait_ready(self, trainer: TrainerAgent, timeout: float = 120.0) -> None:
        """Waits until each server that answers is led, and ready; one is, at least.

        `publish` and `apublish` do so with `control=`; call it before other ways to publish.
        Servers that do not answer are not waited for where another does: `min_replicas` is how a
        round waits for more.

        Args:
            trainer: Who publishes; always of the same channel.
            timeout: Limit in seconds.

        Raises:
            DeadlineError: They are not, in time; names each and what it lacks.
            ConfigError: It leads for a trainer of another channel, or another broker.
            ClosedError: It was closed, or this is a forked child.
            TensorleaseError: What has ended a leader: a place that is taken, say.
        """
        deadline = time.monotonic() + timeout
        trainer.wait_ready(0, max(0.0, deadline - time.monotonic()))
        self._lead_for(trainer)
        late: DeadlineError | None = None
        while True:
            if self._error is not None:
                raise self._error.with_traceback(None)  # Where its thread was says nothing here.
            self._check_open()
            leading = [bridge.replica for bridge in self._bridges if bridge.leads]
            away = [bridge.away for bridge in self._bridges if bridge.away and not bridge.leads]
            left = deadline - time.monotonic()
            if leading and len(leading) + len(away) == len(self._bridges):
                try:
                    trainer.wait_ready(leading, max(0.0, min(SLICE_S, left)))
                except DeadlineError as error:
                    late = error
                else:
                    return
            elif left > 0:
                time.sleep(min(LOOK_S, left))
            if left <= 0:
                if late is not None and leading:
                    raise late
                joining = [
                    f"{bridge.server.url} is being joined"
                    for bridge in self._bridges
                    if not (bridge.leads or bridge.away)
                ]
                raise DeadlineError(
                    f"not every server is led after {timeout:g} s: {'; '.join(away + joining)}"
                )

    def close(self, timeout: float = CLOSE_S) -> None:
        """Ends the leaders: their servers are in no round. Idempotent; nothing in a forked child.

        Args:
            timeout: How long their threads are waited for, in seconds.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            bridges, threads = list(self._bridges), list(self._threads)
        for bridge in bridges:
            bridge.stop()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ inside

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this VLLMControl was closed: make another")

    def _lead_for(self, trainer: TrainerAgent) -> None:
        """Starts the leaders, at the first round."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this VLLMControl was made in another process ({self._pid}), from which this one"
                " was forked; make another here"
            )
        place = trainer.channel, trainer.endpoint
        with self._lock:
            self._check_open()
            if self._place is not None:
                if self._place != place:
                    raise ConfigError(
                        f"this VLLMControl leads for channel {self._place[0]!r} at"
                        f" {self._place[1]}, and not for {place[0]!r} at {place[1]}: make another"
                    )
                return
            self._place = place
            self._bridges = [self._leader(server, trainer) for server in self._servers]
            for bridge in self._bridges:
                # A process that ends without `close` is not kept.
                thread = threading.Thread(
                    target=self._run, args=(bridge,), name="tensorlease-control", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _leader(self, server: ControlledServer, trainer: TrainerAgent) -> VLLMBridge:
        return VLLMBridge(
            server,
            trainer.channel,
            name_of(server.url),
            endpoint=trainer.endpoint,
            device=trainer.device,
            update_s=self._update_s,
            pause=self._pause,
            recorded=self._recorded,
            sleep=self._sleep,
        )

    def _run(self, bridge: VLLMBridge) -> None:
        try:
            bridge.run()
        except Exception as error:  # noqa: BLE001 - raised by the next `wait_ready`
            self._error = error
