"""A number that tells whether a tensor has the bytes that it had; it stays on the tensor's device."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from .casting import CARRIERS, parts_of

PART_BYTES: Final = 2**21
"""Of a tensor that are looked at at once: eight times as many are needed for it."""
_FACTOR: Final = -7046029254386353131  # odd: 2**64 divided by the golden ratio


def mark_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a scalar of int64 that depends on every bit, and on the order of the elements.

    Equal bytes have equal marks; that others have, too, is as unlikely as for any sum of 64 bits.
    """
    carrier = CARRIERS[tensor.element_size()]
    if carrier.is_complex:
        bits = torch.view_as_real(tensor.view(carrier)).view(torch.int64)
    else:
        bits = tensor.view(carrier)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    for part, _ in parts_of(bits, bits, PART_BYTES):
        flat = part.reshape(-1).to(torch.int64)
        total = total * _FACTOR + (flat * _weights(flat.numel(), tensor.device)).sum()
    return total


def _weights(count: int, device: torch.device) -> torch.Tensor:
    return _all_weights(1 << (count - 1).bit_length(), device)[:count]


@cache
def _all_weights(count: int, device: torch.device) -> torch.Tensor:
    """Returns odd numbers, no two alike: a bit of an element counts wherever it is."""
    with torch.inference_mode(False):
        places = torch.arange(count, dtype=torch.int64, device=device)
        mixed = places * _FACTOR
        return (mixed ^ (mixed >> 29)) | 1
