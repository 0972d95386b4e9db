"""The command `tensorlease bench ledger`: CPU and memory for each receiver of a committed round.

One trainer publishes; each worker answers as in a steady round (Staged with its vote, Committed).
Messages are made before the clock starts: what is measured is the ledger.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Sequence

import click

from tensorlease.broker.command import COLLECT_AFTER
from tensorlease.broker.ledger import Ledger, Settings
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import (
    Distribution,
    Outcome,
    Process,
    TakeNote,
    Terms,
)

from .report import Goal, Report, finish, new_report, options

LIMIT = 1.2
"""Times the CPU for each receiver at the least number of them."""
LIMIT_BYTES = 512
"""Of the ledger's state, for each receiver and lease."""
ENOUGH = 1_000
"""Receivers among whom the bytes of the round itself, some ten thousand, are few for each."""

EPOCH = "e" * 16
TRAINER = "f" * 16
PROTOCOL = (1, 1)


class Crowd:
    """A ledger with one trainer and many workers that have joined.

    Args:
        receivers: How many workers.
        members: How many of them make one replica.
        trainer_first: The trainer is there already when the workers join.
    """

    def __init__(self, receivers: int, members: int = 1, *, trainer_first: bool = False) -> None:
        settings = Settings(window=1024, max_peers=receivers + 1)
        self.now = 1000.0
        self.ledger = Ledger(EPOCH, settings, now=self.now)
        self.instances = [f"{number:016x}" for number in range(receivers)]
        self.group = ""
        self.call = 0
        hellos = [self._worker_hello(n, members) for n in range(receivers)]
        if trainer_first:
            self._join_trainer()
        started = time.process_time()
        for hello in hellos:
            self.ledger.hello(hello, self.now)
        self.join_s = time.process_time() - started
        if not trainer_first:
            self._join_trainer()

    def _worker_hello(self, number: int, members: int) -> m.WorkerHello:
        return m.WorkerHello(
            1,
            PROTOCOL,
            self.instances[number],
            "policy",
            f"replica-{number // members}",
            number % members,
            members,
            "host",
            "cpu:0",
            [Process(number + 2, 7)],
            True,
            "bench",
            0,
            False,
            None,
            None,
            [],
            [],
            TakeNote([], [], False, []),
        )

    def _join_trainer(self) -> None:
        hello = m.TrainerHello(
            1,
            PROTOCOL,
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
            "bench",
            0,
            [],
        )
        self.ledger.hello(hello, self.now)
        group = self.ledger.state.channels["policy"].group
        assert group is not None
        self.group = group.id

    def begin(self, batches: int) -> None:
        """Opens the next call and hands out its batches."""
        self.call += 1
        ledger, now = self.ledger, self.now
        ledger.message(TRAINER, m.Open(1, self.call, Terms(self.call)), b"", now)
        for seq in range(batches):
            total = batches if seq == batches - 1 else None
            batch = m.Batch(1, self.call, seq, [seq], False, 8, total)
            ledger.message(TRAINER, batch, b"table", now)

    def answers(self, batches: int) -> list[list[tuple[str, m.FromAgent]]]:
        """Returns what the workers say in the present call: for each batch, then to Commit."""
        key = (self.group, self.call)
        said: list[list[tuple[str, m.FromAgent]]] = []
        for seq in range(batches):
            staged = m.Staged(1, *key, 0, seq, seq == batches - 1)
            said.append([(instance, staged) for instance in self.instances])
        committed = m.Committed(1, *key, True)
        said.append([(instance, committed) for instance in self.instances])
        return said

    def say(self, messages: list[tuple[str, m.FromAgent]]) -> None:
        ledger, now = self.ledger, self.now
        for instance, message in messages:
            ledger.message(instance, message, b"", now)

    def outcome(self) -> Outcome | None:
        """Returns what became of the present call; None: it has not ended."""
        result = self.ledger.state.channels["policy"].rounds[self.group, self.call].result
        return None if result is None else result.outcome


def steady(crowd: Crowd, batches: int) -> float:
    """Returns the CPU seconds of one committed round."""
    gc.collect()
    started = time.process_time()
    crowd.begin(batches)
    spent = time.process_time() - started
    said = crowd.answers(batches)
    started = time.process_time()
    for messages in said:
        crowd.say(messages)
    spent += time.process_time() - started
    assert crowd.outcome() is Outcome.COMMITTED
    return spent


def retried(crowd: Crowd) -> float:
    """Returns the CPU seconds of a round that is voided, drained and opened again."""
    gc.collect()
    started = time.process_time()
    crowd.begin(1)
    crowd.ledger.message(TRAINER, m.Void(1, crowd.call), b"", crowd.now)
    drained = m.Drained(1, crowd.group, crowd.call, False)
    crowd.begin(1)
    crowd.say([(instance, drained) for instance in crowd.instances])
    spent = time.process_time() - started
    for messages in crowd.answers(1):
        crowd.say(messages)
    assert crowd.outcome() is Outcome.COMMITTED
    return spent


def held_bytes(receivers: int, batches: int) -> float:
    """Returns the bytes of the ledger's state for each receiver and lease of a round under way."""
    crowd = Crowd(receivers)
    gc.collect()
    tracemalloc.start()
    try:
        crowd.begin(batches)
        gc.collect()
        spent, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return spent / (receivers * batches)


@click.command()
@click.option(
    "--receivers",
    type=click.IntRange(min=1),
    multiple=True,
    default=(100, 1_000, 10_000),
    show_default=True,
    help="How many workers; repeat it. The first number is what the others are compared with.",
)
@click.option("--batches", type=click.IntRange(min=1), multiple=True, default=(1, 4))
@click.option(
    "--members",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 4),
    help="How many of them make one replica; repeat it.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=6, show_default=True)
@click.option(
    "--crowding",
    is_flag=True,
    help="Measure joining beside a trainer too, and a round that waits until all have drained"
    " (both look at all replicas at each step; up to 1,000 receivers).",
)
@options
def ledger(
    receivers: Sequence[int],
    batches: Sequence[int],
    members: Sequence[int],
    rounds: int,
    crowding: bool,
    as_json: bool,
    check: bool,
) -> int:
    """Measure the ledger alone: CPU and bytes for each receiver of a round, up to 10,000 of them.

    The sizes take turns; of all rounds of a size the least counts, as other work on the machine
    only adds to it.
    """
    words = [
        f"--{name} {value}"
        for name, values in (("receivers", receivers), ("batches", batches), ("members", members))
        for value in values
    ]
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)  # as in a broker
    report = new_report(" ".join(["tensorlease bench ledger", *words, f"--rounds {rounds}"]))
    for of in members:
        for count in batches:
            times = measure_steady(receivers, of, count, rounds)
            name = f"{count} batch{'es' * (count > 1)}, replicas of {of}"
            add_times(report, name, receivers, times, goal=True)
    for count in batches:
        name = f"{count} batch{'es' * (count > 1)}"
        for size in receivers:
            spent = held_bytes(size, count)
            report.add(name, f"bytes at {size:,}", [spent])
            if size >= ENOUGH:
                what = f"bytes for each receiver and lease at {size:,}"
                report.goals.append(Goal(name, what, spent, LIMIT_BYTES))
    if crowding:
        few = [count for count in receivers if count <= 1_000]
        crowds = [Crowd(count, trainer_first=True) for count in few]
        joins = [[crowd.join_s / count * 1e6] for count, crowd in zip(few, crowds, strict=True)]
        retries = [[retried(crowd) / count * 1e6] for count, crowd in zip(few, crowds, strict=True)]
        add_times(report, "joining beside a trainer", few, joins, goal=False)
        add_times(report, "void, drain and retry", few, retries, goal=False)
    return finish(report, as_json=as_json, check=check)


def measure_steady(
    counts: Sequence[int], members: int, batches: int, rounds: int
) -> list[list[float]]:
    """Returns CPU microseconds for each receiver, of every round; the sizes take turns."""
    crowds = [Crowd(count, members) for count in counts]
    times: list[list[float]] = [[] for _ in counts]
    for _ in range(rounds):
        for place, (count, crowd) in enumerate(zip(counts, crowds, strict=True)):
            # As many receivers of each size, that none has more chances of a calm moment.
            for _ in range(max(1, max(counts) // count // 10)):
                times[place].append(steady(crowd, batches) / count * 1e6)
    return times


def add_times(
    report: Report, row: str, counts: Sequence[int], times: list[list[float]], *, goal: bool
) -> None:
    """Adds the least time of each size, and holds it against the first one's."""
    for count, of in zip(counts, times, strict=True):
        report.add(row, f"us at {count:,}", [min(of)])
    for count, of in zip(counts[1:], times[1:], strict=True):
        ratio = min(of) / min(times[0])
        report.add(row, f"{count:,} to {counts[0]:,}", [ratio])
        if goal:
            name = f"CPU for each of {count:,} receivers to that of {counts[0]:,}"
            report.goals.append(Goal(row, name, ratio, LIMIT))
