"""Attention on a GPU in one fixed order: a token's bits depend neither on what shares the pass nor on drafts.

The order is that of ``ordered_attention.py``, with longer splits: positions are cut into splits, and splits into
blocks, at fixed places. A split goes block by block with a running maximum and sum; splits are merged in order. All
rows of a batch share two calls, which find each row's memory by a table of addresses:

- *Scan* covers the keys stored in sequence order. With few queries, a tile's splits are spread over several programs,
  more for longer rows, and each split's state is stored. With many, one program runs all splits of a tile in turn and
  merges them: the same operations in the same order, hence the same bits.
- *Combine* merges each token's splits, adds the keys that only this token sees, and divides. Each program computes some
  columns of a head's output; extra programs prefetch the next product's weights into the L2 cache.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from forerun.kernels.attention.attention import AttentionSpec
from forerun.kernels.gpu.pass_tables import (
    GPU_BLOCK_TOKENS,
    GPU_COMBINE_QUERIES,
    GPU_SHORT_SPLIT_TOKENS,
    GPU_SHORT_SPLITS,
    GPU_SPLIT_TOKENS,
    PassTables,
)
from forerun.kernels.gpu.prefetch import Ahead, prefetch

SHORT_SPLIT, SHORT_SPLITS, LONG_SPLIT = map(tl.constexpr, (GPU_SHORT_SPLIT_TOKENS, GPU_SHORT_SPLITS, GPU_SPLIT_TOKENS))
QUERIES = tl.constexpr(GPU_COMBINE_QUERIES)
GPU_COMBINE_THREADS = 128
"""Minimum threads of a combining program. Each has one number of one query, so its registers hold many loads."""
GPU_COMBINE_SPLITS = 32
"""Splits whose states are loaded before merging: a load costs as much as hundreds of sums. After 122,000 tokens there
are 132 splits, so five rounds of loads; with 8 there were 17, which cost 12 to 15 us of 193 (H200, one token)."""
SCAN_REGISTERS = 168
"""Registers per scanning thread, so that three programs of 128 threads share a Hopper's processor. The compiler would
use 181, for two. On an Ampere, shared memory has room for two."""


def store(layer: int, k: torch.Tensor, v: torch.Tensor, places: PassTables) -> None:
    """Write a pass's keys and values ``[1, Hkv, n, d]`` to their rows' memory."""
    heads, n = k.shape[1:3]
    _contiguous_numbers(k, v)
    _store[(n, heads)](
        k, v, places.addresses[layer], places.strides[layer], places.tokens, *k.stride()[1:3], *v.stride()[1:3],
        k.shape[3], v.shape[3], triton.next_power_of_2(k.shape[3]), triton.next_power_of_2(v.shape[3]),
    )  # fmt: skip


def attend(
    layer: int, q: torch.Tensor, kv_heads: int, places: PassTables, spec: AttentionSpec, out_dim: int | None = None,
    following: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute attention of packed queries ``[1, H, n, d]`` over their rows' cached keys; ``[1, H, n, dv]``. Values have
    ``out_dim`` numbers, by default as many as keys. ``following``: weights of the next product, to prefetch."""
    _, heads, n, dim = q.shape
    out_dim, softcap, sinks = out_dim or dim, spec.softcap, spec.sinks
    _contiguous_numbers(q)
    group, size = heads // kv_heads, places.sizes
    splits = 2 if size.merging else size.splits
    state = q.new_empty(size.tiles, kv_heads, splits, size.tile, out_dim, dtype=torch.float32)
    sums = q.new_empty(size.tiles, kv_heads, splits, 2, size.tile, dtype=torch.float32)
    out = q.new_empty(n, heads, out_dim)
    queries = (q, places.addresses[layer], places.strides[layer], places.tokens, places.rows, state, sums, q.stride(1),
               q.stride(2), spec.scaling / math.log(2), spec.window or 0, softcap or 0.0, group, splits)  # fmt: skip
    row_bytes = _width(max(dim, out_dim)) * q.element_size()
    how = (softcap is not None, places.aligned, size.tile, block_tokens(row_bytes))
    stages = pipeline_stages(row_bytes)
    if size.splits:
        _scan[(size.jobs, kv_heads)](
            *queries, places.tiles, places.jobs, size.merging, dim, out_dim, _width(dim), _width(out_dim), *how,
            enable_fp_fusion=False, num_stages=stages, **scan_options(size.tile, size.merging, row_bytes),
        )  # fmt: skip
    floats = None if sinks is None else sinks.detach().float().contiguous()
    lanes, part, threads = combine_shape(group, _width(out_dim))
    loaded = 1 if size.merging else GPU_COMBINE_SPLITS  # merged by the scan
    ahead = Ahead.of(following, q)
    programs = kv_heads * triton.cdiv(group, GPU_COMBINE_QUERIES), triton.cdiv(out_dim, part)
    _combine[(n + triton.cdiv(ahead.programs, math.prod(programs)), *programs)](
        *queries, places.own, size.own, n, kv_heads, q if floats is None else floats, floats is not None, out,
        *ahead.arguments, size.merging, dim, out_dim, _width(dim), part, *how, lanes, loaded, threads,
        enable_fp_fusion=False, num_stages=stages, num_warps=threads // 32,
    )  # fmt: skip
    return out.transpose(0, 1)[None]


def block_tokens(row_bytes: int) -> int:
    """Return the keys per block for keys of ``row_bytes``; fewer if they would not fit the shared memory."""
    return GPU_BLOCK_TOKENS if row_bytes <= 256 else GPU_BLOCK_TOKENS // 2


def pipeline_stages(row_bytes: int) -> int:
    """Return how many blocks to load ahead for keys of ``row_bytes``: what fits shared memory since Ampere."""
    return 3 if row_bytes <= 256 else 2 if row_bytes <= 512 else 1


def scan_options(tile: int, merging: bool, row_bytes: int) -> dict[str, int]:
    """Return the warps and registers of a scan's program. A large tile with two states would not fit four warps'
    registers and gets eight; with one state, eight cost twice as much (H200, 64 queries, 122,000 keys). Registers are
    limited where a test finds no spills."""
    if merging and tile != GPU_COMBINE_QUERIES:
        return {"num_warps": 8}
    limited = tile == GPU_COMBINE_QUERIES and not merging and row_bytes <= 256
    return {"num_warps": 4} | ({"maxnreg": SCAN_REGISTERS} if limited else {})


def combine_shape(group: int, width: int) -> tuple[int, int, int]:
    """Return the queries and columns per combining program, and its threads, for a group and a value's width."""
    lanes = min(GPU_COMBINE_QUERIES, triton.next_power_of_2(group))
    part = min(width, max(16, GPU_COMBINE_THREADS // lanes))
    return lanes, part, max(GPU_COMBINE_THREADS, lanes * part)


def _width(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _contiguous_numbers(*tensors: torch.Tensor) -> None:
    """Raise ``ValueError`` unless a head's numbers are contiguous, which the kernels assume."""
    for tensor in tensors:
        if tensor.stride(3) != 1:
            raise ValueError(f"numbers of a head must be contiguous; the strides are {tensor.stride()}")


@triton.jit
def _store(
    k, v, addresses, strides, tokens, k_head, k_token, v_head, v_token, dim, out_dim, WIDE: tl.constexpr,
    OUT_WIDE: tl.constexpr,
):  # fmt: skip
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
def _memory(q, addresses, strides, row, head, ALIGNED: tl.constexpr):
    """Return a head's keys and values in a row, and their strides; hints on alignment keep the loads wide."""
    keys = tl.load(addresses + row * 2).to(tl.pointer_type(q.dtype.element_ty))
    values = tl.load(addresses + row * 2 + 1).to(tl.pointer_type(q.dtype.element_ty))
    k_head, k_row = tl.load(strides + row * 4), tl.load(strides + row * 4 + 1)
    v_head, v_row = tl.load(strides + row * 4 + 2), tl.load(strides + row * 4 + 3)
    if ALIGNED:
        keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
        k_head, k_row = tl.multiple_of(k_head, 16), tl.multiple_of(k_row, 16)
        v_head, v_row = tl.multiple_of(v_head, 16), tl.multiple_of(v_row, 16)
    return keys + head * k_head, values + head * v_head, k_row, v_row


@triton.jit
def _split_begin(split):
    return tl.minimum(split, SHORT_SPLITS) * SHORT_SPLIT + tl.maximum(split - SHORT_SPLITS, 0) * LONG_SPLIT


@triton.jit
def _split_of(position):
    short: tl.constexpr = SHORT_SPLITS * SHORT_SPLIT
    return tl.minimum(position, short) // SHORT_SPLIT + tl.maximum(position - short, 0) // LONG_SPLIT


@triton.jit
def _block(
    q, keys, values, slots, seen, inside, top, total, out, k_row, v_row, first, scale, softcap, DIM: tl.constexpr,
    OUT_DIM: tl.constexpr, WIDE: tl.constexpr, OUT_WIDE: tl.constexpr, SOFTCAP: tl.constexpr,
    GPU_BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Process one block of keys for queries ``[TILE, WIDE]`` and mask ``seen``; of the values, ``OUT_WIDE`` columns
    from ``first`` on. A block of which a query sees nothing changes none of its bits."""
    d, dv = tl.arange(0, WIDE), first + tl.arange(0, OUT_WIDE)
    k = tl.load(keys + slots[None, :] * k_row + d[:, None], inside[None, :] & (d < DIM)[:, None], 0.0)
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
    # weights times ones are summed in one order in both kernels
    ones = tl.full((GPU_BLOCK_TOKENS, 16), 1.0, values.dtype.element_ty)
    sums = tl.max(tl.dot(weights, ones, input_precision="ieee"), 1)
    v = tl.load(values + slots[:, None] * v_row + dv[None, :], inside[:, None] & (dv < OUT_DIM)[None, :], 0.0)
    out = tl.dot(weights, v, out * before[:, None], input_precision="ieee")
    return highest, total * before + sums, out


@triton.jit
def _merge(top, total, out, top2, total2, out2):
    highest = tl.maximum(top, top2)
    one, two = tl.exp2(top - highest), tl.exp2(top2 - highest)
    return highest, total * one + total2 * two, out * one[:, None] + out2 * two[:, None]


@triton.jit
def _nothing(TILE: tl.constexpr, OUT_WIDE: tl.constexpr):
    """Return the state before any key; merging it changes nothing."""
    return (tl.full((TILE,), -3e38, tl.float32), tl.zeros((TILE,), tl.float32), tl.zeros((TILE, OUT_WIDE), tl.float32))


@triton.jit
def _put(state, sums, place, lane, mask, top, total, out, OUT_DIM: tl.constexpr, OUT_WIDE: tl.constexpr,
         TILE: tl.constexpr):  # fmt: skip
    dv = tl.arange(0, OUT_WIDE)
    here = state + (place * TILE + lane)[:, None] * OUT_DIM + dv[None, :]
    tl.store(here, out, mask[:, None] & (dv < OUT_DIM)[None, :])
    tl.store(sums + place * 2 * TILE + lane, top, mask)
    tl.store(sums + place * 2 * TILE + TILE + lane, total, mask)


@triton.jit(do_not_specialize=["splits"])
def _scan(
    q, addresses, strides, tokens, rows, state, sums, q_head, q_token, scale, window, softcap, group, splits, tiles,
    jobs, MERGING: tl.constexpr, DIM: tl.constexpr, OUT_DIM: tl.constexpr, WIDE: tl.constexpr, OUT_WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, GPU_BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Scan a tile of queries over splits of the keys stored in sequence order. Without ``MERGING``, a program runs some
    splits and stores each one's state; with it, all, and stores two states per query: complete splits, and the rest."""
    job, head = jobs + tl.program_id(0) * 3, tl.program_id(1)
    tile, part, parts = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    row = tl.load(tiles + tile * 2)
    first, count = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1)
    lane = tl.arange(0, TILE)
    query = tl.load(tiles + tile * 2 + 1) * TILE + lane
    real = query < count * group
    token = (first + tl.where(real, query // group, 0)).to(tl.int64)
    end = tl.where(real, tl.load(tokens + token * 4 + 3), 0)
    start = tl.where(window > 0, tl.maximum(tl.load(tokens + token * 4 + 2) - window + 1, 0), 0)
    earliest = tl.min(tl.where(real, start, 4611686018427387904), 0)
    last = tl.max(end, 0)
    if (earliest < last) & (parts > 0):
        d = tl.arange(0, WIDE)
        queries = tl.load(
            q + (head * group + query % group)[:, None] * q_head + token[:, None] * q_token + d[None, :],
            real[:, None] & (d < DIM)[None, :], 0.0,
        )  # fmt: skip
        keys, values, k_row, v_row = _memory(q, addresses, strides, row, head, ALIGNED)
        place = (tile * tl.num_programs(1) + head) * splits
        top, total, out = _nothing(TILE, OUT_WIDE)
        skipped = _split_of(earliest)
        count_of_splits = _split_of(last - 1) + 1
        for split in range(skipped + part, count_of_splits, parts):
            begin, stop = _split_begin(split), _split_begin(split + 1)
            top2, total2, out2 = _nothing(TILE, OUT_WIDE)
            near = tl.maximum(earliest, begin) // GPU_BLOCK_TOKENS * GPU_BLOCK_TOKENS
            for at in range(near, tl.minimum(stop, last), GPU_BLOCK_TOKENS):
                slots = at + tl.arange(0, GPU_BLOCK_TOKENS)
                seen = (slots[None, :] < end[:, None]) & (slots[None, :] >= start[:, None])
                top2, total2, out2 = _block(
                    queries, keys, values, slots, seen, slots < last, top2, total2, out2, k_row, v_row, 0, scale,
                    softcap, DIM, OUT_DIM, WIDE, OUT_WIDE, SOFTCAP, GPU_BLOCK_TOKENS,
                )  # fmt: skip
            if MERGING:
                whole = end >= stop
                _put(state, sums, place + 1, lane, (end > begin) & (end < stop), top2, total2, out2, OUT_DIM, OUT_WIDE,
                     TILE)  # fmt: skip
                top3, total3, out3 = _merge(top, total, out, top2, total2, out2)
                top, total = tl.where(whole, top3, top), tl.where(whole, total3, total)
                out = tl.where(whole[:, None], out3, out)
            else:
                _put(state, sums, place + split, lane, real & (end > begin), top2, total2, out2, OUT_DIM, OUT_WIDE,
                     TILE)  # fmt: skip
        if MERGING:
            _put(state, sums, place, lane, real, top, total, out, OUT_DIM, OUT_WIDE, TILE)


@triton.jit(do_not_specialize=["splits", "width", "n", "following_bytes"])
def _combine(
    q, addresses, strides, tokens, rows, state, sums, q_head, q_token, scale, window, softcap, group, splits, own,
    width, n, kv_heads, sinks, SINKS: tl.constexpr, y, following, following_bytes, AHEAD: tl.constexpr,
    MERGING: tl.constexpr, DIM: tl.constexpr, OUT_DIM: tl.constexpr, WIDE: tl.constexpr, OUT_WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, GPU_BLOCK_TOKENS: tl.constexpr,
    LANES: tl.constexpr, GPU_COMBINE_SPLITS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Combine ``OUT_WIDE`` columns of one token's heads in a group: its splits, its own keys, and the division.
    ``TILE`` is the scan's. Splits are merged for ``LANES`` queries, with maxima and sums loaded once per output number,
    so that threads exchange nothing; the rest runs over ``QUERIES``, a tensor core's minimum, filled by repetition."""
    token = tl.program_id(0).to(tl.int64)
    if AHEAD and token >= n:
        number = ((token - n) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
        prefetch(following, following_bytes, number, THREADS)
        return
    head, first = tl.program_id(1) % kv_heads, tl.program_id(2) * OUT_WIDE
    begin = tl.program_id(1) // kv_heads * QUERIES
    merged = begin + tl.arange(0, LANES)
    there = merged < group
    row, position = tl.load(tokens + token * 4), tl.load(tokens + token * 4 + 2)
    base = tl.load(tokens + token * 4 + 3)
    start = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    dv = first + tl.arange(0, OUT_WIDE)
    query = (token - tl.load(rows + row * 3)) * group + tl.where(there, merged, 0)
    tile = tl.load(rows + row * 3 + 2) + query // TILE
    place = (tile * kv_heads + head) * splits
    numbers = (dv < OUT_DIM)[None, :]
    lane = (query % TILE)[:, None] + (dv * 0)[None, :]
    tops = tl.full((LANES, OUT_WIDE), -3e38, tl.float32)
    totals = tl.zeros((LANES, OUT_WIDE), tl.float32)
    outs = totals
    whole = _split_of(base)
    partial = there & (merged * 0 + base > tl.maximum(_split_begin(whole), start))
    skipped = _split_of(start)
    after = whole
    if MERGING:
        skipped, whole, after = 0, (skipped < whole).to(tl.int64), 1
    for at in range(skipped, whole, GPU_COMBINE_SPLITS):
        loaded, least = (), tops
        for i in tl.static_range(GPU_COMBINE_SPLITS):
            here = (there & (merged * 0 + at + i < whole))[:, None] & numbers
            kept = _kept(state, sums, (place + at + i)[:, None], lane, here, dv[None, :], OUT_DIM, TILE)
            # Triton compiles no (*loaded, kept)
            loaded = loaded + (kept,)  # type: ignore[assignment]  # noqa: RUF005
            least = tl.minimum(least, tl.minimum(kept[0], tl.minimum(kept[1], kept[2])))
        # adds 0, but only after all loads: otherwise the compiler mixes loads with sums, which wait for them
        tops += tl.maximum(least, -3e38) * 0.0
        for i in tl.static_range(GPU_COMBINE_SPLITS):
            top2, total2, out2 = loaded[i]  # type: ignore[var-annotated]
            highest = tl.maximum(tops, top2)
            one, two = tl.exp2(tops - highest), tl.exp2(top2 - highest)
            tops, totals, outs = highest, totals * one + total2 * two, outs * one + out2 * two
    top, total, out = _repeated(tops, totals, outs)
    here = partial[:, None] & numbers
    tops, totals, outs = _kept(state, sums, (place + after)[:, None], lane, here, dv[None, :], OUT_DIM, TILE)
    top2, total2, out2 = _repeated(tops, totals, outs)
    copy = tl.arange(0, QUERIES)
    member = begin + copy // (QUERIES // LANES)
    real = member < group
    if base <= position:
        d = tl.arange(0, WIDE)
        queries = tl.load(
            q + (head * group + member)[:, None] * q_head + token * q_token + d[None, :],
            real[:, None] & (d < DIM)[None, :], 0.0,
        )  # fmt: skip
        keys, values, k_row, v_row = _memory(q, addresses, strides, row, head, ALIGNED)
        for at in range(base, position + 1, GPU_BLOCK_TOKENS):
            if (at == _split_begin(_split_of(at))) & (at > base):
                top, total, out = _merge(top, total, out, top2, total2, out2)
                top2, total2, out2 = _nothing(QUERIES, OUT_WIDE)
            places = at + tl.arange(0, GPU_BLOCK_TOKENS)
            inside = places <= position
            slots = tl.load(own + token * width + places - base, inside, 0).to(tl.int64)
            seen = (inside & (places >= start))[None, :] & real[:, None]
            top2, total2, out2 = _block(
                queries, keys, values, slots, seen, inside, top2, total2, out2, k_row, v_row, first, scale, softcap,
                DIM, OUT_DIM, WIDE, OUT_WIDE, SOFTCAP, GPU_BLOCK_TOKENS,
            )  # fmt: skip
    top, total, out = _merge(top, total, out, top2, total2, out2)
    if SINKS:
        sink = tl.load(sinks + head * group + member, real, 0.0) * 1.4426950408889634
        one = tl.full((QUERIES,), 1.0, tl.float32)
        top, total, out = _merge(top, total, out, sink, one, out * 0.0)
    to = y + (token * kv_heads * group + head * group + member)[:, None] * OUT_DIM + dv[None, :]
    divided = out / tl.where(total > 0, total, 1.0)[:, None]
    stored = real & (copy % (QUERIES // LANES) == 0)
    tl.store(to, divided.to(y.dtype.element_ty), stored[:, None] & numbers)


@triton.jit
def _repeated(tops, totals, outs):
    """Repeat a state ``[lanes, numbers]`` to ``QUERIES`` lanes; maxima and sums become ``[QUERIES]``."""
    top, total = _stretched(tops), _stretched(totals)
    return tl.max(top, 1), tl.max(total, 1), _stretched(outs)


@triton.jit
def _stretched(x):
    lanes: tl.constexpr = x.shape[0]
    wide: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, None, :], (lanes, QUERIES // lanes, wide)), (QUERIES, wide))


@triton.jit
def _kept(state, sums, place, lane, mask, dv, OUT_DIM: tl.constexpr, TILE: tl.constexpr):
    """Load a scan's state ``[queries, numbers]``, or the empty state where the mask is off."""
    out = tl.load(state + (place * TILE + lane) * OUT_DIM + dv, mask, 0.0)
    top = tl.load(sums + place * 2 * TILE + lane, mask, -3e38)
    return top, tl.load(sums + place * 2 * TILE + TILE + lane, mask, 0.0), out
