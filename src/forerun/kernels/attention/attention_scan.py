"""The scan of attention: tiles of queries over pieces of a text, block by block; see ``canonical.py``."""

from __future__ import annotations

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_block import (
    clear,
    copy_block,
    hide,
    join,
    pack_one,
    shared,
    soften_tile,
    tiles_of,
)
from forerun.kernels.attention.attention_tile import QUERIES, STATE, weigh
from forerun.kernels.attention.ordered_attention import (
    BLOCK,
    PIECE,
    ROW_BYTES,
    SEQUENTIAL,
    SIGHT,
    UNIT_BYTES,
    AttendCode,
    AttendOp,
    RowFields,
    UnitFields,
    read_row,
    read_unit,
)
from forerun.kernels.linear.rowwise import words
from forerun.kernels.runtime.addresses import call8, call9, integers
from forerun.kernels.runtime.vector_ir import LANES, LINE


@compiled
def scan(
    op: AttendOp, code: AttendCode, rows: int, units: int, positions: int, parts: int, task: int, slot: int
) -> None:
    """One unit and KV head: tiles of queries over one piece, or over all pieces one after the other."""
    unit = read_unit(units + task // op.kv_heads * UNIT_BYTES)
    row = read_row(rows + unit.row * ROW_BYTES)
    head, tiles = task % op.kv_heads, unit.last - unit.first
    size = QUERIES * op.out_dim * 4 + STATE
    q = slot
    scores = q + tiles * QUERIES * op.dim * 4
    sight = scores + tiles * QUERIES * BLOCK * 4
    state = sight + SIGHT * tiles
    other = state + tiles * size
    spare = other + tiles * size
    last = _look(op, row, unit, positions, sight)
    _pack_tiles(op, row, unit, head, q)
    all_tiles = tiles_of(op, row)
    if unit.piece != SEQUENTIAL:
        to = parts + row.parts + ((unit.piece * op.kv_heads + head) * all_tiles + unit.first) * size
        clear(op, to, tiles)
        end = min(last, (unit.piece + 1) * PIECE)
        _scan_piece(op, code, row, unit.row, head, tiles, unit.piece * PIECE, end, q, scores, sight, to, spare)
        return
    clear(op, state, tiles)
    first = integers(sight + 16, 1)[0]
    for t in range(1, tiles):
        first = min(first, integers(sight + SIGHT * t + 16, 1)[0])
    for piece in range(max(first, 0) // PIECE, (last + PIECE - 1) // PIECE):
        clear(op, other, tiles)
        end = min(last, (piece + 1) * PIECE)
        _scan_piece(op, code, row, unit.row, head, tiles, piece * PIECE, end, q, scores, sight, other, spare)
        for t in range(tiles):
            join(state + t * size, other + t * size, op.out_dim // LANES)
    to = parts + row.parts + (head * all_tiles + unit.first) * size
    words(0, state, tiles * size // LINE, to)


@compiled
def _look(op: AttendOp, row: RowFields, unit: UnitFields, positions: int, sight: int) -> int:
    """Write each tile's visible range, the least and greatest start and end; returns the greatest end of all tiles."""
    group, last = op.heads // op.kv_heads, 0
    for t in range(unit.first, unit.last):
        box = integers(sight + SIGHT * (t - unit.first), 12)
        for i in range(QUERIES):
            place = min(t * QUERIES + i, row.n * group - 1) // group
            position = integers(positions + 8 * (row.first + place), 1)[0]
            end = shared(row, place, position)[1]
            begin = max(0, position - op.window + 1) if op.window else 0
            box[4 + i], box[8 + i] = end, begin
            if i == 0:
                box[0] = box[1] = end
                box[2] = box[3] = begin
            box[0], box[1] = min(box[0], end), max(box[1], end)
            box[2], box[3] = min(box[2], begin), max(box[3], begin)
        last = max(last, box[1])
    return last


@compiled
def _pack_tiles(op: AttendOp, row: RowFields, unit: UnitFields, head: int, q: int) -> None:
    group = op.heads // op.kv_heads
    for t in range(unit.first, unit.last):
        to = q + (t - unit.first) * QUERIES * op.dim * 4
        for i in range(QUERIES):
            each = min(t * QUERIES + i, row.n * group - 1)
            pack_one(op, row.first + each // group, head * group + each % group, i, to)


@compiled
def _scan_piece(
    op: AttendOp, code: AttendCode, row: RowFields, number: int, head: int, tiles: int, first: int, end: int, q: int,
    scores: int, sight: int, states: int, spare: int,
) -> None:  # fmt: skip
    """Go over the blocks of a piece, for the tiles that see any key of them."""
    k = integers(op.kv + 16 * number, 2)[0] + head * row.k_head
    v = integers(op.kv + 16 * number, 2)[1] + head * row.v_head
    for start in range(first, end, BLOCK):
        low, high = tiles, 0
        for t in range(tiles):
            box = integers(sight + SIGHT * t, 12)
            if box[1] > start and box[2] < start + BLOCK:
                low, high = min(low, t), t + 1
        if low >= high:
            continue
        count = min(BLOCK, end - start)
        here, there = k + start * row.k_row, v + start * row.v_row
        after = here + BLOCK * row.k_row if start + BLOCK < end else here
        _block(op, code, row, low, high, start, count, here, there, after, q, scores, sight, states, spare)


@compiled
def _block(
    op: AttendOp, code: AttendCode, row: RowFields, low: int, high: int, start: int, count: int, k: int, v: int,
    after: int, q: int, scores: int, sight: int, states: int, spare: int,
) -> None:  # fmt: skip
    """Tiles ``low`` to ``high`` over one block; prefetches values while scoring, and then the next keys."""
    size, tile_size = BLOCK * QUERIES * 4, QUERIES * op.out_dim * 4 + STATE
    copied, k_row, v_row = count < BLOCK or op.kind != 0, row.k_row, row.v_row
    v_start = v
    if copied:
        copy_block(op, k, k_row, op.dim, count, spare)
        k, k_row = spare, 4 * op.dim
    call9(code.scores, op.dim, op.width, low, high, q, k, k_row, scores, v_start)
    for t in range(low, high):
        box = integers(sight + SIGHT * t, 12)
        weights, state = scores + t * size, states + t * tile_size + QUERIES * op.out_dim * 4
        soften_tile(op, weights, spare)
        if box[0] < start + BLOCK or box[3] > start:
            _hide_tile(op, sight, t, start, weights)
        weigh(weights, BLOCK, state)
    if copied:
        copy_block(op, v, v_row, op.out_dim, count, spare)
        v, v_row = spare, 4 * op.out_dim
    pace = LANES * op.width // (high - low)
    for t in range(low, high):
        tile = states + t * tile_size
        state = tile + QUERIES * op.out_dim * 4
        call8(code.gather, op.out_dim, scores + t * size, state, v, v_row, tile, after, pace)
        after += pace * BLOCK * (op.out_dim // LANES)


@compiled
def _hide_tile(op: AttendOp, sight: int, t: int, start: int, weights: int) -> None:
    """Set the weights to 0 of keys that a query of the tile does not see."""
    seen = integers(sight + SIGHT * t, 12)
    for i in range(QUERIES):
        hide(weights, i, seen[8 + i] - start, seen[4 + i] - start)
