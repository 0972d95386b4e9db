"""What a wait that lasts says in the log: soon whom it waits for, then ever more rarely. Pure: times
are passed in.
"""

from __future__ import annotations

import math

FIRST_LINE_S = 5.0
SECOND_LINE_S = 30.0
LINE_EVERY_S = 60.0
"""How long a wait has lasted when it says so first and again; and between all further lines."""
LOOK_S = 0.5
"""Longest piece of a wait: a signal that comes just before one, or in another thread, does not end
it, and Python's handler, KeyboardInterrupt say, has to wait until it does.
"""


class Wait:
    """One wait with a deadline.

    Args:
        now: When it begins, in monotonic seconds.
        deadline: When it ends at the latest.
        quiet: It is in the order of things, and says nothing.
    """

    def __init__(self, now: float, deadline: float, *, quiet: bool = False) -> None:
        self._began = now
        self._deadline = deadline
        self._line_at = math.inf if quiet else now + FIRST_LINE_S

    def over(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return now >= self._deadline

    def lasted(self, now: float) -> float:
        """Seconds since it began; no more than its limit."""
        return max(0.0, min(now, self._deadline) - self._began)

    def pause(self, now: float) -> float:
        """Seconds until it is over, or to say something, or simply to look; see `LOOK_S`."""
        return max(0.0, min(self._deadline, self._line_at, now + LOOK_S) - now)

    def due(self, now: float) -> bool:
        """Whether a line is to be logged now; then the next is not due before long."""
        if now < self._line_at:
            return False
        second = self._began + SECOND_LINE_S
        self._line_at = second if now < second else now + LINE_EVERY_S
        return True


def seconds(lasted: float) -> str:
    """Returns a span of time as people read it: `0.2 s`, `5 s`, `120 s`."""
    return f"{round(lasted, 3):.2g} s" if lasted < 10 else f"{lasted:.0f} s"
