"""Host memory that a GPU copies from without the CPU, and small tensors brought to another device without waiting."""

from __future__ import annotations

from functools import cache

import torch

EXACT_FROM_MB = 64
"""Pinned memory of more megabytes is taken as it is, and given back at once. Torch rounds other sizes up to powers of
two, and keeps them for later."""
REGISTERING_THREADS = 8
"""Threads that touch the pages of pinned memory before they are locked: torch's maximum is 128, one page after the
other takes about a second for 1 GiB."""


def brought(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A CPU tensor on a device. Nothing waits: memory that is not pinned would be copied only once all earlier work of
    the device is done."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pinned(size: int) -> torch.Tensor:
    """Pinned memory of ``size`` bytes; it takes ``pinned_size``."""
    _set_up()
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def pinned_size(size: int) -> int:
    """The bytes that pinned memory of ``size`` bytes really takes."""
    exact = _set_up() and size > EXACT_FROM_MB << 20
    return size if exact or not size else 1 << (size - 1).bit_length()


@cache
def _set_up() -> bool:
    """Let torch pin large memory exactly and by several threads; false for a torch that cannot."""
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
