"""A worker that hands trainers' handles on to other processes, which read for it.

It maps nothing, and needs no GPU. A batch is taken in when what it was handed on to has returned:
by then nobody may read the memory any more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from ..protocol.errors import TensorleaseError
from ..protocol.handles import CudaIpcHandle
from ..protocol.records import OfferRef, Orphan, Process, Taken, TakeNote, Tally
from ..protocol.tables import Buffer, TensorEntry, decode_batch, decode_offer
from .account import MAX_MISSING
from .core import Identity
from .errors import MappingError
from .hooks import bounded
from .intake import Copied, Intake
from .offers import Offer
from .relay_core import RelayCore
from .sink import AttachedTensors
from .work import CopyWork, UnreadWork
from .worker import WorkerAgent
from .worker_core import WorkerCore

HandOn = Callable[[list[Buffer]], object]
"""Called with what a batch brings; returns when nobody reads it any more, also if it raises.

Only `StillReadError` says that somebody may: then the worker keeps what it has, and says no goodbye.
"""
FindOut = Callable[[list[Orphan], Callable[[], bool]], bool]

_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class RelayIntake(Intake):
    """Takes whole tensors of one GPU, by their handles.

    Args:
        device: The GPU's UUID; any other label: whichever GPU it is that they lie on.
        hand_on: What they are handed on to.
        once: Everything of a round has to come in one batch of registered tensors; why.
    """

    def __init__(self, device: str, hand_on: HandOn, once: str) -> None:
        super().__init__(device)
        self._gpu = device if _UUID.fullmatch(device) else ""
        self._hand_on = hand_on
        self._once = once
        self._attached = AttachedTensors({})
        # Buffers of each trainer that are taken, with what is wanted of them.
        self._wanted: dict[tuple[str, int], Buffer] = {}
        self._await: set[tuple[str, int]] = set()
        # Buffers that readers may have mapped.
        self._known: dict[str, set[int]] = {}
        # Names that this round has brought.
        self._brought: set[str] = set()
        self.subset = False
        self.verify = False

    @property
    def wants_nothing(self) -> bool:
        return False

    @property
    def unwanted(self) -> tuple[str, ...]:
        return ()

    @property
    def touched(self) -> bool:
        return self._touched

    def plan(self, offers: list[Offer]) -> tuple[TakeNote, dict[str, set[int]]]:
        self._wanted = {}
        missing: list[str] = []
        names: set[str] = set()
        # The nearest first; of a tensor that a trainer offers twice, the newer.
        order = sorted(offers, key=lambda o: (o.device != self._device, o.rank, -o.number))
        for offer in order:
            try:
                if offer.buffers is None:
                    offer.buffers, offer.body = decode_offer(offer.body).buffers, b""
                for buffer in offer.buffers:
                    entries = [entry for entry in buffer.entries if entry.name not in names]
                    if not self._is_elsewhere(buffer) and entries:
                        require_whole(buffer.handle, entries)
                        self._wanted[offer.trainer, buffer.number] = replace(
                            buffer, entries=entries
                        )
                        names.update(entry.name for entry in entries)
            except TensorleaseError as error:
                missing.append(f"offer {offer.number} of rank {offer.rank}: {error}")
        missing += self._unfit(offers)
        takes: dict[str, list[int]] = {}
        for trainer, number in self._wanted:
            takes.setdefault(trainer, []).append(number)
        for trainer, numbers in takes.items():
            self._known.setdefault(trainer, set()).update(numbers)
        note = TakeNote(
            [OfferRef(offer.trainer, offer.number) for offer in offers],
            [Taken(trainer, sorted(numbers)) for trainer, numbers in takes.items()],
            bool(takes) and not missing,
            [bounded(text) for text in missing[:MAX_MISSING]],
        )
        return note, {trainer: set(numbers) for trainer, numbers in self._known.items()}

    def _is_elsewhere(self, buffer: Buffer) -> bool:
        return bool(self._gpu) and gpu_of(buffer) not in ("", self._gpu)

    def _unfit(self, offers: list[Offer]) -> list[str]:
        """Says why what is taken cannot be handed on as it is."""
        if offers and not self._wanted:
            on = {g for o in offers for b in o.buffers or () if (g := gpu_of(b))}
            there = ", ".join(sorted(on)) or "none"
            return [
                f"nothing is offered on GPU {self._gpu or 'of any kind'}; offered is on: {there}"
            ]
        gpus = {g for b in self._wanted.values() if (g := gpu_of(b))}
        if len(gpus) > 1:
            which = ", ".join(sorted(gpus))
            return [f"tensors lie on several GPUs ({which}): name the server's, by --device UUID"]
        trainers = {trainer for trainer, _ in self._wanted}
        if self._once and len(trainers) > 1:
            return [f"tensors of one GPU come from {len(trainers)} trainers: {self._once}"]
        return []

    def begin(self, *, subset: bool = False, shared: bool = False, verify: bool = False) -> None:
        self.subset, self.verify = subset, verify
        self._await = set() if subset else set(self._wanted)
        self._brought = set()
        self._touched = False

    def begin_ahead(self, work: CopyWork) -> bool:
        return False

    def missing(self) -> str:
        if self._await:
            texts = sorted(f"buffer {number} of {trainer}" for trainer, number in self._await)
            return f"not sent in this round: {', '.join(texts[:8])}"
        return "" if self._brought else "no tensor was sent in this round"

    def tally(self) -> Tally:
        return Tally(len(self._brought), 0, [])

    def copy(self, work: CopyWork) -> Copied:
        """Hands a batch on; nobody reads it when this has returned, or raised."""
        self._touched = False
        batch = work.batch
        if batch.registered:
            keys = [(batch.trainer, number) for number in batch.buffers]
            buffers = [self._wanted[key] for key in keys if key in self._wanted]
            self._await.difference_update(keys)
        else:
            buffers = [b for b in decode_batch(work.body or b"").buffers if b.entries]
            for buffer in buffers:
                require_whole(buffer.handle, buffer.entries)
            for buffer in buffers:
                if self._is_elsewhere(buffer):
                    raise MappingError(
                        f"a batch lies on GPU {gpu_of(buffer)}, and the server's is {self._gpu}"
                    )
        if self._once and (not batch.registered or self._await or self._brought):
            how = "in several batches" if batch.registered else "through a ring"
            raise MappingError(f"the version comes {how}: {self._once}")
        if not buffers:
            return Copied(0)
        self._touched = True
        self._hand_on(buffers)
        self._brought.update(entry.name for of in buffers for entry in of.entries)
        return Copied(sum(entry.nbytes for of in buffers for entry in of.entries))

    def unmap(self, trainer: str, numbers: Iterable[int]) -> None:
        known = self._known.get(trainer, set())
        known.difference_update(numbers)
        if not known:
            self._known.pop(trainer, None)

    def unmap_all(self) -> None:
        self._known.clear()
        self._wanted.clear()


class RelayWorker(WorkerAgent):
    """A worker whose batches are read by other processes.

    If its process is killed, what these may be reading stays leased: until they have ended, or
    until the next relay of its replica has found out that they are done.

    Args:
        channel: The stream of versions.
        hand_on: Gets the buffers of each batch, with whole tensors of one GPU, and has them read.
        once: If everything of a round has to come in one batch of registered tensors: why, and
            what else there is.
        readers: The processes that read; none: they cannot be named.
        find_out: Called with those relays before it for which something may be read still, and
            with what says whether that still matters, by one member of a replica; returns
            whether nothing is read for them any more.
        replica, member, size, endpoint, device: See `WorkerAgent`.
    """

    def __init__(
        self,
        channel: str,
        hand_on: HandOn,
        *,
        replica: str,
        member: int = 0,
        size: int = 1,
        endpoint: str | None = None,
        device: str = "cpu:0",
        once: str = "",
        readers: Sequence[Process] = (),
        find_out: FindOut | None = None,
    ) -> None:
        self._relay_by = (hand_on, once)
        self._readers = readers
        self._find_out = find_out
        super().__init__(
            channel, replica=replica, member=member, size=size, endpoint=endpoint, device=device
        )
        self._performer.find_out = self._perform

    def _make_core(
        self, me: Identity, replica: str, member: int, size: int, version: int
    ) -> WorkerCore:
        asks = self._find_out is not None
        self._relay_core = RelayCore(me, replica, member, size, readers=self._readers, asks=asks)
        return self._relay_core

    def _make_intake(self, device: str) -> Intake:
        self._relay = RelayIntake(device, *self._relay_by)
        return self._relay

    def _perform(self, work: UnreadWork) -> None:
        """Finds out whether anything is read still for relays that have ended, and says so."""
        core = self._relay_core
        unread = False
        if self._find_out is not None:
            unread = self._find_out(
                work.orphans, lambda: not self.closed and core.wants(work.orphans)
            )
        with self._connection.acting():
            core.found_out(unread)
            self._connection.notify()

    @property
    def partial(self) -> str:
        """What the round at hand asks for that cannot be had so; empty: nothing."""
        if self._relay.subset:
            return "a round of only some tensors"
        return "a verified round" if self._relay.verify else ""

    def join(self) -> None:
        """Joins the channel.

        Raises:
            NoBrokerError: There is no broker; says where it was looked for.
            RefusedError: The broker refuses: the place in the replica is taken, say.
        """
        self._check_here()
        self._join(lambda: None, lambda: None)


def gpu_of(buffer: Buffer) -> str:
    """Returns the UUID of the GPU that a buffer lies on; empty: on none."""
    return buffer.handle.gpu_uuid if isinstance(buffer.handle, CudaIpcHandle) else ""


def require_whole(handle: object, entries: Sequence[TensorEntry]) -> None:
    """Raises `MappingError` for what others than our own workers cannot read."""
    if handle is not None and not isinstance(handle, CudaIpcHandle):
        raise MappingError(
            f"{entries[0].name}: lies in shared memory, and the server reads that of GPUs alone:"
            " register tensors of a GPU, or give the trainer a ring on one (device='cuda:0', or"
            " `tensorlease push --device cuda:0`)"
        )
    for entry in entries:
        if not entry.box.is_whole(entry.shape):
            raise MappingError(
                f"{entry.name}: comes in pieces ({entry.box} of {entry.shape}), and the server takes"
                " whole tensors: gather it, or make the ring's slots as large as the largest tensor"
            )
