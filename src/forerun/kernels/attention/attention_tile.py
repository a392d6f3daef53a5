"""Attention of a tile of four queries over a block of keys: scores, weights, weighted values.

A vector holds four numbers of each of four queries. Keys stay row by row, as the cache stores them. Four neighbouring
numbers of a key are broadcast to the four queries, and one small transposition sums the partial products of four keys.
So no key is packed or transposed. Scores and weights are stored as ``[keys / 4][4 queries][4 keys]``.

A query's result depends only on its own numbers, in an order that is the same whatever other queries are in the tile.

All arguments are addresses or counts; ``row`` is the stride between rows in bytes. Functions that read keys or values
also prefetch: from ``ahead`` on, one line every ``pace`` bytes, spread over their work.
"""

from __future__ import annotations

from llvmlite import ir

from forerun.kernels.linear.rowwise import HALF_LINE, number
from forerun.kernels.runtime.vector_ir import (
    F32,
    FLOATS,
    FOUR,
    HALVES,
    I64,
    LINE,
    WORDS,
    Emitter,
    constant,
    llvm_function,
    wide,
    words_of,
)

TILE_QUERIES = 4
"""Queries per tile."""
TILES_AT_ONCE = 2 if wide() else 1
"""Tiles that share one read of the keys."""
KEYS_AT_ONCE = 8 if wide() else 4
"""Keys whose scores are summed in registers at once."""
VECTORS_AT_ONCE = 4 if wide() else 1
"""Vectors of each query's output that are summed in registers at once."""
STATE_BYTES = 3 * LINE
"""Bytes of a tile's state: running maximum, sum of weights, and the last block's factor on earlier sums."""
FACTOR_OFFSET = 2 * LINE


@llvm_function(constants=1)
def score(
    e: Emitter, tiles: int, q: ir.Value, k: ir.Value, row: ir.Value, dim: ir.Value, keys: ir.Value, scores: ir.Value,
    ahead: ir.Value, pace: ir.Value,
) -> None:  # fmt: skip
    """Scores of some tiles, which share one read of the keys."""
    b = e.builder
    steps, fetches = b.udiv(dim, I64(4)), e.times(pace, KEYS_AT_ONCE // 4)
    with e.loop(b.udiv(keys, I64(KEYS_AT_ONCE))) as group:
        first = e.at(k, e.times(e.times(group, KEYS_AT_ONCE), row))
        rows = [e.at(first, e.times(row, j)) for j in range(KEYS_AT_ONCE)]
        sums = [[e.variable(constant(0.0)) for _ in range(KEYS_AT_ONCE)] for _ in range(tiles)]
        with e.loop(steps) as step:
            fetched = e.at(ahead, e.times(b.add(e.times(group, steps), step), fetches))
            for i in range(KEYS_AT_ONCE // 4):
                e.prefetch(e.at(fetched, e.times(pace, i)))
            queries = [e.load(e.at(q, e.times(e.at(e.times(steps, t), step), LINE))) for t in range(tiles)]
            for j in range(KEYS_AT_ONCE):
                key = e.everywhere(e.load(e.at(rows[j], e.times(step, 16)), FOUR))
                for t in range(tiles):
                    b.store(e.fma(key, queries[t], b.load(sums[t][j])), sums[t][j])
        for t in range(tiles):
            to = e.at(scores, e.times(keys, t * LINE // 4), e.times(group, KEYS_AT_ONCE // 4 * LINE))
            for j in range(0, KEYS_AT_ONCE, 4):
                e.store(_summed(e, [b.load(place) for place in sums[t][j : j + 4]]), e.at(to, j // 4 * LINE))


def _summed(e: Emitter, parts: list[ir.Value]) -> ir.Value:
    """Sum the four parts per query in each of four vectors: four sums per query."""
    b, within = e.builder, e.within
    low, high = (b.fadd(within(x, y, [0, 4, 1, 5]), within(x, y, [2, 6, 3, 7])) for x, y in (parts[:2], parts[2:]))
    return b.fadd(within(low, high, [0, 1, 4, 5]), within(low, high, [2, 3, 6, 7]))


@llvm_function()
def weigh(e: Emitter, scores: ir.Value, keys: ir.Value, state: ir.Value) -> None:
    """Update the running maximum, and turn scores into weights relative to it."""
    b = e.builder
    groups, before = b.udiv(keys, I64(4)), e.load(state)
    highest = e.variable(before)
    with e.loop(groups) as group:
        b.store(e.larger(e.load(e.at(scores, e.times(group, LINE))), b.load(highest)), highest)
    top = b.load(highest)
    for lanes in ([1, 0, 3, 2], [2, 3, 0, 1]):
        top = e.larger(top, e.within(top, top, lanes))
    factor = e.exp2(b.fsub(before, top))
    total = e.variable(b.fmul(e.load(e.at(state, LINE)), factor))
    with e.loop(groups) as group:
        place = e.at(scores, e.times(group, LINE))
        weight = e.exp2(b.fsub(e.load(place), top))
        e.store(weight, place)
        b.store(b.fadd(b.load(total), weight), total)
    e.store(top, state)
    e.store(b.load(total), e.at(state, LINE))
    e.store(factor, e.at(state, FACTOR_OFFSET))


@llvm_function(constants=1)
def gather(
    e: Emitter, vectors: int, weights: ir.Value, state: ir.Value, v: ir.Value, row: ir.Value, dim: ir.Value,
    keys: ir.Value, out: ir.Value, ahead: ir.Value, pace: ir.Value,
) -> None:  # fmt: skip
    """Rescale some vectors of each query's output by the last block's factor, then add the weighted values."""
    b = e.builder
    places = [[e.at(out, e.times(dim, 4 * i), c * LINE) for c in range(vectors)] for i in range(TILE_QUERIES)]
    sums = [[e.variable(constant(0.0)) for _ in range(vectors)] for _ in range(TILE_QUERIES)]
    with e.loop(b.udiv(keys, I64(4))) as group:
        fetched = e.at(ahead, e.times(e.times(group, pace), 4 * vectors))
        for j in range(4):
            for c in range(vectors):
                e.prefetch(e.at(fetched, e.times(pace, j * vectors + c)))
            here = e.at(v, e.times(e.at(e.times(group, 4), j), row))
            values = [e.load(e.at(here, c * LINE)) for c in range(vectors)]
            for i in range(TILE_QUERIES):
                weight = e.everywhere(e.load(e.at(weights, e.times(group, LINE), 16 * i + 4 * j), F32))
                for c in range(vectors):
                    b.store(e.fma(weight, values[c], b.load(sums[i][c])), sums[i][c])
    for i in range(TILE_QUERIES):  # summing a block first rounds less often than adding key by key
        factor = e.everywhere(e.load(e.at(state, FACTOR_OFFSET + 16 * i), F32))
        for c in range(vectors):
            e.store(e.fma(e.load(places[i][c]), factor, b.load(sums[i][c])), places[i][c])


@llvm_function()
def copy_row(e: Emitter, kind: ir.Value, row: ir.Value, vectors: ir.Value, to: ir.Value) -> None:
    """Copy a row of the cache, widened to floats: from float32, bfloat16 or float16, by the kind."""
    for which in e.cases(kind, range(3)):
        with e.loop(vectors) as i:
            e.store(_float16(e, row, i) if which == 2 else number(e, which == 1, row, i), e.at(to, e.times(i, LINE)))


def _float16(e: Emitter, row: ir.Value, index: ir.Value) -> ir.Value:
    """The vector at an index, of float16, as floats. Exact, also for infinity and NaN; by integer operations, as not
    every instruction set has float16."""
    b = e.builder
    words = b.zext(e.load(e.at(row, e.times(index, HALF_LINE)), HALVES), WORDS)
    sign = b.shl(b.and_(words, words_of(0x8000)), words_of(16))
    magnitude = b.shl(b.and_(words, words_of(0x7FFF)), words_of(13))
    finite = b.bitcast(b.fmul(b.bitcast(magnitude, FLOATS), constant(2.0**112)), WORDS)
    special = b.icmp_unsigned(">=", magnitude, words_of(0x7C00 << 13))
    return b.bitcast(b.or_(b.select(special, b.or_(magnitude, words_of(0x7F800000)), finite), sign), FLOATS)
