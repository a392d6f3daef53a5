"""Compute attention of a tile of four queries over a block of keys: scores, weights, weighted values.

A vector holds four numbers, or four pairs of bfloat16, of each query. Keys are read in place: 16 neighbouring bytes of
a key are broadcast to the four queries, and one small transposition sums the partial products of four keys, stored as
``[keys / 4][4 queries][4 keys]``. A query's result does not depend on the tile's other queries.

The constant ``form`` selects code for one form of keys and values:

- ``FLOATS_FORM``.
- ``HALVES_FORM``: bfloat16, widened in registers, of eight numbers the even ones first. A block that several tiles
  read is widened in memory once (``widen_rows``), its keys in that order.
- ``PAIRS_FORM``: bfloat16, multiplied in pairs; queries and weights are rounded to bfloat16, as in torch. A pair of
  values is of two rows, put side by side in memory once for several tiles (``pair_rows``, ``ROW_PAIRS_FORM``).

``row`` is the stride between rows in bytes. Functions that read keys or values also prefetch: from ``ahead`` on, one
line every ``pace`` bytes, spread over their work.
"""

from __future__ import annotations

import functools
import math

from llvmlite import ir
from numba.core import cgutils

from forerun.kernels.linear.rowwise import HALF_LINE, number
from forerun.kernels.linear.weight_format import add_pairs, rounded
from forerun.kernels.runtime.vector_ir import (
    F32,
    F64,
    FLOATS,
    FOUR,
    HALVES,
    I32,
    I64,
    LANES,
    LINE,
    WORDS,
    Emitter,
    constant,
    llvm_function,
    wide,
    words_of,
)

FLOATS_FORM, HALVES_FORM, PAIRS_FORM, ROW_PAIRS_FORM = range(4)
BLOCK_TOKENS = 32
TILE_QUERIES = 4
TILES_AT_ONCE = 2 if wide() else 1
"""Tiles that share one read of the keys."""
KEYS_AT_ONCE = 8 if wide() else 4
"""Keys whose scores are summed in registers at once."""
VECTORS_AT_ONCE = 4 if wide() else 1
"""Vectors of each query's output that are summed in registers at once."""
STATE_BYTES = 3 * LINE
"""Bytes of a tile's state: running maximum, sum of weights, and the last block's factor on earlier sums."""
FACTOR_OFFSET = 2 * LINE
ROUGH_EXP2 = (1.0000025934, 0.6930038345, 0.2414427567, 0.0520114610, 0.0135341672)
"""Polynomial for 2 ** x, 0 <= x < 1, with the least relative error (2.6e-6)."""
EVEN_AND_ODD = [range(first + odd, first + 8, 2) for first in (0, 8) for odd in (0, 1)]
"""Order in which keys of ``HALVES_FORM`` are multiplied, four numbers at a time."""


@llvm_function(constants=1)
def pack(e: Emitter, form: int, source: ir.Value, scale: ir.Value, vectors: ir.Value, to: ir.Value) -> None:
    """Write a query to a tile in the multiplication order of this form. ``scale`` is the address of a double. For
    pairs, queries are rounded, and their scores are scaled instead."""
    factor = e.everywhere(e.builder.fptrunc(e.load(scale, F64), F32))
    orders = {FLOATS_FORM: [range(i, i + 4) for i in range(0, LANES, 4)], HALVES_FORM: EVEN_AND_ODD}
    order = orders.get(form, [range(i, i + 8) for i in range(0, LANES, 8)])
    with e.loop(vectors) as i:
        numbers = e.load(e.at(source, e.times(i, LINE)))
        numbers = rounded(e, numbers) if form == PAIRS_FORM else e.builder.fmul(numbers, factor)
        place = e.at(to, e.times(i, len(order) * LINE))
        for at, lanes in enumerate(order):
            e.store(e.pick(numbers, numbers, list(lanes)), e.at(place, at * LINE))


@llvm_function(constants=2)
def score(
    e: Emitter, form: int, tiles: int, q: ir.Value, k: ir.Value, row: ir.Value, dim: ir.Value, scale: ir.Value,
    scores: ir.Value, ahead: ir.Value, pace: ir.Value,
) -> None:  # fmt: skip
    """Score several tiles in one read of a block's keys."""
    b, lines = e.builder, 2 if form == HALVES_FORM else 1
    steps, fetches = b.udiv(dim, I64(4 if form == FLOATS_FORM else 8)), KEYS_AT_ONCE // 4
    with e.loop(I64(BLOCK_TOKENS // KEYS_AT_ONCE)) as group:
        first = e.at(k, e.times(e.times(group, KEYS_AT_ONCE), row))
        rows = [e.at(first, e.times(row, j)) for j in range(KEYS_AT_ONCE)]
        sums = [[e.variable(constant(0.0)) for _ in range(KEYS_AT_ONCE)] for _ in range(tiles)]
        with e.loop(steps) as step:
            fetched = e.at(ahead, e.times(e.times(b.add(e.times(group, steps), step), pace), fetches))
            for i in range(fetches):
                e.prefetch(e.at(fetched, e.times(pace, i)))
            starts = [e.at(q, e.times(dim, 4 * TILE_QUERIES * t), e.times(step, lines * LINE)) for t in range(tiles)]
            queries = [[e.load(e.at(start, i * LINE)) for i in range(lines)] for start in starts]
            for j in range(KEYS_AT_ONCE):
                key = e.everywhere(e.load(e.at(rows[j], e.times(step, 16)), FOUR))
                for t in range(tiles):
                    b.store(_added(e, form, key, queries[t], b.load(sums[t][j])), sums[t][j])
        factor = e.everywhere(b.fptrunc(e.load(scale, F64), F32))
        for t in range(tiles):
            to = e.at(scores, e.times(group, KEYS_AT_ONCE // 4 * LINE), t * BLOCK_TOKENS // 4 * LINE)
            for j in range(0, KEYS_AT_ONCE, 4):
                done = _summed(e, [b.load(place) for place in sums[t][j : j + 4]])
                e.store(b.fmul(done, factor) if form == PAIRS_FORM else done, e.at(to, j // 4 * LINE))


def _added(e: Emitter, form: int, key: ir.Value, queries: list[ir.Value], total: ir.Value) -> ir.Value:
    if form == PAIRS_FORM:
        return add_pairs(e, key, queries[0], total)
    keys = _both_halves(e, key) if form == HALVES_FORM else [key]
    for numbers, query in zip(keys, queries, strict=True):
        total = e.fma(numbers, query, total)
    return total


def _both_halves(e: Emitter, floats: ir.Value) -> list[ir.Value]:
    b, words = e.builder, e.builder.bitcast(floats, WORDS)
    return [b.bitcast(each, FLOATS) for each in (b.shl(words, words_of(16)), b.and_(words, words_of(0xFFFF0000)))]


def _summed(e: Emitter, parts: list[ir.Value]) -> ir.Value:
    b, within = e.builder, e.within
    low, high = (b.fadd(within(x, y, [0, 4, 1, 5]), within(x, y, [2, 6, 3, 7])) for x, y in (parts[:2], parts[2:]))
    return b.fadd(within(low, high, [0, 1, 4, 5]), within(low, high, [2, 3, 6, 7]))


@llvm_function()
def hide(e: Emitter, scores: ir.Value, first: ir.Value, low: ir.Value, high: ir.Value) -> None:
    """Mask keys that a query does not see: ``first`` is the block's first position; ``low`` and ``high`` point to four
    integers, the start and end of each query's visible keys."""
    b = e.builder
    begin = e.everywhere(b.trunc(first, I32))
    lanes = [query for query in range(TILE_QUERIES) for _ in range(4)]
    bounds = [
        b.trunc(e.load(place, ir.VectorType(I64, TILE_QUERIES)), ir.VectorType(I32, TILE_QUERIES))
        for place in (low, high)
    ]
    starts, ends = (b.sub(e.pick(each, each, lanes), begin) for each in bounds)
    for i in range(0, BLOCK_TOKENS, 4):
        keys, place = WORDS([i + key for _ in range(TILE_QUERIES) for key in range(4)]), e.at(scores, i * LINE // 4)
        seen = b.and_(b.icmp_signed(">=", keys, starts), b.icmp_signed("<", keys, ends))
        e.store(b.select(seen, e.load(place), constant(-math.inf)), place)


@llvm_function(constants=1)
def weigh(e: Emitter, form: int, scores: ir.Value, state: ir.Value) -> None:
    """Update the running maximum, and turn scores into weights relative to it, in place. In ``PAIRS_FORM`` weights are
    rounded, also in their sum, and stored as ``[keys / 8][4 queries][8 keys]``."""
    b = e.builder
    places = [e.at(scores, i * LINE) for i in range(BLOCK_TOKENS // 4)]
    before, found = e.load(state), [e.load(place) for place in places]
    top = functools.reduce(lambda top, each: e.larger(each, top), found, before)
    for lanes in ([1, 0, 3, 2], [2, 3, 0, 1]):
        top = e.larger(top, e.within(top, top, lanes))
    factor = e.exp2(b.fsub(before, top))
    total = b.fmul(e.load(e.at(state, LINE)), factor)
    if form == PAIRS_FORM:
        for i in range(0, len(found), 2):
            weights = _side_by_side(e, *(rounded(e, _rough_exp2(e, b.fsub(each, top))) for each in found[i : i + 2]))
            e.store(weights, places[i // 2])
            total = add_pairs(e, weights, words_of(0x3F803F80), total)  # pairs of 1
    else:
        for each, place in zip(found, places, strict=True):
            weight = e.exp2(b.fsub(each, top))
            e.store(weight, place)
            total = b.fadd(total, weight)
    e.store(top, state)
    e.store(total, e.at(state, LINE))
    e.store(factor, e.at(state, FACTOR_OFFSET))


def _side_by_side(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    return e.pick(a, b, [half + first + i for first in range(0, LANES, 4) for half in (0, LANES) for i in range(4)])


def _rough_exp2(e: Emitter, x: ir.Value) -> ir.Value:
    """Return 2 ** x with more digits than bfloat16 has, 0 for minus infinity (AVX-512)."""
    mask, passed = ir.IntType(16)(-1), constant(0.0)
    kind = ir.FunctionType(FLOATS, (FLOATS, I32, FLOATS, mask.type, I32))
    function = cgutils.get_or_insert_function(e.builder.module, kind, "llvm.x86.avx512.mask.reduce.ps.512")
    rest = e.builder.call(function, (x, I32(1), passed, mask, I32(4)))  # above the next lower integer
    power = constant(ROUGH_EXP2[-1])
    for coefficient in ROUGH_EXP2[-2::-1]:
        power = e.fma(power, rest, constant(coefficient))
    kind = ir.FunctionType(FLOATS, (FLOATS, FLOATS, FLOATS, mask.type, I32))
    function = cgutils.get_or_insert_function(e.builder.module, kind, "llvm.x86.avx512.mask.scalef.ps.512")
    return e.builder.call(function, (power, x, passed, mask, I32(4)))


@llvm_function(constants=2)
def gather(
    e: Emitter, form: int, vectors: int, weights: ir.Value, state: ir.Value, v: ir.Value, row: ir.Value, dim: ir.Value,
    out: ir.Value, ahead: ir.Value, pace: ir.Value,
) -> None:  # fmt: skip
    """Rescale some vectors of each query's output by the last block's factor, then add the weighted values. In
    ``ROW_PAIRS_FORM`` a row holds pairs."""
    b, pairs = e.builder, form in (PAIRS_FORM, ROW_PAIRS_FORM)
    places = [[e.at(out, e.times(dim, 4 * i), c * LINE) for c in range(vectors)] for i in range(TILE_QUERIES)]
    sums = [[e.variable(constant(0.0)) for _ in range(vectors)] for _ in range(TILE_QUERIES)]
    fetches = 2 * vectors if form == HALVES_FORM else 4 * vectors
    with e.loop(I64(BLOCK_TOKENS // (8 if pairs else 4))) as group:
        fetched = e.at(ahead, e.times(e.times(group, pace), fetches))
        for i in range(fetches):
            e.prefetch(e.at(fetched, e.times(pace, i)))
        for j in range(4):
            values = _values(e, form, vectors, v, row, e.at(e.times(group, 4), j))
            for i in range(TILE_QUERIES):
                word = e.load(e.at(weights, e.times(group, LINE), 16 * i + 4 * j), I32 if pairs else F32)
                weight = e.everywhere(word)
                for value, place in zip(values, sums[i], strict=True):
                    total = b.load(place)
                    b.store(add_pairs(e, value, weight, total) if pairs else e.fma(weight, value, total), place)
    for i in range(TILE_QUERIES):  # summing a block first rounds less often than adding key by key
        factor = e.everywhere(e.load(e.at(state, FACTOR_OFFSET + 16 * i), F32))
        for c in range(vectors):
            e.store(e.fma(e.load(places[i][c]), factor, b.load(sums[i][c])), places[i][c])


def _values(e: Emitter, form: int, vectors: int, v: ir.Value, row: ir.Value, i: ir.Value) -> list[ir.Value]:
    if form != PAIRS_FORM:
        here = e.at(v, e.times(i, row))
        return [number(e, form == HALVES_FORM, here, I64(c)) for c in range(vectors)]
    here = e.at(v, e.times(e.times(i, 2), row))
    return [each for c in range(0, vectors, 2) for each in _row_pairs(e, e.at(here, c * HALF_LINE), row, vectors - c)]


def _row_pairs(e: Emitter, here: ir.Value, row: ir.Value, vectors: int) -> list[ir.Value]:
    size = LANES * min(vectors, 2)
    one, other = (e.load(address, ir.VectorType(HALVES.element, size)) for address in (here, e.at(here, row)))
    lanes = [lane for i in range(size) for lane in (i, size + i)]
    return [e.pick(one, other, lanes[i : i + 2 * LANES]) for i in range(0, 2 * size, 2 * LANES)]


@llvm_function()
def pair_rows(e: Emitter, v: ir.Value, row: ir.Value, vectors: ir.Value, to: ir.Value) -> None:
    """Write a block's values as pairs of rows."""
    b = e.builder
    twos = b.udiv(vectors, I64(2))
    for size, first, count in ((2, I64(0), twos), (1, e.times(twos, 2), b.urem(vectors, I64(2)))):
        with e.loop(count) as i:
            c = b.add(first, e.times(i, size))
            for pair in range(BLOCK_TOKENS // 2):
                here = e.at(v, e.times(row, 2 * pair), e.times(c, HALF_LINE))
                for at, each in enumerate(_row_pairs(e, here, row, size)):
                    e.store(each, e.at(to, e.times(e.at(e.times(vectors, pair), c), LINE), at * LINE))


@llvm_function(constants=1)
def widen_rows(e: Emitter, keys: int, rows: ir.Value, row: ir.Value, vectors: ir.Value, to: ir.Value) -> None:
    """Write a block's bfloat16 as floats; ``keys=1`` uses the order of ``HALVES_FORM``."""
    order = [lane for lanes in EVEN_AND_ODD for lane in lanes] if keys else list(range(LANES))
    with e.loop(I64(BLOCK_TOKENS)) as i, e.loop(vectors) as c:
        numbers = number(e, True, e.at(rows, e.times(i, row)), c)
        e.store(e.pick(numbers, numbers, order), e.at(to, e.times(e.at(e.times(i, vectors), c), LINE)))


@llvm_function(constants=1)
def copy_row(e: Emitter, kind: int, row: ir.Value, vectors: ir.Value, to: ir.Value) -> None:
    """Copy a row of the cache: float32 and bfloat16 as they are, float16 widened to floats."""
    with e.loop(vectors) as i:
        if kind == 1:
            e.store(e.load(e.at(row, e.times(i, HALF_LINE)), HALVES), e.at(to, e.times(i, HALF_LINE)))
        else:
            e.store(_float16(e, row, i) if kind == 2 else number(e, False, row, i), e.at(to, e.times(i, LINE)))


def _float16(e: Emitter, row: ir.Value, index: ir.Value) -> ir.Value:
    """Load a vector of float16 exactly, by integer operations: not every instruction set has float16."""
    b = e.builder
    words = b.zext(e.load(e.at(row, e.times(index, HALF_LINE)), HALVES), WORDS)
    sign = b.shl(b.and_(words, words_of(0x8000)), words_of(16))
    magnitude = b.shl(b.and_(words, words_of(0x7FFF)), words_of(13))
    finite = b.bitcast(b.fmul(b.bitcast(magnitude, FLOATS), constant(2.0**112)), WORDS)
    special = b.icmp_unsigned(">=", magnitude, words_of(0x7C00 << 13))
    return b.bitcast(b.or_(b.select(special, b.or_(magnitude, words_of(0x7F800000)), finite), sign), FLOATS)
