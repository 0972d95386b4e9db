"""Every state of some small worlds; `make explore` walks through larger ones."""

from __future__ import annotations

import pytest

from .parts import Shape
from .search import Tally, search

# Each with a number of states that it has at the least: a search that stops early is found out.
WORLDS = [
    (Shape("2 batches", batches=2), 200),
    (Shape("2 batches, one replica", batches=2, together=True), 200),
    (Shape("2 trainers", trainers=2), 700),
    (Shape("2 trainers, one replica", trainers=2, together=True), 700),
    (Shape("ring", batches=2, registered=False), 200),
    (Shape("worker dies", worker_deaths=1, victim=0), 150),
    (Shape("worker dies, one replica", together=True, worker_deaths=1, victim=1), 150),
    (Shape("worker dies, strict", strict=True, retries=1, worker_deaths=1, victim=0), 150),
    (Shape("trainer dies", trainer_deaths=1), 100),
    (Shape("expulsion", workers=1, expulsions=1), 50),
    (Shape("void", voids=1), 150),
    (Shape("hook fails", together=True, hook_failures=1), 150),
    (Shape("misread, one replica", together=True, misreads=1), 140),
    (Shape("misread, broker dies", workers=1, misreads=1, broker_deaths=1), 700),
    (Shape("session drops", workers=1, drops=1), 200),
    (Shape("broker dies", workers=1, broker_deaths=1), 700),
    (Shape("relay dies", relays="named", worker_deaths=1, victim=0), 900),
    (Shape("relay dies, one replica", together=True, relays="named", worker_deaths=1), 1200),
    (Shape("relay dies, heir", workers=1, relays="unnamed", worker_deaths=1, worker_heirs=1), 900),
]


@pytest.mark.parametrize(("shape", "least"), WORLDS, ids=[shape.name for shape, _ in WORLDS])
def test_no_promise_breaks_in_any_state_of(shape: Shape, least: int) -> None:
    tally = Tally()
    for now, _ in search(shape):
        tally = now
    assert tally.exhausted and tally.states >= least
