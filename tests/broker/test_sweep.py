"""What the broker removes of trainers that died, and what it leaves alone."""

from __future__ import annotations

import os
from pathlib import Path

from tensorlease.broker.sweep import sweep
from tensorlease.protocol.segments import SegmentName

DEAD, OTHER = "0123456789abcdef", "fedcba9876543210"


def segment(directory: Path, instance: str, *, uid: int | None = None, namespace: int = 1) -> Path:
    """Makes a segment whose owner lives in a PID namespace that is not ours."""
    owner = os.getuid() if uid is None else uid
    path = directory / str(SegmentName(owner, 1, 1, namespace, instance[:8], 0))
    path.write_bytes(b"weights")
    return path


def test_a_trainer_of_another_namespace_whose_lock_fell_leaves_nothing(tmp_path: Path) -> None:
    dead, other = segment(tmp_path, DEAD), segment(tmp_path, OTHER)
    assert sweep(tmp_path, gone={DEAD}) == [dead.name]
    assert other.exists()


def test_who_cannot_be_judged_keeps_its_segments(tmp_path: Path) -> None:
    other = segment(tmp_path, OTHER)
    assert sweep(tmp_path) == []
    assert other.exists()


def test_a_segment_of_another_user_stays_even_if_its_trainer_is_gone(tmp_path: Path) -> None:
    foreign = segment(tmp_path, DEAD, uid=os.getuid() + 1)
    assert sweep(tmp_path, gone={DEAD}) == []
    assert foreign.exists()


def test_a_file_that_is_no_segment_stays(tmp_path: Path) -> None:
    file = tmp_path / f"tensorlease-{DEAD}"
    file.write_text("mine")
    assert sweep(tmp_path, gone={DEAD}) == []
    assert file.read_text() == "mine"
