"""Leads a stock vLLM server, whose weight-transfer backend is its own `ipc`, through the rounds.

There is nothing of ours in the server. Its replica's members are all here, one for each of its
GPUs: each takes its trainer's batches, and hands the handles on by `/update_weights`. A batch is
acknowledged when the server has answered: then it has read.

Unpacked, vLLM may keep what it was given until `/finish_weight_update`. Then that comes before the
batch is acknowledged, too, and the version's name at the commit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from tensorlease.agents import RoundInfo
from tensorlease.agents.errors import StillReadError
from tensorlease.agents.relay import RelayWorker
from tensorlease.protocol.errors import ConfigError, TensorleaseError
from tensorlease.protocol.records import Orphan, Process
from tensorlease.protocol.tables import Buffer

from . import vllm_bridge as base
from .meeting import Meeting
from .member import UpdateError
from .readers import are_over, living, readers_of
from .vllm_bridge import VLLMBridge
from .vllm_server import LOCAL, ServerError, VLLMServer
from .vllm_wire import Info, Spot, merged, nothing_of, packed, runs, unpacked

DEFAULT_PACKED_BYTES: Final = 2**30
"""Bytes of one packed call, at most: the server copies all of it once."""
ONCE: Final = (
    "unpacked, a stock vLLM server takes all weights of a GPU at once, registered by one trainer:"
    " start the bridge with --packed"
)
CLOSE_S: Final = 5.0
LEFT_CALLS: Final = 2
"""An update that one worker has refused, and the call that was to finish it."""

log = logging.getLogger("tensorlease.engines")


class VLLMIpcBridge(VLLMBridge):
    """One stock server's leader, and all other members of its replica.

    Args:
        server, channel, replica, endpoint, update_s, pause: See `VLLMBridge`.
        devices: Labels of the GPUs (their UUIDs) of the server's workers, in the workers' order.
            One that is no UUID: whichever it is that tensors lie on.
        packed: Whether tensors go over in runs of bytes, each as one handle, instead of one by one.
        packed_bytes: Bytes of one such run, at most.
    """

    _leaves_parts = True

    def __init__(
        self,
        server: VLLMServer,
        channel: str,
        replica: str,
        *,
        endpoint: str = "",
        devices: Sequence[str] = ("cpu:0",),
        update_s: float = 300.0,
        pause: str = "keep",
        packed: bool = False,
        packed_bytes: int = DEFAULT_PACKED_BYTES,
    ) -> None:
        super().__init__(
            server,
            channel,
            replica,
            endpoint=endpoint,
            device=devices[0],
            update_s=update_s,
            pause=pause,
        )
        self._stock: Final = server
        self._devices: Final = list(devices)
        self._packed: Final = packed
        self._packed_bytes: Final = packed_bytes
        self._seats: list[RelayWorker] = []
        self._meeting: Meeting[list[Buffer]] = Meeting(len(devices), self._hand_over)
        # The processes that read for the server, as far as they can be seen: that it is cut off is
        # no sign that they do not.
        self._readers: list[Process] = []
        # Whether the server was given anything of the round at hand.
        self._handed = False
        # When the last update was finished.
        self._finished_at = 0.0
        # Where the last packed call's runs began.
        self._last: list[Spot] = []

    # ------------------------------------------------------------ the server comes and goes

    def _serve(self) -> None:
        workers = self.server.world_size()
        if workers != len(self._devices):
            raise ConfigError(
                f"{self.server.url} has {workers} workers, and {len(self._devices)} GPUs are named:"
                " name that of each worker, in their order, by --device UUID"
            )
        self._init()
        self._readers = readers_of(self._stock.port) if self._stock.host in LOCAL else []
        if not self._readers:
            log.info(
                "%s: the processes that read for it cannot be seen from here: if it is cut off in"
                " an update, it counts as having ended",
                self.server.url,
            )
        self._seats = [self._seat(place) for place in range(workers)]
        threads = [
            threading.Thread(target=self._follow, args=(seat,), name="tensorlease-seat")
            for seat in self._seats[1:]
        ]
        try:
            for seat in self._seats[1:]:
                seat.join()
            for thread in threads:
                thread.start()
            self._lead(self._seats[0], self._seats[0].join)
        finally:
            for seat in self._seats:
                seat.stop()
                seat.close(CLOSE_S)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()

    def _seat(self, place: int) -> RelayWorker:
        seat = RelayWorker(
            self._channel,
            partial(self._come, place),
            replica=self.replica,
            member=place,
            size=len(self._devices),
            endpoint=self._endpoint,
            device=self._devices[place],
            once="" if self._packed else ONCE,
            readers=self._readers,
            find_out=None if place else self._find_out,
        )
        return seat

    def _follow(self, seat: RelayWorker) -> None:
        """Serves as a member that does not lead."""
        try:
            seat.run()
        except TensorleaseError as error:
            self._leave(f"{self.server.url}: its GPU {seat.member} left: {error}")

    def _leave(self, why: str) -> None:
        super()._leave(why)
        for seat in self._seats[1:]:
            if not self._ending.is_set():
                seat.close(0.0)

    def _init(self) -> None:
        self._post_init({"packed": self._packed}, "ipc", "plugin")

    # ------------------------------------------------------------ hooks

    def _prepare(self, info: RoundInfo) -> None:
        if partly := self._seats[0].partial:
            raise UpdateError(
                f"{self.server.url} is a stock server, which cannot have {partly}: start it with"
                " our backend, and the bridge with --mode plugin"
            )
        self._handed = False
        self._init()  # It may have been restarted since, or been another client's.
        self._begin()

    def _commit(self, info: RoundInfo) -> None:
        server, version = self.server, str(info.version)
        if self._packed:
            server.post("/finish_weight_update", {"weight_version": version}, base.CONTROL_S)
            self._last = []
            self._finished_at = time.monotonic()
        else:
            server.post("/update_weight_version", {"new_version": version}, base.CONTROL_S)
        self._go_on(info.version, self._finished_at)

    def _abort(self, info: RoundInfo, reason: str, torn: bool) -> None:
        if self._half and not (self._had_half or self._handed):
            with contextlib.suppress(ServerError):  # Else it is held until the next round.
                # Nothing was loaded: what there was is put back.
                self.server.post("/finish_weight_update", None, base.CONTROL_S)
                self.hold.undo()
                self._half = False
        super()._abort(info, reason, torn)

    # ------------------------------------------------------------ batches

    def _come(self, place: int, buffers: list[Buffer]) -> None:
        seat = self._seats[place]
        self._meeting.come(place, buffers, lambda: seat.goes_on)

    def _hand_over(self, each: list[list[Buffer]]) -> None:
        """Has the server read one batch of each GPU; returns when it does not any more."""
        if not self._packed:
            self._update_weights([unpacked(buffers) for buffers in each])
            self._ask("/finish_weight_update", None)
            self._finished_at = time.monotonic()
            return
        found = [runs(buffers, self._packed_bytes) for buffers in each]
        if not all(found):
            raise UpdateError("a version without any element cannot be sent packed")
        if len({len(of) for of in found}) > 1:
            counts = ", ".join(str(len(of)) for of in found)
            raise UpdateError(
                f"the GPUs of {self.server.url} would need {counts} calls: ranks that send to one"
                " server must send tensors of the same sizes"
            )
        for turn in zip(*found, strict=True):
            spots = [run.spot for run in turn]
            if any(spot in self._last for spot in spots):
                self._update_weights([nothing_of(run) for run in turn])
            self._last = spots
            self._update_weights([packed(run) for run in turn])

    def _update_weights(self, infos: list[Info]) -> None:
        self._handed = True
        self._ask("/update_weights", {"update_info": merged(infos)})

    def _ask(self, path: str, body: dict[str, Any] | None) -> None:
        """Asks the server for what reads; returns, or raises, when nothing is read any more.

        Raises:
            StillReadError: It may be, and this bridge is to end.
        """
        try:
            self.server.post(path, body, self._update_s)
        except ServerError as error:
            # Of several workers, vLLM does not wait for the others when one has raised.
            if not error.refused or len(self._devices) > 1:
                self._await_idle(error)
            raise

    def _await_idle(self, error: ServerError) -> None:
        """Waits until a server that has not answered cannot be reading any more.

        Not longer than another update's time when this bridge is to end.
        """
        deadline = time.monotonic() + self._update_s
        log.error("%s: its replica keeps what it may be reading until that is over", error)
        while not (self._ending.is_set() and time.monotonic() > deadline):
            problem = self._is_busy()
            if problem is None or (problem.absent and not living(self._readers)):
                return
            time.sleep(base.LOOK_S / 10)
        pids = ", ".join(map(str, living(self._readers))) or "not known"
        raise StillReadError(
            f"{error}; it may still be reading the memory of a trainer, and this bridge ends"
            f" (pids {pids}): the broker keeps that memory until they have ended, or the next"
            " bridge has found out that they are done"
        ) from None

    def _find_out(self, orphans: list[Orphan], matters: Callable[[], bool]) -> bool:
        """Waits until nothing reads any more for bridges of this server that were killed.

        What is no process of this server, but of one that it has replaced, must have ended.
        """
        own = set(self._readers)
        others = [p for orphan in orphans for p in orphan.readers if p not in own]
        log.info("%s: waits for the end of what it was at for a former bridge", self.server.url)
        while matters() and not self._ending.is_set():
            if are_over(others) and self._is_busy() is None:
                log.info("%s: has done what it was at for a former bridge", self.server.url)
                return True
            self._ending.wait(base.LOOK_S / 10)
        return False

    def _is_busy(self) -> ServerError | None:
        """Asks the server for what shows that its workers read nothing; None: they do not.

        They do one thing after another, and keep nothing of an update that was finished, or that
        none of them has open; one that is on its way to them still is refused then. Once one has
        raised, vLLM waits for no other, and takes what they answer later for their answers to the
        next call: hence as many more calls as may have been left so, which nobody refuses.
        """
        try:
            self.server.post("/finish_weight_update", None, base.CONTROL_S)
        except ServerError as error:
            if not error.refused:
                return error
        try:
            for _ in range(LEFT_CALLS + 1 if len(self._devices) > 1 else 1):
                self._init()
        except ServerError as error:
            return error
        return None
