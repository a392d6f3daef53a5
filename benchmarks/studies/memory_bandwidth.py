"""How fast this machine reads memory. A pass must read every weight once, so this bounds its speed."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

BUFFER = 1 << 30
"""Bytes of the buffer: many times a processor's caches."""


class BufferReader:
    """Sums a buffer with all of torch's threads.

    Args:
        device: of the buffer.
        size: bytes of the buffer, rounded down to whole 64-bit integers, whose sum takes the least arithmetic.
    """

    def __init__(self, device: torch.device, size: int = BUFFER) -> None:
        self._buffer = torch.ones(max(1, size // 8), dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes read in one call."""
        return self._buffer.nbytes

    def __call__(self) -> None:
        """Read the buffer, and wait until that is done."""
        self._buffer.sum().item()


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a pass over one token reads: all, except an input embedding used only for look-ups, and
    experts that the token does not use. A pass over several tokens reads more experts."""
    used = getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None)
    found = {
        weight.data_ptr(): weight.nbytes * used // len(weight) if used and ".experts." in name else weight.nbytes
        for name, weight in model.named_parameters()
    }
    inputs, outputs = (_weight(model, name) for name in ("get_input_embeddings", "get_output_embeddings"))
    if inputs is not None and (outputs is None or outputs.data_ptr() != inputs.data_ptr()):
        found.pop(inputs.data_ptr(), None)
    return sum(found.values())


def _weight(model: torch.nn.Module, name: str) -> torch.Tensor | None:
    module = getattr(model, name)()
    weight: torch.Tensor | None = getattr(module, "weight", None)
    return weight
