"""What a trainer registers and takes back: the part of `TrainerAgent` that deals with buffers."""

from __future__ import annotations

import math

import torch

from ..protocol.errors import ConfigError, DeadlineError
from ..protocol.records import Distribution
from .agent import Agent
from .arguments import deadline_of
from .errors import ExportError
from .pieces import Pieces
from .placement import NamedTensors, holds_pieces, pairs_of, place
from .registry import Registry
from .shadow import Dtypes
from .sharing import Share, ways_of
from .source import RegisteredBuffers
from .trainer_core import TrainerCore
from .unmoved import HeldModel
from .waiting import seconds


class RegisteredSource(Agent[TrainerCore]):
    """The registered tensors of a trainer, which every round carries."""

    _registry: Registry
    # The distribution cannot change any more.
    _fixed: bool
    # The broker's list of replicas is at least as new as the last offer.
    _members_known: bool

    def register(
        self,
        named_tensors: NamedTensors,
        regions: Pieces | None = None,
        *,
        dtype: Dtypes | None = None,
        shadow: bool = False,
        share: Share | str | None = None,
    ) -> RegisteredBuffers:
        """Moves the tensors' storages into shared memory, once, and offers them to all workers.

        Every tensor goes on being the same object with the same values; write to it in place. May
        be called again with other tensors, or other pieces of them; each round carries all that is registered.

        With `dtype` or `shadow` the tensors stay where they are, on any device and in any layout:
        each publish copies them into shadows in shared memory before it hands anything out, and
        they may be written again as soon as `publish_nowait` has returned.

        Args:
            named_tensors: A model, or names and tensors; DTensors say their region themselves. That
                a model has been given another parameter is noticed at each publish.
            regions: For plain tensors that are pieces: global shape and start, or `RowBlocks`.
            dtype: What workers are to get: a dtype, or a dict or a function of names, of which
                what is lacking (None) keeps its own. Floating becomes floating, complex complex,
                an integer one that holds all its values.
            shadow: Copies also without another dtype.
            share: How tensors of a GPU are handed over: "ipc" (where they are), "staging" (by a
                copy on their GPU), "shm" (by a copy in shared memory), or "auto": the first of
                these that works, as the log says. Copies are made at each publish, then of all
                tensors of this call. Default: "ipc", or "shm" with `dtype` or `shadow`.

        Raises:
            ExportError: A tensor cannot be registered; names it, why, and the way out.
            ConfigError: None were given, a `share` that cannot work, pieces to a colocated trainer, or a table that is larger
                than the broker takes.
            SharedMemoryError, GpuMemoryError: There is not enough room; names the tensors.
            NoBrokerError, RefusedError: See the class. Nothing was moved.
        """
        self._check_here()
        # Read twice: an iterator would be empty the second time.
        ways_of(share, shadow or dtype is not None)  # Refused before anything else is done.
        pairs = pairs_of(named_tensors)
        placed = place(pairs, regions, ExportError)
        if not placed:
            raise ConfigError(
                f"no tensors were given to register with {self!r}: give a model, or a dict of names and"
                " tensors"
            )
        with self._connection.mutex:
            self._registry.require_new(placed)
        self._fix_distribution(holds_pieces(placed))
        self._connect(math.inf)
        buffers, body = self._registry.move(
            pairs, regions, dtype, shadow, share, placed, self._max_body()
        )
        if isinstance(named_tensors, torch.nn.Module):
            buffers.model = HeldModel(named_tensors)
        with self._connection.acting():
            # Closed meanwhile, by another thread: nobody else would close these.
            if not self._closing:
                number = self._registry.add(buffers)
                self._members_known = False
                self._core.offer(number, buffers.numbers, buffers.nbytes, body)
        if self._closing:
            buffers.close()
            self._check_here()
        return buffers

    def unregister(self, buffers: RegisteredBuffers | None = None, timeout: float = 60.0) -> None:
        """Takes registered tensors back: waits until no worker has them mapped any more.

        The tensors keep their values. They are part of no round from the call on, unless a round
        still holds them; where it ends early, it may be called again to wait on.

        Args:
            buffers: What `register` returned; default: everything.
            timeout: Limit in seconds.

        Raises:
            ConfigError: They are not registered with this trainer.
            RefusedError: A round still holds them.
            DeadlineError: A worker has not unmapped them in time; it is asked to all the same.
        """
        self._check_here()
        deadline = deadline_of(timeout)
        with self._connection.mutex:
            chosen = self._registry.find(buffers)
        if buffers is not None and not chosen:
            raise ConfigError(
                f"these buffers ({', '.join(buffers.names[:3])} ...) are not registered with {self!r}:"
                " they were taken back already, or belong to another trainer"
            )
        wanted = {number for of in chosen.values() for number in of.numbers}
        if not wanted:
            return
        self._connect(deadline)
        with self._connection.acting():
            self._registry.ask_back(wanted)
            self._core.retire(sorted(wanted))
        self._connection.wait_until(
            lambda: not self._registry.mapped(wanted),
            deadline,
            lambda lasted: DeadlineError(
                f"buffers {sorted(self._registry.mapped(wanted))} are still mapped by workers after"
                f" {seconds(lasted)}; they are asked to unmap them all the same"
            ),
        )
        with self._connection.mutex:
            self._registry.remove(chosen)
        for of in chosen.values():
            of.close()

    def _max_body(self) -> int:
        welcome = self._connection.welcome
        assert welcome is not None
        return welcome.max_body

    def _fix_distribution(self, pieces: bool) -> None:
        """Chooses the distribution by the first registration; later ones must fit it."""
        if not self._fixed:
            with self._connection.mutex:
                self._core.distribution = (
                    Distribution.ASSEMBLED if pieces else Distribution.COLOCATED
                )
            self._fixed = True
        elif pieces and self._core.distribution is Distribution.COLOCATED:
            raise ConfigError(
                "these tensors are pieces, and this trainer is colocated, for which each rank holds"
                " whole tensors: make it with distribution='assembled'"
            )
