"""Ring rounds with real processes: many rounds, a broker that dies, and memory that stays flat.

By hand, 200 rounds with a tensor of 64 MiB (64 for `TENSORLEASE_TEST_RING_MIB`), with the table of
what was measured (-s), and every place at which the broker dies:

    TENSORLEASE_TEST_RING_ROUNDS=200 TENSORLEASE_TEST_RING_MIB=64 TENSORLEASE_TEST_RING_ALL=1 \
        pytest tests/e2e/test_ring.py -s --timeout 3600
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorlease.agents.results import RoundResult
from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import eventually
from . import ring_children
from .parties import World
from .ring_children import SLOT
from .ring_parties import ALL, start_trainer, start_worker
from .samples import SAMPLES, Sample, require_flat, sample
from .values import BIG_MIB, RING_WHOLE, Part, ring_shard

pytestmark = [pytest.mark.process, pytest.mark.timeout(3600 if BIG_MIB else 120)]

ROUNDS = int(os.environ.get("TENSORLEASE_TEST_RING_ROUNDS", "24"))
RANKS = 3
PLACES = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]

# What each worker wants where the ranks own row blocks: halves of some, something of one rank, all.
WANTED: dict[tuple[str, int], tuple[Part, ...]] = {
    ("a", 0): (Part("ring.embed", 0, 50), Part("ring.weight", 0, 65), Part("ring.head", 0, 3)),
    ("a", 1): (Part("ring.embed", 50, 47), Part("ring.weight", 65, 65), Part("ring.bias")),
    ("b", 0): (Part("ring.weight", 1, 3),),
    ("b", 1): RING_WHOLE,
}


# ---------------------------------------------------------------- many rounds


@pytest.mark.parametrize("distribution", ["colocated", "assembled"])
def test_in_many_rounds_every_element_is_right_and_memory_descriptors_and_segments_stay_flat(
    world: World, distribution: str
) -> None:
    assembled = distribution == "assembled"
    broker = world.broker()
    trainers = [
        start_trainer(
            world,
            rank,
            world_size=RANKS,
            distribution=distribution,
            device=f"cpu:{rank}",
            parts=ring_shard(rank, RANKS) if assembled else RING_WHOLE,
            timeout=120.0,
        )
        for rank in range(RANKS)
    ]
    # Colocated: the members of one replica are beside different trainers, and one serves two.
    workers = [
        start_worker(
            world,
            replica,
            member,
            size=2,
            device=f"cpu:{i % RANKS}",
            parts=WANTED[replica, member] if assembled else RING_WHOLE,
        )
        for i, (replica, member) in enumerate(PLACES)
    ]
    for trainer in trainers:
        trainer.expect("registered")
    for worker in workers:
        worker.expect("attached")
    trainers[0].ready(2)
    parties = (broker, *trainers, *workers)

    samples: list[Sample] = []
    step = max(1, ROUNDS // SAMPLES)
    for first in range(1, ROUNDS + 1, step):
        last = min(ROUNDS, first + step - 1)
        for trainer in trainers:
            trainer.command("rounds", first, last, {"min_replicas": 2})
        for results in zip(*(t.expect("results", 600.0) for t in trainers), strict=True):
            assert {r.outcome for r in results} == {Outcome.COMMITTED}, results[0].reason
            _check(results[0])
        samples.append(sample(world, last, parties))
    for worker in workers:
        report = worker.report()
        assert report.wrong == []
        assert report.committed == list(range(1, ROUNDS + 1))

    require_flat(f"ring, {distribution}, {ROUNDS} rounds, {SLOT} bytes a slot", samples)
    # Each rank has its slots, no more, whenever one looks.
    assert {s.segments for s in samples} == {RANKS * 2}
    assert {s.segment_bytes for s in samples} == {RANKS * 2 * SLOT}

    for trainer in trainers:
        trainer.close()
    assert world.segments() == []


def _check(result: RoundResult) -> None:
    assert set(result.receivers) == {f"{replica}/{member}" for replica, member in PLACES}
    for receiver in result.receivers.values():
        assert receiver.fate is Fate.COMMITTED
        assert receiver.batches > RANKS


# ---------------------------------------------------------------- the broker's death


BUSY_PLACES = ["in:copy:3", "in:prepare:1", "sending:Staged:2"]


@pytest.mark.parametrize("place", BUSY_PLACES if ALL else BUSY_PLACES[:1])
def test_a_ring_round_completes_though_the_broker_is_killed_in_the_middle_of_it(
    world: World, place: str
) -> None:
    broker = world.broker({"recovery": 2.0})
    trainer, worker = start_trainer(world), start_worker(world)
    trainer.expect("registered")
    worker.expect("attached")
    trainer.ready(1)
    worker.hold(place)
    trainer.send(1)
    worker.arrived(place)
    broker.kill()
    world.broker({"recovery": 2.0})
    worker.go()

    result = trainer.result()

    assert result.outcome is Outcome.COMMITTED, result
    assert worker.report().wrong == []
    eventually(lambda: trainer.ring().free == 2)
    trainer.send(2)
    assert trainer.result().outcome is Outcome.COMMITTED
    report = worker.report()
    assert (report.version, report.wrong, report.committed) == (2, [], [1, 2])


# ---------------------------------------------------------------- descriptors


def fewest_descriptors(pid: int) -> int:
    """Of a few looks: a broker opens a file now and then, to see whether a process lives."""
    return min(len(list(Path(f"/proc/{pid}/fd").iterdir())) for _ in range(5))


def test_400_tensors_in_five_rounds_need_few_descriptors_and_no_more_with_each_round(
    world: World,
) -> None:
    broker = world.broker()
    args = (world.url, world.shm_dir, 400, 5, 256)
    worker = world._spawn(ring_children.many_wanted, *args)
    trainer = world._spawn(ring_children.many_tensors, *args)
    pids = [broker.pid, worker.pid, trainer.pid]
    counts = []
    for _ in range(4):
        trainer.hear()
        counts.append([fewest_descriptors(pid) for pid in pids])
    trainer.result()

    assert worker.result() == sum((i + 5) * 100 for i in range(400))
    # Nothing is compared with the first: the worker may have been on its way to its last slot.
    assert counts[1] == counts[2] == counts[3]
    assert max(counts[3]) < 100
