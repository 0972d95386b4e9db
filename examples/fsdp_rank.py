"""One rank of an FSDP2 trainer, that is told what to do: train, hand out a version, say what it has."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from ep_engine import LIMIT_S, peak, place_of, reset_peak
from moe import MoeSize, Training
from msgspec import Struct
from processes import Told, digest
from torch import Tensor

from tensorlease import RingOptions, RoundResult, TrainerAgent
from tensorlease.agents.arguments import RoundOptions

GATHERED, UNGATHERED = "gathered", "ungathered"
SLOTS = 4
SLOT_BYTES = 256 * 2**20
"""At most; no larger than the largest tensor."""
LIMITS: RoundOptions = {"prepare_s": LIMIT_S, "stage_s": LIMIT_S, "commit_s": LIMIT_S}
"""Weights of tens of GB take longer to go to the host and back than the broker's limits allow."""


class RankPlan(Struct, frozen=True):
    """What all ranks are to know."""

    size: MoeSize
    ranks: int
    device: str
    """cpu, or cuda."""
    backend: str
    """gloo, or nccl."""
    endpoint: str
    meeting: str
    """A URL of a file where the ranks find each other."""


class RankReport(Struct, frozen=True):
    """What a rank says of a round."""

    outcome: str
    reason: str
    fates: dict[str, str]
    """Of each replica, by name."""
    seconds: float
    gathered: int
    """Bytes that came to this rank from others."""
    packed: int
    """Bytes that it has written into its ring."""
    released: bool
    """Whether all that it has leased came back."""


class Rank:
    """The rank; each method is called on all ranks at once.

    Args:
        plan: What is the same for all.
        rank: Its place.
        ordinal: Which of the GPUs that this process sees it uses.
    """

    def __init__(self, plan: RankPlan, rank: int, ordinal: int = 0) -> None:
        self._plan, self._rank = plan, rank
        self._device = torch.device("cpu")
        if plan.device == "cuda":
            self._device = torch.device("cuda", ordinal)
            torch.cuda.set_device(self._device)
        torch.set_num_threads(1)
        dist.init_process_group(
            plan.backend,
            init_method=plan.meeting,
            rank=rank,
            world_size=plan.ranks,
            timeout=timedelta(seconds=LIMIT_S),
            device_id=self._device if plan.backend == "nccl" else None,
        )
        self._training = Training(plan.size, self._device, rank)
        self._trainer: TrainerAgent | None = None
        self._came = 0

    def gpus(self) -> list[str]:
        """Returns the GPUs that Ray has given to this rank."""
        import ray

        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def open(self, variant: str) -> None:
        """Joins the channel of a variant, when its workers have."""
        reset_peak(self._device)
        plan = self._plan
        largest = max(parameter.nbytes for parameter in self._training.model.parameters())
        slot = max(4096, min(SLOT_BYTES, -(-largest // 4096) * 4096))
        ring = "cpu" if self._device.type == "cpu" else f"cuda:{self._device.index}"
        self._trainer = TrainerAgent(
            variant,
            rank=self._rank,
            world_size=plan.ranks,
            endpoint=plan.endpoint,
            device=place_of(self._rank),
            distribution="assembled" if variant == UNGATHERED else "colocated",
            ring=RingOptions(SLOTS, slot, device=ring),
        )
        if variant == UNGATHERED:
            # DTensors say themselves which rows they are.
            self._trainer.register(self._training.model.named_parameters())

    def ready(self, replicas: int) -> None:
        """Waits until so many workers have all that they want."""
        assert self._trainer is not None
        self._trainer.wait_ready(replicas, timeout=LIMIT_S)

    def train(self, steps: int) -> None:
        """Takes steps: weights change in place."""
        for _ in range(steps):
            self._training.step()

    def round(self, version: int) -> RankReport:
        """Hands out a version."""
        trainer = self._trainer
        assert trainer is not None
        dist.barrier()
        before = time.perf_counter()
        self._came = packed = 0
        result: RoundResult | None
        if trainer.distribution.value == "assembled":
            result = trainer.publish(version, timeout=LIMIT_S, **LIMITS)
            released = trainer.may_write()
        else:
            with trainer.open_round(version, timeout=LIMIT_S, **LIMITS) as r:
                r.send_all(self._whole())
            result, packed = r.result, r.nbytes
            released = trainer.ring.free == trainer.ring.slots
        seconds = time.perf_counter() - before
        assert result is not None
        fates = {name: each.fate.value for name, each in result.replicas.items()}
        return RankReport(
            result.outcome.value, result.reason, fates, seconds, self._came, packed, released
        )

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, whole, came in self._training.gathered():
            self._came += came
            yield name, whole

    def digests(self) -> dict[str, str]:
        """Returns those of all whole tensors; of other ranks than the first, none."""
        digests: dict[str, str] = {}
        for name, whole, _ in self._training.gathered():
            if self._rank == 0:
                digests[name] = digest(whole)
        return digests

    def peak(self) -> int:
        """Returns the most memory that this rank had since `open`, in bytes."""
        return peak(self._device)

    def close(self) -> None:
        """Leaves the channel."""
        assert self._trainer is not None
        self._trainer.close()
        self._trainer = None

    def end(self) -> None:
        """The last call."""
        dist.destroy_process_group()


def obey(told: Told, plan: RankPlan, rank: int, ordinal: int) -> None:
    """A process: a rank that does what it is told."""
    me = Rank(plan, rank, ordinal)
    told.say("ready")
    while True:
        word, *more = told.hear()
        told.say(getattr(me, word)(*more))
        if word == "end":
            return
