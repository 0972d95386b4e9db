"""What `tensorlease doctor` makes of what it sees: pure, one line each with the way out."""

from __future__ import annotations

import stat
from collections.abc import Collection, Mapping
from enum import Enum

from msgspec import Struct

from .units import size

MIB = 2**20
LEAST_SHM = 65 * MIB
"""What Docker gives by default (64 MiB) is not enough for any model."""
SMALL_SHM = 1024 * MIB
LEAST_DESCRIPTORS = 64
FEW_DESCRIPTORS = 1024


class Level(Enum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


class Finding(Struct):
    """One check."""

    name: str
    level: Level
    text: str
    """What was seen, in one line."""
    way_out: str = ""
    """What to do; empty where nothing is to be done."""


class Directory(Struct):
    """The directory of a socket, as lstat(2) shows it."""

    path: str
    mode: int
    uid: int


class Shm(Struct):
    """Where segments are made."""

    path: str
    kind: str
    """Of the file system, `tmpfs` say; empty: unknown."""
    total: int
    free: int
    problem: str = ""
    """Why no file can be made there; empty: one can."""


def software(versions: Mapping[str, str | None]) -> Finding:
    """Versions by package; None: it is not installed."""
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Finding("software", Level.FAIL, text, f"pip install {' '.join(missing)}")
    return Finding("software", Level.OK, text)


def both_sides(agents: Collection[str], ours: str) -> Finding:
    """What the agents of the running broker say that they are, and what this process is."""
    name = "both sides"
    others = sorted(set(agents) - {ours})
    if not agents:
        return Finding(name, Level.OK, "no agent is connected to compare with")
    if not others:
        return Finding(name, Level.OK, f"all {len(agents)} agents have {ours}")
    text = f"agents have {'; '.join(sorted({*agents}))}; here is {ours}"
    way_out = "give trainers and workers the same versions of tensorlease and torch"
    return Finding(name, Level.WARN, text, way_out)


def socket_directory(directory: Directory | None, path: str, uid: int) -> Finding:
    """Whether nobody else could put a socket in the broker's place.

    Args:
        directory: None where there is none yet.
        path: Where it is, or would be.
        uid: Of this user.
    """
    name = "socket directory"
    if directory is None:
        text = f"{path} is not there yet; the broker makes it"
        return Finding(name, Level.OK, text)
    mode = stat.S_IMODE(directory.mode)
    text = f"{path}, mode {mode:04o}, of uid {directory.uid}"
    if not stat.S_ISDIR(directory.mode):
        return Finding(name, Level.FAIL, f"{path} is no directory", "name another --endpoint")
    if directory.mode & (stat.S_IWOTH | stat.S_IWGRP):
        whose = "all" if directory.mode & stat.S_IWOTH else "its group"
        way_out = f"chmod go-w {path}, or a directory of its own"
        return Finding(name, Level.FAIL, f"{text}: writable by {whose}", way_out)
    if directory.uid not in (uid, 0):
        way_out = "right for a broker of that user; else name another --endpoint"
        return Finding(name, Level.WARN, f"{text}: another user's", way_out)
    return Finding(name, Level.OK, text)


def shared_memory(shm: Shm) -> Finding:
    """Whether segments can be made, and are large enough for a model."""
    name = "shared memory"
    kind = f" ({shm.kind})" if shm.kind else ""
    text = f"{shm.path}{kind}, {size(shm.total)}, {size(shm.free)} free"
    grow = f"mount -o remount,size=... {shm.path}, docker run --shm-size, or TENSORLEASE_SHM_DIR"
    if shm.problem:
        way_out = f"give {shm.path} to this user, or name another by TENSORLEASE_SHM_DIR"
        return Finding(name, Level.FAIL, f"{shm.path}: {shm.problem}", way_out)
    if shm.total < LEAST_SHM:
        return Finding(name, Level.FAIL, text, grow)
    if shm.free < SMALL_SHM:
        return Finding(name, Level.WARN, f"{text}: small for a model", grow)
    if shm.kind and shm.kind not in ("tmpfs", "ramfs", "hugetlbfs"):
        way_out = "a tmpfs: segments on a disk are slow, and written to it"
        return Finding(name, Level.WARN, f"{text}: no memory but a file system", way_out)
    return Finding(name, Level.OK, text)


def shared_with(same: int, other: Collection[str], unseen: int) -> Finding:
    """Whether the agents of the running broker see the same shared memory as this process.

    Args:
        same: How many do.
        other: Those that see another one, by name and pid.
        unseen: How many could not be looked at.
    """
    name = "shared memory of agents"
    if other:
        way_out = "one /dev/shm for all: --ipc=host, or one tmpfs in each and TENSORLEASE_SHM_DIR"
        text = f"not this one for {', '.join(sorted(other))}"
        return Finding(name, Level.FAIL, text, way_out)
    text = f"the same for {same} agents" if same else "no agent to compare with"
    return Finding(name, Level.OK, f"{text}; {unseen} cannot be seen" if unseen else text)


def descriptors(limit: int | None) -> Finding:
    """How many files a process may open; None: as many as it likes."""
    name = "descriptors"
    text = "no limit" if limit is None else f"{limit} a process"
    way_out = f"ulimit -n {FEW_DESCRIPTORS}, LimitNOFILE= of a unit"
    if limit is not None and limit < LEAST_DESCRIPTORS:
        return Finding(name, Level.FAIL, f"{text}: too few for an agent", way_out)
    if limit is not None and limit < FEW_DESCRIPTORS:
        return Finding(name, Level.WARN, f"{text}: few for a broker of many agents", way_out)
    return Finding(name, Level.OK, text)


def namespaces(broker_pid: int | None, same: bool | None) -> Finding:
    """Whether the running broker sees the processes of agents that are started as this one.

    Args:
        broker_pid: Of the running broker; 0 where its process cannot be seen, None: there is none.
        same: Whether it is in this PID namespace; None: it cannot be told.
    """
    name = "namespaces"
    if broker_pid is None:
        return Finding(name, Level.OK, "no broker to compare with")
    if broker_pid == 0 or same is False:
        text = "the broker is in another PID namespace: deaths are seen by locks, two seconds later"
        return Finding(name, Level.WARN, text, "--pid=host, where that matters")
    return Finding(name, Level.OK, f"the broker (pid {broker_pid}) sees processes of here")
