"""The limit on open files, against what the settings promise."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from tensorlease.broker.descriptors import ensure_descriptors
soft, hard, agents = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    print(ensure_descriptors(agents), *resource.getrlimit(resource.RLIMIT_NOFILE))
except Exception as error:
    print(type(error).__name__, error)
"""


def limited(soft: int, hard: int, agents: int) -> str:
    command = [sys.executable, "-c", PROGRAM, str(soft), str(hard), str(agents)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("soft", "hard", "agents", "expected"),
    [
        (128, 1000, 300, "728 728 1000"),
        (900, 1000, 300, "900 900 1000"),
    ],
)
def test_the_soft_limit_is_raised_only_as_far_as_needed(
    soft: int, hard: int, agents: int, expected: str
) -> None:
    assert limited(soft, hard, agents) == expected


def test_a_hard_limit_that_is_too_low_is_refused_with_the_numbers() -> None:
    said = limited(128, 400, 300)
    assert said.startswith("ConfigError limits.max-agents = 300 needs 728 file descriptors")
    assert "may open 400" in said
    assert "at most 136" in said
