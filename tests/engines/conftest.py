"""Fixtures of tests of engines: a place, a broker, a trainer, as the agents' tests have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from ..agents.conftest import broker, ring_trainer, spawn, start_broker, trainer, url

if TYPE_CHECKING:
    from tensorlease.agents import TrainerAgent

__all__ = ["broker", "left", "ring_trainer", "spawn", "start_broker", "trainer", "url"]


@contextmanager
def left(trainer: TrainerAgent, version: int) -> Iterator[None]:
    """A round of which one tensor, `w`, has been sent, and that is void when the block has ended."""
    import torch

    with (
        pytest.raises(RuntimeError, match="went wrong"),
        trainer.open_round(version, timeout=20.0) as r,
    ):
        r.send("w", torch.ones(3))
        r.flush()
        yield
        raise RuntimeError("training went wrong")
