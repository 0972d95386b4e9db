"""Spans in which registered weights do not change: whom a trainer serves late, and when.

Pure: rounds and replicas go in, with the time; the terms of a round that is due come out. A round is
never sent again: who is late gets one of its own, of the same version, by a new call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from ..protocol.records import Fate, Outcome, ReplicaState, RoundResult, Terms

FIRST_PAUSE_S: Final = 1.0
"""How long a replica that failed is not tried again; twice as long after each further failure."""
LAST_PAUSE_S: Final = 60.0
LATE_OPEN_S: Final = 0.05
"""Open limit of a round for who is late: it takes who is free, and waits for nobody else."""

_PUBLISHED = (Outcome.COMMITTED, Outcome.MIXED, Outcome.EMPTY)
_ALL = ""
"""Stands for every replica: the round itself could not be had."""


class _Pause(Struct):
    """A replica that was not served, and when it is tried again."""

    failures: int
    until: float


class Span:
    """Knows which version the registered weights are, and whether that is promised to stay so."""

    def __init__(self) -> None:
        # The last version whose bytes the registered weights are; 0: none, or they have changed.
        self._version = 0
        # It may be given to who comes late: its round has ended, and not failed.
        self._settled = False
        # The call by which that is known: a later one of another kind makes it void.
        self._call = 0
        # The last round's own limits hold for late ones too.
        self._terms: Terms | None = None
        # Explicit spans under way; and whether a guard watches all that may write.
        self._depth = 0
        self._guarded = False
        # Somebody was told that the weights may be written (which is no change yet).
        self._permitted = False
        self._pauses: dict[str, _Pause] = {}

    @property
    def declared(self) -> bool:
        """Whether the application has promised that nothing changes."""
        return self._depth > 0

    @property
    def active(self) -> bool:
        """Whether nothing changes, by promise or by guard."""
        return self.declared or (self._guarded and not self._permitted)

    @property
    def version(self) -> int:
        """The version that who is late gets now; 0: none."""
        return self._version if self._settled and self.active else 0

    # ------------------------------------------------------------ what happens to the weights

    def enter(self, version: int | None, call: int) -> None:
        """An explicit span begins.

        Args:
            version: What the weights are, if the application says so; None: what was published.
            call: The trainer's last call so far.
        """
        self._depth += 1
        self._pauses.clear()
        if version is not None:
            self._version, self._settled, self._call, self._terms = version, True, call, None

    def leave(self) -> None:
        """An explicit span ends."""
        self._depth -= 1

    def published(self, terms: Terms, *, guarded: bool) -> None:
        """A round of all that is registered was opened.

        Args:
            terms: What was asked of it.
            guarded: Whether nothing that is registered changes but by a guarded step.
        """
        self._version, self._settled, self._terms = terms.version, False, terms
        self._guarded, self._permitted = guarded, False
        self._pauses.clear()

    def changed(self) -> None:
        """The weights change, or may be those of a version that was not published."""
        self._version, self._settled = 0, False

    def permitted(self) -> None:
        """The application was told that it may write: only its own promise counts from here."""
        self._permitted = True

    def unguarded(self) -> None:
        """A guard was removed: the others do not watch all writers."""
        self._guarded = False

    # ------------------------------------------------------------ what becomes of rounds

    def ended(self, result: RoundResult, now: float, *, late: bool) -> None:
        """A round has ended.

        Args:
            result: Its result.
            now: Monotonic seconds.
            late: It was one for who came late.
        """
        if result.version != self._version:
            return
        self._call = result.call
        if not late:
            self._settled = result.outcome in _PUBLISHED
        elif result.outcome in _PUBLISHED:
            self._pauses.pop(_ALL, None)
        elif not result.receivers:
            self._pause(_ALL, now)
        for replica in result.replicas:
            if replica.fate is Fate.COMMITTED:
                self._pauses.pop(replica.replica, None)
            else:
                self._pause(replica.replica, now)

    def refused(self, now: float) -> None:
        """A round for who came late could not be opened."""
        self._pause(_ALL, now)

    def _pause(self, replica: str, now: float) -> None:
        pause = self._pauses.setdefault(replica, _Pause(0, 0.0))
        pause.until = now + min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(pause.failures, 16))
        pause.failures += 1

    # ------------------------------------------------------------ who is late

    def due(self, states: Sequence[ReplicaState], last_call: int, now: float) -> Terms | None:
        """Returns the terms of a round that is to be opened now; to be asked while none is open.

        Args:
            states: The channel's replicas, as the broker told last.
            last_call: The trainer's last call.
            now: Monotonic seconds.
        """
        version = self.version
        if not version or last_call != self._call:
            return None
        for name in self._pauses.keys() - {state.replica for state in states if state.ready}:
            if name != _ALL:
                del self._pauses[name]  # When it is there again, it is not the one that failed.
        if not any(state.ready and _behind(state, version) for state in states):
            return None
        if self._paused(_ALL, now) or not any(
            state.ready and _behind(state, version) and not self._paused(state.replica, now)
            for state in states
        ):
            return None
        limits = self._terms or Terms(version)
        return Terms(
            version,
            open_s=LATE_OPEN_S,
            prepare_s=limits.prepare_s,
            stage_s=limits.stage_s,
            commit_s=limits.commit_s,
            verify=limits.verify,
        )

    def _paused(self, replica: str, now: float) -> bool:
        pause = self._pauses.get(replica)
        return pause is not None and now < pause.until


def _behind(state: ReplicaState, version: int) -> bool:
    return state.torn or state.current < version
