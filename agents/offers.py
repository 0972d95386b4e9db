"""What trainers offer, as it comes to a worker: decoded when it is planned first."""

from __future__ import annotations

from msgspec import Struct

from ..protocol.tables import Buffer, decode_offer
from .errors import MappingError


class Offer(Struct):
    """An offer as it came."""

    trainer: str
    number: int
    rank: int
    device: str
    numbers: list[int]
    body: bytes
    # Decoded when it is planned first.
    buffers: list[Buffer] | None = None

    def decode(self) -> list[Buffer]:
        """Returns its buffers.

        Raises:
            MappingError: It does not hold what it says.
        """
        if self.buffers is None:
            buffers = decode_offer(self.body).buffers
            if sorted(buffer.number for buffer in buffers) != sorted(self.numbers):
                raise MappingError("its table names other buffers than its envelope")
            self.buffers, self.body = buffers, b""
        return self.buffers
