"""What the whole suite shares: a test whose machine lacks something is skipped, and says what."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        spawns = "spawn" in getattr(item, "fixturenames", ())
        if spawns and item.get_closest_marker("program") is None:
            item.add_marker("process")
        reason = _lacking(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _lacking(item: pytest.Item) -> str | None:
    if item.get_closest_marker("root") is not None and os.geteuid() != 0:
        return "needs root"
    wanted = max(
        (count for name, count in (("gpu", 1), ("gpu2", 2)) if item.get_closest_marker(name)),
        default=0,
    )
    if wanted == 0:
        return None
    # Only here: torch's import takes longer than all tests that do without it.
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"needs {wanted} CUDA device(s), {found} here" if found < wanted else None


@pytest.fixture
def peers_forgotten() -> Iterator[None]:
    """What a test imports of other projects is not there for the next one."""
    yield
    for name in list(sys.modules):
        if name.partition(".")[0] in ("verl", "sglang", "checkpoint_engine"):
            del sys.modules[name]
