"""Why GPU memory cannot be shared by CUDA IPC, or not be mapped: in words, with the way out.

What can be asked is asked of the driver, before a round or after a refusal; nothing here opens or
exports anything. The texts go into the errors of `cuda`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ..protocol.handles import CUDA_FORMAT, CudaIpcHandle
from . import cuda_driver as driver
from .cuda_driver import HANDLE_BYTES, CudaError
from .errors import MappingError, mebibytes

ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch reads its allocator's settings; newer releases know the second name as well."""
VISIBLE_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
COPIES: Final = (
    'register it with share="auto" (or "staging", "shm"), which copies it at each publish'
)
_OS_RELEASE: Final = Path("/proc/sys/kernel/osrelease")
_TEGRA_RELEASE: Final = Path("/etc/nv_tegra_release")
_FIRST_NAMESPACES: Final = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}
"""Inode numbers of the namespaces that Linux starts with (include/linux/proc_ns.h)."""

# ------------------------------------------------------------------- what is here


def platform() -> str:
    """Names a platform on which CUDA IPC was reported not to work; empty: another one."""
    with suppress(OSError):
        if "microsoft" in _OS_RELEASE.read_text(encoding="utf-8", errors="replace").lower():
            return "WSL2"
    return "a Tegra (Jetson)" if _TEGRA_RELEASE.exists() else ""


def expandable_segments() -> bool:
    """Whether the environment asks torch for expandable segments."""
    settings = "".join(os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def namespaces() -> str:
    """Says which of the namespaces that CUDA IPC needs in common are not the host's; empty: none."""
    own: list[str] = []
    for kind, first in _FIRST_NAMESPACES.items():
        with suppress(OSError):
            if os.stat(f"/proc/self/ns/{kind}").st_ino != first:
                own.append(kind.upper())
    return f"this process is in {' and '.join(own)} namespaces of a container" if own else ""


def is_mig(ordinal: int) -> bool:
    """Whether a device is a MIG instance, by its name."""
    with suppress(CudaError):
        return " MIG " in f" {driver.name_of(ordinal)} "
    return False


def ordinal_of(uuid: str) -> int | None:
    """Returns the number that a GPU has in this process; None: it is hidden from it."""
    for ordinal in range(driver.device_count()):
        if driver.uuid_of(ordinal) == uuid:
            return ordinal
    return None


# ------------------------------------------------------------------- in the trainer


def without_ipc(ordinal: int) -> str:
    """Says why memory of a device cannot be shared at all; empty: nothing is known against it."""
    try:
        if driver.supports_ipc(ordinal):
            return ""
    except CudaError:
        return ""  # An older driver, which does not say.
    place = platform()
    on = f" on {place}" if place else ""
    return (
        f"GPU {driver.uuid_of(ordinal)} has no CUDA IPC{on}, says its driver"
        " (CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED is 0)"
    )


def not_exported(ordinal: int, address: int) -> tuple[str, str]:
    """Says what memory that the driver does not export is, and what to do but copying it."""
    if text := without_ipc(ordinal):
        return text, ""
    if _asked(driver.is_managed, ordinal, address):
        return "it is managed memory (cudaMallocManaged)", "make it with torch's own allocator"
    if _asked(driver.is_pooled, ordinal, address):
        return (
            "it comes from a stream-ordered memory pool (cudaMallocAsync)",
            "leave backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF",
        )
    expandable = _is_expandable(address)
    if _asked(driver.is_virtual, ordinal, address) or expandable:
        if expandable or (expandable is None and expandable_segments()):
            return (
                "it belongs to one of torch's expandable segments",
                "leave expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF",
            )
        cause = (
            "it was mapped by an allocator of its own (a memory saver, an engine's sleep mode, a"
            " pluggable allocator or its torch.cuda.MemPool)"
        )
        return cause, "make it outside of that"
    place = platform()
    if place:
        return f"as far as is known, {place} has no CUDA IPC", ""
    return "another pool or allocator has made it", "make it with torch's own allocator"


def _asked(question: Callable[[int, int], bool], ordinal: int, address: int) -> bool:
    """What the driver does not know is not so."""
    with suppress(CudaError):
        return question(ordinal, address)
    return False


def _is_expandable(address: int) -> bool | None:
    """Whether torch has this memory in an expandable segment; None: it does not say."""
    import torch

    # What torch's stubs do not say.
    snapshot: Callable[[], list[dict[str, Any]]] = torch.cuda.memory_snapshot
    try:
        segments = snapshot()
    except (RuntimeError, AssertionError):  # Of a pluggable allocator, or no CUDA here.
        return None
    for segment in segments:
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return bool(segment.get("is_expandable", False))
    return None


# ------------------------------------------------------------------- in the worker


def require_format(handle: CudaIpcHandle) -> None:
    """Raises `MappingError` for a handle that is not what this release makes of the driver's.

    Both sides ask: nothing in it is torch's, so the releases of torch may differ.
    """
    if handle.format_version != CUDA_FORMAT:
        raise MappingError(
            f"a trainer's GPU memory came in format {handle.format_version}, and this agent knows"
            f" {CUDA_FORMAT}: upgrade the older of the two"
        )
    for what, raw in (("memory", handle.handle), ("event", handle.event)):
        if len(raw) != HANDLE_BYTES:
            raise MappingError(
                f"the handle of a trainer's GPU {what} has {len(raw)} bytes, and those of format"
                f" {CUDA_FORMAT} have {HANDLE_BYTES}: give both sides the same release of"
                " tensorlease"
            )


def require_reach(ordinal: int, uuid: str) -> None:
    """Raises `MappingError` where a device cannot map the memory of a GPU, as far as can be asked."""
    mine = driver.uuid_of(ordinal)
    if mine == uuid:
        return
    if is_mig(ordinal):
        raise MappingError(
            f"memory of GPU {uuid} cannot be mapped on MIG instance {mine}: CUDA IPC does not go"
            " from one instance to another; run trainer and worker on one instance"
            f" ({VISIBLE_VARIABLE}=MIG-{uuid}, where that is one), or let the trainer register"
            ' with share="shm"'
        )
    theirs = ordinal_of(uuid)
    if theirs is not None and not driver.can_access_peer(ordinal, theirs):
        raise MappingError(
            f"memory of GPU {uuid} cannot be mapped on GPU {mine}: the two have no peer access"
            " (cuDeviceCanAccessPeer); run the worker on the trainer's GPU, or let the trainer"
            ' register with share="shm"'
        )


def not_mapped(ordinal: int, uuid: str, error: CudaError) -> str:
    """Says why the driver has not mapped the memory of a GPU on a device."""
    mine = driver.uuid_of(ordinal)
    text = f"memory of GPU {uuid} cannot be mapped on {mine} ({error}): "
    shm = 'let the trainer register with share="shm"'
    if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
        room = ""
        with suppress(CudaError):
            free, total = driver.room_of(ordinal)
            room = f", of whose {mebibytes(total)} {mebibytes(free)} are free"
        return (
            f"{text}there is no room for the mapping on that GPU{room}: let the engine take less of"
            f" it, or {shm}"
        )
    if error.name == "CUDA_ERROR_INVALID_CONTEXT":
        return (
            f"{text}the driver takes the handle for one of this very process, as it does where"
            " trainer and worker are in different PID namespaces and have the same pid there: give"
            f" their containers one PID and IPC namespace (--pid=host --ipc=host), or {shm}"
        )
    if place := platform():
        return f"{text}as far as is known, {place} has no CUDA IPC: {shm}"
    causes = ["the trainer may have freed it or have ended"]
    with suppress(CudaError):
        if ordinal_of(uuid) is None:
            seen = os.environ.get(VISIBLE_VARIABLE)
            hidden = f"{VISIBLE_VARIABLE}={seen} hides it" if seen else "a container hides it, say"
            causes.insert(
                0,
                f"that GPU is not among those that this process sees ({hidden}), so that peer"
                " access could not be asked for: show it to both sides",
            )
    where = namespaces()
    causes.append(
        f"{where}, which the trainer may not share (--pid=host --ipc=host)"
        if where
        else "the trainer may be in a container with PID or IPC namespaces of its own"
        " (--pid=host --ipc=host)"
    )
    return f"{text}{'; '.join(causes)}; or {shm}"
