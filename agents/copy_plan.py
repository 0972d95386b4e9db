"""Which pieces of which buffers a worker copies where, and how it is done.

A round of registered buffers copies the same bytes between the same places as the one before, so
what was worked out for it is kept: addresses of runs, cut into shares for the threads. It counts
for as long as every mapping and every tensor lies where it lay.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from msgspec import Struct, field
from torch.autograd.graph import increment_version

from ..protocol.dtypes import ITEM_SIZES
from ..protocol.handles import Handle
from ..protocol.regions import Region, single_run
from ..protocol.tables import TensorEntry
from .casting import convert, parts_of
from .copying import Run, Runs, as_one
from .errors import AttachError, CoverageError, MappingError, VerifyError
from .memory import MappedMemory
from .placement import Placed, text_of
from .unmoved import Unmoved

if TYPE_CHECKING:
    from .device_copies import DeviceRuns

MAX_KEPT: Final = 16
"""Sets of buffers for which the work is kept."""


class Copied(NamedTuple):
    """What one call copied."""

    nbytes: int
    copies: int


class Want(Struct, eq=False):
    """A box of a worker's tensor, by the names in the channel that it takes."""

    names: list[str]
    """More than one for tied tensors, which are written once."""
    placed: Placed
    view_at: int | None = None
    """Where it lay when it was attached, if it was a view of a tensor: for as long as it lies there,
    it must share memory with that."""
    tied: list[Placed] = field(default_factory=list)
    """Others that lie at the same place, which must go on lying there: they are not written."""

    @property
    def is_watched(self) -> bool:
        """Whether it belongs to another tensor, which may go to other memory without it."""
        return self.view_at is not None or any(
            each.distributed is not None for each in (self.placed, *self.tied)
        )

    @property
    def region(self) -> Region:
        """The box of the global shape that is wanted."""
        return self.placed.region


class Step(Struct):
    """One box to copy out of a buffer."""

    want: Want
    entry: TensorEntry
    region: Region
    """In global coordinates."""
    run: tuple[int, int, int] | None
    """(offset in the buffer, offset in the wanted box, length), in bytes, where both sides are one
    run of neighbouring bytes of one dtype; where they are not, or one is on a GPU and the other is
    not, torch copies the box."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return self.region.count * ITEM_SIZES[self.entry.dtype]


def step_of(want: Want, entry: TensorEntry, region: Region) -> Step:
    """Returns how to copy `region`, which both the entry and the wanted box hold."""
    item = ITEM_SIZES[entry.dtype]
    placed = want.placed
    run = None
    if placed.contiguous and placed.dtype == entry.dtype:
        begin = single_run(region.within(entry.box), entry.local_shape)
        into = single_run(region.within(want.region), want.region.length)
        if begin is not None and into is not None:
            run = (entry.offset + begin[0] * item, into[0] * item, begin[1] * item)
    return Step(want, entry, region, run)


class _Lane(Struct):
    """What one GPU copies."""

    ordinal: int
    runs: DeviceRuns
    boxes: list[tuple[Step, int]]


class _Ready(Struct):
    """What a set of buffers needs copied, by addresses."""

    addresses: list[int]
    """Where each buffer is mapped."""
    memories: list[weakref.ref[MappedMemory]]
    """The mappings themselves: another one may lie at the same address."""
    lying: _Lying
    """How the tensors that are written lay in memory."""
    counted: list[torch.Tensor]
    """Those of them of which autograd counts the versions."""
    runs: Runs
    boxes: list[tuple[Step, int]]
    """Boxes that torch copies, and the place of their buffer among `addresses`."""
    lanes: list[_Lane]
    """What GPUs copy."""
    copied: Copied

    @property
    def by_gpus_alone(self) -> bool:
        """Whether GPUs copy all of it, each as runs of bytes."""
        at_home = self.boxes or len(self.runs)
        return bool(self.lanes) and not at_home and not any(lane.boxes for lane in self.lanes)


class Begun:
    """Copies that GPUs have begun."""

    def __init__(self, events: Sequence[torch.cuda.Event], ready: _Ready) -> None:
        self._events = events
        self._ready = ready

    def wait(self) -> Copied:
        """Waits until they are done; the tensors count as changed then."""
        for event in self._events:
            event.synchronize()
        _count_change(self._ready.counted)
        return self._ready.copied


class CopyPlan:
    """Which pieces of which buffers go where. Holds no view of any trainer's memory."""

    def __init__(
        self,
        steps: dict[tuple[str, int], list[Step]],
        handles: dict[tuple[str, int], Handle | None],
        missing: tuple[str, ...],
        unwanted: tuple[str, ...],
    ) -> None:
        self._steps = {key: _merge_order(parts) for key, parts in steps.items()}
        self._ends = {
            key: max(step.entry.offset + step.entry.nbytes for step in parts)
            for key, parts in steps.items()
        }
        self._handles = handles
        self._kept: dict[tuple[str, tuple[int, ...]], _Ready] = {}
        self.missing: Final = missing
        """A text for each wanted tensor that is not offered in full; it begins with its name."""
        self.unwanted: Final = unwanted
        """Offered names of which nothing is wanted here."""
        self.takes: Final[dict[str, list[int]]] = {}
        """The numbers of the buffers that are copied from, by source."""
        for source, number in self._steps:
            self.takes.setdefault(source, []).append(number)
        self.nbytes: Final = sum(step.nbytes for parts in self._steps.values() for step in parts)
        """Bytes that one round of all buffers reads."""

    @property
    def complete(self) -> bool:
        """Whether everything wanted is offered in full."""
        return not self.missing

    def require_complete(self) -> None:
        """Raises `CoverageError` with what is missing, if anything is."""
        if self.missing:
            raise CoverageError(self.missing)

    def handles(self, source: str) -> dict[int, Handle]:
        """Returns the handles of the buffers taken from `source`: what is to be mapped."""
        found = ((number, self._handles[source, number]) for number in self.takes.get(source, ()))
        return {number: handle for number, handle in found if handle is not None}

    def copy(
        self, source: str, numbers: Iterable[int], mapped: Mapping[int, MappedMemory]
    ) -> Copied:
        """Copies all that is taken from these buffers; no view of them is left afterwards.

        Args:
            source: Whose buffers they are.
            numbers: Which of them; those that are not taken are ignored.
            mapped: Their mappings, of at least the ones that are taken.

        Raises:
            MappingError: A buffer that is taken is not among `mapped`, or is too small.
            AttachError: A tensor was replaced by another of other shape or layout; not one byte
                of these buffers was written.
        """
        taken, memories = self._taken(source, numbers, mapped)
        ready = self._known(source, taken, memories)
        if ready is None:
            ready = self._keep(source, taken, memories)
        with _devices(ready.lanes, memories):  # They copy while this goes on.
            for step, place in ready.boxes:
                _copy_box(step, memories[place])
            ready.runs.copy()
            _count_change(ready.counted)
        return ready.copied

    def begin(
        self, source: str, numbers: Iterable[int], mapped: Mapping[int, MappedMemory]
    ) -> Begun | None:
        """Has GPUs begin what `copy` would do, if they do all of it, and it is known how.

        Returns:
            What waits for its end; None: nothing was begun. See `copy` for the arguments.
        """
        taken, memories = self._taken(source, numbers, mapped)
        kept = self._kept.get((source, taken))
        if kept is None or not kept.by_gpus_alone:
            return None  # Before a look at all tensors: `copy` takes it.
        ready = self._known(source, taken, memories)
        if ready is None:
            return None
        events: list[torch.cuda.Event] = []
        try:
            events.extend(lane.runs.begin() for lane in ready.lanes)
        except BaseException:
            for event in events:  # Nobody else would wait for these.
                event.synchronize()
            raise
        return Begun(events, ready)

    def _taken(
        self, source: str, numbers: Iterable[int], mapped: Mapping[int, MappedMemory]
    ) -> tuple[tuple[int, ...], list[MappedMemory]]:
        taken = tuple(number for number in numbers if (source, number) in self._steps)
        return taken, [self._memory(source, number, mapped) for number in taken]

    def _known(
        self, source: str, taken: tuple[int, ...], memories: Sequence[MappedMemory]
    ) -> _Ready | None:
        """Returns what was worked out for these buffers, if all lies where it lay."""
        ready = self._kept.get((source, taken))
        if ready is None or ready.addresses != [memory.address for memory in memories]:
            return None
        same = [known() for known in ready.memories]
        if any(known is not memory for known, memory in zip(same, memories, strict=True)):
            return None
        return ready if ready.lying.unchanged() else None

    def prepare(
        self, source: str, numbers: Iterable[int], mapped: Mapping[int, MappedMemory]
    ) -> None:
        """Works out what `copy` of these buffers would do, so that it need not; see there."""
        for lane in self._keep(source, *self._taken(source, numbers, mapped)).lanes:
            lane.runs.prepare()

    def _keep(
        self, source: str, taken: tuple[int, ...], memories: Sequence[MappedMemory]
    ) -> _Ready:
        ready = self._prepare(source, taken, [memory.address for memory in memories], memories)
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        self._kept[source, taken] = ready
        return ready

    def compare(
        self, source: str, numbers: Iterable[int], mapped: Mapping[int, MappedMemory]
    ) -> None:
        """Raises `VerifyError`, naming the tensor, unless `copy` has written what is there now.

        See `copy` for the arguments. Reads all bytes of both sides.
        """
        for number in numbers:
            for step in self._steps.get((source, number), ()):
                if step.region.count and not _is_equal(step, self._memory(source, number, mapped)):
                    raise VerifyError(
                        step.entry.name,
                        f"was copied from buffer {number}, and is not what lies there: something"
                        " else writes to it here, or in the trainer",
                    )

    def _prepare(
        self,
        source: str,
        taken: Sequence[int],
        addresses: list[int],
        memories: Sequence[MappedMemory],
    ) -> _Ready:
        """Works out what is to be copied, with the tensors where they are now."""
        chosen = [
            (step, place)
            for place, number in enumerate(taken)
            for step in self._steps[source, number]
        ]
        every = list({id(step.want): step.want for step, _ in chosen}.values())
        for want in every:
            _check_unchanged(want)
        wants = list({id(step.want.placed.tensor): step.want for step, _ in chosen}.values())
        tensors = [want.placed.tensor for want in wants]
        lying = _Lying(every)
        # Those of inference mode count no versions.
        counted = [tensor for tensor in tensors if not tensor.is_inference()]
        # By the ordinal of the GPU that copies; None: the processor does.
        runs: dict[int | None, list[Run]] = {}
        boxes: dict[int | None, list[tuple[Step, int]]] = {}
        for step, place in chosen:
            here, there = step.want.placed.device, memories[place].device
            ordinal = here.index if here.type == "cuda" else there.index
            if step.run is None or here.type != there.type:
                boxes.setdefault(ordinal, []).append((step, place))
            else:
                begin, into, nbytes = step.run
                run = Run(step.want.placed.address + into, addresses[place] + begin, nbytes)
                mine = runs.setdefault(ordinal, [])
                # A GPU copies within allocations, of which neighbours may belong to two.
                one = as_one(mine[-1], run) if mine and here.type == "cpu" else None
                if one is None:
                    mine.append(run)
                else:
                    mine[-1] = one
        count = sum(map(len, runs.values())) + sum(map(len, boxes.values()))
        copied = Copied(sum(step.nbytes for step, _ in chosen), count)
        at_home = (Runs(runs.pop(None, [])), boxes.pop(None, []))
        lanes = [
            _lane(ordinal, runs.get(ordinal, []), boxes.get(ordinal, []))
            for ordinal in sorted(each for each in {*runs, *boxes} if each is not None)
        ]
        same = [weakref.ref(memory) for memory in memories]
        return _Ready(addresses, same, lying, counted, *at_home, lanes, copied)

    def _memory(self, source: str, number: int, mapped: Mapping[int, MappedMemory]) -> MappedMemory:
        memory = mapped.get(number)
        if memory is None:
            raise MappingError(f"buffer {number} of {source} is to be copied but not mapped")
        # The table was checked against the size that it states; this is what was mapped.
        if memory.nbytes < self._ends[source, number]:
            raise MappingError(
                f"buffer {number} of {source} has {memory.nbytes} bytes, its table"
                f" {self._ends[source, number]}"
            )
        return memory

    def regions(self, source: str, numbers: Iterable[int]) -> Iterable[tuple[Want, Region]]:
        """Yields what the pieces of these buffers fill."""
        for number in numbers:
            for step in self._steps.get((source, number), ()):
                yield step.want, step.region


def want_of(placed: Placed) -> Want:
    """Returns a wanted box that has no name yet."""
    tensor = placed.tensor
    return Want([], placed, tensor.data_ptr() if _shares_with_base(tensor) else None)


def _shares_with_base(tensor: torch.Tensor) -> bool:
    """Whether it lies in the memory of the tensor that autograd knows it as a view of."""
    base = tensor._base
    return base is not None and bool(
        tensor.untyped_storage()._cdata == base.untyped_storage()._cdata
    )


def _lost_its_base(want: Want) -> bool:
    """Whether the tensor that it is a view of went to other memory, and it did not."""
    tensor = want.placed.tensor
    return (
        want.view_at is not None
        and want.view_at == tensor.data_ptr()
        and not _shares_with_base(tensor)
    )


class _Lying:
    """Where and how the tensors that are written lie in memory.

    Args:
        wants: What is written.
    """

    def __init__(self, wants: Sequence[Want]) -> None:
        placed = [each for want in wants for each in (want.placed, *want.tied)]
        tensors, own = (
            list({id(each.tensor): each.tensor for each in placed if each.own is mine}.values())
            for mine in (False, True)
        )
        self._unmoved = Unmoved(tensors, own)
        # Those that belong to another tensor.
        self._watched = [want for want in wants if want.is_watched]
        self._strayed = self._look_at_watched()

    def unchanged(self) -> bool:
        """Whether they lie there still, and so."""
        return self._unmoved.holds() and self._look_at_watched() == self._strayed

    def _look_at_watched(self) -> list[tuple[bool, bool]]:
        return [
            (any(each.left_behind for each in (want.placed, *want.tied)), _lost_its_base(want))
            for want in self._watched
        ]


def _count_change(tensors: list[torch.Tensor]) -> None:
    """Lets autograd know that values have changed."""
    try:
        increment_version(tensors)
    except (AttributeError, TypeError):  # A torch that takes one at a time.
        for tensor in tensors:
            increment_version(tensor)


def _check_unchanged(want: Want) -> None:
    """Raises `AttachError` if writing by the plan would miss the tensor, or hit something else."""
    placed = want.placed
    tensor = placed.tensor
    if (
        not placed.is_as_given
        or tensor.device != placed.device
        or placed.contiguous != placed.box().is_contiguous()
        or placed.left_behind
    ):
        raise AttachError(
            placed.name,
            f"was replaced since it was attached (now {text_of(tensor)} on"
            f" {tensor.device}, then {placed.dtype} of {placed.local_shape} on {placed.device}):"
            " attach the tensors that the engine uses now",
        )
    if _lost_its_base(want):
        raise AttachError(
            placed.name,
            "was attached as a view of a tensor that has been given other memory since, so that it"
            " would be written where nobody looks: attach views of the tensors that the engine"
            " uses now",
        )
    if not placed.has_memory:
        raise AttachError(
            placed.name,
            f"has lost its memory since it was attached ({tensor.untyped_storage().nbytes()} bytes"
            " are left of its storage): give it back before versions arrive, in on_prepare say",
        )
    for other in want.tied:
        same = (other.address, other.tensor.stride()) == (placed.address, tensor.stride())
        if other.left_behind or not (same and other.is_as_given):
            raise AttachError(
                other.name,
                f"was one tensor with {placed.name!r} when it was attached and is none any more:"
                " attach the tensors that the engine uses now",
            )


def _lane(ordinal: int, runs: list[Run], boxes: list[tuple[Step, int]]) -> _Lane:
    from .device_copies import DeviceRuns

    return _Lane(ordinal, DeviceRuns(ordinal, runs, sources_stay=True), boxes)


@contextmanager
def _devices(lanes: Sequence[_Lane], memories: Sequence[MappedMemory]) -> Iterator[None]:
    """Has GPUs copy what they are to; all of it is done when the block has ended."""
    if not lanes:
        yield
        return
    from .device_copies import lane

    with ExitStack() as stack:
        for each in lanes:
            stack.enter_context(lane(each.ordinal, for_torch=bool(each.boxes)))
            each.runs.issue()
            for step, place in each.boxes:
                _copy_box(step, memories[place])
        yield


def _copy_box(step: Step, memory: MappedMemory) -> None:
    """Copies a box that is not one run of one dtype on both sides, by torch."""
    # In inference mode, since a tensor made in it may be written to nowhere else.
    with torch.inference_mode():
        convert(*_sides(step, memory))


def _is_equal(step: Step, memory: MappedMemory) -> bool:
    """Whether a box has the bytes that a copy of it has."""
    with torch.inference_mode():
        for target, source in parts_of(*_sides(step, memory)):
            wanted = torch.empty_like(target, memory_format=torch.contiguous_format)
            convert(wanted, source)
            have = target.contiguous()
            equal = torch.equal(have.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8))
            if not equal and (source.dtype == target.dtype or not _is_same(have, wanted)):
                return False
    return True


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether converted tensors are equal; what is no number may have other bits each time."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    return torch.allclose(one.double(), other.double(), rtol=0, atol=0, equal_nan=True)


def _sides(step: Step, memory: MappedMemory) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the box in the tensor and in the buffer; to be dropped before the mapping."""
    entry, placed = step.entry, step.want.placed
    flat = memory.flat()[entry.offset : entry.offset + entry.nbytes]
    held = flat.view(getattr(torch, entry.dtype)).view(entry.local_shape)
    return (
        _part(placed.box(), step.region.within(step.want.region)),
        _part(held, step.region.within(entry.box)),
    )


def _part(tensor: torch.Tensor, box: Region) -> torch.Tensor:
    for axis, (start, length) in enumerate(zip(box.start, box.length, strict=True)):
        tensor = tensor.narrow(axis, start, length)
    return tensor


def _merge_order(steps: list[Step]) -> list[Step]:
    """Sorts steps by their place in the buffer, so that neighbours can be copied as one."""
    return sorted(steps, key=lambda step: step.entry.offset if step.run is None else step.run[0])
