"""Limits and ranges of everything that travels, in one place.

A plain `int` accepts negative numbers in msgspec, hence a range on every number.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

PROTOCOL_VERSION = 1
"""Version of the protocol that this code speaks; agreed in the first message."""

MAX_ENVELOPE_BYTES = 16 * 1024 * 1024
"""An envelope above this is refused undecoded (a Finished with 10,000 receivers is about 1 MB)."""

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Default bound of a body (tables and handles); the broker's `max-body-bytes` may lower it."""

MAX_VERSION = 2**63 - 1
MAX_TEXT = 4096
"""Characters of a reason that an agent sends; longer ones are cut by the agents, with a mark."""
MAX_ORPHANS = 256
"""Relays of a replica that have ended, and that one message names; more are named later."""

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bytes = Annotated[int, Meta(ge=0, le=2**62)]
Call = Annotated[int, Meta(ge=1, le=2**53)]
LastCall = Annotated[int, Meta(ge=0, le=2**53)]
SessionNumber = Annotated[int, Meta(ge=1, le=2**53)]
Version = Annotated[int, Meta(ge=1, le=MAX_VERSION)]
VersionOrNone = Annotated[int, Meta(ge=0, le=MAX_VERSION)]
"""0 says: no version yet."""
Rank = Annotated[int, Meta(ge=0, le=65_535)]
WorldSize = Annotated[int, Meta(ge=1, le=65_536)]
Seconds = Annotated[float, Meta(gt=0, le=86_400.0)]
Micros = Annotated[int, Meta(ge=0, le=2**53)]
Pid = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Pids = Annotated[list[Pid], Meta(max_length=64)]
Ticks = Annotated[int, Meta(ge=0, le=2**62)]

InstanceId = Annotated[str, Meta(min_length=16, max_length=16)]
"""Random id of one run of an agent: 16 lower-case hexadecimal digits."""
Instances = Annotated[list[InstanceId], Meta(max_length=MAX_ORPHANS)]
EpochId = Annotated[str, Meta(min_length=16, max_length=16)]
"""Random id of one run of a broker: 16 lower-case hexadecimal digits."""
Name = Annotated[str, Meta(min_length=1, max_length=128)]
"""A channel, a replica, a group: any printable text of 1 to 128 characters."""
OptionalName = Annotated[str, Meta(max_length=128)]
Job = Annotated[str, Meta(max_length=256)]
"""A job's name; empty: none was given."""
Label = Annotated[str, Meta(min_length=1, max_length=128)]
"""A host or a device."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Ways = Annotated[list[Annotated[str, Meta(min_length=1, max_length=16)]], Meta(max_length=8)]
"""How bytes travel: `ipc`, `staging`, `shm`, and words that later releases may add."""
BufferNumbers = Annotated[list[Annotated[int, Meta(ge=0, le=2**53)]], Meta(max_length=65_536)]
Digest = Annotated[bytes, Meta(min_length=8, max_length=8)]
"""One half of a digest; `docs/protocol.md` says how it is made of a tensor's bytes."""
BufferNumber = Annotated[int, Meta(ge=0, le=2**53)]
