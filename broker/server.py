"""The broker's life: startup, running until stopped, shutdown.

    broker = Broker(config)
    await broker.serve()

What it does in between happens in callbacks of the loop (`wire.py`, `dispatch.py`). If one of them
raises, that is a defect, and the broker ends at once with an error: a broker that lives on without
routing is worse than none, since the next one takes over everything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from ..protocol.endpoint import Transport
from ..protocol.errors import InternalError, TensorleaseError
from ..protocol.records import LiveNote
from .config import BrokerConfig, OnStuck
from .credentials import policy_of
from .descriptors import ensure_descriptors
from .dispatch import Dispatcher, Seam
from .endpoints import SocketPlace, access_of, choose_endpoints
from .http import JSON, METRICS, TEXT, Answer, HttpPort, load_meter
from .ledger import NOBODY, Ledger, Settings
from .locks import LiveLocks, PreviousRun
from .logs import RepeatHandler, setup_logging
from .notify import Notifier
from .settings import SETTINGS
from .signals import Signals
from .sweep import sweep

log = logging.getLogger("tensorlease.broker")

ROUND_GRACE_S = 4.0
"""How long a broker that was told to end waits for the rounds under way."""
LINGER_S = 0.5
"""How long the last messages may take; with the former less than 5 s in all."""
HOUSEKEEPING_S = 0.5
RELOADABLE = frozenset({"log.level", "log.format", "allowed-uids"})
"""Settings that SIGHUP can change; the others were told to agents or decide what was bound."""

MAX_DESCRIPTORS = 2**20


class Broker:
    """A broker.

    Args:
        config: Its settings.
        environ: The environment: where to listen if the settings do not say, and systemd.
        reload: Reads the settings again, for SIGHUP; raises `ConfigError`.
        log_handler: The handler that `setup_logging` gave.
        seam: For fault tests: called with "received" or "sent" and the name of a message's type,
            after it was handled or sent.
    """

    def __init__(
        self,
        config: BrokerConfig,
        *,
        environ: Mapping[str, str] | None = None,
        reload: Callable[[], BrokerConfig] | None = None,
        log_handler: RepeatHandler | None = None,
        seam: Seam | None = None,
    ) -> None:
        self.config = config
        # Set once agents can connect.
        self.started = asyncio.Event()
        self._environ = os.environ if environ is None else environ
        self._reload = reload
        self._log_handler = log_handler
        self._seam = seam
        self._places: list[SocketPlace] = []
        self._notifier = Notifier(self._environ)
        self._housekeeping_s = min(
            HOUSEKEEPING_S, (self._notifier.watchdog_interval_s or 2 * HOUSEKEEPING_S) / 2
        )
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # How long the last messages may take; None: not stopped yet.
        self._linger_s: float | None = None
        self._http: HttpPort | None = None
        self._sweeping = False
        # Agents that died since the last look for their shared memory.
        self._to_sweep: set[str] = set()

    async def serve(self) -> None:
        """Run until a signal or `stop` ends it.

        Raises:
            ConfigError: It cannot start: the place is taken or unsafe, or too few descriptors.
            InternalError: A defect: a callback raised.
        """
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._former_exception_handler = self._loop.get_exception_handler()
        self._signals = Signals(self._loop)
        try:
            self._startup()
            await self._ended
        except BaseException:
            self._shutdown(clean=False)
            raise
        self._shutdown(clean=True)

    def stop(self) -> None:
        """Admit no round any more, and end when those under way have ended; again: end at once."""
        if not self.started.is_set() or self._ended.done():
            return
        if self._linger_s is not None:
            self._linger_s = 0.0
            self._end()
            return
        self._linger_s = LINGER_S
        log.info("stopping")
        self._notifier.stopping("waiting for rounds under way")
        self._dispatcher.ending = True
        self.ledger.stop(time.monotonic())
        self._timers["grace"] = self._loop.call_later(ROUND_GRACE_S, self._end)
        self._end_if_idle()

    # ------------------------------------------------------------ startup

    def _startup(self) -> None:
        # First: whoever sees that it listens may send one. They are heard once this has returned.
        self._signals.install(
            {
                signal.SIGTERM: self.stop,
                signal.SIGINT: self.stop,
                signal.SIGHUP: self._on_hangup,
            }
        )
        config = self.config
        endpoints = choose_endpoints(config, self._environ, os.geteuid())
        access = access_of(config)
        previous: list[PreviousRun] = []
        for endpoint in endpoints:
            place = SocketPlace(endpoint, access)
            previous.append(place.prepare())
            self._places.append(place)
        ensure_descriptors(config.limits.max_agents)
        _take_all_descriptors()
        self._locks = LiveLocks([e.live_directory for e in endpoints if e.live_directory])
        tcp = [endpoint.transport is Transport.TCP for endpoint in endpoints]
        # Nothing tells how the last broker ended where there is no file to tell it.
        recover = any(tcp) and (all(tcp) or PreviousRun.UNCLEAN in previous)
        unsettled = self._locks.unsettled_instances(unlocked=recover)
        self.ledger = _ledger(config, unsettled, recover, self._locks.notes())
        self._dispatcher = Dispatcher(
            self._loop,
            config,
            self.ledger,
            self._locks,
            policy_of(config, access),
            self._sweep,
            self._seam,
        )
        for place in self._places:
            place.bind(self._dispatcher.wire.bind)
        if config.http:
            self._http = self._serve_http(config.http)
        self._loop.set_exception_handler(self._on_defect)
        self._dispatcher.start()
        self._keep_house()
        where = ", ".join(endpoint.url for endpoint in endpoints)
        waits = len(self.ledger.state.expected - {NOBODY})
        log.info("broker %s listens at %s", self.ledger.state.epoch, where)
        if self.ledger.state.recovering_until is not None:
            log.info(
                "waits for %d agents of the former broker, at most %g s",
                waits,
                config.durations.recovery,
            )
        self._notifier.ready(f"listening at {where}")
        self.started.set()

    def _serve_http(self, address: str) -> HttpPort:
        dispatcher = self._dispatcher
        meter = load_meter(address)(self.ledger.state, dispatcher.counters)
        dispatcher.meter = meter

        def metrics() -> Answer:
            dispatcher.count()
            return Answer(200, METRICS, meter.text())

        pages = {
            "/metrics": metrics,
            "/healthz": lambda: Answer(200, TEXT, b"ok\n"),
            "/readyz": self._readiness,
            "/api/state": lambda: Answer(200, JSON, dispatcher.status(time.monotonic())),
        }
        port = HttpPort(address, pages, self._loop)
        log.info("metrics, health and state at %s", port.url)
        return port

    def _readiness(self) -> Answer:
        """Whether rounds are admitted."""
        state = self.ledger.state
        if self._linger_s is not None or state.stopping:
            return Answer(503, TEXT, b"stopping\n")
        if state.recovering_until is not None:
            return Answer(503, TEXT, b"listens for the agents of the former broker\n")
        return Answer(200, TEXT, b"ready\n")

    # ------------------------------------------------------------ shutdown

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _end_if_idle(self) -> None:
        """Ends a stopping broker whose last round has ended."""
        if not self.ledger.busy():
            self._end()
        else:
            self._timers["idle"] = self._loop.call_later(0.02, self._end_if_idle)

    def _shutdown(self, *, clean: bool) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._notifier.stopping()
        if self._http is not None:
            self._http.close()
        dispatcher = getattr(self, "_dispatcher", None)
        if dispatcher is not None:
            dispatcher.close(self._linger_s or 0.0 if clean else 0.0)
            self._locks.close()
        self._signals.restore()
        self._loop.set_exception_handler(self._former_exception_handler)
        if clean or not self.started.is_set():
            # After a defect the locks fall with the process, and their notes tell of it.
            for place in self._places:
                place.close()
        self._notifier.close()
        if self._log_handler is not None:
            self._log_handler.flush_repeats(everything=True)
        if clean:
            log.info("broker ended")

    def _on_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        message = context.get("message")
        cause = error if isinstance(error, BaseException) else None
        log.critical("a defect ends the broker: %s", message, exc_info=cause)
        self._dispatcher.halt()
        if not self._ended.done():
            failure = InternalError(f"a defect ended the broker: {cause or message}")
            failure.__cause__ = cause
            self._ended.set_exception(failure)

    # ------------------------------------------------------------ now and then

    def _keep_house(self) -> None:
        self._timers["house"] = self._loop.call_later(self._housekeeping_s, self._keep_house)
        self._dispatcher.note_awake(time.monotonic())
        self._dispatcher.wire.look_again()
        self._dispatcher.remove_needless_proofs()
        for place in self._places:
            if not place.still_ours():
                log.error("%s was replaced or removed: new agents do not arrive", place.endpoint)
        if self._log_handler is not None:
            self._log_handler.flush_repeats()
        self._notifier.watchdog()

    def _sweep(self, instance: str) -> None:
        """Looks for the shared memory of dead trainers, in a thread: there may be many files."""
        self._to_sweep.add(instance)
        if self._sweeping:
            return
        self._sweeping = True
        self._loop.run_in_executor(None, self._next_sweep()).add_done_callback(self._swept)

    def _next_sweep(self) -> Callable[[], list[str]]:
        gone, self._to_sweep = frozenset(self._to_sweep), set()
        return partial(sweep, Path(self.config.shm_dir), gone=gone)

    def _swept(self, done: asyncio.Future[list[str]]) -> None:
        self._sweeping = False
        if done.cancelled():
            return
        if error := done.exception():
            log.error("cannot look for shared memory of dead trainers: %s", error)
        else:
            _tell_removed(done.result())
        if self._to_sweep and self._ended.done():
            # No thread is to be had any more.
            try:
                _tell_removed(self._next_sweep()())
            except OSError as again:
                log.error("cannot look for shared memory of dead trainers: %s", again)
        elif self._to_sweep:
            self._sweep(self._to_sweep.pop())

    # ------------------------------------------------------------ signals

    def _on_hangup(self) -> None:
        self._notifier.reloading()
        try:
            self._change_settings()
        except TensorleaseError as error:
            log.error("settings were not read again: %s", error)
        self._notifier.ready()

    def _change_settings(self) -> None:
        if self._reload is None:
            log.warning("SIGHUP: nothing to read settings from")
            return
        new = self._reload()
        changed = [key for key in SETTINGS if value_of(new, key) != value_of(self.config, key)]
        for key in changed:
            if key in RELOADABLE:
                log.info("%s is now %s", key, value_of(new, key))
            else:
                log.warning("%s changed in the settings; it takes a restart", key)
        if "allowed-uids" in changed:
            self._dispatcher.policy = policy_of(new, access_of(self.config))
        if {"log.level", "log.format"}.intersection(changed) and self._log_handler is not None:
            self._log_handler.flush_repeats(everything=True)
            self._log_handler = setup_logging(new.log.level, new.log.format)
        self.config = _with_changes(self.config, new)
        if not changed:
            log.info("SIGHUP: no setting changed")


def _tell_removed(names: list[str]) -> None:
    for name in names:
        log.info("removed shared memory %s, whose trainer is gone", name)


def _take_all_descriptors() -> None:
    """Raise the soft limit on open files to the hard one.

    Agents beyond the limit connect too, to be told that the broker is full, and libzmq's ipc
    listener aborts the process when a connection finds no descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def value_of(config: BrokerConfig, key: str) -> object:
    """The value of a setting by its dotted key."""
    value: object = config
    for part in key.split("."):
        value = getattr(value, part.replace("-", "_"))
    return value


def _with_changes(old: BrokerConfig, new: BrokerConfig) -> BrokerConfig:
    """The old settings with what SIGHUP can change."""
    return msgspec.structs.replace(old, log=new.log, allowed_uids=new.allowed_uids)


def _ledger(
    config: BrokerConfig, alive: frozenset[str], recover: bool, notes: dict[str, LiveNote]
) -> Ledger:
    limits = config.limits
    settings = Settings(
        durations=config.durations.to_protocol(),
        window=limits.window,
        max_offer_bytes=limits.max_offer_bytes,
        max_peers=limits.max_agents,
        max_body=limits.max_body_bytes,
        kill_stuck=config.on_stuck is OnStuck.KILL,
    )
    # Beside those known by name there may be others: then only the deadline ends the window.
    expected = alive | {NOBODY} if recover else alive
    return Ledger(
        secrets.token_hex(8),
        settings,
        now=time.monotonic(),
        expected=expected,
        recover=recover,
        relays_noted=notes,
    )
