"""When a worker says its answers again: an answer that was lost would keep a whole round waiting.

A session loses nothing as long as it lives, and a new one announces everything. So this heals only
what should not happen: a message that a live connection swallowed. Pure: it counts beats.
"""

from __future__ import annotations

EVERY_BEATS = 3
"""Beats without any news of a round, after which its answers are said again."""
TIMES = 3
"""How often at most: the broker's limits for a worker without progress are to take effect."""
MAX_ANSWERS = 64
"""The last so many are said again; a trainer has no more batches out, by default."""


class Repeats:
    """Counts the beats in which a round stood still."""

    def __init__(self) -> None:
        self._stands: object = None
        self._beats = 0

    def due(self, stands: object) -> bool:
        """To be asked at each beat; whether the answers are to be said again.

        Args:
            stands: How the round stands, anything that can be compared; None: it waits for nothing
                from the broker.
        """
        if stands is None or stands != self._stands:
            self._stands, self._beats = stands, 0
            return False
        self._beats += 1
        return self._beats % EVERY_BEATS == 0 and self._beats <= EVERY_BEATS * TIMES
