"""What the trainer's and the worker's cores share: a session, an outbox, and who may be believed.

The cores are pure: messages and results go in, `effects` come out. The connection carries them out.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from ..protocol import messages as m
from ..protocol.limits import PROTOCOL_VERSION
from ..protocol.records import Code, Durations, Process


class Effect(Struct, frozen=True):
    """Base of what a core asks of the shell around it."""


class Post(Effect, frozen=True):
    """Send `message` (and `body`) to the broker over the present session."""

    message: m.FromAgent
    body: bytes | None = None


class Reconnect(Effect, frozen=True):
    """The broker does not know this session: close the connection, make a new one, say Hello."""


class Joined(Effect, frozen=True):
    """The broker has opened the session."""

    welcome: m.Welcome


class TurnedAway(Effect, frozen=True):
    """The broker has refused the session."""

    code: Code
    text: str
    retry: bool


class Farewell(Effect, frozen=True):
    """The broker has answered Bye: the process may end, its lock be let go."""


class Identity(Struct, frozen=True):
    """Who an agent is; the same for all its sessions."""

    instance: str
    channel: str
    host: str
    device: str
    processes: list[Process]
    locked: bool
    software: str
    job: str = ""


class Session(Struct):
    """The present session: its number, and the epoch of the broker that welcomed it."""

    number: int = 0
    epoch: str | None = None
    # Hello was said and is not answered yet; what is posted meanwhile follows the Welcome.
    asked: bool = False
    held: list[Post] = field(default_factory=list)
    leaving: bool = False
    durations: Durations = Durations()


PROTOCOLS = (PROTOCOL_VERSION, PROTOCOL_VERSION)


class Core:
    """Base of both cores.

    Attributes:
        me: The agent's identity.
        session: The present session.
        effects: What the shell shall do, in order; it takes them with `take_effects`.
        REPEATED: Messages that a Welcome makes it send again in any case.
    """

    REPEATED: tuple[type[m.AgentMessage], ...] = (m.Bye,)

    def __init__(self, me: Identity) -> None:
        self.me = me
        self.session = Session()
        self.effects: list[Effect] = []

    @property
    def live_note(self) -> bytes:
        """What its live file says, beside that it lives."""
        return b""

    @property
    def connected(self) -> bool:
        """Whether the broker has welcomed the present session."""
        return self.session.epoch is not None

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    def disconnected(self) -> None:
        """The connection is lost; nothing is sent until the next Hello is answered."""
        self.session.epoch = None
        self.session.asked = False
        self.session.held.clear()

    def post(self, message: m.FromAgent, body: bytes | None = None) -> None:
        """Sends if the session is open; what is lost, the next Hello announces.

        What happens behind a Hello is not in it, and is sent behind its answer.
        """
        if self.connected:
            self.effects.append(Post(message, body))
        elif self.session.asked:
            self.session.held.append(Post(message, body))

    def begin_session(self) -> int:
        self.disconnected()
        self.session.number += 1
        self.session.asked = True
        return self.session.number

    def receive(self, message: m.FromBroker, body: bytes | None = None) -> None:
        """Takes a message in; one of another broker, or for another agent, is dropped."""
        if isinstance(message, m.WhoAreYou):
            if message.epoch != self.session.epoch or self.connected:
                self.disconnected()
                self.effects.append(Reconnect())
            return
        if isinstance(message, m.Reply) or message.to != self.me.instance:
            return
        if isinstance(message, m.Welcome):
            if message.session == self.session.number and not self.connected:
                self.session.epoch = message.epoch
                self.session.durations = message.durations
                self.session.asked = False
                self.effects.append(Joined(message))
                held, self.session.held = self.session.held, []
                self.effects += [
                    post for post in held if not isinstance(post.message, self.REPEATED)
                ]
                self.on_welcome(message)
                if self.session.leaving:
                    self.post(m.Bye(self.session.number))
            return
        if isinstance(message, m.Refused):
            self.disconnected()
            self.on_refused(message.code, message.text)
            self.effects.append(TurnedAway(message.code, message.text, message.retry))
            return
        if message.epoch != self.session.epoch:
            return
        if isinstance(message, m.ByeOk):
            self.effects.append(Farewell())
        elif isinstance(message, m.Stopping):
            self.disconnected()
            self.effects.append(Reconnect())
        elif not isinstance(message, m.BeatOk):
            self.on_message(message, body)

    def bye(self) -> None:
        """Says goodbye, now or after the next Welcome; answered by `Farewell`."""
        self.session.leaving = True
        self.post(m.Bye(self.session.number))

    def on_welcome(self, message: m.Welcome) -> None:
        raise NotImplementedError

    def on_refused(self, code: Code, text: str) -> None:
        """The broker has refused the session."""

    def on_message(self, message: Any, body: bytes | None) -> None:
        raise NotImplementedError
