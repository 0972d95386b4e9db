"""The broker's settings: what they are, and nothing about where they come from.

`settings.py` reads them from a file, the environment and flags. Every key is written in kebab-case;
durations are in seconds, sizes in bytes.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ..protocol import records
from ..protocol.busy_poll import BusyPoll
from ..protocol.limits import MAX_BODY_BYTES

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Uid = Annotated[int, Meta(ge=0, le=2**32 - 2)]
Size = Annotated[int, Meta(ge=4096, le=2**40)]


class OnStuck(enum.Enum):
    """What to do with a living but silent process that holds a lease."""

    WAIT = "wait"
    KILL = "kill"


class UvloopChoice(enum.Enum):
    """Whether the event loop is uvloop's."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class LogFormat(enum.Enum):
    """How log lines look; auto: text on a terminal, else JSON."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


class LogLevel(enum.Enum):
    """The least severe level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class SocketMode(enum.Enum):
    """Permissions of a socket; auto: 0660 where `socket-group` is set, else 0600.

    Others never get a right, hence these and no number.
    """

    AUTO = "auto"
    OWNER = "0600"
    GROUP = "0660"


class Section(Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """Base of every table of the configuration file."""


class Durations(Section, frozen=True):
    """When the broker ends a phase by itself, in seconds."""

    open: Seconds = 60.0
    prepare: Seconds = 60.0
    stage: Seconds = 30.0
    """Without progress."""
    commit: Seconds = 60.0
    drain: Seconds = 10.0
    recovery: Seconds = 10.0
    beat: Seconds = 1.0
    silent: Seconds = 5.0
    """After that long without a beat an agent counts as silent."""

    def to_protocol(self) -> records.Durations:
        """The same, as it travels."""
        return records.Durations(
            open_s=self.open,
            prepare_s=self.prepare,
            stage_s=self.stage,
            commit_s=self.commit,
            drain_s=self.drain,
            recovery_s=self.recovery,
            beat_s=self.beat,
            silent_s=self.silent,
        )


class Limits(Section, frozen=True):
    """What one broker takes on, so that no peer can exhaust it."""

    max_agents: Annotated[int, Meta(ge=1, le=65_536)] = 1024
    max_body_bytes: Annotated[int, Meta(ge=4096, le=MAX_BODY_BYTES)] = MAX_BODY_BYTES
    """The largest body that is accepted."""
    max_queue_messages: Annotated[int, Meta(ge=16, le=2**20)] = 8192
    """Unsent messages per peer; above it, the peer's session is dropped."""
    max_queue_bytes: Size = 256 * 2**20
    """Unsent bytes per peer; above it, the peer's session is dropped."""
    max_offer_bytes: Size = 256 * 2**20
    """Bodies of offers kept per trainer."""
    window: Annotated[int, Meta(ge=1, le=65_536)] = 64
    """Batches that a trainer may have unreleased at a time; those of stuck leases not counted."""


class Log(Section, frozen=True):
    """What is logged, and how; always to stderr."""

    level: LogLevel = LogLevel.INFO
    format: LogFormat = LogFormat.AUTO


class BrokerConfig(Section, frozen=True):
    """Everything that can be set."""

    endpoints: tuple[str, ...] = ()
    """Where to listen; empty: `$TENSORLEASE_ENDPOINT`, else the user's runtime directory."""
    job: Annotated[str, Meta(max_length=256)] = ""
    """Names the socket where no endpoint is given, so that jobs of one user stay apart."""
    socket_mode: SocketMode = SocketMode.AUTO
    """Permissions of the sockets."""
    socket_group: Annotated[str, Meta(max_length=64)] = ""
    """Group (name or number) whose members may connect; empty: none, unless the mode is 0660."""
    allowed_uids: tuple[Uid, ...] = ()
    """Users beside the broker's own that may connect. They need access to the socket as well."""
    shm_dir: Annotated[str, Meta(pattern=r"^/")] = "/dev/shm"
    """Where agents put shared memory."""
    on_stuck: OnStuck = OnStuck.WAIT
    http: Annotated[str, Meta(max_length=256)] = ""
    """Where to serve metrics, health and state, on the loopback: HOST:PORT; empty: nowhere."""
    uvloop: UvloopChoice = UvloopChoice.AUTO
    busy_poll: BusyPoll = BusyPoll.AUTO
    durations: Durations = msgspec.field(default_factory=Durations)
    limits: Limits = msgspec.field(default_factory=Limits)
    log: Log = msgspec.field(default_factory=Log)
