"""How often an agent looks for a broker that is away, and what it says of that."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tensorlease.agents import connection as connection_module
from tensorlease.agents.arguments import identity, new_instance
from tensorlease.agents.connection import LAST_BACK_OFF_S, Connection, Stage
from tensorlease.agents.outage import LINE_EVERY_S, Outage
from tensorlease.agents.poll_loop import PollLoop
from tensorlease.agents.worker_core import WorkerCore
from tensorlease.protocol import messages as m
from tensorlease.protocol.limits import MAX_BODY_BYTES
from tensorlease.protocol.records import Durations


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(connection_module, "time", clock)
    monkeypatch.setattr(connection_module, "random", random.Random(1))
    return clock


@pytest.fixture
def loop() -> Iterator[PollLoop]:
    """One that is never started: its connections get their turns from the test."""
    loop = PollLoop()
    yield loop
    loop._close()


def looking(url: str) -> Connection:
    """The connection of a worker that has begun to look for its broker."""
    core = WorkerCore(identity("policy", new_instance(), "cpu:0"), "a", 0, 1)
    connection = Connection(core, url, lambda: None, lambda: None)
    connection.stage = Stage.LOOKING
    return connection


def tries(connection: Connection, loop: PollLoop, clock: Clock, seconds: float) -> Iterator[float]:
    """Lets time pass; yields when it looked for the broker."""
    until = clock.now + seconds
    while True:
        due = connection.turn(loop, {})
        assert due is not None
        yield clock.now
        if due >= until:
            clock.now = until
            return
        clock.now = max(clock.now, due)


def test_in_an_hour_without_a_broker_a_line_a_minute_is_logged_and_one_when_it_is_back(
    clock: Clock, loop: PollLoop, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection = looking(url)
    with caplog.at_level(logging.INFO, "tensorlease"):
        looked = list(tries(connection, loop, clock, 3600.0))
        lines = [record.message for record in caplog.records]
        with connection.acting():
            connection._core.hello()
            connection._core.receive(welcome(connection))
    assert 1800 < len(looked) < 7200
    assert 1 <= len(lines) <= 3600 / LINE_EVERY_S + 1
    assert "no broker answers at" in lines[0] and "  tensorlease broker" not in lines[0]
    assert not any("\n" in line for line in lines)
    assert "tries)" in lines[-1]
    back = [record.message for record in caplog.records][len(lines) :]
    assert len(back) == 2
    assert "connected again after 3600" in back[0] and "connected to" in back[1]


def welcome(connection: Connection) -> m.Welcome:
    core = connection._core
    instance, number = core.me.instance, core.session.number
    return m.Welcome("epoch", instance, number, 1, "group", 0, 0, Durations(), 64, MAX_BODY_BYTES)


def test_pauses_grow_to_two_seconds_and_are_random(clock: Clock, loop: PollLoop, url: str) -> None:
    looked = list(tries(looking(url), loop, clock, 600.0))
    pauses = [after - before for before, after in pairwise(looked)]
    assert max(pauses[:3]) < 0.3
    assert LAST_BACK_OFF_S * 0.9 < max(pauses) <= LAST_BACK_OFF_S
    assert min(pauses[20:]) < LAST_BACK_OFF_S * 0.1


def test_a_fleet_does_not_look_in_step(clock: Clock, loop: PollLoop, url: str) -> None:
    """64 agents lose their broker at one moment: within half a minute they are spread evenly."""
    began = clock.now
    moments: list[float] = []
    for _ in range(64):
        clock.now = began
        moments += tries(looking(url), loop, clock, 30.0)
    late = sorted(moment for moment in moments if moment > began + 10.0)
    crowds = [sum(start <= moment < start + 0.1 for moment in late) for start in late]
    # On the average 64 agents that look once a second are 6.4 in a tenth of one.
    assert len(late) / 20.0 > 32
    assert max(crowds) < 20


def test_the_first_word_of_an_outage_is_said_at_once_and_then_one_a_minute() -> None:
    outage = Outage()
    assert outage.problem("gone", 0.0) == "gone"
    assert outage.problem("refused", 0.1) is None
    assert outage.problem("refused", 59.9) is None
    assert outage.problem("refused", 60.0) == "refused (for 60 s, 4 tries)"
    assert outage.over(70.0) == "connected again after 70.0 s"
    assert outage.over(70.0) is None


def test_a_broker_that_comes_and_goes_fills_no_log() -> None:
    outage = Outage()
    lines = []
    for second in range(3600):
        lines.append(outage.problem("gone", second))
        lines.append(outage.over(second + 0.5))
    assert 60 <= sum(line is not None for line in lines) <= 2 * 60 + 2


def test_an_end_is_told_only_of_what_was_told() -> None:
    outage = Outage()
    assert outage.over(0.0) is None
    outage.problem("gone", 1.0)
    outage.over(2.0)
    assert outage.problem("gone", 3.0) is None
    assert outage.over(4.0) is None
