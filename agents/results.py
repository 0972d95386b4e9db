"""What a trainer hears of a round: the handle while it goes on, the result when it has ended."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from msgspec import Struct

from ..protocol import records
from ..protocol.errors import (
    ClosedError,
    DeadlineError,
    RefusedError,
    RoundFailedError,
    TensorleaseError,
)
from ..protocol.records import Code, Fate, Holder, Outcome, ReplicaResult
from .waiting import Wait, seconds

if TYPE_CHECKING:
    from .subset import Chosen

log = logging.getLogger("tensorlease.agents")

T = TypeVar("T")


class ReceiverOutcome(Struct, frozen=True):
    """What became of one worker in a round; times in seconds, measured by the worker itself."""

    name: str
    """replica/member."""
    pid: int
    """Its process."""
    fate: Fate
    """What became of it."""
    reason: str
    """Why, where it did not commit."""
    prepare_s: float
    """In its prepare hooks."""
    copy_s: float
    """In its copies and its callbacks, all of them together."""
    commit_s: float
    """In its commit hooks."""
    batches: int
    """How many it took in."""
    nbytes: int
    """Bytes of these."""
    applied: int | None = None
    """Names of which it took all that it wants; None: it has not voted."""
    skipped: int | None = None
    """Names that were sent and of which it wanted nothing."""
    unwanted: tuple[str, ...] = ()
    """Those; none where they are more than 64."""


class RoundResult:
    """The end of a round: an outcome, never an intent.

    Attributes:
        version: The version that it was to make.
        call: Its number among the rounds of the trainer group.
        outcome: What became of it.
        reason: Why, where it did not commit everywhere; names replicas and workers.
        code: Why it ended before its decision, for programs; None: it was decided.
        replicas: Each replica by name: its fate, the version it is at, and why.
        receivers: Each worker by `replica/member`.
        left_out: Replicas that were incomplete or silent when the round began, by name, and why.
            They are no part of it, and of its outcome: they get a later one.
        nbytes: Bytes of all batches.
        via: How those of each rank travelled: `ipc`, `staging` (copied on the rank's GPU, then by
            IPC), `shm`.
        opening_s: Seconds from the first rank's opening to the admission.
        staging_s: From there to the decision: prepare hooks and copies.
        committing_s: From there to the end: commit hooks.
    """

    def __init__(self, record: records.RoundResult) -> None:
        self.version = record.version
        self.call = record.call
        self.outcome = record.outcome
        self.reason = record.reason
        self.code = record.code
        self.replicas: dict[str, ReplicaResult] = {r.replica: r for r in record.replicas}
        outcomes = [_receiver(receiver) for receiver in record.receivers]
        self.receivers: dict[str, ReceiverOutcome] = {o.name: o for o in outcomes}
        self.left_out: dict[str, ReplicaResult] = {r.replica: r for r in record.left_out}
        self.nbytes = record.nbytes
        self.via = {source.rank: tuple(source.via) for source in record.sources}
        self.opening_s = record.opening_us / 1e6
        self.staging_s = record.staging_us / 1e6
        self.committing_s = record.committing_us / 1e6

    @property
    def ok(self) -> bool:
        """Whether every replica that was complete and answered is at the version now."""
        return self.outcome is Outcome.COMMITTED

    @property
    def unwanted(self) -> dict[str, tuple[str, ...]]:
        """Names that were sent and that no worker of a replica wanted, by replica; as far as known:
        a worker that skips more than 64 names says how many, not which.
        """
        found: dict[str, set[str]] = {}
        for receiver in self.receivers.values():
            replica = receiver.name.rpartition("/")[0]
            names = found.setdefault(replica, set(receiver.unwanted))
            names.intersection_update(receiver.unwanted)
        return {replica: tuple(sorted(names)) for replica, names in found.items() if names}

    @property
    def seconds(self) -> float:
        """How long the round took, from its opening to its end."""
        return self.opening_s + self.staging_s + self.committing_s

    def raise_for_status(self) -> RoundResult:
        """Returns itself.

        Raises:
            RoundFailedError: Not every replica committed; the message says which, and why.
        """
        if not self.ok:
            raise RoundFailedError(self._sentence(), self)
        return self

    def _sentence(self) -> str:
        at = [r.replica for r in self.replicas.values() if r.fate is Fate.COMMITTED]
        who = f"; at it: {', '.join(sorted(at))}" if at else "; no replica is at it"
        why = f": {self.reason}" if self.reason else ""
        return f"version {self.version} (call {self.call}) {self.outcome.value}{why}{who}"

    def __repr__(self) -> str:
        return f"<RoundResult version={self.version} call={self.call} {self.outcome.value}>"

    def __str__(self) -> str:
        """A line for the round, one for each worker, one for each replica without workers in it."""
        head = (
            f"version {self.version}  {self.outcome.value}  {_size(self.nbytes)}"
            f"  {self.seconds * 1e3:.1f} ms (opening {self.opening_s * 1e3:.1f},"
            f" staging {self.staging_s * 1e3:.1f}, committing {self.committing_s * 1e3:.1f})"
        )
        rows = [("worker", "pid", "fate", "prepare ms", "copy ms", "commit ms", "reason")]
        rows += [
            (
                r.name,
                str(r.pid),
                r.fate.value,
                f"{r.prepare_s * 1e3:.1f}",
                f"{r.copy_s * 1e3:.1f}",
                f"{r.commit_s * 1e3:.1f}",
                r.reason,
            )
            for r in self.receivers.values()
        ]
        served = {name.rpartition("/")[0] for name in self.receivers}
        rows += [
            (r.replica, "-", r.fate.value, "-", "-", "-", r.reason)
            for r in self.replicas.values()
            if r.replica not in served
        ]
        rows += [
            (r.replica, "-", "left out", "-", "-", "-", r.reason) for r in self.left_out.values()
        ]
        if len(rows) == 1:
            return f"{head}\n  {self.reason}" if self.reason else head
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = [
            "  " + "  ".join([*map(str.ljust, row[:6], widths), row[6]]).rstrip() for row in rows
        ]
        lines += [
            f"  not wanted by any worker of {replica}: {', '.join(names)}"
            for replica, names in self.unwanted.items()
        ]
        return "\n".join([head, *lines])


def _size(nbytes: int) -> str:
    """Returns a number of bytes as people read it: `12 B`, `1.5 KiB`, `64.0 MiB`."""
    if nbytes < 2**10:
        return f"{nbytes} B"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes < 2**20 else f"{nbytes / 2**20:.1f} MiB"


def _receiver(record: records.ReceiverResult) -> ReceiverOutcome:
    tally = record.tally
    return ReceiverOutcome(
        f"{record.replica}/{record.member}",
        record.pid,
        record.fate,
        record.reason,
        record.prepare_us / 1e6,
        record.copy_us / 1e6,
        record.commit_us / 1e6,
        record.batches,
        record.nbytes,
        None if tally is None else tally.applied,
        None if tally is None else tally.skipped,
        () if tally is None else tuple(tally.unwanted),
    )


Drive = Callable[[float, Callable[[], bool]], bool]
"""Polls, at most so many seconds, unless what is waited for is over; see `PollLoop.drive`."""


def nobody_drives(seconds: float, over: Callable[[], bool]) -> bool:
    """A background thread polls."""
    return False


class Milestone(Generic[T]):
    """Something that a round reaches once, or never; threads and coroutines may wait for it.

    A wait that lasts is said in the log, now and then. A plain lock is what a thread waits by: the
    locks of futures and conditions are taken by Python code, which an interrupt may leave locked.

    Args:
        late: Returns what there is to say after so many seconds.
        agent: Who waits, for the log.
        drive: Polls for what is waited for.
    """

    def __init__(
        self,
        late: Callable[[float], DeadlineError],
        agent: object = "an agent",
        drive: Drive = nobody_drives,
    ) -> None:
        self._done = False
        self._value: T | None = None
        self._error: TensorleaseError | None = None
        # Called once it is done, by who has done it; each waits for one who waits.
        self._watchers: list[Callable[[], None]] = []
        self._late = late
        self._agent = agent
        self._drive = drive
        self._pid = os.getpid()

    @property
    def done(self) -> bool:
        """Whether it was reached, or never will be."""
        return self._done

    @property
    def reached(self) -> T | None:
        """Its value; None if it was not reached."""
        return self._value

    def wait(self, timeout: float = 120.0) -> T:
        """Waits for it, at most `timeout` seconds.

        Raises:
            DeadlineError: The limit has passed; names who is missing. The round goes on.
            TensorleaseError: It will never be reached: the round was refused, or was void and another
                has begun, or the agent closed.
            ClosedError: This process was forked from that of the round.
        """
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this round was created in another process ({self._pid}), from which this one was"
                " forked; what becomes of it is known there alone"
            )
        wait = _begin(timeout)
        bell = threading.Lock()
        bell.acquire()
        with self._watched(bell.release):
            while not self._done:
                left = self._left_to_wait(wait)
                if not self._drive(left, self._is_done):
                    bell.acquire(timeout=left)
        return self._outcome()

    async def wait_async(self, timeout: float = math.inf) -> T:  # noqa: ASYNC109 - as wait has it
        """As `wait`, for coroutines; cancelling it takes nothing from others who wait."""
        import asyncio

        wait = _begin(timeout)
        loop, bell = asyncio.get_running_loop(), asyncio.Event()

        def ring() -> None:
            with suppress(RuntimeError):  # A loop that was closed has nobody who waits.
                loop.call_soon_threadsafe(bell.set)

        with self._watched(ring):
            while not self._done:
                left = self._left_to_wait(wait)  # May raise a `TimeoutError`, which is to pass.
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await bell.wait()
        return self._outcome()

    def _left_to_wait(self, wait: Wait) -> float:
        now = time.monotonic()
        if wait.over(now):
            raise self._late(wait.lasted(now))
        if wait.due(now):
            log.warning("%s still waits: %s", self._agent, self._late(wait.lasted(now)))
        return min(wait.pause(now), threading.TIMEOUT_MAX)

    def __await__(self) -> Generator[object, None, T]:
        """Waits without a limit of its own: `asyncio.timeout` sets one, and cancels only that."""
        return self.wait_async().__await__()

    def reach(self, value: T) -> None:
        """It has come to pass; the first of `reach` and `fail` counts."""
        if not self._done:
            self._value = value
            self._ring()

    def fail(self, error: TensorleaseError) -> None:
        """It never will."""
        if not self._done:
            self._error = error
            self._ring()

    def _is_done(self) -> bool:
        return self._done

    def _ring(self) -> None:
        self._done = True
        for watcher in list(self._watchers):
            watcher()

    def _outcome(self) -> T:
        if self._error is not None:
            raise self._error.with_traceback(None)
        return cast("T", self._value)

    @contextmanager
    def _watched(self, watcher: Callable[[], None]) -> Iterator[None]:
        """Has the watcher called once it is done; not if it is by now: look after this."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)


def _begin(timeout: float) -> Wait:
    now = time.monotonic()
    return Wait(now, now + timeout)


class RoundHandle:
    """A round under way. Keeps its trainer, and with it the tensors, until it is dropped.

    Attributes:
        version: The version that it is to make.
        call: Its number among the rounds of the trainer group.
        subset: The names of the tensors that it carries; none: all.
        carries: What it carries, where that was made before: a snapshot, or digests; else None.
        released: Reached when nobody reads the buffers any more, so that they may be written.
        finished: Reached when the round has ended; its value is the `RoundResult`.
        skipped: Nothing was published, since an earlier round was under way: `released` is
            reached, `finished` raises `SkippedError`, and `call` is 0.
    """

    def __init__(
        self,
        agent: object,
        version: int,
        missing: Callable[[RoundHandle], str],
        subset: tuple[str, ...] = (),
        carries: Chosen | None = None,
        drive: Drive = nobody_drives,
    ) -> None:
        self._agent = agent
        self._missing = missing
        self.carries = carries
        self.version = version
        self.subset = subset
        self.call = 0
        self.skipped = False
        self.released: Milestone[None] = Milestone(
            lambda lasted: self._late("released", lasted), agent, drive
        )
        self.finished: Milestone[RoundResult] = Milestone(
            lambda lasted: self._late("finished", lasted), agent, drive
        )
        self._stuck: dict[int, list[Holder]] = {}

    @property
    def stuck(self) -> list[Holder]:
        """Silent but living workers that keep leases of this round, by name and pid."""
        if self.released.done:
            return []
        found = {h.instance: h for holders in self._stuck.values() for h in holders}
        return list(found.values())

    @property
    def over(self) -> bool:
        """Whether it has ended and nobody reads its buffers any more."""
        return self.finished.done and self.released.done

    @property
    def decided(self) -> bool:
        """Whether it has ended with the version committed by some replica."""
        result = self.finished.reached
        return result is not None and result.outcome in (Outcome.COMMITTED, Outcome.MIXED)

    def result(self, timeout: float = 120.0) -> RoundResult:
        """Waits for the end of the round, at most `timeout` seconds; see `Milestone.wait`."""
        return self.finished.wait(timeout)

    def __await__(self) -> Generator[object, None, RoundResult]:
        return self.finished.__await__()

    def __repr__(self) -> str:
        states = [
            name
            for name, milestone in (("released", self.released), ("finished", self.finished))
            if milestone.done
        ]
        return f"<RoundHandle version={self.version} {' '.join(states) or 'under way'}>"

    def _late(self, what: str, lasted: float) -> DeadlineError:
        return DeadlineError(
            f"version {self.version} (call {self.call}) is not {what} after {seconds(lasted)}:"
            f" {self._missing(self)}; the round itself goes on, its handle can be asked again"
        )

    # What the trainer reports.

    def note_stuck(self, seq: int, holders: list[Holder]) -> None:
        """These workers keep batch `seq`."""
        self._stuck[seq] = holders

    def note_released(self, seq: int) -> None:
        """Batch `seq` came back."""
        self._stuck.pop(seq, None)

    def skip(self, error: SkippedError) -> None:
        """Nothing is published by it."""
        self.skipped = True
        self.released.reach(None)
        self.finished.fail(error)

    def forget(self) -> None:
        """Of a round that was void nobody hears any more, now that another has begun."""
        text = (
            f"version {self.version} (call {self.call}) was void, and another round has begun: who still"
            " reads for it is not told any more"
        )
        self.fail(RefusedError(text, Code.NO_ROUND.value))

    def fail(self, error: TensorleaseError) -> None:
        """Neither milestone will be reached, unless it was."""
        self.released.fail(error)
        self.finished.fail(error)


class SkippedError(TensorleaseError):
    """A version was not published: an earlier round was still under way, and that was not waited for.

    Attributes:
        version: The version that no worker gets; a later one reaches all of them.
    """

    def __init__(self, message: str, version: int) -> None:
        super().__init__(message)
        self.version = version


class StillLeasedError(DeadlineError):
    """Memory is still promised to workers, or may come to be read by them: do not write to it.

    Attributes:
        holders: Who may be reading: the silent ones if there are any, else all who have not been
            told apart; empty while a round waits for its admission.
        handles: The rounds that hold it; their `released` can be waited for.
    """

    def __init__(
        self, message: str, holders: Sequence[Holder] = (), handles: Sequence[RoundHandle] = ()
    ) -> None:
        super().__init__(message)
        self.holders = list(holders)
        self.handles = list(handles)


class UnreleasedError(StillLeasedError):
    """The round has ended, but its memory is still promised to a worker: do not write to it.

    Attributes:
        result: The round's `RoundResult`.
        handle: Its handle, whose `released` can be waited for, and whose `stuck` names workers.
    """

    def __init__(self, message: str, result: RoundResult, handle: RoundHandle) -> None:
        super().__init__(message, handle.stuck, [handle])
        self.result = result
        self.handle = handle
