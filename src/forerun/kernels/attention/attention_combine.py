"""Attention's second operation: merge splits, add the keys of a tree's branch, divide (``ordered_attention.py``)."""

from __future__ import annotations

import numpy as np

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_block import (
    attend_code,
    clear_states,
    copy_row,
    hide,
    merge_tile,
    pack_one,
    scan_bounds,
    soften_tile,
    tiles_of,
)
from forerun.kernels.attention.attention_tile import STATE_BYTES, TILE_QUERIES, weigh
from forerun.kernels.attention.ordered_attention import (
    ATTEND_LAYOUT,
    BLOCK_TOKENS,
    ROW_BYTES,
    SPLIT_TOKENS,
    AttendCode,
    AttendOp,
    RowFields,
    read_attend,
    read_attend_code,
    read_row,
)
from forerun.kernels.linear.rowwise import LOG2E, words
from forerun.kernels.runtime.addresses import call8, call9, floats, integers
from forerun.kernels.runtime.executor import PER_TOKEN, Operation, Tasks, read_pass
from forerun.kernels.runtime.vector_ir import LANES, LINE


@compiled
def combine(address: int, fields: int, code_address: int, task: int, slot: int) -> None:
    """One token and KV head: merge its splits, add the keys that only it sees, divide, and write the output."""
    this, op, code = read_pass(address), read_attend(fields), read_attend_code(code_address)
    positions, parents, states = this.cache_positions, this.parents, this.states
    token, head = task // op.kv_heads, task % op.kv_heads
    number = integers(this.token_rows + 8 * token, 1)[0]
    row = read_row(this.rows + number * ROW_BYTES)
    group = op.heads // op.kv_heads
    own = (group + TILE_QUERIES - 1) // TILE_QUERIES
    size = TILE_QUERIES * op.out_dim * 4 + STATE_BYTES
    running = slot
    part = running + own * size
    rest = part + own * size
    place, position = token - row.first, integers(positions + 8 * token, 1)[0]
    base, seen = scan_bounds(row, place, position)
    all_tiles = tiles_of(op, row)
    clear_states(op, running, own)
    low = max(0, position - op.window + 1) if op.window else 0
    full = (seen + SPLIT_TOKENS - 1) // SPLIT_TOKENS
    if row.splits == 0:
        _copy_states(op, states + row.states + head * all_tiles * size, place * group, group, running)
    else:
        # the split that a tree node continues is merged later
        joined = full if place < row.in_order else min(full, base // SPLIT_TOKENS)
        for split in range(low // SPLIT_TOKENS, joined):
            _copy_states(
                op, states + row.states + (split * op.kv_heads + head) * all_tiles * size, place * group, group, part
            )
            for t in range(own):
                merge_tile(running + t * size, part + t * size, op.out_dim // LANES)
        if place >= row.in_order:
            begun = base // SPLIT_TOKENS
            clear_states(op, part, own)
            if begun < full and begun >= low // SPLIT_TOKENS:
                at = states + row.states + (begun * op.kv_heads + head) * all_tiles * size
                _copy_states(op, at, place * group, group, part)
            _attend_branch(op, code, row, number, head, token, place, position, base, low, parents, running, part, rest)
    for g in range(group):
        _divide(op, running, g, token, head * group + g, rest)


@compiled
def _attend_branch(
    op: AttendOp, code: AttendCode, row: RowFields, number: int, head: int, token: int, place: int, position: int,
    base: int, low: int, parents: int, running: int, part: int, rest: int,
) -> None:  # fmt: skip
    """Add a node's own keys from position ``base`` on, in order, block by block and split by split."""
    group = op.heads // op.kv_heads
    own = (group + TILE_QUERIES - 1) // TILE_QUERIES
    size = TILE_QUERIES * op.out_dim * 4 + STATE_BYTES
    q = rest
    scores = q + own * TILE_QUERIES * op.dim * 4
    keys = scores + own * TILE_QUERIES * BLOCK_TOKENS * 4
    values = keys + BLOCK_TOKENS * op.dim * 4
    for t in range(own):
        _pack(op, token, head * group, t * TILE_QUERIES, group, q + t * TILE_QUERIES * op.dim * 4)
    k = integers(op.kv + 16 * number, 2)[0] + head * row.k_head
    v = integers(op.kv + 16 * number, 2)[1] + head * row.v_head
    for start in range(base, position + 1, BLOCK_TOKENS):
        if start % SPLIT_TOKENS == 0 and start > base:
            for t in range(own):
                merge_tile(running + t * size, part + t * size, op.out_dim // LANES)
            clear_states(op, part, own)
        if start + BLOCK_TOKENS <= low:
            continue
        _copy_branch(op, row, k, row.k_row, op.dim, place, position, start, parents, keys)
        _copy_branch(op, row, v, row.v_row, op.out_dim, place, position, start, parents, values)
        for t in range(own):
            tile, weights = q + t * TILE_QUERIES * op.dim * 4, scores + t * TILE_QUERIES * BLOCK_TOKENS * 4
            call9(code.scores, op.dim, op.width, 0, 1, tile, keys, 4 * op.dim, weights, keys)
            soften_tile(op, weights, keys)
            for i in range(TILE_QUERIES):
                hide(weights, i, low - start, position + 1 - start)
            state = part + t * size + TILE_QUERIES * op.out_dim * 4
            weigh(weights, BLOCK_TOKENS, state)
            call8(code.gather, op.out_dim, weights, state, values, 4 * op.out_dim, part + t * size, values, 0)
    for t in range(own):
        merge_tile(running + t * size, part + t * size, op.out_dim // LANES)


@compiled
def _copy_branch(
    op: AttendOp, row: RowFields, source: int, width: int, dim: int, place: int, position: int, start: int,
    parents: int, to: int,
) -> None:  # fmt: skip
    """Copy the keys or values of a block that a tree node sees, as floats, padded with zeros."""
    end = start + BLOCK_TOKENS
    if position + 1 < end:
        floats(to + 4 * (position + 1 - start) * dim, (end - position - 1) * dim)[:] = np.float32(0)
    root = row.start + row.in_order  # positions from here on are tree nodes
    node, at = place - row.in_order, position
    while at >= start and at >= root:
        if at < end:
            copy_row(op, source + (root + node) * width, dim, to + 4 * (at - start) * dim)
        node = integers(parents + 8 * (row.first + row.in_order + node), 1)[0]
        at -= 1
    for p in range(start, min(end, root, position + 1)):
        copy_row(op, source + p * width, dim, to + 4 * (p - start) * dim)


@compiled
def _pack(op: AttendOp, token: int, head: int, first: int, group: int, to: int) -> None:
    """Pack one token's heads as a tile."""
    for i in range(TILE_QUERIES):
        pack_one(op, token, head + min(first + i, group - 1), i, to)


@compiled
def _copy_states(op: AttendOp, tiles: int, first: int, count: int, to: int) -> None:
    """Copy the states of some queries into tiles of their own."""
    size = TILE_QUERIES * op.out_dim * 4 + STATE_BYTES
    own = TILE_QUERIES * op.out_dim * 4
    for g in range(count):
        source, place = tiles + (first + g) // TILE_QUERIES * size, to + g // TILE_QUERIES * size
        a, b = (first + g) % TILE_QUERIES, g % TILE_QUERIES
        words(0, source + 4 * a * op.out_dim, op.out_dim // LANES, place + 4 * b * op.out_dim)
        mine, theirs = floats(place + own + 16 * b, LANES + 4), floats(source + own + 16 * a, LANES + 4)
        for c in range(4):
            mine[c], mine[LANES + c] = theirs[c], theirs[LANES + c]


@compiled
def _divide(op: AttendOp, tiles: int, g: int, token: int, head: int, spare: int) -> None:
    """Write a head's output: the weighted values divided by the sum of weights, including a sink's."""
    size = TILE_QUERIES * op.out_dim * 4 + STATE_BYTES
    tile, i = tiles + g // TILE_QUERIES * size, g % TILE_QUERIES
    own = tile + TILE_QUERIES * op.out_dim * 4
    sums = floats(own + LINE + 16 * i, 4)
    total = np.float32(np.float32(sums[0] + sums[1]) + np.float32(sums[2] + sums[3]))
    if op.sinks:
        highest = floats(own + 16 * i, 1)[0]
        total += np.float32(2.0 ** (np.float64(floats(op.sinks + 4 * head, 1)[0]) * LOG2E - highest))
    source, to = floats(tile + 4 * i * op.out_dim, op.out_dim), floats(spare, op.out_dim)
    for c in range(op.out_dim):
        to[c] = np.float32(source[c] / total)
    width = 4 if op.out_kind == 0 else 2
    words(op.out_kind, spare, op.out_dim // LANES, op.out + token * op.out_row + head * op.out_dim * width)


COMBINE = Operation(ATTEND_LAYOUT, lambda op: Tasks(op.kv_heads, PER_TOKEN), combine, lambda op: attend_code())
