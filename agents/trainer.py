"""The trainer's side: tensors are registered once, versions are published."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from msgspec.structs import replace

from ..protocol.errors import (
    ClosedError,
    DeadlineError,
    RefusedError,
    TensorleaseError,
)
from ..protocol.records import Code, Distribution, ReplicaState, Terms
from .agent import CONNECT_TIMEOUT_S
from .arguments import (
    RoundOptions,
    check_name,
    check_place,
    deadline_of,
    distribution_of,
    from_environment,
    identity,
    launchers_group,
    new_instance,
    subset_of,
    terms_of,
    wanted_replicas,
)
from .control import Control
from .core import Effect
from .describe import describe_call, not_ready, too_few
from .discovery import one_line
from .publisher import Publisher
from .registered import RegisteredSource
from .registry import Registry
from .renewal import renew_missing
from .results import RoundHandle, RoundResult, UnreleasedError
from .ring import RingOptions, require_ring
from .ring_memory import RingMemory
from .ring_source import RingSource
from .subset import Chosen
from .trainer_core import (
    BuffersRetired,
    LeaseStuck,
    MembersChanged,
    Released,
    RetireDenied,
    RoundFinished,
    RoundRefused,
    RoundVoided,
    TrainerCore,
)
from .waiting import seconds

if TYPE_CHECKING:
    import torch

log = logging.getLogger("tensorlease.agents")


class TrainerAgent(RegisteredSource, RingSource, Publisher):
    """One trainer rank of a channel.

        with TrainerAgent("policy") as trainer:
            trainer.register(model.named_parameters())
            for step in range(1, 1000):
                train(model)
                trainer.publish(step)

    It connects at the first `register`, `wait_ready` or `publish`. Every call has a limit, and
    raises before it has changed anything; `NoBrokerError` where no broker is, `RefusedError` where
    the broker refuses, `ClosedError` after `close` or in a forked child.

    Args:
        channel: The stream of versions.
        rank: Its place among the trainers; default from torchrun's environment, else 0.
        world_size: How many there are; default from torchrun's environment, else 1.
        group: What all ranks of one run share; default from torchrun's environment, else the
            broker gathers them.
        endpoint: The broker's address; default `$TENSORLEASE_ENDPOINT`, else the user's runtime
            directory, else the system's.
        device: Where it is; workers at the same are beside it. A GPU by its number here ("cuda:0")
            or its UUID; or any label ("cpu:1").
        distribution: "colocated" or "assembled"; default: assembled if a tensor of the first
            registration is a piece.
        connect_timeout: How long a call waits for a broker, in seconds.
        shm_dir: Where segments are made; default `$TENSORLEASE_SHM_DIR`, else /dev/shm. Workers
            must use the same.
        ring: How many slots `open_round` has, and of how many bytes.

    Raises:
        ConfigError: An argument that cannot work.
    """

    def __init__(
        self,
        channel: str = "default",
        *,
        rank: int | None = None,
        world_size: int | None = None,
        group: str | None = None,
        endpoint: str | None = None,
        device: str | torch.device = "cpu:0",
        distribution: Distribution | str | None = None,
        connect_timeout: float = CONNECT_TIMEOUT_S,
        shm_dir: str | os.PathLike[str] | None = None,
        ring: RingOptions | None = None,
    ) -> None:
        rank = from_environment("RANK", 0) if rank is None else rank
        world_size = from_environment("WORLD_SIZE", 1) if world_size is None else world_size
        rank, world_size = check_place("rank", rank, world_size, "world size")
        group = launchers_group(os.environ) if group is None else group
        if group != "":
            check_name("group", group)
        require_ring(ring)
        me = identity(channel, new_instance(), device)
        chosen = distribution_of(distribution)
        core = TrainerCore(me, rank, world_size, group, chosen or Distribution.COLOCATED)
        # The session has begun, or the user has chosen: the distribution cannot change any more.
        self._fixed = chosen is not None
        self._registry = Registry(me.instance, None if shm_dir is None else Path(shm_dir), core.via)
        self._sent_before = {}
        self._ring = RingMemory(ring or RingOptions(), self._registry.allocate)
        self._handles: dict[int, RoundHandle] = {}
        # Calls whose Void was answered, and whether the round had been decided before.
        self._voided: dict[int, bool] = {}
        # The broker's list of replicas is at least as new as the last offer.
        self._members_known = False
        super().__init__(core, endpoint, connect_timeout)

    # ------------------------------------------------------------ what it knows

    @property
    def rank(self) -> int:
        """Its place among the trainers of the channel."""
        return self._core.rank

    @property
    def world_size(self) -> int:
        """How many trainers the channel has."""
        return self._core.world_size

    @property
    def group(self) -> str:
        """The group's id; empty until the broker has named it."""
        return self._core.state.group

    @property
    def distribution(self) -> Distribution:
        """Which trainers' batches a worker takes."""
        return self._core.distribution

    @property
    def last_version(self) -> int:
        """The last version that a replica committed, as far as this rank has heard; 0: none."""
        return self._core.state.last_version

    @property
    def replicas(self) -> dict[str, ReplicaState]:
        """The channel's replicas by name, as the broker last told."""
        return {state.replica: state for state in self._core.state.replicas}

    def __repr__(self) -> str:
        core = self._core
        return (
            f"<TrainerAgent {core.me.instance} channel={core.me.channel!r}"
            f" rank={core.rank}/{core.world_size}>"
        )

    # ------------------------------------------------------------ rounds

    def wait_ready(
        self, replicas: int | Collection[str] = 1, timeout: float = 60.0
    ) -> dict[str, ReplicaState]:
        """Waits until so many replicas are complete and have a source for all that they want.

        Returns them all by name, after at most `timeout` seconds.

        Args:
            replicas: How many; or the names of those that have to be.
            timeout: Limit in seconds.

        Raises:
            ConfigError: The number is none.
            DeadlineError: They are not, in time; names each and what it lacks.
        """
        self._check_here()
        least, names = wanted_replicas(replicas)
        deadline = deadline_of(timeout)
        self._fixed = True
        self._connect(deadline)

        def ready() -> bool:
            found = {state.replica for state in self._core.state.replicas if state.ready}
            return self._members_known and len(found) >= least and names <= found

        def late(lasted: float) -> DeadlineError:
            states, of = self._core.state.replicas, f"of channel {self.channel!r}"
            after = f"after {seconds(lasted)}"
            if names:
                return DeadlineError(not_ready(states, names, of, after))
            return DeadlineError(too_few(states, least, of, after))

        self._connection.wait_until(ready, deadline, late)
        return self.replicas

    def publish(
        self,
        version: int,
        *,
        timeout: float = 120.0,
        control: Control | None = None,
        **options: Unpack[RoundOptions],
    ) -> RoundResult:
        """Makes a version: waits until the round has ended, and released what it carries.

        The tensors may then be written again, unless a silent worker still keeps them for an
        earlier version, whose `publish` has raised `UnreleasedError`: ask `wait_writable`.
        An earlier round of this trainer is waited for first. The result says what became of each
        replica; `raise_for_status()` makes an error of what did not commit.

        Args:
            version: Higher than all before; the same again serves who is not at it yet.
            timeout: Limit of this call in seconds; the round itself goes on after it.
            control: Leads engines through the round; it is waited for. On one rank.
            options: See `RoundOptions`.

        Raises:
            RefusedError: Nothing is registered, the version does not rise, or the broker refuses.
            ExportError: A registered tensor does not lie where it was registered any more.
            UnreleasedError: The round has ended, and a worker still keeps its memory.
            DeadlineError: The limit has passed; names who is missing.
        """
        deadline = deadline_of(timeout)
        terms, subset = terms_of(version, options), subset_of(options)
        if control is not None:
            self._check_publish(terms.version, subset)
            control.wait_ready(self, max(0.0, deadline - time.monotonic()))
        handle = self._publish(terms, deadline, subset)
        result = handle.finished.wait(max(0.0, deadline - time.monotonic()))
        try:
            handle.released.wait(max(0.0, deadline - time.monotonic()))
        except DeadlineError as error:
            raise UnreleasedError(str(error), result, handle) from None
        return result

    async def apublish(
        self,
        version: int,
        *,
        timeout: float = 120.0,  # noqa: ASYNC109 - as publish has it
        control: Control | None = None,
        **options: Unpack[RoundOptions],
    ) -> RoundResult:
        """As `publish`, without blocking the event loop."""
        import asyncio

        deadline = deadline_of(timeout)
        terms = terms_of(version, options)
        subset = subset_of(options)
        self._check_publish(version, subset)
        if control is not None:
            left = max(0.0, deadline - time.monotonic())
            await asyncio.to_thread(control.wait_ready, self, left)
        await self._aconnect(deadline)
        with self._having_turn():
            await self._connection.await_until(
                self._is_idle, deadline, lambda lasted: self._still_busy(terms.version, lasted)
            )
            if not self._registry.shadows and not terms.verify:
                handle = self._hand_out(terms, subset)
            else:
                filling = asyncio.to_thread(self._publish, terms, deadline, subset)
                handle = await asyncio.shield(filling)
        result = await handle.finished.wait_async(max(0.0, deadline - time.monotonic()))
        try:
            await handle.released.wait_async(max(0.0, deadline - time.monotonic()))
        except DeadlineError as error:
            raise UnreleasedError(str(error), result, handle) from None
        return result

    def close(self, timeout: float = 10.0) -> None:
        """Ends the agent: waits for its rounds and leases, says goodbye, removes its segments.

        Rounds that have not ended within `timeout` seconds fail: workers are told that the trainer
        has left. The goodbye may take two seconds more, if the broker is slow to answer. The tensors
        keep their values. May be called from any thread, a second call waits for the first; does
        nothing in a forked child.
        """
        self._close(deadline_of(timeout))

    # ------------------------------------------------------------ inside

    def _wait_idle(self, version: int, deadline: float) -> None:
        with self._having_turn():
            self._connection.wait_until(
                self._is_idle, deadline, lambda lasted: self._still_busy(version, lasted)
            )

    def _check_publish(self, version: int, subset: tuple[str, ...]) -> None:
        """What can be refused here is not sent."""
        self._check_here()
        self._refuse_inside_ring(version)
        renew_missing(self._registry, self._core, self._connection)
        if not self._registry.numbers:
            raise RefusedError(
                "nothing is registered with this trainer, so there is nothing to publish: call"
                " register() first",
                Code.NO_SOURCE.value,
            )
        self._registry.check()
        self._registry.select(subset)

    def _is_idle(self) -> bool:
        """Whether no round is under way, and nobody reads a shadow any more, which is filled."""
        if self._ring_round is not None and self._ring_round.active:
            return False
        return (
            not self._registry.filling
            and all(call.ended for call in self._core.state.calls.values())
            and not self._core.leased(self._registry.shadows)
        )

    def _fill_shadows(self, version: int) -> None:
        """Copies what has a shadow; nobody reads these, or begins a round, meanwhile.

        Who is not yet at a version that others have gets what these have got.
        """
        with self._connection.mutex:
            if self._registry.filled == version == self.last_version:
                return
            # They may soon be those of a version that is never published.
            self._span.changed()
            self._registry.filled = 0
        self._registry.fill()
        with self._connection.mutex:
            self._registry.filled = version

    def _still_busy(self, version: int, lasted: float) -> DeadlineError:
        return DeadlineError(
            f"version {version} was not opened: an earlier round has not ended after"
            f" {seconds(lasted)} ({self._under_way()})"
        )

    def _under_way(self) -> str:
        """Names the rounds that have not ended, and whom they wait for."""
        under_way = [call for call in self._core.state.calls.values() if not call.ended]
        under_way += [call for call in self._core.leased(self._registry.shadows) if call.ended]
        handles = [self._handles.get(call.call) for call in under_way]
        texts = [
            f"version {handle.version}: {self._missing(handle)}" for handle in handles if handle
        ]
        if self._ring_round is not None and self._ring_round.active:
            texts.append(f"version {self._ring_round.version}: is being sent by another thread")
        if self._registry.filling:
            texts.append("another thread publishes")
        return "; ".join(texts)

    def _hand_out(
        self, terms: Terms, subset: tuple[str, ...], carries: Chosen | None = None
    ) -> RoundHandle:
        handle = RoundHandle(
            self, terms.version, self._missing, subset, carries, self._connection.drive
        )
        self._registry.written()
        with self._connection.acting():
            self._connection.raise_if_broken()
            self._open(terms, handle)
            self._note_published(terms, handle)
        return handle

    def _open(self, terms: Terms, handle: RoundHandle) -> None:
        """Opens the next round with what is registered; called under the lock."""
        chosen = handle.carries or self._registry.select(handle.subset)
        if terms.subset and not terms.base:
            terms = replace(terms, base=self._last_version_below(terms.version))
        former, handle.call = handle.call, self._core.open(terms)
        for call in [call for call in self._handles if call not in self._core.state.calls]:
            gone = self._handles.pop(call)
            self._voided.pop(call, None)
            if gone.call == call:  # Else it was opened again, under another one.
                gone.forget()
        self._handles[handle.call] = handle
        if self._begin_batches(handle, former):
            return
        self._core.batch(
            handle.call,
            chosen.buffers,
            registered=chosen.registered,
            nbytes=chosen.nbytes,
            body=chosen.body,
            last=True,
            proofs=chosen.proofs,
        )

    def _last_version_below(self, version: int) -> int:
        if not 0 < self.last_version < version:
            raise RefusedError(
                f"a subset of version {version} has no base: the channel's last version is"
                f" {self.last_version or 'none'}; publish all tensors first, or name a base=",
                Code.NOT_AT_BASE.value,
            )
        return self.last_version

    def _missing(self, handle: RoundHandle) -> str:
        """Says whom a round waits for, as far as a trainer can know."""
        with self._connection.mutex:
            if not self._core.connected:
                return f"no broker: {one_line(self._connection.unreachable())}"
            core = self._core
            call = core.state.calls.get(handle.call)
            return describe_call(call, handle, core.state.replicas, core.world_size)

    def _close(self, deadline: float) -> None:
        with self._closing_once(deadline) as closing:
            if not closing:
                return
            try:
                self._connection.wait_until(self._is_drained, deadline, self._not_drained)
            except DeadlineError as error:
                # What is left is told that the trainer has gone.
                log.warning("%r: %s", self, error)
            except TensorleaseError:
                pass  # Broken: said before.
            finally:
                try:
                    self._goodbye(deadline)
                finally:
                    self._give_back()

    def _give_back(self) -> None:
        """Nobody can ask for its memory any more."""
        with self._connection.mutex:
            registered = self._registry.close()
            self._ring.close()
        for buffers in registered:
            buffers.close()
        self._snapshot.close()
        self._drop_guards()

    def _is_drained(self) -> bool:
        calls = self._core.state.calls.values()
        return all(call.ended and (call.released or call.voided) for call in calls)

    def _not_drained(self, lasted: float) -> DeadlineError:
        calls = self._core.state.calls.values()
        texts = [
            f"version {handle.version}: {self._missing(handle)}"
            for handle in (self._handles.get(call.call) for call in calls)
            if handle is not None and not handle.over
        ]
        return DeadlineError(
            f"its rounds have not ended {seconds(lasted)} after close(): {'; '.join(texts)}"
        )

    def _close_at_exit(self, deadline: float) -> None:
        self._close(deadline)

    # ------------------------------------------------------------ from the connection, under its lock

    def on_effect(self, effect: Effect) -> None:
        """See `connection.Owner`."""
        self._on_ring_effect(effect)
        match effect:
            case Released(call, seq):
                if (handle := self._handles.get(call)) is not None:
                    handle.note_released(seq)
                self._note_if_released(call)
            case RoundFinished(call, result):
                if (handle := self._handles.get(call)) is not None:
                    handle.finished.reach(RoundResult(result))
                self._note_if_released(call)
            case RoundRefused(call, code, text):
                self._on_refused(call, code, text)
            case LeaseStuck(call, seq, holders):
                if (handle := self._handles.get(call)) is not None:
                    handle.note_stuck(seq, holders)
            case RoundVoided(call, decided):
                self._voided[call] = decided
            case MembersChanged(_, known):
                self._members_known = known
            case BuffersRetired(numbers):
                self._registry.retired(numbers)
            case RetireDenied(numbers, text):
                self._registry.denied(numbers, text)
            case _:
                pass
        super().on_effect(effect)

    def _note_if_released(self, call: int) -> None:
        handle, entry = self._handles.get(call), self._core.state.calls.get(call)
        if handle is not None and entry is not None and entry.complete and entry.released:
            handle.released.reach(None)

    def _on_refused(self, call: int, code: Code, text: str) -> None:
        handle = self._handles.get(call)
        if handle is None:
            return
        error = RefusedError(text, code.value)
        if code is Code.CALL_ENDED:
            # Another life of this rank, or a broker that knows more, has counted further.
            try:
                self._open(self._core.state.calls[call].terms, handle)
                return
            except RefusedError as refused:
                error = refused
        self._ring.slots.came_back(call)
        handle.fail(error)

    def on_broken(self, error: TensorleaseError) -> None:
        """See `connection.Owner`."""
        if isinstance(error, ClosedError):
            error = ClosedError(f"{self!r} was closed before the round had ended")
        for handle in self._handles.values():
            handle.fail(error)
