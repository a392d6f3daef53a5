"""Compiling before the first request what every engine runs, so that no request waits for it."""

from __future__ import annotations

import torch

from forerun.core import noise, top_p
from forerun.kernels.attention import attention


def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Compile what passes on this device with this type and sampling may run, or load it from an earlier process."""
    attention.warm_up(device, dtype)
    noise.warm_up()
    top_p.warm_up()
