"""Multiply quantised inputs by a panel of packed weights, by exact sums of integers (``block_sums.py``).

For a few tokens, a panel's codes are used when unpacked. For more, codes and factors of some columns are first written
to a buffer, once for all. The bits are equal. Each lane is an output.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from llvmlite import ir

from forerun.core.compiling import compiled
from forerun.kernels.linear.block_sums import BLOCK_SUMS, CODE_WORDS, INPUT_BLOCK, X_BLOCK, BlockSums
from forerun.kernels.linear.gguf_integers import INTEGER_FORMATS, BlockCodes, IntegerFormat, StridedRows
from forerun.kernels.linear.panels import (
    INTEGER_TOKENS,
    format_of,
    least,
    least_that_suffices,
)
from forerun.kernels.runtime.addresses import address_of
from forerun.kernels.runtime.vector_ir import I64, LANES, LINE, WORDS, Emitter, llvm_function, wide


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
    the panel ``ahead`` bytes after. Reads inputs and overwrites sums after the last token's, up to the next of
    ``INTEGER_TOKENS``."""
    for size in least_that_suffices(e, tokens, INTEGER_TOKENS):
        inputs = StridedRows(e, x, x_row, size)
        _panel(e, integers_of(which), StridedRows(e, w, row), inputs, blocks, e.at(w, ahead), sums)


def _panel(
    e: Emitter, each: IntegerFormat, rows: StridedRows, inputs: StridedRows, blocks: ir.Value, ahead: ir.Value,
    sums: ir.Value,
) -> None:  # fmt: skip
    """Add a panel's products with all inputs. With AVX-512 the next part is read between the present one's products,
    because the processor itself looks only some 60 vector instructions ahead: 8 tokens cost 10 % less (Q8_0, Q5_0; Zen
    4). The next block's is, if a block is one part; else too little would fit in registers."""
    b, groups = e.builder, each.columns // INPUT_BLOCK // each.parts
    totals = [e.variable(e.load(e.at(sums, t * LINE))) for t in range(len(inputs))]
    kept = [e.variable(vector) for vector in each.read(e, rows, 0)] if each.parts == 1 and wide() else []
    with e.loop(blocks) as block:
        here = rows.at(e.times(block, each.bytes))
        places = inputs.at(e.times(block, each.columns // INPUT_BLOCK * X_BLOCK))
        scales = each.scales(e, here)
        read = [b.load(vector) for vector in kept] or each.read(e, here, 0)
        for part in range(each.parts):
            with e.interleaved(groups * min(CODE_WORDS, 2 * len(inputs))) as then:
                for i, codes in enumerate(each.codes(e, read, scales, part), part * groups):
                    _add(e, each.sums, each.most, codes, [e.at(place, i * X_BLOCK) for place in places], totals)
                then()
                _prefetch(e, each, ahead, block, part)
                then()
                if kept:
                    following = least(e, b.add(block, I64(1)), b.sub(blocks, I64(1)))
                    read = each.read(e, rows.at(e.times(following, each.bytes)), 0)
                elif part + 1 < each.parts:
                    read = each.read(e, here, part + 1)
        for place, vector in zip(kept, read, strict=False):
            b.store(vector, place)
    for t, total in enumerate(totals):
        e.store(b.load(total), e.at(sums, t * LINE))


def _add(
    e: Emitter, sums: BlockSums, most: int, codes: BlockCodes, places: Sequence[ir.Value], totals: Sequence[ir.Value]
) -> None:
    products = sums.products(e, codes.words, codes.factors, places, most)
    for found, place, total in zip(products, places, totals, strict=True):
        e.builder.store(sums.add(e, found, codes.factors, place, e.builder.load(total)), total)


def _prefetch(e: Emitter, each: IntegerFormat, ahead: ir.Value, block: ir.Value, part: int) -> None:
    """Prefetch a part's share of a block of the panel ahead, in memory order. All of a block's prefetches at once would
    occupy the processor's miss buffers while the loads after them wait: a token of Q6_K, Q5_K and Q2_K from memory was
    a third slower (Zen 4)."""
    here, lines = e.at(ahead, e.times(block, LANES * each.bytes)), -(-LANES * each.bytes // LINE)
    for line in range(part * lines // each.parts, (part + 1) * lines // each.parts):
        e.prefetch(e.at(here, line * LINE))


@llvm_function(constants=1)
def codes_of_panel(
    e: Emitter, which: int, w: ir.Value, row: ir.Value, blocks: ir.Value, ahead: ir.Value, to: ir.Value
) -> None:
    """Write the codes and factors of a panel's blocks to ``to``, 32 columns after another."""
    each = integers_of(which)
    rows, size = StridedRows(e, w, row), code_bytes(BLOCK_SUMS.index(each.sums))
    with e.loop(blocks) as block:
        here = rows.at(e.times(block, each.bytes))
        scales, place = each.scales(e, here), e.at(to, e.times(block, each.columns // INPUT_BLOCK * size))
        for part in range(each.parts):
            _prefetch(e, each, e.at(w, ahead), block, part)
            e.barrier()
            for codes in each.codes(e, each.read(e, here, part), scales, part):
                for k, vector in enumerate((*codes.words, *codes.factors)):
                    e.store(vector, e.at(place, k * LINE))
                place = e.at(place, size)


def code_bytes(kind: int) -> int:
    """Return the size in bytes of 32 columns' codes and factors."""
    return LINE * (CODE_WORDS + len(BLOCK_SUMS[kind].factors))


@llvm_function(constants=2)
def many_by_integers(
    e: Emitter, kind: int, most: int, tokens: ir.Value, codes: ir.Value, count: ir.Value, x: ir.Value, x_row: ir.Value,
    sums: ir.Value,
) -> None:  # fmt: skip
    """Add the products of ``count`` times 32 columns' codes with tokens' inputs to the sums ``[tokens][lanes]``.
    ``kind`` is an index of ``BLOCK_SUMS``, and ``most`` the largest code. Reads inputs and overwrites sums after the
    last token's as ``few_by_integers`` does."""
    sums_of = BLOCK_SUMS[kind]
    for size in least_that_suffices(e, tokens, INTEGER_TOKENS):
        inputs = StridedRows(e, x, x_row, size)
        totals = [e.variable(e.load(e.at(sums, t * LINE))) for t in range(size)]
        with e.loop(count) as i:
            here, places = e.at(codes, e.times(i, code_bytes(kind))), inputs.at(e.times(i, X_BLOCK))
            kinds = (*(WORDS,) * CODE_WORDS, *sums_of.factors)
            vectors = [e.load(e.at(here, k * LINE), each) for k, each in enumerate(kinds)]
            now = BlockCodes(vectors[:CODE_WORDS], vectors[CODE_WORDS:])
            _add(e, sums_of, most, now, list(places), totals)
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
