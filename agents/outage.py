"""What of a missing broker goes to the log: that it went, now and then that it is still away, that
it is back. Pure: times are passed in.
"""

from __future__ import annotations

import math

LINE_EVERY_S = 60.0
"""Between two lines that say that there is no broker, however often it comes and goes."""


class Outage:
    """One agent's account of the times without a session."""

    def __init__(self) -> None:
        # Monotonic seconds: when this outage began (NaN: there is none), and the last line about one.
        self._began = math.nan
        self._said_at = -math.inf
        # This outage is in the log, so that its end belongs there too.
        self._said = False
        self._tries = 0

    def problem(self, text: str, now: float) -> str | None:
        """There is no session, and why; returns what is to be logged, None: nothing."""
        if math.isnan(self._began):
            self._began, self._said, self._tries = now, False, 0
        self._tries += 1
        if now < self._said_at + LINE_EVERY_S:
            return None
        self._said, self._said_at = True, now
        away_s = now - self._began
        return text if away_s < 1 else f"{text} (for {away_s:.0f} s, {self._tries} tries)"

    def over(self, now: float) -> str | None:
        """There is a session; returns what is to be logged, None: nothing."""
        said, away_s = self._said, now - self._began
        self._began, self._said = math.nan, False
        return f"connected again after {away_s:.1f} s" if said else None
