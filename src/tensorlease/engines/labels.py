"""What trainers and an engine's workers call the device that they share."""

from __future__ import annotations

import torch


def label_of(device: torch.device) -> str:
    """Returns what trainers on the same device call it: its UUID, or `cpu:0`."""
    if device.type != "cuda":
        return "cpu:0"
    return str(torch.cuda.get_device_properties(device).uuid).lower()
