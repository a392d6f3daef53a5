"""Turn integer sums over 32 columns into floats, and add them to an output.

A token's inputs are quantised in blocks of 32 (``quantised_rows.py``). Their integer products with a block's codes are
exact, and are converted and added block by block, always in this order, for the same bits in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from forerun.kernels.linear.byte_products import bytes_by_words, shorts_by_words
from forerun.kernels.runtime.vector_ir import F32, FLOATS, I32, LINE, WORDS, Emitter, words_of

INPUT_BLOCK = 32
CODE_WORDS = 8
"""Vectors of codes for as many columns."""
X_SUMS, X_SCALE, X_SCALED_SUM, X_BLOCK = 32, 36, 40, 44
"""Byte offsets in a block of quantised inputs: the negated sums of its halves, its scale, the scale times the sum of
both, and the size of a block. Its first 32 bytes are the integers."""


class BlockSums:
    """A format's factors, by type and in order, and its integer sums per block: one, or one per 16 columns."""

    factors: tuple[ir.Type, ...] = (FLOATS, WORDS)
    sums = 1

    def products(
        self, e: Emitter, words: Sequence[ir.Value], places: Sequence[ir.Value], most: int
    ) -> list[list[ir.Value]]:
        """Return each token's integer sums with a block's codes, given the addresses of its inputs."""
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
        """Add a block's products to an output's sum."""
        raise NotImplementedError


class _Shifted(BlockSums):
    """A scale, and a pair of factors on the sums of the inputs' halves: the codes' offset."""

    def add(
        self, e: Emitter, products: Sequence[ir.Value], factors: Sequence[ir.Value], place: ir.Value, total: ir.Value
    ) -> ir.Value:
        scale, pair = factors
        return scaled(e, with_sums(e, pair, place, products[0]), place, scale, total)


class _Minimum(BlockSums):
    """A scale, and a minimum added to every weight."""

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
    """A scale, two integer scales and two integer minima of 16 columns each, and the minima's factor."""

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


CODE_BYTES = LINE * (CODE_WORDS + max(len(each.factors) for each in BLOCK_SUMS))


def weighted(e: Emitter, products: Sequence[ir.Value], first: ir.Value, second: ir.Value) -> ir.Value:
    """Multiply both halves' integers by their scales, and add them."""
    b = e.builder
    return b.add(b.mul(products[0], first), b.mul(products[1], second))


def with_sums(e: Emitter, pair: ir.Value, place: ir.Value, integers: ir.Value) -> ir.Value:
    """Subtract a pair's products with the sums of the inputs' halves from integers."""
    return shorts_by_words(e, pair, e.everywhere(e.load(e.at(place, X_SUMS), I32)), integers)


def scaled(e: Emitter, integers: ir.Value, place: ir.Value, factor: ir.Value, total: ir.Value) -> ir.Value:
    """Add integers, times the inputs' scale (rounded) and a factor, to ``total``."""
    floats = e.builder.fmul(e.builder.sitofp(integers, FLOATS), e.everywhere(e.load(e.at(place, X_SCALE), F32)))
    return e.fma(floats, factor, total)
