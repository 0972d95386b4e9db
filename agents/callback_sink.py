"""What a worker gives to a callback instead of copying it: named views of the trainers' memory.

A view must be gone when the callback has returned, else the trainer would write under it. That is
seen by its storage, which each view has for itself: whatever looks into the memory (a slice, a
reshaped alias, numpy's array, a graph of autograd) keeps the storage.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..protocol.dtypes import ITEM_SIZES
from ..protocol.errors import ConfigError
from ..protocol.handles import Handle
from ..protocol.regions import Region, covered, plan, require_disjoint, whole
from ..protocol.tables import Buffer, TensorEntry
from .errors import AttachError, MappingError, MismatchError
from .hooks import RoundInfo, require_callable
from .memory import MappedMemory
from .placement import check_tensor_name
from .together import Groups, groups_of, incomplete

GRACE_S: Final = 0.25

NamedViews = list[tuple[str, torch.Tensor]]
StageCallback = Callable[[RoundInfo, NamedViews], object]
"""on_stage: the round, and the names and views of one batch."""
Lacks = Callable[[bool], Iterable[str]]
"""What whoever the callback gives to lacks so far; True: the round carries only some tensors."""
S = TypeVar("S", bound=StageCallback)


class CallbackSink:
    """What a callback wants, and how offered pieces make it up.

    Args:
        callback: What gets the tensors.
        names: The names that it wants; None: every name that comes and is not attached.
        strict: Whether one of `names` that does not come puts the worker out of the round.
        together: Groups of names that are given in one call or not at all.
        without: Names that it does not want.
        lacks: What it lacks beside names, asked when no name is lacking.

    Raises:
        ConfigError: What cannot be called; a group with a name that is not wanted.
    """

    def __init__(
        self,
        callback: StageCallback,
        names: Iterable[str] | None = None,
        strict: bool = True,
        together: Groups = (),
        without: frozenset[str] = frozenset(),
        lacks: Lacks = lambda _: (),
    ) -> None:
        require_callable("on_stage", callback, "round", "tensors")
        if isinstance(names, str):
            raise ConfigError(f"names {names!r}: must be several names, or None for all")
        self.callback: Final = callback
        self.strict: Final = strict
        self._without: Final = without
        self.lacks: Final = lacks
        self.names: Final = None if names is None else frozenset(names)
        for name in sorted(self.names or (), key=str):
            check_tensor_name(name, AttachError)
        if self.names is not None and not self.names:
            raise ConfigError("on_stage with no names: it would never be called")
        self.groups: Final = groups_of(together)
        for name in self.groups:
            if self.names is not None and name not in self.names:
                raise ConfigError(f"{name!r} is to come together with others, but is not wanted")

    def wants(self, name: str, attached: Iterable[str]) -> bool:
        """Whether the callback gets this name; `attached`: those that are copied instead."""
        if name in attached or name in self._without:
            return False
        return self.names is None or name in self.names

    def plan(
        self,
        offers: Mapping[str, Iterable[Buffer]],
        attached: frozenset[str],
        preference: Sequence[str] = (),
        called: Mapping[str, str] | None = None,
    ) -> GivePlan:
        """Chooses which offered pieces are given, each from its nearest source.

        Args:
            offers: The registered buffers of each source (a trainer's instance).
            attached: Names that are copied instead.
            preference: The sources, nearest first; others follow in the order of `offers`.
            called: What errors call a source, say "rank 3"; else its instance.

        Raises:
            MismatchError: Two sources offer one name with another dtype or global shape.
            OverlapError: A tensor is offered in regions that overlap without being equal.
        """
        order = {source: place for place, source in enumerate(preference)}
        offered: dict[str, list[_Origin]] = {}
        handles: dict[tuple[str, int], Handle | None] = {}
        for source in sorted(offers, key=lambda source: order.get(source, len(order))):
            name = (called or {}).get(source, source)
            for buffer in offers[source]:
                handles[source, buffer.number] = buffer.handle
                for entry in buffer.entries:
                    if self.wants(entry.name, attached):
                        origin = _Origin(source, buffer.number, entry, name)
                        offered.setdefault(entry.name, []).append(origin)
        found = GivePlan(handles)
        for name, origins in offered.items():
            for other in origins[1:]:
                _require_alike(origins[0].entry, other.entry, origins[0].called, other.called)
            found.add(name, origins)
        if self.strict and self.names is not None:
            absent = self.names - offered.keys() - attached
            found.missing += [f"{name}: not offered" for name in sorted(absent)]
        for group in set(self.groups.values()):
            found.missing += incomplete(group, offered.keys() | attached, "not offered")
        return found


class _Origin(NamedTuple):
    """Where an offered piece lies."""

    source: str
    number: int
    entry: TensorEntry
    called: str


class GivePlan:
    """Which pieces of which registered buffers are given. Holds no view of any memory."""

    def __init__(self, handles: dict[tuple[str, int], Handle | None]) -> None:
        self._handles = handles
        self._pieces: dict[tuple[str, int], list[TensorEntry]] = {}
        self._names: set[str] = set()
        self.missing: list[str] = []
        """A text for each wanted tensor that is not offered in full; it begins with its name."""

    def add(self, name: str, origins: list[_Origin]) -> None:
        """Chooses the pieces of one tensor among these, which fit each other."""
        self._names.add(name)
        want = whole(origins[0].entry.shape)
        copies = plan(name, want, ((origin, origin.entry.box) for origin in origins))
        chosen = [copy.source for copy in copies] if want.count else origins[:1]
        for origin in chosen:
            self._pieces.setdefault((origin.source, origin.number), []).append(origin.entry)
        have = sum(copy.region.count for copy in copies)
        if have < want.count:
            self.missing.append(f"{name}: {have} of {want.count} elements offered")

    @property
    def names(self) -> frozenset[str]:
        """The names of which something is given."""
        return frozenset(self._names)

    @property
    def takes(self) -> dict[str, list[int]]:
        """The numbers of the buffers that are given from, by source."""
        found: dict[str, list[int]] = {}
        for source, number in self._pieces:
            found.setdefault(source, []).append(number)
        return found

    def handles(self, source: str) -> dict[int, Handle]:
        """Returns the handles of the buffers taken from `source`: what is to be mapped."""
        found = ((number, self._handles[source, number]) for number in self.takes.get(source, ()))
        return {number: handle for number, handle in found if handle is not None}

    def pieces(self, source: str, numbers: Iterable[int]) -> Iterator[tuple[int, TensorEntry]]:
        """Yields what is given of these buffers of `source`: number and entry."""
        for number in numbers:
            for entry in self._pieces.get((source, number), ()):
                yield number, entry


class _Partial:
    """A tensor of which some pieces have come."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.filled: set[Region] = set()
        self.tensor = _empty(entry)

    def have(self) -> int:
        """How many of its elements have come."""
        return covered(whole(self.entry.shape), self.filled)

    def fill(self, entry: TensorEntry, storage: torch.UntypedStorage) -> None:
        """Copies one more piece; the same one again does nothing."""
        if entry.box in self.filled or not entry.box.count:
            return
        require_disjoint(entry.name, {*self.filled, entry.box})
        size = self.tensor.element_size()
        carrier = _CARRIERS[size]
        with torch.inference_mode(False):
            part = self.tensor.view(carrier)
            for axis, (start, length) in enumerate(
                zip(entry.box.start, entry.box.length, strict=True)
            ):
                part = part.narrow(axis, start, length)
            part.copy_(_shaped(storage, carrier, entry.local_shape))
        _await(storage.device)
        self.filled.add(entry.box)


class Staged:
    """What of one round has been given so far: the answer to "complete?" that a vote needs.

    Args:
        sink: What is wanted.
        attached: Names that are copied instead.
        planned: Names of registered tensors, which each round brings.
        subset: The round carries only some tensors; what it has begun to bring it must bring.
    """

    def __init__(
        self,
        sink: CallbackSink,
        attached: frozenset[str],
        planned: frozenset[str] = frozenset(),
        *,
        subset: bool = False,
    ) -> None:
        self._sink = sink
        self._attached = attached
        self._subset = subset
        named = sink.names if sink.strict and sink.names is not None else frozenset[str]()
        self._wanted = frozenset[str]() if subset else (planned | named) - attached
        # Names that were given, or wait for their group; with what they are.
        self._whole: dict[str, TensorEntry] = {}
        self._partial: dict[str, _Partial] = {}
        # Copies of tensors whose group is not there yet.
        self._waiting: dict[str, torch.Tensor] = {}

    @property
    def count(self) -> int:
        """How many tensors were given."""
        return len(self._whole) - len(self._waiting)

    @property
    def untouched(self) -> bool:
        """Whether nothing of what is wanted has come."""
        return not self._whole and not self._partial

    def take(
        self, pieces: Iterable[tuple[int, TensorEntry]], mapped: Mapping[int, MappedMemory]
    ) -> Handover:
        """Makes views of what is whole, and puts together what comes in pieces.

        Args:
            pieces: Buffer number and entry of everything wanted that one batch brings.
            mapped: The mappings of their buffers.

        Raises:
            MismatchError: A name came before with another dtype or global shape.
            OverlapError: Pieces of a tensor overlap without being equal.
            MappingError: A buffer is not mapped, or smaller than its table says.
        """
        handover = Handover()
        for number, entry in pieces:
            known = self._whole.get(entry.name)
            partial = self._partial.get(entry.name)
            if known is None and partial is not None:
                known = partial.entry
            if known is not None:
                _require_alike(known, entry, "one rank", "another")
            if entry.name in self._whole:
                continue  # Another rank holds the same; it is given once.
            if entry.box.is_whole(entry.shape):
                self._partial.pop(entry.name, None)
                handover.add(entry, _storage(number, entry, mapped))
                self._whole[entry.name] = entry
                continue
            if partial is None:
                partial = self._partial[entry.name] = _Partial(entry)
            if entry.nbytes:
                partial.fill(entry, _required(_storage(number, entry, mapped)))
            if partial.have() == whole(entry.shape).count:
                handover.add_own(entry.name, partial.tensor)
                self._whole[entry.name] = self._partial.pop(entry.name).entry
        self._wait_for_groups(handover)
        return handover

    def _wait_for_groups(self, handover: Handover) -> None:
        """Keeps copies of those whose group is not complete, gives the rest."""
        for group in {
            group for name in handover.names if (group := self._sink.groups.get(name)) is not None
        }:
            if group <= self._whole.keys() | self._attached:
                for name in sorted(group & self._waiting.keys()):
                    handover.add_own(name, self._waiting.pop(name))
            else:
                for name in sorted(group):
                    if (tensor := handover.withdraw(name)) is not None:
                        self._waiting[name] = tensor

    def missing(self) -> list[str]:
        """Returns a text for each tensor that is not whole; it begins with its name."""
        texts = [
            f"{name}: {partial.have()} of {whole(partial.entry.shape).count} elements came"
            for name, partial in self._partial.items()
        ]
        absent = self._wanted - self._whole.keys() - self._partial.keys()
        texts += [f"{name}: not sent in this round" for name in sorted(absent)]
        for group in {self._sink.groups[name] for name in self._waiting}:
            texts += incomplete(group, self._whole.keys() | self._attached, "not sent")
        return texts

    def lacks(self) -> list[str]:
        """Returns a text for each thing that whoever gets the tensors lacks."""
        return list(self._sink.lacks(self._subset))


class Watch(Protocol):
    """Looks at a storage without keeping it."""

    def expired(self) -> bool:
        """Whether nobody has the storage any more."""
        ...


watch: Final[Callable[[torch.UntypedStorage], Watch]] = StorageWeakRef
"""Makes one. While there is one, no other storage has the number (`_cdata`) of its."""


class Handover:
    """The tensors of one batch on their way through a callback, and what is left of them after."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._views: dict[str, Watch] = {}
        self._devices: set[torch.device] = set()
        self.given = False
        """Whether the callback was called."""

    @property
    def names(self) -> list[str]:
        """Whose tensors are given."""
        return list(self._tensors)

    def add(self, entry: TensorEntry, storage: torch.UntypedStorage | None) -> None:
        """Gives a view of a trainer's memory."""
        if storage is None:
            self._tensors[entry.name] = _empty(entry)
            return
        self._views[entry.name] = watch(storage)
        if storage.device.type != "cpu":
            self._devices.add(storage.device)
        self._tensors[entry.name] = _shaped(storage, dtype_of(entry.dtype), entry.shape)

    def add_own(self, name: str, tensor: torch.Tensor) -> None:
        """Gives a tensor that is the worker's own, so that it may be kept."""
        self._tensors[name] = tensor

    def withdraw(self, name: str) -> torch.Tensor | None:
        """Does not give this one; returns a copy of it."""
        tensor = self._tensors.pop(name, None)
        if tensor is None or self._views.pop(name, None) is None:
            return tensor
        with torch.inference_mode(False):
            own = tensor.view(_CARRIERS[tensor.element_size()]).clone().view(tensor.dtype)
        _await(own.device)
        return own

    def take(self) -> NamedViews:
        """Returns names and tensors, and forgets them: the caller must, too."""
        given, self._tensors = list(self._tensors.items()), {}
        self.given = True
        return given

    def await_devices(self) -> None:
        """Waits until GPUs have done what the callback has told them, on whatever stream."""
        for device in self._devices:
            torch.cuda.synchronize(device)

    def kept(self) -> list[str]:
        """Returns the names of the views that something still looks into."""
        self._tensors = {}
        for name in [name for name, view in self._views.items() if view.expired()]:
            del self._views[name]
        return list(self._views)

    def settle(self, error: BaseException | None) -> list[str]:
        """As `kept`, once what hangs in reference cycles and in an error's frames was dropped.

        A thread that was lent the views drops them a little after it has told that it is done: an
        executor does, say. That is waited for, at most `GRACE_S` seconds.
        """
        if self.kept() and error is not None:
            clear_frames(error)
        if self.kept():
            gc.collect()
        until = time.monotonic() + GRACE_S
        while (names := self.kept()) and time.monotonic() < until:
            time.sleep(0.001)
        return names


def dtype_of(name: str) -> torch.dtype:
    """Returns torch's dtype of a name of the protocol's list, which tables were checked against.

    Raises:
        MismatchError: This torch does not have it.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise MismatchError(name, f"is a dtype that torch {torch.__version__} does not have")
    return found


_CARRIERS: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


def _await(device: torch.device) -> None:
    """Waits for a copy that this thread's current stream was told to make."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()


def _shaped(
    storage: torch.UntypedStorage, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Returns a row-major tensor over a storage."""
    with torch.inference_mode(False):
        # By bytes: torch warns of the making of some dtypes, and cannot make empty ones of others.
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
        flat.set_(storage, 0, (storage.nbytes(),), (1,))
        return flat.view(dtype).view(shape)


def _empty(entry: TensorEntry) -> torch.Tensor:
    """Returns memory of the worker's own for all of a tensor."""
    nbytes = whole(entry.shape).count * ITEM_SIZES[entry.dtype]
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8).view(dtype_of(entry.dtype)).view(entry.shape)


def _storage(
    number: int, entry: TensorEntry, mapped: Mapping[int, MappedMemory]
) -> torch.UntypedStorage | None:
    if not entry.nbytes:
        return None
    memory = mapped.get(number)
    if memory is None:
        raise MappingError(f"buffer {number} with {entry.name!r} is not mapped")
    if memory.nbytes < entry.offset + entry.nbytes:
        raise MappingError(
            f"buffer {number} has {memory.nbytes} bytes, {entry.name!r} ends at byte"
            f" {entry.offset + entry.nbytes}"
        )
    return memory.storage(entry.offset, entry.nbytes)


def _required(storage: torch.UntypedStorage | None) -> torch.UntypedStorage:
    assert storage is not None
    return storage


def _require_alike(first: TensorEntry, second: TensorEntry, here: str, there: str) -> None:
    if first.dtype != second.dtype or first.shape != second.shape:
        raise MismatchError(
            first.name,
            f"is {first.dtype} of {first.shape} at {here} and {second.dtype} of {second.shape} at"
            f" {there}: all ranks must hold the same",
        )


def clear_frames(error: BaseException) -> None:
    """Drops the local variables of the frames that an error, and what caused it, went through."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
