"""Triton kernels for GPUs: linear layers, means and attention in one fixed order, over caches in place.

They run on a GPU, and for tests in Triton's interpreter. ``docs/how-it-works.md`` says which GPUs ran them.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


def runs_on(device: torch.device) -> bool:
    """Return whether these kernels run on this device. Triton comes with torch's builds for CUDA."""
    return device.type == "cuda" and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
