"""Many rounds with real processes: each worker's bytes are compared in each round.

By hand with a tensor of 64 MiB, and with the table of what was measured:

    TENSORLEASE_TEST_RING_MIB=64 pytest tests/e2e/test_rounds.py -s --timeout 3600
"""

from __future__ import annotations

import pytest

from tensorlease.agents.results import RoundResult
from tensorlease.protocol.records import Fate, Outcome

from .parties import World
from .samples import SAMPLES, Sample, require_flat, sample
from .values import BIG_MIB, WHOLE_BIG, Part, shard, sources

pytestmark = [pytest.mark.process, pytest.mark.timeout(3600 if BIG_MIB else 120)]

ROUNDS = 200
RANKS = 3
PLACES = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]

# What each worker wants where the ranks own row blocks: a halves, b something of one rank and all.
WANTED: dict[tuple[str, int], tuple[Part, ...]] = {
    ("a", 0): (Part("embed", 0, 7), Part("layer.weight", 0, 5), Part("head", 0, 3)),
    ("a", 1): (Part("embed", 7, 6), Part("layer.weight", 5, 5), Part("layer.bias"), Part("empty")),
    ("b", 0): (Part("layer.weight", 1, 3),),
    ("b", 1): WHOLE_BIG,
}


@pytest.mark.parametrize("distribution", ["colocated", "assembled"])
def test_in_200_rounds_every_worker_has_the_published_bytes_and_only_the_batches_it_takes(
    world: World, distribution: str
) -> None:
    assembled = distribution == "assembled"
    broker = world.broker()
    trainers = [
        world.start_trainer(
            rank,
            world_size=RANKS,
            distribution=distribution,
            device=f"cpu:{rank}",
            parts=shard(rank, RANKS) if assembled else WHOLE_BIG,
        )
        for rank in range(RANKS)
    ]
    # Colocated: the members of one replica are beside different trainers, and one serves two.
    devices = {place: f"cpu:{i % RANKS}" for i, place in enumerate(PLACES)}
    workers = {
        (replica, member): world.start_worker(
            replica,
            member,
            size=2,
            device=devices[replica, member],
            parts=WANTED[replica, member] if assembled else WHOLE_BIG,
        )
        for replica, member in PLACES
    }
    for trainer in trainers:
        trainer.expect("registered")
    for worker in workers.values():
        worker.expect("attached")
    trainers[0].ready(2)

    parties = (broker, *trainers, *workers.values())

    samples: list[Sample] = []
    mine: list[RoundResult] = []
    for first in range(1, ROUNDS + 1, ROUNDS // SAMPLES):
        last = first + ROUNDS // SAMPLES - 1
        for trainer in trainers:
            trainer.command("rounds", first, last, {"min_replicas": 2})
        results = [trainer.expect("results", 600.0) for trainer in trainers]
        for versions in zip(*results, strict=True):
            assert {r.outcome for r in versions} == {Outcome.COMMITTED}, versions[0].reason
        mine += results[0]
        samples.append(sample(world, last, parties))

    assert len(mine) == ROUNDS
    require_flat(f"registered, {distribution}, {ROUNDS} rounds, {BIG_MIB} MiB", samples)
    for version, result in enumerate(mine, start=1):
        assert result.version == version
        assert set(result.receivers) == {f"{replica}/{member}" for replica, member in PLACES}
        for place in PLACES:
            receiver = result.receivers[f"{place[0]}/{place[1]}"]
            wanted = len(sources(WANTED[place], RANKS)) if assembled else 1
            assert (receiver.fate, receiver.batches) == (Fate.COMMITTED, wanted), receiver
    for worker in workers.values():
        report = worker.report()
        assert report.wrong == []
        assert report.committed == list(range(1, ROUNDS + 1))
        assert report.hooks == [
            (hook, version) for version in range(1, ROUNDS + 1) for hook in ("prepare", "commit")
        ]
    assert [trainer.pid for trainer in trainers if not trainer.process.alive] == []


def test_what_each_worker_wants_comes_from_one_two_or_three_ranks() -> None:
    counts = {place: len(sources(parts, RANKS)) for place, parts in WANTED.items()}

    assert counts == {("a", 0): 2, ("a", 1): 2, ("b", 0): 1, ("b", 1): 3}
