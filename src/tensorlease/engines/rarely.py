"""What is tried again and again is said once, and again when it changes or a minute has passed."""

from __future__ import annotations

import time
from typing import Final

AGAIN_S: Final = 60.0


class Rarely:
    """Remembers what was said last."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0.0

    def due(self, text: str) -> bool:
        """Whether to say this now; it counts as said then."""
        now = time.monotonic()
        if text == self._text and now - self._at < AGAIN_S:
            return False
        self._text, self._at = text, now
        return True
