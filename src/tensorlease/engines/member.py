"""A member of a replica whose tensors only the engine's own thread may load.

The agent works in a thread of its own, so that it is ready whenever a round is to begin. What a
round brings it hands to the thread that calls `receive`, and waits until that has loaded it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from tensorlease.agents import RoundInfo, WorkerAgent
from tensorlease.agents.loading import UNTOUCHED
from tensorlease.protocol.errors import ClosedError, ConfigError, TensorleaseError

if TYPE_CHECKING:
    import torch

    from tensorlease.agents.callback_sink import Lacks
    from tensorlease.agents.recorded import RecordedLoad

Tensors = list[tuple[str, "torch.Tensor"]]
"""Names, and views of a trainer's memory: gone when what they are given to returns."""

TOLD_S: Final = 120.0
"""How long a round waits until the engine is told of it: its requests may have to end before."""
BEGIN_S: Final = 15.0
"""How long the engine waits for the round that it was told of."""
LOOK_S: Final = 0.1
"""Between two looks whether the round still goes on."""
CLOSE_S: Final = 5.0
TOO_LATE: Final = "the round failed before the engine was told to take"

log = logging.getLogger("tensorlease.engines")


class UpdateError(TensorleaseError):
    """An engine did not get a version; says which, and why."""


class _Begun(Struct):
    """The round has begun for this member."""


class _Load(Struct):
    tensors: Tensors
    done: Future[None]


class _End(Struct):
    """The round has failed."""

    reason: str


class _Commit(Struct):
    """The round commits; it does for this member when it is done."""

    info: RoundInfo
    done: Future[None]


Finish = Callable[[RoundInfo], object]
"""What an engine does when all has come; the member commits if it does not raise."""


class EngineMember:
    """The seat of one of an engine's processes in its replica.

    Args:
        worker: Its agent, that has attached nothing; it is closed by `close`.
        load: Takes tensors into the engine; called by `receive`, in its thread.
        recorded: What `load` loads by, if that is recorded; whoever has it begins each load before
            `receive`.
        lacks: Texts of what the engine lacks so far of a version, or of a subset of it (True); a
            version that lacks something is not taken.
    """

    def __init__(
        self,
        worker: WorkerAgent,
        load: Callable[[Tensors], object],
        recorded: RecordedLoad | None = None,
        lacks: Lacks | None = None,
    ) -> None:
        self._worker = worker
        self._load = load
        self._lacks = lacks
        # Guards the next five.
        self._changed = threading.Condition()
        # A round may be taken in before `receive` is called.
        self._open = False
        # The version that `receive` waits for; 0: it does not.
        self._version = 0
        # What a round was to make that failed before `receive` was called, since `begin`; 0: none.
        self._missed = 0
        # The round that is taken in.
        self._round: RoundInfo | None = None
        # That round has ended, and `receive` has yet to hear of it.
        self._over = False
        # The agent ends: its hooks wait for nothing any more.
        self._ends = False
        self._tasks: queue.SimpleQueue[_Begun | _Load | _Commit | _End] = queue.SimpleQueue()
        worker.on_prepare(self._prepare)
        worker.on_commit(self._commit)
        worker.on_abort(self._abort)
        worker.on_stage(self._stage, recorded=recorded, lacks=self._lacking)
        self._thread = threading.Thread(target=self._serve, name="tensorlease-engine", daemon=True)
        self._thread.start()

    @property
    def worker(self) -> WorkerAgent:
        """Its agent."""
        return self._worker

    def begin(self, *, copied: bool) -> None:
        """The engine has begun an update; before `receive`.

        Args:
            copied: All of it is copied as recorded, by the agent's thread: the round need not wait
                until the engine's own is told which version it is. Its vote does.
        """
        with self._changed:
            self._forget()
            self._open = copied
            self._changed.notify_all()

    def end(self) -> None:
        """The engine has ended the update: no round is taken in until it begins another."""
        self._leave()

    def receive(self, version: int, timeout: float, finish: Finish | None = None) -> None:
        """Loads what the round of this version brings; returns once it has committed here.

        Args:
            version: What the round is to make.
            timeout: Limit in seconds.
            finish: Called with the round when it is to commit; what it raises is raised, and has
                the replica torn.

        Raises:
            UpdateError: The round did not begin, failed, or is not over in time; what was loaded of
                it is loaded.
            ConfigError: Another thread is at it.
        """
        began = time.monotonic()
        with self._changed:
            if self._ends:
                raise UpdateError(f"version {version} does not come: the engine ends")
            if self._version:
                raise ConfigError(f"version {self._version} is being received already")
            if self._round is not None and self._round.version != version:
                made = self._round.version
                self._forget()
                raise UpdateError(
                    f"the engine was told to take version {version}, and this is the round of {made}"
                )
            if self._missed == version:
                raise UpdateError(f"{TOO_LATE} version {version}")
            self._version = version
            self._changed.notify_all()
        begun = False
        try:
            while True:
                limit = timeout if begun else min(timeout, BEGIN_S)
                left = max(0.0, began + limit - time.monotonic())
                try:
                    task = self._tasks.get(timeout=left)
                except queue.Empty:
                    what = "is not over" if begun else "has not begun"
                    raise UpdateError(
                        f"the round of version {version} {what} after {limit:g} s"
                        f" ({self._worker!r} is {self._state()})"
                    ) from None
                begun = True
                if isinstance(task, _End):
                    raise UpdateError(f"version {version} did not come: {task.reason}")
                if isinstance(task, _Commit):
                    self._finish(task, finish)
                    return
                if isinstance(task, _Load):
                    self._do(task)
                del task  # Else its views would be there while the next is waited for.
        finally:
            self._leave()

    def require_idle(self) -> None:
        """Raises `UpdateError` while it is in a round: another leader must not take its seat."""
        if self._worker.goes_on:
            raise UpdateError(
                f"a round goes on in which {self._worker!r} takes part: whoever leads it"
                " has the engine until it has ended"
            )

    def close(self) -> None:
        """Ends the agent, whose hooks wait no longer for the engine. Idempotent."""
        self._ends = True
        self._worker.stop()
        self._worker.close(CLOSE_S)
        self._end_receiving("the engine ends")
        self._thread.join(CLOSE_S)

    # ------------------------------------------------------------ in the thread of `receive`

    def _do(self, task: _Load) -> None:
        try:
            self._load(task.tensors)
        except BaseException as error:
            task.tensors.clear()
            task.done.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            task.tensors.clear()
            task.done.set_result(None)

    def _finish(self, task: _Commit, finish: Finish | None) -> None:
        try:
            if finish is not None:
                finish(task.info)
        except BaseException as error:
            task.done.set_exception(error)
            raise
        task.done.set_result(None)

    def _leave(self) -> None:
        with self._changed:
            self._forget()

    def _forget(self) -> None:
        """Nothing is taken any more; who waits to have something loaded is told. Under the lock."""
        self._version, self._missed, self._round, self._open, self._over = 0, 0, None, False, False
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                return
            if isinstance(task, _Load):
                task.tensors.clear()
            if isinstance(task, _Load | _Commit):
                task.done.set_exception(UpdateError("the engine has given the update up"))

    def _state(self) -> str:
        worker = self._worker
        if not worker.connected:
            return "without a broker"
        return "torn" if worker.torn else f"at version {worker.version}"

    # ------------------------------------------------------------ in the agent's thread

    def _serve(self) -> None:
        try:
            self._worker.run()
        except ClosedError:
            pass
        except TensorleaseError as error:
            log.error("%r is in no round any more: %s", self._worker, error)
            self._end_receiving(str(error))

    def _end_receiving(self, why: str) -> None:
        """The agent has ended: nothing more comes for who receives."""
        with self._changed:
            if self._version:
                self._tasks.put(_End(why))

    def _is_told(self) -> bool:
        """Whether the engine waits for a round, and has left the one before."""
        return not self._over and bool(self._version or self._open)

    def _is_late(self, info: RoundInfo) -> bool:
        """Whether the engine waits for a round before this one, which then ended before its hook."""
        late = 0 < self._version < info.version
        if late:
            self._over = True
            self._tasks.put(_End(f"the round of version {info.version} has begun"))
        return late

    def _prepare(self, info: RoundInfo) -> None:
        began = time.monotonic()
        with self._changed:
            while not self._changed.wait_for(self._is_told, LOOK_S) or self._is_late(info):
                if self._ends:
                    raise UpdateError(f"the engine ends, not told to take version {info.version}")
                if not self._worker.goes_on:
                    self._missed = info.version
                    raise UpdateError(f"{TOO_LATE} version {info.version}")
                if time.monotonic() - began > TOLD_S:
                    raise UpdateError(
                        f"the engine was not told in {TOLD_S:g} s to take version {info.version}:"
                        " is there a bridge, or a control client, that tells it?"
                    )
            if self._version and self._version != info.version:
                raise UpdateError(
                    f"the engine was told to take version {self._version}, and this is the round of"
                    f" {info.version}"
                )
            self._round = info
            self._tasks.put(_Begun())

    def _stage(self, info: RoundInfo, tensors: Tensors) -> None:
        done: Future[None] = Future()
        self._put(info, _Load(list(tensors), done))
        tensors.clear()
        self._await(done, f"to load what version {info.version} brings")

    def _lacking(self, subset: bool) -> Iterable[str]:
        """Says what the engine lacks of a round, once it is told which version that makes.

        So whoever hears that the round commits knows that the engine is at this update.
        """
        began = time.monotonic()
        with self._changed:
            while not self._changed.wait_for(lambda: self._version or not self._round, LOOK_S):
                if self._ends:
                    return ["the engine ends, not told which version it has got"]
                if not self._worker.goes_on:
                    break
                if time.monotonic() - began > BEGIN_S:
                    return [f"the engine was not told in {BEGIN_S:g} s which version it has got"]
            if self._round is None:
                # It may have begun another: that is not told of this round any more.
                return ["the engine has given the update up"]
        return () if self._lacks is None else self._lacks(subset)

    def _commit(self, info: RoundInfo) -> None:
        done: Future[None] = Future()
        self._put(info, _Commit(info, done))
        self._await(done, f"that what it has is version {info.version}")

    def _await(self, done: Future[None], told: str) -> None:
        """Waits until the engine's thread has done it; not for ever if that does not receive."""
        began = time.monotonic()
        while not futures.wait([done], LOOK_S).done:
            with self._changed:
                over = self._ends or time.monotonic() - began > BEGIN_S
                if over and not self._version:
                    self._forget()
                    why = "ends, not told" if self._ends else f"was not told in {BEGIN_S:g} s"
                    raise UpdateError(f"the engine {why} {told}")
        done.result()

    def _abort(self, info: RoundInfo, reason: str, torn: bool) -> None:
        if torn:  # Else another engine's worker, which has failed, would say so for this one.
            reason = reason.replace(UNTOUCHED, "publish again")
        with contextlib.suppress(UpdateError):  # It has given up before.
            self._put(info, _End(reason or "the round failed"))

    def _put(self, info: RoundInfo, task: _Load | _Commit | _End) -> None:
        with self._changed:
            # By now it may receive nothing, or a later try of the same version.
            if self._round != info:
                raise UpdateError("the engine has given the update up")
            self._over = not isinstance(task, _Load)
            self._tasks.put(task)
