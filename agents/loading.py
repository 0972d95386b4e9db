"""What a worker takes in by a loader: by the copies that were recorded of it, or by itself."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Final, NamedTuple

from msgspec import Struct

from ..protocol.tables import Buffer, TensorEntry
from .callback_sink import CallbackSink, Lacks, StageCallback
from .copy_plan import CopyPlan
from .errors import MappingError, MismatchError
from .recorded import RecordedLoad, Recording
from .sink import AttachedTensors

NEW: Final = "is new"
UNTOUCHED: Final = "nothing of it was written: publish again"
"""Of a round that failed: what there was is whole."""


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
        # The round at hand is loaded as a whole, since it has brought what nobody had foreseen.
        self._is_whole = False

    def choose(self, planned: Planned, *, subset: bool) -> Choice:
        """Says how the round that has begun is taken in.

        Args:
            planned: What is offered.
            subset: It carries only some of the tensors.

        Raises:
            MismatchError: Something else is offered than the load had that has begun.
        """
        self._is_whole = False
        recording = self._load.begin(whole=not subset) if self._begins else self._load.repeated
        if recording is not None:
            try:
                self._check_offers(recording, planned)
            except _SizeError:
                raise
            except MismatchError:
                if self._begins:
                    recording = self._load.begin(whole=not subset)
                elif self.loads_whole():
                    recording = None
                else:
                    raise
        return self.whole if recording is None else self._choice(recording)

    def expect(self, offered: Iterable[Iterable[Buffer]]) -> None:
        """Other tensors are offered: a load that has not begun yet is of these."""
        recording = None if self._begins else self._load.recording
        if recording is None:
            return
        for buffers in offered:
            for entry in (entry for buffer in buffers for entry in buffer.entries):
                if why := _misfit(recording, entry):
                    self.discard(f"{entry.name} {why}")
                    return

    def loads_whole(self) -> bool:
        """The round's first tensors do not fit: whether, from now on, all of it can be loaded.

        Whoever leads the engine has begun a load for that only where the loader gets a part anyway.
        """
        recording = self._load.repeated
        self._is_whole = self._begins or (recording is not None and bool(recording.fallback))
        return self._is_whole

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

    def check(self, buffers: Iterable[Buffer], *, sent: bool = False, begun: bool = False) -> None:
        """Raises `MismatchError` if these hold what the recording does not count for.

        It is then made anew in the next round.

        Args:
            buffers: They.
            sent: They are of a ring: a loader that takes single tensors may have new ones.
            begun: Something of the round was taken in before.
        """
        recording = self._load.repeated
        if recording is None or self._is_whole:
            return
        for buffer in buffers:
            for entry in buffer.entries:
                if why := _misfit(recording, entry):
                    if why == NEW and sent and not self._load.by_layers:
                        continue
                    if why != NEW and self._begins:
                        _require_size(recording, entry)
                    self.discard(f"{entry.name} {why}")
                    way_out = "publish again" if begun or recording.fallback else UNTOUCHED
                    raise MismatchError(
                        entry.name,
                        f"{why}, so that what was recorded of the loader is void, and the next"
                        f" round is loaded as a whole; {way_out}",
                    )

    def discard(self, why: str) -> None:
        """The next round is recorded anew."""
        self._load.discard(why)


class _SizeError(MismatchError):
    """A tensor has more or less elements than the same parameters were loaded with."""


def _require_size(recording: Recording, entry: TensorEntry) -> None:
    """Raises `_SizeError`: a loader might take it all the same, and leave a part as it was."""
    known = recording.sources[entry.name]
    if known.numel() != prod(entry.shape):
        raise _SizeError(
            entry.name,
            f"is of shape {entry.shape} now, and was of {tuple(known.shape)} when it was loaded into the"
            " parameters that there are still: publish what fits them, or give the model others before",
        )


def _misfit(recording: Recording, entry: TensorEntry) -> str:
    """Says what of a tensor was not recorded; empty: it is as it was."""
    if recording.fits(entry.name, entry.dtype, entry.shape):
        return ""
    new = entry.name not in recording.sources
    return NEW if new else f"is {entry.dtype} of {entry.shape} now"
