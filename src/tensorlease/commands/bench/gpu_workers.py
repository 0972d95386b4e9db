"""The workers of `tensorlease bench gpu`: processes with tensors that every way fills in turn."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from tensorlease.agents import WorkerAgent
from tensorlease.protocol.errors import DeadlineError

from . import lock_step, peers, pickled_http
from .gpu_shapes import Shapes
from .peers import DONE, Named, PeerError, UnequalError, synchronize
from .service import broker_words, serving

CHANNEL = "bench"
LIMIT_S = 120.0
"""Of what is asked of a worker; its start included."""
IDLE_LIMIT_S = 900.0
"""After so long without an order a worker ends: nobody is there any more."""
SUM_ELEMENTS = 2**24
"""Of a tensor, summed up at once."""
DTYPE = torch.bfloat16

Serve = Callable[[str, "Target", Connection], None]


class Order(NamedTuple):
    """What a worker is told to do.

    `pull`: take versions; `clear`: fill the tensors with zeros; `sums`: say what they hold; `stop`:
    end what it does. Any other is a way by its name, to be served at `url`.
    """

    what: str
    url: str = ""


class Target:
    """A worker's tensors, all on one device."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.device = device
        self.tensors = {
            name: torch.zeros(shape, dtype=DTYPE, device=device) for name, shape in shapes.items()
        }

    def take(self, named: Named) -> None:
        """Copies what came; it has been read when this returns."""
        for name, tensor in named:
            self.tensors[name].copy_(tensor)
        synchronize(self.device)

    def clear(self) -> None:
        """Fills all with zeros."""
        for tensor in self.tensors.values():
            tensor.zero_()
        synchronize(self.device)


def sums(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Of each tensor's bits, weighed by their places."""
    found: list[int] = []
    for tensor in tensors.values():
        every, total = tensor.view(-1).view(torch.int16), 0
        for begin in range(0, every.numel(), SUM_ELEMENTS):
            bits = every[begin : begin + SUM_ELEMENTS].long()
            weights = torch.arange(1, bits.numel() + 1, device=bits.device)
            total += (begin + 1) * int((bits * weights).sum())
        found.append(total)
    return found


# ---------------------------------------------------------------- in a worker's process


def work(url: str, shapes: Shapes, device: str, told: Connection) -> None:
    """A process: does what it is told until the pipe is closed; says what failed, and goes on."""
    # That no trainer is there for a while is how it should be.
    logging.getLogger("tensorlease").setLevel(logging.ERROR)
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        torch.set_num_threads(peers.THREADS)
    target = Target(shapes, where)
    with WorkerAgent(CHANNEL, endpoint=url) as agent:
        agent.attach(target.tensors)
        told.send("ready")
        with contextlib.suppress(EOFError):
            while told.poll(IDLE_LIMIT_S):
                order: Order = told.recv()
                try:
                    answer = _obey(order, agent, target, told)
                except EOFError:
                    raise
                except Exception:  # noqa: BLE001 - the trainer is told
                    answer = f"failed:\n{traceback.format_exc()}"
                told.send(answer)


def _obey(order: Order, agent: WorkerAgent, target: Target, told: Connection) -> object:
    if order.what == "sums":
        return sums(target.tensors)
    if order.what == "clear":
        target.clear()
    elif order.what == "pull":
        told.send("ready")
        while not told.poll():
            agent.step(timeout=0.1)
        told.recv()
    elif order.what in peers.RECEIVERS:
        _serve_peer(order, target, told)
    else:
        _SERVES[order.what](order.url, target, told)
        told.recv()
    return "ok"


def _serve_peer(order: Order, target: Target, told: Connection) -> None:
    one_round = peers.RECEIVERS[order.what](order.url, target.take, told, target.device)
    told.send("ready")
    while told.poll(LIMIT_S) and told.recv() == "round":
        one_round()
        told.send(DONE)


def _serve_lock_step(url: str, target: Target, told: Connection) -> None:
    lock_step.serve(url, target.tensors, told)


def _serve_http(url: str, target: Target, told: Connection) -> None:
    pickled_http.serve(url, target.take, told)


_SERVES: dict[str, Serve] = {lock_step.NAME: _serve_lock_step, pickled_http.NAME: _serve_http}
"""Each says something as soon as it listens, and returns when `told` has words for it."""


# ---------------------------------------------------------------- in the trainer's process


class Worker:
    """One of them, seen from the trainer."""

    def __init__(self, number: int, url: str, shapes: Shapes, device: torch.device) -> None:
        context = mp.get_context("spawn")
        self.name = f"worker {number}"
        self.told, theirs = context.Pipe()
        self._process = context.Process(
            target=work, args=(url, dict(shapes), str(device), theirs), daemon=True
        )
        self._process.start()
        theirs.close()  # Else its end would not be seen.

    def say(self, order: Order) -> None:
        """Gives an order.

        Raises:
            PeerError: It has ended.
        """
        try:
            self.told.send(order)
        except OSError:
            raise PeerError(f"{self.name} has ended") from None

    def hear(self) -> object:
        """What it says next.

        Raises:
            DeadlineError: It says nothing.
            PeerError: It has ended, or something has failed there.
        """
        if not self.told.poll(LIMIT_S):
            raise DeadlineError(f"{self.name} says nothing in {LIMIT_S:g} s")
        try:
            said: object = self.told.recv()
        except (EOFError, OSError):
            raise PeerError(f"{self.name} has ended") from None
        if isinstance(said, str) and said.startswith("failed:"):
            raise PeerError(f"{self.name} {said}")
        return said

    def complaint(self) -> str:
        """Why it failed, if it has said so by now; empty: it has not."""
        with contextlib.suppress(EOFError, OSError):
            while self.told.poll():
                said: object = self.told.recv()
                if isinstance(said, str) and said.startswith("failed:"):
                    return f"{self.name} {said}"
        return ""

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10.0)
        self.told.close()


@dataclass
class Place:
    """A broker, and workers that have said that they are there."""

    url: str
    directory: str
    device: torch.device
    workers: Sequence[Worker]
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new_url(self) -> str:
        """An address for a socket of its own."""
        return f"ipc://{self.directory}/{next(self._numbers)}.sock"

    @contextlib.contextmanager
    def doing(self, orders: Sequence[Order]) -> Iterator[list[object]]:
        """Has each worker do something until the block ends; gives what each says first.

        A block that fails ends nothing: what its workers do then is not known.
        """
        for worker, order in zip(self.workers, orders, strict=True):
            worker.say(order)
        yield [worker.hear() for worker in self.workers]
        self.ask(Order("stop"))

    def ask(self, order: Order) -> list[object]:
        """Gives all the same order; returns what each answers."""
        for worker in self.workers:
            worker.say(order)
        return [worker.hear() for worker in self.workers]

    def clear(self) -> None:
        """Has all workers forget what they hold."""
        self.ask(Order("clear"))

    def compare(self, sent: list[int]) -> None:
        """Raises `UnequalError` where a worker does not hold what has these sums."""
        for worker, held in zip(self.workers, self.ask(Order("sums")), strict=True):
            if held != sent:
                raise UnequalError(f"{worker.name} holds other values than were sent")


@contextlib.contextmanager
def placed(shapes: Shapes, count: int, device: torch.device) -> Iterator[Place]:
    """A broker and so many workers, each in a process of its own, until the block ends."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tl-"))
        url = f"ipc://{directory}/broker.sock"
        stack.enter_context(serving(url, broker_words(url, 2 + count)))
        workers = []
        for number in range(1, count + 1):
            workers.append(Worker(number, url, shapes, device))
            stack.callback(workers[-1].close)
        for worker in workers:
            worker.hear()
        yield Place(url, directory, device, workers)
