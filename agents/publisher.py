"""Publishing without waiting: what becomes of stragglers, and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Unpack

from ..protocol.errors import RefusedError
from ..protocol.records import Code, Terms
from .arguments import (
    RoundOptions,
    Stragglers,
    deadline_of,
    options_of,
    stragglers_of,
    subset_of,
    terms_of,
)
from .fence import Fenced
from .results import RoundHandle, SkippedError
from .snapshot import Snapshot
from .subset import Chosen
from .trainer_core import TrainerCore
from .verifying import with_digests
from .waiting import seconds


class Publisher(Fenced):
    """The part of a trainer that hands rounds out."""

    def __init__(self, core: TrainerCore, endpoint: str | None, connect_timeout: float) -> None:
        self._snapshot = Snapshot(self._registry.allocate, self._registry.number)
        super().__init__(core, endpoint, connect_timeout)

    def publish_nowait(
        self,
        version: int,
        *,
        stragglers: Stragglers | str = Stragglers.WAIT,
        quorum: int | None = None,
        snapshot: bool = False,
        timeout: float = 120.0,
        **options: Unpack[RoundOptions],
    ) -> RoundHandle:
        """As `publish`, but returns as soon as the round was handed out.

        The tensors must not be written before `handle.released`, which a guarded step waits for;
        with `snapshot` they may be written at once.

        Args:
            version: Higher than all before; the same again serves who is not at it yet.
            stragglers: What is done about replicas that are late. "wait": an earlier round of this
                trainer is waited for, and replicas that are busy as well (up to `open_s`). "skip":
                while an earlier round is under way nothing is published (`handle.skipped`), and
                replicas that are busy are left out: they get the next version. "fail": an earlier
                round is refused at once, naming whom it waits for, and the round is strict.
            quorum: With fewer replicas the round fails: another name of `min_replicas`.
            snapshot: Copies all that is registered into shared memory of its own (as large again,
                kept until `close`) and publishes that. A former snapshot is waited for first.
            timeout: Limit in seconds of the waiting before the round is handed out.
            options: See `RoundOptions`.

        Raises:
            ConfigError: Options that contradict each other; "skip" with several ranks.
            RefusedError: As `publish`; with "fail" also an earlier round (`code` is "busy").
            ExportError: A registered tensor does not lie where it was registered any more.
            SharedMemoryError: There is no room for a snapshot.
            StillLeasedError: A worker still reads the former snapshot.
            DeadlineError: The limit has passed; names who is missing.
        """
        chosen = stragglers_of(stragglers, self._core.world_size)
        terms = terms_of(version, options_of(chosen, quorum, options))
        subset = subset_of(options)
        return self._publish(terms, deadline_of(timeout), subset, chosen, snapshot=snapshot)

    def _publish(
        self,
        terms: Terms,
        deadline: float,
        subset: tuple[str, ...],
        stragglers: Stragglers = Stragglers.WAIT,
        *,
        snapshot: bool = False,
    ) -> RoundHandle:
        self._check_publish(terms.version, subset)
        self._connect(deadline)
        with self._having_turn():
            if snapshot:
                with self._snapshot.lone(deadline):
                    return self._publish_snapshot(terms, deadline, subset, stragglers)
            with self._filling() as begin:
                # Under one lock, else another thread's round may begin in between.
                with self._connection.mutex:
                    skipped = self._take_turn(terms, deadline, stragglers, [])
                    if skipped is not None or not (self._registry.shadows or terms.verify):
                        return skipped or self._hand_out(terms, subset)
                    begin()
                # Without the lock: this may take seconds, and the agent has to beat.
                if self._registry.shadows:
                    self._fill_shadows(terms.version)
                carries = self._registry.digested(subset) if terms.verify else None
                return self._hand_out(terms, subset, carries)

    def _publish_snapshot(
        self, terms: Terms, deadline: float, subset: tuple[str, ...], stragglers: Stragglers
    ) -> RoundHandle:
        with self._filling() as begin:
            with self._connection.mutex:
                skipped = self._take_turn(terms, deadline, stragglers, self._snapshot.buffers)
                registered = self._registry.all()
                if skipped is not None:
                    return skipped
                if shadows := bool(self._registry.shadows):
                    begin()
            # Without the lock: this may take seconds, and the agent has to beat.
            if shadows:
                self._fill_shadows(terms.version)
            if not self._snapshot.fits(registered):
                if former := self._snapshot.free():
                    with self._connection.acting():
                        self._core.retire(former)
                self._snapshot.make(registered, self._max_body())
            taken = self._snapshot.take(subset)
            if terms.verify:
                taken = with_digests(taken, self._snapshot.exports())
        with self._connection.mutex:
            skipped = self._take_turn(terms, deadline, stragglers, [])
            return skipped or self._hand_out(terms, subset, taken)

    @contextmanager
    def _filling(self) -> Iterator[Callable[[], None]]:
        """Gives what begins `Registry.filling`, under the lock; it ends with the block.

        Wherever an interrupt cuts in: else nobody could publish any more.
        """
        mine = False

        def begin() -> None:
            nonlocal mine
            mine = self._registry.filling = True

        try:
            yield begin
        finally:
            if mine:
                with self._connection.mutex:
                    self._registry.filling = False
                    self._connection.notify()

    def _take_turn(
        self, terms: Terms, deadline: float, stragglers: Stragglers, buffers: list[int]
    ) -> RoundHandle | None:
        """Waits until no round is under way and nobody reads the buffers; under the lock.

        Returns:
            None; or, where that is not waited for, the handle of what was skipped.
        """

        def free() -> bool:
            return self._is_idle() and not self._core.leased(buffers)

        if stragglers is not Stragglers.WAIT and not free():
            reason = self._what_is_under_way(buffers)
            if stragglers is Stragglers.SKIP:
                return self._skip(terms, reason)
            raise RefusedError(
                f"version {terms.version} was not published: {reason}", Code.BUSY.value
            )
        self._wait_idle(terms.version, deadline)
        self._connection.wait_until(
            free,
            deadline,
            lambda lasted: self._still_leased(
                buffers,
                f"version {terms.version} was not published within {seconds(lasted)}: of the former"
                " snapshot",
            ),
        )
        return None

    def _skip(self, terms: Terms, reason: str) -> RoundHandle:
        handle = RoundHandle(self, terms.version, self._missing, drive=self._connection.drive)
        text = f"version {terms.version} was skipped: {reason}; a later version reaches all"
        handle.skip(SkippedError(text, terms.version))
        # The weights are those of a version that was never published.
        self._span.changed()
        return handle

    def _what_is_under_way(self, buffers: list[int]) -> str:
        texts = [] if self._is_idle() else [f"an earlier round is under way: {self._under_way()}"]
        texts += [
            f"version {call.terms.version} (call {call.call}) {self._reads(call)}"
            for call in self._core.leased(buffers)
            if call.ended
        ]
        return "; ".join(texts)

    # ------------------------------------------------------------ what the trainer does

    def _check_publish(self, version: int, subset: tuple[str, ...]) -> None:
        raise NotImplementedError

    def _wait_idle(self, version: int, deadline: float) -> None:
        raise NotImplementedError

    def _fill_shadows(self, version: int) -> None:
        raise NotImplementedError

    def _max_body(self) -> int:
        raise NotImplementedError

    def _under_way(self) -> str:
        raise NotImplementedError

    def _hand_out(
        self, terms: Terms, subset: tuple[str, ...], carries: Chosen | None = None
    ) -> RoundHandle:
        raise NotImplementedError
