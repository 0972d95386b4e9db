"""What of a round a worker has taken in so far, and what it lacks."""

from __future__ import annotations

from heapq import nsmallest
from typing import Final

from msgspec import Struct

from .callback_sink import Staged
from .copy_plan import CopyPlan
from .sink import Coverage
from .together import Together

MAX_MISSING = 20
"""Texts that a worker sends of what it lacks."""
MAX_LACKING: Final = 5
"""Tensors that it lacks, of those that come batch by batch: looked for after each batch."""
MAX_NAMED: Final = 3
"""Names that are sent and not wanted, beside those that are lacking."""


class Staging(Struct):
    """What of a round has been copied so far."""

    # Registered buffers of the plan that are still to come: (trainer, number).
    awaited: set[tuple[str, int]]
    # The round carries only some tensors: each that it has begun to fill must be filled.
    subset: bool = False
    # Nothing of them may be wanted here: others of the replica want them.
    shared: bool = False
    # The account by regions, kept once a ring batch has come.
    coverage: Coverage | None = None
    # What was copied before that: (plan, trainer, numbers).
    copied: list[tuple[CopyPlan, str, list[int]]] = []
    # What must come together, and has not yet.
    together: Together | None = None
    # Names that the loader had when it was recorded, and that have yet to come.
    needed: set[str] = set()
    # What was given to a callback.
    given: Staged | None = None
    # Names of ring batches that nothing here wants.
    unwanted: set[str] = set()
    # Digests are compared with those of what was published.
    verify: bool = False
    # Names that its ring batches have brought.
    sent: set[str] = set()
    # Bytes that were copied into what is attached.
    nbytes: int = 0

    def bring(self, names: frozenset[str]) -> None:
        """Notes that these have come in a ring."""
        self.sent |= names
        self.needed -= names

    def missing(self) -> str:
        """Names what is not staged yet; empty when all that is wanted is."""
        untouched = self.coverage is None or self.coverage.untouched
        untouched = untouched and (self.together is None or not self.together.missing())
        if self.subset and untouched and (self.given is None or self.given.untouched):
            return "" if self.shared else "nothing of this subset is wanted here"
        texts: list[str] = [] if self.together is None else self.together.missing()
        if self.coverage is not None:
            texts += self.coverage.missing(MAX_LACKING)
        elif self.awaited:
            shown = ", ".join(f"buffer {number} of {trainer}" for trainer, number in self.awaited)
            texts.append(f"not sent in this round: {shown}")
        if self.needed:
            absent = nsmallest(MAX_LACKING, self.needed)
            texts += [f"{name}: not sent, and loaded in the rounds before" for name in absent]
        if self.given is not None:
            texts += self.given.missing()
            if not (texts or self.given.count or self.nbytes):
                texts.append("no tensor that this worker wants was sent in this round")
            texts = texts or self.given.lacks()
        texts = texts[:MAX_MISSING]
        if texts and self.unwanted and not self.shared:
            # One of them may be meant by the name that is lacking.
            names = ", ".join(nsmallest(MAX_NAMED, self.unwanted))
            more = ", ..." if len(self.unwanted) > MAX_NAMED else ""
            texts.append(f"sent and not wanted: {names}{more}")
        return "; ".join(texts)
