"""Find each chunk's best key for each query on a GPU, over short keys of one byte per number, as stored.

Products of bytes and their sums are integers below 2^24, so 16-bit tensor-core products with float32 sums are exact:
the result equals ``topk_rank.py``'s in any order. This has only run in Triton's interpreter, not on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forerun.kernels.gpu.pass_tables import GPU_COMBINE_QUERIES


def best_keys(index: torch.Tensor, count: int, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return float32 ``[Hkv, n, count]``; see ``topk_rank.by_definition``. Here ``q`` is rounded to integers up to 127,
    float32 ``[Hkv, n, rank]``; ``scale`` ``[Hkv, n, 1]`` multiplies the results."""
    heads, rows, rank = q.shape
    chunk, quads, group, quad = index.shape[2:]
    out = q.new_empty(heads, rows, count)
    _best[(heads, triton.cdiv(rows, GPU_COMBINE_QUERIES), triton.cdiv(count, group))](
        index, q.contiguous(), scale.contiguous(), out, index.stride(0), index.stride(1), rows, rank, count,
        max(16, triton.next_power_of_2(rank)), chunk, quads, group, quad, GPU_COMBINE_QUERIES,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "count"])
def _best(
    index, q, scale, out, head, step, rows, rank, count, WIDE: tl.constexpr, CHUNK: tl.constexpr, QUADS: tl.constexpr,
    GROUP: tl.constexpr, QUAD: tl.constexpr, GPU_COMBINE_QUERIES: tl.constexpr,
):  # fmt: skip
    """Process a tile of queries and one group of chunks, a key of each at a time."""
    at, group = tl.program_id(0).to(tl.int64), tl.program_id(2)
    row = tl.program_id(1) * GPU_COMBINE_QUERIES + tl.arange(0, GPU_COMBINE_QUERIES)
    number, chunk = tl.arange(0, WIDE), tl.arange(0, GROUP)
    real = (row < rows)[:, None] & (number < rank)[None, :]
    queries = tl.load(q + (at * rows + row)[:, None] * rank + number[None, :], real, 0.0).to(tl.float16)
    place = index + at * head + group.to(tl.int64) * step
    place = place + ((number // QUAD) * GROUP * QUAD + number % QUAD)[:, None] + (chunk * QUAD)[None, :]
    best = tl.full((GPU_COMBINE_QUERIES, GROUP), float("-inf"), tl.float32)
    for key in range(CHUNK):
        keys = tl.load(place + key * QUADS * GROUP * QUAD, (number < rank)[:, None] & (chunk < GROUP)[None, :], 0)
        best = tl.maximum(best, tl.dot(queries, keys.to(tl.float16)))
    times = tl.load(scale + at * rows + row, row < rows, 0.0)
    to = group * GROUP + chunk
    tl.store(out + (at * rows + row)[:, None] * count + to[None, :], best * times[:, None],
             (row < rows)[:, None] & (to < count)[None, :])  # fmt: skip
