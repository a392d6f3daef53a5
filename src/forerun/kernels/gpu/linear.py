"""Linear layers and means of rows on a GPU, summed in one fixed order for any number of tokens in the pass.

K, the length of a weight row, is cut into pieces at fixed places. A piece is summed in steps of ``STEP`` columns by
tensor-core products; then the pieces are added in order, as in ``batch_invariant_ops`` (Thinking Machines, 2025). For
few tokens, each piece has a program, so that the whole GPU reads weights; for many, one program runs all pieces. Tiles
of 16, 32 or 64 tokens use one tensor-core instruction (tested), and so sum in one order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

OUTPUTS, STEP = tl.constexpr(64), tl.constexpr(64)
GPU_LINEAR_COLUMNS = tl.constexpr(1024)
"""Columns per piece. Llama-2-7B's narrowest matrix is then cut into 256 programs, for some 130 processors."""
GPU_LINEAR_ROWS = tl.constexpr(1024)
"""Outputs per program that adds up pieces."""
GPU_MEAN_COLUMNS = tl.constexpr(1024)
"""Numbers of a mean that a program reads at once."""
GPU_LINEAR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LinearTile(NamedTuple):
    """Tokens per tile of a product, and warps per program: two for 64, as four change a Hopper's instruction."""

    tokens: int
    warps: int


LINEAR_TILES = (LinearTile(16, 4), LinearTile(32, 4), LinearTile(64, 2))


def tile_of(tokens: int) -> LinearTile:
    """Return the smallest tile that holds these tokens, or the largest."""
    return next((tile for tile in LINEAR_TILES if tokens <= tile.tokens), LINEAR_TILES[-1])


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether ``product`` can compute this."""
    return (
        weight.dim() == 2
        and weight.dtype in GPU_LINEAR_DTYPES
        and x.dtype == weight.dtype
        and x.device == weight.device
    )


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, to: torch.dtype | None = None
) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` for x ``[..., K]`` and weight ``[O, K]``, in type ``to`` or x's."""
    rows = x.reshape(-1, x.shape[-1])
    y = rows.new_empty(len(rows), len(weight), dtype=to)
    if len(rows):
        parts = sums(rows, weight)
        _total[(triton.cdiv(y.numel(), GPU_LINEAR_ROWS.value),)](
            parts, weight if bias is None else bias, y, y.numel(), len(weight), len(parts), bias is not None
        )
    return y.view(*x.shape[:-1], len(weight))


def sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the parts of ``x @ weight.T`` for x ``[n, K]``, to be added in order: float32 ``[parts, n, O]``."""
    n, (outs, columns) = len(x), weight.shape
    tile, pieces = tile_of(n), triton.cdiv(columns, GPU_LINEAR_COLUMNS.value)
    alone = n <= LINEAR_TILES[-1].tokens
    parts = x.new_empty(pieces if alone else 1, n, outs, dtype=torch.float32)
    _sums[(triton.cdiv(n, tile.tokens), triton.cdiv(outs, OUTPUTS.value), len(parts))](
        x, weight, parts, n, outs, columns, *x.stride(), *weight.stride(), alone, tile.tokens,
        enable_fp_fusion=False, num_warps=tile.warps, num_stages=4 if x.element_size() == 2 else 2,
    )  # fmt: skip
    return parts


@triton.jit(do_not_specialize=["n"])
def _sums(x, w, y, n, outs, columns, x_row, x_column, w_row, w_column, ALONE: tl.constexpr, TOKENS: tl.constexpr):
    """Sum one piece, or all of them, for a tile."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    out = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    piece = tl.program_id(2)
    place = (piece.to(tl.int64) * n + token[:, None]) * outs + out[None, :]
    here = (token < n)[:, None] & (out < outs)[None, :]
    if ALONE:
        first = piece * GPU_LINEAR_COLUMNS
        total = _piece(x, w, token, out, n, outs, columns, x_row, x_column, w_row, w_column, first, TOKENS)
    else:
        total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        for at in range(0, columns, GPU_LINEAR_COLUMNS):
            total += _piece(x, w, token, out, n, outs, columns, x_row, x_column, w_row, w_column, at, TOKENS)
    tl.store(y + place, total, here)


@triton.jit
def _piece(x, w, token, out, n, outs, columns, x_row, x_column, w_row, w_column, first, TOKENS: tl.constexpr):
    total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for at in range(first, min(first + GPU_LINEAR_COLUMNS, columns), STEP):
        column = at + tl.arange(0, STEP)
        inside = column < columns
        a = tl.load(x + token[:, None].to(tl.int64) * x_row + column[None, :] * x_column,
                    (token < n)[:, None] & inside[None, :], 0.0)  # fmt: skip
        b = tl.load(w + out[None, :].to(tl.int64) * w_row + column[:, None] * w_column,
                    (out < outs)[None, :] & inside[:, None], 0.0)  # fmt: skip
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["size", "pieces"])
def _total(parts, bias, y, size, outs, pieces, BIAS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * GPU_LINEAR_ROWS + tl.arange(0, GPU_LINEAR_ROWS)
    inside = at < size
    total = tl.zeros((GPU_LINEAR_ROWS,), tl.float32)
    for piece in range(pieces):
        total += tl.load(parts + piece * size + at, inside, 0.0)
    if BIAS:
        total += tl.load(bias + at % outs, inside, 0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), inside)


def takes_mean(x: torch.Tensor) -> bool:
    """Return whether ``mean`` can compute this."""
    return x.dtype in GPU_LINEAR_DTYPES and x.dim() > 0 and x.shape[-1] > 0


def mean(x: torch.Tensor, keep: bool) -> torch.Tensor:
    """Compute the mean of ``[..., K]`` over its last dimension, which ``keep`` keeps with size 1."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    found = rows.new_empty(len(rows))
    if len(rows):
        _mean[(len(rows),)](rows, found, rows.stride(0), rows.shape[1], enable_fp_fusion=False)
    return found.view(*x.shape[:-1], 1) if keep else found.view(x.shape[:-1])


@triton.jit
def _mean(x, y, row, columns):
    total = tl.zeros((GPU_MEAN_COLUMNS,), tl.float32)
    here = x + tl.program_id(0).to(tl.int64) * row
    for at in range(0, columns, GPU_MEAN_COLUMNS):
        column = at + tl.arange(0, GPU_MEAN_COLUMNS)
        total += tl.load(here + column, column < columns, 0.0).to(tl.float32)
    tl.store(y + tl.program_id(0), (tl.sum(total, 0) / columns).to(y.dtype.element_ty))
