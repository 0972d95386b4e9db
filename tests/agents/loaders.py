"""A model that keeps its parameters as an engine does, and a loader of checkpoint names for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HEADS, KV, HIDDEN, INNER, VOCAB, EXPERTS = 8, 4, 6, 10, 12, 3


def checkpoint(seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Random weights under the names of a checkpoint; the same ones on every device."""
    import torch

    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(dtype)

    weights = {
        "embed": normal(VOCAB, HIDDEN),
        "lm_head": normal(VOCAB, HIDDEN),
        "q": normal(2 * HEADS, HIDDEN),
        "k": normal(2 * KV, HIDDEN),
        "v": normal(2 * KV, HIDDEN),
        "o": normal(HIDDEN, 2 * HEADS),
        "gate": normal(2 * INNER, HIDDEN),
        "up": normal(2 * INNER, HIDDEN),
        "down": normal(HIDDEN, 2 * INNER),
        "norm": normal(HIDDEN, dtype=torch.float32),
        "router": normal(EXPERTS, HIDDEN),
        "conv": normal(4, 5),
        "linear8": normal(4, HIDDEN),
        "packed": normal(4, 4),
        "scalar": normal(1),
        "inv_freq": normal(4),
        "empty": normal(0),
        "fused": normal(2, 2 * INNER, HIDDEN),
    }
    for expert in range(2 * EXPERTS):
        weights[f"experts.{expert}.gate"] = normal(INNER, HIDDEN)
        weights[f"experts.{expert}.up"] = normal(INNER, HIDDEN)
        weights[f"experts.{expert}.down"] = normal(HIDDEN, INNER)
    return {name: weight.to(device) for name, weight in weights.items()}


FALLBACK = {"linear8", "packed", "scalar"}
"""Names of which the loader makes more than copies."""


class EngineModel:
    """One of two ranks that cut heads and rows; it has its part of the experts."""

    def __init__(self, rank: int = 1, device: str = "cpu") -> None:
        import torch

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
            zeros = torch.zeros(shape, device=device).to(dtype)
            return torch.nn.Parameter(zeros, requires_grad=False)

        self.rank = rank
        self.loads: list[list[str]] = []
        self.weights = {
            "embed": parameter(VOCAB, HIDDEN),
            "qkv": parameter(HEADS + 2 * KV, HIDDEN),
            "o": parameter(HIDDEN, HEADS),
            "gate_up": parameter(2 * INNER, HIDDEN),
            "down": parameter(HIDDEN, INNER),
            "norm": parameter(HIDDEN),
            "router": parameter(EXPERTS, HIDDEN, dtype=torch.float32),
            "conv": parameter(5, 4),
            "linear8": parameter(4, HIDDEN, dtype=torch.float8_e4m3fn),
            "linear8_scale": parameter(1, dtype=torch.float32),
            "packed": parameter(0),
            "scalar": parameter(1),
            "empty": parameter(0),
            "fused": parameter(2, 2 * (INNER // 2), HIDDEN),
            "w13": parameter(EXPERTS, 2 * INNER, HIDDEN),
            "w2": parameter(EXPERTS, INNER, HIDDEN),
        }
        # Tied: one parameter, two names.
        self.weights["lm_head"] = self.weights["embed"]
        self.buffer: Any = None

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of all that a load sets."""
        found = {name: weight.clone() for name, weight in self.weights.items()}
        return found if self.buffer is None else {**found, "buffer": self.buffer.clone()}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        import torch

        seen: list[str] = []
        with torch.no_grad():
            for name, weight in weights:
                seen.append(name)
                self._load(name, weight)
        self.loads.append(seen)

    def _load(self, name: str, weight: torch.Tensor) -> None:
        import torch

        mine = self.weights
        if name.startswith("experts."):
            self._load_expert(name, weight)
        elif name in ("q", "k", "v"):
            begin = {"q": 0, "k": HEADS, "v": HEADS + KV}[name]
            rows = HEADS if name == "q" else KV
            part = weight.narrow(0, rows * self.rank, rows)
            mine["qkv"].data.narrow(0, begin, rows).copy_(part)
        elif name in ("gate", "up"):
            begin = 0 if name == "gate" else INNER
            mine["gate_up"].data[begin : begin + INNER] = weight.chunk(2)[self.rank]
        elif name in ("o", "down"):
            # By way of a tensor of the loader's own, as engines do for other devices.
            mine[name].data.copy_(weight.chunk(2, dim=1)[self.rank].contiguous())
        elif name == "fused":  # Its halves are cut, each for itself.
            halves = weight.view(2, 2, INNER, HIDDEN)
            cut = halves.narrow(2, self.rank * (INNER // 2), INNER // 2)
            mine["fused"].data.view(2, 2, INNER // 2, HIDDEN).copy_(cut)
        elif name == "conv":
            mine["conv"].data.copy_(weight.t())
        elif name == "linear8":
            scale = weight.float().abs().max() / 448
            mine["linear8_scale"].data.copy_(scale.view(1))
            mine["linear8"].data.copy_((weight.float() / scale).to(torch.float8_e4m3fn))
        elif name == "packed":
            self.buffer = weight.view(torch.int16).roll(1)
        elif name == "scalar":
            mine["scalar"].data.fill_(weight.item())
        elif name == "empty":
            mine["empty"].data.copy_(weight)
        elif name not in ("lm_head", "inv_freq"):
            mine[name].data.copy_(weight)

    def _load_expert(self, name: str, weight: torch.Tensor) -> None:
        _, number, which = name.split(".")
        expert = int(number) - self.rank * EXPERTS
        if not 0 <= expert < EXPERTS:
            return  # Another rank's.
        if which == "down":
            self.weights["w2"].data[expert].copy_(weight.t())
        else:
            begin = 0 if which == "gate" else INNER
            self.weights["w13"].data[expert].narrow(0, begin, INNER).copy_(weight)


IGNORED = {"lm_head", "inv_freq", "empty"} | {
    f"experts.{expert}.{which}" for expert in range(EXPERTS) for which in ("gate", "up", "down")
}
"""Names of which rank 1 reads nothing."""


def expected(seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """What a fresh model has when it has loaded these weights."""
    model = EngineModel(device=device)
    model.load_weights(checkpoint(seed, device).items())
    return model.state()


def require_equal(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Asserts that both have the same bytes."""
    import torch

    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype, name
        assert have[name].shape == tensor.shape, name
        bits = (each.contiguous().view(-1).view(torch.uint8) for each in (have[name], tensor))
        assert torch.equal(*bits), name
