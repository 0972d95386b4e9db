"""Whether who waits for a message looks for it without sleeping, for a moment.

To wake a thread takes some 50 microseconds on a virtual machine, and a small round is waited for six
times. Looking takes a core meanwhile, so it is done only where there are some to spare.
"""

from __future__ import annotations

import enum
from typing import Final

LASTS_S: Final = 1e-3
"""So long after a message the next one is looked for without sleeping."""
CORES: Final = 8
"""From so many cores that a process may use, `auto` is `on`."""
LONG_S: Final = 20e-3
"""So long it is with `MANY_CORES`: a round of 16 GB takes 10 ms, and who has slept wakes late."""
MANY_CORES: Final = 16
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
    usable = min(cores, _cores_of(cpu_limit))
    if choice is BusyPoll.OFF or (choice is BusyPoll.AUTO and usable < CORES):
        return 0.0
    return LASTS_S if usable < MANY_CORES else LONG_S


def _cores_of(cpu_limit: str) -> float:
    try:
        quota, period = cpu_limit.split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return float("inf")  # There is none, or it is written otherwise.
