"""The slots of a ring: which are free, being filled, or out, and with whom. Pure.

A slot is a buffer with a number of its own for as long as it exists, which workers map once. It is
filled, handed out as one batch, and filled again when that batch's lease is released. One that a
silent but living worker keeps is *stuck*: another takes its place, within a limit in bytes.

    FREE ─▶ FILLING ─▶ OUT ─▶ FREE          the way of a slot
                        └──▶ STUCK ─▶ FREE   its lease is kept; released later, it comes back,
                                  └──▶ RETIRING ─▶ gone     or goes, where it was replaced
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Final

from msgspec import Struct, field

from ..protocol.errors import ConfigError
from ..protocol.records import Holder

_DEVICE: Final = re.compile(r"cpu|cuda:\d{1,3}")
MIN_SLOT_BYTES: Final = 4096
MAX_SLOT_BYTES: Final = 2**40
DEFAULT_SLOTS: Final = 4
DEFAULT_SLOT_BYTES: Final = 64 * 2**20


class RingOptions(Struct, frozen=True):
    """How large a trainer's ring is.

    Raises:
        ConfigError: A number that cannot work.
    """

    num_ipc_handles: int = DEFAULT_SLOTS
    """Slots: how many batches are on their way at a time. Less than the broker's window."""
    slot_bytes: int = DEFAULT_SLOT_BYTES
    """Bytes of a slot. A larger tensor is sent in several batches."""
    max_quarantine_bytes: int | None = None
    """Bytes of slots beyond these that may exist while silent workers keep some; default: twice
    the bytes of all slots. 0: none is replaced."""
    device: str = "cpu"
    """Where the slots lie: shared memory (`cpu`), or a GPU (`cuda:0`), whose workers then copy from
    its memory."""

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(str(self.device)):
            raise ConfigError(f"device {self.device!r}: must be 'cpu' or 'cuda:N'")
        for name, low, high in (
            ("num_ipc_handles", 1, 65_535),
            ("slot_bytes", MIN_SLOT_BYTES, MAX_SLOT_BYTES),
            ("max_quarantine_bytes", 0, 2**62),
        ):
            value = getattr(self, name)
            if value is None and name == "max_quarantine_bytes":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{name} {value!r}: must be a whole number from {low} to {high}")

    @property
    def ordinal(self) -> int | None:
        """The GPU that the slots lie on; None: shared memory."""
        return None if self.device == "cpu" else int(self.device.partition(":")[2])

    @property
    def quarantine_limit(self) -> int:
        """Bytes that may exist beyond those of the slots."""
        if self.max_quarantine_bytes is None:
            return 2 * self.num_ipc_handles * self.slot_bytes
        return self.max_quarantine_bytes


def require_ring(given: object) -> None:
    """Raises `ConfigError` for what is neither `RingOptions` nor None: a dict, say."""
    if given is not None and not isinstance(given, RingOptions):
        known = ", ".join(f"{name}=" for name in RingOptions.__struct_fields__)
        raise ConfigError(f"ring {given!r}: must be RingOptions({known})")


class SlotState(Enum):
    """What a slot is doing."""

    FREE = "free"
    FILLING = "filling"
    OUT = "out"
    """A lease names it."""
    STUCK = "stuck"
    """A lease names it whose holders are silent but living."""
    RETIRING = "retiring"
    """Not used any more; workers still have it mapped."""


class Slot(Struct):
    """A slot, and the batch that names it while it is out or stuck."""

    number: int
    state: SlotState = SlotState.FREE
    call: int = 0
    seq: int = 0
    holders: list[Holder] = field(default_factory=list)
    """Who keeps it, while it is stuck."""


class RingStatus(Struct, frozen=True):
    """The slots of a ring, counted by what they are doing, and their bytes."""

    free: int
    """To be filled next."""
    filling: int
    """Being filled, or taken for that."""
    out: int
    """Handed out, and not all receivers are done."""
    stuck: int
    """Kept by silent but living workers."""
    retiring: int
    """On their way back from the workers that have them mapped."""
    slot_bytes: int
    """Bytes of each slot."""
    limit_bytes: int
    """What `nbytes` never exceeds."""
    holders: tuple[Holder, ...]
    """Who keeps the stuck ones."""

    @property
    def slots(self) -> int:
        """All slots that exist."""
        return self.free + self.filling + self.out + self.stuck + self.retiring

    @property
    def nbytes(self) -> int:
        """Bytes of all slots that exist."""
        return self.slots * self.slot_bytes

    @property
    def stuck_bytes(self) -> int:
        """Bytes of the slots that silent workers keep."""
        return self.stuck * self.slot_bytes


_LIVE: Final = (SlotState.FREE, SlotState.FILLING, SlotState.OUT)
_LEASED: Final = (SlotState.OUT, SlotState.STUCK)


class Slots:
    """The accounting of a ring's slots. Whoever uses it makes and frees the memory itself."""

    def __init__(self, options: RingOptions) -> None:
        self.options: Final = options
        self._slots: dict[int, Slot] = {}

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    def numbers(self, *states: SlotState) -> list[int]:
        """Returns the slots in one of these states; all, if none is named."""
        return [s.number for s in self._slots.values() if not states or s.state in states]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots that exist."""
        return len(self._slots) * self.options.slot_bytes

    @property
    def limit_bytes(self) -> int:
        """What `nbytes` never exceeds."""
        options = self.options
        return options.num_ipc_handles * options.slot_bytes + options.quarantine_limit

    @property
    def lacking(self) -> int:
        """How many slots may be made now: to have as many as there shall be, within the limit."""
        wanted = self.options.num_ipc_handles - len(self.numbers(*_LIVE))
        room = (self.limit_bytes - self.nbytes) // self.options.slot_bytes
        return max(0, min(wanted, room))

    @property
    def free(self) -> bool:
        """Whether there is a slot to be filled."""
        return bool(self.numbers(SlotState.FREE))

    @property
    def live(self) -> bool:
        """Whether there is a slot that no silent worker keeps."""
        return bool(self.numbers(*_LIVE))

    @property
    def exhausted(self) -> bool:
        """Whether no slot will come but from silent workers: the limit is reached."""
        return not (self.lacking or self.live or self.numbers(SlotState.RETIRING))

    @property
    def holders(self) -> tuple[Holder, ...]:
        """The silent workers that keep slots, each once."""
        found = {h.instance: h for slot in self._slots.values() for h in slot.holders}
        return tuple(found.values())

    def status(self) -> RingStatus:
        """Returns the counts as they are now."""
        counts = {state.value: len(self.numbers(state)) for state in SlotState}
        return RingStatus(
            **counts,
            slot_bytes=self.options.slot_bytes,
            limit_bytes=self.limit_bytes,
            holders=self.holders,
        )

    # ------------------------------------------------------------ the way of a slot

    def add(self, number: int) -> None:
        """A slot was made; it is free."""
        assert number not in self._slots, f"slot {number} exists"
        self._slots[number] = Slot(number)

    def fill(self, turn: int = 0) -> int | None:
        """Takes a free slot to be filled; None if there is none.

        Args:
            turn: Batches of the round before it. They take the slots by turns, so that a round that
                sends the same tensors again sends the same batches: workers know those.
        """
        free = self.numbers(SlotState.FREE)
        if not free:
            return None
        live = sorted(self.numbers(*_LIVE))
        wanted = live[turn % len(live)]
        number = wanted if wanted in free else min(free)
        self._slots[number].state = SlotState.FILLING
        return number

    def put_back(self) -> None:
        """What is being filled is not handed out."""
        for number in self.numbers(SlotState.FILLING):
            self._free(self._slots[number])

    def hand_out(self, number: int, call: int, seq: int) -> None:
        """The slot was handed out as this batch."""
        slot = self._slots[number]
        assert slot.state is SlotState.FILLING, f"slot {number} is {slot.state.value}"
        slot.state, slot.call, slot.seq = SlotState.OUT, call, seq

    def stuck(self, call: int, seq: int, holders: list[Holder]) -> None:
        """Only silent workers keep the batch; unknown batches are none of ours."""
        slot = self._find(call, seq)
        if slot is not None:
            slot.state, slot.holders = SlotState.STUCK, list(holders)

    def released(self, call: int, seq: int) -> int | None:
        """Nobody reads the batch any more; returns the slot's number if it is to be retired.

        That is so for one that was replaced while it was stuck.
        """
        slot = self._find(call, seq)
        if slot is None:
            return None
        surplus = len(self.numbers(*_LIVE)) - (slot.state is SlotState.OUT)
        if surplus >= self.options.num_ipc_handles:
            self._free(slot)
            slot.state = SlotState.RETIRING
            return slot.number
        self._free(slot)
        return None

    def out_of(self, call: int) -> list[tuple[int, int]]:
        """Returns (sequence number, slot) of what is out of this call, in order."""
        slots = self._slots.values()
        return sorted((s.seq, s.number) for s in slots if s.state in _LEASED and s.call == call)

    def renamed(self, number: int, call: int, seq: int) -> None:
        """The batch in the slot was handed out again, under another call."""
        slot = self._slots[number]
        slot.call, slot.seq = call, seq

    def came_back(self, call: int) -> None:
        """The round was refused: none of its batches went anywhere."""
        for _, number in self.out_of(call):
            self._free(self._slots[number])

    def retire(self, number: int) -> None:
        """A free slot is not used any more."""
        slot = self._slots[number]
        assert slot.state is SlotState.FREE, f"slot {number} is {slot.state.value}"
        slot.state = SlotState.RETIRING

    def keep(self, numbers: Iterable[int]) -> None:
        """The broker does not let go of these: those that were retiring are free again."""
        for number in numbers:
            slot = self._slots.get(number)
            if slot is not None and slot.state is SlotState.RETIRING:
                slot.state = SlotState.FREE

    def gone(self, numbers: Iterable[int]) -> list[int]:
        """Nobody has these mapped any more; returns those that are retired slots: free them."""
        found = [n for n in numbers if n in self._slots]
        done = [n for n in found if self._slots[n].state is SlotState.RETIRING]
        for number in done:
            del self._slots[number]
        return done

    def _find(self, call: int, seq: int) -> Slot | None:
        for slot in self._slots.values():
            if slot.state in _LEASED and (slot.call, slot.seq) == (call, seq):
                return slot
        return None

    def _free(self, slot: Slot) -> None:
        slot.state, slot.call, slot.seq, slot.holders = SlotState.FREE, 0, 0, []
