"""What a trainer has registered: its buffers by offer, and which of them are on their way back."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from ..protocol.errors import ConfigError, RefusedError
from ..protocol.records import Code
from ..protocol.regions import is_common
from ..protocol.tables import OfferBody, TensorEntry, encode_body
from .errors import ExportError, GpuMemoryError, NotSharedError
from .memory import ExportedMemory, MemoryKind
from .pieces import Pieces
from .placement import NamedTensors, Placed
from .shadow import Dtypes, register_shadow
from .sharing import Share, way_of, ways_of
from .shm import ShmMemory
from .source import RegisteredBuffers, register
from .subset import Chosen, select
from .verifying import with_digests

if TYPE_CHECKING:
    from .cuda import CudaMemory

log = logging.getLogger("tensorlease.agents")


class Registry:
    """The registered buffers of one trainer.

    All but `move`, `fill`, `digested`, `allocate`, `renewing` and `renew` is called under its
    connection's lock.

    Args:
        instance: The trainer's instance.
        directory: Where its segments are made; None: the default.
        via: Filled with how the bytes of each buffer travel.
    """

    def __init__(self, instance: str, directory: Path | None, via: dict[int, str]) -> None:
        self._via = via
        self._instance = instance
        self._directory = directory
        # Made when it is needed: that removes what dead trainers left.
        self._memory: ShmMemory | None = None
        self._gpu: CudaMemory | None = None
        self._buffer_numbers = itertools.count()
        self._offer_numbers = itertools.count()
        self._offers: dict[int, RegisteredBuffers] = {}
        # All buffers of all offers: what each round's batch names; and their bytes.
        self.numbers: list[int] = []
        self.nbytes = 0
        # Those of them in which the trainer's tensors lie, and those that are shadows.
        self.exposed: list[int] = []
        self.shadows: list[int] = []
        # Somebody publishes: shadows are being filled, and no round has begun yet.
        self.filling = False
        # The version that all shadows hold; 0: none.
        self.filled = 0
        # Buffers that nobody has mapped any more, and those that a round still holds, with why.
        self._retired: set[int] = set()
        self._denied: dict[int, str] = {}
        # Offers that the broker was asked to take back, and has not refused to: no round names
        # them any more, also where nobody waited for the answer.
        self._leaving: set[int] = set()
        # Buffers whose memory was removed by something else, or that were closed, until the broker
        # has taken them back.
        self.former: set[int] = set()
        self._renewing = Lock()

    def move(
        self,
        pairs: NamedTensors,
        regions: Pieces | None,
        dtype: Dtypes | None,
        shadow: bool,
        share: Share | str | None,
        placed: Iterable[Placed],
        max_body: int,
    ) -> tuple[RegisteredBuffers, bytes]:
        """Moves tensors into shared memory, or makes shadows; see `source`, `shadow`, `sharing`.

        Returns them, and the body of their offer, of at most `max_body` bytes.
        """
        copies = shadow or dtype is not None
        ways = ways_of(share, copies)
        if not _any_of_gpu(placed):
            ways = ways_of(None, copies)
        buffers = self._by_one_of(ways, pairs, regions, dtype)
        self._note_via(buffers)
        body = encode_body(OfferBody(buffers.buffers))
        if len(body) > max_body:
            buffers.close()
            raise ConfigError(
                f"the table of {len(buffers.names)} tensors has {len(body)} bytes, the broker's"
                f" limits.max-body-bytes is {max_body}: register them in several calls, or raise it"
            )
        return buffers, body

    def _by_one_of(
        self, ways: list[Share], pairs: NamedTensors, regions: Pieces | None, dtype: Dtypes | None
    ) -> RegisteredBuffers:
        """Registers by the first way that works; says which, and why not by the ones before."""
        reasons: list[str] = []
        while True:
            way = ways[len(reasons)]
            try:
                buffers = self._by(way, pairs, regions, dtype)
            except (NotSharedError, GpuMemoryError) as error:
                reasons.append(str(error))
                if len(reasons) == len(ways):
                    raise
                continue
            if reasons:
                log.warning(
                    "tensors of a GPU go by %s (share=%r says how): %s",
                    ", ".join(buffers.via),
                    way.value,
                    "; ".join(reasons),
                )
            return buffers

    def _by(
        self, way: Share, pairs: NamedTensors, regions: Pieces | None, dtype: Dtypes | None
    ) -> RegisteredBuffers:
        memory, numbers = self._kind(), self._buffer_numbers
        if way is Share.IPC:
            return register(
                pairs, memory=memory, numbers=numbers, regions=regions, gpu=self._gpu_kind
            )
        return register_shadow(
            pairs,
            memory=memory,
            numbers=numbers,
            regions=regions,
            dtype=dtype,
            beside=self._staging_kind if way is Share.STAGING else None,
        )

    def fill(self) -> None:
        """Copies the tensors that have shadows into them; nobody may read these meanwhile.

        Raises:
            ExportError: One of the tensors cannot be copied any more.
        """
        for buffers in list(self._offers.values()):
            buffers.fill()

    def allocate(self, nbytes: int, ordinal: int | None = None) -> tuple[int, ExportedMemory]:
        """Makes memory for a buffer that is part of no offer; returns its number too.

        Args:
            nbytes: Its size.
            ordinal: The GPU that it is to lie on; None: shared memory.

        Raises:
            SharedMemoryError, GpuMemoryError: There is not enough room.
        """
        number = next(self._buffer_numbers)
        if ordinal is None:
            memory: ExportedMemory = self._kind().allocate(nbytes, number)
        else:
            memory = self._of_gpu(nbytes, number, ordinal)
        self._via[number] = way_of(memory.handle, copied=False)
        return number, memory

    def _of_gpu(self, nbytes: int, number: int, ordinal: int) -> ExportedMemory:
        """Makes memory of a GPU: of torch's, or where that cannot be shared, of the driver's."""
        try:
            return self._gpu_kind().allocate(nbytes, number, ordinal)
        except GpuMemoryError as error:
            try:
                return self._staging_kind(ordinal).allocate(nbytes, number)
            except GpuMemoryError:
                raise error from None

    def number(self) -> int:
        """Returns the number of a new buffer that has no memory."""
        return next(self._buffer_numbers)

    def _kind(self) -> ShmMemory:
        if self._memory is None:
            self._memory = ShmMemory(self._instance, self._directory)
        return self._memory

    def _gpu_kind(self) -> CudaMemory:
        from .cuda import CudaMemory

        if self._gpu is None:
            self._gpu = CudaMemory(self._instance)
        return self._gpu

    def _staging_kind(self, ordinal: int) -> MemoryKind:
        from .staging import StagingMemory

        return StagingMemory(self._gpu_kind(), ordinal)

    def written(self) -> None:
        """What this thread's streams were told so far is part of what workers read next."""
        if self._gpu is not None:
            self._gpu.written()

    def all(self) -> list[RegisteredBuffers]:
        """Returns everything that each round carries."""
        return self._staying()

    def carried(self) -> dict[str, list[TensorEntry]]:
        """Returns what each round carries of every name; not what was closed."""
        found: dict[str, list[TensorEntry]] = {}
        for of in self._staying():
            for buffer in () if of.closed else of.buffers:
                for entry in buffer.entries:
                    found.setdefault(entry.name, []).append(entry)
        return found

    def require_new(self, placed: Iterable[Placed]) -> None:
        """Raises `ExportError` for a tensor of which rounds carry the same elements already."""
        carried = self.carried()
        for new in placed:
            for entry in carried.get(new.name, ()):
                if entry.shape != new.shape:
                    raise ExportError(
                        new.name,
                        f"is registered already as a piece of another global shape: {entry.shape},"
                        f" not {new.shape}; give it another name, or unregister() that first",
                    )
                if is_common(entry.box, new.region):
                    raise ExportError(
                        new.name,
                        f"is registered already ({entry.box} of it), and a round would carry it"
                        " twice: write into the registered tensor in place, unregister() what that"
                        " register() returned, or give this one another name",
                    )

    def add(self, buffers: RegisteredBuffers) -> int:
        """Makes them part of every round from now on; returns the number of their offer."""
        number = next(self._offer_numbers)
        self._offers[number] = buffers
        self.filled = 0
        self._count()
        return number

    def check(self) -> None:
        """Raises `ExportError` for a tensor that is not where it was registered any more."""
        for buffers in self._staying():
            buffers.require_held()
            buffers.check()

    @contextmanager
    def renewing(self) -> Iterator[list[RegisteredBuffers]]:
        """Gives what lies in memory that was removed by something else, to one thread at a time."""
        with self._renewing:
            yield [buffers for buffers in self._staying() if buffers.missing()]

    def renew(self, buffers: RegisteredBuffers) -> None:
        """Moves them into new memory; see `RegisteredBuffers.renew`. Not under a lock."""
        self.former.update(buffers.renew(self._kind(), self._buffer_numbers, self._gpu_kind))
        self._note_via(buffers)

    def _note_via(self, buffers: RegisteredBuffers) -> None:
        for buffer in buffers.buffers:
            if buffer.handle is not None:
                self._via[buffer.number] = way_of(buffer.handle, buffers.shadows)

    def drop_closed(self) -> None:
        """What its user has closed, and not unregistered, is part of no round any more."""
        closed = {number: of for number, of in self._offers.items() if of.closed}
        self.former.update(number for of in closed.values() for number in of.numbers)
        self.remove(closed)

    def offer_anew(self, buffers: RegisteredBuffers) -> int:
        """They have other buffers now; returns the number of their new offer."""
        self.remove(list(self.find(buffers)))
        return self.add(buffers)

    def select(self, subset: tuple[str, ...]) -> Chosen:
        """Returns what a round carries: the tensors of these names, or all.

        Raises:
            ConfigError: A name is not registered.
        """
        if not subset:
            return Chosen(self.numbers, self.nbytes, None, True)
        return select(subset, self._staying())

    def digested(self, subset: tuple[str, ...]) -> Chosen:
        """As `select`, with the digests of what lies there; nobody may write to it meanwhile."""
        exports = [export for of in self._staying() for export in of.exports()]
        return with_digests(self.select(subset), exports)

    def find(self, buffers: RegisteredBuffers | None) -> dict[int, RegisteredBuffers]:
        """Returns these buffers, or all, by offer."""
        offers = self._offers.items()
        return {number: of for number, of in offers if buffers is None or of is buffers}

    def remove(self, offers: Iterable[int]) -> None:
        """They are part of no round any more."""
        for number in offers:
            # Gone already where two have asked for the same.
            self._offers.pop(number, None)
            self._leaving.discard(number)
        self._count()

    def close(self) -> list[RegisteredBuffers]:
        """Forgets everything; returns what is to be closed."""
        buffers, self._offers = list(self._offers.values()), {}
        self._count()
        return buffers

    def _staying(self) -> list[RegisteredBuffers]:
        offers = list(self._offers.items())
        return [of for number, of in offers if number not in self._leaving]

    def _count(self) -> None:
        staying = self._staying()
        self.numbers = [number for of in staying for number in of.numbers]
        self.nbytes = sum(of.nbytes for of in staying)
        # Also those on their way back: who is refused that goes on with them.
        shadows = {number for of in self._offers.values() if of.shadows for number in of.numbers}
        every = [number for of in self._offers.values() for number in of.numbers]
        self.exposed = [number for number in every if number not in shadows]
        self.shadows = sorted(shadows)

    # ------------------------------------------------------------ taking back

    def ask_back(self, numbers: Iterable[int]) -> None:
        """The broker is about to be asked: earlier answers do not count."""
        numbers = set(numbers)
        self._retired -= numbers
        for number in numbers:
            self._denied.pop(number, None)
        self._leaving |= self._offers_of(numbers)
        self._count()

    def retired(self, numbers: Iterable[int]) -> None:
        """Nobody has these mapped any more."""
        numbers = set(numbers)
        for number in numbers:
            self._via.pop(number, None)
        self._retired |= numbers
        self.former -= numbers

    def denied(self, numbers: Iterable[int], text: str) -> None:
        """A round still holds one of these."""
        numbers = set(numbers)
        self._denied.update(dict.fromkeys(numbers, text))
        self._leaving -= self._offers_of(numbers)
        self._count()

    def _offers_of(self, numbers: set[int]) -> set[int]:
        return {offer for offer, of in self._offers.items() if numbers.intersection(of.numbers)}

    def mapped(self, numbers: set[int]) -> set[int]:
        """Returns those that somebody still has mapped.

        Raises:
            RefusedError: A round holds one of them.
        """
        for number in numbers:
            if number in self._denied:
                raise RefusedError(self._denied[number], Code.LEASED.value)
        return numbers - self._retired


def _any_of_gpu(placed: Iterable[Placed]) -> bool:
    return any(each.device.type == "cuda" for each in placed)
