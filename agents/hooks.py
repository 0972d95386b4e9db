"""A worker's hooks: what the application does around the copying."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from ..protocol.errors import ConfigError
from ..protocol.limits import MAX_TEXT


class RoundInfo(Struct, frozen=True):
    """The round of a channel that a hook is called for."""

    channel: str
    version: int
    """The version that it is to make: a key for caches, say."""
    call: int
    """Its number among the rounds of the trainer group."""
    group: str
    """The trainer group's id: what all ranks of one run share."""
    replica: str
    """The worker's own, as is the next."""
    member: int
    """Its place in the replica."""
    subset: bool = False
    """It carries only some of the tensors."""


RoundHook = Callable[[RoundInfo], object]
"""on_prepare and on_commit. What it returns matters only if it is a coroutine."""
AbortHook = Callable[[RoundInfo, str, bool], object]
"""on_abort: the round, why it ended, and whether the weights are in doubt (torn)."""

R = TypeVar("R", bound=RoundHook)
A = TypeVar("A", bound=AbortHook)

Calls = list[Callable[[], object]]
"""Hooks with their arguments, to be called in order."""


class Hooks:
    """The hooks of one worker, in the order in which they were given."""

    def __init__(self) -> None:
        self.prepare: list[RoundHook] = []
        self.commit: list[RoundHook] = []
        self.abort: list[AbortHook] = []

    def preparing(self, info: RoundInfo) -> Calls:
        """What is to be called before the first byte of a round is written."""
        return [_bound(hook, info) for hook in self.prepare]

    def committing(self, info: RoundInfo) -> Calls:
        """What is to be called when the worker switches to the version."""
        return [_bound(hook, info) for hook in self.commit]

    def aborting(self, info: RoundInfo, reason: str, torn: bool) -> Calls:
        """What is to be called when a round that was prepared does not commit."""
        return [_bound_abort(hook, info, reason, torn) for hook in self.abort]


def _bound(hook: RoundHook, info: RoundInfo) -> Callable[[], object]:
    return lambda: hook(info)


def _bound_abort(hook: AbortHook, info: RoundInfo, reason: str, torn: bool) -> Callable[[], object]:
    return lambda: hook(info, reason, torn)


def require_callable(what: str, hook: object, *given: str) -> None:
    """Refuses what cannot be called with so many arguments, before a round needs it.

    What has no signature, as builtins may have none, is taken as it is.

    Args:
        what: The hook's name.
        hook: What the user gave.
        given: What it is called with, by name.

    Raises:
        ConfigError: It cannot be called, or not so.
    """
    if not callable(hook):
        raise ConfigError(f"{what} {hook!r}: must be something that can be called")
    try:
        signature = inspect.signature(hook)
    except (ValueError, TypeError):
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise ConfigError(
            f"{what} {hook!r} takes {signature}, and is called with ({', '.join(given)}): {error}"
        ) from None


def raised_by(hook: str, error: BaseException) -> str:
    """Returns what went wrong, as it travels, and in which hook; empty: it was in none."""
    return bounded(f"{hook} raised {describe(error)}") if hook else describe(error)


def describe(error: BaseException) -> str:
    """Returns what went wrong, as it travels: type and text, bounded."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return bounded(text)


def bounded(text: str) -> str:
    """Returns the text as a message can carry it: one line, cut with a mark if long.

    Control characters would change what a terminal shows of it; they are written as \\x1b.

    A lone surrogate, which UTF-8 does not have, is what Python makes of a file name that is none.
    """
    text = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 4] + " ..."
