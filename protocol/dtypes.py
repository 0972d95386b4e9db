"""The dtypes that may travel, by name, with the bytes of one element.

The list is closed: a name outside it is refused while decoding, so that a peer can never make a
worker look up an arbitrary attribute of torch. It holds every torch dtype that has a byte view;
quantized dtypes (their scales live outside the bytes) are left out on purpose.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from .errors import ProtocolError

ITEM_SIZES: Final = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
        "int8": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        # Two fp4 numbers an element: the shape counts bytes, as torch's does.
        "float4_e2m1fn_x2": 1,
        # Sub-byte integers: torch stores one number a byte.
        **{f"{kind}{bits}": 1 for kind in ("int", "uint") for bits in range(1, 8)},
        # Untyped containers of packed bits.
        "bits1x8": 1,
        "bits2x4": 1,
        "bits4x2": 1,
        "bits8": 1,
        "bits16": 2,
    }
)
"""Bytes of one element, by the dtype's name without the `torch.` prefix."""


def item_size(name: str) -> int:
    """Returns the bytes of one element of dtype `name`; raises `ProtocolError` if it is unknown."""
    try:
        return ITEM_SIZES[name]
    except KeyError:
        raise ProtocolError(f"dtype {name[:64]!r} is not one of the dtypes that travel") from None
