"""A dictionary of tensors that a trainer sends round after round: its batches are made up once.

While all of them lie where they lay, nothing is looked at one by one: a slot is filled by one call,
on a GPU as a graph, and handed out with the table that it had before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ..protocol.regions import Region, whole
from ..protocol.tables import TensorEntry
from .copying import Run, Runs
from .mappings import process_mappings
from .packing import Packing
from .ring_memory import Filling
from .sent_before import SentBefore

if TYPE_CHECKING:
    from .device_copies import DeviceRuns
    from .ring_round import RingRound

MOST_KEPT: Final = 4096
"""Batches in slots that are kept."""

_DTYPE: Final = attrgetter("dtype")
_SHAPE: Final = attrgetter("shape")


class Layout(NamedTuple):
    """Where and how tensors lie. Keeps none of them."""

    names: list[str]
    kinds: list[type]
    addresses: list[int]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    contiguous: list[bool]
    negative: list[bool]
    conjugate: list[bool]
    stored: list[int]
    """Bytes of their storages, which may be shrunk under them."""


def layout_of(named: Mapping[str, torch.Tensor]) -> Layout | None:
    """Returns how these lie; None if they are not all tensors with memory."""
    tensors = list(named.values())
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return None
    kind = torch.Tensor
    try:
        return Layout(
            list(named),
            list(map(type, tensors)),
            list(map(kind.data_ptr, tensors)),
            list(map(_DTYPE, tensors)),
            list(map(_SHAPE, tensors)),
            list(map(kind.is_contiguous, tensors)),
            list(map(kind.is_neg, tensors)),
            list(map(kind.is_conj, tensors)),
            list(map(torch.UntypedStorage.nbytes, map(kind.untyped_storage, tensors))),
        )
    except (RuntimeError, TypeError, NotImplementedError):
        return None  # No memory of its own: said when it is sent.


class _Batch(NamedTuple):
    """What goes into one slot."""

    entries: list[TensorEntry]
    nbytes: int
    end: int
    runs: list[tuple[int, int, int]]
    """Offset in the slot, address, length."""


class _Kept(NamedTuple):
    """How a batch gets into one of the slots, and what is sent of it then."""

    copies: Runs | DeviceRuns
    body: bytes


class Script:
    """How a dictionary is sent.

    Args:
        layout: How its tensors lie.
        known: What is known of each.
        of_round: The dtype that was asked for all of them.
        capacity: Bytes of a slot.
        table_bytes: Bytes that the table of one may have.
    """

    def __init__(
        self,
        layout: Layout,
        known: Sequence[SentBefore],
        of_round: str | None,
        capacity: int,
        table_bytes: int,
    ) -> None:
        self._layout = layout
        self._for = (of_round, capacity, table_bytes)
        self._sent: dict[str, tuple[tuple[int, ...], str, Region]] = {}
        self._batches: list[_Batch] = []
        # By the place of the batch, and the slot.
        self._kept: dict[tuple[int, int], _Kept] = {}
        packing = Packing(capacity, table_bytes)
        runs: list[tuple[int, int, int]] = []
        for name, address, each in zip(layout.names, layout.addresses, known, strict=True):
            self._sent[name] = (each.shape, each.dtype, whole(each.shape))
            for part in each.parts:
                if not packing.fits(part.nbytes, each.cost):
                    self._batches.append(_Batch(packing.entries, packing.nbytes, packing.end, runs))
                    packing, runs = Packing(capacity, table_bytes), []
                offset = packing.offset
                runs.append((offset, address + part.begin, part.nbytes))
                entries = each.entries(name, part, offset)
                packing.add_again(entries, part.nbytes, each.cost)
        self._batches.append(_Batch(packing.entries, packing.nbytes, packing.end, runs))

    def is_for(self, layout: Layout, of_round: str | None, capacity: int, table_bytes: int) -> bool:
        """Whether it may be sent so."""
        return self._for == (of_round, capacity, table_bytes) and layout == self._layout

    def send(self, rnd: RingRound) -> None:
        """Fills slots, and hands out all but the last. The round is open, and nothing was sent."""
        for place, batch in enumerate(self._batches):
            if place:
                rnd._hand_out()
            if not rnd._take_slot():
                return
            filling = rnd._filling
            assert filling is not None
            self._fill(place, batch, filling)
        for name, (shape, dtype, region) in self._sent.items():
            rnd._sent[name] = (shape, dtype, [region])

    def _fill(self, place: int, batch: _Batch, filling: Filling) -> None:
        key = (place, filling.number)
        found = self._kept.get(key)
        if found is None:
            at = filling.view.data_ptr()
            runs = [Run(at + offset, address, nbytes) for offset, address, nbytes in batch.runs]
            copies = self._copies_of(runs, filling.view.device)
        else:
            copies = found.copies
        if isinstance(copies, Runs):
            copies.copy()
        else:
            torch.cuda.current_stream(filling.view.device).wait_event(copies.begin())
        # First the bytes: what an interrupt cuts off is not in the table.
        filling.packing.set(batch.entries, batch.nbytes, batch.end)
        if found is None:
            found = _Kept(copies, filling.body(None))
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = found
        filling.packing.body = found.body

    @staticmethod
    def _copies_of(runs: list[Run], device: torch.device) -> Runs | DeviceRuns:
        if device.type == "cpu":
            return Runs(runs)
        from .device_copies import DeviceRuns

        return DeviceRuns(device.index, runs)


def layout_to_send(rnd: RingRound, given: object) -> Layout | None:
    """Returns how a dictionary lies that may be sent by a script; None for anything else."""
    source = rnd._source
    if not isinstance(given, dict) or not given or rnd._subset or rnd.terms.verify or rnd._sent:
        return None
    return None if source._registry.numbers else layout_of(given)


def send_by_script(rnd: RingRound, layout: Layout) -> bool:
    """Sends a dictionary as in an earlier round, if it lies as it lay; returns whether it did."""
    source, script = rnd._source, rnd._source._script
    slots = source._ring.slots.options
    if script is None or not script.is_for(layout, rnd._dtype, slots.slot_bytes, rnd._table_bytes):
        return False
    mappings = process_mappings()
    if mappings.held() and any(map(mappings.owner_of, layout.addresses)):
        return False  # One of them is of another trainer: said when it is sent.
    with rnd._sending:
        rnd._check_active()
        if rnd.handle is None:
            source._open_ring(rnd)
        rnd._raise_if_refused()
        script.send(rnd)
    return True


def note_sent(rnd: RingRound, layout: Layout) -> None:
    """A dictionary was sent one by one: if it lies where it lay last time, the next is by script."""
    source = rnd._source
    last, source._last_layout = source._last_layout, layout
    if last != layout:
        return
    known = [source._sent_before.get(name) for name in layout.names]
    found = [each for each in known if each is not None and not each.tied]
    if len(found) == len(known):
        slots = source._ring.slots.options
        source._script = Script(layout, found, rnd._dtype, slots.slot_bytes, rnd._table_bytes)
