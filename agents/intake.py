"""How a worker takes in what trainers offer and send: it plans, maps, copies, unmaps.

Runs in the application's thread, one thing at a time. Planning happens when the offers change;
a round of registered buffers only copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ..protocol import messages as m
from ..protocol.errors import TensorleaseError
from ..protocol.handles import Handle
from ..protocol.records import OfferRef, Taken, TakeNote, Tally
from ..protocol.tables import Buffer, TensorEntry, decode_batch
from .account import MAX_MISSING, Staging
from .ahead import Ahead
from .callback_sink import CallbackSink, GivePlan, Handover, Staged
from .copy_plan import Begun, CopyPlan
from .errors import AttachError, MappingError, MismatchError
from .hooks import bounded
from .loading import Choice, Loading, Planned
from .mappings import process_mappings
from .memory import MappedMemory
from .offers import Offer
from .seen import SeenBatch, SeenBatches
from .sink import AttachedTensors
from .together import Together, incomplete
from .verifying import Part, Reading, tags_of
from .work import CopyWork
from .written import await_written

log = logging.getLogger("tensorlease.agents")

MAX_UNWANTED = 64
"""Names that a worker sends of what it does not want: so many, or none."""


class Copied(NamedTuple):
    """What became of one batch."""

    nbytes: int
    """Bytes written to what is attached."""
    handover: Handover | None = None
    """What a callback is to get of it, if there is one."""
    reading: Reading | None = None
    """In a verified round: what shows, once all of it was taken in, that it was."""

    @property
    def to_give(self) -> bool:
        """Whether a callback is to be called."""
        return self.handover is not None and bool(self.handover.names)


class Intake:
    """One worker's tensors, and how they are filled.

    Args:
        device: Label of the worker's device: sources with the same are preferred.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._attached: AttachedTensors | None = None
        self._groups: dict[str, frozenset[str]] = {}
        self._sink: CallbackSink | None = None
        # What chooses in each round which of the two has what.
        self._loading: Loading | None = None
        # The offers that were planned, what was taken of them, and what they are planned for.
        self._planned = Planned()
        self._plan: CopyPlan | None = None
        self._gives: GivePlan | None = None
        # (trainer, buffer) that one round of registered buffers copies from into what is attached.
        self._taken: frozenset[tuple[str, int]] = frozenset()
        self._mapped: dict[str, dict[int, MappedMemory]] = {}
        self._staging = Staging(set())
        # What ring batches before had for this worker: the next round's may be the same.
        self._seen = SeenBatches()
        # Given back while something still looked into them: tried again.
        self._lingering: set[tuple[str, int]] = set()
        # Names of registered tensors that nothing here wants.
        self._unwanted: frozenset[str] = frozenset()
        # The tables of what is offered, by trainer and buffer.
        self._tables: dict[tuple[str, int], Buffer] = {}
        # The names in them, and how many of those are attached.
        self._offered: frozenset[str] = frozenset()
        self._offered_here = 0
        self._touched = False
        # What GPUs have begun before its turn, and of the batch at hand.
        self._ahead = Ahead()
        self._begun: Begun | None = None
        self.goes_on: Callable[[], bool] = lambda: True
        """Whether the round whose batch is copied still does."""
        # (trainer, number) of the offer; filled by the poll thread under the connection's lock.
        self._offers: dict[tuple[str, int], Offer] = {}

    def attach(
        self, tensors: AttachedTensors | None, groups: Mapping[str, frozenset[str]] | None = None
    ) -> None:
        """Sets what is to be filled; `groups`: what of it must come together, by each name."""
        self._attached = tensors
        self._groups = dict(groups or {})
        self._seen.clear()

    @property
    def attached(self) -> AttachedTensors | None:
        """What is filled."""
        return self._attached

    def give_to(self, sink: CallbackSink | None) -> None:
        """Sets what gets the tensors that are not attached."""
        self._sink = sink
        self._seen.clear()

    def load_by(self, loading: Loading | None) -> None:
        """Sets what loads; it is given all that comes until it has a recording."""
        self._loading = loading
        self.give_to(None if loading is None else loading.whole.sink)

    @property
    def has_loader(self) -> bool:
        """Whether a loader has all that comes."""
        return self._loading is not None

    @property
    def sink(self) -> CallbackSink | None:
        """What gets the tensors that are not attached."""
        return self._sink

    def tally(self) -> Tally:
        """Returns what the round has brought so far, and what of it is wanted here."""
        staging = self._staging
        applied = 0 if staging.given is None else staging.given.count
        if staging.coverage is not None:
            carried = staging.sent if staging.subset else staging.sent | self._offered
            applied += len(staging.coverage.applied & carried)
        elif self._attached is not None and not (staging.subset or staging.awaited):
            # No ring batch has come: these are what is offered.
            applied += self._offered_here
        if staging.subset or not self._unwanted:
            skipped: AbstractSet[str] = staging.unwanted
        else:
            skipped = self._unwanted | staging.unwanted if staging.unwanted else self._unwanted
        names = sorted(skipped) if len(skipped) <= MAX_UNWANTED else []
        return Tally(applied, len(skipped), names)

    @property
    def unwanted(self) -> tuple[str, ...]:
        """Names that trainers offer, or sent in this round, of which nothing is wanted here."""
        return tuple(sorted(self._unwanted | self._staging.unwanted))

    def _attached_names(self) -> frozenset[str]:
        return frozenset() if self._attached is None else self._attached.name_set

    def offered(self, message: m.Offered, body: bytes | None) -> None:
        """Keeps an offer until it is planned; called under the connection's lock."""
        self._offers[message.trainer, message.number] = Offer(
            message.trainer,
            message.number,
            message.rank,
            message.device,
            list(message.buffers),
            body or b"",
        )

    def select(self, wanted: Iterable[tuple[str, int]]) -> list[Offer]:
        """Returns the offers by (trainer, number), forgets others; under the connection's lock."""
        keys = set(wanted)
        self._offers = {key: offer for key, offer in self._offers.items() if key in keys}
        return list(self._offers.values())

    # ------------------------------------------------------------ offers

    def plan(self, offers: list[Offer]) -> tuple[TakeNote, dict[str, set[int]]]:
        """Chooses sources and maps them; returns what is taken, and all that is mapped."""
        self._plan, self._gives, self._taken = None, None, frozenset()
        self._unwanted, self._tables = frozenset(), {}
        if self._loading is not None:
            # All is mapped: at each round's beginning it may turn out that all is to be loaded.
            self._attached, self._sink = self._loading.whole
        missing: list[str] = []
        buffers: dict[str, list[Buffer]] = {}
        # Of a tensor that a trainer offers twice, the newer: the memory of the other was removed.
        for offer in sorted(offers, key=lambda offer: -offer.number):
            try:
                buffers.setdefault(offer.trainer, []).extend(offer.decode())
            except TensorleaseError as error:
                missing.append(f"offer {offer.number} of rank {offer.rank}: {error}")
        self._tables = {(by, buffer.number): buffer for by, of in buffers.items() for buffer in of}
        self._offered = frozenset(e.name for b in self._tables.values() for e in b.entries)
        self._offered_here = len(self._offered.intersection(self._attached_names()))
        nearest = sorted(offers, key=lambda offer: (offer.device != self._device, offer.rank))
        preference = list(dict.fromkeys(offer.trainer for offer in nearest))
        takes: dict[str, set[int]] = {}
        plans: list[CopyPlan | GivePlan] = []
        if self._loading is not None:
            self._loading.expect(buffers.values())
        try:
            called = {offer.trainer: f"rank {offer.rank}" for offer in offers}
            self._planned = Planned(buffers, preference, called)
            copies = gives = None
            if self._attached is not None:
                copies = self._attached.plan(buffers, preference, called=called)
                plans.append(copies)
                names = {e.name for of in buffers.values() for b in of for e in b.entries}
                for group in set(self._groups.values()):
                    missing += incomplete(group, names, "not offered")
            if self._sink is not None:
                gives = self._sink.plan(buffers, self._attached_names(), preference, called)
                plans.append(gives)
            for plan in plans:
                missing += plan.missing
                for trainer in plan.takes:
                    self._map(trainer, plan.handles(trainer))
            for plan in plans:
                for trainer, numbers in plan.takes.items():
                    takes.setdefault(trainer, set()).update(numbers)
            self._planned.takes = takes
            self._use(copies, gives)
        except TensorleaseError as error:
            missing.append(str(error))
        if not offers and missing:
            missing = ["no trainer offers anything"]
        if offers and not takes and not missing and not self.wants_nothing:
            missing.append(self._nothing_wanted())
        seen = [OfferRef(offer.trainer, offer.number) for offer in offers]
        note = TakeNote(
            seen,
            [Taken(trainer, sorted(numbers)) for trainer, numbers in takes.items()],
            bool(takes or (offers and self.wants_nothing)) and not missing,
            [bounded(text) for text in missing[:MAX_MISSING]],
        )
        return note, {trainer: set(held) for trainer, held in self._mapped.items()}

    def _use(self, copies: CopyPlan | None, gives: GivePlan | None) -> None:
        self._plan, self._gives = copies, gives
        copied_from = {} if copies is None else copies.takes
        self._taken = frozenset((t, number) for t, of in copied_from.items() for number in of)
        self._unwanted = self._unwanted_of(copies, self._planned.buffers.values())

    def prepared(self) -> None:
        """The prepare hooks of the round have run: what is attached is looked at, or chosen.

        Raises:
            TensorleaseError: What is offered cannot be taken in so.
        """
        staging, planned = self._staging, self._planned
        if self._loading is None:
            if self._attached is not None:
                self._attached.require_held()
            return
        chosen = self._loading.choose(planned, subset=staging.subset)
        if planned.chosen is not chosen:
            self._choose(chosen)
        self.begin(subset=staging.subset, shared=staging.shared, verify=staging.verify)

    def committed(self) -> None:
        """The round has committed: what a loader has shown in it is planned for the next."""
        chosen = None if self._loading is None else self._loading.foreseen()
        if chosen is None or chosen is self._planned.chosen:
            return
        try:
            if (copies := self._choose(chosen)) is not None:
                for trainer, numbers in copies.takes.items():
                    copies.prepare(trainer, sorted(numbers), self._mapped[trainer])
        except TensorleaseError:
            pass  # The next round says so, if it is still so.

    def _choose(self, chosen: Choice) -> CopyPlan | None:
        """Plans the offers that are known for what is copied, and for what gets the rest."""
        planned = self._planned
        planned.chosen = None
        self._attached, self._sink = chosen
        self._seen.clear()
        offers, preference, called = planned.buffers, planned.preference, planned.called
        copies = None
        if chosen.attached is not None:
            copies = chosen.attached.plan(offers, preference, called=called)
            copies.require_complete()
            planned.require_lent(copies)
        gives = chosen.sink.plan(offers, self._attached_names(), preference, called)
        self._offered_here = len(self._offered.intersection(self._attached_names()))
        self._use(copies, gives)
        planned.chosen = chosen
        return copies

    def _nothing_wanted(self) -> str:
        """Says that no name that is offered is wanted here, with some of both."""
        wanted = ", ".join(sorted(self._attached_names())[:3]) or "what its callback names"
        given = ", ".join(sorted(self._unwanted)[:3]) or "nothing"
        return f"of what this worker wants ({wanted}) nothing is offered; offered are: {given}"

    def _unwanted_of(
        self, copies: CopyPlan | None, offered: Iterable[list[Buffer]]
    ) -> frozenset[str]:
        """Returns the names of which neither the tensors nor the callback want anything."""
        if copies is not None:
            names = set(copies.unwanted)
        else:
            names = {e.name for of in offered for buffer in of for e in buffer.entries}
        if self._sink is not None:
            attached = self._attached_names()
            names = {name for name in names if not self._sink.wants(name, attached)}
        return frozenset(names)

    def give_up(self, offers: list[Offer], text: str) -> tuple[TakeNote, dict[str, set[int]]]:
        """What `plan` returns when it was interrupted: nothing is taken, and why."""
        self._plan, self._gives, self._taken = None, None, frozenset()
        seen = [OfferRef(offer.trainer, offer.number) for offer in offers]
        mapped = {trainer: set(held) for trainer, held in self._mapped.items()}
        return TakeNote(seen, [], False, [bounded(text)]), mapped

    def _map(self, trainer: str, handles: dict[int, Handle]) -> None:
        held = self._mapped.setdefault(trainer, {})
        try:
            for number, handle in handles.items():
                if number not in held:
                    held[number] = process_mappings().map(trainer, number, handle)
        finally:
            if not held:
                del self._mapped[trainer]

    def _map_written(self, trainer: str, handles: dict[int, Handle]) -> None:
        self._map(trainer, handles)
        self._await_written(trainer, handles)

    def _await_written(self, trainer: str, numbers: Iterable[int]) -> None:
        held = self._mapped.get(trainer, {})
        await_written([held[number] for number in numbers if number in held], self.goes_on)

    def unmap(self, trainer: str, numbers: Iterable[int]) -> None:
        """Gives mappings back; those that there are not are no error."""
        held = self._mapped.get(trainer, {})
        for number in numbers:
            if number in held:
                try:
                    process_mappings().unmap(trainer, number)
                except MappingError as error:
                    log.error("%s", error)  # What still looks into it keeps the memory alive.
                    self._lingering.add((trainer, number))
                del held[number]
        if not held:
            self._mapped.pop(trainer, None)
            self._seen.forget(trainer)

    def unmap_lingering(self) -> None:
        """Tries again to give back what could not be, as something looked into it."""
        for trainer, number in list(self._lingering):
            try:
                process_mappings().unmap(trainer, number)
                self._lingering.discard((trainer, number))
            except MappingError:
                continue  # Said before.

    def unmap_all(self) -> None:
        """Gives every mapping back; nothing can be copied any more."""
        self._plan, self._gives, self._taken = None, None, frozenset()
        for trainer, held in list(self._mapped.items()):
            self.unmap(trainer, list(held))

    # ------------------------------------------------------------ rounds

    @property
    def wants_nothing(self) -> bool:
        """Whether no byte is wanted: a round is covered before anything of it came."""
        return self._sink is None and self._attached is not None and not self._attached.nbytes

    def begin(self, *, subset: bool = False, shared: bool = False, verify: bool = False) -> None:
        """A round begins: nothing of it is staged.

        Args:
            subset: It carries only some of the tensors.
            shared: The replica has other members, which may be the ones that want them.
            verify: Digests are compared.
        """
        self._staging = Staging(set(() if subset else self._taken), subset, shared, verify=verify)
        if self._attached is not None and self._groups:
            self._staging.together = Together(self._groups, self._attached)
        if self._sink is not None:
            planned = frozenset() if self._gives is None else self._gives.names
            attached = self._attached_names()
            self._staging.given = Staged(self._sink, attached, planned, subset=subset)
            if self._loading is not None and not subset:
                self._staging.needed = set(self._loading.needed - self._offered)

    def missing(self) -> str:
        """Names what the round lacks so far; empty: it is covered."""
        return self._staging.missing()

    @property
    def touched(self) -> bool:
        """Whether the batch at hand has begun to be written to what is attached."""
        return self._touched

    def begin_ahead(self, work: CopyWork) -> bool:
        """Has GPUs begin to copy a batch of this round, for `copy` to wait for; see `Ahead`.

        Returns:
            Whether they have; else `copy` does all of it, in its turn.
        """
        batch, staging = work.batch, self._staging
        if (key := (batch.rank, batch.seq)) in self._ahead:
            return True
        if self._sink or self._loading or staging.together or staging.verify:
            return False
        plan, numbers = self._plan, batch.buffers
        if not batch.registered:
            known = self._seen.find(batch.trainer, work.body or b"")
            if known is None:
                return False
            plan, numbers = known.copies, _numbers(known.buffers)
        if plan is None:
            return False
        mapped = self._mapped.get(batch.trainer, {})
        return self._ahead.begin(key, plan, batch.trainer, numbers, mapped)

    @property
    def ahead(self) -> bool:
        """Whether GPUs have begun with a batch that `copy` has not been called for."""
        return bool(self._ahead)

    def await_ahead(self) -> None:
        """Waits until GPUs are done with all of them; it counts for nothing."""
        self._ahead.wait()

    def copy(self, work: CopyWork) -> Copied:
        """Copies what is attached of a batch; returns what a callback is to get of it.

        Afterwards no view of the batch is left but those that are returned.

        Raises:
            TensorleaseError: It cannot be read, does not fit, or is not what was published.
        """
        batch = work.batch
        self._touched = False
        self._begun = self._ahead.take((batch.rank, batch.seq))
        try:
            if batch.registered:
                self._await_written(batch.trainer, batch.buffers)
                return self._copy_registered(batch.trainer, batch.buffers, work.body or b"")
            return self._copy_ring(batch.trainer, batch.rank, work.body or b"")
        except (AttachError, MismatchError) as error:
            if self._loading is not None:
                self._loading.discard(str(error))
            raise
        finally:
            begun, self._begun = self._begun, None
            if begun is not None:
                begun.wait()  # It failed before it was asked for: nothing may be read any more.

    def _copy_registered(self, trainer: str, numbers: list[int], body: bytes) -> Copied:
        plans = [plan for plan in (self._plan, self._gives) if plan is not None]
        if not plans:
            raise MappingError(f"nothing is planned to be taken from trainer {trainer}")
        staging, mapped = self._staging, self._mapped.get(trainer, {})
        reading = None
        if staging.verify:
            # All that it has asked for: a loader's copies may need less.
            taken = self._planned.takes.get(trainer, set())
            tables = [self._tables[trainer, number] for number in numbers if number in taken]
            reading = Reading(tables, tags_of(body), mapped)
            reading.read()
        nbytes = 0
        if self._plan is not None:
            if reading is not None:
                reading.parts.append(Part(self._plan, trainer, numbers, mapped))
            nbytes = self._copy_by(self._plan, trainer, numbers, mapped)
            staging.nbytes += nbytes
            if staging.coverage is None:
                staging.copied.append((self._plan, trainer, numbers))
            else:
                staging.coverage.staged(self._plan, trainer, numbers)
        handover = None
        if self._gives is not None and staging.given is not None:
            handover = staging.given.take(self._gives.pieces(trainer, numbers), mapped)
        staging.awaited.difference_update((trainer, number) for number in numbers)
        return Copied(nbytes, handover, reading)

    def _copy_ring(self, trainer: str, rank: int, body: bytes) -> Copied:
        staging = self._staging
        known = None if staging.verify else self._seen.find(trainer, body)
        buffers = known.buffers if known is not None else decode_batch(body).buffers
        copies = None if known is None else known.copies
        if self._loading is not None and not self._fits(self._loading, buffers):
            known = copies = None
        reading = None
        nbytes = 0
        if staging.verify:
            # All of it is read, wanted or not: the proof is that of the whole buffer.
            handles = {b.number: b.handle for b in buffers if b.handle}
            self._map_written(trainer, handles)
            tags = {buffer.number: buffer.tags or b"" for buffer in buffers}
            reading = Reading(buffers, tags, self._mapped.get(trainer, {}))
        if self._attached is not None:
            if copies is None:
                # Whether it fits is seen before any of it is copied.
                called = {trainer: f"rank {rank}"}
                copies = self._attached.plan({trainer: buffers}, partial=True, called=called)
            self._map_written(trainer, copies.handles(trainer))
        if reading is not None:
            reading.read()
        if self._attached is not None and copies is not None:
            parts = self._copy_into(self._attached, copies, trainer, buffers)
            nbytes = sum(part.plan.nbytes for part in parts)
            staging.nbytes += nbytes
            if reading is not None:
                reading.parts += parts
        if known is None:
            names = frozenset(entry.name for buffer in buffers for entry in buffer.entries)
            known = SeenBatch(buffers, copies, names, self._unwanted_of(copies, [buffers]))
            if not staging.verify:
                self._seen.keep(trainer, body, known)
        staging.bring(known.names)
        staging.unwanted |= known.unwanted
        if self._sink is None or staging.given is None:
            return Copied(nbytes, reading=reading)
        pieces = self._wanted_pieces(self._sink, buffers)
        given_from = {number for number, entry in pieces if entry.nbytes}
        handles = {b.number: b.handle for b in buffers if b.handle and b.number in given_from}
        self._map_written(trainer, handles)
        handover = staging.given.take(pieces, self._mapped.get(trainer, {}))
        return Copied(nbytes, handover, reading)

    def _fits(self, loading: Loading, buffers: list[Buffer]) -> bool:
        """Whether these are what a loader's copies count for; else the round is loaded as a whole.

        Raises:
            MismatchError: They are not, and that cannot be done any more.
        """
        staging = self._staging
        begun = bool(staging.sent or staging.copied or (staging.given and staging.given.count))
        try:
            loading.check(buffers, sent=True, begun=begun)
        except MismatchError:
            if begun or not loading.loads_whole():
                raise
            self._choose(loading.whole)
            self.begin(subset=staging.subset, shared=staging.shared, verify=staging.verify)
            return False
        return True

    def _copy_into(
        self, attached: AttachedTensors, plan: CopyPlan, trainer: str, buffers: list[Buffer]
    ) -> list[Part]:
        """Copies a batch into what is attached; returns what was copied."""
        staging, mapped = self._staging, self._mapped.get(trainer, {})
        if staging.coverage is None:
            # Who is not strict keeps of a ring's tensors what is not sent.
            some = staging.subset or not attached.strict
            staging.coverage = attached.coverage(subset=some)
            for earlier in staging.copied:
                staging.coverage.staged(*earlier)
            staging.copied.clear()
        parts: list[Part] = []
        if staging.together is not None:
            buffers = staging.together.keep_aside(trainer, buffers, mapped)
            plan = attached.plan({trainer: buffers}, partial=True)
            for kept in staging.together.complete():
                whole = attached.plan(kept.buffers, partial=True)
                parts += [
                    Part(whole, by, _numbers(of), kept.memory[by])
                    for by, of in kept.buffers.items()
                ]
        parts.append(Part(plan, trainer, _numbers(buffers), mapped))
        for part in parts:
            self._copy_by(part.plan, part.source, part.numbers, part.mapped)
            staging.coverage.staged(part.plan, part.source, part.numbers)
        return parts

    def _copy_by(
        self,
        plan: CopyPlan,
        source: str,
        numbers: Sequence[int],
        mapped: Mapping[int, MappedMemory],
    ) -> int:
        """Copies what a plan takes from buffers, or waits for it; returns the bytes."""
        self._touched = True
        begun, self._begun = self._begun, None
        copied = plan.copy(source, numbers, mapped) if begun is None else begun.wait()
        return copied.nbytes

    def _wanted_pieces(
        self, sink: CallbackSink, buffers: list[Buffer]
    ) -> list[tuple[int, TensorEntry]]:
        attached = self._attached_names()
        return [
            (buffer.number, entry)
            for buffer in buffers
            for entry in buffer.entries
            if sink.wants(entry.name, attached)
        ]


def _numbers(buffers: list[Buffer]) -> list[int]:
    return [buffer.number for buffer in buffers]
