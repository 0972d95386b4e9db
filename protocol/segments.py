"""Names of shared memory segments: who owns a segment is in its name.

`tensorlease-UID-PID-START-NAMESPACE-INSTANCE-NUMBER`, all decimal but INSTANCE (the first eight
hexadecimal digits of the trainer's instance id). PID and START (clock ticks after boot) together
name a process for as long as the machine is up, within the PID namespace whose inode number is
NAMESPACE. So whoever finds a segment can tell whether its owner still lives, and a process id that
was given to another process leads to too little removal, never to too much.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from msgspec import Struct

from .procfs import start_time_ticks

INSTANCE_DIGITS = 8
"""Digits of the instance id in a name."""
PREFIX: Final = "tensorlease-"
DEFAULT_DIRECTORY: Final = "/dev/shm"
DIRECTORY_VARIABLE: Final = "TENSORLEASE_SHM_DIR"
"""Environment variable that moves the segments of trainers, workers and broker alike."""

NAME_PATTERN: Final = (
    r"^tensorlease-(?:0|[1-9][0-9]{0,9})-[1-9][0-9]{0,9}-(?:0|[1-9][0-9]{0,18})"
    r"-(?:0|[1-9][0-9]{0,18})-[0-9a-f]{8}-(?:0|[1-9][0-9]{0,15})\Z"
)
"""What a name must match: no slash, no dot, one spelling for each owner."""

_name = re.compile(NAME_PATTERN)


class SegmentName(Struct, frozen=True):
    """The owner of a segment, and the number of the buffer in it."""

    uid: int
    pid: int
    start: int
    """Start time of the owner in clock ticks after boot (`/proc/PID/stat`, field 22)."""
    namespace: int
    """Inode number of the owner's PID namespace."""
    instance: str
    """The first eight hexadecimal digits of the trainer's instance id."""
    number: int

    def __str__(self) -> str:
        return (
            f"{PREFIX}{self.uid}-{self.pid}-{self.start}-{self.namespace}"
            f"-{self.instance}-{self.number}"
        )


def parse_name(text: str) -> SegmentName | None:
    """Returns the owner named by a file's name, or None for a file that is none of ours."""
    if _name.match(text) is None:
        return None
    uid, pid, start, namespace, instance, number = text.removeprefix(PREFIX).split("-")
    return SegmentName(int(uid), int(pid), int(start), int(namespace), instance, int(number))


class ProcessStat(Struct, frozen=True):
    """What `/proc/PID/stat` says that matters here."""

    state: str
    threads: int
    start: int
    """Start time in clock ticks after boot."""

    @property
    def gone(self) -> bool:
        """Whether nothing of the process runs: it only waits to be collected by its parent.

        The first thread of a process may end before the others; only when none is left has the
        process given its memory back.
        """
        return self.state in ("Z", "X", "x") and self.threads <= 1


def parse_stat(text: str) -> ProcessStat:
    """Reads the text of `/proc/PID/stat`; raises `ValueError` if it is something else."""
    start = start_time_ticks(text)
    fields = text.rpartition(")")[2].split()
    return ProcessStat(state=fields[0], threads=int(fields[17]), start=start)


def abandoned(
    names: Iterable[str],
    *,
    uid: int,
    namespace: int,
    look: Callable[[int], ProcessStat | None],
    gone: Collection[str] = (),
) -> Iterator[str]:
    """Yields the names, of those given, whose owner is provably gone.

    Args:
        names: File names of a segment directory, ours and foreign.
        uid: Only segments of this user are judged.
        namespace: The caller's PID namespace: process ids of another one say nothing here.
        look: Returns the state of a process, None if there is certainly none with that id; raises
            `OSError` or `ValueError` where it cannot tell, which counts as alive.
        gone: Instances of agents that are proved to be gone otherwise, by their locks say.
    """
    proved = {instance[:INSTANCE_DIGITS] for instance in gone}
    for text in names:
        owner = parse_name(text)
        if owner is None or owner.uid != uid:
            continue
        if owner.instance in proved:
            yield text
            continue
        if owner.namespace != namespace:
            continue
        if not owner.start or not namespace:
            continue  # the platform did not tell who the owner was: nothing can be proved
        try:
            stat = look(owner.pid)
        except (OSError, ValueError):
            continue
        if stat is None or stat.gone or stat.start != owner.start:
            yield text
