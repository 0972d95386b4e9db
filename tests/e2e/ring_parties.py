"""A test's side of a trainer of ring rounds; see `ring_children.py`."""

from __future__ import annotations

import os
from typing import Any

from tensorlease.agents.ring import RingStatus

from . import ring_children
from .parties import TrainerParty, WorkerParty, World
from .ring_children import RingSpec
from .values import RING_WHOLE

ALL = bool(os.environ.get("TENSORLEASE_TEST_RING_ALL"))
"""Whether every place of the faults is tried, which `make test` does of some."""


class RingParty(TrainerParty):
    def send(self, version: int, **options: Any) -> None:
        self.command("send", version, options)

    def leave(self, version: int, count: int, *, busy: bool) -> None:
        self.command("leave", version, count, busy)

    def ring(self) -> RingStatus:
        status = self.ask("ring")
        assert isinstance(status, RingStatus)
        return status


def start_trainer(world: World, rank: int = 0, **more: Any) -> RingParty:
    more.setdefault("parts", RING_WHOLE)
    spec = RingSpec(world.url, world.shm_dir, rank, **more)
    return RingParty(world._spawn(ring_children.trainer, spec), f"trainer {rank}")


def start_worker(world: World, replica: str = "a", member: int = 0, **more: Any) -> WorkerParty:
    more.setdefault("parts", RING_WHOLE)
    return world.start_worker(replica, member, **more)
