"""Recurrent layers over a draft tree on a GPU: short convolution, gated delta rule and Mamba-2's recurrence.

As in ``kernels/recurrent``, they go token by token. Columns of a state are independent, so a program holds some columns
of one head's state in registers for all tokens. A token's sum depends only on its ancestors, and the order of sums only
on the layer: ``tl.sum``'s order depends on what Triton assumes of a kernel's arguments, so it is told nothing of their
alignment, and a sequence begins with a state of zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forerun.kernels.recurrent.gated_states import L2_EPSILON, GatedShape, TokenOrder

GPU_CONVOLUTION_CHANNELS = 256
"""Channels of a token per program."""
GPU_STATE_COLUMNS = 32
"""Columns of a state per program: 128 columns then occupy four programs. A row of these columns in float32 is one line
of memory, and 128 rows need 32 registers per thread."""


def convolve(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, parents: torch.Tensor, first: int
) -> torch.Tensor:
    """See ``short_convolution.convolve``. Here, a token's nearest ancestors are summed first."""
    count, channels = x.shape
    out = x.new_empty(count - first, channels)
    _convolve[(count - first, triton.cdiv(channels, GPU_CONVOLUTION_CHANNELS))](
        x, weights, x if bias is None else bias, parents, out, first, channels, len(weights), bias is not None,
        GPU_CONVOLUTION_CHANNELS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def run_states(
    shape: GatedShape,
    rows: torch.Tensor,
    q: torch.Tensor,
    state: torch.Tensor | None,
    saved: torch.Tensor,
    order: TokenOrder,
) -> torch.Tensor:
    """See ``gated_states.run_states``."""
    out = q.new_empty(len(q), shape.heads, shape.out_dim)
    before = q.new_zeros(shape.heads, shape.dim, shape.out_dim) if state is None else state
    waiting = q.new_empty(order.places, shape.heads, shape.dim, shape.out_dim)
    _run_states[(shape.heads, triton.cdiv(shape.out_dim, GPU_STATE_COLUMNS))](
        rows, q, out, before, saved, waiting, order.table, len(rows), len(rows) - len(q),
        shape.scale, L2_EPSILON, shape.row_width, shape.key_heads, shape.heads, shape.dim, shape.out_dim, shape.gates,
        shape.delta, shape.normalise, triton.next_power_of_2(shape.dim), GPU_STATE_COLUMNS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["x", "weights", "bias", "parents", "out"])
def _convolve(
    x, weights, bias, parents, out, first, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr,
    GPU_CONVOLUTION_CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * GPU_CONVOLUTION_CHANNELS + tl.arange(0, GPU_CONVOLUTION_CHANNELS)
    inside, source = at < CHANNELS, row + first
    nearest = tl.load(weights + (TAPS - 1) * CHANNELS + at, inside, 0.0)
    total = tl.load(x + source * CHANNELS + at, inside, 0.0) * nearest
    for back in tl.static_range(1, TAPS):
        source = tl.load(parents + source)
        weight = tl.load(weights + (TAPS - 1 - back) * CHANNELS + at, inside, 0.0)
        total += tl.load(x + source * CHANNELS + at, inside, 0.0) * weight
    if BIAS:
        total += tl.load(bias + at, inside, 0.0)
    tl.store(out + row * CHANNELS + at, total, inside)


@triton.jit(
    do_not_specialize=["count", "first"],
    do_not_specialize_on_alignment=["rows", "q", "out", "before", "saved", "waiting", "order"],
)  # fmt: skip
def _run_states(
    rows, q, out, before, saved, waiting, order, count, first, SCALE: tl.constexpr, EPSILON: tl.constexpr,
    ROW_WIDTH: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, OUT_DIM: tl.constexpr,
    GATES: tl.constexpr, DELTA: tl.constexpr, NORMALISE: tl.constexpr, WIDE: tl.constexpr,
    GPU_STATE_COLUMNS: tl.constexpr,
):  # fmt: skip
    head, columns = tl.program_id(0), tl.program_id(1) * GPU_STATE_COLUMNS + tl.arange(0, GPU_STATE_COLUMNS)
    number, key_head = tl.arange(0, WIDE), head // (HEADS // KEY_HEADS)
    real, shown = number < DIM, columns < OUT_DIM
    inside = real[:, None] & shown[None, :]
    place = head * DIM * OUT_DIM + number[:, None] * OUT_DIM + columns[None, :]
    values: tl.constexpr = KEY_HEADS * DIM
    gates: tl.constexpr = values + HEADS * OUT_DIM
    state = tl.load(before + place, inside, 0.0)
    key_at, query_at = key_head * DIM + number, q + key_head * DIM + number
    value_at, result_at = values + head * OUT_DIM + columns, out + head * OUT_DIM + columns
    held = -1  # the token whose state the registers hold
    for token in range(count):
        source = tl.load(order).to(tl.int32)
        if source != held:
            if source >= 0:
                state = tl.load(waiting + source.to(tl.int64) * HEADS * DIM * OUT_DIM + place, inside, 0.0)
            else:
                state = tl.load(before + place, inside, 0.0)
        key = _vector(rows + key_at, real, EPSILON, NORMALISE)
        update = tl.load(rows + value_at, shown, 0.0)
        if GATES > 1:
            state = state * tl.exp(tl.load(rows + gates + head * GATES + number, real, 0.0))[:, None]
        else:
            state = state * tl.exp(tl.load(rows + gates + head))
        if DELTA:
            beta = tl.load(rows + gates + HEADS * GATES + head)
            update = (update - tl.sum(state * key[:, None], 0)) * beta
        state += key[:, None] * update[None, :]
        if token >= first:
            query = _vector(query_at, real, EPSILON, NORMALISE) * SCALE
            tl.store(result_at, tl.sum(state * query[:, None], 0), shown)
            query_at += KEY_HEADS * DIM
            result_at += HEADS * OUT_DIM
        held = tl.load(order + 1).to(tl.int32)
        save = tl.load(order + 2)
        if save >= 0:
            tl.store(saved + save * HEADS * DIM * OUT_DIM + place, state, inside)
        more = token + 1 < count
        if (tl.load(order + 3, more, held) != held) | (tl.load(order + 4, more, held) != held):
            # A later token may start from this state. One thread's numbers may be read by another, so the barriers
            # order earlier reads, this write, and later reads.
            tl.debug_barrier()
            tl.store(waiting + held.to(tl.int64) * HEADS * DIM * OUT_DIM + place, state, inside)
            tl.debug_barrier()
        rows += ROW_WIDTH
        order += 3


@triton.jit
def _vector(numbers, real, EPSILON: tl.constexpr, NORMALISE: tl.constexpr):
    vector = tl.load(numbers, real, 0.0)
    if NORMALISE:
        vector = vector / tl.sqrt(tl.sum(vector * vector, 0) + EPSILON)
    return vector
