"""What a trainer publishes by its ring: the part of `TrainerAgent` that deals with slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Unpack

import torch

from ..protocol.errors import ConfigError, DeadlineError, RefusedError
from ..protocol.records import Code, Distribution, Terms
from .agent import Agent
from .arguments import RoundOptions, deadline_of, subset_of, terms_of
from .core import Effect
from .errors import ExportError
from .pieces import Pieces
from .placement import NamedTensors, Placed, holds_pieces
from .registry import Registry
from .renewal import renew_missing
from .results import RoundHandle, RoundResult
from .ring import RingStatus, SlotState
from .ring_memory import RingMemory
from .ring_round import RingRound
from .ring_script import Layout, Script
from .sent_before import SentBefore
from .trainer_core import BuffersRetired, LeaseStuck, Released, RetireDenied, TrainerCore
from .waiting import seconds


class RingSource(Agent[TrainerCore]):
    """The ring of a trainer: weights that exist only for a moment go through its slots."""

    _ring: RingMemory
    _registry: Registry
    # The distribution cannot change any more.
    _fixed: bool
    # The last one that was begun.
    _ring_round: RingRound | None = None
    # What was found out about tensors that went through the ring, by name.
    _sent_before: dict[str, SentBefore]
    # How the dictionary lay that was sent last, and how one is sent that is like the one before.
    _last_layout: Layout | None = None
    _script: Script | None = None

    @property
    def ring(self) -> RingStatus:
        """The ring's slots and bytes, as they are now; there are none before the first round."""
        with self._connection.mutex:
            return self._ring.slots.status()

    def open_round(
        self,
        version: int,
        *,
        timeout: float = 120.0,
        dtype: torch.dtype | None = None,
        **options: Unpack[RoundOptions],
    ) -> RingRound:
        """Returns a round whose tensors are sent one by one, in a `with` block.

            with trainer.open_round(version) as r:
                for name, tensor in gathered(model):
                    r.send(name, tensor)
            r.result.raise_for_status()

        The slots of the ring are made at the first round, and kept. What is registered is part of
        the round too, but for a subset, which is what is sent. An earlier round of this trainer is waited for, when the block begins.

        Args:
            version: Higher than all before; the same again serves who is not at it yet.
            timeout: Limit in seconds of each wait: for an earlier round, for a slot, and for the
                end of the round.
            dtype: The dtype that float64, float32, bfloat16 and float16 tensors get in the ring.
            options: See `RoundOptions`. Where the next tensor takes long to make, give `stage_s`: a
                rank that sends nothing for so long fails the round.

        Raises (when the block begins):
            SharedMemoryError, GpuMemoryError: There is no room for the slots; nothing is left behind.
            ConfigError: There are more slots than the broker's window allows.
            RefusedError: The version does not rise, or this thread has a round open already.
            DeadlineError: An earlier round has not ended.
            NoBrokerError: There is no broker.

        Raises (when it ends):
            RefusedError: Nothing was sent.
            UnreleasedError: The round has ended, and a worker that answers still reads.
            DeadlineError: The round has not ended; names who is missing.
        """
        terms, subset = terms_of(version, options), subset_of(options)
        return RingRound(self, terms, timeout, dtype, subset)

    def publish_stream(
        self,
        version: int,
        named_tensors: NamedTensors,
        *,
        timeout: float = 120.0,
        dtype: torch.dtype | None = None,
        tied: Mapping[str, Iterable[str]] | None = None,
        regions: Pieces | None = None,
        **options: Unpack[RoundOptions],
    ) -> RoundResult:
        """Makes a version of tensors that are made one by one: `open_round` and `send_all`.

        The next is asked for only when there is a slot that it can be written to, so that no more
        than one of them and the ring are in memory. What the making of one raises voids the round
        and passes through.

        Args:
            version: See `open_round`, as for timeout, dtype and options.
            named_tensors: Names and tensors of any device, strides and dtype; see `send_all`, as
                for tied and regions.

        Raises:
            See `open_round` and `send`.
        """
        with self.open_round(version, timeout=timeout, dtype=dtype, **options) as r:
            r.send_all(named_tensors, tied=tied, regions=regions)
        assert r.result is not None
        return r.result

    def free_ring(self, timeout: float = 60.0) -> None:
        """Gives the memory of the ring back, until the next ring round makes it anew.

        Waits until no worker has it mapped, at most `timeout` seconds. What silent workers keep,
        stays.

        Raises:
            RefusedError: A ring round is open.
            DeadlineError: Workers have not unmapped it in time; they are asked to all the same.
        """
        self._check_here()
        deadline = deadline_of(timeout)
        with self._connection.mutex:
            slots = self._ring.slots
            if self._ring_round is not None and self._ring_round.active:
                raise RefusedError(
                    f"a ring round is open in {self!r}, version {self._ring_round.version}: end that"
                    " first",
                    Code.BUSY.value,
                )
            if not slots.numbers():
                return
        self._connect(deadline)

        def late(lasted: float) -> DeadlineError:
            left = slots.numbers(SlotState.OUT, SlotState.RETIRING)
            return DeadlineError(
                f"slots {left} of the ring are still read or mapped by workers after"
                f" {seconds(lasted)}; those that are not read are asked back all the same"
            )

        try:
            self._connection.wait_until(lambda: not slots.numbers(SlotState.OUT), deadline, late)
        finally:
            with self._connection.acting():
                if free := self._ring.retire_free():
                    self._core.retire(free)
        self._connection.wait_until(lambda: not slots.numbers(SlotState.RETIRING), deadline, late)

    # ------------------------------------------------------------ for a ring round

    def _wait_idle(self, version: int, deadline: float) -> None:
        """Waits until a round may be opened; see `TrainerAgent`."""
        raise NotImplementedError

    def _fill_shadows(self, version: int) -> None:
        """Copies what has a shadow; see `TrainerAgent`."""
        raise NotImplementedError

    def _open(self, terms: Terms, handle: RoundHandle) -> None:
        """Opens the next round; see `TrainerAgent`."""
        raise NotImplementedError

    def _missing(self, handle: RoundHandle) -> str:
        """Says whom a round waits for; see `TrainerAgent`."""
        raise NotImplementedError

    def _note_if_released(self, call: int) -> None:
        """Reaches `released` if it is so; see `TrainerAgent`."""
        raise NotImplementedError

    def _prepare_ring(self, rnd: RingRound, deadline: float) -> None:
        """Checks all that can be refused before anything is waited for, and connects."""
        self._check_here()
        self._refuse_inside_ring(rnd.version)
        renew_missing(self._registry, self._core, self._connection)
        self._registry.check()
        self._fixed = True
        self._connect(deadline)
        window = self._core.state.window
        count = self._ring.slots.options.num_ipc_handles
        # The registered tensors go as a batch of their own.
        taken = count + bool(self._registry.numbers and not rnd.terms.subset)
        if window and taken > window:
            with_registered = " and one batch of registered tensors" if taken > count else ""
            raise ConfigError(
                f"num_ipc_handles {count}{with_registered} are more than the broker's window of"
                f" {window} unreleased batches: make the ring smaller, or limits.window larger"
            )

    def _refuse_inside_ring(self, version: int) -> None:
        """Raises inside the `with` block of a ring round, which would wait for itself."""
        rnd = self._ring_round
        if rnd is not None and rnd.mine:
            raise RefusedError(
                f"version {version} was not opened: this is inside the `with` block of version"
                f" {rnd.version}; end that first",
                Code.BUSY.value,
            )

    def _make_slots(self) -> None:
        """Makes the slots that are lacking.

        Raises:
            SharedMemoryError, GpuMemoryError: There is no room; nothing is left behind.
        """
        with self._connection.acting():
            if removed := self._ring.retire_missing():
                self._core.retire(removed)
            lacking = self._ring.slots.lacking
        made = self._ring.make(lacking)
        with self._connection.mutex:
            self._ring.add(made)

    def _open_ring(self, rnd: RingRound) -> None:
        """Opens a ring round, with what is registered as its first batch."""
        handle = RoundHandle(self, rnd.version, self._missing, drive=self._connection.drive)
        if self._registry.shadows and not rnd.terms.subset:
            self._fill_shadows(rnd.version)  # Nobody reads them since the block has begun.
        if rnd.terms.verify and self._registry.numbers and not rnd.terms.subset:
            handle.carries = self._registry.digested(())
        with self._connection.acting():
            self._connection.raise_if_broken()
            rnd.handle = handle
            try:
                self._open(rnd.terms, handle)
            except BaseException:
                rnd.handle = None
                raise

    def _begin_batches(self, handle: RoundHandle, former: int) -> bool:
        """Hands out what a ring round begins with; False: it is no ring round. Under the lock.

        `former`: the call that it had before, under which nothing went anywhere.
        """
        rnd = self._ring_round
        if rnd is None or rnd.handle is not handle:
            return False
        if self._registry.numbers and not rnd.terms.subset:
            chosen = handle.carries or self._registry.select(())
            self._core.batch(
                handle.call,
                chosen.buffers,
                registered=True,
                nbytes=chosen.nbytes,
                body=chosen.body,
                proofs=chosen.proofs,
            )
        rnd.repeat(former)
        return True

    def _check_pieces(self, placed: list[Placed]) -> None:
        """Raises `ExportError` for a piece of a trainer that is to have whole tensors."""
        if holds_pieces(placed) and self._core.distribution is Distribution.COLOCATED:
            raise ExportError(
                placed[0].name,
                f"is the piece {placed[0].region} of {placed[0].shape}, and this trainer is"
                " colocated, for which each rank sends whole tensors: make it with"
                " distribution='assembled', or gather the tensor",
            )

    def _wait_released(self, handle: RoundHandle, deadline: float) -> None:
        """Waits until nobody reads the round's batches, but for slots that silent workers keep.

        Raises:
            DeadlineError: Somebody does; names who.
        """

        def released() -> bool:
            call = self._core.state.calls.get(handle.call)
            held = () if call is None else call.held.values()
            return all(lease.stuck and not lease.registered for lease in held)

        self._connection.wait_until(
            released,
            deadline,
            lambda lasted: DeadlineError(
                f"version {handle.version} (call {handle.call}) is not released after"
                f" {seconds(lasted)}: {self._missing(handle)}"
            ),
        )

    # ------------------------------------------------------------ from the connection, under its lock

    def _on_ring_effect(self, effect: Effect) -> None:
        """What the core says of batches and buffers that may be the ring's."""
        match effect:
            case Released(call, seq):
                surplus = self._ring.slots.released(call, seq)
                if surplus is not None:
                    self._core.retire([surplus])
            case LeaseStuck(call, seq, holders):
                self._ring.slots.stuck(call, seq, holders)
            case BuffersRetired(numbers):
                self._ring.gone(numbers)
            case RetireDenied(numbers):
                self._ring.slots.keep(numbers)
            case _:
                pass
