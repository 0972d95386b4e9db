"""What a worker takes in by a loader: by the copies that were recorded of it, or by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from msgspec import Struct

from ..protocol.tables import Buffer
from .callback_sink import CallbackSink, Lacks, StageCallback
from .copy_plan import CopyPlan
from .errors import MappingError, MismatchError
from .recorded import RecordedLoad, Recording
from .sink import AttachedTensors


class Choice(NamedTuple):
    """How a round is taken in."""

    attached: AttachedTensors | None
    """What is copied."""
    sink: CallbackSink
    """What gets the rest."""


class Planned(Struct):
    """What a plan for all that is offered was made of, so that parts of it can be chosen."""

    buffers: dict[str, list[Buffer]] = {}
    preference: list[str] = []
    called: dict[str, str] = {}
    takes: dict[str, set[int]] = {}
    chosen: Choice | None = None

    def require_lent(self, copies: CopyPlan) -> None:
        """Raises `MappingError` if buffers are to be copied that this worker has not asked for."""
        for trainer, numbers in copies.takes.items():
            if not self.takes.get(trainer, set()).issuperset(numbers):
                raise MappingError(f"{trainer} has not lent all that is to be copied of it")


class Loading:
    """A worker's recorded load.

    Args:
        load: It.
        callback: What gets the tensors that the loader is to load.
        begins: Whether `choose` begins each load; else whoever leads the engine has, before.
        lacks: What the engine lacks so far.
    """

    def __init__(
        self,
        load: RecordedLoad,
        callback: StageCallback,
        *,
        begins: bool,
        lacks: Lacks = lambda _: (),
    ) -> None:
        self._load = load
        self._callback = callback
        self._begins = begins
        self._lacks = lacks
        self.whole: Final = Choice(None, CallbackSink(callback, lacks=lacks))
        """Everything goes to the loader."""
        self._known: tuple[Recording, Choice] | None = None
        self._checked: tuple[Recording, Planned] | None = None

    def choose(self, planned: Planned, *, subset: bool) -> Choice:
        """Says how the round that has begun is taken in.

        Args:
            planned: What is offered.
            subset: It carries only some of the tensors.

        Raises:
            MismatchError: Something else is offered than the load had that has begun.
        """
        recording = self._load.begin(whole=not subset) if self._begins else self._load.repeated
        if recording is not None:
            try:
                self._check_offers(recording, planned)
            except MismatchError:
                if not self._begins:
                    raise
                recording = self._load.begin(whole=not subset)
        return self.whole if recording is None else self._choice(recording)

    def _check_offers(self, recording: Recording, planned: Planned) -> None:
        """As `check`; looks at the same offers once."""
        if (
            self._checked is None
            or self._checked[0] is not recording
            or self._checked[1] is not planned
        ):
            for buffers in planned.buffers.values():
                self.check(buffers)
            self._checked = recording, planned

    @property
    def needed(self) -> frozenset[str]:
        """Names that a round of all tensors has to bring: what the recorded load had of them."""
        recording = self._load.repeated
        if recording is None:
            return frozenset()
        return frozenset(recording.sources.keys() - recording.ignored)

    def foreseen(self) -> Choice | None:
        """Returns what `choose` is likely to say of the next round, where that is copied."""
        recording = self._load.recording if self._begins else None
        return None if recording is None else self._choice(recording)

    def _choice(self, recording: Recording) -> Choice:
        if self._known is None or self._known[0] is not recording:
            rest = CallbackSink(self._callback, without=recording.ignored, lacks=self._lacks)
            self._known = recording, Choice(recording.boxes, rest)
        return self._known[1]

    def check(self, buffers: Iterable[Buffer], *, sent: bool = False) -> None:
        """Raises `MismatchError` if these hold what the recording does not count for.

        It is then made anew in the next round.

        Args:
            buffers: They.
            sent: They are of a ring: a loader that takes single tensors may have new ones.
        """
        recording = self._load.repeated
        if recording is None:
            return
        for buffer in buffers:
            for entry in buffer.entries:
                if not recording.fits(entry.name, entry.dtype, entry.shape):
                    new = entry.name not in recording.sources
                    if new and sent and not self._load.by_layers:
                        continue
                    why = "is new" if new else f"is {entry.dtype} of {entry.shape} now"
                    self.discard(f"{entry.name} {why}")
                    raise MismatchError(
                        entry.name,
                        f"{why}, so that what was recorded of the loader is void: the"
                        " next round is loaded as a whole",
                    )

    def discard(self, why: str) -> None:
        """The next round is recorded anew."""
        self._load.discard(why)
