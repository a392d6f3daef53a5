"""Attention on a GPU in one fixed order: a token's bits depend neither on what shares the pass nor on what was drafted.

The order is that of ``ordered_attention.py``, with longer splits: positions are cut into splits, and splits into
blocks, at fixed places. A split goes block by block with a running maximum and sum; splits are merged in order. All
rows of a batch share two calls. *Scan* goes over the keys that lie in text order, a program for each tile of queries,
KV head and split. *Combine* merges each token's splits, goes over the keys that only this token sees, and divides. Rows
keep their own memory: a table has its addresses.

This has run in Triton's interpreter only; it has not run on a GPU.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from forerun.kernels.gpu.pass_tables import GPU_BLOCK_TOKENS, GPU_SPLIT_TOKENS, GPU_TILE_QUERIES, PassTables

GPU_ATTENTION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether ``attend`` can compute attention of these ``[1, H, n, d]``."""
    return q.dtype in GPU_ATTENTION_DTYPES and q.dtype == k.dtype == v.dtype


def store(layer: int, k: torch.Tensor, v: torch.Tensor, places: PassTables) -> None:
    """Write a pass's keys and values ``[1, Hkv, n, d]`` to their rows' memory."""
    heads, n = k.shape[1:3]
    _store[(n, heads)](
        k, v, places.addresses[layer], places.strides, places.tokens, *k.stride()[1:3], *v.stride()[1:3],
        k.shape[3], v.shape[3], triton.next_power_of_2(k.shape[3]), triton.next_power_of_2(v.shape[3]),
    )  # fmt: skip


def attend(
    layer: int,
    q: torch.Tensor,
    kv_heads: int,
    out_dim: int,
    places: PassTables,
    how: tuple[float, int | None, float | None, torch.Tensor | None],
) -> torch.Tensor:
    """Attention of packed queries over their rows' keys, which are in the caches already.

    Args:
        layer: the layer's index.
        q: ``[1, H, n, d]``.
        kv_heads: the number of KV heads.
        out_dim: numbers of a value.
        places: where everything lies.
        how: scaling, window, soft cap and sinks, as in ``AttentionSpec``.

    Returns:
        ``[1, H, n, dv]``.
    """
    (_, heads, n, dim), (scaling, window, softcap, sinks) = q.shape, how
    group = heads // kv_heads
    size, addresses = places.sizes, places.addresses[layer]
    state = q.new_empty(size.tiles, kv_heads, size.splits, GPU_TILE_QUERIES, out_dim + 2, dtype=torch.float32)
    out = q.new_empty(n, heads, out_dim)
    sizes = (dim, out_dim, max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(out_dim)))
    queries = (q, addresses, places.strides, places.tokens, q.stride(1), q.stride(2), scaling / math.log(2),
             window or 0, softcap or 0.0, group)  # fmt: skip
    limits = (softcap is not None, GPU_TILE_QUERIES, GPU_BLOCK_TOKENS, GPU_SPLIT_TOKENS)
    if size.splits:
        _scan[(size.tiles, kv_heads, size.splits)](
            *queries, places.tiles, places.rows, state, size.splits, *sizes, *limits, enable_fp_fusion=False
        )
    floats = None if sinks is None else sinks.detach().float().contiguous()
    _combine[(n, kv_heads, triton.cdiv(group, GPU_TILE_QUERIES))](
        *queries, places.own, size.own, places.rows, state, size.splits, kv_heads, q if floats is None else floats,
        floats is not None, out, *sizes, *limits, enable_fp_fusion=False,
    )  # fmt: skip
    return out.transpose(0, 1)[None]


@triton.jit
def _store(
    k, v, addresses, strides, tokens, k_head, k_token, v_head, v_token, dim, out_dim, WIDE: tl.constexpr,
    OUT_WIDE: tl.constexpr,
):  # fmt: skip
    """Write one token's keys and values of one head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, slot = tl.load(tokens + token * 4), tl.load(tokens + token * 4 + 1).to(tl.int64)
    keys = tl.load(addresses + row * 2).to(tl.pointer_type(k.dtype.element_ty))
    values = tl.load(addresses + row * 2 + 1).to(tl.pointer_type(v.dtype.element_ty))
    at, to = tl.arange(0, WIDE), tl.arange(0, OUT_WIDE)
    number = tl.load(k + head * k_head + token * k_token + at, at < dim)
    tl.store(keys + head * tl.load(strides + row * 4) + slot * tl.load(strides + row * 4 + 1) + at, number, at < dim)
    number = tl.load(v + head * v_head + token * v_token + to, to < out_dim)
    place = head * tl.load(strides + row * 4 + 2) + slot * tl.load(strides + row * 4 + 3)
    tl.store(values + place + to, number, to < out_dim)


@triton.jit
def _memory(q, addresses, strides, row, head):
    """A row's keys and values of a head, of the queries' type, and how far tokens are apart in both."""
    keys = tl.load(addresses + row * 2).to(tl.pointer_type(q.dtype.element_ty))
    values = tl.load(addresses + row * 2 + 1).to(tl.pointer_type(q.dtype.element_ty))
    keys += head * tl.load(strides + row * 4)
    values += head * tl.load(strides + row * 4 + 2)
    return keys, values, tl.load(strides + row * 4 + 1), tl.load(strides + row * 4 + 3)


@triton.jit
def _block(
    q, keys, values, slots, seen, inside, top, total, out, k_row, v_row, scale, softcap, dim, out_dim,
    WIDE: tl.constexpr, OUT_WIDE: tl.constexpr, SOFTCAP: tl.constexpr, GPU_BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Go over one block of keys: queries ``[GPU_TILE_QUERIES, WIDE]``, and which of the keys each of them sees. A block
    of which a query sees nothing changes none of its bits."""
    d, dv = tl.arange(0, WIDE), tl.arange(0, OUT_WIDE)
    k = tl.load(keys + slots[None, :] * k_row + d[:, None], inside[None, :] & (d < dim)[:, None], 0.0)
    scores = tl.dot(q, k, input_precision="ieee")
    if SOFTCAP:
        capped = scores * (scale * 0.6931471805599453 / softcap)
        scores = (1.0 - 2.0 / (1.0 + tl.exp2(capped * 2.8853900817779268))) * (softcap * 1.4426950408889634)
    else:
        scores = scores * scale
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None]).to(values.dtype.element_ty)
    before = tl.exp2(top - highest)
    ones = tl.full(
        (GPU_BLOCK_TOKENS, 16), 1.0, values.dtype.element_ty
    )  # whose product sums in one order in both kernels
    sums = tl.max(tl.dot(weights, ones, input_precision="ieee"), 1)
    v = tl.load(values + slots[:, None] * v_row + dv[None, :], inside[:, None] & (dv < out_dim)[None, :], 0.0)
    out = tl.dot(weights, v, out * before[:, None], input_precision="ieee")
    return highest, total * before + sums, out


@triton.jit
def _merge(top, total, out, top2, total2, out2):
    """Merge a later split into what came before it."""
    highest = tl.maximum(top, top2)
    one, two = tl.exp2(top - highest), tl.exp2(top2 - highest)
    return highest, total * one + total2 * two, out * one[:, None] + out2 * two[:, None]


@triton.jit(do_not_specialize=["splits"])
def _scan(
    q, addresses, strides, tokens, q_head, q_token, scale, window, softcap, group, tiles, rows, state, splits,
    dim, out_dim, WIDE: tl.constexpr, OUT_WIDE: tl.constexpr, SOFTCAP: tl.constexpr, GPU_TILE_QUERIES: tl.constexpr,
    GPU_BLOCK_TOKENS: tl.constexpr, GPU_SPLIT_TOKENS: tl.constexpr,
):  # fmt: skip
    """A tile of queries over one split of the keys in text order."""
    tile, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row = tl.load(tiles + tile * 2)
    first, count = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1)
    lane = tl.arange(0, GPU_TILE_QUERIES)
    query = tl.load(tiles + tile * 2 + 1) * GPU_TILE_QUERIES + lane
    real = query < count * group
    token = (first + tl.where(real, query // group, 0)).to(tl.int64)
    position = tl.load(tokens + token * 4 + 2)
    end = tl.where(real, tl.load(tokens + token * 4 + 3), 0)
    start = tl.where(window > 0, position - window + 1, 0)
    last = tl.minimum(tl.max(end, 0), (split + 1) * GPU_SPLIT_TOKENS)
    begin = split * GPU_SPLIT_TOKENS
    if begin < last:
        d, dv = tl.arange(0, WIDE), tl.arange(0, OUT_WIDE)
        queries = tl.load(
            q + (head * group + query % group)[:, None] * q_head + token[:, None] * q_token + d[None, :],
            real[:, None] & (d < dim)[None, :], 0.0,
        )  # fmt: skip
        keys, values, k_row, v_row = _memory(q, addresses, strides, row, head)
        top = tl.full((GPU_TILE_QUERIES,), -3e38, tl.float32)
        total = tl.zeros((GPU_TILE_QUERIES,), tl.float32)
        out = tl.zeros((GPU_TILE_QUERIES, OUT_WIDE), tl.float32)
        earliest = (
            tl.maximum(tl.min(tl.where(real, start, 2147483647), 0), begin) // GPU_BLOCK_TOKENS * GPU_BLOCK_TOKENS
        )
        for at in range(earliest, last, GPU_BLOCK_TOKENS):
            slots = at + tl.arange(0, GPU_BLOCK_TOKENS)
            seen = (slots[None, :] < end[:, None]) & (slots[None, :] >= start[:, None])
            top, total, out = _block(
                queries, keys, values, slots.to(tl.int64), seen, slots < last, top, total, out, k_row, v_row, scale,
                softcap, dim, out_dim, WIDE, OUT_WIDE, SOFTCAP, GPU_BLOCK_TOKENS,
            )  # fmt: skip
        to = state + ((tile * tl.num_programs(1) + head) * splits + split) * GPU_TILE_QUERIES * (out_dim + 2)
        place = to + lane * (out_dim + 2)
        tl.store(place[:, None] + dv[None, :], out, (dv < out_dim)[None, :])
        tl.store(place + out_dim, top)
        tl.store(place + out_dim + 1, total)


@triton.jit(do_not_specialize=["splits", "width"])
def _combine(
    q, addresses, strides, tokens, q_head, q_token, scale, window, softcap, group, own, width, rows, state,
    splits, kv_heads, sinks, SINKS: tl.constexpr, y, dim, out_dim, WIDE: tl.constexpr, OUT_WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, GPU_TILE_QUERIES: tl.constexpr, GPU_BLOCK_TOKENS: tl.constexpr,
    GPU_SPLIT_TOKENS: tl.constexpr,
):  # fmt: skip
    """One token's heads of a group: its splits in order, its own keys, and the division."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member = tl.program_id(2) * GPU_TILE_QUERIES + tl.arange(0, GPU_TILE_QUERIES)
    real = member < group
    row, position = tl.load(tokens + token * 4), tl.load(tokens + token * 4 + 2)
    base = tl.load(tokens + token * 4 + 3)
    start = tl.where(window > 0, position - window + 1, 0)
    d, dv = tl.arange(0, WIDE), tl.arange(0, OUT_WIDE)
    query = (token - tl.load(rows + row * 3)) * group + tl.where(real, member, 0)
    tile = tl.load(rows + row * 3 + 2) + query // GPU_TILE_QUERIES
    place = state + ((tile * kv_heads + head) * splits * GPU_TILE_QUERIES + query % GPU_TILE_QUERIES) * (out_dim + 2)
    top = tl.full((GPU_TILE_QUERIES,), -3e38, tl.float32)
    total = tl.zeros((GPU_TILE_QUERIES,), tl.float32)
    out = tl.zeros((GPU_TILE_QUERIES, OUT_WIDE), tl.float32)
    for split in range(base // GPU_SPLIT_TOKENS):
        part = place + split * GPU_TILE_QUERIES * (out_dim + 2)
        out2 = tl.load(part[:, None] + dv[None, :], (dv < out_dim)[None, :], 0.0)
        top, total, out = _merge(top, total, out, tl.load(part + out_dim), tl.load(part + out_dim + 1), out2)
    begun = member * 0 < base % GPU_SPLIT_TOKENS
    last = place + (base // GPU_SPLIT_TOKENS) * GPU_TILE_QUERIES * (out_dim + 2)
    top2 = tl.load(last + out_dim, begun, -3e38)
    total2 = tl.load(last + out_dim + 1, begun, 0.0)
    out2 = tl.load(last[:, None] + dv[None, :], begun[:, None] & (dv < out_dim)[None, :], 0.0)
    if base <= position:
        queries = tl.load(
            q + (head * group + member)[:, None] * q_head + token * q_token + d[None, :],
            real[:, None] & (d < dim)[None, :], 0.0,
        )  # fmt: skip
        keys, values, k_row, v_row = _memory(q, addresses, strides, row, head)
        for at in range(base, position + 1, GPU_BLOCK_TOKENS):
            if (at % GPU_SPLIT_TOKENS == 0) & (at > base):
                top, total, out = _merge(top, total, out, top2, total2, out2)
                top2 = tl.full((GPU_TILE_QUERIES,), -3e38, tl.float32)
                total2 = tl.zeros((GPU_TILE_QUERIES,), tl.float32)
                out2 = tl.zeros((GPU_TILE_QUERIES, OUT_WIDE), tl.float32)
            places = at + tl.arange(0, GPU_BLOCK_TOKENS)
            inside = places <= position
            slots = tl.load(own + token * width + places - base, inside, 0).to(tl.int64)
            seen = (inside & (places >= start))[None, :] & real[:, None]
            top2, total2, out2 = _block(
                queries, keys, values, slots, seen, inside, top2, total2, out2, k_row, v_row, scale, softcap,
                dim, out_dim, WIDE, OUT_WIDE, SOFTCAP, GPU_BLOCK_TOKENS,
            )  # fmt: skip
    top, total, out = _merge(top, total, out, top2, total2, out2)
    if SINKS:
        sink = tl.load(sinks + head * group + member, real, 0.0) * 1.4426950408889634
        top, total, out = _merge(top, total, out, sink, tl.full((GPU_TILE_QUERIES,), 1.0, tl.float32), out * 0.0)
    to = y + (token * kv_heads * group + head * group + member)[:, None] * out_dim + dv[None, :]
    tl.store(
        to,
        (out / tl.where(total > 0, total, 1.0)[:, None]).to(y.dtype.element_ty),
        real[:, None] & (dv < out_dim)[None, :],
    )
