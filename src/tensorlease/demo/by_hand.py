"""A model that the demo's trainers cut between them by hand, where FSDP2 cannot: on one GPU.

Each rank computes with the whole model, owns some rows of each parameter, and updates those: what an
optimizer that is sharded does. Ranks meet through the host, since NCCL wants a GPU for each of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .model import Model
from .reports import TRAINERS, Plan


class ByHand:
    """The whole model, and this rank's rows of each parameter: views of it, one beside the other.

    Args:
        plan: What is trained, and where.
        rank: Which of the trainers this is.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        torch.manual_seed(plan.seed)  # All ranks begin with the same model.
        self.model = Model(plan.size).to(plan.device)
        self.rows: dict[str, nn.Parameter] = {}
        """What this rank owns, by the parameter's name."""
        self.regions: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """The global shape of each, and where its rows begin."""
        self._at: dict[str, slice] = {}
        for name, parameter in self.model.named_parameters():
            begin, end = (len(parameter) * place // TRAINERS for place in (rank, rank + 1))
            self._at[name] = slice(begin, end)
            self.rows[name] = nn.Parameter(parameter.detach()[begin:end])
            start = (begin, *(0,) * (parameter.dim() - 1))
            self.regions[name] = (tuple(parameter.shape), start)

    def take_gradients(self) -> None:
        """Gives this rank's rows the mean of all ranks' gradients, and drops those of the model."""
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            mean = _summed(parameter.grad) / TRAINERS
            self.rows[name].grad = mean[self._at[name]].to(parameter.device)
            parameter.grad = None

    @torch.no_grad()
    def put_together(self) -> None:
        """Brings what the other ranks have updated into this rank's model."""
        for name, parameter in self.model.named_parameters():
            mine = torch.zeros_like(parameter)
            mine[self._at[name]] = self.rows[name]
            parameter.copy_(_summed(mine))


def _summed(tensor: Tensor) -> Tensor:
    """Returns the sum over all ranks, on the CPU."""
    total = tensor.detach().cpu()
    dist.all_reduce(total)
    return total
