"""Fixtures of tests of engines: a place, a broker, a trainer, as the agents' tests have them."""

from __future__ import annotations

from ..agents.conftest import broker, ring_trainer, trainer, url

__all__ = ["broker", "ring_trainer", "trainer", "url"]
