"""What a signal's handler raises, KeyboardInterrupt say, kept out of a piece of code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any, Final

# What `signal` wraps: it takes a tenth of the time, and this is done for each message.
_signal: Final[Any] = import_module("_signal")
_GET: Final[Callable[[int], Any]] = _signal.getsignal
_SET: Final[Callable[[int, Any], Any]] = _signal.signal
_SIGNALS: Final = tuple(sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))


class HeldBack:
    """A block in which no handler of a signal runs; those that came run when it ends.

    Handlers that Python code has set; only the main thread ever runs them, and elsewhere this does
    nothing. What the first of them raises leaves the block when everything is as it was.

    Args:
        heard: Called when a signal comes meanwhile, in place of its handler: a block that waits
            should end.
    """

    def __init__(self, heard: Callable[[], None] = lambda: None) -> None:
        self._heard = heard
        self._former: dict[int, Any] = {}
        self._came: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            for number in _SIGNALS:
                if callable(handler := _GET(number)):
                    # Before it is replaced: an interrupt behind that must find it here.
                    self._former[number] = handler
                    _SET(number, self._hold)
        except BaseException:
            self._restore()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._former:
            self._restore()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))
        self._heard()

    def _restore(self) -> None:
        """Sets every handler again, also where one raises meanwhile, and runs those held back."""
        try:
            while self._former:
                number = next(iter(self._former))
                _SET(number, self._former[number])
                handler = self._former.pop(number)
                while (at := self._held(number)) is not None:
                    handler(*self._came.pop(at))
        finally:
            if self._former:
                self._restore()

    def _held(self, number: int) -> int | None:
        numbers = [came for came, _ in self._came]
        return numbers.index(number) if number in numbers else None
