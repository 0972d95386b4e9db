"""What a worker attaches: the tensors that it wants written, and how offered pieces fill them.

The copy is always a copy: nothing that a worker keeps looks into a trainer's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import nsmallest
from itertools import islice
from typing import Final, Literal

import torch
from msgspec import Struct, field
from torch.nn import Module

from ..protocol.errors import ConfigError
from ..protocol.handles import Handle
from ..protocol.regions import Region, covered, plan, require_disjoint
from ..protocol.tables import Buffer, TensorEntry
from .casting import why_not
from .copy_plan import CopyPlan, Step, Want, step_of, want_of
from .errors import AttachError, MismatchError
from .nearest import nearest
from .overlaps import require_apart
from .pieces import Pieces
from .placement import NamedTensors, Placed, check_tensor_name, place
from .unmoved import HeldModel

MAX_NEAREST: Final = 3
"""Names that are lacking, for which the nearest one that is offered is looked for."""

Rename = Mapping[str, str] | Callable[[str], str]
Cast = Literal["worker"]


class _Origin(Struct, frozen=True):
    """Where an offered piece lies."""

    source: str
    number: int
    entry: TensorEntry
    called: str


def _not_offered(name: str, offered: Iterable[str], before: int) -> str:
    """Says so, with the nearest name that is offered: of the first few, since looking takes long."""
    near = nearest(name, offered) if before < MAX_NEAREST else None
    hint = f"; the nearest that is: {near!r} (rename= says which is meant)" if near else ""
    if not (near or before) and (some := nsmallest(MAX_NEAREST + 1, offered)):
        some[MAX_NEAREST:] = ["..."] * (len(some) > MAX_NEAREST)
        hint = f"; offered are: {', '.join(some)} (rename= says which is meant)"
    return f"{name}: not offered{hint}"


class AttachedTensors:
    """A worker's tensors. Made once; plans are made anew whenever the offers change."""

    def __init__(
        self,
        named_tensors: NamedTensors,
        regions: Pieces | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        cast: Cast | None = None,
        *,
        boxes: Iterable[Placed] = (),
    ) -> None:
        """Takes the tensors as they are: they may be views, transposed, or parameters.

        Args:
            named_tensors: A model, or names and tensors to write to; DTensors say their region
                themselves.
            regions: For plain tensors that are pieces of larger ones: global shape and start, or
                `RowBlocks`.
            rename: The channel's name for each own name; a name that a mapping lacks stays.
            strict: Whether a wanted name that nobody offers makes the worker incomplete.
            cast: "worker": floating dtypes that differ are converted while they are copied.
            boxes: What else is written: several may take pieces of one name.

        Raises:
            AttachError: A tensor cannot be written to; its name, why, and the way out.
        """
        if cast not in (None, "worker"):
            raise ConfigError(f"cast {cast!r}: must be 'worker', or None for no conversion")
        self._model = HeldModel(named_tensors) if isinstance(named_tensors, Module) else None
        self.strict: Final = strict
        self.cast: Final = cast
        self._wants: Final[list[Want]] = []
        tied: dict[tuple[object, ...], Want] = {}
        for placed in [*place(named_tensors, regions, AttachError), *boxes]:
            name = _renamed(placed.name, rename)
            check_tensor_name(name, AttachError)
            tensor = placed.tensor
            _check_writable(placed)
            place_key = (
                tensor.untyped_storage()._cdata,
                placed.bytes_offset,
                tensor.stride(),
                placed.dtype,
                placed.shape,
                placed.region,
            )
            want = tied.get(place_key) if placed.nbytes else None
            if want is None:
                want = want_of(placed)
                tied[place_key] = want
                self._wants.append(want)
            else:
                want.tied.append(placed)
            if name not in want.names:
                want.names.append(name)
        require_apart(want.placed for want in self._wants)
        self._by_name: Final[dict[str, list[Want]]] = {}
        for want in self._wants:
            for name in want.names:
                self._by_name.setdefault(name, []).append(want)
        self.names: Final = tuple(self._by_name)
        """The names in the channel that are wanted."""
        self.name_set: Final = frozenset(self._by_name)
        """The same."""
        self.nbytes: Final = sum(want.placed.nbytes for want in self._wants)
        """Bytes of all of them, tied tensors once."""

    @property
    def wants(self) -> Sequence[Want]:
        """What is wanted, tied tensors once."""
        return self._wants

    def require_held(self) -> None:
        """Raises `AttachError`, naming the tensor, if the model that was given has another by now."""
        if self._model is not None and (name := self._model.replaced()):
            raise AttachError(
                name,
                "is another tensor in the model since it was attached (load_state_dict(assign=True),"
                " or a new nn.Parameter): write to it in place, or make a worker for the model anew",
            )

    def plan(
        self,
        offers: Mapping[str, Iterable[Buffer]],
        preference: Sequence[str] = (),
        *,
        partial: bool = False,
        called: Mapping[str, str] | None = None,
    ) -> CopyPlan:
        """Chooses what to copy from whom.

        Args:
            offers: The buffers of each source (a trainer's instance): of all its offers together,
                or of one batch.
            preference: The sources, nearest first; others follow in the order of `offers`.
            partial: The offers are one batch of several: what they lack is not missing.
            called: What errors call a source, say "rank 3"; else its instance.

        Raises:
            MismatchError: A dtype or a global shape differs from the wanted tensor's; or one
                tensor here is two different ones there.
            OverlapError: A tensor is offered in regions that overlap without being equal.
        """
        names = called or {}
        order = {source: place for place, source in enumerate(preference)}
        sources = sorted(offers, key=lambda source: order.get(source, len(order)))
        offered: dict[str, list[_Origin]] = {}
        handles: dict[tuple[str, int], Handle | None] = {}
        groups: dict[tuple[str, int, Region, str], set[str]] = {}
        for source in sources:
            for buffer in offers[source]:
                handles[source, buffer.number] = buffer.handle
                for entry in buffer.entries:
                    origin = _Origin(source, buffer.number, entry, names.get(source, source))
                    offered.setdefault(entry.name, []).append(origin)
                    owner = entry.alias_of or entry.name
                    group = groups.setdefault((source, buffer.number, entry.box, owner), set())
                    group.add(entry.name)
        wanted = self._by_name.keys()
        served = set(wanted).union(*(group for group in groups.values() if group & wanted))
        unwanted = tuple(name for name in offered if name not in served)
        steps: dict[tuple[str, int], list[Step]] = {}
        missing: list[str] = []
        for want in self._offered_wants(offered) if partial else self._wants:
            found = self._offers_of(want, offered, in_ring=partial)
            if not found:
                if self.strict:
                    missing.append(_not_offered(want.names[0], offered, len(missing)))
                continue
            have = 0
            for copy in plan(want.names[0], want.region, found):
                origin = copy.source
                step = step_of(want, origin.entry, copy.region)
                steps.setdefault((origin.source, origin.number), []).append(step)
                have += copy.region.count
            if have < want.region.count and not partial:
                missing.append(
                    f"{want.names[0]}: {have} of {want.region.count} elements of"
                    f" {want.region} offered"
                )
        return CopyPlan(steps, handles, tuple(missing), unwanted)

    def _offers_of(
        self, want: Want, offered: Mapping[str, list[_Origin]], *, in_ring: bool
    ) -> list[tuple[_Origin, Region]]:
        """Returns the pieces of a wanted tensor, under any of its names; checks that they fit."""
        found: list[tuple[_Origin, Region]] = []
        places: dict[tuple[str, Region], tuple[int, int, str]] = {}
        for name in want.names:
            for origin in offered.get(name, ()):
                entry = origin.entry
                if entry.dtype != want.placed.dtype:
                    self._check_cast(name, want.placed, origin, in_ring=in_ring)
                if entry.shape != want.placed.shape:
                    raise MismatchError(
                        name,
                        f"has the global shape {want.placed.shape} here and {entry.shape} at"
                        f" {origin.called}: make them equal, or for a piece of a larger tensor name its global shape"
                        " and start, or its RowBlocks, by regions= on the side that has the piece",
                    )
                spot = (origin.number, entry.offset, name)
                first = places.setdefault((origin.source, entry.box), spot)
                if entry.nbytes and first[2] != name and first[:2] != spot[:2]:
                    raise MismatchError(
                        name,
                        f"is one tensor with {first[2]!r} here and two different ones at"
                        f" {origin.called}: untie them here, or attach only one of the two",
                    )
                found.append((origin, entry.box))
        return found

    def _check_cast(self, name: str, placed: Placed, origin: _Origin, *, in_ring: bool) -> None:
        """Raises `MismatchError` unless what is offered may be converted here."""
        held: torch.dtype | None = getattr(torch, origin.entry.dtype, None)
        wanted: torch.dtype = getattr(torch, placed.dtype)
        differ = f"is {placed.dtype} here and {origin.entry.dtype} at {origin.called}"
        if held is None or not held.is_floating_point or not wanted.is_floating_point:
            raise MismatchError(
                name, f"{differ}: both must have one dtype, since only floating ones are converted"
            )
        if self.cast is None:
            dtype = f"dtype=torch.{placed.dtype}"
            before = f"open_round({dtype}) or send({dtype})" if in_ring else f"register({dtype})"
            raise MismatchError(
                name,
                f"{differ}: both must have one dtype; attach(cast='worker') converts while it"
                f" copies, {before} at the trainer before",
            )
        if reason := why_not(held, wanted, placed.device):
            raise MismatchError(name, f"{differ}, which cannot be converted: {reason}")

    def _offered_wants(self, offered: Iterable[str]) -> list[Want]:
        found = {id(want): want for name in offered for want in self._by_name.get(name, ())}
        return list(found.values())

    def coverage(self, *, subset: bool = False) -> Coverage:
        """Returns the account of one round.

        Args:
            subset: The round carries only some tensors; what it has begun to fill it must fill.
        """
        return Coverage(self._wants, subset)


class Coverage(Struct):
    """What one round has filled so far: the answer to "complete?" that a vote needs."""

    wants: Sequence[Want]
    subset: bool = False
    _filled: dict[int, set[Region]] = field(default_factory=dict)
    # Those that are not filled, and of these those that are begun: kept, since a round may have as
    # many batches as tensors, and is asked after each.
    _open: dict[int, Want] = field(default_factory=dict)
    _begun: dict[int, Want] = field(default_factory=dict)
    # Names of those that were filled.
    _applied: set[str] = field(default_factory=set)

    # The boxes of each tensor that consists of several, by that tensor: begun with the first.
    _boxes: dict[int, list[Want]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for want in self.wants:
            if want.placed.is_part:
                self._boxes.setdefault(id(want.placed.tensor), []).append(want)
        self.reset()

    def staged(self, copied: CopyPlan, source: str, numbers: Iterable[int]) -> None:
        """Notes that these buffers of `source` were copied by the plan.

        A region that several sources fill counts once.

        Raises:
            OverlapError: Two batches filled regions that overlap without being equal.
        """
        touched: dict[int, Want] = {}
        for want, region in copied.regions(source, numbers):
            key = id(want)
            if key not in self._filled and region == want.region:
                # Nearly all of them: filled at once, by one piece.
                self._filled[key] = {region}
                self._note_filled(key, want)
            else:
                self._filled.setdefault(key, set()).add(region)
                touched[key] = want
        for key, want in touched.items():
            regions = require_disjoint(want.names[0], self._filled[key])
            if covered(want.region, regions) == want.region.count:
                self._note_filled(key, want)
            else:
                self._note_begun(want)

    def _note_filled(self, key: int, want: Want) -> None:
        self._applied.update(want.names)
        self._open.pop(key, None)
        self._begun.pop(key, None)
        if want.placed.is_part:
            self._note_begun(want)

    def _note_begun(self, want: Want) -> None:
        """All boxes of its tensor have to be filled now."""
        begun = self._boxes.get(id(want.placed.tensor), (want,))
        self._begun.update((id(box), box) for box in begun if id(box) in self._open)

    def complete(self) -> bool:
        """Whether every wanted region was filled in this round."""
        return not (self._begun if self.subset else self._open)

    def missing(self, limit: int | None = None) -> tuple[str, ...]:
        """Returns a text for each wanted tensor that is not filled; it begins with its name.

        Args:
            limit: How many texts are wanted at most.
        """
        left = (self._begun if self.subset else self._open).items()
        return tuple(
            f"{want.names[0]}: {covered(want.region, self._filled.get(key, ()))} of"
            f" {want.region.count} elements filled"
            for key, want in islice(left, limit)
        )

    @property
    def applied(self) -> AbstractSet[str]:
        """The names that were filled; those without elements are, unless it is a subset."""
        return self._applied

    @property
    def untouched(self) -> bool:
        """Whether nothing at all was filled."""
        return not self._filled

    def reset(self) -> None:
        """Starts the account of another round."""
        self._filled.clear()
        self._open = {id(want): want for want in self.wants if want.region.count}
        self._begun = {}
        empty = [] if self.subset else [want for want in self.wants if not want.region.count]
        self._applied = {name for want in empty for name in want.names}


def _renamed(name: str, rename: Rename | None) -> str:
    if rename is None:
        return name
    return rename.get(name, name) if isinstance(rename, Mapping) else rename(name)


def _check_writable(placed: Placed) -> None:
    tensor = placed.tensor
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride == 0:
            raise AttachError(
                placed.name, "is expanded (several elements share one place): clone it first"
            )
