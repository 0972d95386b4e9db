"""A small transformer language model, whole or one half of a tensor-parallel pair."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional

from .reports import Size


class Part(Struct, frozen=True):
    """Which share of the heads and of the hidden units a process computes."""

    index: int
    count: int
    add: Callable[[Tensor], Tensor]
    """Adds up what all parts computed."""


WHOLE = Part(0, 1, lambda tensor: tensor)


class Matrix(nn.Module):
    """The rows or the columns of a matrix that a part owns.

    `weight` has the shape [outputs / parts, inputs] or [outputs, inputs / parts].
    """

    def __init__(self, outputs: int, inputs: int, by: Literal["rows", "columns"], part: Part):
        super().__init__()
        self.shape = (outputs, inputs)
        self.axis = 0 if by == "rows" else 1
        mine = [outputs, inputs]
        mine[self.axis] //= part.count
        self.start = tuple(part.index * mine[axis] if axis == self.axis else 0 for axis in (0, 1))
        self.weight = nn.Parameter(torch.randn(mine) * 0.6 * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Block(nn.Module):
    """Attention over what came before, then a feed-forward layer: [batch, time, width]."""

    def __init__(self, size: Size, part: Part) -> None:
        super().__init__()
        width, hidden = size.width, 4 * size.width
        self.part = part
        self.heads = size.heads // part.count
        self.before_attention = nn.RMSNorm(width)
        self.query = Matrix(width, width, "rows", part)
        self.key = Matrix(width, width, "rows", part)
        self.value = Matrix(width, width, "rows", part)
        self.mix = Matrix(width, width, "columns", part)
        self.before_hidden = nn.RMSNorm(width)
        self.up = Matrix(hidden, width, "rows", part)
        self.down = Matrix(width, hidden, "columns", part)

    def forward(self, x: Tensor) -> Tensor:
        normal: Tensor = self.before_attention(x)
        query, key, value = (self._by_head(m(normal)) for m in (self.query, self.key, self.value))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.part.add(self.mix(seen.transpose(1, 2).flatten(2)))
        hidden = functional.gelu(self.up(self.before_hidden(x)))
        return x + self.part.add(self.down(hidden))

    def _by_head(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        return x.view(batch, time, self.heads, -1).transpose(1, 2)


class Model(nn.Module):
    """A decoder-only transformer; the embedding is also the output layer.

    Args:
        size: How large it is.
        part: Which share this process computes; the embeddings and norms are whole in each.
    """

    def __init__(self, size: Size, part: Part = WHOLE) -> None:
        super().__init__()
        self.context = size.context
        self.embedding = nn.Parameter(torch.randn(size.vocabulary, size.width) * 0.15)
        self.places = nn.Parameter(torch.randn(size.context, size.width) * 0.15)
        self.blocks = nn.ModuleList(Block(size, part) for _ in range(size.depth))
        self.last_norm = nn.RMSNorm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits [batch, time, vocabulary] of each next byte; tokens: int64 [batch, time]."""
        x = self.embedding[tokens] + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.last_norm(x), self.embedding)

    def matrices(self) -> dict[str, Matrix]:
        """Returns what is split between parts, by the name of its parameter."""
        return {f"{name}.weight": m for name, m in self.named_modules() if isinstance(m, Matrix)}

    def regions(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Returns the global shape and the start of each parameter that is a piece."""
        return {name: (matrix.shape, matrix.start) for name, matrix in self.matrices().items()}


def loss_of(model: Model, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Returns the mean loss, in nats a byte, of predicting each token from those before it.

    Args:
        model: The model.
        tokens: int64 [texts, tokens].
        lengths: How many bytes each token of the vocabulary has, int64 [vocabulary].
    """
    logits: Tensor = model(tokens[:, :-1])
    targets = tokens[:, 1:].flatten()
    nats = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    return nats / lengths[targets].sum()


@torch.inference_mode()
def write(model: Model, start: list[int], length: int, end: int, seed: int) -> list[int]:
    """Returns the tokens that the model writes: `start` and what it takes to go on with.

    It stops at the token `end` and after `length` tokens. The same weights and the same seed write
    the same, in each process of a pair too.
    """
    random = torch.Generator().manual_seed(seed)
    text = list(start)
    while len(text) < length:
        tokens = torch.tensor([text[-model.context :]], device=model.embedding.device)
        logits: Tensor = model(tokens)
        chances = torch.softmax(logits[0, -1].cpu() / 0.7, dim=-1)
        token = int(torch.multinomial(chances, 1, generator=random))
        if token == end:
            break
        text.append(token)
    return text


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Returns the SHA-256 over all bytes of the tensors, in the order of their names."""
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors, key=lambda pair: pair[0]):
        plain = tensor.detach().cpu().contiguous()
        digest.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))
    return digest.hexdigest()
