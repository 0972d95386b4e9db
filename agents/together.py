"""Tensors that must travel together, a weight and its scale say: all of a group or none of it.

In a round of registered tensors a group is known to be complete before it begins. Where tensors
come batch by batch, what has come of a group is kept aside until the rest of it is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from msgspec import Struct, field

from ..protocol.errors import ConfigError
from ..protocol.tables import Buffer, TensorEntry
from .errors import AttachError, MappingError
from .memory import MappedMemory
from .placement import check_tensor_name
from .sink import AttachedTensors, Coverage

Groups = Iterable[Sequence[str]]
"""Groups of names, by which trainers send them."""


def groups_of(together: Groups) -> dict[str, frozenset[str]]:
    """Returns each name's group; raises `ConfigError` for a group that is none."""
    found: dict[str, frozenset[str]] = {}
    for names in together:
        if isinstance(names, str) or len(group := frozenset(names)) < 2:
            raise ConfigError(f"together has {names!r}: a group is two names or more")
        for name in group:
            check_tensor_name(name, AttachError)
            if name in found:
                raise ConfigError(f"{name!r} is in two groups of together: make one of them")
            found[name] = group
    return found


def incomplete(group: frozenset[str], there: Iterable[str], what: str) -> list[str]:
    """Says what a group lacks, if some of it is there."""
    have = group.intersection(there)
    if not have or have == group:
        return []
    first = min(have)
    return [
        f"{name}: {what}, and {first} must not come without it" for name in sorted(group - have)
    ]


class HeapMemory:
    """A copy of a piece of a trainer's memory, which looks like a mapping."""

    def __init__(self, data: torch.Tensor) -> None:
        self._bytes = data.clone()
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._bytes.numel()

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return self._bytes.data_ptr()

    @property
    def device(self) -> torch.device:
        """Where the piece lay, too."""
        return self._bytes.device

    @property
    def event(self) -> None:
        """It was copied after it."""
        return None

    @property
    def foreign(self) -> bool:
        """It is this process's own."""
        return False

    def flat(self) -> torch.Tensor:
        """Returns all of it, uint8 of shape (nbytes,)."""
        return self._bytes

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Returns a copy of a part of it."""
        return self._bytes[offset : offset + nbytes].clone().untyped_storage()

    def unmap(self) -> None:
        """Nothing is mapped."""


class Kept(Struct):
    """What has come of a group, as batches of this process's own."""

    coverage: Coverage
    buffers: dict[str, list[Buffer]] = field(default_factory=dict)
    """By source."""
    memory: dict[str, dict[int, MappedMemory]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


class Together:
    """The groups of one round, of attached tensors.

    Args:
        groups: Each name's group.
        attached: The tensors; a group of which nothing is attached does not matter.
    """

    def __init__(self, groups: Mapping[str, frozenset[str]], attached: AttachedTensors) -> None:
        self._groups: Final = groups
        self._attached: Final = attached
        self._kept: dict[frozenset[str], Kept] = {}
        self._numbers = itertools.count()

    def keep_aside(
        self, source: str, buffers: Sequence[Buffer], mapped: Mapping[int, MappedMemory]
    ) -> list[Buffer]:
        """Copies what belongs to groups that this batch does not complete; returns the rest."""
        whole_here = {
            entry.name
            for buffer in buffers
            for entry in buffer.entries
            if entry.box.is_whole(entry.shape)
        }
        rest: list[Buffer] = []
        for buffer in buffers:
            entries: list[TensorEntry] = []
            for entry in buffer.entries:
                group = self._groups.get(entry.name)
                if group is None or (group <= whole_here and group not in self._kept):
                    entries.append(entry)
                elif entry.name in self._attached.names:
                    self._keep(group, source, entry, mapped.get(buffer.number))
            rest.append(Buffer(buffer.number, buffer.nbytes, buffer.handle, entries))
        return rest

    def _keep(
        self,
        group: frozenset[str],
        source: str,
        entry: TensorEntry,
        memory: MappedMemory | None,
    ) -> None:
        kept = self._kept.get(group)
        if kept is None:
            wants = [want for want in self._attached.wants if group.intersection(want.names)]
            kept = self._kept[group] = Kept(Coverage(wants))
        number = next(self._numbers)
        copies: dict[int, MappedMemory] = {}
        if entry.nbytes:
            if memory is None or memory.nbytes < entry.offset + entry.nbytes:
                raise MappingError(f"{entry.name!r} is in a buffer that is not mapped in full")
            copies[number] = HeapMemory(memory.flat()[entry.offset : entry.offset + entry.nbytes])
        mine = TensorEntry(entry.name, entry.dtype, entry.shape, entry.region, 0)
        buffer = Buffer(number, entry.nbytes, None, [mine])
        plan = self._attached.plan({source: [buffer]}, partial=True)
        kept.coverage.staged(plan, source, [number])
        kept.buffers.setdefault(source, []).append(buffer)
        kept.memory.setdefault(source, {}).update(copies)
        kept.names.add(entry.name)

    def complete(self) -> list[Kept]:
        """Returns the groups that are there in full by now; they are kept no longer."""
        found = [group for group, kept in self._kept.items() if kept.coverage.complete()]
        return [self._kept.pop(group) for group in found]

    def missing(self) -> list[str]:
        """Returns a text for each tensor that a group lacks; it begins with its name."""
        texts: list[str] = []
        for group, kept in self._kept.items():
            texts += incomplete(group, kept.names, "not sent") or kept.coverage.missing()
        return texts
