"""How to read what /proc says about a process. Pure: the text is passed in.

Broker and agents both need it, and must read it alike: a start time is compared between them.
"""

from __future__ import annotations


def start_time_ticks(stat: str) -> int:
    """Field 22 of `/proc/PID/stat`: when the process started, in clock ticks after boot.

    Raises:
        ValueError: The text is not of that form.
    """
    # Field 2, the command in brackets, may itself hold spaces and brackets.
    _, bracket, rest = stat.rpartition(")")
    fields = rest.split()
    if not bracket or len(fields) < 20:
        raise ValueError(f"not a /proc/PID/stat line: {stat[:80]!r}")
    return int(fields[19])


def supplementary_groups(status: str) -> frozenset[int]:
    """The group ids of the `Groups:` line of `/proc/PID/status`; empty where there is none."""
    for line in status.splitlines():
        if line.startswith("Groups:"):
            return frozenset(int(number) for number in line.split()[1:])
    return frozenset()


def effective_uid(status: str) -> int | None:
    """The effective uid of the `Uid:` line of `/proc/PID/status`; None where there is none."""
    for line in status.splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[2])
    return None
