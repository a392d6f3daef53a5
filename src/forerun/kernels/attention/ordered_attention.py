"""Compute attention in a fixed order: a token's bits depend neither on what shares the pass nor on what was drafted.

Keys are cut into splits, and splits into blocks, at fixed positions. Within a split, a query goes block by block with a
running maximum and sum (FlashAttention, Dao et al. 2022; ``attention_tile.py``). Splits are merged in order
(Flash-Decoding, Dao et al. 2023). Blocks without visible keys change no bit, so they may be skipped. A drafted token
also sees its ancestors in the tree, whose keys are copied out by position and go through the same steps.

*Scan* visits keys stored in sequence order, by units of a row's splits and tiles of queries. *Combine* merges each
token's splits, adds the keys that only this token sees, and divides.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_fields import (
    ATTEND_LAYOUT,
    ROW_BYTES,
    SCALE_OFFSET,
    UNIT_BYTES,
    AttendOp,
    RowFields,
    UnitFields,
    kv_of,
    read_attend,
    read_row,
    read_unit,
)
from forerun.kernels.attention.attention_tile import BLOCK_TOKENS, TILE_QUERIES, hide
from forerun.kernels.attention.block_code import SHARED_TILES, BlockCode, block_code, read_block_code
from forerun.kernels.attention.tile_states import (
    clear_states,
    copy_states,
    kept_tiles,
    merge_tiles,
    size_of_tile,
    state_of,
    tile_bytes,
)
from forerun.kernels.linear.rowwise import LOG2E, soften, words
from forerun.kernels.runtime.addresses import call, floats, integers
from forerun.kernels.runtime.executor import PER_TOKEN, PER_UNIT, Operation, Tasks, read_pass
from forerun.kernels.runtime.vector_ir import LANES, LINE

SPLIT_TOKENS = 256
"""Positions per split. Splits are summed separately, so that a few heads of a long sequence keep all threads busy."""
RANGE_BYTES = 96
"""Bytes of a tile's visible range: least and greatest end, least and greatest start, then those per query."""
ALL_SPLITS = -1
"""Instead of a unit's split: all splits, one after the other."""


@functools.cache
def scratch_bytes(tiles: int, group: int, dim: int, out_dim: int) -> int:
    """Return the scratch bytes per thread to scan ``tiles`` tiles and to combine ``group`` heads."""
    most, own = max(tiles, 1), math.ceil(group / TILE_QUERIES)
    scan = most * (TILE_QUERIES * (dim + BLOCK_TOKENS) * 4 + 2 * tile_bytes(out_dim) + RANGE_BYTES)
    combine = own * (TILE_QUERIES * (dim + BLOCK_TOKENS) * 4 + 2 * tile_bytes(out_dim))
    return max(scan, combine) + 2 * block_bytes(dim, out_dim) + 8 * LINE


def block_bytes(dim: int, out_dim: int) -> int:
    """Return the size in bytes of a copy of a block's keys or values."""
    return BLOCK_TOKENS * max(dim, out_dim) * 4


_block_bytes = compiled(block_bytes)


@compiled
def scan_bounds(row: RowFields, place: int, position: int) -> tuple[int, int]:
    """Return where a token's own keys start (a tree node's at a block boundary, else 0), and where its scan ends."""
    if place < row.in_order:
        return 0, position + 1
    base = (row.start + row.in_order) // BLOCK_TOKENS * BLOCK_TOKENS
    return base, base


@compiled
def _pack_tile(
    op: AttendOp, code: BlockCode, scale: int, token: int, count: int, head: int, tile: int, to: int
) -> None:
    """Write a KV head's tile of queries, of ``count`` tokens from ``token`` on, padded with the last query."""
    group = op.heads // op.kv_heads
    for i in range(TILE_QUERIES):
        query = min(tile * TILE_QUERIES + i, count * group - 1)
        own = op.q + (token + query // group) * op.q_row + (head * group + query % group) * op.q_head
        call(code.pack, own, scale, op.dim // LANES, to + 16 * i)


@compiled
def copy_block(code: BlockCode, rows: int, row: int, dim: int, count: int, to: int) -> None:
    """Copy ``count`` rows, padded with zeros to a block."""
    size = code.width * dim
    for i in range(count):
        call(code.copy, rows + i * row, dim // LANES, to + i * size)
    if count < BLOCK_TOKENS:
        floats(to + count * size, (BLOCK_TOKENS - count) * size // 4)[:] = np.float32(0)


@compiled
def soften_tile(op: AttendOp, weights: int, spare: int) -> None:
    """Apply the soft cap, if any, to the scores."""
    if op.softcap > 0:
        floats(spare, 1)[0] = np.float32(op.softcap * LOG2E)
        soften(weights, BLOCK_TOKENS * TILE_QUERIES // LANES, spare)


@compiled
def scan(address: int, fields: int, code_address: int, task: int, slot: int) -> None:
    """Scan one unit and KV head: tiles of queries over one split, or over all splits in turn."""
    this, op, code = read_pass(address), read_attend(fields), read_block_code(code_address)
    unit = read_unit(this.units + task // op.kv_heads * UNIT_BYTES)
    row = read_row(this.rows + unit.row * ROW_BYTES)
    head, tiles, size = task % op.kv_heads, unit.last - unit.first, size_of_tile(op.out_dim)
    q = slot
    scores = q + tiles * TILE_QUERIES * op.dim * 4
    ranges = scores + tiles * TILE_QUERIES * BLOCK_TOKENS * 4
    state = ranges + RANGE_BYTES * tiles
    other = state + tiles * size
    spare = other + tiles * size
    last = _visible_ranges(op, row, unit, this.cache_positions, ranges)
    for t in range(tiles):
        to = q + t * TILE_QUERIES * op.dim * 4
        _pack_tile(op, code, fields + SCALE_OFFSET, row.first, row.n, head, unit.first + t, to)
    if unit.split != ALL_SPLITS:
        to = kept_tiles(op, row, this.states, unit.split, head) + unit.first * size
        clear_states(op, to, tiles)
        end = min(last, (unit.split + 1) * SPLIT_TOKENS)
        first = unit.split * SPLIT_TOKENS
        _scan_split(op, code, fields, row, unit.row, head, tiles, first, end, q, scores, ranges, to, spare)
        return
    clear_states(op, state, tiles)
    first = integers(ranges + 16, 1)[0]
    for t in range(1, tiles):
        first = min(first, integers(ranges + RANGE_BYTES * t + 16, 1)[0])
    for split in range(max(first, 0) // SPLIT_TOKENS, (last + SPLIT_TOKENS - 1) // SPLIT_TOKENS):
        clear_states(op, other, tiles)
        end = min(last, (split + 1) * SPLIT_TOKENS)
        at = split * SPLIT_TOKENS
        _scan_split(op, code, fields, row, unit.row, head, tiles, at, end, q, scores, ranges, other, spare)
        merge_tiles(op, state, other, tiles)
    words(0, state, tiles * size // LINE, kept_tiles(op, row, this.states, 0, head) + unit.first * size)


@compiled
def _visible_ranges(op: AttendOp, row: RowFields, unit: UnitFields, positions: int, ranges: int) -> int:
    """Write each tile's visible range; return the greatest end of all tiles."""
    group, last = op.heads // op.kv_heads, 0
    for t in range(unit.first, unit.last):
        bounds = integers(ranges + RANGE_BYTES * (t - unit.first), 12)
        for i in range(TILE_QUERIES):
            place = min(t * TILE_QUERIES + i, row.n * group - 1) // group
            position = integers(positions + 8 * (row.first + place), 1)[0]
            end = scan_bounds(row, place, position)[1]
            begin = max(0, position - op.window + 1) if op.window else 0
            bounds[4 + i], bounds[8 + i] = end, begin
            if i == 0:
                bounds[0] = bounds[1] = end
                bounds[2] = bounds[3] = begin
            bounds[0], bounds[1] = min(bounds[0], end), max(bounds[1], end)
            bounds[2], bounds[3] = min(bounds[2], begin), max(bounds[3], begin)
        last = max(last, bounds[1])
    return last


@compiled
def _scan_split(
    op: AttendOp, code: BlockCode, fields: int, row: RowFields, number: int, head: int, tiles: int, first: int,
    end: int, q: int, scores: int, ranges: int, states: int, spare: int,
) -> None:  # fmt: skip
    k, v = kv_of(op, row, number, head)
    for start in range(first, end, BLOCK_TOKENS):
        low, high = tiles, 0
        for t in range(tiles):
            bounds = integers(ranges + RANGE_BYTES * t, 12)
            if bounds[1] > start and bounds[2] < start + BLOCK_TOKENS:
                low, high = min(low, t), t + 1
        if low >= high:
            continue
        count = min(BLOCK_TOKENS, end - start)
        here, there = k + start * row.k_row, v + start * row.v_row
        after = here + BLOCK_TOKENS * row.k_row if start + BLOCK_TOKENS < end else here
        _block(op, code, fields, row, low, high, start, count, here, there, after, q, scores, ranges, states, spare)


@compiled
def _block(
    op: AttendOp, code: BlockCode, fields: int, row: RowFields, low: int, high: int, start: int, count: int, k: int,
    v: int, after: int, q: int, scores: int, ranges: int, states: int, spare: int,
) -> None:  # fmt: skip
    """Process tiles ``low`` to ``high`` over one block; prefetch values while scoring, then the next keys."""
    size, tile_size, rewritten = BLOCK_TOKENS * TILE_QUERIES * 4, size_of_tile(op.out_dim), high - low >= SHARED_TILES
    copied, k_row, v_row, ahead = count < BLOCK_TOKENS or code.copied, row.k_row, row.v_row, v
    score, add, copy, rewrite = code.scores, code.values, spare, spare + _block_bytes(op.dim, op.out_dim)
    if copied:
        copy_block(code, k, k_row, op.dim, count, copy)
        k, k_row = copy, code.width * op.dim
    if rewritten and code.rewrite_keys:
        call(code.rewrite_keys, k, k_row, op.dim // LANES, rewrite)
        k, k_row, score = rewrite, 4 * op.dim, code.rewritten_scores
    call(score, op.dim, op.width, low, high, q, k, k_row, fields + SCALE_OFFSET, scores, ahead)
    if copied:
        copy_block(code, v, v_row, op.out_dim, count, copy)
        v, v_row = copy, code.width * op.out_dim
    if rewritten and code.rewrite_values:
        call(code.rewrite_values, v, v_row, op.out_dim // LANES, rewrite)
        v, v_row, add = rewrite, 4 * op.out_dim, code.rewritten_values
    for t in range(low, high):
        bounds, weights, tile = integers(ranges + RANGE_BYTES * t, 12), scores + t * size, states + t * tile_size
        soften_tile(op, weights, rewrite + _block_bytes(op.dim, op.out_dim))
        if bounds[0] < start + BLOCK_TOKENS or bounds[3] > start:
            own = ranges + RANGE_BYTES * t
            hide(weights, start, own + 64, own + 32)
        call(add, op.out_dim, op.width, high - low, weights, state_of(op, tile), v, v_row, tile, after)
        after += BLOCK_TOKENS * op.out_dim * op.width // (high - low)


SCAN = Operation(ATTEND_LAYOUT, lambda op: Tasks(op.kv_heads, PER_UNIT), scan, lambda op: block_code(op.kind))


@compiled
def combine(address: int, fields: int, code_address: int, task: int, slot: int) -> None:
    """Finish one token and KV head: merge its splits, add the keys that only it sees, divide, and write the output."""
    this, op, code = read_pass(address), read_attend(fields), read_block_code(code_address)
    token, head = task // op.kv_heads, task % op.kv_heads
    number = integers(this.token_rows + 8 * token, 1)[0]
    row = read_row(this.rows + number * ROW_BYTES)
    group = op.heads // op.kv_heads
    own = (group + TILE_QUERIES - 1) // TILE_QUERIES
    running = slot
    part = running + own * size_of_tile(op.out_dim)
    rest = part + own * size_of_tile(op.out_dim)
    place, position = token - row.first, integers(this.cache_positions + 8 * token, 1)[0]
    base, seen = scan_bounds(row, place, position)
    clear_states(op, running, own)
    low = max(0, position - op.window + 1) if op.window else 0
    full = (seen + SPLIT_TOKENS - 1) // SPLIT_TOKENS
    if row.splits == 0:
        copy_states(op, kept_tiles(op, row, this.states, 0, head), place * group, group, running)
    else:
        # the split that a tree node continues is merged later
        joined = full if place < row.in_order else min(full, base // SPLIT_TOKENS)
        for split in range(low // SPLIT_TOKENS, joined):
            copy_states(op, kept_tiles(op, row, this.states, split, head), place * group, group, part)
            merge_tiles(op, running, part, own)
        if place >= row.in_order:
            begun = base // SPLIT_TOKENS
            clear_states(op, part, own)
            if begun < full and begun >= low // SPLIT_TOKENS:
                copy_states(op, kept_tiles(op, row, this.states, begun, head), place * group, group, part)
            _attend_branch(
                op,
                code,
                fields,
                row,
                number,
                head,
                token,
                place,
                position,
                base,
                low,
                this.parents,
                running,
                part,
                rest,
            )
    for g in range(group):
        _divide(op, running, g, token, head * group + g, rest)


@compiled
def _attend_branch(
    op: AttendOp, code: BlockCode, fields: int, row: RowFields, number: int, head: int, token: int, place: int,
    position: int, base: int, low: int, parents: int, running: int, part: int, rest: int,
) -> None:  # fmt: skip
    """Add a node's own keys from position ``base`` on, in order, block by block and split by split."""
    own = (op.heads // op.kv_heads + TILE_QUERIES - 1) // TILE_QUERIES
    q = rest
    scores = q + own * TILE_QUERIES * op.dim * 4
    keys = scores + own * TILE_QUERIES * BLOCK_TOKENS * 4
    values = keys + _block_bytes(op.dim, op.out_dim)
    cap = values + _block_bytes(op.dim, op.out_dim)
    bounds = cap + LINE
    integers(bounds, 4)[:] = low
    integers(bounds + 8 * TILE_QUERIES, 4)[:] = position + 1
    for t in range(own):
        _pack_tile(op, code, fields + SCALE_OFFSET, token, 1, head, t, q + t * TILE_QUERIES * op.dim * 4)
    k, v = kv_of(op, row, number, head)
    for start in range(base, position + 1, BLOCK_TOKENS):
        if start % SPLIT_TOKENS == 0 and start > base:
            merge_tiles(op, running, part, own)
            clear_states(op, part, own)
        if start + BLOCK_TOKENS <= low:
            continue
        _copy_branch(code, row, k, row.k_row, op.dim, place, position, start, parents, keys)
        _copy_branch(code, row, v, row.v_row, op.out_dim, place, position, start, parents, values)
        k_row, v_row = code.width * op.dim, code.width * op.out_dim
        call(code.scores, op.dim, op.width, 0, own, q, keys, k_row, fields + SCALE_OFFSET, scores, keys)
        for t in range(own):
            weights, to = scores + t * TILE_QUERIES * BLOCK_TOKENS * 4, part + t * size_of_tile(op.out_dim)
            soften_tile(op, weights, cap)
            hide(weights, start, bounds, bounds + 8 * TILE_QUERIES)
            call(code.values, op.out_dim, op.width, own, weights, state_of(op, to), values, v_row, to, values)
    merge_tiles(op, running, part, own)


@compiled
def _copy_branch(
    code: BlockCode, row: RowFields, source: int, width: int, dim: int, place: int, position: int, start: int,
    parents: int, to: int,
) -> None:  # fmt: skip
    """Copy the keys or values of a block that a tree node sees, padded with zeros."""
    end, size = start + BLOCK_TOKENS, code.width * dim
    if position + 1 < end:
        floats(to + (position + 1 - start) * size, (end - position - 1) * size // 4)[:] = np.float32(0)
    root = row.start + row.in_order  # positions from here on are tree nodes
    node, at = place - row.in_order, position
    while at >= start and at >= root:
        if at < end:
            call(code.copy, source + (root + node) * width, dim // LANES, to + (at - start) * size)
        node = integers(parents + 8 * (row.first + row.in_order + node), 1)[0]
        at -= 1
    for p in range(start, min(end, root, position + 1)):
        call(code.copy, source + p * width, dim // LANES, to + (p - start) * size)


@compiled
def _divide(op: AttendOp, tiles: int, g: int, token: int, head: int, spare: int) -> None:
    """Write a head's output: the weighted values divided by the sum of weights, including a sink's."""
    tile, i = tiles + g // TILE_QUERIES * size_of_tile(op.out_dim), g % TILE_QUERIES
    state = state_of(op, tile) + 16 * i
    sums = floats(state + LINE, 4)
    total = np.float32(np.float32(sums[0] + sums[1]) + np.float32(sums[2] + sums[3]))
    if op.sinks:
        highest = floats(state, 1)[0]
        total += np.float32(2.0 ** (np.float64(floats(op.sinks + 4 * head, 1)[0]) * LOG2E - highest))
    source, to = floats(tile + 4 * i * op.out_dim, op.out_dim), floats(spare, op.out_dim)
    for c in range(op.out_dim):
        to[c] = np.float32(source[c] / total)
    width = 4 if op.out_kind == 0 else 2
    words(op.out_kind, spare, op.out_dim // LANES, op.out + token * op.out_row + head * op.out_dim * width)


COMBINE = Operation(ATTEND_LAYOUT, lambda op: Tasks(op.kv_heads, PER_TOKEN), combine, lambda op: block_code(op.kind))
