"""Shared by both attention operations of ``ordered_attention.py``: work on tiles of queries and a block of keys."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_tile import (
    STATE_BYTES,
    TILE_QUERIES,
    TILES_AT_ONCE,
    VECTORS_AT_ONCE,
    copy_floats,
    gather,
    gather_vectors,
    score,
    score_tiles,
    widen_bfloat16,
    widen_float16,
)
from forerun.kernels.attention.ordered_attention import BLOCK_TOKENS, AttendCode, AttendOp, RowFields
from forerun.kernels.linear.rowwise import LOG2E, soften
from forerun.kernels.runtime.addresses import address_of, floats
from forerun.kernels.runtime.vector_ir import I32, LANES, LINE, Code, Emitter, intrinsic, intrinsic_code

LOWEST_SCORE = -3e38
"""Initial value of the running maximum. Finite, so that differences are never NaN."""


@functools.cache
def attend_code() -> AttendCode:
    """Addresses of the shared machine code, compiled or loaded at the first call."""
    return AttendCode(address_of(scores_of, 9), address_of(gather_tile, 8))


@compiled
def tiles_of(op: AttendOp, row: RowFields) -> int:
    """Number of tiles of a row's queries for one KV head."""
    return (row.n * (op.heads // op.kv_heads) + TILE_QUERIES - 1) // TILE_QUERIES


@compiled
def scan_bounds(row: RowFields, place: int, position: int) -> tuple[int, int]:
    """Two positions of a token: where its own keys begin (a tree node's: at a block's start; else 0), and where its
    scan ends."""
    if place < row.in_order:
        return 0, position + 1
    base = (row.start + row.in_order) // BLOCK_TOKENS * BLOCK_TOKENS
    return base, base


@compiled
def clear_states(op: AttendOp, states: int, tiles: int) -> None:
    """Reset the states: no key seen yet."""
    size = TILE_QUERIES * op.out_dim * 4 + STATE_BYTES
    for t in range(tiles):
        floats(states + t * size, size // 4)[:] = np.float32(0)
        floats(states + t * size + TILE_QUERIES * op.out_dim * 4, LANES)[:] = np.float32(LOWEST_SCORE)


@compiled
def pack_one(op: AttendOp, token: int, head: int, i: int, to: int) -> None:
    """Write one scaled query into a tile of four; a vector of the tile holds four numbers of each query."""
    source = floats(op.q + token * op.q_row + head * op.q_head, op.dim)
    packed = floats(to + 16 * i, op.dim * TILE_QUERIES)
    for c in range(0, op.dim, 4):
        at = c * TILE_QUERIES
        for j in range(4):
            packed[at + j] = np.float32(source[c + j] * np.float32(op.scale))


@compiled
def copy_row(op: AttendOp, source: int, dim: int, to: int) -> None:
    """Copy a row of the cache, widened to float32."""
    for c in range(0, dim, LANES):
        if op.kind == 0:
            copy_floats(source + c * 4, to + 4 * c)
        elif op.kind == 1:
            widen_bfloat16(source + c * 2, to + 4 * c)
        else:
            widen_float16(source + c * 2, to + 4 * c)


@compiled
def copy_block(op: AttendOp, rows: int, row: int, dim: int, count: int, to: int) -> None:
    """Copy ``count`` rows, widened to float32, and pad them with zeros to a whole block."""
    for i in range(count):
        copy_row(op, rows + i * row, dim, to + 4 * i * dim)
    if count < BLOCK_TOKENS:
        floats(to + 4 * count * dim, (BLOCK_TOKENS - count) * dim)[:] = np.float32(0)


@compiled
def hide(weights: int, i: int, low: int, high: int) -> None:
    """Set a query's weights to 0 for keys before ``low`` and from ``high`` on."""
    tile = floats(weights, BLOCK_TOKENS * TILE_QUERIES)
    for key in range(BLOCK_TOKENS):
        if key < low or key >= high:
            tile[key // 4 * LANES + i * 4 + key % 4] = -np.inf


@compiled
def soften_tile(op: AttendOp, weights: int, spare: int) -> None:
    """Apply the soft cap to the scores, if there is one."""
    if op.softcap > 0:
        floats(spare, 1)[0] = np.float32(op.softcap * LOG2E)
        soften(weights, BLOCK_TOKENS * TILE_QUERIES // LANES, spare)


@compiled
def scores_of(dim: int, width: int, low: int, high: int, q: int, k: int, k_row: int, scores: int, ahead: int) -> None:
    """Scores of tiles ``low`` to ``high`` over a block. Prefetches from ``ahead`` on, numbers of ``width`` bytes."""
    size, tile, t = BLOCK_TOKENS * TILE_QUERIES * 4, TILE_QUERIES * dim * 4, low
    pace = LANES * width // ((high - low + TILES_AT_ONCE - 1) // TILES_AT_ONCE)
    share = pace * (BLOCK_TOKENS * dim // LANES)
    while t < high:
        if t + TILES_AT_ONCE <= high:
            score_tiles(q + t * tile, k, k_row, dim, BLOCK_TOKENS, scores + t * size, ahead, pace)
            t += TILES_AT_ONCE
        else:
            score(q + t * tile, k, k_row, dim, BLOCK_TOKENS, scores + t * size, ahead, pace)
            t += 1
        ahead += share


@compiled
def gather_tile(out_dim: int, weights: int, state: int, v: int, v_row: int, out: int, ahead: int, pace: int) -> None:
    """Rescale a tile's outputs by the last block's factor, then add the weighted values."""
    c = 0
    while c + VECTORS_AT_ONCE * LANES <= out_dim:
        gather_vectors(weights, state, v + 4 * c, v_row, out_dim, BLOCK_TOKENS, out + 4 * c, ahead, pace)
        ahead += pace * BLOCK_TOKENS * VECTORS_AT_ONCE
        c += VECTORS_AT_ONCE * LANES
    while c < out_dim:
        gather(weights, state, v + 4 * c, v_row, out_dim, BLOCK_TOKENS, out + 4 * c, ahead, pace)
        ahead += pace * BLOCK_TOKENS
        c += LANES


@intrinsic
def merge_tile(typing: Any, running: Any, part: Any, vectors: Any) -> Code:
    """Merge a tile's next split into the splits so far: maxima, sums of weights, and outputs of ``vectors`` each."""

    def emit(e: Emitter, running: ir.Value, part: ir.Value, vectors: ir.Value) -> None:
        b = e.builder
        own = e.times(vectors, TILE_QUERIES * LINE)
        states = [e.at(tile, own) for tile in (running, part)]
        before, new = (e.load(state) for state in states)
        top = e.larger(before, new)
        factors = [e.exp2(b.fsub(each, top)) for each in (before, new)]
        sums = [e.load(e.at(state, LINE)) for state in states]
        e.store(top, states[0])
        e.store(e.fma(sums[0], factors[0], b.fmul(sums[1], factors[1])), e.at(states[0], LINE))
        for i in range(TILE_QUERIES):
            one, two = (e.everywhere(b.extract_element(factor, I32(4 * i))) for factor in factors)
            with e.loop(vectors) as c:
                at = e.at(e.times(vectors, i * LINE), e.times(c, LINE))
                here = b.add(running, at)
                e.store(e.fma(e.load(here), one, b.fmul(e.load(b.add(part, at)), two)), here)

    return intrinsic_code(3, emit)
