"""Choose the machine code that attends to one block, for each kind of keys and values.

bfloat16 is multiplied in pairs where the processor can, or widened in registers. A block that several tiles read is
rewritten once for all. No bit changes: products are summed in one order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_tile import (
    BLOCK_TOKENS,
    FLOATS_FORM,
    HALVES_FORM,
    PAIRS_FORM,
    ROW_PAIRS_FORM,
    TILE_QUERIES,
    TILES_AT_ONCE,
    VECTORS_AT_ONCE,
    copy_row,
    gather,
    pack,
    pair_rows,
    score,
    weigh,
    widen_rows,
)
from forerun.kernels.linear.weight_format import multiplies_pairs
from forerun.kernels.runtime.addresses import StructLayout, address_of
from forerun.kernels.runtime.vector_ir import LANES, LINE

FLOAT32_KIND, BFLOAT16_KIND, FLOAT16_KIND = range(3)
SHARED_TILES = 3
"""From this many tiles on, rewriting a block costs less than converting it for each tile."""


class BlockCode(NamedTuple):
    """How blocks of one kind are read: machine code addresses, except ``width`` and ``copied``."""

    width: int  # bytes per number that ``scores`` and ``values`` read
    copied: int  # 1 if all keys and values are copied first; else only those of a partial block
    pack: int  # writes a query into a tile
    copy: int  # copies a row
    scores: int
    values: int  # turns a tile's scores into weights, and adds the weighted values to its outputs
    rewrite_keys: int = 0  # rewrites a block for several tiles, for the ``rewritten`` code; 0 if useless
    rewritten_scores: int = 0
    rewrite_values: int = 0
    rewritten_values: int = 0


read_block_code = StructLayout(BlockCode).reader()


@functools.cache
def block_code(kind: int) -> BlockCode:
    """Return the code for a kind; the first call compiles or loads it."""
    if kind != BFLOAT16_KIND:
        copied, values = int(kind == FLOAT16_KIND), _weighing(FLOATS_FORM, FLOATS_FORM)
        return BlockCode(4, copied, _packing(FLOATS_FORM), _copying(kind), _scoring(FLOATS_FORM), values)
    form = PAIRS_FORM if multiplies_pairs() else HALVES_FORM
    code = BlockCode(2, 0, _packing(form), _copying(kind), _scoring(form), _weighing(form, form))
    if form == PAIRS_FORM:
        values = _weighing(PAIRS_FORM, ROW_PAIRS_FORM)
        return code._replace(rewrite_values=address_of(_pair, 4), rewritten_values=values)
    return code._replace(
        rewrite_keys=address_of(_widen_keys, 4), rewritten_scores=_scoring(FLOATS_FORM),
        rewrite_values=address_of(_widen_values, 4), rewritten_values=_weighing(FLOATS_FORM, FLOATS_FORM),
    )  # fmt: skip


@functools.cache
def _packing(form: int) -> int:
    @compiled
    def pack_query(source: int, scale: int, vectors: int, to: int) -> None:
        pack(form, source, scale, vectors, to)

    return address_of(pack_query, 4)


@functools.cache
def _copying(kind: int) -> int:
    @compiled
    def copy(row: int, vectors: int, to: int) -> None:
        copy_row(kind, row, vectors, to)

    return address_of(copy, 3)


@functools.cache
def _scoring(form: int) -> int:
    number = 4 if form == FLOATS_FORM else 2

    @compiled
    def scores_of(
        dim: int, width: int, low: int, high: int, q: int, k: int, k_row: int, scale: int, scores: int, ahead: int
    ) -> None:
        """Score tiles ``low`` to ``high``; prefetch a block of ``width``-byte numbers at ``ahead``."""
        times = (high - low + TILES_AT_ONCE - 1) // TILES_AT_ONCE
        share, pace, t = BLOCK_TOKENS * dim * width // times, LINE * width // number // times, low
        while t < high:
            at, to = q + t * TILE_QUERIES * dim * 4, scores + t * TILE_QUERIES * BLOCK_TOKENS * 4
            if t + TILES_AT_ONCE <= high:
                score(form, TILES_AT_ONCE, at, k, k_row, dim, scale, to, ahead, pace)
                t += TILES_AT_ONCE
            else:
                score(form, 1, at, k, k_row, dim, scale, to, ahead, pace)
                t += 1
            ahead += share

    return address_of(scores_of, 10)


@functools.cache
def _weighing(form: int, values: int) -> int:
    number = 4 if values == FLOATS_FORM else 2
    vector = LANES * (2 if values in (HALVES_FORM, PAIRS_FORM) else 4)

    @compiled
    def add_values(
        out_dim: int, width: int, tiles: int, scores: int, state: int, v: int, v_row: int, out: int, ahead: int
    ) -> None:
        """Add one tile's values; prefetch its share, one of ``tiles``, of a ``width``-byte block at ``ahead``."""
        weigh(form, scores, state)
        share, pace, c = BLOCK_TOKENS * LANES * width // tiles, LINE * width // number // tiles, 0
        while c < out_dim // LANES:
            at, to = v + c * vector, out + c * LINE
            if c + VECTORS_AT_ONCE <= out_dim // LANES:
                gather(values, VECTORS_AT_ONCE, scores, state, at, v_row, out_dim, to, ahead + c * share, pace)
                c += VECTORS_AT_ONCE
            else:
                gather(values, 1, scores, state, at, v_row, out_dim, to, ahead + c * share, pace)
                c += 1

    return address_of(add_values, 9)


@compiled
def _pair(rows: int, row: int, vectors: int, to: int) -> None:
    pair_rows(rows, row, vectors, to)


@compiled
def _widen_keys(rows: int, row: int, vectors: int, to: int) -> None:
    widen_rows(1, rows, row, vectors, to)


@compiled
def _widen_values(rows: int, row: int, vectors: int, to: int) -> None:
    widen_rows(0, rows, row, vectors, to)
