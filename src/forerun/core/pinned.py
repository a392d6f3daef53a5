"""Small tensors brought to another device without waiting for it."""

from __future__ import annotations

import torch


def brought(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A CPU tensor on a device. Nothing waits: memory that is not pinned would be copied only once all earlier work of
    the device is done."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
