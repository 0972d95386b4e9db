"""Between the wire and the ledger: who speaks on which connection, and what the ledger wants done.

A connection is a session's as soon as its Hello was proved and accepted; before that it may ask
queries and is told WhoAreYou, no more. Effects are carried out in the order in which the ledger
gave them, and never while it works.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

import zmq
from msgspec import Struct

from ..protocol import messages as m
from ..protocol.codec import ListEncoder, decode_from_agent, encode
from ..protocol.errors import ProtocolError
from ..protocol.records import Code, QueryKind
from . import queries, stories
from .absentees import Absentees, ReaderWatch
from .config import BrokerConfig
from .credentials import UNKNOWN_ID, AccessPolicy, PeerCredentials, peer_of
from .ledger import Ledger
from .ledger import effects as fx
from .liveness import ProcessWatch, UnprovenProcessError
from .locks import LiveLocks
from .loops import busy_seconds
from .wire import Wire

if TYPE_CHECKING:
    from .meter import Meter  # its library is needed by the HTTP port alone

log = logging.getLogger("tensorlease.broker")

Seam = Callable[[str, str], None]
"""For fault tests: called with "received" or "sent" and the name of a message's type, after it."""

NOBODY = "0" * 16
"""The addressee of an answer to who has not said its instance."""
STALL_S = 1.0
"""A broker whose loop did not run for longer judges nobody before it has read its input."""
GRACE_S = 0.25
"""How long it reads then: libzmq's own thread was stopped as well, and has to catch up first."""
ANSWER_EVERY_S = 0.5
"""Least time between two answers to rubbish, or to unknown messages, over one connection."""
MAX_THROTTLED = 4096
_HELLO = (m.TrainerHello, m.WorkerHello)
FULL_DRAIN = 65_536


class Connection(Struct):
    """An open session."""

    instance: str
    peer: PeerCredentials


class Throttle:
    """Says whether it is time to answer a connection again; remembers a bounded number of them."""

    def __init__(self) -> None:
        self._next: OrderedDict[Hashable, float] = OrderedDict()

    def allows(self, key: Hashable, now: float) -> bool:
        """True at most once in `ANSWER_EVERY_S` for each key."""
        if now < self._next.get(key, 0.0):
            return False
        self._next[key] = now + ANSWER_EVERY_S
        self._next.move_to_end(key)
        if len(self._next) > MAX_THROTTLED:
            self._next.popitem(last=False)
        return True


class Dispatcher:
    """Feeds the ledger and does what it asks for.

    Args:
        loop: The event loop, in whose thread everything happens.
        config: The settings.
        ledger: The ledger.
        locks: The live locks.
        policy: Who may speak.
        on_sweep: Called with its instance when an agent died that may have left shared memory.
        seam: For fault tests.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: BrokerConfig,
        ledger: Ledger,
        locks: LiveLocks,
        policy: AccessPolicy,
        on_sweep: Callable[[str], None],
        seam: Seam | None = None,
    ) -> None:
        self.policy = policy
        self.counters = queries.Counters()
        # The broker was told to end: nothing makes it admit rounds again.
        self.ending = False
        # What counts for the HTTP port, where there is one.
        self.meter: Meter | None = None
        # Instances that left or died, whose live files may be there, or needed as proof, still.
        self.dead: set[str] = set()
        self._loop = loop
        self._config = config
        self._ledger = ledger
        self._locks = locks
        self._on_sweep = on_sweep
        self._seam = seam
        self._watch = ProcessWatch(loop, locks, self._process_ended)
        self._absentees = Absentees(loop, locks, self._absentee_gone)
        self._readers = ReaderWatch(loop, self._readers_gone)
        # Sessions by route, and the route of each session's instance.
        self._connections: dict[bytes, Connection] = {}
        self._routes: dict[str, bytes] = {}
        busy_s = busy_seconds(config.busy_poll)
        self.wire = Wire(loop, self, self._connections, config.limits, busy_s)
        self._throttle = Throttle()
        self._encoder = ListEncoder()
        # Sessions that the wire dropped while effects were carried out.
        self._lost: list[str] = []
        # Who said the Hello that the ledger works on.
        self._hello_instance = ""
        self._hello_peer: PeerCredentials | None = None
        # The timer of the ledger's next check and when it is due; monotonic seconds.
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")
        self._halted = False
        # When the loop last ran, and before which time nobody is judged.
        self._awake = time.monotonic()
        self._judge_after = 0.0

    def start(self) -> None:
        """Begin to receive, and to look at the agents that have to announce themselves."""
        for instance in self._locks.held_instances() | self._locks.free_instances():
            self._absentees.add(instance)
        self._awake = time.monotonic()
        self.wire.start()
        self._rearm()

    def halt(self) -> None:
        """Do nothing any more but `close`: after a defect nothing that is known can be relied on."""
        self._halted = True
        self.wire.halt()

    def close(self, linger_s: float) -> None:
        """Tell every agent that this broker ends, and close the socket."""
        for instance, route in self._routes.items():
            self.wire.send(route, encode(m.Stopping(self._ledger.state.epoch, instance)))
        if self._timer is not None:
            self._timer.cancel()
        self._absentees.close()
        self._readers.close()
        self._watch.close()
        self.wire.close(linger_s)

    # ------------------------------------------------------------ from the wire

    def received(
        self, route: bytes, envelope: bytes, body: bytes | None, frame: zmq.Frame | None
    ) -> None:
        """A message came in; see `WireEvents`."""
        try:
            message = decode_from_agent(envelope)
        except ProtocolError as error:
            self.malformed(route, str(error))
            return
        if body is not None and (text := self._wrong_body(message, body)):
            self.malformed(route, text)
            return
        connection = self._connections.get(route)
        now = time.monotonic()
        if isinstance(message, _HELLO):
            self._hello(route, message, connection, frame, now)
        elif isinstance(message, m.Query):
            self._query(route, message, connection, frame, now)
        elif connection is None:
            self._who_are_you(route, now)
        else:
            if self.meter is not None and isinstance(message, m.Open):
                self.meter.opened(connection.instance, message.call, now)
            self._apply(self._ledger.message(connection.instance, message, body or b"", now), route)
        if self._seam is not None:
            self._seam("received", type(message).__name__)

    def malformed(self, route: bytes, text: str) -> None:
        """Answers bytes that are no message; nobody else notices them."""
        self.counters.bad_messages += 1
        connection = self._connections.get(route)
        who = connection.instance if connection is not None else "a connection without a session"
        log.warning("bad message from %s: %s", who, text, extra={"peer": who})
        if self._throttle.allows(route, time.monotonic()):
            to = connection.instance if connection is not None else NOBODY
            self._refuse(route, to, Code.BAD_MESSAGE, text, retry=False)

    def lost(self, route: bytes, why: str) -> None:
        """The wire dropped what was queued for this route."""
        connection = self._connections.get(route)
        if connection is not None:
            self._drop(connection.instance, why)
            self._end_lost_sessions()

    def expects(self) -> bool:
        """Whether a round is under way."""
        return self._ledger.busy()

    def _wrong_body(self, message: m.FromAgent, body: bytes) -> str:
        kind = type(message)
        if kind not in m.WITH_BODY:
            return f"{kind.__name__} has no body"
        limit = self._config.limits.max_body_bytes
        return f"body of {len(body)} bytes; max-body-bytes is {limit}" if len(body) > limit else ""

    def _who_are_you(self, route: bytes, now: float) -> None:
        if self._throttle.allows(route, now):
            self._answer(route, m.WhoAreYou(self._ledger.state.epoch))

    # ------------------------------------------------------------ sessions

    def _hello(
        self,
        route: bytes,
        message: m.TrainerHello | m.WorkerHello,
        connection: Connection | None,
        frame: zmq.Frame | None,
        now: float,
    ) -> None:
        peer = _credentials(connection, frame)
        refusal = self._refusal(message, peer)
        if refusal is not None:
            code, text = refusal
            log.warning("refused %s: %s", message.instance, text, extra={"peer": message.instance})
            self._refuse(route, message.instance, code, text, retry=code is Code.BROKER_FULL)
            return
        known = message.instance in self._ledger.state.peers
        self._hello_instance, self._hello_peer = message.instance, peer
        self._apply(self._ledger.hello(message, now), route)
        self._hello_instance = ""
        if message.instance not in self._ledger.state.peers:
            self._watch.forget(message.instance)
        elif not known:
            log.info(
                "%s joined channel %s",
                queries.describe(self._ledger.state.peers[message.instance]),
                message.channel,
                extra={"peer": message.instance, "pid": message.processes[0].pid},
            )

    def _refusal(
        self, message: m.TrainerHello | m.WorkerHello, peer: PeerCredentials | None
    ) -> tuple[Code, str] | None:
        """Why this Hello is not even shown to the ledger: rights, and the proof of its processes.

        Accepted, its processes are watched from here on.
        """
        text = self.policy.refusal(peer)
        if text:
            return Code.FORBIDDEN, text
        assert peer is not None
        mine = self._config.job
        if message.job and mine and message.job != mine:
            return Code.WRONG_JOB, (
                f"this broker is that of job {mine!r}, and the agent is of job {message.job!r}:"
                " set TENSORLEASE_JOB, or the endpoint, to one of the two on both sides"
            )
        instance = message.instance
        route = self._routes.get(instance)
        holder = self._connections[route].peer if route is not None else None
        if holder is not None and (holder.uid, holder.pid) != (peer.uid, peer.pid):
            text = f"instance {instance} has an open session of process {holder.pid}"
            return Code.INSTANCE_TAKEN, text
        peers = self._ledger.state.peers
        if instance not in peers and len(peers) >= self._config.limits.max_agents:
            # Before a descriptor is spent on it.
            limit = self._config.limits.max_agents
            return Code.BROKER_FULL, f"the broker is full: max-agents is {limit}"
        local_but_hidden = peer.pid == 0 and peer.gid != UNKNOWN_ID
        if local_but_hidden and not (message.locked and self._locks.is_held(instance)):
            return Code.UNPROVEN_PROCESS, (
                f"the process of instance {instance} is not visible to the broker (another PID"
                " namespace) and holds no live lock: give both the socket's directory, or one"
                " PID namespace"
            )
        try:
            self._watch.admit(instance, message.processes, peer)
        except UnprovenProcessError as error:
            return Code.UNPROVEN_PROCESS, str(error)
        except OSError as error:
            return Code.BROKER_FULL, f"the broker is full: {error.strerror}"
        return None

    def _begin_session(self, instance: str, route: bytes) -> None:
        assert self._hello_peer is not None
        old = self._routes.get(instance)
        if old is not None and old != route:
            del self._connections[old]
            self.wire.forget(old)
        before = self._connections.get(route)
        if before is not None and before.instance != instance:
            # One connection, two instances: the former has no way to be reached any more.
            del self._routes[before.instance]
            self._lost.append(before.instance)
        self._connections[route] = Connection(instance, self._hello_peer)
        self._routes[instance] = route

    def _end_session(self, instance: str) -> None:
        route = self._routes.pop(instance, None)
        if route is not None:
            del self._connections[route]

    def _drop(self, instance: str, why: str) -> None:
        """Nothing of this session is sent from here on; the ledger hears of it soon."""
        route = self._routes[instance]
        self.wire.forget(route)
        self._end_session(instance)
        self._lost.append(instance)
        self.counters.lost_sessions += 1
        log.warning("session of %s dropped: it %s", instance, why, extra={"peer": instance})

    # ------------------------------------------------------------ effects

    def _apply(self, effects: Iterable[fx.Effect], route: bytes | None = None) -> None:
        """Carries out effects; `route` is where the event came from."""
        for effect in effects:
            if isinstance(effect, fx.Send):
                self._send(effect)
            else:
                self._do(effect, route)
        if self._lost:
            self._end_lost_sessions()
        if self._ledger.next_check < self._due:
            self._rearm()

    def _end_lost_sessions(self) -> None:
        while self._lost:
            self._apply(self._ledger.session_lost(self._lost.pop(), time.monotonic()))

    def _send(self, effect: fx.Send) -> None:
        route = self._routes.get(effect.to)
        if route is None:
            return
        if not self.wire.send(route, self._encoder.encode(effect.message), effect.body):
            self._drop(effect.to, "does not read, or is unreachable")
        elif self._seam is not None:
            self._seam("sent", type(effect.message).__name__)

    def _do(self, effect: fx.Effect, route: bytes | None) -> None:
        match effect:
            case fx.Answer(message=message):
                if route is not None:
                    self._answer(route, message)
            case fx.BeginSession(instance=instance):
                assert route is not None
                self._absentees.discard(instance)
                self._begin_session(instance, route)
            case fx.EndSession(instance=instance):
                self._end_session(instance)
            case fx.Watch(instance=instance, processes=processes):
                # Who said this Hello is watched already, since before the ledger knew of it.
                if instance != self._hello_instance and instance not in self._routes:
                    self._absentees.add(instance, processes)
            case fx.WatchReaders(instance=instance, readers=readers):
                self._readers.add(instance, readers)
            case fx.Ended(channel=channel, result=result, ranks=ranks):
                if self.meter is not None:
                    self.meter.ended(channel, result, ranks)
            case fx.Unwatch(instance=instance):
                if self.meter is not None:
                    self.meter.gone(instance)
                self._watch.forget(instance)
                self._absentees.discard(instance)
                self._readers.discard(instance)
                # It removes its live file itself, unless it ends before it has heard ByeOk.
                self.dead.add(instance)
            case fx.Sweep(instance=instance):
                self._on_sweep(instance)
            case fx.Kill(instance=instance):
                pids = ", ".join(map(str, self._watch.kill(instance)))
                log.warning(
                    "killed %s, which is stuck: pid %s", instance, pids or "unknown, none killed"
                )
            case fx.Report(text=text, failed=failed):
                log.log(logging.WARNING if failed else logging.INFO, "%s", text)
            case _:
                raise TypeError(f"no way to carry out {effect!r}")

    def _answer(self, route: bytes, message: m.FromBroker, body: bytes | None = None) -> None:
        """Sends over the connection that asked, which may have no session."""
        connection = self._connections.get(route)
        if connection is None:
            self.wire.send_or_drop(route, encode(message), body)
        elif not self.wire.send(route, encode(message), body):
            self._drop(connection.instance, "does not read, or is unreachable")
            self._end_lost_sessions()
        if self._seam is not None:
            self._seam("sent", type(message).__name__)

    def _refuse(self, route: bytes, to: str, code: Code, text: str, *, retry: bool) -> None:
        self.counters.refusals += 1
        self._answer(route, m.Refused(self._ledger.state.epoch, to, code, text[:4096], retry))

    # ------------------------------------------------------------ queries

    def _query(
        self,
        route: bytes,
        message: m.Query,
        connection: Connection | None,
        frame: zmq.Frame | None,
        now: float,
    ) -> None:
        text = self.policy.refusal(_credentials(connection, frame))
        if text:
            self._refuse(route, NOBODY, Code.FORBIDDEN, text, retry=False)
            return
        state = self._ledger.state
        code: Code | None = None
        body = b"{}"
        match message.kind:
            case QueryKind.STATUS:
                body = self.status(now)
            case QueryKind.STORY:
                story = stories.story(state, message.channel, message.version, now)
                code = None if story.rounds else Code.NO_ROUND
                body = queries.encode(story)
            case QueryKind.DRAIN:
                log.warning("no round is admitted any more: asked by a drain query")
                self._apply(self._ledger.stop(now))
            case QueryKind.RESUME if self.ending:
                code = Code.STOPPING
            case QueryKind.RESUME:
                log.warning("rounds are admitted again: asked by a query")
                self._apply(self._ledger.resume(now))
        self._answer(route, m.Reply(state.epoch, message.id, code), body)

    def status(self, now: float) -> bytes:
        """Returns what the broker holds, as JSON."""
        return queries.encode(
            queries.status(
                self._ledger.state,
                now,
                self.count(),
                self._config.limits,
                ending=self.ending,
            )
        )

    def count(self) -> queries.Counters:
        """Returns what was counted so far."""
        self.counters.unsent_messages, self.counters.unsent_bytes = self.wire.unsent
        self.counters.messages_received = self.wire.messages_received
        self.counters.messages_sent = self.wire.messages_sent
        return self.counters

    # ------------------------------------------------------------ death and time

    def _process_ended(self, instance: str) -> None:
        self._gone(instance, "its process ended")

    def _absentee_gone(self, instance: str, how: str) -> None:
        self._gone(instance, how)

    def _gone(self, instance: str, how: str) -> None:
        peer = self._ledger.state.peers.get(instance)
        if peer is not None:
            text = queries.describe(peer)
            extra = {"peer": instance, "pid": peer.pid, "channel": peer.channel}
            log.warning("%s of channel %s is gone: %s", text, peer.channel, how, extra=extra)
        self.dead.add(instance)
        self._apply(self._ledger.gone(instance, how, time.monotonic()))

    def _readers_gone(self, instance: str, how: str) -> None:
        self._apply(self._ledger.readers_gone(instance, how, time.monotonic()))

    def note_awake(self, now: float) -> None:
        """Call it now and then: a long gap means that this process itself was stopped."""
        if now - self._awake > STALL_S:
            self._judge_after = now + GRACE_S
            log.warning("the broker itself was stopped or busy for %.1f s", now - self._awake)
        self._awake = now

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = max(self._ledger.next_check, self._judge_after)
        if self._due != float("inf"):
            # Never less than a millisecond: a deadline in the past must not starve the loop.
            delay = max(0.001, self._due - time.monotonic())
            self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._halted:
            return
        now = time.monotonic()
        self.note_awake(now)
        if now >= self._judge_after:
            self.wire.drain(FULL_DRAIN)
            self._apply(self._ledger.tick(time.monotonic()))
        self._rearm()

    def remove_needless_proofs(self) -> None:
        """Removes the live files of those who are no more, and whom no round names any more."""
        state = self._ledger.state
        if not self.dead or state.recovering_until is not None:
            return
        needed = queries.named_in_rounds(state)
        for instance in [name for name in self.dead if name not in needed]:
            if self._locks.remove(instance):
                self.dead.discard(instance)


def _credentials(connection: Connection | None, frame: zmq.Frame | None) -> PeerCredentials | None:
    """What the kernel says of the peer: asked once, then bound to the connection."""
    if connection is not None:
        return connection.peer
    return None if frame is None else peer_of(frame)
