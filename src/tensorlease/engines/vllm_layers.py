"""What vLLM knows of layers that are being loaded anew: what they lack, and how to give that up.

vLLM takes a layer of which only some tensors came as loaded, and leaves the rest of its memory
unwritten; of a layer of which none came it keeps the old weights. Neither is the version that was
sent. And what an update that failed has left behind is loaded with the next one.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

MOST_LACKING = 5
"""Layers that are named."""


def lacking(model: torch.nn.Module, *, whole: bool) -> list[str]:
    """Returns a text for each layer that is not loaded in full; it begins with the layer's name.

    Of quantised layers, of which checkpoints leave out what they can, nothing is said.

    Args:
        model: Between the beginning of a load by layers and its end.
        whole: Whether layers of which nothing came count, too.
    """
    found: list[str] = []
    for name, layer, info in _begun(model):
        parameters = [each for _, each in layer.named_parameters(recurse=False)]
        if not parameters or _quantised(layer):
            continue
        total = info.load_numel_total - _padding(layer, parameters)
        if info.load_numel >= total or not (whole or info.load_numel):
            continue
        found.append(f"{name}: {info.load_numel} of {total} elements were sent")
        if len(found) == MOST_LACKING:
            break
    return found


def give_up(model: torch.nn.Module) -> None:
    """Ends a load by layers that failed: each layer has the tensors that it had before.

    Else what layers have kept of it would be loaded with the next one, or raised there.
    """
    for _, layer, info in _begun(model):
        if info.kernel_tensors is not None:
            _place_back(layer, info)
        info.reset()


def _begun(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError:
        return  # A version that does not load by layers, or counts otherwise.
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            yield name, layer, info


def _place_back(layer: torch.nn.Module, info: Any) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise._place_kernel_tensors(layer, info)


def _quantised(layer: torch.nn.Module) -> bool:
    method = getattr(layer, "quant_method", None)
    return method is not None and not type(method).__name__.startswith("Unquantized")


def _padding(layer: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> int:
    """Returns how many elements of a vocabulary's rows no checkpoint has."""
    rows = getattr(layer, "shard_indices", None)
    if rows is None:
        return 0
    padding = rows.num_elements_padded - rows.num_org_elements - rows.num_added_elements
    return sum(padding * each[0].numel() for each in parameters if each.dim() > 1)
