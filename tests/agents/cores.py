"""A broker's side for the pure cores: what it says to them, and what they posted."""

from __future__ import annotations

from typing import TypeVar

from tensorlease.agents import core as agent
from tensorlease.agents.core import Core, Effect, Identity, Post
from tensorlease.protocol import codec
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Durations, Process, ReceiverId

E = TypeVar("E", bound=Effect)

ME = "a" * 16
EPOCH = "1" * 16
NEXT_EPOCH = "2" * 16
TRAINER = "b" * 16
GROUP = "run#bbbbbbbb"
IDENTITY = Identity(ME, "policy", "host", "cpu:0", [Process(100, 7)], True, "test")
RECEIVERS = [ReceiverId(ME, "a", 0, [Process(100, 7)])]


def welcome(
    core: Core,
    *,
    epoch: str = EPOCH,
    last_call: int = 0,
    last_version: int = 0,
    window: int = 4,
) -> None:
    """Answers the core's last Hello."""
    number = core.session.number
    told = m.Welcome(
        epoch, ME, number, 1, GROUP, last_call, last_version, Durations(), window, 1 << 20
    )
    core.receive(told)


def effects(core: Core) -> list[Effect]:
    """Takes what the core asked for; what it posts must be within the limits of the protocol."""
    taken = core.take_effects()
    for effect in taken:
        if isinstance(effect, Post):
            message = effect.message
            assert codec.decode_from_agent(codec.encode(message)) == message
    return taken


def posts(core: Core) -> list[m.FromAgent]:
    """Takes the messages that the core posted; everything else is dropped."""
    return [effect.message for effect in effects(core) if isinstance(effect, Post)]


def of(kind: type[E], taken: list[Effect]) -> list[E]:
    return [effect for effect in taken if isinstance(effect, kind)]


__all__ = [
    "EPOCH",
    "GROUP",
    "IDENTITY",
    "ME",
    "NEXT_EPOCH",
    "RECEIVERS",
    "TRAINER",
    "agent",
    "effects",
    "of",
    "posts",
    "welcome",
]
