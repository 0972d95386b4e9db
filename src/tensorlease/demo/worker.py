"""One of the demo's inference workers: a replica alone, or one half of a tensor-parallel pair."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tensorlease import WorkerAgent
from tensorlease.protocol.errors import DeadlineError

from .model import WHOLE, Model, Part, digest_of, loss_of, write
from .reports import CHANNEL, LIMIT_S, Plan, Started, Tell, Wrote
from .text import Vocabulary, corpus, windows

CORRUPT_VARIABLE = "TENSORLEASE_TEST_CORRUPT"
"""Fault tests only: the worker named so, as `replica/member`, changes a byte of its weights."""


def serve(plan: Plan, replica: str, member: int, size: int, tell: Tell) -> None:
    """Writes a line of text with the weights of every version.

    Raises:
        DeadlineError: No version came for too long.
    """
    part = WHOLE
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=(Path(plan.directory) / replica).as_uri(),
            rank=member,
            world_size=size,
            timeout=timedelta(seconds=LIMIT_S),
        )
        part = Part(member, size, add_up)
    model = Model(plan.size, part).to(plan.device)
    model.requires_grad_(False)
    _, held_out = corpus()
    vocabulary = Vocabulary(plan.pieces)
    exam = windows(vocabulary.encode(held_out), plan.size.context + 1, plan.held_out)
    exam_tokens = torch.tensor(exam, device=plan.device)
    lengths = torch.tensor([len(piece) for piece in plan.pieces], device=plan.device)
    start = vocabulary.encode(b"The ")[:1]

    with WorkerAgent(
        CHANNEL, replica=replica, member=member, size=size, endpoint=plan.endpoint
    ) as worker:
        # The model's parameters are where versions arrive; a half says which half it is.
        worker.attach(model.named_parameters(), regions=model.regions() if size > 1 else None)
        tell(Started(f"attached {sum(p.numel() for p in model.parameters()):,} parameters"))
        while worker.version < plan.versions:
            version = worker.step(timeout=LIMIT_S)
            if version is None:
                raise DeadlineError(f"no version came within {LIMIT_S:g} s")
            corrupt(model, f"{replica}/{member}")
            with torch.inference_mode():
                loss = float(loss_of(model, exam_tokens, lengths))
            seed = 10 * (plan.seed + version) + size
            written = write(model, start, plan.line, vocabulary.newline, seed)
            line = vocabulary.decode(written)
            tell(Wrote(version, loss, line, digest_of(gathered(model, size))))
    if size > 1:
        dist.destroy_process_group()


def add_up(tensor: Tensor) -> Tensor:
    """Returns the sum over the members of the replica; each of them gets it."""
    total = tensor.cpu()
    dist.all_reduce(total)
    return total.to(tensor.device)


def gathered(model: Model, size: int) -> list[tuple[str, Tensor]]:
    """Returns all parameters whole: what is split is put together from all members."""
    matrices = model.matrices() if size > 1 else {}
    whole: list[tuple[str, Tensor]] = []
    for name, tensor in model.named_parameters():
        if name in matrices:
            mine = tensor.detach().cpu()
            pieces = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(pieces, mine)
            whole.append((name, torch.cat(pieces, dim=matrices[name].axis)))
        else:
            whole.append((name, tensor))
    return whole


def corrupt(model: Model, name: str) -> None:
    """Changes one number if a test asks this worker to."""
    if os.environ.get(CORRUPT_VARIABLE) == name:
        model.embedding.data[0, 0] += 1
