"""Means of rows on a GPU, each summed in one fixed order; torch's order depends on how many rows there are.

This has run in Triton's interpreter only; it has not run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WIDTH = 1024
"""Numbers that a program reads at once."""
GPU_MEAN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes(x: torch.Tensor) -> bool:
    """Whether ``mean`` can compute this."""
    return x.dtype in GPU_MEAN_DTYPES and x.dim() > 0 and x.shape[-1] > 0


def mean(x: torch.Tensor, keep: bool) -> torch.Tensor:
    """The mean of ``[..., K]`` over its last dimension, which stays as one number if ``keep``."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    found = rows.new_empty(len(rows))
    if len(rows):
        _mean[(len(rows),)](rows, found, rows.stride(0), rows.shape[1], WIDTH, enable_fp_fusion=False)
    return found.view(*x.shape[:-1], 1) if keep else found.view(x.shape[:-1])


@triton.jit
def _mean(x, y, row, columns, WIDTH: tl.constexpr):
    """One row's."""
    sums = tl.zeros((WIDTH,), tl.float32)
    here = x + tl.program_id(0).to(tl.int64) * row
    for at in range(0, columns, WIDTH):
        column = at + tl.arange(0, WIDTH)
        sums += tl.load(here + column, column < columns, 0.0).to(tl.float32)
    tl.store(y + tl.program_id(0), (tl.sum(sums, 0) / columns).to(y.dtype.element_ty))
