"""The accounting of a ring's slots."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorlease.agents.ring import MIN_SLOT_BYTES, RingOptions, Slots, SlotState
from tensorlease.protocol.errors import ConfigError
from tensorlease.protocol.records import Holder

SILENT = Holder("c" * 16, "a", 1, 4711)
SLOT = MIN_SLOT_BYTES


def slots(count: int = 2, quarantine: int | None = None) -> Slots:
    made = Slots(RingOptions(count, SLOT, quarantine))
    for number in range(made.lacking):
        made.add(number)
    return made


def hand_out(of: Slots, call: int, seq: int) -> int:
    number = of.fill()
    assert number is not None
    of.hand_out(number, call, seq)
    return number


def test_a_slot_is_free_again_when_its_own_batch_is_released() -> None:
    ring = slots()
    hand_out(ring, 1, 0)
    hand_out(ring, 1, 1)
    assert ring.fill() is None

    assert ring.released(1, 1) is None

    assert ring.status().free == 1
    assert ring.fill() == 1


def test_a_release_of_another_call_or_a_second_one_frees_nothing() -> None:
    ring = slots()
    hand_out(ring, 1, 0)
    hand_out(ring, 2, 0)
    ring.released(2, 0)
    ring.released(2, 0)
    ring.released(3, 0)

    assert ring.out_of(1) == [(0, 0)]
    assert (ring.status().free, ring.status().out) == (1, 1)


def test_a_stuck_slot_is_replaced_and_the_one_too_many_is_retired_when_it_comes_back() -> None:
    ring = slots()
    hand_out(ring, 1, 0)
    ring.stuck(1, 0, [SILENT])
    assert ring.lacking == 1
    assert ring.status().holders == (SILENT,)
    ring.add(2)
    assert ring.lacking == 0

    assert ring.released(1, 0) == 0

    assert (ring.status().retiring, ring.status().holders) == (1, ())
    assert ring.gone([0, 7]) == [0]
    assert ring.nbytes == 2 * SLOT


def test_a_stuck_slot_that_was_not_replaced_is_free_again() -> None:
    ring = slots()
    hand_out(ring, 1, 0)
    ring.stuck(1, 0, [SILENT])
    assert ring.released(1, 0) is None
    assert ring.status().free == 2


def test_no_slot_is_made_beyond_the_limit_in_bytes_and_then_none_will_come() -> None:
    ring = slots(2, quarantine=SLOT)
    for seq in range(3):
        hand_out(ring, 1, seq)
        ring.stuck(1, seq, [SILENT])
        for _ in range(ring.lacking):
            ring.add(10 + seq)

    assert ring.nbytes == ring.limit_bytes == 3 * SLOT
    assert ring.exhausted
    ring.released(1, 0)
    assert not ring.exhausted
    assert ring.fill() == 0


def test_where_nothing_may_be_replaced_the_other_slots_go_on() -> None:
    ring = slots(2, quarantine=0)
    hand_out(ring, 1, 0)
    ring.stuck(1, 0, [SILENT])

    assert ring.lacking == 0
    assert not ring.exhausted
    assert ring.fill() == 1


def test_what_a_refused_round_had_is_free_and_what_is_opened_again_keeps_its_slot() -> None:
    ring = slots(3)
    for seq in range(2):
        hand_out(ring, 5, seq)
    ring.renamed(0, 6, 0)
    ring.came_back(5)

    assert ring.out_of(6) == [(0, 0)]
    assert ring.status().free == 2


def test_what_is_filled_and_not_handed_out_is_free_again() -> None:
    ring = slots(1)
    ring.fill()
    ring.put_back()
    assert ring.fill() == 0


def test_a_slot_that_the_broker_does_not_let_go_is_used_on() -> None:
    ring = slots(1)
    ring.retire(0)
    assert ring.fill() is None
    ring.keep([0, 5])
    assert ring.fill() == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_ipc_handles": 0}, "num_ipc_handles 0"),
        ({"num_ipc_handles": True}, "num_ipc_handles True"),
        ({"num_ipc_handles": 2.0}, "num_ipc_handles 2.0"),
        ({"slot_bytes": 4095}, "slot_bytes 4095"),
        ({"slot_bytes": 2**41}, "from 4096 to"),
        ({"max_quarantine_bytes": -1}, "max_quarantine_bytes -1"),
        ({"device": "cuda"}, "device 'cuda': must be 'cpu' or 'cuda:N'"),
        ({"device": 0}, "device 0: must be"),
    ],
)
def test_a_ring_that_cannot_be_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RingOptions(**options)


class AnyOrder(RuleBasedStateMachine):
    """Slots in any order of events: never more bytes than the limit, never one batch in two."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = slots(3, quarantine=2 * SLOT)
        self.made = 3
        self.seq = 0
        # Batches that are not released.
        self.out: dict[int, int] = {}

    @rule()
    def hand_out(self) -> None:
        number = self.ring.fill()
        if number is not None:
            assert number not in self.out.values()
            self.ring.hand_out(number, 1, self.seq)
            self.out[self.seq] = number
            self.seq += 1

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.out)))
        number = self.out.pop(seq)
        assert self.ring.released(1, seq) in (None, number)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def stick(self, data: st.DataObject) -> None:
        self.ring.stuck(1, data.draw(st.sampled_from(sorted(self.out))), [SILENT])

    @rule()
    def make(self) -> None:
        for _ in range(self.ring.lacking):
            self.ring.add(self.made)
            self.made += 1

    @rule()
    def let_go(self) -> None:
        self.ring.gone(self.ring.numbers(SlotState.RETIRING))

    @invariant()
    def bounded(self) -> None:
        status = self.ring.status()
        assert status.nbytes == self.ring.nbytes <= status.limit_bytes
        assert status.out + status.stuck == len(self.out)
        assert status.free + status.filling + status.out <= 3
        if self.ring.exhausted:
            assert status.stuck == status.slots


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSlotsInAnyOrder = AnyOrder.TestCase
