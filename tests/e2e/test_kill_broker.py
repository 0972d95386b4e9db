"""The broker is killed after each message of a round and started again: nothing else is."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import eventually
from .parties import PATIENCE_S, BrokerParty, TrainerParty, WorkerParty, World
from .values import WHOLE, shard

pytestmark = pytest.mark.process

RANKS = 2
FAST = {"beat": 0.2}

STEADY = {
    "received:Open": 2,
    "received:Batch": 2,
    "sent:Prepare": 3,
    "sent:Opened": 2,
    "sent:Deliver": 4,
    "received:Staged": 4,
    "sent:Release": 2,
    "sent:Commit": 3,
    "received:Committed": 3,
    "sent:Finished": 2,
    "received:Beat": 1,
    "sent:BeatOk": 1,
}
"""What a round consists of, and how often each comes: after each of them the broker is killed."""
SLOW = {"received:Ready": 1, "sent:Total": 1, "received:Vote": 1}
"""What only comes if a rank's batch is late."""
RESTART = {
    "received:TrainerHello": 2,
    "received:WorkerHello": 3,
    "sent:Welcome": 5,
    "received:Offer": 2,
    "sent:Offered": 6,
    "received:Take": 6,
    "sent:Members": 1,
    "received:Batch": 2,
    "sent:Release": 2,
    "sent:Commit": 3,
    "received:Committed": 3,
    "sent:Finished": 2,
}
"""What a broker hears and says when it finds a round that its predecessor had begun."""


def every(counts: dict[str, int]) -> list[str]:
    """The place after each one of these messages."""
    return [f"{name}:{n + 1}" for name, count in counts.items() for n in range(count)]


def last(counts: dict[str, int]) -> list[str]:
    """The place after the last of each kind."""
    return [f"{name}:{count}" for name, count in counts.items()]


IN_SUITE = [
    *last(STEADY),
    "sent:Prepare:1",
    "sent:Deliver:1",
    "sent:Commit:1",
    "sent:Finished:1",
]
"""Of the steady round; `python -m tests.e2e.fault_table` does all."""
SECOND_IN_SUITE = [
    place
    for place in last(RESTART)
    if place.split(":")[1] in ("TrainerHello", "WorkerHello", "Take", "Batch", "Commit", "Finished")
]
"""Of the second kills."""


class Rounds:
    """Agents that live through all deaths of their broker, and the round they are at."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.version = 0
        self.broker: BrokerParty = world.broker(FAST)
        self.trainers: list[TrainerParty] = [
            world.start_trainer(
                rank, world_size=RANKS, distribution="assembled", parts=shard(rank, RANKS)
            )
            for rank in range(RANKS)
        ]
        # Of replica a each member takes from one rank, b takes from both.
        self.workers: list[WorkerParty] = [
            world.start_worker("a", 0, size=2, parts=shard(0, RANKS)),
            world.start_worker("a", 1, size=2, parts=shard(1, RANKS)),
            world.start_worker("b", 0, parts=WHOLE),
        ]
        for trainer in self.trainers:
            trainer.expect("registered")
        for worker in self.workers:
            worker.expect("attached")
        self.trainers[0].ready(2)
        self._publish()
        self._committed("with no kill at all")

    def killed_at(self, place: str) -> float:
        """A round in which the broker dies there; returns the seconds that it took in all."""
        self.broker.arm(place)
        began = self._publish()
        return self._back(place, began)

    def killed_at_with_a_late_batch(self, place: str) -> float:
        """As `killed_at`; the last rank's batch leaves when all else is staged."""
        late = self.trainers[-1]
        late.hold("sending:Batch:1")
        before = self.broker.counts()
        before.update({"received:Staged": 2, "received:Ready": 1})
        self.broker.arm(place)
        began = self._publish()
        eventually(lambda: self._has(before), PATIENCE_S)
        late.go()
        return self._back(place, began)

    def killed_again_at(self, place: str) -> float:
        """A round whose broker dies in the middle, and whose next broker dies at this place.

        The trainers come back last, so that all their offers go to all workers.
        """
        for trainer in self.trainers:
            trainer.hold("sending:TrainerHello:1")
        self.broker.arm("sent:Deliver:2")
        began = self._publish()
        self.broker.died()
        self.broker = self.world.broker(FAST, place)
        eventually(lambda: self._has(Counter({"received:WorkerHello": 3})), PATIENCE_S)
        for trainer in self.trainers:
            trainer.go()
        return self._back(place, began)

    def _has(self, counts: Counter[str]) -> bool:
        try:
            return self.broker.counts() >= counts
        except (AssertionError, OSError):
            self.broker.died()
            return True

    def _publish(self) -> float:
        self.version += 1
        for trainer in self.trainers:
            trainer.publish(self.version, min_replicas=2)
        return time.monotonic()

    def _back(self, place: str, began: float) -> float:
        self.broker.died()
        self.broker = self.world.broker(FAST)
        self._committed(f"killed at {place}")
        took = time.monotonic() - began
        # The round may have ended by what the dead broker still sent.
        everyone = len(self.trainers) + len(self.workers)
        eventually(lambda: self.world.status().agents == everyone, PATIENCE_S)
        return took

    def _committed(self, where: str) -> None:
        for trainer in self.trainers:
            result = trainer.result()
            assert result.version == self.version
            assert result.outcome is Outcome.COMMITTED, f"{where}: {result}"
            assert {r.fate for r in result.replicas.values()} == {Fate.COMMITTED}
            assert {r.fate for r in result.receivers.values()} == {Fate.COMMITTED}
            trainer.released()

    def check(self) -> None:
        """No agent has restarted; each version was switched to once, by each, with its bytes."""
        for party in (*self.trainers, *self.workers):
            assert party.process.alive, party.name
        for worker in self.workers:
            report = worker.report()
            assert report.wrong == []
            assert report.committed == list(range(1, self.version + 1))
            assert report.count("prepare", self.version) == 1
            assert [hook for hook, _ in report.hooks if hook == "abort"] == []
            assert (report.version, report.torn) == (self.version, False)
        self.world.no_lease_left()


def kill_at(
    world: World, steady: list[str], slow: list[str], restart: list[str]
) -> list[tuple[str, float]]:
    """Kills the broker at these places; returns each with the seconds that its round took."""
    rounds = Rounds(world)
    rows = [(place, rounds.killed_at(place)) for place in steady]
    rows += [(f"{p}, a batch is late", rounds.killed_at_with_a_late_batch(p)) for p in slow]
    rows += [(f"{p}, the second kill", rounds.killed_again_at(p)) for p in restart]
    rounds.check()
    return rows


def test_every_round_commits_though_the_broker_is_killed_after_a_message_of_each_kind(
    world: World,
) -> None:
    rows = kill_at(world, IN_SUITE, last(SLOW), [])

    assert len(rows) == len(IN_SUITE) + len(SLOW)


def test_every_round_commits_though_the_next_broker_is_killed_too_while_it_restores_the_round(
    world: World,
) -> None:
    rows = kill_at(world, [], [], SECOND_IN_SUITE)

    assert len(rows) == len(SECOND_IN_SUITE)
