"""What keeps a worker out of rounds, to be said once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LASTS_S: Final = 1.0
"""What is lacking is said when it has lasted so long: offers come one after another."""


class KeptOut:
    """What a worker lacks of what trainers offer; each set of it is told once."""

    def __init__(self) -> None:
        self._missing: tuple[str, ...] = ()
        # When it was seen first, in seconds of the monotonic clock.
        self._since = 0.0
        self._told = False

    def saw(self, missing: Sequence[str], now: float) -> None:
        """All offers were looked at, at `now`: this is lacking; empty: nothing is."""
        if tuple(missing) != self._missing:
            self._missing, self._since, self._told = tuple(missing), now, False

    def due(self, now: float) -> tuple[str, ...]:
        """Returns what is to be told now; empty: nothing, or it was told already."""
        if self._told or not self._missing or now < self._since + LASTS_S:
            return ()
        self._told = True
        return self._missing
