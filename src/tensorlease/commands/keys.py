"""Single keys from a terminal, which is as before in the end."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable
from functools import partial


class Keys:
    """Reads keys as they are pressed, from `start` on.

    `stop` belongs into a `finally` around `start` itself: a signal may come in the middle of that.
    Where stdin is no terminal there are no keys. Ctrl+C stays what it is.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._restore: Callable[[], None] | None = None

    def start(self) -> None:
        """From here on keys come one by one, and are not shown."""
        try:
            descriptor = sys.stdin.fileno()
            # Who is in the background may not change a terminal, and would be stopped for it.
            if os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp():
                former = termios.tcgetattr(descriptor)
                self._restore = partial(termios.tcsetattr, descriptor, termios.TCSADRAIN, former)
                tty.setcbreak(descriptor)
                self._descriptor = descriptor
        except (OSError, ValueError, termios.error):
            pass  # It was closed, or is no terminal of ours.

    def stop(self) -> None:
        """Gives the terminal its former modes again. Idempotent."""
        self._descriptor = None
        if self._restore is not None:
            with contextlib.suppress(termios.error):  # The terminal itself is gone.
                self._restore()
            self._restore = None

    def pressed(self, wanted: str, wait_s: float) -> bool:
        """Whether one of these keys is pressed within so many seconds; others do nothing."""
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0:
            if self._descriptor is None:
                time.sleep(left_s)
                continue
            ready, _, _ = select.select([self._descriptor], [], [], left_s)
            if not ready:
                continue
            typed = os.read(self._descriptor, 64)
            if not typed:
                self.stop()  # The terminal is gone: no key will come.
            if any(key.encode() in typed for key in wanted):
                return True
        return False
