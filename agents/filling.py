"""How a tensor, or a box of it, gets into a slot: in row-major order, in the slot's dtype.

There is no temporary of the tensor's size: the bytes go from where they are into the slot, whatever
the strides, the device, or the dtype.
"""

from __future__ import annotations

from typing import Final

import torch

from ..protocol.dtypes import ITEM_SIZES
from ..protocol.errors import ConfigError
from ..protocol.regions import Region, single_run
from .casting import convert, meant, why_not
from .copying import Run, copy_runs
from .errors import ExportError
from .mappings import process_mappings
from .placement import Placed

_MASTERS: Final = ("float64", "float32", "bfloat16", "float16")
"""What the dtype of a whole round is for. Smaller floats are quantized: their values mean nothing
without their scales, and are left as they are."""


def check_memory(placed: Placed) -> None:
    """Raises `ExportError` for a tensor whose storage was shrunk under it."""
    if not placed.has_memory:
        raise ExportError(
            placed.name,
            f"has lost its memory ({placed.tensor.untyped_storage().nbytes()} bytes are left of its"
            " storage), as FSDP takes it between steps: give it back before",
        )


def check_sendable(placed: Placed) -> None:
    """Raises `ExportError` for a tensor that a trainer cannot send, though it has plain memory."""
    if not placed.nbytes:
        return
    check_memory(placed)
    received = process_mappings().owner_of(placed.tensor.data_ptr())
    if received is not None:
        raise ExportError(
            placed.name,
            f"was received: it lies in buffer {received[1]} of trainer {received[0]}, which may"
            " write to it at any time, and only its owner can hand it on; clone it first",
        )


def dtype_name(dtype: object) -> str | None:
    """Returns the name of the dtype that a user asks for; raises `ConfigError` for no dtype."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, torch.dtype) or name not in ITEM_SIZES:
        raise ConfigError(f"dtype {dtype!r}: must be a dtype of torch that travels{meant(dtype)}")
    if not dtype.is_floating_point:
        raise ConfigError(f"dtype {dtype}: only floating tensors are converted, to floating ones")
    return name


def sent_dtype(placed: Placed, own: str | None, of_round: str | None) -> str:
    """Returns the dtype that a tensor has in the slot.

    Args:
        placed: The tensor.
        own: What was asked for this one.
        of_round: What was asked for all tensors of the round; not for integers, nor for floats of
            one byte.

    Raises:
        ExportError: It cannot be converted so.
    """
    if own is None:
        return of_round if of_round is not None and placed.dtype in _MASTERS else placed.dtype
    reason = why_not(getattr(torch, placed.dtype), getattr(torch, own), placed.device)
    if reason:
        raise ExportError(
            placed.name,
            f"is {placed.dtype} and cannot become {own}: {reason}; send it as it is, or convert it"
            " yourself",
        )
    return own


def copies_bytes(device: torch.device, slots: str) -> bool:
    """Whether `copy_bytes` copies from memory of a device to the slots of a ring."""
    if device.type == "cpu":
        return slots == "cpu"
    return device.type == "cuda" and f"cuda:{device.index}" == slots


def copy_bytes(slot: torch.Tensor, offset: int, source: int, nbytes: int) -> None:
    """Copies a run of bytes into a slot, on a GPU in the order of this thread's current stream.

    Args:
        slot: The slot, uint8 of one axis.
        offset: Where they go in it.
        source: Address of the first, in memory for which `copies_bytes` is true.
        nbytes: How many.
    """
    run = Run(slot.data_ptr() + offset, source, nbytes)
    if slot.is_cuda:
        from .device_copies import copy_now

        copy_now(slot.device.index, run)
    else:
        copy_runs([run])


def fill(slot: torch.Tensor, offset: int, placed: Placed, box: Region, dtype: str) -> None:
    """Copies a box of a tensor into a slot; all of it is there when this returns.

    In a slot on a GPU it is there for what follows on this thread's current stream.

    Args:
        slot: The slot, uint8 of one axis.
        offset: Where the box begins in it, in bytes.
        placed: The tensor.
        box: The box, in the coordinates of `placed.region`.
        dtype: The dtype that it has in the slot.
    """
    item = ITEM_SIZES[dtype]
    nbytes = box.count * item
    if not nbytes:
        return
    run = single_run(box, placed.region.length)
    slots = "cpu" if slot.device.type == "cpu" else f"cuda:{slot.device.index}"
    plain = dtype == placed.dtype and placed.contiguous
    if plain and run is not None and copies_bytes(placed.device, slots):
        copy_bytes(slot, offset, placed.address + run[0] * item, nbytes)
        return
    target = slot[offset : offset + nbytes]
    with torch.no_grad():
        tensor = placed.box()
        for axis, (start, length) in enumerate(zip(box.start, box.length, strict=True)):
            tensor = tensor.narrow(axis, start, length)
        # Into pageable memory a copy from a device is complete when it returns.
        convert(target.view(getattr(torch, dtype)).view(box.length), tensor)
