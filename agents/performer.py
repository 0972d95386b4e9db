"""How a worker does a piece of work, and reports it to its core."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from ..protocol.errors import InternalError
from ..protocol.records import Code, Proof
from .callback_sink import Handover, clear_frames
from .connection import Connection
from .errors import MappingError, StillReadError, VerifyError, ViewsKeptError
from .hooks import Calls, Hooks, RoundInfo, bounded, describe, raised_by
from .intake import Copied, Intake
from .kept_out import KeptOut
from .verifying import Reading
from .work import (
    AbortWork,
    CommitWork,
    CopyWork,
    PlanWork,
    PrepareWork,
    UnmapWork,
    UnreadWork,
    Work,
)
from .worker_core import WorkerCore

log = logging.getLogger("tensorlease.agents")

_NAMES: Final[dict[type[Work], str]] = {
    PrepareWork: "its on_prepare",
    CopyWork: "its copy of a batch",
    CommitWork: "its on_commit",
    AbortWork: "its on_abort",
    PlanWork: "its plan for what is offered",
    UnmapWork: "its unmapping",
    UnreadWork: "its look at what was read for those before it",
}
"""What the log calls each kind of work."""
_HOOKS: Final[dict[type[Work], str]] = {
    PrepareWork: "on_prepare",
    CommitWork: "on_commit",
    AbortWork: "on_abort",
}
"""The hooks that each kind of work calls."""


class Performer:
    """Does a worker's work, one piece at a time, in the thread that calls it.

    What a hook or a copy raises is reported, and logged; what ends a program, KeyboardInterrupt
    say, is reported first and then raised again.
    """

    def __init__(self, core: WorkerCore, connection: Connection, intake: Intake) -> None:
        self.hooks = Hooks()
        # Of a relay: what it does to find out, and reports itself.
        self.find_out: Callable[[UnreadWork], object] | None = None
        self._core = core
        self._connection = connection
        self._intake = intake
        intake.goes_on = partial(in_a_round, core)
        # The round whose hooks are called, and seconds that its parts took.
        self._round: RoundInfo | None = None
        self._prepare_s = 0.0
        self._copy_s = 0.0
        # What was begun last.
        self._begun: Work | None = None
        # Data is being moved, perhaps by a thread whose coroutine was cancelled. Set and cleared
        # under the connection's lock, as is the next.
        self._moving = False
        # No data is moved any more; called by the thread that was at it when this was set.
        self._parting: Callable[[], None] | None = None
        # The next one to copy, which GPUs have begun with.
        self._following: CopyWork | None = None
        # The batch at hand, which a callback may get; and what one has kept of an earlier batch.
        self._copied: Copied | None = None
        self._kept: Handover | None = None
        # Of a relay: others may read, and nobody here will hear that they are done.
        self.still_read = False
        # The names that were last reported as unwanted; and what it lacks, under the lock.
        self._told_unwanted: tuple[str, ...] = ()
        self._kept_out = KeptOut()

    @property
    def _name(self) -> str:
        """Names the worker, for the log."""
        core = self._core
        return f"worker {core.replica}/{core.member} of channel {core.me.channel!r}"

    @property
    def _who(self) -> str:
        """Names the worker, and the round that it is at."""
        rnd = self._round
        return self._name + ("" if rnd is None else f", version {rnd.version} (call {rnd.call})")

    def perform(self, work: Work) -> int | None:
        """Does a piece of work and reports it; returns the version that it committed."""
        self._begun = work
        self._require_settled(work)
        calls = self._hooks_of(work)
        if calls is None:
            self._move(work)
            return None
        start = time.monotonic()
        error: BaseException | None = None
        for call in calls:
            try:
                _refuse_coroutine(call())
            except BaseException as raised:  # noqa: BLE001 - raised again, once reported
                error = _worse(error, raised)
                if not isinstance(work, AbortWork):
                    break
        return self._report_hooks(work, error, start)

    async def aperform(self, work: Work) -> int | None:
        """As `perform`: hooks may be coroutine functions, data is moved beside the event loop."""
        self._begun = work
        self._require_settled(work)
        calls = self._hooks_of(work)
        if calls is None:
            # Goes on by itself, and reports, if this coroutine is cancelled.
            with self._connection.mutex:
                moving = self._moving = self._parting is None
            if not moving:
                self._drop(work)
                return None
            if isinstance(work, CopyWork) and self._intake.sink is not None:
                await self._amove(work)
                return None
            await self._beside(self._move, work)
            return None
        start = time.monotonic()
        error: BaseException | None = None
        for call in calls:
            try:
                result = call()
                if inspect.isawaitable(result):
                    await result
            except BaseException as raised:  # noqa: BLE001 - raised again, once reported
                error = _worse(error, raised)
                if not isinstance(work, AbortWork):
                    break
        return self._report_hooks(work, error, start)

    def _require_settled(self, work: Work) -> None:
        """Waits for what GPUs still copy, though an interrupt has cut off who waited for it."""
        if not isinstance(work, CopyWork) and self._intake.ahead:
            self._intake.await_ahead()

    # ------------------------------------------------------------ hooks

    def _hooks_of(self, work: Work) -> Calls | None:
        """Returns the hooks to call for a piece of work; None if it is about data."""
        match work:
            case PrepareWork((group, call), terms):
                core = self._core
                self._round = RoundInfo(
                    core.me.channel,
                    terms.version,
                    call,
                    group,
                    core.replica,
                    core.member,
                    terms.subset,
                )
                self._prepare_s = self._copy_s = 0.0
                self._intake.begin(subset=terms.subset, shared=core.size > 1, verify=terms.verify)
                return self.hooks.preparing(self._round)
            case CommitWork():
                assert self._round is not None
                return self.hooks.committing(self._round)
            case AbortWork(_, _, text, torn):
                assert self._round is not None
                return self.hooks.aborting(self._round, text, torn)
            case _:
                return None

    def _report_hooks(self, work: Work, error: BaseException | None, start: float) -> int | None:
        text = "" if error is None else raised_by(_HOOKS[type(work)], error)
        if isinstance(work, PrepareWork) and error is None:
            try:
                self._intake.prepared()
            except BaseException as raised:  # noqa: BLE001 - reported, as what hooks raise
                error, text = raised, describe(raised)
        elif isinstance(work, CommitWork) and error is None:
            self._intake.committed()
        elapsed = time.monotonic() - start
        if error is not None:
            what = describe(error)
            log.error("%s: %s: %s", self._who, _NAMES[type(work)], what, exc_info=error)
        version: int | None = None
        with self._connection.acting():
            if isinstance(work, PrepareWork):
                self._prepare_s = elapsed
                covered, tally = self._intake.wants_nothing, self._intake.tally()
                self._core.prepared(error is None, text, covered=covered, tally=tally)
            elif isinstance(work, CommitWork):
                self._core.committed(
                    error is None,
                    text,
                    prepare_us=round(self._prepare_s * 1e6),
                    copy_us=round(self._copy_s * 1e6),
                    commit_us=round(elapsed * 1e6),
                )
                version = work.version if error is None else None
            else:
                self._core.aborted()
            self._connection.notify()
        if error is not None and not isinstance(error, Exception):
            raise error
        return version

    # ------------------------------------------------------------ data

    def part(self, parting: Callable[[], None]) -> bool:
        """No data is moved from now on; calls `parting` once that is so.

        Returns whether it has been called; else the thread that moves data now calls it.
        """
        with self._connection.mutex:
            self._parting = parting
            if self._moving:
                return False
        parting()
        return True

    def _move(self, work: Work) -> None:
        moving = False
        try:
            with self._connection.mutex:
                # A coroutine's has been set already.
                moving = self._moving = self._moving or self._parting is None
            if moving:
                self._move_data(work)
            else:
                self._drop(work)
        finally:
            self._moved(moving)

    def _drop(self, work: Work) -> None:
        """No data is moved any more: `work` would be asked for again, for ever, if it stayed."""
        if isinstance(work, CopyWork):
            self._report_copy(RuntimeError("the worker closes"))
        else:
            with self._connection.acting():
                self._core.dropped()

    def _moved(self, moving: bool) -> None:
        """No data is being moved; `moving`: it was, until now."""
        with self._connection.mutex:
            self._moving = False
            parting = self._parting if moving else None
            # Who waits for work could not have it while this was being done.
            self._connection.notify()
        if parting is not None:
            parting()

    async def _amove(self, work: CopyWork) -> None:
        """As `_move`, of a batch that a callback may get, which this coroutine calls.

        If it is cancelled while a thread reads the batch, that thread gives it up when it is done.
        """
        read = left = False

        def copy() -> None:
            nonlocal read
            try:
                self._copy(work)
            finally:
                with self._connection.mutex:
                    read, given_up = True, left
                if given_up:
                    self._give_up()

        copying = self._beside(copy)
        try:
            await copying
        except BaseException:
            with self._connection.mutex:
                left, done = True, read
            if done:
                self._give_up()
            raise
        try:
            await self._agive()
        finally:
            self._moved(True)

    def _beside(self, move: Callable[..., None], *args: object) -> Awaitable[None]:
        """Has a thread move data; if there is none for it, nothing is being moved."""
        try:
            return asyncio.shield(asyncio.get_running_loop().run_in_executor(None, move, *args))
        except BaseException:
            self._moved(True)
            raise

    def _give_up(self) -> None:
        """What was read of a batch goes to nobody."""
        try:
            if self._copied is not None:
                self._report_copy(RuntimeError("the worker was interrupted"))
        finally:
            self._moved(True)

    def _move_data(self, work: Work) -> None:
        match work:
            case CopyWork():
                self._copy_on(work)
            case PlanWork():
                self._plan()
            case UnmapWork():
                self._unmap(work)
            case UnreadWork() if self.find_out is not None:
                self.find_out(work)
            case _:
                raise InternalError(f"{type(work).__name__} is work that no worker can do")

    def _copy_on(self, work: CopyWork) -> None:
        """Copies a batch, and those behind it that GPUs have begun with meanwhile."""
        following: CopyWork | None = work
        try:
            while following is not None:
                start = time.monotonic()
                with self._connection.mutex:
                    queue = list(self._core.queue)
                for each in (following, *queue):
                    if not (isinstance(each, CopyWork) and self._intake.begin_ahead(each)):
                        break
                self._copy_s += time.monotonic() - start
                self._copy(following)
                self._give()
                following, self._following = self._following, None
        finally:
            # An interrupt may have cut it off: what is at work then is left over, and done anew.
            self._following = None
            self._intake.await_ahead()

    def _copy(self, work: CopyWork) -> None:
        """Copies what is attached, and reports it unless a callback is to get something, too."""
        start = time.monotonic()
        error: BaseException | None = None
        self._copied = None
        try:
            self._copied = self._intake.copy(work)
        except BaseException as raised:  # noqa: BLE001 - reported
            error = raised
        self._copy_s += time.monotonic() - start
        if self._copied is None or not self._copied.to_give:
            self._report_copy(error)

    def _give(self) -> None:
        """Calls the callback with what a batch has for it, and reports the batch."""
        error, start = None, time.monotonic()
        if self._copied is None or self._copied.handover is None:
            return
        try:
            _refuse_coroutine(self._callback(self._copied.handover))
            self._copied.handover.await_devices()
        except BaseException as raised:  # noqa: BLE001 - reported
            error = raised
        self._copy_s += time.monotonic() - start
        self._report_copy(error, "on_stage")

    async def _agive(self) -> None:
        """As `_give`: the callback may be a coroutine function."""
        error, start = None, time.monotonic()
        if self._copied is None or self._copied.handover is None:
            return
        try:
            result = self._callback(self._copied.handover)
            if inspect.isawaitable(result):
                await result
            self._copied.handover.await_devices()
        except BaseException as raised:  # noqa: BLE001 - reported
            error = raised
        result = None
        self._copy_s += time.monotonic() - start
        self._report_copy(error, "on_stage")

    def _callback(self, handover: Handover) -> object:
        """Calls the callback; returns what it returned only where that can be awaited."""
        assert self._round is not None and self._intake.sink is not None
        result = self._intake.sink.callback(self._round, handover.take())
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise TypeError(
                "it returned a generator, so that nothing of the batch was loaded: consume it"
                " in the callback, by list() say"
            )
        return result if inspect.isawaitable(result) else None

    def _report_copy(self, error: BaseException | None, hook: str = "") -> None:
        """Tells the core what became of a batch, once it is known whether a view of it is left.

        `hook`: what raised the error, if that was no copy.
        """
        copied = self._copied
        handover = None if copied is None else copied.handover
        if error is not None and handover is None:
            clear_frames(error)  # Views may have been made before it failed.
        given = handover is not None and handover.given
        kept = [] if handover is None else handover.settle(error)
        text = "" if error is None else raised_by(hook, error)
        if kept:
            keeping = describe(ViewsKeptError(kept))
            text = f"{text}; {keeping}" if text else keeping
        proofs: list[Proof] = []
        if not text and copied is not None and copied.reading is not None:
            try:
                proofs = self._prove(copied.reading)
            except BaseException as raised:  # noqa: BLE001 - reported
                error, text = raised, describe(raised)
                clear_frames(error)
        missing, tally = "" if text else self._intake.missing(), self._intake.tally()
        if text:
            said = text.removeprefix(f"{hook} raised ")  # `_NAMES` says it already.
            log.error("%s: %s: %s", self._who, _NAMES[CopyWork], said, exc_info=error)
        with self._connection.acting():
            if text or not in_a_round(self._core):
                # What the core says now is that nothing of the round is read any more.
                self._intake.await_ahead()
            if text:
                self._kept = handover if kept else None
                self.still_read = isinstance(error, StillReadError)
                untouched = not (self._intake.touched or given)
                self._core.copied(
                    False,
                    _code_of(error),
                    bounded(text),
                    kept=bool(kept) or self.still_read,
                    untouched=untouched,
                )
            else:
                untouched = copied is not None and copied.nbytes == 0 and not given
                covered = not missing
                self._core.copied(
                    True,
                    covered=covered,
                    missing=missing,
                    untouched=untouched,
                    proofs=proofs,
                    tally=tally,
                )
            self._copied = None
            if self._intake.ahead:
                # Under the same lock: while a GPU reads a batch, the core has one at work.
                work = self._core.next_work()
                assert work is None or isinstance(work, CopyWork), f"{work} while a GPU copies"
                self._following = work
            self._connection.notify()
        if error is not None and not isinstance(error, Exception):
            raise error

    def _prove(self, reading: Reading) -> list[Proof]:
        """Returns the proofs of a batch, once what was taken in is seen to be what was published."""
        start = time.monotonic()
        try:
            reading.compare()
            return reading.read()
        finally:
            self._copy_s += time.monotonic() - start

    def holds(self) -> bool:
        """Whether views that a callback has kept still look into a trainer's memory."""
        return self.still_read or (self._kept is not None and bool(self._kept.kept()))

    @property
    def why_held(self) -> str:
        """Says what keeps it from a goodbye."""
        return "others may read for it" if self.still_read else "views are kept that on_stage got"

    def must_hold(self) -> bool:
        """As `holds`, also of a batch that was cut off; nothing is given any more. Under the lock."""
        if self._kept is None and self._copied is not None:
            self._kept = self._copied.handover
        return self.holds()

    def let_go(self) -> bool:
        """Says so when the last view that a callback had kept is gone; under the lock.

        Returns:
            Whether it is gone now, and was not before.
        """
        if self.still_read or self._kept is None or self._kept.kept():
            return False
        self._kept = None
        log.info("%s: the views that on_stage had kept are gone", self._who)
        with self._connection.acting():
            self._core.let_go()
            self._connection.notify()
        return True

    def _plan(self) -> None:
        with self._connection.mutex:
            known = [(offer.trainer, offer.number) for offer in self._core.state.offers]
            offers = self._intake.select(known)
        error: BaseException | None = None
        try:
            note, mapped = self._intake.plan(offers)
        except BaseException as raised:
            error = raised
            text = "what trainers offer could not be planned"
            log.error("%s: %s: %s", self._who, text, describe(raised), exc_info=raised)
            note, mapped = self._intake.give_up(offers, describe(raised))
        self._tell_unwanted()
        with self._connection.acting():
            self._core.planned(note, mapped)
            # What was interrupted is said above.
            self._kept_out.saw(note.missing if error is None else (), time.monotonic())
        if error is not None and not isinstance(error, Exception):
            raise error

    def tell_kept_out(self) -> None:
        """Says what keeps the worker out of rounds, if it has for a while; under the lock."""
        if missing := self._kept_out.due(time.monotonic()):
            shown = "; ".join(missing[:8]) + ("; ..." if len(missing) > 8 else "")
            log.warning("%s: is in no round, since it finds no source: %s", self._name, shown)

    def _tell_unwanted(self) -> None:
        """Says which names are for nobody here, once for each set of them."""
        names = self._intake.unwanted
        if names and names != self._told_unwanted:
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            # A part of a replica leaves to the other members what is theirs.
            level = logging.WARNING if self._core.size == 1 else logging.INFO
            log.log(level, "%d tensors are sent and not wanted here: %s", len(names), shown)
        self._told_unwanted = names

    def _unmap(self, work: UnmapWork) -> None:
        try:
            self._intake.unmap(work.trainer, work.buffers)
        finally:
            with self._connection.acting():
                self._core.unmapped()

    # ------------------------------------------------------------ after an interrupt

    def left_over(self) -> Work | None:
        """Returns work that was handed out and never begun; reports what was begun and cut off.

        An interrupt may hit anywhere, also between two lines of this module. To be called by the
        one who works, before it asks for more.
        """
        work = self._core.running
        if work is None or self._moving:
            return None
        if work is not self._begun:
            return work
        text = "the worker was interrupted"
        log.warning("%s: %s was given up: %s", self._who, _NAMES[type(work)], text)
        match work:
            case PrepareWork() | CommitWork() | AbortWork():
                self._report_hooks(work, RuntimeError(text), time.monotonic())
            case CopyWork():
                self._report_copy(RuntimeError(text))
            case _:
                return work  # May be done twice.
        return None


def in_a_round(core: WorkerCore) -> bool:
    """Whether there is a round that has not failed; looks without the lock."""
    rnd = core.state.round
    return rnd is not None and rnd.ending is None


def _code_of(error: BaseException | None) -> Code:
    if isinstance(error, VerifyError):
        return Code.NOT_VERIFIED
    return Code.UNREADABLE if isinstance(error, MappingError) else Code.COPY_FAILED


def _worse(first: BaseException | None, second: BaseException) -> BaseException:
    """Returns which of two errors counts: one that ends the program, else the first."""
    if first is None or (isinstance(first, Exception) and not isinstance(second, Exception)):
        return second
    return first


def _refuse_coroutine(result: object) -> None:
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError("this hook is a coroutine function: serve with astep() or versions()")
