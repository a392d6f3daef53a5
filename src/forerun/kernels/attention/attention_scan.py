"""The scan of attention: tiles of queries over splits of a text, block by block; see ``ordered_attention.py``."""

from __future__ import annotations

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_block import (
    attend_code,
    clear_states,
    copy_block,
    hide,
    merge_tile,
    pack_one,
    scan_bounds,
    soften_tile,
    tiles_of,
)
from forerun.kernels.attention.attention_tile import STATE_BYTES, TILE_QUERIES, weigh
from forerun.kernels.attention.ordered_attention import (
    ALL_SPLITS,
    ATTEND_LAYOUT,
    BLOCK_TOKENS,
    RANGE_BYTES,
    ROW_BYTES,
    SPLIT_TOKENS,
    UNIT_BYTES,
    AttendCode,
    AttendOp,
    RowFields,
    UnitFields,
    read_attend,
    read_attend_code,
    read_row,
    read_unit,
)
from forerun.kernels.linear.rowwise import words
from forerun.kernels.runtime.addresses import call8, call9, integers
from forerun.kernels.runtime.executor import PER_UNIT, Operation, Tasks, read_pass
from forerun.kernels.runtime.vector_ir import LANES, LINE


@compiled
def scan(address: int, fields: int, code_address: int, task: int, slot: int) -> None:
    """One unit and KV head: tiles of queries over one split, or over all splits one after the other."""
    this, op, code = read_pass(address), read_attend(fields), read_attend_code(code_address)
    positions, states = this.cache_positions, this.states
    unit = read_unit(this.units + task // op.kv_heads * UNIT_BYTES)
    row = read_row(this.rows + unit.row * ROW_BYTES)
    head, tiles = task % op.kv_heads, unit.last - unit.first
    size = TILE_QUERIES * op.out_dim * 4 + STATE_BYTES
    q = slot
    scores = q + tiles * TILE_QUERIES * op.dim * 4
    ranges = scores + tiles * TILE_QUERIES * BLOCK_TOKENS * 4
    state = ranges + RANGE_BYTES * tiles
    other = state + tiles * size
    spare = other + tiles * size
    last = _visible_ranges(op, row, unit, positions, ranges)
    _pack_tiles(op, row, unit, head, q)
    all_tiles = tiles_of(op, row)
    if unit.split != ALL_SPLITS:
        to = states + row.states + ((unit.split * op.kv_heads + head) * all_tiles + unit.first) * size
        clear_states(op, to, tiles)
        end = min(last, (unit.split + 1) * SPLIT_TOKENS)
        _scan_split(op, code, row, unit.row, head, tiles, unit.split * SPLIT_TOKENS, end, q, scores, ranges, to, spare)
        return
    clear_states(op, state, tiles)
    first = integers(ranges + 16, 1)[0]
    for t in range(1, tiles):
        first = min(first, integers(ranges + RANGE_BYTES * t + 16, 1)[0])
    for split in range(max(first, 0) // SPLIT_TOKENS, (last + SPLIT_TOKENS - 1) // SPLIT_TOKENS):
        clear_states(op, other, tiles)
        end = min(last, (split + 1) * SPLIT_TOKENS)
        _scan_split(op, code, row, unit.row, head, tiles, split * SPLIT_TOKENS, end, q, scores, ranges, other, spare)
        for t in range(tiles):
            merge_tile(state + t * size, other + t * size, op.out_dim // LANES)
    to = states + row.states + (head * all_tiles + unit.first) * size
    words(0, state, tiles * size // LINE, to)


@compiled
def _visible_ranges(op: AttendOp, row: RowFields, unit: UnitFields, positions: int, ranges: int) -> int:
    """Write each tile's visible range, the least and greatest start and end; returns the greatest end of all tiles."""
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
def _pack_tiles(op: AttendOp, row: RowFields, unit: UnitFields, head: int, q: int) -> None:
    group = op.heads // op.kv_heads
    for t in range(unit.first, unit.last):
        to = q + (t - unit.first) * TILE_QUERIES * op.dim * 4
        for i in range(TILE_QUERIES):
            each = min(t * TILE_QUERIES + i, row.n * group - 1)
            pack_one(op, row.first + each // group, head * group + each % group, i, to)


@compiled
def _scan_split(
    op: AttendOp, code: AttendCode, row: RowFields, number: int, head: int, tiles: int, first: int, end: int, q: int,
    scores: int, ranges: int, states: int, spare: int,
) -> None:  # fmt: skip
    """Go over the blocks of a split, for the tiles that see any key of them."""
    k = integers(op.kv + 16 * number, 2)[0] + head * row.k_head
    v = integers(op.kv + 16 * number, 2)[1] + head * row.v_head
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
        _block(op, code, row, low, high, start, count, here, there, after, q, scores, ranges, states, spare)


@compiled
def _block(
    op: AttendOp, code: AttendCode, row: RowFields, low: int, high: int, start: int, count: int, k: int, v: int,
    after: int, q: int, scores: int, ranges: int, states: int, spare: int,
) -> None:  # fmt: skip
    """Tiles ``low`` to ``high`` over one block; prefetches values while scoring, and then the next keys."""
    size, tile_size = BLOCK_TOKENS * TILE_QUERIES * 4, TILE_QUERIES * op.out_dim * 4 + STATE_BYTES
    copied, k_row, v_row = count < BLOCK_TOKENS or op.kind != 0, row.k_row, row.v_row
    v_start = v
    if copied:
        copy_block(op, k, k_row, op.dim, count, spare)
        k, k_row = spare, 4 * op.dim
    call9(code.scores, op.dim, op.width, low, high, q, k, k_row, scores, v_start)
    for t in range(low, high):
        bounds = integers(ranges + RANGE_BYTES * t, 12)
        weights, state = scores + t * size, states + t * tile_size + TILE_QUERIES * op.out_dim * 4
        soften_tile(op, weights, spare)
        if bounds[0] < start + BLOCK_TOKENS or bounds[3] > start:
            _hide_tile(op, ranges, t, start, weights)
        weigh(weights, BLOCK_TOKENS, state)
    if copied:
        copy_block(op, v, v_row, op.out_dim, count, spare)
        v, v_row = spare, 4 * op.out_dim
    pace = LANES * op.width // (high - low)
    for t in range(low, high):
        tile = states + t * tile_size
        state = tile + TILE_QUERIES * op.out_dim * 4
        call8(code.gather, op.out_dim, scores + t * size, state, v, v_row, tile, after, pace)
        after += pace * BLOCK_TOKENS * (op.out_dim // LANES)


@compiled
def _hide_tile(op: AttendOp, ranges: int, t: int, start: int, weights: int) -> None:
    """Set the weights to 0 of keys that a query of the tile does not see."""
    seen = integers(ranges + RANGE_BYTES * t, 12)
    for i in range(TILE_QUERIES):
        hide(weights, i, seen[8 + i] - start, seen[4 + i] - start)


SCAN = Operation(ATTEND_LAYOUT, lambda op: Tasks(op.kv_heads, PER_UNIT), scan, lambda op: attend_code())
