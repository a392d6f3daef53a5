"""Run the short causal convolution of recurrent layers over a draft tree.

A token's output sums its weighted input and nearest ancestors' in a fixed order, so its bits depend only on these.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from forerun.core.compiling import compiled
from forerun.kernels import gpu
from forerun.kernels.attention.attention_fields import ROW_BYTES, read_row
from forerun.kernels.linear.rowwise import widen, words
from forerun.kernels.runtime.addresses import StructLayout, doubles, floats, integers, part
from forerun.kernels.runtime.executor import Operation, Program, Tasks, read_pass
from forerun.kernels.runtime.vector_ir import LANES, LINE

TASK_CHANNELS = 512
"""Channels per task: enough work, and few enough to stay in the processor's cache."""
GATED_CHANNELS = 128
"""Channels per task in a program, whose passes have few tokens: 1,024 channels keep eight threads busy."""


class ConvolutionOp(NamedTuple):
    """One call over inputs ``x`` of the ``first`` tokens before the block, at least ``taps - 1``, and of the block."""

    x: int
    weights: int  # a row per tap, the farthest first
    bias: int
    out: int
    parents: int
    tokens: int
    first: int
    taps: int
    channels: int
    wide: int  # whether numbers are float64


class GatedConvolutionOp(NamedTuple):
    """A layer of a program: ``gate_out * convolve(gate_in * x)``, float32."""

    kind: int  # of the weights, and of ``to``, a linear layer's input: 0 float32, 1 bfloat16
    x: int  # rows of ``gate_in``, ``gate_out`` and x, side by side
    x_row: int
    channels: int
    taps: int
    weights: int  # ``[channels, taps]``, the farthest tap first
    bias: int  # ``[channels]``, or 0
    histories: int  # per row, address of inputs ``gate_in * x``: ``taps - 1`` before the block, room for its own
    to: int
    to_row: int


CONVOLUTION_LAYOUT, GATED_CONVOLUTION_LAYOUT = StructLayout(ConvolutionOp), StructLayout(GatedConvolutionOp)
read_convolution, read_gated_convolution = CONVOLUTION_LAYOUT.reader(), GATED_CONVOLUTION_LAYOUT.reader()


def convolve(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, parents: torch.Tensor, first: int
) -> torch.Tensor:
    """Return outputs ``[n - first, C]`` of the tokens from ``first`` on, float32 or float64 like all arguments.
    ``weights``: contiguous ``[K, C]``, the farthest tap first; ``parents``: each token's, int64 ``[n]``; the first
    ``first`` are a chain."""
    if gpu.runs_on(x.device):
        from forerun.kernels.gpu import recurrences as there  # needs Triton

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
    """Convolve one task's channels for all tokens."""
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
    """Convolve channels ``low`` to ``high`` (exclusive) for all tokens."""
    for token in range(op.first, op.tokens):
        to = part(out, (token - op.first) * op.channels + low, high - low)
        to[:] = 0
        for tap in range(op.taps):
            source = token
            for _ in range(op.taps - 1 - tap):
                source = parents[source]
            inputs = part(x, source * op.channels + low, high - low)
            weight = part(weights, tap * op.channels + low, high - low)
            for c in range(high - low):
                to[c] += inputs[c] * weight[c]
        if op.bias:
            own = part(bias, low, high - low)
            for c in range(high - low):
                to[c] += own[c]


CONVOLUTION = Operation(
    CONVOLUTION_LAYOUT, lambda op: Tasks((op.channels + TASK_CHANNELS - 1) // TASK_CHANNELS), short_convolution
)


def scratch_bytes(taps: int) -> int:
    """Return the scratch bytes per thread of ``gated_convolution``."""
    return LINE + 4 * GATED_CHANNELS * (taps + 2)


@compiled
def gated_convolution(address: int, fields: int, code: int, task: int, slot: int) -> None:
    """Convolve one task's channels for all tokens of all rows, the nearest tap first."""
    op, this = read_gated_convolution(fields), read_pass(address)
    low, taps, before = task * GATED_CHANNELS, op.taps, op.taps - 1
    size, width = min(GATED_CHANNELS, op.channels - low), 2 if op.kind else 4
    ones, weights, bias, sums = slot, slot + LINE, slot + LINE + 4 * size * taps, slot + LINE + 4 * size * (taps + 1)
    floats(ones, 1)[0] = np.float32(1.0)
    widen(op.kind, op.weights + low * taps * width, ones, size * taps // LANES, weights)
    if op.bias:
        widen(op.kind, op.bias + low * width, ones, size // LANES, bias)
    weight, offset, total = floats(weights, size * taps), floats(bias, size), floats(sums, size)
    numbers, parents = integers(this.token_rows, this.n), integers(this.parents, this.n)
    histories = integers(op.histories, numbers[this.n - 1] + 1)
    for token in range(this.n):
        number = numbers[token]
        place = before + token - read_row(this.rows + number * ROW_BYTES).first
        x = op.x + token * op.x_row + 4 * low
        gate, own = floats(x, size), floats(x + 8 * op.channels, size)
        to = floats(histories[number] + 4 * (place * op.channels + low), size)
        for c in range(size):
            to[c] = gate[c] * own[c]
    for token in range(this.n):
        number = numbers[token]
        row = read_row(this.rows + number * ROW_BYTES)
        source, gate = token - row.first, floats(op.x + token * op.x_row + 4 * (op.channels + low), size)
        total[:] = 0
        for back in range(taps):
            inputs = floats(histories[number] + 4 * ((before + source) * op.channels + low), size)
            for c in range(size):
                total[c] += inputs[c] * weight[c * taps + before - back]
            if source < row.in_order:
                source -= 1
            else:
                parent = parents[row.first + source]
                source = row.in_order + parent if parent >= 0 else row.in_order - 1
        for c in range(size):
            total[c] = (total[c] + offset[c] if op.bias else total[c]) * gate[c]
        words(op.kind, sums, size // LANES, op.to + token * op.to_row + low * width)


GATED_CONVOLUTION = Operation(
    GATED_CONVOLUTION_LAYOUT, lambda op: Tasks((op.channels + GATED_CHANNELS - 1) // GATED_CHANNELS), gated_convolution
)
