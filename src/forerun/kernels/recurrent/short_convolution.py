"""The short causal convolution in front of recurrent layers, over a draft tree: each channel, a few tokens back.

A token's output is a weighted sum of its own input and of those of its nearest ancestors, the farthest first. So its
bits depend on these alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from forerun.core.compiling import compiled
from forerun.kernels import gpu
from forerun.kernels.runtime.addresses import StructLayout, doubles, floats, integers, part
from forerun.kernels.runtime.executor import Operation, Program, Tasks

TASK_CHANNELS = 512
"""Channels of a task: enough work to hand out, and few enough to stay in the processor's cache."""


class ConvolutionOp(NamedTuple):
    """One call: addresses and sizes.

    Attributes:
        x: inputs of the tokens before, and of the block.
        weights: one row per tap, the farthest first.
        bias: address, or 0.
        parents: index of the parent of each of all tokens.
        first: tokens before the block, at least ``taps - 1``.
        wide: whether numbers are float64.
    """

    x: int
    weights: int
    bias: int
    out: int
    parents: int
    tokens: int
    first: int
    taps: int
    channels: int
    wide: int


CONVOLUTION_LAYOUT = StructLayout(ConvolutionOp)
read_convolution = CONVOLUTION_LAYOUT.reader()


def convolve(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, parents: torch.Tensor, first: int
) -> torch.Tensor:
    """Outputs ``[n - first, C]`` of the tokens from ``first`` on.

    Args:
        x: inputs, contiguous, ``[n, C]``, float32 or float64 as all others.
        weights: contiguous, ``[K, C]``, the farthest tap first.
        bias: ``[C]``, or None.
        parents: index of each token's parent, int64 ``[n]``; the first ``first`` tokens are a chain, at least K - 1.
    """
    if gpu.runs_on(x.device):
        from forerun.kernels.gpu import recurrences as there  # which needs Triton

        return there.convolve(x, weights, bias, parents, first)
    count, channels = x.shape
    out = x.new_empty(count - first, channels)
    op = ConvolutionOp(
        x.data_ptr(), weights.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        parents.data_ptr(), count, first, len(weights), channels, int(x.dtype == torch.float64),
    )  # fmt: skip
    Program([(CONVOLUTION, op)]).run_in_scratch(0)
    return out


@compiled
def short_convolution(address: int, fields: int, code: int, task: int, slot: int) -> None:
    """Some channels, for all tokens."""
    op = read_convolution(fields)
    low, parents = task * TASK_CHANNELS, integers(op.parents, op.tokens)
    high = min(low + TASK_CHANNELS, op.channels)
    numbers, outputs, taps = op.tokens * op.channels, (op.tokens - op.first) * op.channels, op.taps * op.channels
    if op.wide:
        run_channels(
            op, low, high, parents, doubles(op.x, numbers), doubles(op.weights, taps), doubles(op.bias, op.channels),
            doubles(op.out, outputs),
        )  # fmt: skip
    else:
        run_channels(
            op, low, high, parents, floats(op.x, numbers), floats(op.weights, taps), floats(op.bias, op.channels),
            floats(op.out, outputs),
        )  # fmt: skip


@compiled
def run_channels(
    op: ConvolutionOp, low: int, high: int, parents: np.ndarray, x: np.ndarray, weights: np.ndarray, bias: np.ndarray,
    out: np.ndarray,
) -> None:  # fmt: skip
    """The channels ``low`` to ``high`` (not included) of all tokens."""
    for token in range(op.first, op.tokens):
        to = part(out, (token - op.first) * op.channels + low, high - low)
        to[:] = 0
        for tap in range(op.taps):
            source = token
            for _ in range(op.taps - 1 - tap):
                source = parents[source]
            inputs, weight = (
                part(x, source * op.channels + low, high - low),
                part(weights, tap * op.channels + low, high - low),
            )
            for c in range(high - low):
                to[c] += inputs[c] * weight[c]
        if op.bias:
            own = part(bias, low, high - low)
            for c in range(high - low):
                to[c] += own[c]


CONVOLUTION = Operation(
    CONVOLUTION_LAYOUT, lambda op: Tasks((op.channels + TASK_CHANNELS - 1) // TASK_CHANNELS), short_convolution
)
