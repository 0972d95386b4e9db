"""What `colocated.py --benchmark` measures: four ways to update an engine, in turns, in one run.

- lock step: the trainer packs tensors into one buffer, which it keeps, and says by REQ what lies
  where; the worker loads them and answers by REP; then the buffer is packed again. The buffer's
  handle travels once a round, pickled, as torch shares tensors between processes.
- the same with a buffer four times as large.
- the ring: N slots of the first buffer's size are packed, loaded and come back without waiting for
  each other.
- registered: the tensors are loaded from where the trainer has them.

The worker of each is a process of its own, with the same engine: the same `load_weights`, which
fuses, and the same step after each update. Lock step calls it for each buffer; with the ring and
registered it is recorded in the first round, and its copies are repeated from then on. Between rounds all tensors change, and in the end each
engine is compared with them.
"""

from __future__ import annotations

import itertools
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Self

import torch
import torch.multiprocessing  # teaches the pickler to share tensors
import zmq
from fused_engine import FusedEngine, Shapes
from processes import LIMIT_S, Child, Told, children, digest, end_at_sigterm, private_broker
from torch import Tensor

from tensorlease import RingOptions, TrainerAgent, WorkerAgent
from tensorlease.commands.bench.gpu_shapes import shapes_of

MODEL = "opt-125m"
DTYPE = torch.bfloat16
ALIGNMENT = 256
TIMES_LARGER = 4
WARM_UP = 2
"""Rounds of each that do not count: memory is mapped and touched."""

Named = list[tuple[str, tuple[int, ...], int]]
"""What lies in the buffer: name, shape, and where it begins."""


def benchmark(device: str, rounds: int, buffer_mib: int, handles: int) -> int:
    """Measures and prints; returns the exit code.

    Args:
        device: Of trainer and workers.
        rounds: How many count, of each way.
        buffer_mib: Of the first lock step's buffer; 0: the largest tensor's.
        handles: Slots of the ring; less than two: four.
    """
    end_at_sigterm()
    prepare(device)
    handles = handles if handles > 1 else 4
    shapes = shapes_of(MODEL)
    source = {name: torch.randn(shape).to(device, DTYPE) for name, shape in shapes.items()}
    total = sum(tensor.nbytes for tensor in source.values())
    largest = max(aligned(tensor) for tensor in source.values())
    buffer = max(buffer_mib * 2**20, largest)
    with private_broker() as url, children() as start:
        sockets = [f"{url.removesuffix('/broker.sock')}/lock-step-{n}" for n in (1, 2)]
        workers = [
            start("lock step", answer, sockets[0], shapes, device),
            start("lock step, larger buffer", answer, sockets[1], shapes, device),
            start("ring", take, url, "ring", shapes, device),
            start("registered", take, url, "registered", shapes, device),
        ]
        place = {"endpoint": url, "device": device, "rank": 0, "world_size": 1}
        ring = RingOptions(handles, buffer, device=device)
        versions = itertools.count(1)
        with (
            TrainerAgent("ring", ring=ring, **place) as sending,
            TrainerAgent("registered", **place) as registered,
            LockStep(sockets[0], source, buffer, device) as lock_step,
            LockStep(sockets[1], source, TIMES_LARGER * buffer, device) as larger,
        ):
            registered.register(source)
            for trainer in (sending, registered):
                trainer.wait_ready(1, timeout=LIMIT_S)

            def stream() -> None:
                version = next(versions)
                sending.publish_stream(version, source, timeout=LIMIT_S).raise_for_status()

            def publish() -> None:
                registered.publish(next(versions), timeout=LIMIT_S).raise_for_status()

            ways: dict[str, Callable[[], None]] = {
                f"lock step, {buffer / 1e6:.0f} MB": lock_step.update,
                f"lock step, {TIMES_LARGER * buffer / 1e6:.0f} MB": larger.update,
                f"ring, {handles} handles of {buffer / 1e6:.0f} MB": stream,
                "registered": publish,
            }
            took = take_turns(ways, source, rounds, device)
            for way, worker in zip(ways, workers, strict=True):
                compare(way, worker, source, WARM_UP + rounds)
    print(
        f"{MODEL}: {len(source)} tensors, {total / 1e6:.0f} MB in bfloat16, on {device_of(device)}"
    )
    print(f"{rounds} rounds of each, in turns; from the first tensor to the last answer\n")
    medians = {name: statistics.median(times) * 1e3 for name, times in took.items()}
    for name, times in took.items():
        spread = f"{min(times) * 1e3:8.1f} to {max(times) * 1e3:8.1f}"
        print(f"  {name:30}  median {medians[name]:8.1f} ms   ({spread})")
    first, _, ours, in_place = medians.values()
    print(
        f"\nring of {handles} / lock step   {ours / first:.2f}   ({first / ours:.2f} times as fast)"
    )
    print(
        f"registered / lock step  {in_place / first:.2f}   ({first / in_place:.2f} times as fast)"
    )
    print("each engine holds the trainer's values, and ran its step once a round")
    return 0


def prepare(device: str) -> None:
    """Lets this process work on the device, and on a CPU with one thread."""
    if device != "cpu":
        torch.cuda.set_device(torch.device(device))
    torch.set_num_threads(1)


def device_of(device: str) -> str:
    """Returns what the device is called."""
    return "a CPU, through shared memory" if device == "cpu" else torch.cuda.get_device_name()


def aligned(tensor: Tensor) -> int:
    """Returns how many bytes of a buffer it takes."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def synchronize(device: str) -> None:
    """Waits for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def take_turns(
    ways: dict[str, Callable[[], None]], source: dict[str, Tensor], rounds: int, device: str
) -> dict[str, list[float]]:
    """Returns how long each way takes, in seconds; other values go each time."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-WARM_UP, rounds):
        for tensor in source.values():
            tensor.add_(1)
        synchronize(device)
        for name in list(ways) if turn % 2 else reversed(list(ways)):
            began = time.perf_counter()
            ways[name]()
            if turn >= 0:
                took[name].append(time.perf_counter() - began)
    return took


def compare(way: str, worker: Child, source: dict[str, Tensor], rounds: int) -> None:
    """Ends the program unless the engine has these values, and post-processed each round once."""
    worker.tell("digests")
    has, post_processed = worker.hear()
    wrong = [name for name, tensor in source.items() if has[name] != digest(tensor)]
    if wrong:
        sys.exit(f"{way}: the engine has other values than were sent: {', '.join(wrong[:5])}")
    if post_processed != rounds:
        sys.exit(f"{way}: the step after an update ran {post_processed} times in {rounds} rounds")


class LockStep:
    """The trainer's side of lock step, with a buffer that is kept."""

    def __init__(self, url: str, source: dict[str, Tensor], nbytes: int, device: str) -> None:
        self._source, self._device = source, device
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device == "cpu":
            self._buffer.share_memory_()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, round(LIMIT_S * 1e3))
        self._socket.setsockopt(zmq.SNDTIMEO, round(LIMIT_S * 1e3))
        self._socket.bind(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def update(self) -> None:
        """One round."""
        self._ask(bytes(ForkingPickler.dumps(self._buffer)))
        for named in self._packed():
            synchronize(self._device)  # The copies are there before anybody reads them.
            self._ask(pickle.dumps(named))
        self._ask(pickle.dumps(None))

    def _ask(self, words: bytes) -> None:
        self._socket.send(words)
        self._socket.recv()

    def _packed(self) -> Iterator[Named]:
        """Fills the buffer, again and again; yields what lies in it each time."""
        named: Named = []
        offset = 0
        for name, tensor in self._source.items():
            if offset + tensor.nbytes > len(self._buffer):
                yield named
                named, offset = [], 0
            flat = tensor.view(-1).view(torch.uint8)
            self._buffer[offset : offset + tensor.nbytes].copy_(flat)
            named.append((name, tuple(tensor.shape), offset))
            offset += aligned(tensor)
        if named:
            yield named


def answer(told: Told, url: str, shapes: Shapes, device: str) -> None:
    """A process: the worker's side of lock step."""
    prepare(device)
    engine = FusedEngine(shapes, device, DTYPE)
    context = zmq.Context()
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(url)
    try:
        rounds = 0
        while not told.waiting():
            if not socket.poll(100):
                continue
            rounds += 1
            buffer = pickle.loads(socket.recv())
            socket.send(b"")
            while (named := pickle.loads(socket.recv())) is not None:
                engine.load_weights(
                    (name, buffer[at : at + 2 * prod(shape)].view(DTYPE).view(shape))
                    for name, shape, at in named
                )
                synchronize(device)
                socket.send(b"")
            engine.post_process(rounds)
            synchronize(device)
            del buffer
            socket.send(b"")
        report(told, engine)
    finally:
        context.destroy(linger=0)


def take(told: Told, url: str, channel: str, shapes: Shapes, device: str) -> None:
    """A process: a worker of a channel."""
    prepare(device)
    engine = FusedEngine(shapes, device, DTYPE)
    with WorkerAgent(channel, endpoint=url, device=device) as worker:
        worker.on_commit(lambda round: engine.post_process(round.version))
        # The first version is loaded; later ones repeat the copies that the loader has made.
        worker.attach_loader(engine.load_weights, engine.parameters.items)
        while not told.waiting():
            worker.step(timeout=0.1)
    report(told, engine)


def report(told: Told, engine: FusedEngine) -> None:
    """Says what the engine has, and how often it was post-processed."""
    told.hear()
    digests = {name: digest(tensor) for name, tensor in engine.unfused()}
    told.say((digests, len(engine.post_processed)))
    told.waiting(LIMIT_S)
