"""How sums over 32 columns' integers become floats, and are added to an output.

A token's inputs are quantised in blocks of 32 (``quantised_rows.py``). Its integer products with a block's codes are
exact. They are turned into floats and added block by block, always in this order; so an output has the same bits
whatever else is in the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from forerun.kernels.linear.byte_products import bytes_by_words, shorts_by_words
from forerun.kernels.runtime.vector_ir import F32, FLOATS, I32, LINE, WORDS, Emitter, words_of

INPUT_BLOCK = 32
"""Columns of a block of the inputs."""
CODE_WORDS = 8
"""Vectors of codes for as many columns."""
X_SUMS, X_SCALE, X_SCALED_SUM, X_BLOCK = 32, 36, 40, 44
"""Where a block of quantised inputs has the sums of its halves, its scale, and the scale times both sums, in bytes; and
the size of a block. Its first 32 bytes are the integers."""


class BlockSums:
    """What a format's factors are, and how they are used.

    Attributes:
        factors: types of the factors, in order.
        sums: integer sums of a block: one, or one for each 16 columns.
    """

    factors: tuple[ir.Type, ...] = (FLOATS, WORDS)
    sums = 1

    def products(
        self, e: Emitter, words: Sequence[ir.Value], places: Sequence[ir.Value], most: int
    ) -> list[list[ir.Value]]:
        """Each token's integer sums with a block's codes, given the addresses of its inputs."""
        totals = [[words_of(0)] * self.sums for _ in places]
        for i, word in enumerate(words):
            which = i * self.sums // CODE_WORDS
            for total, place in zip(totals, places, strict=True):
                four = e.everywhere(e.load(e.at(place, 4 * i), I32))
                total[which] = bytes_by_words(e, word, four, total[which], most)
        return totals

    def add(
        self, e: Emitter, products: Sequence[ir.Value], factors: Sequence[ir.Value], place: ir.Value, total: ir.Value
    ) -> ir.Value:
        """An output's sum so far, plus a block's products."""
        raise NotImplementedError


class _Shifted(BlockSums):
    """A scale, and a pair of factors on the sums of the inputs' halves, which subtracts the codes' offset."""

    def add(
        self, e: Emitter, products: Sequence[ir.Value], factors: Sequence[ir.Value], place: ir.Value, total: ir.Value
    ) -> ir.Value:
        scale, pair = factors
        return scaled(e, with_sums(e, pair, place, products[0]), place, scale, total)


class _Minimum(BlockSums):
    """A scale, and a minimum that is added to every weight."""

    factors = (FLOATS, FLOATS)

    def add(
        self, e: Emitter, products: Sequence[ir.Value], factors: Sequence[ir.Value], place: ir.Value, total: ir.Value
    ) -> ir.Value:
        scale, minimum = factors
        total = scaled(e, products[0], place, scale, total)
        return e.fma(minimum, e.everywhere(e.load(e.at(place, X_SCALED_SUM), F32)), total)


class _ShiftedHalves(BlockSums):
    """A scale, two integer scales of 16 columns each, and a pair as in ``_Shifted``, times them."""

    factors = (FLOATS, WORDS, WORDS, WORDS)
    sums = 2

    def add(
        self, e: Emitter, products: Sequence[ir.Value], factors: Sequence[ir.Value], place: ir.Value, total: ir.Value
    ) -> ir.Value:
        scale, first, second, pair = factors
        return scaled(e, with_sums(e, pair, place, weighted(e, products, first, second)), place, scale, total)


class _HalvesAndMinimum(BlockSums):
    """A scale, two integer scales and two integer minima of 16 columns each, and the factor of these."""

    factors = (FLOATS, WORDS, WORDS, WORDS, FLOATS)
    sums = 2

    def add(
        self, e: Emitter, products: Sequence[ir.Value], factors: Sequence[ir.Value], place: ir.Value, total: ir.Value
    ) -> ir.Value:
        scale, first, second, minima, minimum = factors
        total = scaled(e, weighted(e, products, first, second), place, scale, total)
        return scaled(e, with_sums(e, minima, place, words_of(0)), place, minimum, total)


SHIFTED, MINIMUM, SHIFTED_HALVES, HALVES_AND_MINIMUM = _Shifted(), _Minimum(), _ShiftedHalves(), _HalvesAndMinimum()
BLOCK_SUMS: tuple[BlockSums, ...] = (SHIFTED, MINIMUM, SHIFTED_HALVES, HALVES_AND_MINIMUM)
"""By their numbers in machine code."""


CODE_BYTES = LINE * (CODE_WORDS + max(len(each.factors) for each in BLOCK_SUMS))
"""The most bytes of 32 columns' codes and factors."""


def weighted(e: Emitter, products: Sequence[ir.Value], first: ir.Value, second: ir.Value) -> ir.Value:
    """Both halves' integers, times their scales."""
    b = e.builder
    return b.add(b.mul(products[0], first), b.mul(products[1], second))


def with_sums(e: Emitter, pair: ir.Value, place: ir.Value, integers: ir.Value) -> ir.Value:
    """Integers plus a pair's products with the sums of the inputs' halves."""
    return shorts_by_words(e, pair, e.everywhere(e.load(e.at(place, X_SUMS), I32)), integers)


def scaled(e: Emitter, integers: ir.Value, place: ir.Value, factor: ir.Value, total: ir.Value) -> ir.Value:
    """``total`` plus integers times the inputs' scale, rounded, times a factor."""
    floats = e.builder.fmul(e.builder.sitofp(integers, FLOATS), e.everywhere(e.load(e.at(place, X_SCALE), F32)))
    return e.fma(floats, factor, total)
