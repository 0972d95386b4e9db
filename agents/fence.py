"""The fence: when a trainer may write to what it has registered, and who is served in between.

Registered weights change in place, at a step that announces nothing. Nobody may be reading then: a
guarded step waits for that. Between steps nothing changes, so that who is late may be served.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from ..protocol import messages as m
from ..protocol.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    RefusedError,
    TensorleaseError,
)
from ..protocol.limits import MAX_VERSION
from ..protocol.records import Code, Holder, Terms
from .agent import Agent
from .arguments import check_number, check_timeout, deadline_of
from .core import Effect
from .describe import readers
from .discovery import one_line
from .guard import Guard, Steps, unguarded
from .holders import keeps, name_of
from .registry import Registry
from .results import RoundHandle, RoundResult, StillLeasedError
from .span import Span
from .trainer_core import (
    Call,
    MembersChanged,
    RoundFinished,
    RoundRefused,
    TrainerCore,
)
from .waiting import seconds

log = logging.getLogger("tensorlease.agents")

KEPT_RESULTS = 100
"""Results of late rounds that a span remembers."""


class UnchangedSpan:
    """A span in which registered weights do not change; see `TrainerAgent.unchanged`.

    Attributes:
        results: What became of the rounds for who came late, the last 100.
    """

    def __init__(self, trainer: Fenced, version: int | None, timeout: float) -> None:
        self._trainer = trainer
        self._declared = version
        self._timeout = timeout
        self.results: deque[RoundResult] = deque(maxlen=KEPT_RESULTS)

    @property
    def version(self) -> int:
        """The version that who comes late gets now; 0: none."""
        return self._trainer._late_version()

    def __enter__(self) -> Self:
        self._trainer._enter_span(self, self._declared)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._trainer._leave_span(self, self._timeout)
        except StillLeasedError as late:
            if error is None:
                raise
            log.warning("%s", late)  # What ends the span otherwise counts more.


class Fenced(Agent[TrainerCore]):
    """The part of a trainer that says when its registered tensors may be written."""

    _registry: Registry
    _handles: dict[int, RoundHandle]
    _members_known: bool
    # Calls whose Void was answered, and whether the round had been decided before.
    _voided: dict[int, bool]

    def __init__(self, core: TrainerCore, endpoint: str | None, connect_timeout: float) -> None:
        self._span = Span()
        self._spans: list[UnchangedSpan] = []
        self._guards: list[Guard] = []
        # The rounds that were opened last: by the application, and for who came late.
        self._published: RoundHandle | None = None
        self._late: RoundHandle | None = None
        # Publishers that wait for their turn: no late round comes before them.
        self._publishing = 0
        # Whether all that is registered is guarded, and what that was found for.
        self._covered: tuple[object, bool] = (None, False)
        super().__init__(core, endpoint, connect_timeout)

    # ------------------------------------------------------------ the licence to write

    def may_write(self) -> bool:
        """Whether no worker reads, or may come to read, the registered tensors now.

        True is a permission to write by hand: nobody is served late from then on, until something
        is published again. In a span declared `unchanged` it is always False. Tensors that have a
        shadow are read by no worker.
        """
        self._check_here()
        with self._connection.mutex:
            if self._span.declared or self._core.leased(self._registry.exposed):
                return False
            self._span.permitted()
            return True

    def wait_writable(self, timeout: float = 60.0) -> None:
        """Waits until the registered tensors may be written: for steps written by hand.

        As a guarded step does: nobody is served late from then on, until something is published.

        Args:
            timeout: Limit in seconds.

        Raises:
            StillLeasedError: A worker may still read them; names who. Do not write.
            ConfigError: A span declared `unchanged` is under way.
        """
        self._wait_writable(timeout, "the weights must not be written")

    def guard(self, optimizer: Steps, timeout: float = 60.0, *, serve_late: bool = True) -> Guard:
        """Makes every `optimizer.step()` wait until no worker reads the registered tensors.

        Only steps are guarded: `zero_grad` writes gradients, which nobody reads, but
        `load_state_dict`, `copy_` and whatever else writes weights is to be preceded by
        `wait_writable`. Guard every optimizer that writes to registered tensors.

        From the end of a publish until the next guarded step begins, the weights count as
        `unchanged`: replicas that come late are served by rounds of their own, if this trainer is
        alone and all that is registered belongs to guarded optimizers (or is a parameter that
        takes no gradient). A step that comes meanwhile waits for such a round.

        Args:
            optimizer: A `torch.optim.Optimizer`, or anything with its `register_step_pre_hook`.
            timeout: Limit of one wait in seconds. After it the step raises `StillLeasedError`,
                which names who may be reading, and has not run; `void` ends the wait for good.
            serve_late: False: who comes late waits for the next version.

        Returns:
            A guard with `remove()`, also a context manager. `close` removes it.

        Raises:
            ConfigError: The optimizer calls no hooks.
        """
        self._check_here()
        timeout = check_timeout("timeout", timeout)
        if not callable(getattr(optimizer, "register_step_pre_hook", None)):
            raise ConfigError(
                f"a {type(optimizer).__name__} has no register_step_pre_hook: call wait_writable()"
                " before each of its steps, or guard the optimizer inside it"
            )
        guard = Guard(self, optimizer, timeout, serve_late)
        with self._connection.mutex:
            self._guards.append(guard)
        return guard

    def unchanged(self, version: int | None = None, *, timeout: float = 60.0) -> UnchangedSpan:
        """Promises that the registered tensors do not change in the `with` block that follows.

        In it, a complete replica that is not at the last published version (it came late, was
        skipped, or failed) is served by a round of its own: the same version, a new call. One that
        fails is tried again after 1 s, then ever more rarely, up to once a minute. Guarded steps
        are refused. Leaving the block waits until no such round is under way.

        Args:
            version: What the weights are, after a restart from a checkpoint say; default: what
                this trainer has published last. Nothing is served before something was published.
            timeout: Limit of leaving, in seconds.

        Returns:
            A context manager with `version`, which late ones get now, and `results`.

        Raises:
            ConfigError: There are more ranks than this one.
            RefusedError: (On entering.) The version is below the channel's last.
            StillLeasedError: (On leaving.) A late round is still under way; do not write.
        """
        self._check_here()
        timeout = check_timeout("timeout", timeout)
        if version is not None:
            version = check_number("version", version)
            if not 1 <= version <= MAX_VERSION:
                raise ConfigError(f"version {version}: must be a number from 1 to {MAX_VERSION}")
        if self._core.world_size > 1:
            raise ConfigError(
                f"unchanged() with {self._core.world_size} ranks: each would open rounds at times of"
                " its own; call publish(the same version) on all ranks, which serves who is not at"
                " it yet"
            )
        return UnchangedSpan(self, version, timeout)

    def void(self, which: RoundHandle | int, timeout: float = 30.0) -> bool:
        """Gets the licence to write to the tensors before a round has released them.

        The round then commits nowhere any more, unless it was decided before.

        Args:
            which: The round's handle, or its version.
            timeout: Limit in seconds.

        Returns:
            Whether it had been decided before.

        Raises:
            ConfigError: There is no such round.
            DeadlineError: The broker has not answered; there is no licence.
        """
        self._check_here()
        deadline = deadline_of(timeout)
        with self._connection.acting():
            handle = self._find_handle(which)
            if handle is None:
                known = ", ".join(str(each.version) for each in self._handles.values())
                raise ConfigError(
                    f"{which!r} is no round that this trainer has opened last: give a handle of"
                    f" publish_nowait, or a version of {known or 'its rounds, of which there is none'}"
                )
            call = handle.call
            self._span.changed()
            if call not in self._voided and not handle.over:
                self._core.void(call)
        self._connection.wait_until(
            lambda: call in self._voided or handle.over,
            deadline,
            lambda lasted: DeadlineError(
                f"the broker has not answered within {seconds(lasted)} that version {handle.version} is"
                " void; until it does, its tensors must not be written"
            ),
        )
        return self._voided.get(call, handle.decided)

    def _find_handle(self, which: RoundHandle | int) -> RoundHandle | None:
        if isinstance(which, RoundHandle):
            return which if self._handles.get(which.call) is which else None
        found = [handle for handle in self._handles.values() if handle.version == which]
        # Who came late had a round of its own, of the same version: the one that is still read.
        kept = [handle for handle in found if not handle.over and handle.call not in self._voided]
        chosen = kept or found
        return chosen[-1] if chosen else None

    # ------------------------------------------------------------ inside

    def _wait_writable(self, timeout: float, otherwise: str) -> None:
        """Ends the span in which late ones are served, and waits for who reads."""
        self._check_here()
        deadline = deadline_of(timeout)
        with self._connection.mutex:
            if self._span.declared:
                raise ConfigError(
                    f"{otherwise}: trainer.unchanged() has promised that the weights stay as they"
                    " are; leave its block first"
                )
            self._span.changed()
            self._connection.wait_until(
                lambda: not self._core.leased(self._registry.exposed),
                deadline,
                lambda lasted: self._still_leased(
                    self._registry.exposed, f"{otherwise}: after {seconds(lasted)}"
                ),
            )

    def _still_leased(self, buffers: list[int], head: str) -> StillLeasedError:
        """Says who may still read these buffers."""
        calls = self._core.leased(buffers)
        handles = [self._handles[call.call] for call in calls if call.call in self._handles]
        holders = [holder for call in calls for holder in self._holders(call)]
        texts = [
            f"version {call.terms.version} (call {call.call}) {self._reads(call)}" for call in calls
        ]
        if not self._core.connected:
            why = one_line(self._connection.unreachable())
            texts.append(f"no broker can say that they are done: {why}")
        version = calls[-1].terms.version if calls else 0
        return StillLeasedError(
            f"{head} {'; '.join(texts)}. Wait again, or give the round up by"
            f" trainer.void({version})",
            holders,
            handles,
        )

    def _holders(self, call: Call) -> list[Holder]:
        handle = self._handles.get(call.call)
        if handle is not None and handle.stuck:
            return handle.stuck
        return [
            Holder(id.instance, id.replica, id.member, id.processes[0].pid)
            for id in readers(call, handle, self._core.state.replicas)
        ]

    def _reads(self, call: Call) -> str:
        handle = self._handles.get(call.call)
        if handle is not None and handle.stuck:
            kept = ", ".join(keeps(holder, handle.finished.reached) for holder in handle.stuck)
            return f"may still be read: {kept}"
        names = ", ".join(map(name_of, self._holders(call)))
        if not names and call.receivers is not None:
            return "is not released yet by the broker"
        if not names:
            return "is not admitted yet, and its receivers may come to read"
        return f"may still be read by {names}"

    @contextmanager
    def _having_turn(self) -> Iterator[None]:
        """No round for late ones is opened in the block: a publisher waits."""
        with self._connection.mutex:
            self._publishing += 1
        try:
            yield
        finally:
            with self._connection.acting():
                self._publishing -= 1

    # ------------------------------------------------------------ guards

    def _forget_guard(self, guard: Guard) -> None:
        with self._connection.mutex:
            if guard in self._guards:
                self._guards.remove(guard)
            self._span.unguarded()

    def _drop_guards(self) -> None:
        """The trainer has closed: nobody can ask for its memory any more."""
        for guard in list(self._guards):
            guard.remove()

    def _is_guarded(self) -> bool:
        """Whether all that is registered changes by guarded steps alone; under the lock."""
        if not self._guards or self._core.world_size > 1:
            return False
        key = (tuple(self._registry.numbers), tuple((id(g), g.count()) for g in self._guards))
        if self._covered[0] != key:
            self._covered = key, self._look_whether_guarded()
        return self._covered[1]

    def _look_whether_guarded(self) -> bool:
        others = unguarded(self._guards, self._registry.all())
        if others:
            log.info(
                "%r: who comes late waits for the next version: %d registered tensors (%r ...)"
                " belong to no guarded optimizer",
                self,
                len(others),
                others[0],
            )
        return others == []

    # ------------------------------------------------------------ spans

    def _late_version(self) -> int:
        with self._connection.mutex:
            return self._span.version

    def _enter_span(self, span: UnchangedSpan, version: int | None) -> None:
        self._check_here()
        with self._connection.acting():
            last = self._core.state.last_version
            if version is not None and version < last:
                raise RefusedError(
                    f"unchanged({version}): the channel is at version {last} already, and versions"
                    " rise; publish what the weights are as a higher one",
                    Code.VERSION_NOT_RISING.value,
                )
            self._span.enter(version, self._core.next_call() - 1)
            self._spans.append(span)
            self._serve_late()

    def _leave_span(self, span: UnchangedSpan, timeout: float) -> None:
        if os.getpid() != self._pid:
            return
        with self._connection.mutex:
            self._span.leave()
            late = self._late
            if late is None or late.over or self._closing:
                self._spans.remove(span)
                return
        try:
            self._connection.wait_until(
                lambda: late.over,
                time.monotonic() + timeout,
                lambda lasted: StillLeasedError(
                    f"the span has not ended: after {seconds(lasted)} version {late.version} (call"
                    f" {late.call}) for who came late is still under way. Do not write before its"
                    " end, or give it up by trainer.void()",
                    late.stuck,
                    [late],
                ),
            )
        except ClosedError:
            pass  # The trainer was closed meanwhile, which waits for all that can be waited for.
        finally:
            with self._connection.mutex:
                self._spans.remove(span)

    def _note_published(self, terms: Terms, handle: RoundHandle) -> None:
        """A round of what is registered was handed out; under the lock."""
        self._published = handle
        if handle.subset:
            # What it did not carry may be of no published version any more.
            self._span.changed()
            return
        # The originals of a snapshot may be written at once, by whoever likes.
        guarded = self._is_guarded() and (handle.carries is None or handle.carries.registered)
        self._span.published(terms, guarded=guarded)

    def _serve_late(self) -> None:
        """Opens a round for who came late, if one is due; called under the lock."""
        core = self._core
        if not self._span.version or self._publishing or self._closing or not core.connected:
            return
        if not self._members_known or not self._is_idle() or core.world_size > 1:
            return
        if not self._registry.numbers:
            return
        now = time.monotonic()
        terms = self._span.due(core.state.replicas, core.next_call() - 1, now)
        if terms is None:
            return
        try:
            self._registry.check()
            carries = None if self._published is None else self._published.carries
            if not terms.verify or (carries and carries.buffers != self._registry.numbers):
                carries = None
            if terms.verify and carries is None:  # They cannot be made here, under the lock.
                raise RefusedError(
                    f"version {terms.version} was published with verify=True, and not by what is"
                    " registered now: there are no digests for it; publish it again",
                    Code.NOT_VERIFIED.value,
                )
            handle = RoundHandle(
                self, terms.version, self._missing, carries=carries, drive=self._connection.drive
            )
            self._open(terms, handle)
        except TensorleaseError as error:
            log.warning("%r: who came late is not served: %s", self, error)
            self._span.refused(now)
        else:
            self._late = handle

    def _open(self, terms: Terms, handle: RoundHandle) -> None:
        """Opens a round of all that is registered; called under the lock."""
        raise NotImplementedError

    def _missing(self, handle: RoundHandle) -> str:
        """Says whom a round waits for."""
        raise NotImplementedError

    def _is_idle(self) -> bool:
        """Whether no round of this trainer is under way."""
        raise NotImplementedError

    # ------------------------------------------------------------ from the connection, under its lock

    def on_message(self, message: m.FromBroker, body: bytes | None) -> None:
        """See `connection.Owner`: beats are the clock of what is tried again."""
        if isinstance(message, m.BeatOk):
            self._serve_late()

    def on_effect(self, effect: Effect) -> None:
        """See `connection.Owner`."""
        now = time.monotonic()
        match effect:
            case RoundFinished(call, result):
                if self._late is not None and self._late.call == call:
                    self._span.ended(result, now, late=True)
                    self._note_late(RoundResult(result))
                elif self._published is not None and self._published.call == call:
                    self._span.ended(result, now, late=False)
                self._serve_late()
            case RoundRefused(call, _, text):
                if self._late is not None and self._late.call == call:
                    log.info("%r: a round for who came late was refused: %s", self, text)
                    self._span.refused(now)
            case MembersChanged():
                self._serve_late()
            case _:
                pass

    def _note_late(self, result: RoundResult) -> None:
        for span in self._spans:
            span.results.append(result)
        names = ", ".join(f"{o.name} {o.fate.value}" for o in result.receivers.values())
        log.info("%r: version %d for who came late: %s", self, result.version, names or result)
