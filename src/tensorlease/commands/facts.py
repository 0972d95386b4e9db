"""What `tensorlease doctor` looks at: this machine, and the agents of a running broker."""

from __future__ import annotations

import os
import resource
import secrets
import socket
import struct
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tensorlease.broker.queries import AgentStatus, Status
from tensorlease.protocol.endpoint import Endpoint

from .findings import Directory, Shm

PACKAGES = ("tensorlease", "torch", "pyzmq", "msgspec")
PROBE_BYTES = 2**16


def versions() -> dict[str, str | None]:
    """The version of each package that agents need; None: it is missing."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def directory_of(endpoint: Endpoint) -> Directory | None:
    """The directory of a socket; None: there is none."""
    try:
        status = os.lstat(endpoint.directory)
    except OSError:
        return None
    return Directory(endpoint.directory, status.st_mode, status.st_uid)


def shm_at(path: str) -> Shm:
    """The place of segments: a file is made, given room, and removed."""
    kind = _kind_of(path)
    try:
        disk = os.statvfs(path)
    except OSError as error:
        return Shm(path, kind, 0, 0, error.strerror or str(error))
    problem = ""
    probe = f"{path}/tensorlease-doctor-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, PROBE_BYTES)
        finally:
            os.close(descriptor)
            os.unlink(probe)
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    return Shm(path, kind, total, free, problem)


def _kind_of(path: str) -> str:
    """The kind of the file system that a path lies on."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    best = ("", "")
    real = os.path.realpath(path)
    for line in mounts.splitlines():
        _, place, kind, *_ = line.split(" ")
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]


def descriptor_limit() -> int | None:
    """The soft limit of this process; None: there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def broker_pid(endpoint: Endpoint) -> int | None:
    """The pid of who listens at a local socket, 0 where it cannot be seen; None: not known."""
    if not endpoint.path:
        return None
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(endpoint.path)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError:
            return None
    pid, _, _ = struct.unpack("3i", credentials)
    assert isinstance(pid, int)
    return pid


def in_our_namespace(pid: int) -> bool | None:
    """Whether a process is in our PID namespace; None: it cannot be told."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino == os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def agents_of(seen: Status) -> Iterator[tuple[str, AgentStatus]]:
    """Every agent of a broker with its name: `worker a/0 (pid 7)`."""
    for channel in seen.channels:
        for rank in channel.group.ranks if channel.group is not None else ():
            yield f"trainer rank {rank.place} (pid {rank.pid})", rank
        for replica in channel.replicas:
            for worker in replica.members:
                yield f"worker {replica.replica}/{worker.place} (pid {worker.pid})", worker


def sees_same_shm(pid: int, path: str) -> bool | None:
    """Whether a process sees the same directory for segments; None: it cannot be told."""
    if in_our_namespace(pid) is not True:
        return None  # Its pid may be another process's here.
    try:
        theirs = os.stat(f"/proc/{pid}/root{path}")
    except PermissionError:
        return None
    except OSError:
        return False
    ours = os.stat(path)
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
