"""Ways through small worlds that once broke a promise."""

from __future__ import annotations

import pytest

from .parts import Shape
from .replay import follow, parse

WAYS: dict[str, tuple[Shape, str]] = {
    "a batch that comes after its restored round has ended leaves no body behind": (
        Shape("late batch", workers=1, registered=False, broker_deaths=1, voids=1),
        "publish 0, kill broker 0, void 0, start broker 0, connect 1",
    ),
    "a round that a worker announced first counts as the group's last call": (
        Shape("worker first", retries=1, broker_deaths=1, worker_deaths=1),
        "kill worker 1, publish 0, up 0, down 1, kill broker 0, start broker 0, connect 1",
    ),
    "results for a rank that never opened the calls do not pile up": (
        Shape("no show", trainers=2, workers=1, retries=5, stops=1),
        "publish 0, publish 1, up 1, up 1, stop 1, up 0, up 0",
    ),
    "a rank that leaves without having opened the last round is not waited for": (
        Shape("no heir", trainers=2, workers=1, retries=1, trainer_deaths=1, trainer_heirs=1),
        "publish 0, kill trainer 1, up 0, up 0, notice 1, down 0, down 0, heir trainer 2, publish 0",
    ),
    "batches of a rank that opens after the round has failed come back": (
        Shape("too late", trainers=2, workers=1, voids=1),
        "publish 0, publish 1, void 0",
    ),
    "what is asked between Hello and Welcome follows the Welcome": (
        Shape("between", workers=1, broker_deaths=1, voids=1),
        "publish 0, kill broker 0, start broker 0, connect 0, void 0",
    ),
    "what is unmapped between Hello and Welcome is said": (
        Shape("unmapped", workers=1, broker_deaths=1, trainer_deaths=1, drops=1),
        "kill broker 0, kill trainer 0, start broker 0, connect 1, down 1, drop 1, down 1, work 0, connect 1, work 0",
    ),
    "batches of a round that ended before its trainer announced it come back": (
        Shape("announced late", workers=3, broker_deaths=1, expulsions=1),
        "publish 0, up 0, down 3, kill broker 0, start broker 0, connect 3, expel 0",
    ),
    "a trainer that leaves and connects again hears no release while others read": (
        Shape("leaves", workers=1, leaves=1),
        "publish 0, up 0, up 0, leave 0, up 0, connect 0, down 1, down 0, work 0, down 0, down 1, work 0",
    ),
    "a round that was not admitted ends when its trainer dies while the broker listens": (
        Shape("dies early", workers=1, broker_deaths=1, trainer_deaths=1),
        "kill broker 0, publish 0, start broker 0, connect 0, kill trainer 0, notice 0",
    ),
    "a batch that was lost behind the end of its round comes back": (
        Shape("lost batch", workers=1, worker_deaths=1, drops=1),
        "publish 0, up 0, kill worker 0, notice 1, drop 0",
    ),
    "who commits by a dead broker's word when another member is out hears that it is torn": (
        Shape("late word", together=True, broker_deaths=1, trainer_deaths=1, drops=1, stops=1),
        "publish 0, up 0, down 2, work 1, up 0, down 1, down 1, down 2, work 0, work 0, drop 2, work 0, up 1, work 1, work 1, connect 2, stop 1, kill broker 0, kill trainer 0, start broker 0, connect 2, down 2, tick 0, go on 1, down 1, work 0",
    ),
    "who committed hears that it is torn when another's hook failed and nobody else is left": (
        Shape(
            "alone",
            workers=3,
            together=True,
            broker_deaths=1,
            trainer_deaths=1,
            hook_failures=1,
        ),
        "publish 0, up 0, up 0, down 1, down 2, down 3, work 0, work 1, work 2, up 1, down 1, up 2, down 2, up 3, down 3, work 0, work 0, up 1, work 1, work 1, up 2, work 2, work 2, up 3, down 3, fail 2, kill broker 0, kill trainer 0",
    ),
    "handles that were sent but not opened are given back when the trainer is gone": (
        Shape("unopened", workers=1, registered=False, trainer_deaths=1),
        "publish 0, up 0, kill trainer 0, up 0, notice 0",
    ),
    "what is mapped between Hello and Welcome is known": (
        Shape("mapped", trainers=2, workers=1, registered=False, broker_deaths=1, voids=1),
        "publish 1, void 1, up 1, publish 0, up 0, up 0, kill broker 0, down 2, work 0, down 2, start broker 0, connect 2, work 0",
    ),
    "a worker whose place is taken keeps no lease of a round that it is not in": (
        Shape("refused", workers=1, broker_deaths=1, stops=1, worker_heirs=1),
        "kill broker 0, stop 1, heir worker 1",
    ),
    "agents of another channel that announce themselves late keep no lease": (
        Shape("elsewhere", workers=1, channels=2, rounds=2, broker_deaths=1, expulsions=1),
        "kill broker 0, publish 0, start broker 0, connect 0, expel 0",
    ),
    "a round that ended before its trainer announced it counts as the group's last call": (
        Shape("gap", workers=1, channels=2, retries=1, broker_deaths=1, expulsions=1),
        "publish 0, up 0, kill broker 0, down 2, start broker 0, connect 2, expel 0",
    ),
    "a worker that lost its place leaves its round": (
        Shape("displaced", broker_deaths=1, stops=1, worker_heirs=1),
        "publish 0, stop 2, up 0, kill broker 0, heir worker 2",
    ),
    "a worker that an earlier broker had prepared is not admitted to the same round again": (
        Shape("again", workers=1, broker_deaths=1, expulsions=1),
        "publish 0, up 0, kill broker 0, start broker 0, connect 0, expel 0",
    ),
    "who commits after the round has ended without it hears that it is torn": (
        Shape("late commit", together=True, worker_deaths=1, stops=1),
        "publish 0, up 0, down 1, up 0, down 1, down 2, down 2, work 1, work 1, work 0, work 0, work 0, work 1, kill worker 1, stop 1",
    ),
    "nobody begins to read in an old round of a place that it lost": (
        Shape("old round", workers=3, broker_deaths=1, expulsions=1, stops=1, worker_heirs=1),
        "publish 0, up 0, up 0, kill broker 0, start broker 0, expel 0, stop 1, heir worker 3, connect 0",
    ),
    "a trainer that is slow to announce itself does not count as gone": (
        Shape("slow", workers=1, broker_deaths=1, expulsions=1),
        "kill broker 0, start broker 0, expel 0, connect 1, down 1, down 1, work 0",
    ),
    "batches of a call that is over come back, whatever is heard first": (
        Shape("over", trainers=2, workers=1, registered=False, retries=1, stops=1),
        "stop 1, publish 0, up 0, up 0, tick 0, down 0, down 0, publish 0, go on 1, publish 1",
    ),
    "a trainer that leaves offers nothing any more": (
        Shape("no offer", broker_deaths=1, worker_deaths=1, leaves=1, worker_heirs=1),
        "publish 0, leave 0, kill worker 0, kill broker 0, start broker 0, connect 0, down 0, up 0, heir worker 2, up 0, connect 3, up 0, connect 0, down 3, down 3, down 0, up 0, down 3, work 2, work 2, up 3, up 3",
    ),
    "the last of a replica leaves while one that lost its place lives": (
        Shape("placeless", workers=1, stops=1, leaves=1, worker_heirs=1, silent_s=8),
        "stop 1, heir worker 1, leave 2",
    ),
    "a trainer whose peer left while the broker listened counts on": (
        Shape("count on", trainers=2, workers=1, broker_deaths=1, leaves=1),
        "publish 0, leave 0, kill broker 0, start broker 0",
    ),
    "a process that may still read for one channel is not admitted for another": (
        Shape("two rounds", workers=3, channels=2, min_replicas=2, broker_deaths=1, expulsions=1),
        "publish 1, up 1, up 1, down 6, work 4, kill broker 0, publish 0, down 6, work 4, start broker 0, expel 0",
    ),
    "a round that was parked as unknown ends as one of its ranks was told": (
        Shape("told", trainers=2, strict=True, broker_deaths=1, worker_deaths=1, expulsions=1),
        "publish 0, publish 1, up 1, kill worker 1, up 0, notice 3, kill broker 0, start broker 0, connect 1, expel 0",
    ),
    "a member that was told to commit by a dead broker is not put out with one that died": (
        Shape("told to commit", together=True, broker_deaths=1, worker_deaths=1),
        "publish 0, up 0, down 2, work 1, up 2, down 1, work 0, up 1, down 0, up 0, down 2, work 1, work 1, kill worker 1, up 2, down 1, work 0, work 0, up 1, kill broker 0, start broker 0, down 1, connect 1, work 0, down 1, notice 2, connect 0, down 1, down 0, down 0, down 0",
    ),
    "who may read by the word of a dead broker keeps the batch of a round that ended unlisted": (
        Shape("unlisted end", trainers=2, workers=1, broker_deaths=1, expulsions=1, voids=1),
        "publish 0, up 0, void 0, publish 1, up 1, up 1, kill broker 0, down 2, work 0, start broker 0, down 2, expel 0, work 0, connect 0",
    ),
    "who was put out of a decided round does not commit after a restart": (
        Shape("told out", broker_deaths=1, expulsions=1),
        "publish 0, up 0, down 2, work 1, up 2, down 1, work 0, up 1, down 0, up 0, down 2, work 1, work 1, up 2, expel 0, down 2, work 1, up 2, kill broker 0, start broker 0, connect 2, down 2, down 1, work 0, work 0, connect 1, down 1, down 0, connect 0, down 1, work 0, down 0, down 0, up 1, down 1, down 0, up 0, down 1, down 2, up 2, up 1",
    ),
    "who may have committed is unknown, though it keeps a batch": (
        Shape("may have", together=True, broker_deaths=1, expulsions=1),
        "publish 0, up 0, down 2, work 1, up 2, down 1, work 0, up 1, down 0, up 0, down 2, work 1, work 1, up 2, down 1, work 0, work 0, up 1, kill broker 0, start broker 0, expel 0, down 2, work 1, connect 2, down 2, connect 0, down 2, down 0, down 0, down 0, down 1, work 0, connect 1, down 1, down 0, up 0, down 1, down 2, up 2, up 1, up 0, down 0",
    ),
    "commits that were heard of before the trainer announced the round decide it": (
        Shape("commits first", broker_deaths=1, expulsions=1),
        "publish 0, up 0, down 2, work 1, up 2, down 1, work 0, up 1, up 0, down 2, work 1, work 1, up 2, down 1, work 0, work 0, up 1, kill broker 0, start broker 0, expel 0, down 2, connect 2, work 1, down 2, down 2, up 2, up 2, connect 0, down 0, down 0, down 1, work 0, connect 1, down 1, up 0, down 1, down 2, up 2, up 1, up 0, down 0, down 0",
    ),
    "commits of one replica that were heard of before the trainer announced the round decide it": (
        Shape("commits first", together=True, broker_deaths=1, expulsions=1),
        "publish 0, up 0, down 2, work 1, up 2, down 1, work 0, up 1, up 0, down 2, work 1, work 1, up 2, down 1, work 0, work 0, up 1, kill broker 0, start broker 0, expel 0, connect 2, down 2, down 2, work 1, up 2, down 1, work 0, connect 1, down 1, down 1, connect 0, down 0, up 0, down 1, down 2, up 2, up 1, up 0, tick 0, down 0, down 0",
    ),
    "a commit that is heard of after its round was parked settles it, one replica": (
        Shape("parked", together=True, broker_deaths=1, expulsions=1),
        "publish 0, up 0, down 2, work 1, up 2, down 1, work 0, up 1, up 0, down 2, work 1, work 1, up 2, down 1, work 0, work 0, up 1, kill broker 0, start broker 0, expel 0, down 2, connect 2, work 1, down 2, down 2, connect 0, down 0, up 2, down 2, down 1, work 0, connect 1",
    ),
    "a commit that is heard of after its round was parked settles it": (
        Shape("parked", broker_deaths=1, expulsions=1),
        "publish 0, up 0, down 2, work 1, up 2, down 1, work 0, up 1, up 0, down 2, work 1, work 1, up 2, down 1, work 0, work 0, up 1, kill broker 0, start broker 0, expel 0, down 2, connect 2, work 1, down 2, down 2, connect 0, down 0, up 2, up 2, down 0, down 1, work 0, connect 1, down 1, up 0, down 1, down 2, up 2, up 1, up 0, down 0, down 0",
    ),
    "a member that committed, and was silent when the round ended, hears that it is torn": (
        Shape("alone", together=True, broker_deaths=1, worker_deaths=1, expulsions=1),
        "publish 0, up 0, up 0, down 1, down 1, down 2, down 2, work 0, work 0, work 0, up 1, work 1, work 1, work 1, up 2, kill worker 0, down 2, work 1, kill broker 0, start broker 0, expel 0",
    ),
    "a rank that is away for longer than its restored round was kept hears who committed": (
        Shape("away", together=True, broker_deaths=1, expulsions=1),
        "publish 0, up 0, down 2, work 1, up 2, down 1, work 0, up 1, up 0, down 2, work 1, work 1, up 2, down 1, work 0, work 0, up 1, kill broker 0, start broker 0, down 2, connect 2, work 1, down 2, expel 0, down 2, up 2, down 2, up 2, connect 1, down 1, down 1, work 0, up 1, connect 0, down 0, up 0, down 1, down 2, up 2, up 1, up 0, tick 0, down 0, down 0",
    ),
}


@pytest.mark.parametrize("what", WAYS)
def test_this_way_breaks_no_promise(what: str) -> None:
    shape, way = WAYS[what]
    world = follow(shape, parse(way))
    assert world.ledger is not None and not world.ledger.state.peers
