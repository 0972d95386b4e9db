"""Which event loop a broker runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
