"""A tile's state while keys are visited: running maxima, sums of weights, and outputs of a few queries.

Each split starts with an empty state; the states of splits are merged in order.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_fields import AttendOp, RowFields
from forerun.kernels.attention.attention_tile import STATE_BYTES, TILE_QUERIES
from forerun.kernels.linear.rowwise import words
from forerun.kernels.runtime.addresses import floats
from forerun.kernels.runtime.vector_ir import I32, LANES, LINE, Emitter, llvm_function

LOWEST_SCORE = -3e38
"""Initial running maximum; finite, so that differences are never NaN."""


def tile_bytes(out_dim: int) -> int:
    """Return the size in bytes of a tile's output and state."""
    return TILE_QUERIES * out_dim * 4 + STATE_BYTES


size_of_tile = compiled(tile_bytes)


@compiled
def state_of(op: AttendOp, tile: int) -> int:
    """Return the address of a tile's maxima and sums, after its outputs."""
    return tile + TILE_QUERIES * op.out_dim * 4


@compiled
def kept_tiles(op: AttendOp, row: RowFields, states: int, split: int, head: int) -> int:
    """Return the address of a split's and KV head's tiles in the buffer of states; without splits, use split 0."""
    tiles = (row.n * (op.heads // op.kv_heads) + TILE_QUERIES - 1) // TILE_QUERIES
    return states + row.states + (split * op.kv_heads + head) * tiles * size_of_tile(op.out_dim)


@compiled
def clear_states(op: AttendOp, states: int, tiles: int) -> None:
    """Reset the states: no key seen yet."""
    size = size_of_tile(op.out_dim)
    for t in range(tiles):
        floats(states + t * size, size // 4)[:] = np.float32(0)
        floats(state_of(op, states + t * size), LANES)[:] = np.float32(LOWEST_SCORE)


@llvm_function()
def merge_tile(e: Emitter, running: ir.Value, part: ir.Value, vectors: ir.Value) -> None:
    """Merge a tile's next split into the running one: maxima, sums of weights, and outputs of ``vectors`` each."""
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


@compiled
def merge_tiles(op: AttendOp, running: int, part: int, tiles: int) -> None:
    """Merge the next split of several tiles."""
    size = size_of_tile(op.out_dim)
    for t in range(tiles):
        merge_tile(running + t * size, part + t * size, op.out_dim // LANES)


@compiled
def copy_states(op: AttendOp, tiles: int, first: int, count: int, to: int) -> None:
    """Copy the states of ``count`` queries from query ``first`` on to the first ones of other tiles."""
    size = size_of_tile(op.out_dim)
    for g in range(count):
        source, place = tiles + (first + g) // TILE_QUERIES * size, to + g // TILE_QUERIES * size
        a, b = (first + g) % TILE_QUERIES, g % TILE_QUERIES
        words(0, source + 4 * a * op.out_dim, op.out_dim // LANES, place + 4 * b * op.out_dim)
        mine, theirs = floats(state_of(op, place) + 16 * b, LANES + 4), floats(state_of(op, source) + 16 * a, LANES + 4)
        for c in range(4):
            mine[c], mine[LANES + c] = theirs[c], theirs[LANES + c]
