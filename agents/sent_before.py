"""What a trainer found out about a tensor that it sends through its ring, for the next round.

The same tensors go in each round: those that are plain are looked at once, and later only whether
they are still of the same kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Self

import torch

from ..protocol.dtypes import ITEM_SIZES
from ..protocol.regions import Region, single_run, whole
from ..protocol.tables import TensorEntry
from .filling import copies_bytes, copy_bytes
from .mappings import process_mappings
from .packing import cut, entries_of, table_cost
from .placement import Placed

if TYPE_CHECKING:
    from .ring_round import RingRound

MOST_KNOWN: Final = 100_000
"""Tensors that are remembered."""
MOST_OFFSETS: Final = 8
"""Offsets that are remembered of each part."""


class Part(NamedTuple):
    """A box of a tensor that lies in a slot as it is: one run of bytes."""

    begin: int
    """Where it begins in the tensor, in bytes."""
    nbytes: int
    region: Region
    said: dict[int, list[TensorEntry]]
    """What a table says of it, by its offset in the slot: mostly one, as the order is the same."""


class SentBefore(NamedTuple):
    """A tensor that was sent: whole, plain, and in its own dtype."""

    kind: type[torch.Tensor]
    torch_dtype: torch.dtype
    torch_shape: torch.Size
    device: torch.device
    tied: tuple[str, ...]
    of_round: str | None
    """The dtype that was asked for all tensors of the round."""
    shape: tuple[int, ...]
    dtype: str
    cost: int
    """What `table_cost` says."""
    parts: list[Part]

    @classmethod
    def of(
        cls, placed: Placed, tied: tuple[str, ...], dtype: str, of_round: str | None, capacity: int
    ) -> Self | None:
        """Returns what to remember of a tensor; None where it has to be looked at each time.

        Args:
            placed: The tensor, all of it.
            tied: Its other names.
            dtype: The dtype that it was sent in.
            of_round: The dtype that was asked for the round.
            capacity: Bytes of a slot.
        """
        whole = not placed.is_part and placed.region.is_whole(placed.shape)
        plain = placed.distributed is None and placed.contiguous and placed.dtype == dtype
        if not (whole and plain and placed.nbytes):
            return None
        item = ITEM_SIZES[dtype]
        parts: list[Part] = []
        for box in cut(placed.region.length, item, capacity):
            run = single_run(box, placed.region.length)
            if run is None:
                return None
            parts.append(Part(run[0] * item, run[1] * item, box, {}))
        tensor = placed.tensor
        cost = table_cost(placed.name, tied, len(placed.shape))
        return cls(
            type(tensor),
            tensor.dtype,
            tensor.shape,
            tensor.device,
            tied,
            of_round,
            placed.shape,
            dtype,
            cost,
            parts,
        )

    def is_like(self, tensor: torch.Tensor, tied: tuple[str, ...], of_round: str | None) -> bool:
        """Whether all that is remembered is true of this tensor."""
        return (
            type(tensor) is self.kind
            and tensor.dtype is self.torch_dtype
            and tensor.shape == self.torch_shape
            and tensor.device == self.device
            and tied == self.tied
            and of_round == self.of_round
            and tensor.is_contiguous()
            and not (tensor.is_neg() or tensor.is_conj())
        )

    def entries(self, name: str, part: Part, offset: int) -> list[TensorEntry]:
        """Returns what a table says of a part at `offset`."""
        found = part.said.get(offset)
        if found is None:
            if len(part.said) >= MOST_OFFSETS:
                part.said.clear()
            found = entries_of(name, self.dtype, self.shape, part.region, self.tied, offset)
            part.said[offset] = found
        return found


def remember(
    rnd: RingRound, placed: list[Placed], dtypes: list[str], aliases: tuple[str, ...]
) -> None:
    """Keeps what was found out about a tensor, if it can be sent without a look next time."""
    known, slots = rnd._source._sent_before, rnd._source._ring.slots.options
    name, found = placed[0].name, None
    if len(placed) == 1 and copies_bytes(placed[0].device, slots.device):
        found = SentBefore.of(placed[0], aliases, dtypes[0], rnd._dtype, slots.slot_bytes)
    if found is None:
        known.pop(name, None)
    elif len(known) < MOST_KNOWN or name in known:
        known[name] = found


def send_again(rnd: RingRound, name: str, tensor: torch.Tensor, aliases: tuple[str, ...]) -> bool:
    """Sends a tensor that is like the one of this name before; False: it is to be looked at."""
    known = rnd._source._sent_before.get(name)
    if known is None or not known.is_like(tensor, aliases, rnd._dtype):
        return False
    address = tensor.data_ptr()
    with rnd._sending:
        rnd._check_active()
        if rnd.handle is None or rnd._registered or rnd._subset:
            return False
        if any(each in rnd._sent for each in (name, *aliases)):
            return False
        if process_mappings().owner_of(address) is not None:
            return False
        rnd._raise_if_refused()
        for part in known.parts:
            filling = rnd._slot_for(part.nbytes, known.cost)
            if filling is None:
                break
            copy_bytes(filling.view, filling.packing.offset, address + part.begin, part.nbytes)
            entries = known.entries(name, part, filling.packing.offset)
            filling.packing.add_again(entries, part.nbytes, known.cost)
        for each in (name, *aliases):
            rnd._sent[each] = (known.shape, known.dtype, [whole(known.shape)])
    return True
