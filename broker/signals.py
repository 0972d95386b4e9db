"""Signals of the process as callbacks of its event loop, each once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class Signals:
    """What a loop does at signals, between `install` and `restore`.

    Args:
        loop: Where the callbacks run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._former: dict[int, Handler] = {}

    def install(self, callbacks: Mapping[int, Callable[[], object]]) -> None:
        """Has the loop call these, by the signal's number; does nothing beside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, callback in callbacks.items():
            self._former[number] = signal.getsignal(number)
            # The loop only wakes up: uvloop may call its handler twice for a signal that comes
            # close behind another, and a broker that is told twice to end does so at once.
            self._loop.add_signal_handler(number, _nothing)
            signal.signal(number, self._handler(callback))

    def restore(self) -> None:
        """Puts the handlers back that there were before."""
        for number, handler in self._former.items():
            self._loop.remove_signal_handler(number)
            if handler is not None:
                signal.signal(number, handler)
        self._former.clear()

    def _handler(self, callback: Callable[[], object]) -> Handler:
        return lambda _number, _frame: self._loop.call_soon_threadsafe(callback)


def _nothing() -> None:
    pass
