"""How the tensors of a trainer's GPU are handed over, and how one finds out which way is left."""

from __future__ import annotations

import enum

from ..protocol.errors import ConfigError
from ..protocol.handles import CudaIpcHandle, Handle
from .nearest import nearest


class Share(enum.Enum):
    """How tensors of a GPU are handed over; what is on the CPU goes through shared memory."""

    AUTO = "auto"
    """The first of the others that works, in this order; which, and why, is logged."""
    IPC = "ipc"
    """By CUDA IPC, where they are: nothing is copied before the workers' own copies."""
    STAGING = "staging"
    """Each publish copies them, on the device, into plain memory of the same GPU, which workers map
    by CUDA IPC: as many bytes again."""
    SHM = "shm"
    """Each publish copies them into shared memory of the host: works wherever a worker runs."""


def ways_of(share: Share | str | None, copies: bool) -> list[Share]:
    """Returns the ways to be tried for tensors of a GPU, in order; never `AUTO`.

    Args:
        share: What the user has chosen; None: nothing.
        copies: Whether it was asked for copies in any case, of another dtype say.

    Raises:
        ConfigError: No such choice, or one that goes without the copies.
    """
    if share is None:
        return [Share.SHM if copies else Share.IPC]
    try:
        chosen = Share(share)
    except ValueError:
        words = [each.value for each in Share]
        near = nearest(str(share), words)
        hint = f", {near!r} say" if near else ""
        raise ConfigError(f"share={share!r}: must be one of {', '.join(words)}{hint}") from None
    if chosen is Share.AUTO:
        every = [Share.IPC, Share.STAGING, Share.SHM]
        return every[1:] if copies else every
    if chosen is Share.IPC and copies:
        raise ConfigError(
            "share='ipc' hands tensors over where they are, and dtype= and shadow=True make copies"
            " of them: share='staging' leaves these on the GPU, 'shm' puts them into shared memory"
        )
    return [chosen]


def way_of(handle: Handle, copied: bool) -> str:
    """Returns the word for how the bytes of a buffer travel.

    Args:
        handle: The buffer's.
        copied: Whether they are copies that are made at each publish.
    """
    if isinstance(handle, CudaIpcHandle):
        return Share.STAGING.value if copied else Share.IPC.value
    return Share.SHM.value
