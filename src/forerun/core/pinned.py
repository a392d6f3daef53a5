"""Pinned host memory, and asynchronous copies of small tensors to a device."""

from __future__ import annotations

from functools import cache

import torch

EXACT_FROM_MB = 64
"""Above this size, pinned memory is exact and freed at once; torch rounds others up to powers of two, cached."""
REGISTERING_THREADS = 8
"""Threads that touch pages before they are locked, at most 128 in torch: one thread needs about a second per GiB."""


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a CPU tensor to a device through pinned memory: other copies wait for all earlier work of the device."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pinned(size: int) -> torch.Tensor:
    """Allocate pinned memory of ``size`` bytes, which occupies ``pinned_size``."""
    _set_up()
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def pinned_size(size: int) -> int:
    """Return the bytes that pinned memory of ``size`` bytes occupies."""
    exact = _set_up() and size > EXACT_FROM_MB << 20
    return size if exact or not size else 1 << (size - 1).bit_length()


@cache
def _set_up() -> bool:
    """Let torch pin large memory exactly and by several threads; return whether it can."""
    settings = {
        "pinned_max_round_threshold_mb": EXACT_FROM_MB, "pinned_max_cached_size_mb": EXACT_FROM_MB,
        "pinned_use_cuda_host_register": True, "pinned_num_register_threads": REGISTERING_THREADS,
    }  # fmt: skip
    own = ",".join(f"{name}:{value}" for name, value in settings.items())
    try:
        before = torch._C._accelerator_getAllocatorSettings()
        torch._C._accelerator_setAllocatorSettings(f"{before},{own}" if before else own)
    except (AttributeError, RuntimeError, ValueError):
        return False
    return True
