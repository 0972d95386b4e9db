"""Which event loop a broker runs on, and whether it sleeps."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from ..protocol.busy_poll import CPU_LIMIT, BusyPoll, lasts_s
from ..protocol.errors import ConfigError
from .config import UvloopChoice


def choose_loop(choice: UvloopChoice) -> Callable[[], asyncio.AbstractEventLoop]:
    """The factory of the event loop.

    Raises:
        ConfigError: uvloop is asked for and not installed.
    """
    if choice is UvloopChoice.OFF:
        return asyncio.new_event_loop
    try:
        import uvloop
    except ImportError as error:
        if choice is UvloopChoice.ON:
            raise ConfigError(
                'uvloop = "on", and uvloop is not installed: pip install uvloop, or set "auto"'
            ) from error
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def busy_seconds(choice: BusyPoll) -> float:
    """Returns for how long after a message the next one is looked for without sleeping."""
    try:
        limit = Path(CPU_LIMIT).read_text(encoding="ascii")
    except (OSError, ValueError):
        limit = ""
    return lasts_s(choice, len(os.sched_getaffinity(0)), limit)
