"""Multiply quantised inputs by a panel of packed weights, by exact sums of integers (``block_sums.py``).

For a few tokens, a panel's codes are used when unpacked. For more, codes and factors of some columns are first written
to a buffer, once for all. The bits are equal. Each lane is an output.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from llvmlite import ir

from forerun.core.compiling import compiled
from forerun.kernels.linear.block_sums import BLOCK_SUMS, CODE_WORDS, INPUT_BLOCK, X_BLOCK
from forerun.kernels.linear.gguf_integers import INTEGER_FORMATS, IntegerFormat, StridedRows
from forerun.kernels.linear.panels import (
    INTEGER_TOKENS,
    format_of,
    least,
    least_that_suffices,
    parts_of,
)
from forerun.kernels.runtime.addresses import address_of
from forerun.kernels.runtime.vector_ir import I64, LANES, LINE, WORDS, Emitter, llvm_function


def sums_kind(which: int) -> tuple[int, int]:
    """Return the constants of ``many_by_integers`` for a format number."""
    each = integers_of(which)
    return BLOCK_SUMS.index(each.sums), 127 if each.most <= 127 else 255


def integers_of(number: int) -> IntegerFormat:
    """Return the integers of a format, by its number (``panels.format_number``)."""
    return INTEGER_FORMATS[format_of(number).name]


@llvm_function(constants=1)
def few_by_integers(
    e: Emitter, which: int, tokens: ir.Value, w: ir.Value, row: ir.Value, x: ir.Value, x_row: ir.Value,
    blocks: ir.Value, ahead: ir.Value, sums: ir.Value,
) -> None:  # fmt: skip
    """Add a panel's products with a few tokens' quantised inputs at ``x`` to the sums ``[tokens][lanes]``. Prefetches
    the panel ``ahead`` bytes after. Overwrites sums after the last token's, up to the next of ``INTEGER_TOKENS``."""
    b, each = e.builder, integers_of(which)
    per_block = each.columns // INPUT_BLOCK
    for size in least_that_suffices(e, tokens, INTEGER_TOKENS):
        rows, tokens_rows = StridedRows(e, w, row), _inputs(e, size, tokens, x, x_row)
        totals = [e.variable(e.load(e.at(sums, t * LINE))) for t in range(size)]
        with e.loop(blocks) as block:
            here = rows.at(e.times(block, each.bytes))
            scales = each.scales(e, here)
            for part in map(I64, range(each.parts)):
                first = b.add(e.times(block, per_block), e.times(part, per_block // each.parts))
                places = [e.at(address, e.times(first, X_BLOCK)) for address in tokens_rows]
                for i, codes in enumerate(each.codes(e, here, scales, part)):
                    _prefetch(e, each, e.at(w, ahead), first, i)
                    _add(e, each, codes.words, codes.factors, [e.at(place, i * X_BLOCK) for place in places], totals)
        for t, total in enumerate(totals):
            e.store(b.load(total), e.at(sums, t * LINE))


def _add(
    e: Emitter, each: IntegerFormat, words: Sequence[ir.Value], factors: Sequence[ir.Value],
    places: Sequence[ir.Value], totals: Sequence[ir.Value],
) -> None:  # fmt: skip
    products = each.sums.products(e, words, places, each.most)
    for found, place, total in zip(products, places, totals, strict=True):
        e.builder.store(each.sums.add(e, found, factors, place, e.builder.load(total)), total)


def _prefetch(e: Emitter, each: IntegerFormat, ahead: ir.Value, first: ir.Value, i: int) -> None:
    """Prefetch the share of 32 columns, the ``i``-th after ``first`` times 32, of the panel ahead, in memory order. The
    barrier keeps LLVM from moving a block's prefetches to its start, where the loads after them wait: a token of Q6_K,
    Q5_K and Q2_K from memory was a third slower (Zen 4)."""
    count = each.columns // INPUT_BLOCK // each.parts
    lines = -(-LANES * each.bytes // each.parts // LINE)
    part = e.at(ahead, e.times(first, LANES * each.bytes // (each.columns // INPUT_BLOCK)))
    for line in range(i * lines // count, (i + 1) * lines // count):
        e.prefetch(e.at(part, line * LINE))
    e.barrier()


def _inputs(e: Emitter, size: int, tokens: ir.Value, x: ir.Value, x_row: ir.Value) -> list[ir.Value]:
    final = e.builder.sub(tokens, I64(1))
    return [e.at(x, e.times(x_row, least(e, I64(t), final))) for t in range(size)]


@llvm_function(constants=1)
def codes_of_panel(
    e: Emitter, which: int, w: ir.Value, row: ir.Value, blocks: ir.Value, ahead: ir.Value, to: ir.Value
) -> None:
    """Write the codes and factors of a panel's blocks to ``to``, 32 columns after another."""
    each = integers_of(which)
    rows = StridedRows(e, w, row)
    size, per_block = code_bytes(BLOCK_SUMS.index(each.sums)), each.columns // INPUT_BLOCK
    with e.loop(blocks) as block:
        here = rows.at(e.times(block, each.bytes))
        scales = each.scales(e, here)
        with parts_of(e, each.parts) as part:
            first = e.builder.add(e.times(block, per_block), e.times(part, per_block // each.parts))
            place = e.at(to, e.times(first, size))
            for i, codes in enumerate(each.codes(e, here, scales, part)):
                _prefetch(e, each, e.at(w, ahead), first, i)
                for k, vector in enumerate((*codes.words, *codes.factors)):
                    e.store(vector, e.at(place, i * size + k * LINE))


def code_bytes(kind: int) -> int:
    """Return the size in bytes of 32 columns' codes and factors."""
    return LINE * (CODE_WORDS + len(BLOCK_SUMS[kind].factors))


@llvm_function(constants=2)
def many_by_integers(
    e: Emitter, kind: int, most: int, tokens: ir.Value, codes: ir.Value, count: ir.Value, x: ir.Value, x_row: ir.Value,
    sums: ir.Value,
) -> None:  # fmt: skip
    """Add the products of ``count`` times 32 columns' codes with tokens' inputs to the sums ``[tokens][lanes]``.
    ``kind`` is an index of ``BLOCK_SUMS``, and ``most`` the largest code."""
    sums_of = BLOCK_SUMS[kind]
    for size in least_that_suffices(e, tokens, INTEGER_TOKENS):
        tokens_rows = _inputs(e, size, tokens, x, x_row)
        totals = [e.variable(e.load(e.at(sums, t * LINE))) for t in range(size)]
        with e.loop(count) as i:
            here = e.at(codes, e.times(i, code_bytes(kind)))
            words = [e.load(e.at(here, k * LINE), WORDS) for k in range(CODE_WORDS)]
            factors = [e.load(e.at(here, (CODE_WORDS + k) * LINE), each) for k, each in enumerate(sums_of.factors)]
            places = [e.at(address, e.times(i, X_BLOCK)) for address in tokens_rows]
            products = sums_of.products(e, words, places, most)
            for found, place, total in zip(products, places, totals, strict=True):
                e.builder.store(sums_of.add(e, found, factors, place, e.builder.load(total)), total)
        for t, total in enumerate(totals):
            e.store(e.builder.load(total), e.at(sums, t * LINE))


@functools.cache
def integer_code(which: int) -> tuple[int, int, int]:
    """Return ``few_by_integers``, ``codes`` and ``many_by_integers`` of a matrix in a format, by its number."""

    @compiled
    def integer_products_of_few(
        tokens: int, w: int, row: int, x: int, x_row: int, blocks: int, ahead: int, sums: int
    ) -> None:
        few_by_integers(which, tokens, w, row, x, x_row, blocks, ahead, sums)

    @compiled
    def codes_of(w: int, row: int, blocks: int, ahead: int, to: int) -> None:
        codes_of_panel(which, w, row, blocks, ahead, to)

    return address_of(integer_products_of_few, 8), address_of(codes_of, 5), _sums_code(*sums_kind(which))


@functools.cache
def _sums_code(kind: int, most: int) -> int:
    @compiled
    def integer_products_of_many(tokens: int, codes: int, count: int, x: int, x_row: int, sums: int) -> None:
        many_by_integers(kind, most, tokens, codes, count, x, x_row, sums)

    return address_of(integer_products_of_many, 6)
