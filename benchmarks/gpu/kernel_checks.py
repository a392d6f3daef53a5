"""The kernels' results beside float64, and whether a token's bits depend on what shares its pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from benchmarks.capacity.shapes import ModelShape
from benchmarks.long_context.rows import Row
from forerun.core.block import Block
from forerun.core.tree import DraftTree


def product(shape: ModelShape, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Row:
    """A matrix product: all tokens at once beside passes of these sizes."""
    from forerun.kernels.gpu import linear

    x, weight = (_random(*size).to(device, dtype) for size in ((max(sizes) + 1, shape.hidden), (61, shape.hidden)))
    whole = linear.product(x, weight)
    same = all(torch.equal(linear.product(x[:n], weight), whole[:n]) for n in sizes)
    return _row("product", dtype, whole, x.double() @ weight.double().T, same)


def mean(shape: ModelShape, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Row:
    """A mean of each row."""
    from forerun.kernels.gpu import linear

    x = _random(max(sizes) + 1, shape.hidden).to(device, dtype) + 1
    whole = linear.mean(x, True)
    same = all(torch.equal(linear.mean(x[:n], True), whole[:n]) for n in sizes)
    return _row("mean", dtype, whole, x.double().mean(-1, keepdim=True), same)


def attention(shape: ModelShape, context: int, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Row:
    """Attention of a text's last tokens: in one pass beside passes of these sizes."""
    size, count = shape.head_dim, max(sizes)
    text = _random(2, shape.kv_heads, context + count, size).to(device, dtype)
    q = _random(1, shape.heads, count, size).to(device, dtype)
    whole = _attend(q, text, context)
    same = all(torch.equal(_attend(q[:, :, :n].contiguous(), text, context), whole[:, :, :n]) for n in sizes)
    keys, values = text[:, None].double().repeat_interleave(shape.heads // shape.kv_heads, 2)
    seen = torch.ones(count, context + count, dtype=torch.bool, device=device).tril(context)
    right = functional.scaled_dot_product_attention(q.double(), keys, values, seen, scale=size**-0.5)
    return _row(f"attention at {context:,} tokens", dtype, whole, right, same)


def _attend(q: torch.Tensor, text: torch.Tensor, context: int) -> torch.Tensor:
    """Attention of the queries ``[1, H, n, d]`` after ``context`` tokens of a text ``[2, Hkv, room, d]``."""
    from forerun.kernels.gpu import attend
    from forerun.kernels.gpu.pass_tables import PassDescription, PassTables

    keys, values = text
    block = Block(np.zeros(1, np.int64), DraftTree.chain(np.arange(q.shape[2] - 1)), context)
    addresses = np.array([[[keys.data_ptr(), values.data_ptr()]]])
    strides = np.array([[[*keys.stride()[:2], *values.stride()[:2]]]])
    batch = PassDescription([block], addresses, strides, block.positions, q.shape[1] // len(keys))
    places = PassTables(batch.sizes, q.device, batch.aligned)
    places.fill(batch)
    return attend.attend(0, q, len(keys), q.shape[3], places, (q.shape[3] ** -0.5, None, None, None))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def _row(kernel: str, dtype: torch.dtype, found: torch.Tensor, right: torch.Tensor, same: bool) -> Row:
    error = float((found.double() - right).abs().max() / right.abs().max())
    return {"kernel": kernel, "dtype": str(dtype), "relative_error": error, "same_bits": same}
