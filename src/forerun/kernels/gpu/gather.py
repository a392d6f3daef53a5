"""Gather chunks of keys or values with the GPU, from its memory or pinned host memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def gather_chunks(
    rows: torch.Tensor, head: torch.Tensor, chunk: torch.Tensor, size: int, device: torch.device
) -> torch.Tensor:
    """Copy chunks of ``size`` rows to the device without waiting; ``[n, size, d]``. ``rows`` ``[1, Hkv, m, d]`` are on
    the device or in pinned host memory; ``head`` and ``chunk``, int64 ``[n]``, on the device."""
    dim = rows.shape[3]
    found = torch.empty(len(head), size, dim, dtype=rows.dtype, device=device)
    if found.numel():
        _gather[(len(head), size)](
            rows.data_ptr(), *rows.stride()[1:3], head, chunk, found, size, dim, triton.next_power_of_2(dim)
        )
    return found


@triton.jit(do_not_specialize=["address", "head_stride", "row_stride", "size"])
def _gather(address, head_stride, row_stride, head, chunk, found, size, DIM: tl.constexpr, WIDE: tl.constexpr):
    number, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, WIDE)
    place = tl.load(head + number) * head_stride + (tl.load(chunk + number) * size + row) * row_stride
    rows = address.to(tl.int64).to(found.dtype)
    tl.store(found + (number * size + row) * DIM + d, tl.load(rows + place + d, d < DIM, 0.0), d < DIM)
