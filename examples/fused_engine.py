"""A small inference engine for the examples: fused weights, a loader for checkpoint names, a post-processing step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

Shapes = Mapping[str, tuple[int, ...]]

FUSED = {
    "qkv": ("query", "key", "value"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules of a checkpoint whose rows an engine keeps in one parameter, in this order."""
_OF = {part: (whole, parts) for whole, parts in FUSED.items() for part in parts}


class FusedWeights:
    """An engine's parameters: made for the names and shapes of a checkpoint, kept under others.

    Args:
        shapes: Of the checkpoint's tensors.
        device: Where they are to lie.
        dtype: What they are to be.
    """

    def __init__(self, shapes: Shapes, device: str, dtype: torch.dtype) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.loads = 0
        """How often `load_weights` was called: once a batch."""
        # Where each tensor of the checkpoint goes: rows of a parameter.
        self._places: dict[str, Tensor] = {}
        rows: dict[str, list[str]] = {}
        for name in shapes:
            fused = _fused(name)
            if fused is None:
                rows[name] = [name]
            elif fused[0] not in rows:
                rows[fused[0]] = [part for part in fused[1] if part in shapes]
        for whole, parts in rows.items():
            count = sum(shapes[part][0] for part in parts)
            shape = (count, *shapes[parts[0]][1:])
            parameter = torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02)
            self.parameters[whole] = parameter
            begin = 0
            for part in parts:
                end = begin + shapes[part][0]
                self._places[part] = parameter[begin:end]
                begin = end

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors of the checkpoint to where the engine has them.

        Raises:
            KeyError: The engine has no such tensor.
            ValueError: It has another shape here.
        """
        self.loads += 1
        for name, tensor in weights:
            place = self._places[name]
            if place.shape != tensor.shape:
                raise ValueError(f"{name}: {tuple(tensor.shape)} came for {tuple(place.shape)}")
            place.copy_(tensor)

    def unfused(self) -> Iterable[tuple[str, Tensor]]:
        """Returns what it has, by the checkpoint's names."""
        return self._places.items()


def _fused(name: str) -> tuple[str, list[str]] | None:
    """The parameter that a tensor is rows of, and the tensors that it is made of, in order."""
    at, _, leaf = name.rpartition(".")
    before, _, module = at.rpartition(".")
    if module not in _OF:
        return None
    whole, parts = _OF[module]
    start = f"{before}." if before else ""
    return f"{start}{whole}.{leaf}", [f"{start}{part}.{leaf}" for part in parts]


class FusedEngine(FusedWeights):
    """Adds what follows an update: the output layer is repacked, once a round."""

    output_name = "embed_tokens.weight"

    def __init__(self, shapes: Shapes, device: str, dtype: torch.dtype) -> None:
        super().__init__(shapes, device, dtype)
        self.post_processed: list[int] = []
        """The versions after which the step ran, in order."""
        self._output = self.parameters[self.output_name].t().contiguous()

    def post_process(self, version: int) -> None:
        """What an engine does when all weights of a version are there: in the commit hook."""
        self._output.copy_(self.parameters[self.output_name].t())
        self.post_processed.append(version)


class DemoEngine(FusedEngine):
    """Generates text with the weights of the demo's model, whose heads are 32 wide."""

    output_name = "embedding"

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits [vocabulary] of what follows; tokens: int64 [time]."""
        p = self.parameters
        x = p["embedding"][tokens] + p["places"][: len(tokens)]
        width = x.shape[-1]
        for block in range(_depth(p)):
            at = f"blocks.{block}"
            normal = functional.rms_norm(x, (width,), p[f"{at}.before_attention.weight"])
            q, k, v = functional.linear(normal, p[f"{at}.qkv.weight"]).chunk(3, dim=-1)
            q, k, v = (
                each.view(len(tokens), width // 32, 32).transpose(0, 1) for each in (q, k, v)
            )
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = seen.transpose(0, 1).reshape(len(tokens), width)
            x = x + functional.linear(mixed, p[f"{at}.mix.weight"])
            normal = functional.rms_norm(x, (width,), p[f"{at}.before_hidden.weight"])
            hidden = functional.gelu(functional.linear(normal, p[f"{at}.up.weight"]))
            x = x + functional.linear(hidden, p[f"{at}.down.weight"])
        return functional.rms_norm(x[-1], (width,), p["last_norm.weight"]) @ self._output

    def write(self, start: list[int], length: int, end: int, seed: int) -> list[int]:
        """Returns `start` and tokens that follow, `length` in all, up to `end`."""
        random = torch.Generator().manual_seed(seed)
        text = list(start)
        context = len(self.parameters["places"])
        while len(text) < length:
            tokens = torch.tensor(text[-context:], device=self._output.device)
            chances = torch.softmax(self.logits(tokens).float() / 0.7, dim=-1).cpu()
            token = int(torch.multinomial(chances, 1, generator=random))
            if token == end:
                break
            text.append(token)
        return text


def _depth(parameters: Mapping[str, Tensor]) -> int:
    return 1 + max(int(m[1]) for name in parameters if (m := re.match(r"blocks\.(\d+)\.", name)))
