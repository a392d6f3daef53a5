"""Kernels for GPUs in Triton: linear layers, means and attention in one fixed order, over rows that keep their memory.

They have run in Triton's interpreter, and compile for the processors that ``docs/how-it-works.md`` names. They have not
run on a GPU.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


def runs_on(device: torch.device) -> bool:
    """Whether these kernels run on this device. Triton comes with torch's builds for CUDA."""
    return device.type == "cuda" and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
