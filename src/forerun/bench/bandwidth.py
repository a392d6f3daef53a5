"""How fast this machine reads memory: the yardstick of a pass, which must read every weight once."""

from __future__ import annotations

import torch

BUFFER = 1 << 30
"""Bytes of the buffer: many times what the caches of a processor hold."""


class Reader:
    """A buffer that all of torch's threads add up, and nothing else.

    Args:
        device: where the buffer lies.
        size: its bytes; rounded down to whole integers of 64 bits, whose sum costs the least arithmetic.
    """

    def __init__(self, device: torch.device, size: int = BUFFER) -> None:
        self._buffer = torch.ones(max(1, size // 8), dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes read in one call."""
        return self._buffer.nbytes

    def __call__(self) -> None:
        """Read the buffer, and wait until it is read."""
        self._buffer.sum().item()


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights that a pass over one token reads: all but an input embedding that only looks rows up."""
    found = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    inputs, outputs = (_weight(model, name) for name in ("get_input_embeddings", "get_output_embeddings"))
    if inputs is not None and (outputs is None or outputs.data_ptr() != inputs.data_ptr()):
        found.pop(inputs.data_ptr(), None)
    return sum(found.values())


def _weight(model: torch.nn.Module, name: str) -> torch.Tensor | None:
    module = getattr(model, name)()
    weight: torch.Tensor | None = getattr(module, "weight", None)
    return weight
