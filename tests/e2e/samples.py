"""What the processes of end-to-end tests have after some rounds, and whether it grows."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from .parties import Party, World

SAMPLES = 8
"""How many a test takes, at least."""
MORE_BYTES = 4 * 2**20
"""What all processes together may have more after all rounds, by the slope."""


class Sample(Struct, frozen=True):
    """What all processes together have, after some rounds."""

    version: int
    resident: int
    """Bytes, those of shared memory not counted."""
    descriptors: int
    segments: int
    segment_bytes: int


def sample(world: World, version: int, parties: Sequence[Party]) -> Sample:
    page = os.sysconf("SC_PAGE_SIZE")
    resident = descriptors = 0
    for party in parties:
        party.ask("trim", about="trimmed")
        _, total, shared, *_ = Path(f"/proc/{party.pid}/statm").read_text().split()
        resident += (int(total) - int(shared)) * page
        descriptors += len(list(Path(f"/proc/{party.pid}/fd").iterdir()))
    count = len(world.segments())
    return Sample(version, resident, descriptors, count, world.segment_bytes())


def slope(samples: list[Sample], what: str) -> float:
    """Least squares: how much of it is added by a round."""
    xs = [float(s.version) for s in samples]
    ys = [float(getattr(s, what)) for s in samples]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    over = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return over / sum((a - x) ** 2 for a in xs)


def require_flat(what: str, samples: list[Sample]) -> None:
    """Prints the samples and how much each round adds; fails where memory or descriptors grow.

    The first quarter does not count: then agents meet, and allocators take what they keep.
    """
    settled = samples[len(samples) // 4 :]
    slopes = {name: slope(settled, name) for name in ("resident", "descriptors", "segments")}
    lines = [what, *map(str, samples)]
    lines += [f"{name}: {value:+.1f} a round" for name, value in slopes.items()]
    sys.stdout.write("\n  ".join(["", *lines, ""]))
    assert len({s.descriptors for s in settled}) == 1
    assert len({(s.segments, s.segment_bytes) for s in settled}) == 1
    assert slopes["resident"] * samples[-1].version < MORE_BYTES
