"""The names and shapes of the models that `tensorlease bench gpu` sends."""

from __future__ import annotations

from collections.abc import Mapping

MODELS = ("opt-125m", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b")

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(model: str) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of a model's tensors."""
    if model == "opt-125m":
        return opt(768, 12, 3072, 50272, 2050)
    if model == "qwen3-0.6b":
        return qwen3(1024, 28, 3072, 151936, 16, 8, tied=True)
    if model == "qwen3-8b":
        return qwen3(4096, 36, 12288, 151936, 32, 8)
    return qwen3(2048, 48, 768, 151936, 32, 4, experts=128)


def opt(
    width: int, layers: int, inner: int, vocabulary: int, positions: int
) -> dict[str, tuple[int, ...]]:
    """OPT: its published configuration."""
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocabulary, width),
        "embed_positions.weight": (positions, width),
        "final_layer_norm.weight": (width,),
        "final_layer_norm.bias": (width,),
    }
    for layer in range(layers):
        at = f"layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found[f"{at}.self_attn.{part}.weight"] = (width, width)
            found[f"{at}.self_attn.{part}.bias"] = (width,)
        for part, shape in (("fc1", (inner, width)), ("fc2", (width, inner))):
            found[f"{at}.{part}.weight"] = shape
            found[f"{at}.{part}.bias"] = shape[:1]
        for part in ("self_attn_layer_norm", "final_layer_norm"):
            found[f"{at}.{part}.weight"] = (width,)
            found[f"{at}.{part}.bias"] = (width,)
    return found


def qwen3(
    width: int,
    layers: int,
    inner: int,
    vocabulary: int,
    heads: int,
    groups: int,
    *,
    tied: bool = False,
    experts: int = 0,
) -> dict[str, tuple[int, ...]]:
    """Qwen3: its published configurations; heads are 128 wide."""
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocabulary, width),
        "norm.weight": (width,),
    }
    if not tied:
        found["lm_head.weight"] = (vocabulary, width)
    for layer in range(layers):
        at = f"layers.{layer}"
        for part, rows in (("q_proj", heads), ("k_proj", groups), ("v_proj", groups)):
            found[f"{at}.self_attn.{part}.weight"] = (rows * 128, width)
        found[f"{at}.self_attn.o_proj.weight"] = (width, heads * 128)
        for part in ("q_norm", "k_norm"):
            found[f"{at}.self_attn.{part}.weight"] = (128,)
        for part in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{part}.weight"] = (width,)
        if experts:
            found[f"{at}.mlp.gate.weight"] = (experts, width)
        for expert in range(max(1, experts)):
            where = f"{at}.mlp.experts.{expert}" if experts else f"{at}.mlp"
            found[f"{where}.gate_proj.weight"] = (inner, width)
            found[f"{where}.up_proj.weight"] = (inner, width)
            found[f"{where}.down_proj.weight"] = (width, inner)
    return found
