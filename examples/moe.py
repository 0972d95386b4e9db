"""A mixture-of-experts language model for the examples, and how its ranks shard and gather it.

Its tensors have the names and shapes of Qwen3's checkpoints: one tensor for each projection of each
expert. It computes as a small such model would, without positions; every expert computes every
token, and those that are not chosen count nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tensorlease.commands.bench.gpu_shapes import qwen3

HEAD_WIDTH = 128
CHOSEN = 2
"""Experts of a token."""


class MoeSize(Struct, frozen=True):
    """How large it is."""

    width: int
    layers: int
    inner: int
    """Hidden units of an expert."""
    vocabulary: int
    heads: int
    groups: int
    """Heads of keys and values."""
    experts: int
    dtype: str
    trains: bool
    """False: for its shapes alone. The values are random, and a step adds to them."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the names and shapes of its tensors."""
        return qwen3(
            self.width,
            self.layers,
            self.inner,
            self.vocabulary,
            self.heads,
            self.groups,
            experts=self.experts,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(prod(shape) for shape in self.shapes().values()) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of all its tensors."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


SIZES = {
    "tiny": MoeSize(64, 2, 32, 256, 2, 1, 8, "float32", True),
    "qwen3-30b-a3b-6": MoeSize(2048, 6, 768, 151936, 32, 4, 128, "bfloat16", False),
    "qwen3-30b-a3b": MoeSize(2048, 48, 768, 151936, 32, 4, 128, "bfloat16", False),
}


class Part(nn.Module):
    """A module that holds what it is given."""


class Layer(Part):
    """Attention, then the experts: [batch, time, width]."""

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        attention, mlp = self.self_attn, self.mlp
        normal = functional.rms_norm(x, (width,), self.input_layernorm.weight)
        q, k, v = (
            functional.linear(normal, part.weight).view(batch, time, -1, HEAD_WIDTH).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q = functional.rms_norm(q, (HEAD_WIDTH,), attention.q_norm.weight)
        k = functional.rms_norm(k, (HEAD_WIDTH,), attention.k_norm.weight)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + functional.linear(seen.transpose(1, 2).flatten(2), attention.o_proj.weight)
        normal = functional.rms_norm(x, (width,), self.post_attention_layernorm.weight)
        chances = functional.linear(normal, mlp.gate.weight).softmax(-1)
        least = chances.topk(CHOSEN).values[..., -1:]
        chances = torch.where(chances >= least, chances, 0)
        for place, expert in mlp.experts.named_children():
            gate = functional.silu(functional.linear(normal, expert.gate_proj.weight))
            hidden = gate * functional.linear(normal, expert.up_proj.weight)
            share = chances[..., int(place), None]
            x = x + share * functional.linear(hidden, expert.down_proj.weight)
        return x


class MoeModel(Part):
    """The model; built by `build`."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits [batch, time, vocabulary]; tokens: int64 [batch, time]."""
        x = functional.embedding(tokens, self.embed_tokens.weight)
        for layer in self.layers.children():
            x = layer(x)
        x = functional.rms_norm(x, (x.shape[-1],), self.norm.weight)
        return functional.linear(x, self.lm_head.weight)


def build(size: MoeSize) -> MoeModel:
    """Returns a model with random weights, or on the meta device with none."""
    model = MoeModel()
    for name, shape in size.shapes().items():
        at: nn.Module = model
        *path, leaf = name.split(".")
        for depth, step in enumerate(path):
            if not hasattr(at, step):
                at.add_module(step, Layer() if depth == 1 and path[0] == "layers" else Part())
            at = getattr(at, step)
        value = torch.empty(shape, dtype=size.torch_dtype)
        if not value.is_meta:
            value.normal_(std=0.2) if len(shape) > 1 else value.fill_(1.0)
        at.register_parameter(leaf, nn.Parameter(value))
    return model


def shard(size: MoeSize, device: torch.device, seed: int) -> MoeModel:
    """Returns the model with each tensor cut by rows between all ranks, as DTensors (FSDP2)."""
    torch.manual_seed(seed)  # All ranks cut the same model.
    if size.trains:
        model = build(size).to(device)
    else:
        with torch.device("meta"):
            model = build(size)
    mesh = mesh_of(device)
    for layer in model.layers.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not size.trains:
        model.to_empty(device=device)
        torch.manual_seed(seed + dist.get_rank())
        for _, _, local in locals_of(model):
            local.normal_(std=0.02)
    return model


def through_host(device: torch.device) -> bool:
    """Whether ranks share GPUs: then they meet on the host, by gloo."""
    return device.type == "cuda" and dist.get_backend() == "gloo"


def mesh_of(device: torch.device) -> DeviceMesh:
    """Returns all ranks in one row."""
    if through_host(device):
        assert dist.group.WORLD is not None
        return DeviceMesh.from_group(dist.group.WORLD, device.type)
    return init_device_mesh(device.type, (dist.get_world_size(),))


def locals_of(model: nn.Module) -> Iterator[tuple[str, DTensor, Tensor]]:
    """Yields the name of each parameter, itself, and this rank's shard of it."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        yield name, parameter, parameter.detach().to_local()


class Training:
    """Steps of this rank; all ranks take them together.

    Args:
        size: Of the model.
        device: Where this rank's shards lie.
        rank: Its place; its batches are others than those of other ranks.
    """

    def __init__(self, size: MoeSize, device: torch.device, rank: int) -> None:
        self.model = shard(size, device, seed=1)
        self._size, self._device = size, device
        self._trains = size.trains and not through_host(device)
        self._random = torch.Generator().manual_seed(rank)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def step(self) -> None:
        """Takes one step: of the optimizer, or, where nothing is trained, one that adds a little."""
        if not self._trains:
            for _, _, local in locals_of(self.model):
                local.add_(2**-6)
            return
        tokens = torch.randint(0, self._size.vocabulary, (4, 17), generator=self._random)
        tokens = tokens.to(self._device)
        logits = self.model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def gathered(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yields the name of each tensor, all of it, and the bytes that came from other ranks.

        All ranks have to ask for each of them.
        """
        for name, parameter, local in locals_of(self.model):
            whole = gather(parameter, local, self._device)
            yield name, whole, whole.nbytes - local.nbytes


@torch.no_grad()
def gather(parameter: DTensor, local: Tensor, device: torch.device) -> Tensor:
    """Returns the whole tensor, from the shards of all ranks."""
    if not through_host(device):
        return parameter.detach().full_tensor()
    world = dist.get_world_size()
    rows = -(-parameter.shape[0] // world)
    mine = torch.zeros((rows, *parameter.shape[1:]), dtype=local.dtype)
    mine[: len(local)] = local.cpu()
    all_rows = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(all_rows, mine)
    return torch.cat(all_rows)[: parameter.shape[0]].to(device)
