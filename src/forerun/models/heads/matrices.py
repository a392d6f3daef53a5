"""The matrices of a head's own layers: of the target's type, or in blocks of eight bits beside a target that is stored.

A stored target computes in float32. A head in float32 would read four to eight times as many bytes for a weight as the
target does. So its matrices are rounded to blocks of eight bits, ``Q8_0``, once, when it is bound. That changes drafts,
never the output.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from forerun.kernels.linear.linear import Weights, product
from forerun.models.forward.architecture import is_stored
from forerun.models.forward.scorer import Scorer

BLOCK = 32
"""Columns of a block."""


def weight_beside(target: Scorer, weight: torch.Tensor) -> torch.Tensor:
    """A weight on the target's device: a matrix as ``linear`` takes it, anything else of the target's type.

    Args:
        target: of the head.
        weight: a vector, or a matrix ``[O, K]``. One whose rows are no whole number of blocks is never rounded.
    """
    if weight.dim() == 2 and weight.shape[1] % BLOCK == 0 and is_stored(target.model):
        from gguf import GGMLQuantizationType, quantize

        return torch.from_numpy(quantize(weight.float().numpy(), GGMLQuantizationType.Q8_0))
    return placed(target, weight)


def placed(target: Scorer, weight: torch.Tensor) -> torch.Tensor:
    """A weight of the target's type, on its device."""
    return weight.to(target.device, target.model.dtype).contiguous()


def weights_of(matrix: torch.Tensor, bias: torch.Tensor | None = None) -> Weights:
    """A matrix that ``weight_beside`` made, as kernels take it."""
    stored = not matrix.is_floating_point()
    return Weights(matrix, "Q8_0" if stored else str(matrix.dtype), bias, quantised=stored)


def multiply(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """``x @ weights.T + bias``, ``[n, K]`` to ``[n, O]``. Floats are multiplied by the target's kernels inside
    ``Ordered()``, stored weights everywhere."""
    if weights.rows.is_floating_point():
        return functional.linear(x, weights.rows, weights.bias)
    made = product(x, weights._replace(bias=None))
    return made if weights.bias is None else made + weights.bias


def linear(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``multiply`` with a matrix that ``weight_beside`` made."""
    return multiply(x, weights_of(matrix, bias))
