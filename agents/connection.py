"""One agent's connection: its core behind a lock, its session, its socket in the poll loop.

The application's thread acts on the core inside `acting()`; what the core wants sent is encoded
there, queued in order, and sent by the thread that polls, which alone touches the socket.
"""

from __future__ import annotations

import enum
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import msgspec

from ..protocol import messages as m
from ..protocol.codec import decode_from_broker, encode
from ..protocol.endpoint import Endpoint, Transport
from ..protocol.errors import (
    ClosedError,
    DeadlineError,
    InternalError,
    NoBrokerError,
    ProtocolError,
    RefusedError,
    TensorleaseError,
)
from . import poll_loop
from .core import Effect, Farewell, Joined, Post, Reconnect, TurnedAway
from .dealer import Dealer
from .discovery import REFUSED, NotFoundError, find_broker, one_line
from .interrupts import HeldBack
from .live import LiveLock
from .outage import Outage
from .poll_loop import PollLoop, Ready
from .trainer_core import TrainerCore
from .waiting import Wait
from .worker_core import WorkerCore

log = logging.getLogger("tensorlease.agents")

FIRST_BACK_OFF_S = 0.05
LAST_BACK_OFF_S = 2.0
MAX_OUTBOX = 10_000
"""Messages that may wait for the socket; one more ends the session, and Hello repeats them."""
GOODBYE_S = 30.0
"""How long a goodbye is tried after `leave` has given up waiting for its answer."""
STALL_S = 1.0
"""A turn that comes so late was held up here; then the broker's silence proves nothing."""


class Owner(Protocol):
    """The agent that a connection belongs to. All is called under the connection's lock."""

    def on_message(self, message: m.FromBroker, body: bytes | None) -> None:
        """A message has come; the core gets it next."""

    def on_effect(self, effect: Effect) -> None:
        """The core wants something that is not about the connection."""

    def on_beat(self) -> None:
        """A beat is due: a time to look at what changes by itself. In the poll thread."""

    def on_broken(self, error: TensorleaseError) -> None:
        """Nothing will come any more: everyone who waits has to be told."""


class Stage(enum.Enum):
    """How far a connection is."""

    NEW = "new"
    """Not begun."""
    LOOKING = "looking"
    """No socket; looks for the broker, with growing pauses."""
    GREETING = "greeting"
    """Hello was sent, or waits to be."""
    OPEN = "open"
    ENDED = "ended"


class Connection:
    """The sessions of one agent.

    Args:
        core: The agent's state machine.
        endpoint: The broker's address; empty: where agents look by default.
        owner: Returns the agent, or None once it is gone; so that it can be collected.
        abandoned: Called by the poll thread before it says goodbye for an agent that was collected:
            nothing may be read any more.
    """

    def __init__(
        self,
        core: TrainerCore | WorkerCore,
        endpoint: str,
        owner: Callable[[], Owner | None],
        abandoned: Callable[[], None],
    ) -> None:
        self._core = core
        self._given = endpoint
        self._owner = owner
        self._on_abandoned = abandoned
        self._outage = Outage()
        # Guards everything here and the core. Entered itself and not by the condition, whose own
        # `with` is Python: an interrupt in there would leave it locked for good.
        self.mutex = threading.RLock()
        # Notified whenever something that can be waited for may have happened.
        self.changed = threading.Condition(self.mutex)
        # Notifications so far.
        self._notified = 0
        # Called with each notification, under the lock: how coroutines wait.
        self._listeners: set[Callable[[], None]] = set()
        self.stage = Stage.NEW
        # Why there is no session now, if that is known.
        self.problem: TensorleaseError | None = None
        # Waiting does not help against the problem.
        self._hopeless = False
        # Why there will never be a session again.
        self.broken: TensorleaseError | None = None
        self.welcome: m.Welcome | None = None
        # Found once, kept for good: agents and lock belong to that broker.
        self.endpoint: Endpoint | None = None
        self._lock: LiveLock | None = None
        self._loop: PollLoop | None = None
        self._dealer: Dealer | None = None
        # What the session has to say, in order.
        self._outbox: deque[list[bytes]] = deque()
        self._wants_session = False
        # Said goodbye; until when an answer is awaited; and that it has come.
        self._leave_until = math.inf
        self._left = False
        # The owner was collected without having been closed.
        self._abandoned = False
        self._tries = 0
        # Monotonic times: next look for the broker, next beat, last word from the broker, end of
        # the greeting, and when the next turn is due.
        self._look_at = 0.0
        self._beat_at = 0.0
        self._heard_at = 0.0
        self._greeted_at = 0.0
        self._due_at = math.inf

    # ------------------------------------------------------------ the application's threads

    def start(self) -> None:
        """Begins to connect; does nothing if it has begun.

        Raises:
            ConfigError: See `poll_loop.check`.
        """
        with HeldBack(), self.mutex:
            if self.stage is Stage.NEW:
                poll_loop.check()
                self.stage = Stage.LOOKING
                self._loop = poll_loop.serve(self)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """The block may call the core; what that causes is carried out when it ends."""
        with self.mutex:
            try:
                yield
            finally:
                self._carry_out()
                if self._loop is not None:
                    if self._wants_session:
                        self._loop.wake()
                    elif self._outbox:
                        self._loop.send(self)

    def wait_until(
        self,
        done: Callable[[], bool],
        deadline: float,
        late: Callable[[float], TensorleaseError],
        *,
        quiet: bool = False,
    ) -> None:
        """Waits until `done()`; a wait that lasts is said in the log, now and then.

        Args:
            done: Called under the lock.
            deadline: In monotonic seconds.
            late: Returns what there is to say after so many seconds. Called under the lock.
            quiet: The log has it already, or it is in the order of things.

        Raises:
            DeadlineError: `late()`: the deadline has passed.
            TensorleaseError: The connection is broken.
        """
        wait = Wait(time.monotonic(), deadline, quiet=quiet)
        with self.mutex:
            while (left := self._left_to_wait(done, wait, late)) is not None:
                self._wait(left)

    async def await_until(
        self,
        done: Callable[[], bool],
        deadline: float,
        late: Callable[[float], TensorleaseError],
        *,
        quiet: bool = False,
    ) -> None:
        """As `wait_until`, for coroutines."""
        import asyncio

        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        wait = Wait(time.monotonic(), deadline, quiet=quiet)

        def listener() -> None:
            with suppress(RuntimeError):  # A loop that was closed has nobody who waits.
                loop.call_soon_threadsafe(event.set)

        with self.mutex:
            self._listeners.add(listener)
        try:
            while True:
                with self.mutex:
                    left = self._left_to_wait(done, wait, late)
                if left is None:
                    return
                try:
                    async with asyncio.timeout(left):
                        await event.wait()
                except TimeoutError:
                    continue
                event.clear()
        finally:
            with self.mutex:
                self._listeners.discard(listener)

    def _wait(self, seconds: float) -> None:
        """Lets go of the lock until a notification comes, or so long, and holds it afterwards."""
        held = _times_held(self.mutex)
        loop, seen = self._loop, self._notified
        try:
            if loop is None or not loop.vacant:
                self.changed.wait(seconds)
                return
            # As the condition does it.
            state = self.changed._release_save()  # type: ignore[attr-defined]
            loop.drive(seconds, lambda: self._notified != seen)
            self.changed._acquire_restore(state)  # type: ignore[attr-defined]
        except BaseException:
            # An interrupt that comes in the midst of it may leave the lock let go of.
            while _times_held(self.mutex) < held:
                self.mutex.acquire()
            raise

    def drive(self, seconds: float, over: Callable[[], bool]) -> bool:
        """See `PollLoop.drive`; False also where nothing is polled. Without the lock."""
        loop = self._loop
        return loop is not None and loop.vacant and loop.drive(seconds, over)

    def _left_to_wait(
        self, done: Callable[[], bool], wait: Wait, late: Callable[[float], TensorleaseError]
    ) -> float | None:
        if done():
            return None
        self.raise_if_broken()
        now = time.monotonic()
        if wait.over(now):
            raise late(wait.lasted(now))
        if wait.due(now):
            log.warning("%s still waits: %s", self._name, late(wait.lasted(now)))
        return min(wait.pause(now), threading.TIMEOUT_MAX)

    def raise_if_broken(self) -> None:
        """Raises what ended the connection, if it has ended."""
        if self.broken is not None:
            raise self.broken.with_traceback(None)
        if self.stage is Stage.ENDED:
            raise ClosedError(f"{self._name} is closed")

    def is_open(self) -> bool:
        """Whether there is a session; raises at once when waiting for one does not help."""
        if self._hopeless and self.problem is not None and not self._core.connected:
            raise self.problem.with_traceback(None)
        return self._core.connected

    def unreachable(self, _: float = 0.0) -> TensorleaseError:
        """Why there is no session, for who has waited long enough."""
        if self.problem is not None:
            return self.problem.with_traceback(None)
        place = self.endpoint or self._given or "any of the usual places"
        return NoBrokerError(f"the broker at {place} does not answer; is it stopped?")

    def notify(self) -> None:
        """Wakes everyone who waits, to look again; called under the lock."""
        self._notified += 1
        self.changed.notify_all()
        if self._loop is not None:
            self._loop.changed()
        for listener in list(self._listeners):
            listener()

    def leave(self, timeout: float) -> bool:
        """Says goodbye and waits for the answer; returns whether it came in time.

        If not, the goodbye goes on in the background for a while: until the broker has answered,
        or the process ends, the agent's lock tells that it lives.
        """
        with self.mutex:
            if self.stage in (Stage.NEW, Stage.ENDED):
                self._end()
                return True
        with self.acting():
            now = time.monotonic()
            known = self.welcome is not None or self.stage is Stage.GREETING
            self._leave_until = now + timeout + GOODBYE_S if known else now
            self._core.bye()
        assert self._loop is not None
        self._loop.wake()
        try:
            self.wait_until(
                lambda: self.stage is Stage.ENDED,
                time.monotonic() + timeout,
                lambda _: DeadlineError("no answer to the goodbye"),
                quiet=True,
            )
        except DeadlineError:
            log.info("%s: the broker has not answered the goodbye yet", self._name)
            return False
        except TensorleaseError:
            pass  # Broken before: nobody to say goodbye to.
        return True

    def abandon(self) -> None:
        """The agent was collected: says goodbye in the background. Takes no lock of its own.

        It may run in the middle of anything, also where this thread holds any lock.
        """
        self._abandoned = True
        if self._loop is not None:
            self._loop.wake()

    # ------------------------------------------------------------ effects

    def _carry_out(self) -> None:
        """Carries out what the core wants, in order; called under the lock."""
        told = False
        while effects := self._core.take_effects():
            for effect in effects:
                if isinstance(effect, Post):
                    self._post(effect)
                else:
                    told = True
                    self._react(effect)
        if told:
            self.notify()

    def _post(self, post: Post) -> None:
        envelope = encode(post.message)
        self._outbox.append([envelope] if post.body is None else [envelope, post.body])
        if len(self._outbox) > MAX_OUTBOX:
            self._wants_session = True

    def _react(self, effect: Effect) -> None:
        match effect:
            case Reconnect():
                self._wants_session = True
            case Joined(welcome):
                self._on_joined(welcome)
            case TurnedAway(code, text, retry):
                self._on_turned_away(RefusedError(text, code.value), retry)
            case Farewell():
                self._left = True
            case _:
                owner = self._owner()
                if owner is not None:
                    owner.on_effect(effect)

    def _on_joined(self, welcome: m.Welcome) -> None:
        self.welcome = welcome
        self.stage = Stage.OPEN
        self.problem, self._hopeless, self._tries = None, False, 0
        self._beat_at = time.monotonic() + welcome.durations.beat_s
        if (line := self._outage.over(time.monotonic())) is not None:
            log.warning("%s: %s", self._name, line)
        log.info("%s: connected to %s", self._name, self.endpoint)

    def _on_turned_away(self, error: RefusedError, retry: bool) -> None:
        self._set_problem(error)
        self._wants_session = retry
        self._left = self.welcome is None and self._core.session.leaving  # It has never been in.
        if not retry:
            log.error("%s: refused: %s", self._name, error)
            self._break(error)

    def _set_problem(self, problem: TensorleaseError, hopeless: bool = False) -> None:
        """Remembers why there is no session; says it in the log now and then."""
        if (line := self._outage.problem(one_line(problem), time.monotonic())) is not None:
            log.warning("%s: %s", self._name, line)
        self.problem, self._hopeless = problem, hopeless

    def _break(self, error: TensorleaseError) -> None:
        self.broken = error
        owner = self._owner()
        if owner is not None:
            owner.on_broken(error)

    @property
    def _name(self) -> str:
        kind = "trainer" if isinstance(self._core, TrainerCore) else "worker"
        return f"{kind} {self._core.me.instance} of channel {self._core.me.channel!r}"

    # ------------------------------------------------------------ the poll thread

    def turn(self, loop: PollLoop, ready: Ready) -> float | None:
        """See `poll_loop.Served`."""
        problem, hopeless = self._look()
        with self.mutex:
            now = time.monotonic()
            if problem is not None:
                self._set_problem(problem, hopeless)
                self._back_off(now)
                self._broker_may_be_gone(problem)
                self.notify()
            elif self.stage is Stage.LOOKING and now >= self._look_at and not self._over(now):
                self._greet(loop, now)
            if self._abandoned and math.isinf(self._leave_until):
                self._leave_until = now + GOODBYE_S
                self._on_abandoned()
                self._core.bye()
            self._read(ready)
            self._carry_out()
            self._watch_time(now)
            if self._wants_session:
                self._wants_session = False
                self._lose()
                self._back_off(now)
            if self._over(now):
                self._end()
                return None
            if self._dealer is not None:
                self._dealer.send(self._outbox)
            self._due_at = self._next_due()
            return self._due_at

    def flush(self) -> None:
        """See `poll_loop.Served`."""
        with self.mutex:
            if self._dealer is not None and self._outbox and not self._wants_session:
                self._dealer.send(self._outbox)

    def crashed(self, error: Exception) -> None:
        """See `poll_loop.Served`."""
        with self.mutex:
            self._break(InternalError(f"a defect ended the connection: {error!r}"))
            self._end()

    def _over(self, now: float) -> bool:
        return self._left or self.broken is not None or now >= self._leave_until

    def _look(self) -> tuple[TensorleaseError | None, bool]:
        """Sees whether a broker listens, without the lock: this may take a moment.

        ZMQ itself would connect to a place where nobody is, and say nothing.
        """
        if self.stage is not Stage.LOOKING or time.monotonic() < self._look_at:
            return None, False
        try:
            place = find_broker(str(self.endpoint) if self.endpoint else self._given)
            self._prepare(place)
        except TensorleaseError as error:
            return error, isinstance(error, NotFoundError) and error.hopeless
        return None, False

    def _prepare(self, place: Endpoint) -> None:
        """Takes the lock that proves that this agent lives, before any Hello."""
        if place.transport is Transport.IPC:
            core = self._core
            if self._lock is None:
                self._lock = LiveLock(place.live_directory, core.me.instance, core.live_note)
            self._lock.acquire()
        self.endpoint = place

    def _broker_may_be_gone(self, problem: TensorleaseError) -> None:
        """A socket that refuses has no listener: the broker that was there has ended.

        It closes this connection and its listener at its end only; that this one fell too is what
        brought us here.
        """
        refused = REFUSED in str(problem)
        if refused and self.welcome is not None and isinstance(self._core, TrainerCore):
            self._core.broker_gone()
            self._carry_out()

    def _greet(self, loop: PollLoop, now: float) -> None:
        assert self.endpoint is not None
        self._dealer = Dealer(loop, self.endpoint.url)
        self._outbox.clear()
        self.stage = Stage.GREETING
        self._greeted_at = self._heard_at = now
        me = self._core.me
        self._core.me = msgspec.structs.replace(me, locked=self._lock is not None)
        self._outbox.append([encode(self._core.hello())])

    def _read(self, ready: Ready) -> None:
        dealer = self._dealer
        if dealer is None:
            return
        for frames in dealer.receive(ready):
            self._heard_at = time.monotonic()
            self._take(frames)
            if self._wants_session or self.broken is not None:
                return
        if dealer.is_lost(ready):
            self._set_problem(NoBrokerError(f"the broker at {self.endpoint} has gone"))
            self._wants_session = True

    def _take(self, frames: list[bytes]) -> None:
        """Gives one message to the owner and the core."""
        body = frames[1] if len(frames) > 1 else None
        try:
            message = decode_from_broker(frames[0])
        except ProtocolError as error:
            log.warning("%s: dropped: %s", self._name, error)
            return
        owner = self._owner()
        if owner is not None:
            owner.on_message(message, body)
        self._core.receive(message, body)
        self._carry_out()

    def _watch_time(self, now: float) -> None:
        if self._dealer is None:
            return
        if now > self._due_at + STALL_S:
            self._heard_at = now
        silent_s = self._core.session.durations.silent_s
        if now - max(self._heard_at, self._greeted_at) >= silent_s:
            self._set_problem(
                NoBrokerError(f"the broker at {self.endpoint} was not heard for {silent_s:g} s")
            )
            self._wants_session = True
        elif self.stage is Stage.OPEN and now >= self._beat_at:
            self._beat_at = now + self._core.session.durations.beat_s
            owner = self._owner()
            if owner is not None:
                owner.on_beat()
            if isinstance(self._core, WorkerCore):
                self._core.beat()
            else:
                self._core.post(m.Beat(self._core.session.number))
            self._carry_out()

    def _next_due(self) -> float:
        if self._dealer is None:
            return min(self._look_at, self._leave_until)
        silence = max(self._heard_at, self._greeted_at) + self._core.session.durations.silent_s
        beat = self._beat_at if self.stage is Stage.OPEN else math.inf
        return min(silence, beat, self._leave_until)

    def _back_off(self, now: float) -> None:
        """Waits at random, so that a broker's return does not meet all its agents at once."""
        longest = min(LAST_BACK_OFF_S, FIRST_BACK_OFF_S * 2 ** min(self._tries, 10))
        self._tries += 1
        self._look_at = now + random.uniform(0, longest)

    def _lose(self) -> None:
        """Ends the session; everything that it did not say, the next Hello says."""
        self._hang_up()
        self._core.disconnected()
        if self.stage is not Stage.ENDED:
            self.stage = Stage.LOOKING
        self.notify()

    def _hang_up(self) -> None:
        dealer, self._dealer = self._dealer, None
        self._outbox.clear()
        if dealer is not None:
            dealer.close()

    def _end(self) -> None:
        """Nothing follows: the socket is closed, the lock let go."""
        if self.stage is Stage.ENDED:
            return
        self._hang_up()
        self._core.disconnected()
        self.stage = Stage.ENDED
        if self._lock is not None:
            self._lock.release()
        if self.broken is None:
            owner = self._owner()
            if owner is not None:
                owner.on_broken(ClosedError("the agent was closed"))
        self.notify()


def _times_held(lock: Any) -> int:
    """How often this thread has taken the lock; at most once by a Python that cannot tell."""
    return int(getattr(lock, "_recursion_count", lock._is_owned)())
