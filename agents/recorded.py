"""A loader that is run once, and whose copies are then repeated without it.

Engines keep other parameters than checkpoints have: fused, cut, stacked. Only their own
`load_weights` knows which tensor goes where, and it is slow. What it does with the first version is
noted; what of that were plain copies is what later versions do, straight from the trainers' memory
(`boxes`). Every other name goes to the loader each time, and `fallback` says why.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from msgspec import Struct

from ..protocol.regions import OverlapError, Region, covers
from .casting import why_not
from .errors import TensorError
from .hooks import describe
from .marks import mark_of
from .placement import NamedTensors, Placed, pairs_of
from .recording import Memory, Note, Parameters, Recorder, has_memory, view_of
from .sink import AttachedTensors
from .strides import Axis, Box, apart, boxes_of
from .unmoved import UnmovedModel

log = logging.getLogger("tensorlease.agents")

LoadWeights = Callable[[Iterator[tuple[str, torch.Tensor]]], object]
WrittenTo = Callable[[], NamedTensors] | torch.nn.Module
"""Gives names and tensors of all that a loader writes to; or a model that has them."""
MOST_NAMED: Final = 5
"""Names in a log line."""


class Lie(NamedTuple):
    """What a parameter is, and where it lies."""

    name: str
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Recording(Struct, frozen=True, eq=False):
    """What one load did, as far as it can be repeated."""

    boxes: AttachedTensors | None
    """What is copied; None: nothing is."""
    fallback: Mapping[str, str]
    """Names that the loader gets each time, and why."""
    ignored: frozenset[str]
    """Names of which the loader reads nothing."""
    sources: Mapping[str, torch.Tensor]
    """All names, with tensors of the meta device that have their shape and dtype."""
    lying: tuple[Lie, ...]
    """The parameters that it counts for."""
    partly: tuple[str, ...] = ()
    """A text for each parameter of which it wrote only some elements; it begins with its name."""

    @property
    def names(self) -> frozenset[str]:
        """Names that are copied."""
        return frozenset() if self.boxes is None else frozenset(self.boxes.names)

    def fits(self, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is known, and of this dtype and shape."""
        known = self.sources.get(name)
        if known is None:
            return False
        return (str(known.dtype).removeprefix("torch."), tuple(known.shape)) == (dtype, shape)


class RecordedLoad:
    """One model's loader, and what is known of what it does.

    A load is `begin`, `load` for each batch, and `finish` or `abandon`. What `begin` says counts
    until then: whether what `recording` has is copied, so that `load` gets only the rest.

    Args:
        load_weights: Takes names and tensors into the model; keeps none of the tensors.
        parameters: Returns names and tensors of all that it may write to, as they are now. Or a
            model: its parameters and buffers, which are looked at in less time.
        layer_of: For a model that loads only whole layers: the layer of a parameter, by its
            name. Of a layer nothing is copied unless all of it is. The parameters may be others
            between `begin` and `finish`.
    """

    def __init__(
        self,
        load_weights: LoadWeights,
        parameters: WrittenTo,
        *,
        layer_of: Callable[[str], str] | None = None,
    ) -> None:
        _warm_up()
        self._load_weights = load_weights
        self._model = parameters if isinstance(parameters, torch.nn.Module) else None
        self._parameters = _parameters_of(parameters)
        self._layer_of = layer_of
        self._recorder: Recorder | None = None
        self._recording: Recording | None = None
        self._repeated: Recording | None = None
        self._told: object = None
        # The model as it lay when it was looked at last.
        self._unmoved: UnmovedModel | None = None

    @property
    def recording(self) -> Recording | None:
        """What later loads repeat; None: the next one is noted."""
        return self._recording

    @property
    def fallback(self) -> Mapping[str, str]:
        """The names that the loader gets each time, and why."""
        return MappingProxyType(dict(self._recording.fallback) if self._recording else {})

    def begin(self, *, whole: bool = True) -> Recording | None:
        """A load begins; returns the recording, if its copies are to be made instead.

        Args:
            whole: All tensors are loaded; what a load of some does is not noted.
        """
        self._recorder = None
        recording = self._recording  # Another thread may discard it meanwhile.
        if recording is not None and not self._lies_as(recording):
            log.info("the parameters are others than were recorded: the load is noted anew")
            self._recording = recording = None
        if recording is None and whole:
            self._recorder = Recorder(self._parameters, locate=self._layer_of is not None)
        self._repeated = recording
        return recording

    def skip(self) -> None:
        """A load begins that is not this model's: it is neither noted nor repeated."""
        self._recorder = self._repeated = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """For what the engine does to the weights outside of `load`, to end an update, say."""
        with nullcontext() if self._recorder is None else self._recorder.watching():
            yield

    @property
    def repeated(self) -> Recording | None:
        """What the last `begin` has returned."""
        return self._repeated

    @property
    def by_layers(self) -> bool:
        """Whether the loader must have all of a layer, or nothing."""
        return self._layer_of is not None

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gives tensors to the loader; notes what it does with them, unless that is known.

        Args:
            tensors: Who calls drops them when this returns, or when the load is finished.
        """
        recorder = self._recorder
        if recorder is None:
            self._load_weights(iter(tensors))
            return
        waiting = {name: _of_its_own(tensor) for name, tensor in tensors}
        for name, tensor in waiting.items():
            recorder.source(name, tensor)
        unasked = set(waiting)

        def given() -> Iterator[tuple[str, torch.Tensor]]:
            for name in list(waiting):
                unasked.discard(name)
                yield name, waiting.pop(name)

        try:
            with recorder.watching():
                self._load_weights(given())
        except BaseException:
            self.abandon()
            raise
        finally:
            waiting.clear()
        for name in unasked:
            recorder.reasons.setdefault(name, "the loader did not ask for it")

    def finish(self) -> None:
        """All is loaded: what was noted is looked at, and repeated from now on. Raises nothing."""
        recorder, self._recorder = self._recorder, None
        if recorder is None or not recorder.sources:
            return
        try:
            with torch.no_grad():
                self._recording = _Reviewed(recorder, self._layer_of).recording(self._lying())
        except Exception as error:
            text = f"what the loader did could not be made out ({describe(error)})"
            log.warning("%s", text, exc_info=error)
            everything = dict.fromkeys(recorder.sources, text)
            self._recording = Recording(
                None, everything, frozenset(), dict(recorder.sources), self._lying()
            )
        self._unmoved = self._unmoved_now()
        self._tell(self._recording)

    def abandon(self) -> None:
        """The load has failed: it is not repeated."""
        self._recorder = None

    def discard(self, why: str) -> None:
        """The next whole load is noted anew."""
        if self._recording is not None:
            log.info("the load is noted anew: %s", why)
        self._recording = None

    def _lies_as(self, recording: Recording) -> bool:
        """Whether the parameters are those that were recorded, where they lay."""
        if self._unmoved is not None and self._unmoved.holds():
            return True
        same = recording.lying == self._lying()
        self._unmoved = self._unmoved_now() if same else None
        return same

    def _unmoved_now(self) -> UnmovedModel | None:
        if self._model is None or not all(has_memory(t) for _, t in self._parameters()):
            return None
        return UnmovedModel(self._model)

    def _lying(self) -> tuple[Lie, ...]:
        return tuple(
            Lie(name, t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.device)
            for name, t in self._parameters()
            if has_memory(t)
        )

    def _tell(self, recording: Recording) -> None:
        fallback = recording.fallback
        told = (recording.names, tuple(fallback.items()), recording.ignored, recording.partly)
        if told == self._told:
            return
        self._told = told
        if recording.partly:
            # Who loads by layers has asked for what they lack.
            level = logging.INFO if self.by_layers else logging.WARNING
            log.log(level, "the loader wrote only a part of %s", _listed(recording.partly))
        shown = "; ".join(f"{name}: {why}" for name, why in list(fallback.items())[:MOST_NAMED])
        more = "; ..." if len(fallback) > MOST_NAMED else ""
        log.log(
            logging.WARNING if fallback else logging.INFO,
            "recorded what the loader does: %d tensors are copied from now on, %d are not read%s, %d"
            " go to the loader each time%s%s",
            len(recording.names),
            len(recording.ignored),
            _some(sorted(recording.ignored)),
            len(fallback),
            f": {shown}" if shown else "",
            more,
        )


@cache
def _warm_up() -> None:
    """Has torch import what it watches operations with: for that no round should have to wait."""
    with torch.inference_mode(False), torch.device("cpu"):
        tensor = torch.zeros(1)
        with Recorder(lambda: ()).watching():
            tensor.data.copy_(tensor)


def _parameters_of(given: WrittenTo) -> Parameters:
    if isinstance(given, torch.nn.Module):
        return lambda: [*given.named_parameters(), *given.named_buffers()]
    return lambda: pairs_of(given())


def _listed(texts: tuple[str, ...]) -> str:
    return "; ".join(texts[:MOST_NAMED]) + ("; ..." if len(texts) > MOST_NAMED else "")


def _some(names: list[str]) -> str:
    more = ", ..." if len(names) > MOST_NAMED else ""
    return f" ({', '.join(names[:MOST_NAMED])}{more})" if names else ""


def _of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy that is row-major and has all of its storage."""
    storage = tensor.untyped_storage()
    if tensor.is_contiguous() and storage.nbytes() == tensor.numel() * tensor.element_size():
        return tensor.detach()
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class _Reviewed:
    """What a recorder has seen, looked at when all is loaded."""

    def __init__(self, recorder: Recorder, layer_of: Callable[[str], str] | None) -> None:
        self._recorder = recorder
        self._layer_of = layer_of
        self._reasons: dict[str, str] = dict(recorder.reasons)
        # Where something of a name went: groups of parameters, of which all is copied or nothing.
        self._groups: dict[str, set[object]] = {}
        self._members: dict[object, set[str]] = {}
        # What was copied of each source to anything that was a parameter then: axes and offset.
        self._brought: dict[str, set[tuple[tuple[Axis, ...], int]]] = {}
        gc.collect()  # What the loader has made may hang in cycles.
        located = recorder.locate()
        recorder.look_back()
        if recorder.decides:
            for name in recorder.sources:
                self._reasons.setdefault(name, recorder.decides)
        self._here: dict[int, tuple[torch.Tensor, Memory]] = {}
        for _, tensor, memory in located:
            self._here.setdefault(id(memory), (tensor, memory))

    def recording(self, lying: tuple[Lie, ...]) -> Recording:
        """Returns what can be repeated."""
        recorder = self._recorder
        for memory in recorder.memories:
            self._look_at(memory)
        placed: dict[str, list[Placed]] = {name: [] for name in recorder.sources}
        for tensor, memory in self._here.values():
            self._check_marks(tensor, memory)
            for note in memory.notes:
                self._place(note, tensor, placed)
        for name in recorder.sources:
            self._check_covered(name, placed[name])
        self._close()
        if self._reasons:
            self._spare()
        boxes = [box for name, of in placed.items() if name not in self._reasons for box in of]
        attached: AttachedTensors | None = None
        try:
            attached = AttachedTensors({}, strict=False, cast="worker", boxes=boxes)
        except TensorError as error:  # Two of them overlap: it should have been seen.
            for name in placed:
                self._reasons.setdefault(name, f"the copies of the loader overlap ({error})")
        copied = frozenset() if attached is None else frozenset(attached.names)
        ignored = frozenset(recorder.sources.keys() - copied - self._reasons.keys())
        return Recording(
            attached if copied else None,
            {name: self._reasons[name] for name in recorder.sources if name in self._reasons},
            ignored,
            dict(recorder.sources),
            lying,
            tuple(self._partly()),
        )

    def _partly(self) -> Iterator[str]:
        """Says which parameters were written in part, each of which has a storage of its own."""
        for tensor, memory in self._here.values():
            names = sorted(memory.parameters)
            alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            unclear = memory.computed or memory.constants or memory.unseen or memory.overwritten
            if len(names) != 1 or not alone or unclear or not memory.notes:
                continue
            if any(note.dtype.itemsize != tensor.element_size() for note in memory.notes):
                continue
            count = sum(prod(axis.size for axis in note.axes) for note in memory.notes)
            if count < tensor.numel():
                yield f"{names[0]}: {count} of {tensor.numel()} elements"

    def _look_at(self, memory: Memory) -> None:
        """Notes why names that have come to some memory cannot be copied there."""
        groups: set[object] = set()
        for parameter in memory.parameters:
            groups.add(parameter if self._layer_of is None else self._layer_of(parameter))
        if id(memory) in self._here:
            groups.add(id(memory))
        for name, brought in memory.brought.items() if groups else ():
            self._brought.setdefault(name, set()).update(brought)
        for name in memory.ever:
            self._groups.setdefault(name, set()).update(groups)
            for group in groups:
                self._members.setdefault(group, set()).add(name)
        if id(memory) in self._here:
            for name, reason in memory.computed.items():
                self._reasons.setdefault(name, reason)
            for name in memory.overwritten:
                self._reasons.setdefault(name, "something else is written where it was copied to")
            if memory.source is not None:
                self._reasons.setdefault(memory.source, "the model keeps the very tensor")
            if memory.unseen or (memory.unwritten and self._here[id(memory)][0].numel()):
                what = ", ".join(sorted(memory.parameters))
                for name in memory.ever or self._recorder.sources:
                    self._reasons.setdefault(name, f"{what} is written by what cannot be seen")
        elif memory.alive or (memory.lent and memory.source is None):
            for name in memory.names:
                why = "the model keeps something made of it that is none of its parameters"
                self._reasons.setdefault(name, why)
            if memory.unwritten or memory.unseen:
                for name in self._recorder.sources:
                    why = "the model keeps memory, none of its parameters, that was written unseen"
                    self._reasons.setdefault(name, why)

    def _check_marks(self, tensor: torch.Tensor, memory: Memory) -> None:
        """Looks whether what was copied is what is there."""
        notes = [note for note in memory.notes if note.name not in self._reasons]
        if not notes:
            return
        wrong = [
            mark_of(view_of(_as(tensor, note.dtype), note.written)) != note.mark for note in notes
        ]
        flags = torch.stack([flag.to(tensor.device) for flag in wrong]).tolist()
        for note, is_wrong in zip(notes, flags, strict=True):
            if is_wrong:
                why = "what was copied of it was changed by what cannot be seen"
                self._reasons.setdefault(note.name, why)

    def _place(self, note: Note, tensor: torch.Tensor, placed: dict[str, list[Placed]]) -> None:
        """Adds the boxes of a note to those of its name."""
        name = note.name
        if name in self._reasons:
            return
        source = self._recorder.sources[name]
        if note.converted:
            if reason := why_not(source.dtype, note.dtype, tensor.device):
                self._reasons[name] = f"it becomes {note.dtype}: {reason}"
                return
            if not (source.dtype.is_floating_point and note.dtype.is_floating_point):
                self._reasons[name] = f"it is {source.dtype} and becomes {note.dtype}"
                return
            held = _as(tensor, note.dtype)
        else:
            held = _as(tensor, source.dtype)
        boxes = boxes_of(note.axes, note.target, note.origin, tuple(source.shape))
        if not boxes:
            self._reasons[name] = "it is copied in too many parts, or one element to several places"
        placed[name] += [_placed(name, box, held, tuple(source.shape)) for box in boxes]

    def _check_covered(self, name: str, boxes: list[Placed]) -> None:
        """Looks whether what was copied of a source to parameters is in those that there are now."""
        recorder = self._recorder
        if name in self._reasons or not recorder.sources[name].numel():
            return
        if name in recorder.touched and not boxes:
            self._reasons[name] = "its values are read, and none is copied to a parameter"
            return
        shape = tuple(recorder.sources[name].shape)
        arrived = {box.region for box in boxes}
        for axes, origin in self._brought.get(name, ()):
            for part in boxes_of(axes, 0, origin, shape):
                region = part.region
                if region not in arrived and not _covers(name, region, arrived):
                    self._reasons[name] = f"{region} of it is loaded, and not all of that kept"
                    return

    def _spare(self) -> None:
        """Copies nothing to where the loader, which runs each time, writes something else first."""
        for _, memory in self._here.values():
            for note in memory.notes:
                if any(not apart(each, note.written) for each in memory.constants):
                    why = "the loader writes something else to where it is copied, before"
                    self._reasons.setdefault(note.name, why)
        self._close()

    def _close(self) -> None:
        """Takes with each name that is not copied all that shares a parameter, or a layer."""
        waiting = list(self._reasons)
        while waiting:
            name = waiting.pop()
            groups = self._groups.get(name, set())
            others: Iterable[str]
            if not groups and self._layer_of is not None:
                others = self._recorder.sources  # Whose layer that is, is not known.
            else:
                others = sorted({other for group in groups for other in self._members[group]})
            what = "layer" if self._layer_of is not None else "parameter"
            for other in others:
                if other not in self._reasons:
                    self._reasons[other] = f"it shares a {what} with {name}"
                    waiting.append(other)


def _covers(name: str, region: Region, arrived: Iterable[Region]) -> bool:
    """Whether several boxes together hold all of a region."""
    try:
        return covers(name, region, arrived)
    except OverlapError:
        return False


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _placed(name: str, box: Box, tensor: torch.Tensor, shape: tuple[int, ...]) -> Placed:
    # No view to autograd, which would be looked at in each round: `begin` looks at the parameters.
    with torch.inference_mode(False):
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        view.set_(tensor.untyped_storage(), box.offset, box.region.length, box.strides)
    return Placed(
        name,
        view,
        str(tensor.dtype).removeprefix("torch."),
        shape,
        box.region,
        view.is_contiguous(),
        view.device,
        box.region.length,
        own=True,
    )
