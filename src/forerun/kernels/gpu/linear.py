"""Linear layers and means of rows on a GPU, summed in one fixed order, however many tokens are in the pass.

K, the length of a row of weights, is cut at fixed places into pieces. A piece is summed in steps of ``STEP`` columns by
tensor-core products over tiles of 16 tokens; then the pieces are added in order. For few tokens each piece is a program
of its own, so that all of the GPU reads the weights. For many tokens one program does the pieces one after the other.
The order of the sums is the same. The idea is that of ``batch_invariant_ops`` (Thinking Machines, 2025).

This has run in Triton's interpreter only; it has not run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GPU_LINEAR_TOKENS = 16
"""Tokens of a tile: the least that a tensor core takes. A tile with more of them may take another instruction, which
may sum in another order."""
OUTPUTS = 64
"""Outputs of a tile."""
STEP = 64
"""Columns that are multiplied at once."""
GPU_LINEAR_COLUMNS = 1024
"""Columns of a piece. Llama-2-7B's narrowest matrix is then cut into 256 programs, for some 130 processors."""
GPU_LINEAR_ROWS = 1024
"""Outputs whose pieces a program adds up."""
GPU_MEAN_COLUMNS = 1024
"""Numbers of a mean that a program reads at once."""
GPU_LINEAR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``product`` can compute this."""
    return (
        weight.dim() == 2
        and weight.dtype in GPU_LINEAR_DTYPES
        and x.dtype == weight.dtype
        and x.device == weight.device
    )


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` for rows of x ``[..., K]`` and a matrix ``[O, K]``."""
    rows = x.reshape(-1, x.shape[-1])
    n, (outs, columns) = len(rows), weight.shape
    y = rows.new_empty(n, outs)
    if not n:
        return y.view(*x.shape[:-1], outs)
    pieces = triton.cdiv(columns, GPU_LINEAR_COLUMNS)
    alone = pieces > 1 and n <= GPU_LINEAR_TOKENS
    to = rows.new_empty(pieces, n, outs, dtype=torch.float32) if alone else y
    grid = (triton.cdiv(n, GPU_LINEAR_TOKENS), triton.cdiv(outs, OUTPUTS), pieces if alone else 1)
    _sums[grid](
        rows, weight, weight if bias is None else bias, to, n, outs, columns, *rows.stride(), *weight.stride(),
        n * outs, alone, bias is not None, GPU_LINEAR_TOKENS, OUTPUTS, STEP, GPU_LINEAR_COLUMNS, enable_fp_fusion=False,
    )  # fmt: skip
    if alone:
        size = n * outs
        bias_or_any = weight if bias is None else bias
        _total[(triton.cdiv(size, GPU_LINEAR_ROWS),)](
            to, bias_or_any, y, size, outs, pieces, bias is not None, GPU_LINEAR_ROWS
        )
    return y.view(*x.shape[:-1], outs)


@triton.jit(do_not_specialize=["n", "y_piece"])
def _sums(
    x, w, bias, y, n, outs, columns, x_row, x_column, w_row, w_column, y_piece,
    ALONE: tl.constexpr, BIAS: tl.constexpr, GPU_LINEAR_TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
    GPU_LINEAR_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile's sums: of one piece, or of all of them."""
    token = tl.program_id(0) * GPU_LINEAR_TOKENS + tl.arange(0, GPU_LINEAR_TOKENS)
    out = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    here = (token < n)[:, None] & (out < outs)[None, :]
    place = token[:, None].to(tl.int64) * outs + out[None, :]
    first = tl.program_id(2) * GPU_LINEAR_COLUMNS
    if ALONE:
        sums = _piece(x, w, token, out, n, outs, columns, x_row, x_column, w_row, w_column, first,
                      GPU_LINEAR_TOKENS, OUTPUTS, STEP, GPU_LINEAR_COLUMNS)  # fmt: skip
        tl.store(y + tl.program_id(2).to(tl.int64) * y_piece + place, sums, here)
    else:
        sums = tl.zeros((GPU_LINEAR_TOKENS, OUTPUTS), tl.float32)
        for at in range(0, columns, GPU_LINEAR_COLUMNS):
            sums += _piece(x, w, token, out, n, outs, columns, x_row, x_column, w_row, w_column, at,
                           GPU_LINEAR_TOKENS, OUTPUTS, STEP, GPU_LINEAR_COLUMNS)  # fmt: skip
        if BIAS:
            sums += tl.load(bias + out, out < outs, 0.0).to(tl.float32)[None, :]
        tl.store(y + place, sums.to(y.dtype.element_ty), here)


@triton.jit
def _piece(
    x, w, token, out, n, outs, columns, x_row, x_column, w_row, w_column, first,
    GPU_LINEAR_TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, GPU_LINEAR_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums over the columns of one piece."""
    sums = tl.zeros((GPU_LINEAR_TOKENS, OUTPUTS), tl.float32)
    for at in range(first, min(first + GPU_LINEAR_COLUMNS, columns), STEP):
        column = at + tl.arange(0, STEP)
        inside = column < columns
        a = tl.load(x + token[:, None].to(tl.int64) * x_row + column[None, :] * x_column,
                    (token < n)[:, None] & inside[None, :], 0.0)  # fmt: skip
        b = tl.load(w + out[None, :].to(tl.int64) * w_row + column[:, None] * w_column,
                    (out < outs)[None, :] & inside[:, None], 0.0)  # fmt: skip
        sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["size"])
def _total(parts, bias, y, size, outs, pieces, BIAS: tl.constexpr, GPU_LINEAR_ROWS: tl.constexpr):
    """Add the pieces in order, and the bias."""
    at = tl.program_id(0).to(tl.int64) * GPU_LINEAR_ROWS + tl.arange(0, GPU_LINEAR_ROWS)
    inside = at < size
    sums = tl.zeros((GPU_LINEAR_ROWS,), tl.float32)
    for piece in range(pieces):
        sums += tl.load(parts + piece * size + at, inside, 0.0)
    if BIAS:
        sums += tl.load(bias + at % outs, inside, 0.0).to(tl.float32)
    tl.store(y + at, sums.to(y.dtype.element_ty), inside)


def takes_mean(x: torch.Tensor) -> bool:
    """Whether ``mean`` can compute this."""
    return x.dtype in GPU_LINEAR_DTYPES and x.dim() > 0 and x.shape[-1] > 0


def mean(x: torch.Tensor, keep: bool) -> torch.Tensor:
    """The mean of ``[..., K]`` over its last dimension, which stays as one number if ``keep``."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    found = rows.new_empty(len(rows))
    if len(rows):
        _mean[(len(rows),)](rows, found, rows.stride(0), rows.shape[1], GPU_MEAN_COLUMNS, enable_fp_fusion=False)
    return found.view(*x.shape[:-1], 1) if keep else found.view(x.shape[:-1])


@triton.jit
def _mean(x, y, row, columns, GPU_MEAN_COLUMNS: tl.constexpr):
    """One row's."""
    sums = tl.zeros((GPU_MEAN_COLUMNS,), tl.float32)
    here = x + tl.program_id(0).to(tl.int64) * row
    for at in range(0, columns, GPU_MEAN_COLUMNS):
        column = at + tl.arange(0, GPU_MEAN_COLUMNS)
        sums += tl.load(here + column, column < columns, 0.0).to(tl.float32)
    tl.store(y + tl.program_id(0), (tl.sum(sums, 0) / columns).to(y.dtype.element_ty))
