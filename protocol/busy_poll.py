"""Whether who waits for a message looks for it without sleeping, for a moment.

To wake a thread takes some 50 microseconds on a virtual machine, and a small round is waited for six
times. Looking takes a core meanwhile, so it is done only where there are some to spare.
"""

from __future__ import annotations

import enum
from typing import Final

LASTS_S: Final = 20e-3
"""So long after a message the next one is looked for without sleeping."""
CORES: Final = 8
"""From so many cores that a process may use, `auto` is `on`."""
CPU_LIMIT: Final = "/sys/fs/cgroup/cpu.max"
"""Where a container's limit stands, in the second version of control groups."""


class BusyPoll(enum.Enum):
    """Whether it is done; auto: where this process may use `CORES` cores."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def lasts_s(choice: BusyPoll, cores: int, cpu_limit: str) -> float:
    """Returns for how many seconds it is done after each message; 0: not at all.

    Args:
        choice: What was asked for.
        cores: On how many cores this process may run.
        cpu_limit: What `CPU_LIMIT` says: microseconds of processor time in so many; empty: nothing.
    """
    if choice is BusyPoll.AUTO:
        enough = cores >= CORES and _cores_of(cpu_limit) >= CORES
        choice = BusyPoll.ON if enough else BusyPoll.OFF
    return LASTS_S if choice is BusyPoll.ON else 0.0


def _cores_of(cpu_limit: str) -> float:
    try:
        quota, period = cpu_limit.split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return float("inf")  # There is none, or it is written otherwise.
