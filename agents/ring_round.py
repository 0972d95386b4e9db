"""A ring round as its trainer sees it: a `with` block in which tensors are sent one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from ..protocol.dtypes import ITEM_SIZES
from ..protocol.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    RefusedError,
    TensorleaseError,
)
from ..protocol.records import Code, Proof, Terms
from ..protocol.regions import Region, is_common
from ..protocol.tables import TensorEntry
from .arguments import check_timeout
from .digests import digest_buffer
from .errors import NO_ROOM, ExportError, GpuMemoryError, RingFullError, SharedMemoryError
from .filling import check_sendable, dtype_name, fill, sent_dtype
from .packing import TABLE_BYTES, cut, table_cost
from .pieces import Pieces, Place
from .placement import NamedTensors, Placed, check_tensor_name, place_one
from .results import RoundHandle, RoundResult, UnreleasedError
from .ring_memory import Filling
from .ring_script import layout_to_send, note_sent, send_by_script
from .sent_before import remember, send_again
from .waiting import seconds

if TYPE_CHECKING:
    from .ring_source import RingSource


class RingRound:
    """Made by `TrainerAgent.open_round`; to be used in a `with` statement, once.

    The round is opened when the first tensor is sent. Tensors are copied into slots, and each slot
    leaves as a batch when it is full; `send` waits where none is free. When the block ends, the
    last batch leaves, and the round's end is waited for. When it ends by an exception, the round is
    void: no worker is at the version, and the exception goes on.

    A round that fails while tensors are being sent does not raise: `send` does nothing any more, so
    that the ranks of a group gather tensors in step to the end. `ended` says so meanwhile, `result`
    afterwards.

    Attributes:
        handle: The round's handle, once it is open.
        result: What became of the round, once the block has ended.
        batches: Batches that were handed out, those of registered tensors not counted.
        nbytes: Bytes that were handed out in them, tied tensors once, padding not counted.
    """

    def __init__(
        self,
        source: RingSource,
        terms: Terms,
        timeout: float,
        dtype: torch.dtype | None,
        subset: tuple[str, ...] = (),
    ) -> None:
        self.terms = terms
        self.handle: RoundHandle | None = None
        self.result: RoundResult | None = None
        self.batches = 0
        self.nbytes = 0
        self._source = source
        self._timeout = check_timeout("timeout", timeout)
        self._dtype = dtype_name(dtype)
        # All that may be sent, and must be; empty: anything.
        self._subset = frozenset(subset)
        # The thread in whose `with` block it is; None: before and after.
        self._thread: int | None = None
        self._used = False
        # No batch follows.
        self._closed = False
        # The block is being left: nothing more is sent.
        self._leaving = False
        # The call that the broker was asked to void.
        self._void_call = 0
        # One tensor at a time, whichever thread sends it.
        self._sending = threading.Lock()
        # The slot that is being filled.
        self._filling: Filling | None = None
        self._table_bytes = TABLE_BYTES
        # What is registered, and so goes with this round, by name.
        self._registered: dict[str, list[TensorEntry]] = {}
        # What was sent under each name: shape, dtype, boxes.
        self._sent: dict[str, tuple[tuple[int, ...], str, list[Region]]] = {}
        # The batch that each slot was last handed out with: bytes, body, digests.
        self._bodies: dict[int, tuple[int, bytes, list[Proof]]] = {}

    @property
    def version(self) -> int:
        """The version that it is to make."""
        return self.terms.version

    @property
    def active(self) -> bool:
        """Whether its `with` block is being run."""
        return self._thread is not None

    @property
    def mine(self) -> bool:
        """Whether its `with` block is being run by this thread."""
        return self._thread == threading.get_ident()

    @property
    def ended(self) -> bool:
        """Whether the round has ended already, so that nothing that is sent goes anywhere."""
        return self.handle is not None and self.handle.finished.done

    def __repr__(self) -> str:
        state = "active" if self.active else "done" if self._used else "new"
        return f"<RingRound version={self.version} {state} batches={self.batches}>"

    # ------------------------------------------------------------ the block

    def __enter__(self) -> Self:
        if self._used:
            raise ConfigError(f"{self!r} was used before: call open_round() for each round")
        self._used = True
        source, connection = self._source, self._source._connection
        deadline = time.monotonic() + self._timeout
        source._prepare_ring(self, deadline)
        try:
            with connection.mutex:
                source._wait_idle(self.version, deadline)
                source._core.check_open(self.terms)
                former, source._ring_round = source._ring_round, self
                self._thread = threading.get_ident()
            if former is not None:
                former._put_back()
            try:
                source._make_slots()
            except NO_ROOM:
                if not source._ring.slots.live:
                    raise  # With fewer slots it goes on.
            assert connection.welcome is not None
            self._table_bytes = min(TABLE_BYTES, connection.welcome.max_body // 2)
        except BaseException:
            if source._ring_round is self:
                self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._give_up()
                return
            try:
                self._close()
            except BaseException:
                self._give_up()
                raise
            self._leave()
        finally:
            if self._thread is not None:
                # An interrupt has cut that off: others may publish all the same.
                self._thread = None
                if not self._closed:
                    self._void()
        self._wait_for_end()

    def _leave(self, *, void: bool = False) -> None:
        """The block has ended: others may publish; what was being filled is not handed out."""
        source = self._source
        self._leaving = True
        # Another thread may be in `send`: its slot is nobody else's before it has written.
        alone = self._sending.acquire(timeout=self._timeout)
        try:
            with source._connection.acting():
                if void and self.handle is None and source._core.world_size > 1:
                    # Other ranks may have opened it already: they are not left to wait.
                    with suppress(TensorleaseError):
                        source._open_ring(self)
                if void:
                    self._void()
                if alone:
                    source._ring.slots.put_back()
                    self._filling = None
                self._thread = None
                source._connection.notify()
        finally:
            if alone:
                self._sending.release()

    def _put_back(self) -> None:
        """Frees what it was filling when an interrupt cut its end off."""
        if self._sending.acquire(timeout=self._timeout):
            try:
                with self._source._connection.mutex:
                    self._source._ring.slots.put_back()
            finally:
                self._sending.release()

    def _give_up(self) -> None:
        """The round is void: the broker hears so now, or from the next Hello."""
        self._leaving = True
        self._void()  # Whoever waits for a slot need not wait any more.
        self._leave(void=True)

    def _void(self) -> None:
        with self._source._connection.acting():
            handle = self.handle
            if handle is not None and not handle.finished.done and handle.call != self._void_call:
                self._void_call = handle.call
                self._source._core.void(handle.call)

    def _close(self) -> None:
        """Says that no batch follows, with the last one if there is one to hand out."""
        source = self._source
        with self._sending:
            if self.handle is None:
                registered = source._registry.numbers and not self.terms.subset
                if not self._sent and source._core.world_size == 1 and not registered:
                    raise RefusedError(
                        f"nothing was sent for version {self.version}, so the round was not"
                        " opened: send at least one tensor",
                        Code.NO_SOURCE.value,
                    )
                source._open_ring(self)
            if not self.ended and (left := sorted(self._subset - self._sent.keys())):
                raise ExportError(left[0], "is among the names of subset=, and was not sent")
            if self._filling is not None and self._filling.packing.entries:
                self._hand_out(last=True)
                return
            with source._connection.acting():
                self._closed = True
                assert self.handle is not None
                if not self.handle.finished.done:
                    source._core.close(self.handle.call)
                    source._note_if_released(self.handle.call)

    def _wait_for_end(self) -> None:
        assert self.handle is not None
        deadline = time.monotonic() + self._timeout
        self.result = result = self.handle.finished.wait(self._timeout)
        try:
            self._source._wait_released(self.handle, deadline)
        except DeadlineError as error:
            raise UnreleasedError(str(error), result, self.handle) from None

    # ------------------------------------------------------------ sending

    def send(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        tied: Iterable[str] = (),
        dtype: torch.dtype | None = None,
        region: Place | None = None,
    ) -> None:
        """Copies a tensor into the ring; it may be changed or dropped when this returns.

        Any device, strides and dtype; a DTensor's local part, with its region. A name may be sent
        again with another region that does not overlap the first.

        Args:
            name: The tensor's name in the channel.
            tensor: The tensor.
            tied: Other names of the same tensor: one set of bytes, which workers find under each.
            dtype: The floating dtype that it gets in the ring; default: the round's, else its own.
            region: For a plain tensor that is a piece: global shape and start, or `RowBlocks`.

        Raises:
            ExportError: The tensor cannot be sent; names it, why, and the way out. The round goes
                on without it.
            RingFullError: Silent workers keep all slots that there may be; names them.
            DeadlineError: No slot came back in time; names who is missing.
            RefusedError: The broker refuses the round.
            ConfigError: `tied` are no names, or `dtype` is not floating.
            ClosedError: It is not inside the `with` block.
            SharedMemoryError, GpuMemoryError: There is no room to replace the slots that silent workers keep.
        """
        if not isinstance(tied, Iterable):
            raise ConfigError(f"tied {tied!r}: must be names of tensors")
        aliases = (tied,) if isinstance(tied, str) else tuple(tied)
        if dtype is None and region is None and send_again(self, name, tensor, aliases):
            return
        own = dtype_name(dtype)
        with self._sending:
            self._check_active()
            check_tensor_name(name, ExportError)
            placed = place_one(name, tensor, region, ExportError)
            self._source._check_pieces(placed)
            dtypes = [self._check(part, own) for part in placed]
            if self.handle is None and not self.terms.subset:
                with self._source._connection.mutex:
                    self._registered = self._source._registry.carried()
            self._check_names(placed, dtypes, aliases)
            if self.handle is None:
                self._source._open_ring(self)
            self._raise_if_refused()
            for part, kind in zip(placed, dtypes, strict=True):
                self._copy(part, kind, aliases)
            for each in (name, *aliases):
                boxes = self._sent.setdefault(each, (placed[0].shape, dtypes[0], []))[2]
                boxes.extend(part.region for part in placed)
            if own is None and region is None:
                remember(self, placed, dtypes, aliases)

    def send_all(
        self,
        named_tensors: NamedTensors,
        *,
        tied: Mapping[str, Iterable[str]] | None = None,
        regions: Pieces | None = None,
    ) -> None:
        """Sends each; the next is asked for only when there is a slot that it can be written to.

        Once the round has ended, a trainer that is alone asks for no more; the ranks of a group go
        on to the end, since others may wait for them there.

        Args:
            named_tensors: Names and tensors; a generator that makes them one by one, say.
            tied: Other names of a tensor, by its name.
            regions: For plain tensors that are pieces, by name: global shape and start.

        Raises:
            ConfigError: They are no names and tensors.
            ExportError: A name of `tied` or `regions` was not given.

        See `send` for others.
        """
        names, pieces = dict(tied or {}), dict(regions or {})
        alone = self._source._core.world_size == 1
        layout = None if names or pieces else layout_to_send(self, named_tensors)
        if layout is not None and send_by_script(self, layout):
            return
        for name, tensor in self._pairs(named_tensors, alone):
            self.send(name, tensor, tied=names.pop(name, ()), region=pieces.pop(name, None))
            del tensor  # Else it would still be there when the next is made.
        if self.ended and alone:
            return
        if layout is not None:
            note_sent(self, layout)
        for what, left in (("tied", names), ("regions", pieces)):
            for name in left:
                raise ExportError(name, f"is named in {what} but was not given")

    def flush(self) -> None:
        """Hands out what was sent so far, without waiting until a slot is full.

        Raises:
            ClosedError: It is not inside the `with` block.
            DeadlineError: A restarted broker takes no more batches in time; names who is missing.
        """
        with self._sending:
            self._check_active()
            if self._filling is not None and self._filling.packing.entries:
                self._hand_out()

    def _pairs(self, given: object, alone: bool) -> Iterator[tuple[str, torch.Tensor]]:
        given = given.items() if isinstance(given, Mapping) else given
        if not isinstance(given, Iterable) or isinstance(given, torch.Tensor | str):
            raise ConfigError(f"a {type(given).__name__} is no names and tensors")
        items = iter(given)
        while True:
            with self._sending:
                self._check_active()
                may_write = self._take_slot()
            if not may_write and alone:
                return
            try:
                item = next(items)
            except StopIteration:
                return
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise ConfigError(f"{item!r:.80} is no pair of a name and a tensor")
            name, tensor = item
            del item
            yield name, tensor
            del tensor

    def _check_active(self) -> None:
        self._source._check_here()
        if not self.active or self._closed or self._leaving:
            raise ClosedError(
                f"{self!r} is not open: send inside `with trainer.open_round(...) as r:`"
            )

    def _check(self, placed: Placed, own: str | None) -> str:
        """Raises for a tensor that cannot be sent; returns the dtype that it gets."""
        check_sendable(placed)
        return sent_dtype(placed, own, self._dtype)

    def _check_names(self, placed: list[Placed], dtypes: list[str], aliases: Sequence[str]) -> None:
        name = placed[0].name
        for alias in aliases:
            check_tensor_name(alias, ExportError)
        if len({name, *aliases}) <= len(aliases):
            raise ExportError(name, f"is tied to {aliases}, in which a name comes twice")
        for each in (name, *aliases):
            if self._subset and each not in self._subset:
                raise ExportError(each, "is not among the names that the round gave as subset=")
            for entry in self._registered.get(each, ()):
                for part in placed:
                    if entry.shape != part.shape or is_common(entry.box, part.region):
                        raise ExportError(
                            each,
                            "is registered with this trainer, and so is in this round already: do"
                            " not send it, unregister() it, or send it in a round with subset=",
                        )
            if each not in self._sent:
                continue
            shape, dtype, boxes = self._sent[each]
            for part, kind in zip(placed, dtypes, strict=True):
                overlap = any(is_common(box, part.region) for box in boxes)
                if (shape, dtype) != (part.shape, kind) or overlap:
                    raise ExportError(
                        each,
                        "was sent in this round already: send each tensor once, or pieces of one"
                        " shape and dtype that do not overlap",
                    )

    # ------------------------------------------------------------ slots

    def _copy(self, placed: Placed, dtype: str, aliases: Sequence[str]) -> None:
        """Copies a tensor into as many slots as it needs."""
        item = ITEM_SIZES[dtype]
        capacity = self._source._ring.slots.options.slot_bytes
        cost = table_cost(placed.name, aliases, len(placed.shape))
        for box in cut(placed.region.length, item, capacity):
            filling = self._slot_for(box.count * item, cost)
            if filling is None:
                return
            packing = filling.packing
            # First the bytes: what an interrupt cuts off is not in the table.
            try:
                fill(filling.view, packing.offset, placed, box, dtype)
            except RuntimeError as error:  # torch's, who does not know the tensor's name.
                raise ExportError(
                    placed.name, f"could not be copied into a slot of the ring: {error}"
                ) from error
            start = tuple(a + b for a, b in zip(placed.region.start, box.start, strict=True))
            region = Region(start, box.length)
            packing.add(placed.name, dtype, placed.shape, region, aliases, cost)

    def _slot_for(self, nbytes: int, cost: int) -> Filling | None:
        """Returns a slot with room for so many bytes more; None: the round has ended."""
        if self._filling is not None and not self._filling.packing.fits(nbytes, cost):
            self._hand_out()
        return self._filling if self._take_slot() else None

    def _take_slot(self) -> bool:
        """Makes sure that a slot is being filled, waiting for one; False: the round has ended."""
        if self._filling is not None and not self.ended:
            return True
        connection, ring = self._source._connection, self._source._ring
        slots = ring.slots
        deadline = time.monotonic() + self._timeout
        # There is no room for what would replace a stuck slot: others may come back.
        no_room: SharedMemoryError | GpuMemoryError | None = None

        def ready() -> bool:
            if self.ended or slots.free or slots.exhausted:
                return True
            return bool(slots.lacking) if no_room is None else not slots.live

        while self._filling is None or self.ended:
            with connection.mutex:
                connection.wait_until(ready, deadline, self._late)
                if self.ended:
                    self._raise_if_refused()
                    slots.put_back()
                    self._filling = None
                    return False
                self._filling = ring.fill(self._table_bytes, self.batches)
                if self._filling is not None:
                    return True
                if slots.exhausted:
                    raise RingFullError(self.version, slots.status())
                if no_room is not None:
                    raise no_room
            try:
                self._source._make_slots()
            except NO_ROOM as error:
                no_room = error
        return True

    def _hand_out(self, *, last: bool = False) -> None:
        """Hands the slot out as a batch."""
        source, connection = self._source, self._source._connection
        filling, handle = self._filling, self.handle
        assert filling is not None and handle is not None
        number, packing = filling.number, filling.packing
        tags, proofs = None, list[Proof]()
        if self.terms.verify:
            tags, proof = digest_buffer(number, packing.entries, filling.view)
            proofs.append(proof)
        body = filling.body(tags)
        deadline = time.monotonic() + self._timeout
        filling.memory.written()
        with connection.acting():
            # A restarted broker counts stuck leases in its window until it says that they are.
            connection.wait_until(
                lambda: self.ended or not source._core.window_full(handle.call),
                deadline,
                self._late,
            )
            if self.ended:
                self._raise_if_refused()
                source._ring.slots.put_back()
            else:
                seq = source._core.batch(
                    handle.call,
                    [number],
                    registered=False,
                    nbytes=packing.nbytes,
                    body=body,
                    last=last,
                    proofs=proofs,
                )
                source._ring.slots.hand_out(number, handle.call, seq)
                self._bodies[number] = (packing.nbytes, body, proofs)
                self.batches += 1
                self.nbytes += packing.nbytes
            self._closed = self._closed or last
            self._filling = None

    def _raise_if_refused(self) -> None:
        """Raises why the round will never end: it was refused, or the agent was closed."""
        if self.handle is not None and self.handle.finished.done:
            self.handle.finished.wait(0)

    def _late(self, lasted: float) -> DeadlineError:
        waits = "not opened yet" if self.handle is None else self._source._missing(self.handle)
        return DeadlineError(
            f"no slot of the ring came back within {seconds(lasted)}, so that version"
            f" {self.version} could not be sent on: {waits}"
        )

    # ------------------------------------------------------------ from the trainer, under its lock

    def repeat(self, former: int) -> None:
        """The round was opened again under another call: what was handed out is handed out again."""
        assert self.handle is not None
        core, slots = self._source._core, self._source._ring.slots
        for _, number in slots.out_of(former):
            nbytes, body, proofs = self._bodies[number]
            call = self.handle.call
            seq = core.batch(
                call, [number], registered=False, nbytes=nbytes, body=body, proofs=proofs
            )
            slots.renamed(number, call, seq)
        if self._closed:
            core.close(self.handle.call)
