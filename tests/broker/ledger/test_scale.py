"""The ledger with 10,000 receivers: a whole round commits, and its state stays small.

How long it takes is no test (`tensorlease bench ledger` compares the CPU for each receiver), but how
many steps the interpreter takes is: they are the same on every machine.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from tensorlease.broker.ledger import Ledger, Settings
from tensorlease.broker.ledger import effects as fx
from tensorlease.broker.ledger.state import Round
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Distribution, Outcome, Process, TakeNote, Terms

if TYPE_CHECKING:
    from _typeshed import TraceFunction

RECEIVERS = 10_000
TRAINER = "f" * 16
NOW = 1000.0
MAX_BYTES = 512
"""Bytes of the ledger's state for each receiver and lease."""

INSTANCES = [f"{number:016x}" for number in range(RECEIVERS)]


def crowd(members: int, receivers: int = RECEIVERS) -> Ledger:
    """Returns a ledger that so many workers and one trainer have joined."""
    ledger = Ledger("e" * 16, Settings(max_peers=RECEIVERS + 1), now=NOW)
    note = TakeNote([], [], False, [])
    for number, instance in enumerate(INSTANCES[:receivers]):
        replica, member = f"replica-{number // members}", number % members
        ledger.hello(
            m.WorkerHello(
                1,
                (1, 1),
                instance,
                "policy",
                replica,
                member,
                members,
                "host",
                "cpu:0",
                [Process(number + 2, 7)],
                True,
                "test",
                0,
                False,
                None,
                None,
                [],
                [],
                note,
            ),
            NOW,
        )
    ledger.hello(
        m.TrainerHello(
            1,
            (1, 1),
            TRAINER,
            "policy",
            "run",
            0,
            1,
            Distribution.COLOCATED,
            "host",
            "cpu:0",
            [Process(1, 7)],
            True,
            "test",
            0,
            [],
        ),
        NOW,
    )
    return ledger


def the_round(ledger: Ledger) -> Round:
    (rnd,) = ledger.state.channels["policy"].rounds.values()
    return rnd


def begin(ledger: Ledger, batches: int) -> Counter[type[object]]:
    """Opens a round and hands out its batches; returns how many messages of each kind went out."""
    effects = ledger.message(TRAINER, m.Open(1, 1, Terms(1)), b"", NOW)
    for seq in range(batches):
        total = batches if seq == batches - 1 else None
        batch = m.Batch(1, 1, seq, [seq], False, 8, total)
        effects += ledger.message(TRAINER, batch, b"table", NOW)
    return sent(effects)


def say(
    ledger: Ledger, *messages: m.FromAgent, receivers: int = RECEIVERS
) -> Counter[type[object]]:
    """Every worker says these; returns how many messages of each kind went out."""
    told: Counter[type[object]] = Counter()
    for instance in INSTANCES[:receivers]:
        for message in messages:
            told += sent(ledger.message(instance, message, b"", NOW))
    return told


def sent(effects: list[fx.Effect]) -> Counter[type[object]]:
    return Counter(type(effect.message) for effect in effects if isinstance(effect, fx.Send))


def steps_for_each(receivers: int, batches: int) -> float:
    """Returns the interpreter's instructions for each receiver of a committed round."""
    ledger = crowd(1, receivers)
    steps = 0

    def count(frame: FrameType, event: str, _: object) -> TraceFunction:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        begin(ledger, batches)
        key = the_round(ledger).key
        staged = [m.Staged(1, *key, 0, seq, seq == batches - 1) for seq in range(batches)]
        say(ledger, *staged, receivers=receivers)
        say(ledger, m.Committed(1, *key, True), receivers=receivers)
    finally:
        sys.settrace(before)
    result = the_round(ledger).result
    assert result is not None and result.outcome is Outcome.COMMITTED
    return steps / receivers


@pytest.mark.parametrize("batches", [1, 4])
def test_the_steps_for_a_receiver_do_not_grow_with_the_number_of_receivers(batches: int) -> None:
    few = steps_for_each(100, batches)
    many = steps_for_each(800, batches)
    assert many <= 1.05 * few


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("batches", [1, 4])
def test_a_round_of_ten_thousand_receivers_commits(members: int, batches: int) -> None:
    ledger = crowd(members)
    told = begin(ledger, batches)
    assert told[m.Prepare] == RECEIVERS
    assert told[m.Deliver] == RECEIVERS * batches
    ledger.validate()
    key = the_round(ledger).key
    staged = [m.Staged(1, *key, 0, seq, seq == batches - 1) for seq in range(batches)]
    told = say(ledger, *staged)
    assert (told[m.Release], told[m.Commit]) == (batches, RECEIVERS)
    ledger.validate()
    told = say(ledger, m.Committed(1, *key, True))
    assert told == {m.Finished: 1}
    ledger.validate()
    result = the_round(ledger).result
    assert result is not None and result.outcome is Outcome.COMMITTED
    assert len(result.receivers) == RECEIVERS
    assert len(result.replicas) == RECEIVERS // members


@pytest.mark.parametrize("batches", [1, 4])
def test_a_receivers_part_in_a_lease_takes_no_more_than_512_bytes(batches: int) -> None:
    ledger = crowd(1)
    gc.collect()
    tracemalloc.start()
    try:
        begin(ledger, batches)
        gc.collect()
        spent, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    rnd = the_round(ledger)
    assert sum(len(lease.holders) for lease in rnd.leases.values()) == RECEIVERS * batches
    assert spent / (RECEIVERS * batches) <= MAX_BYTES


def test_a_round_that_has_ended_leaves_nothing_that_grows() -> None:
    ledger = crowd(1)
    gc.collect()
    tracemalloc.start()
    try:
        begin(ledger, 1)
        key = the_round(ledger).key
        say(ledger, m.Staged(1, *key, 0, 0, True))
        say(ledger, m.Committed(1, *key, True))
        ledger.message(TRAINER, m.Bye(1), b"", NOW)
        channel = ledger.state.channels["policy"]
        assert channel.rounds == {}
        channel.history.clear()
        gc.collect()
        spent, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Each worker keeps the note of its last commit.
    assert spent / RECEIVERS <= MAX_BYTES
