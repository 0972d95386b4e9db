"""Other projects' ways through shared memory and CUDA IPC, each driven alone, where it is installed.

Nothing of them is imported but the one module that does the transfer: their packages bring engines
and clusters along, which this needs no part of. What such a module asks of the rest of its package
is given by small stand-ins.

- verl: `BucketedWeightSender` and `BucketedWeightReceiver`: a buffer made anew for each round, one
  bucket at a time; with `use_shm=True` where there is no GPU.
- sglang: `FlattenedTensorBucket`, a bucket at a time, through torch's own sharing of tensors.
- checkpoint-engine: `update_weights_from_ipc`, two halves of one buffer in turn, which is kept over all
  rounds; where there is no GPU it lies in shared memory.

Each receiver copies into tensors that it has, as a worker of ours does. It is told of a round at the
moment at which its engine would be: when the sender's socket is there, so that no connection is tried
in vain. A round ends for the sender's side when all is acknowledged; what a receiver tidies up after
that is waited for outside the time that is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, Protocol

import torch
import zmq
from torch.multiprocessing.reductions import reduce_tensor

from tensorlease.protocol.errors import DeadlineError, TensorleaseError

NAMES = ("verl", "sglang", "checkpoint-engine")
LIMIT_S = 60.0
ALIGNMENT = 256
THREADS = 1
"""Of torch, on both sides of a peer: with more, two processes that copy small tensors on as many cores
wait for each other's threads, and are many times slower."""
_FILES = {
    "verl": ("verl", "workers/rollout/vllm_rollout/bucketed_weight_transfer.py"),
    "sglang": ("sglang", "srt/weight_sync/tensor_bucket.py"),
    "checkpoint-engine": ("checkpoint_engine", "worker.py"),
}

# What torch's stubs do not say.
export: Final[Callable[[torch.Tensor], tuple[Callable[..., torch.Tensor], tuple[Any, ...]]]] = (
    reduce_tensor
)

DONE = "done"
"""What a receiver says after a round."""
CPU = torch.device("cpu")

Tensors = Mapping[str, torch.Tensor]
Named = list[tuple[str, torch.Tensor]]
Take = Callable[[Named], None]
"""Copies what came; has synchronised the device when it returns."""


class UnequalError(TensorleaseError):
    """What arrived is not what was sent."""


class PeerError(TensorleaseError):
    """A peer's receiver has failed; the message has its words."""


class Sender(Protocol):
    """One peer's side of the trainer."""

    def send(self) -> None:
        """Tells the receiver of a round, and hands all tensors over; returns when they are copied."""

    def close(self) -> None:
        """Gives back what it holds."""


class Peer:
    """One peer, and its receiver in a process of its own."""

    def __init__(self, name: str, source: Tensors, bucket: int, directory: str) -> None:
        context = mp.get_context("spawn")
        self.name = name
        self._source = source
        url = f"ipc://{directory}/{name}.sock"
        self._told, theirs = context.Pipe()
        sizes = {key: tensor.numel() for key, tensor in source.items()}
        self._process = context.Process(
            target=receive, args=(name, url, sizes, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self._sender = SENDERS[name](source, url, bucket, self._told)
        self._under_way = False

    def round(self) -> None:
        """One whole round."""
        self._settle()
        threads = torch.get_num_threads()
        torch.set_num_threads(THREADS)
        try:
            self._under_way = True
            self._sender.send()
        finally:
            torch.set_num_threads(threads)

    def _settle(self) -> None:
        if self._under_way:
            answered(self._told, self.name, DONE)
            self._under_way = False

    def verify(self) -> None:
        """Asks the receiver what it has; raises `UnequalError`."""
        self._settle()
        self._told.send("sums")
        compare(self.name, self._source, self._told, LIMIT_S)

    def close(self) -> None:
        """Ends the receiver."""
        self._sender.close()
        self._process.terminate()
        self._process.join(LIMIT_S)


@contextlib.contextmanager
def driven(source: Tensors, bucket: int) -> Iterator[list[Peer]]:
    """Those that are installed, with their receivers running; `bucket`: bytes of their buffers."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tl-"))
        found = []
        for name in NAMES:
            if path_of(name) is not None:
                peer = Peer(name, source, bucket, directory)
                stack.callback(peer.close)
                found.append(peer)
        yield found


def path_of(name: str) -> Path | None:
    """The module of this peer that does the transfer; None: it is not installed."""
    package, file = _FILES[name]
    spec = PathFinder.find_spec(package)  # whatever stands in for it in sys.modules
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place) / file
        if path.is_file():
            return path
    return None


def version_of(name: str) -> str:
    """A peer's name and version, as far as the latter is known."""
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return name


def sums(tensors: Tensors) -> dict[str, int]:
    """A number for each tensor that its bytes decide."""
    return {name: int(t.view(torch.int32).sum(dtype=torch.int64)) for name, t in tensors.items()}


def compare(who: str, source: Tensors, told: Connection, limit_s: float) -> None:
    """Compares what was sent with what a process says that it has.

    Raises:
        DeadlineError: It says nothing.
        UnequalError: They differ.
    """
    if not told.poll(limit_s):
        raise DeadlineError(f"{who}: the receiver did not say what it has in {limit_s:g} s")
    has: object = told.recv()
    if has != sums(source):
        raise UnequalError(f"{who}: the receiver has other bytes than were sent")


def receive(name: str, url: str, sizes: dict[str, int], told: Connection) -> None:
    """A process: takes a round whenever it is told to, into tensors of its own."""
    torch.set_num_threads(THREADS)
    target = {key: torch.zeros(size) for key, size in sizes.items()}

    def take(named: Named) -> None:
        for key, tensor in named:
            target[key].copy_(tensor)

    one_round = RECEIVERS[name](url, take, told, CPU)
    while told.recv() == "round":
        one_round()
        told.send(DONE)
    told.send(sums(target))
    told.recv()  # until it is ended


# ---------------------------------------------------------------- loading


def load(name: str, device: torch.device = CPU) -> ModuleType:
    """Imports the one module of this peer, and stand-ins for what it asks of its package.

    What was imported before is given again: a process uses one kind of device.
    """
    package, file = _FILES[name]
    full = f"{package}.{file.removesuffix('.py').replace('/', '.')}"
    if full in sys.modules:
        return sys.modules[full]
    of_device: object = SimpleNamespace(
        synchronize=lambda: None, empty_cache=lambda: None, ipc_collect=lambda: None
    )
    if device.type == "cuda":
        of_device = torch.cuda
    if name == "verl":
        _stand_in(
            "verl.utils.device",
            get_torch_device=lambda: of_device,
            get_device_name=lambda: device.type,
            get_device_id=lambda: device.index or 0,
            is_support_ipc=lambda: device.type == "cuda",
        )
        _stand_in("verl.workers.rollout.utils", ensure_async_iterator=_asynchronous)
    elif name == "checkpoint-engine":
        _stand_in(
            "checkpoint_engine.device_utils",
            DeviceManager=lambda: SimpleNamespace(device_module=of_device),
            npu_generate_uuid=lambda: "",
        )
    path = path_of(name)
    assert path is not None
    spec = spec_from_file_location(full, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    _stand_in_parents(full)
    sys.modules[full] = module  # dataclasses, and pickle, look it up
    spec.loader.exec_module(module)
    return module


def _stand_in(name: str, **attributes: object) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    _stand_in_parents(name)
    sys.modules[name] = module


def _stand_in_parents(name: str) -> None:
    parts = name.split(".")
    for count in range(1, len(parts)):
        parent = ".".join(parts[:count])
        if parent not in sys.modules:
            module = ModuleType(parent)
            module.__path__ = []
            sys.modules[parent] = module


async def _asynchronous(items: Iterator[Any]) -> Any:
    for item in items:
        yield item


def buckets(source: Tensors, nbytes: int) -> Iterator[Named]:
    """Tensors in groups of at most so many bytes, each aligned; a larger one is alone."""
    group: Named = []
    filled = 0
    for name, tensor in source.items():
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if group and filled + size > nbytes:
            yield group
            group, filled = [], 0
        group.append((name, tensor))
        filled += size
    if group:
        yield group


def device_of(source: Tensors) -> torch.device:
    """Where all of them lie."""
    return next(iter(source.values())).device


def answered(told: Connection, who: str, word: str = "ok") -> None:
    """Waits for a word of the receiver.

    Raises:
        DeadlineError: It says nothing.
        PeerError: It has ended, or says another.
    """
    if not told.poll(LIMIT_S):
        raise DeadlineError(f"{who}: the receiver does not answer")
    try:
        said: object = told.recv()
    except EOFError:
        raise PeerError(f"{who}: the receiver has ended") from None
    if said != word:
        raise PeerError(f"{who}: the receiver says {said}")


def limited(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Context[zmq.Socket[bytes]]:
    """Has every socket that a context makes end its waits: the peers' own know no deadline."""
    context.setsockopt(zmq.RCVTIMEO, round(LIMIT_S * 1000))
    context.setsockopt(zmq.SNDTIMEO, round(LIMIT_S * 1000))
    context.setsockopt(zmq.LINGER, 1000)  # A last word is still on its way when they close.
    return context


# ---------------------------------------------------------------- verl


class VerlSender:
    def __init__(self, source: Tensors, url: str, bucket: int, told: Connection) -> None:
        device = device_of(source)
        self._make = load("verl", device).BucketedWeightSender
        self._source, self._url, self._told = source, url, told
        self._shm = device.type == "cpu"
        if self._shm:  # A GPU's tensor that is larger goes by a handle of its own.
            bucket = max(bucket, *(tensor.nbytes for tensor in source.values()))
        self._mib = -(-bucket // 2**20)
        self._runner = asyncio.Runner()
        limited(zmq.Context.instance())

    def send(self) -> None:
        sender = self._make(self._url, bucket_size_mb=self._mib, use_shm=self._shm)
        bind = sender._init_socket

        def bind_and_tell() -> None:
            bind()
            self._told.send("round")

        sender._init_socket = bind_and_tell
        self._runner.run(sender.async_send_weights(iter(self._source.items())))

    def close(self) -> None:
        self._runner.close()


def verl_receiver(
    url: str, take: Take, told: Connection, device: torch.device
) -> Callable[[], None]:
    make = load("verl", device).BucketedWeightReceiver
    limited(zmq.Context.instance())

    def one_round() -> None:
        receiver = make(url, device, use_shm=device.type == "cpu")
        receiver.receive_weights(lambda weights, is_last: take(weights))

    return one_round


# ---------------------------------------------------------------- sglang


class SglangSender:
    def __init__(self, source: Tensors, url: str, bucket: int, told: Connection) -> None:
        self._device = device_of(source)
        self._make = load("sglang", self._device).FlattenedTensorBucket
        self._source, self._bucket, self._told = source, bucket, told

    def send(self) -> None:
        self._told.send("round")
        for group in buckets(self._source, self._bucket):
            flat = self._make(named_tensors=group)
            parts = {
                "flattened_tensor": flat.get_flattened_tensor(),
                "metadata": flat.get_metadata(),
            }
            synchronize(self._device)
            self._told.send_bytes(ForkingPickler.dumps(parts))
            answered(self._told, "sglang")
        self._told.send_bytes(b"")
        answered(self._told, "sglang")

    def close(self) -> None:
        pass


def sglang_receiver(
    url: str, take: Take, told: Connection, device: torch.device
) -> Callable[[], None]:
    make = load("sglang", device).FlattenedTensorBucket

    def one_round() -> None:
        while frame := _frame(told):
            flat = make(**pickle.loads(frame))
            take(flat.reconstruct_tensors())
            del flat
            told.send("ok")
        told.send("ok")

    return one_round


def _frame(told: Connection) -> bytes:
    if not told.poll(LIMIT_S):
        raise DeadlineError("sglang: the sender says nothing")
    return told.recv_bytes()


def synchronize(device: torch.device) -> None:
    """Waits for the device; for nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------- checkpoint-engine


class CheckpointEngineSender:
    def __init__(self, source: Tensors, url: str, bucket: int, told: Connection) -> None:
        self._device, self._told = device_of(source), told
        largest = max(tensor.nbytes for tensor in source.values()) + ALIGNMENT
        self._half = max(bucket, largest)
        self._groups = list(buckets(source, self._half))
        self._memory: SharedMemory | None = None
        if self._device.type == "cpu":
            self._memory = SharedMemory(create=True, size=2 * self._half)
            self._buffer = torch.frombuffer(self._memory.buf, dtype=torch.uint8)
        else:
            self._buffer = torch.empty(2 * self._half, dtype=torch.uint8, device=self._device)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, round(LIMIT_S * 1000))
        self._socket.setsockopt(zmq.SNDTIMEO, round(LIMIT_S * 1000))
        self._socket.bind(url)

    def send(self) -> None:
        socket = self._socket
        self._told.send("round")
        # A counted handle of torch's is opened once: a new one for each round.
        memory = self._memory
        socket.send_pyobj((attach, (memory.name, memory.size)) if memory else export(self._buffer))
        for number, group in enumerate(self._groups):
            offset = number % 2 * self._half
            told = []
            for name, tensor in group:
                of = tensor.view(-1).view(torch.uint8)
                self._buffer[offset : offset + of.numel()].copy_(of)
                told.append(
                    {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": offset}
                )
                offset += -(-of.numel() // ALIGNMENT) * ALIGNMENT
            synchronize(self._device)
            self._wait()
            socket.send_pyobj(told)
        for _ in range(2):  # It gives the buffer back, and calls its last hook.
            self._wait()
            socket.send_pyobj(None)
        self._wait()

    def _wait(self) -> None:
        if answer := self._socket.recv():
            raise PeerError(f"checkpoint-engine: {answer.decode()}")

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        del self._buffer
        if self._memory is not None:
            self._memory.close()
            self._memory.unlink()


_attached: dict[str, SharedMemory] = {}


def attach(name: str, size: int) -> torch.Tensor:
    """The buffer of that name; called in the receiver, which keeps it mapped."""
    memory = _attached.get(name)
    if memory is None:
        memory = _attached[name] = SharedMemory(name=name)
    view = memory.buf
    assert view is not None
    return torch.frombuffer(view[:size], dtype=torch.uint8)


def checkpoint_engine_receiver(
    url: str, take: Take, told: Connection, device: torch.device
) -> Callable[[], None]:
    update = load("checkpoint-engine", device).update_weights_from_ipc
    context = limited(zmq.Context.instance())

    def one_round() -> None:
        update(context, url, device.index, run=take)

    return one_round


SENDERS: dict[str, Callable[[Tensors, str, int, Connection], Sender]] = {
    "verl": VerlSender,
    "sglang": SglangSender,
    "checkpoint-engine": CheckpointEngineSender,
}
RECEIVERS: dict[str, Callable[[str, Take, Connection, torch.device], Callable[[], None]]] = {
    "verl": verl_receiver,
    "sglang": sglang_receiver,
    "checkpoint-engine": checkpoint_engine_receiver,
}
"""What takes one round when it is called."""
