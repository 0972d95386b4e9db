"""One worker of an expert-parallel engine: its memory sleeps and wakes around each update.

It holds all dense parameters, and of each layer's experts only its own, fused as engines fuse them:
`w13` (gate and up) and `w2` (down), [experts here, rows, columns].
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from enum import StrEnum

import torch
from moe import MoeSize
from msgspec import Struct
from processes import Told, digest
from torch import Tensor

from tensorlease import WorkerAgent

LIMIT_S = 600.0
_EXPERT = re.compile(r"(layers\.\d+\.mlp)\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


class Phase(StrEnum):
    """The steps of an update, in order."""

    SLEEP = "sleep level 1"
    WAKE_WEIGHTS = "wake weights"
    TRANSFER = "transfer"
    WAKE_CACHE = "wake KV cache"
    SCHEDULE = "scheduling"


class State(StrEnum):
    """What the engine can do.

    A failure before the transfer leaves it `serving` the version that it had. In the transfer:
    `held`. After it, the state is how far it came. The next update begins in any of them.
    """

    SERVING = "serving"
    """It takes requests."""
    ASLEEP = "asleep"
    """Its weights are on the host, its KV cache is gone."""
    WEIGHTS_AWAKE = "weights awake"
    """Its weights are there; it has no KV cache."""
    CACHE_AWAKE = "KV cache awake"
    """All is there; no request is taken."""
    HELD = "held"
    """Its weights are half of one version and half of another, or gone: it takes no request."""


class PhaseError(Exception):
    """A phase has failed."""


class EpEngine:
    """The engine of one rank.

    Args:
        size: Of the model.
        rank: Which of the experts it has: the `rank`-th part of each layer's.
        ranks: How many parts there are.
        device: Where its memory is.
        cache_bytes: Of its KV cache.
    """

    def __init__(
        self, size: MoeSize, rank: int, ranks: int, device: torch.device, cache_bytes: int
    ) -> None:
        self.state = State.SERVING
        self.phases: list[tuple[Phase, float]] = []
        """Those of the last update, in order, and how many seconds each took."""
        self.fail_in: Phase | None = None
        """Where the next update is to fail, once."""
        self.tensors: dict[str, Tensor] = {}
        """What it has, by the checkpoint's names: parameters, and views of the fused ones."""
        self._device, self._cache_bytes = device, cache_bytes
        self._parameters: list[Tensor] = []
        self._saved: list[Tensor | None] = []
        self._cache: Tensor | None = None
        self._began = 0.0
        first, last = (size.experts * place // ranks for place in (rank, rank + 1))
        fused: dict[str, tuple[Tensor, Tensor]] = {}
        for name, shape in size.shapes().items():
            found = _EXPERT.fullmatch(name)
            if found is None:
                self.tensors[name] = self._parameter(shape, size.torch_dtype)
                continue
            layer, expert, part = found[1], int(found[2]), found[3]
            if not first <= expert < last:
                continue
            if layer not in fused:
                w13 = (last - first, 2 * size.inner, size.width)
                w2 = (last - first, size.width, size.inner)
                fused[layer] = (
                    self._parameter(w13, size.torch_dtype),
                    self._parameter(w2, size.torch_dtype),
                )
            gate_up, down = fused[layer]
            at = expert - first
            if part == "down":
                self.tensors[name] = down[at]
            elif part == "gate":
                self.tensors[name] = gate_up[at, : size.inner]
            else:
                self.tensors[name] = gate_up[at, size.inner :]
        self._wake_cache()

    @property
    def nbytes(self) -> int:
        """Bytes of its weights: what one update copies to it."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def _parameter(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._parameters.append(torch.zeros(shape, dtype=dtype, device=self._device))
        return self._parameters[-1]

    # ------------------------------------------------------------ an update

    def prepare(self) -> None:
        """Before the transfer: what it has goes to the host, and its weights come back alone.

        Between the two the GPU is free of it.
        """
        self.phases.clear()
        self._begin(Phase.SLEEP)
        self._sleep()
        self._begin(Phase.WAKE_WEIGHTS)
        self._wake_weights()
        self._begin(Phase.TRANSFER)

    def commit(self) -> None:
        """After the transfer: it takes requests again, with the new weights."""
        self._begin(Phase.WAKE_CACHE)
        self._wake_cache()
        self._begin(Phase.SCHEDULE)
        self._schedule()
        self._end()

    def abort(self, torn: bool) -> None:
        """There was no new version: back to the old one, if it is whole."""
        self._end()
        self.fail_in = None
        if self.state is State.ASLEEP:
            self._wake_weights()
        if torn or not all(map(_has_memory, self._parameters)):
            self.state = State.HELD
            return
        if self.state is State.WEIGHTS_AWAKE:
            self._wake_cache()
        self._schedule()

    def _begin(self, phase: Phase) -> None:
        self._end()
        self.phases.append((phase, 0.0))
        self._began = time.perf_counter()
        if self.fail_in is not phase:
            return
        self.fail_in = None
        if phase is not Phase.TRANSFER:
            raise PhaseError(f"{phase.value} failed, as it was asked to")
        # What is to be written loses its memory: the worker agent says so when it comes to it.
        self._parameters[0].untyped_storage().resize_(0)

    def _end(self) -> None:
        if self.phases and not self.phases[-1][1]:
            if self._device.type == "cuda":
                # Else an old value could arrive on one stream after the new one on another.
                torch.cuda.synchronize(self._device)
            self.phases[-1] = (self.phases[-1][0], time.perf_counter() - self._began)

    # ------------------------------------------------------------ memory

    def _sleep(self) -> None:
        """Level 1: weights to the host; the KV cache is dropped."""
        self._cache = None
        if self.state is not State.ASLEEP:
            self._saved = [
                each.to("cpu", copy=True) if _has_memory(each) else None
                for each in self._parameters
            ]
            for each in self._parameters:
                each.untyped_storage().resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.state = State.ASLEEP

    def _wake_weights(self) -> None:
        for each, saved in zip(self._parameters, self._saved, strict=True):
            # The same storage: views of it, also those that are attached, go on being views.
            each.untyped_storage().resize_(each.nbytes)
            if saved is not None:
                each.copy_(saved)
        self._saved = []
        self.state = State.WEIGHTS_AWAKE

    def _wake_cache(self) -> None:
        self._cache = torch.zeros(self._cache_bytes, dtype=torch.uint8, device=self._device)
        self.state = State.CACHE_AWAKE

    def _schedule(self) -> None:
        self.state = State.SERVING


def _has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


class WorkerReport(Struct, frozen=True):
    """What a worker says after a round."""

    version: int
    """That its agent is at; 0: torn."""
    state: State
    phases: list[tuple[Phase, float]]
    digests: dict[str, str]
    nbytes: int
    """That one update copies to it."""
    peak_bytes: int


def serve(
    told: Told, size: MoeSize, rank: int, ranks: int, url: str, device: str, cache_bytes: int
) -> None:
    """A process: a worker that takes versions in the channel that it is told to join.

    It is told ("join", channel), ("fail", phase), ("stay",) to wait in the next round for what
    never comes, ("report",) and ("leave",). It says when it has heard: the round that follows may
    come at once.
    """
    here = torch.device(device)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    torch.set_num_threads(1)
    # Gathered versions bring all experts, and each worker wants its own: no news here. Nor is what
    # fails: the round's result, which is printed, says it.
    logging.getLogger("tensorlease.agents").setLevel(logging.CRITICAL)
    engine = EpEngine(size, rank, ranks, here, cache_bytes)
    stay = threading.Event()
    while True:
        word, channel = told.hear()
        assert word == "join"
        reset_peak(here)
        with WorkerAgent(
            channel, replica=f"engine-{rank}", endpoint=url, device=place_of(rank)
        ) as worker:

            @worker.on_prepare
            def prepare(round: object) -> None:
                engine.prepare()
                if stay.is_set():
                    told.say("in the round")
                    told.waiting(LIMIT_S)

            @worker.on_commit
            def commit(round: object) -> None:
                engine.commit()

            @worker.on_abort
            def abort(round: object, reason: str, torn: bool) -> None:
                engine.abort(torn)

            worker.attach(engine.tensors)
            told.say("joined")
            while True:
                while not told.waiting():
                    worker.step(timeout=0.02)
                word, *more = told.hear()
                if word == "leave":
                    break
                if word == "fail":
                    engine.fail_in = Phase(more[0])
                    told.say("heard")
                elif word == "stay":
                    stay.set()
                    told.say("heard")
                elif word == "report":
                    told.say(report(worker, engine, here))
        told.say("left")


def report(worker: WorkerAgent, engine: EpEngine, device: torch.device) -> WorkerReport:
    """Returns what there is to say; what has no memory has no digest."""
    digests = {
        name: digest(tensor) for name, tensor in engine.tensors.items() if _has_memory(tensor)
    }
    return WorkerReport(
        worker.version,
        engine.state,
        list(engine.phases),
        digests,
        engine.nbytes,
        peak(device),
    )


def place_of(rank: int) -> str:
    """Returns the label of a rank's device: its worker is beside it."""
    return f"place-{rank}"


# ---------------------------------------------------------------- memory of a process


def reset_peak(device: torch.device) -> None:
    """Begins to measure anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # proc(5): the peak is what it is now


def peak(device: torch.device) -> int:
    """Returns the most bytes of the device that this process had; of a CPU, of resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with open("/proc/self/status", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmHWM"].split()[0]) * 1024
