"""How fast this machine reads memory and multiplies. A pass must read every weight once, and multiply it by every
token, so these bound its speed."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

BUFFER = 1 << 30
"""Bytes of the buffer: many times a processor's caches."""
SIDE = 1024
"""Rows and columns of the multiplied matrices: more are no faster."""


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


class Multiplier:
    """Multiplies two square matrices that fit into caches, by torch's fastest product of the type.

    Args:
        dtype: float32, bfloat16, or int8, whose products are summed as int32.
        device: of the matrices.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._matrix = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
        self._product = torch._int_mm if dtype == torch.int8 else torch.mm

    operations = 2 * SIDE**3
    """Multiplications and additions in one call."""

    def __call__(self) -> None:
        """Multiply, and wait until that is done."""
        self._product(self._matrix, self._matrix)[0, 0].item()


def weight_operations(model: PreTrainedModel) -> int:
    """Multiplications and additions with the weights of linear layers, per token; attention and experts not counted."""
    sizes = ((getattr(module, "in_features", 0), getattr(module, "out_features", 0)) for module in model.modules())
    return 2 * sum(inputs * outputs for inputs, outputs in sizes)


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
