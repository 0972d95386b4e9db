"""The ways in which `tensorlease bench gpu` has a trainer's tensors copied by workers."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tensorlease.agents import RingOptions, TrainerAgent

from . import lock_step, peers, pickled_http
from .gpu_workers import CHANNEL, LIMIT_S, Order, Place
from .peers import DONE, Tensors, answered

MIB = 2**20
OURS = ("registered", "ring")
KINDS = (*OURS, lock_step.NAME, pickled_http.NAME, *peers.NAMES)
SLOTS = (1, 2, 4, 8)


def _nothing() -> None:
    pass


class Running(NamedTuple):
    """A way that is set up."""

    round: Callable[[], object]
    """One round: all that every worker needs to have copied everything, and to have said so."""
    settle: Callable[[], object] = _nothing
    """Waits, outside the time that is taken, until the workers can begin another."""


Begin = Callable[[Place, Tensors], AbstractContextManager[Running]]


@dataclass(frozen=True)
class Way:
    """One row of a table."""

    kind: str
    """One of `KINDS`."""
    begin: Begin
    staging: int = 0
    """Bytes that it copies through; 0: none, it copies once."""
    slots: int = 0

    @property
    def name(self) -> str:
        """The row's name."""
        of = f" of {self.slots}" if self.slots else ""
        through = f", {self.staging // MIB} MiB" if self.staging else ""
        return f"{self.kind}{of}{through}"

    @property
    def ours(self) -> bool:
        """Whether it is tensorlease's."""
        return self.kind in OURS

    @property
    def peer(self) -> bool:
        """Whether it is another project's."""
        return self.kind in peers.NAMES


def ways(
    ring_mib: Sequence[int],
    buffer_mib: int,
    only: Sequence[str],
    device: torch.device,
    slots: Sequence[int] = SLOTS,
) -> list[Way]:
    """All that can be measured here, in the table's order; `only`: kinds, none: all."""
    ring_mib = list(dict.fromkeys(ring_mib))
    found = [Way("registered", registered)]
    for mib in ring_mib:
        for count in slots:
            ring = RingOptions(count, mib * MIB // count // 4096 * 4096, device=str(device))
            found.append(Way("ring", ringing(ring), mib * MIB, count))
    found += [
        Way(lock_step.NAME, in_lock_step(mib * MIB), mib * MIB)
        for mib in (buffer_mib, 4 * buffer_mib)
    ]
    found += [Way(pickled_http.NAME, over_http)]
    found += [
        Way(name, of_peer(name, mib * MIB), mib * MIB)
        for name in peers.NAMES
        for mib in ring_mib
        if peers.path_of(name) is not None
    ]
    return [way for way in found if not only or way.kind in only]


_versions = itertools.count(1)


@contextlib.contextmanager
def registered(place: Place, source: Tensors) -> Iterator[Running]:
    """A trainer whose tensors are registered."""
    with (
        place.doing([Order("pull")] * len(place.workers)),
        TrainerAgent(CHANNEL, endpoint=place.url) as trainer,
    ):
        trainer.register(source)
        trainer.wait_ready(len(place.workers), timeout=LIMIT_S)
        yield Running(lambda: trainer.publish(next(_versions), timeout=LIMIT_S).raise_for_status())


def ringing(ring: RingOptions) -> Begin:
    """A trainer that sends everything through its ring."""

    @contextlib.contextmanager
    def begin(place: Place, source: Tensors) -> Iterator[Running]:
        with (
            place.doing([Order("pull")] * len(place.workers)),
            TrainerAgent(CHANNEL, endpoint=place.url, ring=ring) as trainer,
        ):
            trainer.wait_ready(len(place.workers), timeout=LIMIT_S)

            def publish() -> None:
                trainer.publish_stream(next(_versions), source, timeout=LIMIT_S).raise_for_status()

            yield Running(publish)

    return begin


def in_lock_step(nbytes: int) -> Begin:
    """One buffer and REQ/REP; all workers have a bucket before the next is packed."""

    @contextlib.contextmanager
    def begin(place: Place, source: Tensors) -> Iterator[Running]:
        orders = [Order(lock_step.NAME, place.new_url()) for _ in place.workers]
        with place.doing(orders):
            told = [worker.told for worker in place.workers]
            sender = lock_step.LockStepSender(source, nbytes, [each.url for each in orders], told)
            with contextlib.closing(sender):
                yield Running(sender.send)

    return begin


@contextlib.contextmanager
def over_http(place: Place, source: Tensors) -> Iterator[Running]:
    """A POST a round to each worker."""
    path = f"/{secrets.token_hex(16)}"
    with place.doing([Order(pickled_http.NAME, path)] * len(place.workers)) as said:
        ports = [port for port in said if isinstance(port, int)]
        if place.device.type == "cpu":  # torch moves those, and they can be registered no more.
            source = {name: tensor.clone() for name, tensor in source.items()}
        with contextlib.closing(pickled_http.HttpSender(source, path, ports)) as sender:
            yield Running(sender.send)


def of_peer(name: str, nbytes: int) -> Begin:
    """Another project's: it serves one worker, so each has a sender, and they take turns."""

    @contextlib.contextmanager
    def begin(place: Place, source: Tensors) -> Iterator[Running]:
        orders = [Order(name, place.new_url()) for _ in place.workers]
        with place.doing(orders), contextlib.ExitStack() as stack:
            senders = []
            for worker, order in zip(place.workers, orders, strict=True):
                sender = peers.SENDERS[name](source, order.url, nbytes, worker.told)
                stack.callback(sender.close)
                senders.append(sender)

            def send() -> None:
                for sender in senders:
                    sender.send()

            def settle() -> None:
                for worker in place.workers:
                    answered(worker.told, name, DONE)

            yield Running(send, settle)

    return begin
