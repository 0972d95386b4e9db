"""Registered tensors whose shared memory was removed under them are moved into new memory.

logind does that to a user's segments when the user logs out, unless RemoveIPC=no. Who has the old
memory mapped reads on; who has not could never map it.
"""

from __future__ import annotations

import logging

from ..protocol.tables import OfferBody, encode_body
from .connection import Connection
from .registry import Registry
from .trainer_core import TrainerCore

log = logging.getLogger("tensorlease.agents")


def renew_missing(registry: Registry, core: TrainerCore, connection: Connection) -> None:
    """Makes new memory for what lies in memory that was removed, and offers it in its place.

    To be called before a round, with no lock held. The tensors stay the same objects with the same
    values. What was closed without being unregistered is asked back. Does nothing, and costs
    little, where nothing was removed or closed.

    Raises:
        SharedMemoryError: There is no room.
        ExportError: A tensor cannot be moved.
    """
    with registry.renewing() as lost:
        for buffers in lost:
            registry.renew(buffers)
            log.warning(
                "the shared memory of %d tensors was removed by something else (logind does at"
                " logout, unless RemoveIPC=no): it was made anew for the rounds to come",
                len(buffers.names),
            )
        with connection.mutex:
            registry.drop_closed()
        if not lost and not registry.former:
            return
        with connection.acting():
            # First, so that workers forget the old ones before they choose; again, where a round
            # held them the last time.
            core.retire(sorted(registry.former))
            for buffers in lost:
                body = encode_body(OfferBody(buffers.buffers))
                core.offer(registry.offer_anew(buffers), buffers.numbers, buffers.nbytes, body)
