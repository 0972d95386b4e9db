"""One of the demo's trainers: ordinary FSDP2 training, plus five lines of tensorlease."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tensorlease import TrainerAgent
from tensorlease.agents import RoundHandle

from .by_hand import ByHand
from .model import Model, digest_of, loss_of
from .reports import CHANNEL, LIMIT_S, REPLICAS, TRAINERS, Plan, Progress, Published, Round, Tell
from .reports import Receiver as ReceiverReport
from .text import Vocabulary, corpus


def train(plan: Plan, rank: int, tell: Tell) -> None:
    """Trains the model together with the other ranks, and hands out each version of it.

    Raises:
        RoundFailedError: A round did not commit on every replica.
        DeadlineError: The workers are not there, or do not let go of the weights.
    """
    dist.init_process_group(
        "gloo",
        init_method=(Path(plan.directory) / "trainers").as_uri(),
        rank=rank,
        world_size=TRAINERS,
        timeout=timedelta(seconds=LIMIT_S),
    )
    by_hand = ByHand(plan, rank) if plan.by_hand else None
    model = shard(plan) if by_hand is None else by_hand.model
    owned = dict(model.named_parameters()) if by_hand is None else by_hand.rows
    optimizer = torch.optim.AdamW(owned.values(), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=6e-3, total_steps=max(10, plan.versions * plan.steps), pct_start=0.1
    )
    batches = Batches(plan, rank)

    with TrainerAgent(CHANNEL, rank=rank, world_size=TRAINERS, endpoint=plan.endpoint) as trainer:
        # This rank's shards move into shared memory, or stay on a GPU; FSDP and the optimizer go on
        # as before.
        trainer.register(owned, regions=None if by_hand is None else by_hand.regions)
        trainer.wait_ready(replicas=len(REPLICAS), timeout=LIMIT_S)
        loss: float | None = None
        for version in range(1, plan.versions + 1):
            tell(Published(version, digest_of(gathered(model))))
            handle = trainer.publish_nowait(version)
            losses: list[float] = []
            for step in range(1, plan.steps + 1) if version < plan.versions else ():
                # The workers read the weights while the first of these runs forward and backward.
                batch_loss = loss_of(model, batches.next(), batches.lengths)
                batch_loss.backward()  # type: ignore[no-untyped-call]
                if by_hand is not None:
                    by_hand.take_gradients()
                # Nobody may be reading what the optimizer is about to overwrite.
                handle.released.wait(LIMIT_S)
                optimizer.step()
                optimizer.zero_grad()
                if by_hand is not None:
                    by_hand.put_together()
                schedule.step()
                if step == 1:
                    tell(outcome(handle, loss))
                losses.append(float(batch_loss))
                tell(Progress(version + 1, step, losses[-1]))
            if not losses:
                tell(outcome(handle, loss))
            loss = sum(losses) / max(1, len(losses))
    dist.destroy_process_group()


def shard(plan: Plan) -> Model:
    """Returns the model with each parameter cut by rows between the trainers, as DTensors."""
    torch.manual_seed(plan.seed)  # All ranks cut the same model.
    model = Model(plan.size)
    mesh = init_device_mesh("cpu", (TRAINERS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gathered(model: Model) -> list[tuple[str, Tensor]]:
    """Returns all parameters whole, from the shards of all ranks, for the digest."""
    whole: list[tuple[str, Tensor]] = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            whole.append((name, tensor))
    return whole


def outcome(handle: RoundHandle, loss: float | None) -> Round:
    """Waits for the end of the round and returns what to tell of it."""
    result = handle.result(LIMIT_S).raise_for_status()
    receivers = [
        ReceiverReport(r.name, r.nbytes, r.prepare_s, r.copy_s, r.commit_s)
        for r in result.receivers.values()
    ]
    return Round(result.version, result.outcome.value, result.seconds, loss, receivers)


class Batches:
    """Random pieces of the text, others for each rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        text, _ = corpus()
        self._tokens = torch.tensor(Vocabulary(plan.pieces).encode(text))
        self._span = torch.arange(plan.size.context + 1)
        self._device = plan.device
        self._count = plan.batch
        self._random = torch.Generator().manual_seed(1 + plan.seed * TRAINERS + rank)
        self.lengths = torch.tensor([len(piece) for piece in plan.pieces], device=plan.device)
        """How many bytes each token has."""

    def next(self) -> Tensor:
        """Returns int64 [batch, context + 1]."""
        last = len(self._tokens) - len(self._span)
        starts = torch.randint(0, last + 1, (self._count, 1), generator=self._random)
        return self._tokens[starts + self._span].to(self._device)
