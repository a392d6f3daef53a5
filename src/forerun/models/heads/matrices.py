"""A head's matrices: of the target's type, or in blocks of eight bits for a target with quantised weights.

Such a target computes in float32, and a head in float32 would read four to eight times as many bytes per weight. So its
matrices are rounded to ``Q8_0`` when it is bound. That changes drafts, never the output.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from forerun.kernels.linear.linear import product
from forerun.kernels.linear.weight_matrix import Weights
from forerun.models.forward.architecture import is_stored
from forerun.models.forward.scorer import Scorer

BLOCK = 32
"""Columns per block."""


def weight_beside(target: Scorer, weight: torch.Tensor) -> torch.Tensor:
    """Prepare a vector or a matrix ``[O, K]`` for ``linear``; only rows of a multiple of ``BLOCK`` are rounded."""
    if weight.dim() == 2 and weight.shape[1] % BLOCK == 0 and is_stored(target.model):
        from gguf import GGMLQuantizationType, quantize

        return torch.from_numpy(quantize(weight.float().numpy(), GGMLQuantizationType.Q8_0))
    return placed(target, weight)


def placed(target: Scorer, weight: torch.Tensor) -> torch.Tensor:
    """Move a weight to the target's device and type."""
    return weight.to(target.device, target.model.dtype).contiguous()


def weights_of(matrix: torch.Tensor, bias: torch.Tensor | None = None) -> Weights:
    """Wrap a matrix from ``weight_beside`` for kernels."""
    stored = not matrix.is_floating_point()
    return Weights(matrix, "Q8_0" if stored else str(matrix.dtype), bias, quantised=stored)


def multiply(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Compute ``x @ weights.T + bias``, ``[n, O]``: floats by the target's kernels inside ``Ordered()``."""
    if weights.rows.is_floating_point():
        return functional.linear(x, weights.rows, weights.bias)
    made = product(x, weights._replace(bias=None))
    return made if weights.bias is None else made + weights.bias


def linear(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply with a matrix from ``weight_beside``."""
    return multiply(x, weights_of(matrix, bias))
