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
X_SUMS, X_SCALE, X_SCALED_SUM, X_BLOCK = 32, 36, 40, LINE
"""Byte offsets in a block of quantised inputs: the sums of its halves (16 bits each), its scale, and that times their
sum; and the size of a block. Its first 32 bytes are the integers."""
X_SHIFTS = {8: 44, 16: 48, 128: 52}
"""Byte offsets of the block's sum times minus the offset of a format's codes."""
HALVES_SHIFT, X_HALVES_SHIFTS = 32, (56, 60)
"""Byte offsets of the sums of both halves times minus an offset."""


class BlockSums:
    """A format's factors, by type and in order, and its integer sums per block: one, or one per 16 columns."""

    factors: tuple[ir.Type, ...] = (FLOATS, WORDS)
    sums = 1

    def products(
        self, e: Emitter, words: Sequence[ir.Value], factors: Sequence[ir.Value], places: Sequence[ir.Value], most: int
    ) -> list[ir.Value]:
        """Return each token's integer sum with a block's codes, given the addresses of its inputs."""
        found, share = list[ir.Value](), CODE_WORDS // self.sums
        for i in range(self.sums):
            totals = [self.start(e, place, i) for place in places]
            for k in range(i * share, (i + 1) * share):
                for t, place in enumerate(places):
                    totals[t] = bytes_by_words(e, words[k], integer_at(e, place, 4 * k), totals[t], most)
            if self.sums > 1:
                totals = [e.builder.mul(total, factors[1 + i]) for total in totals]
            found = totals if not i else [e.builder.add(*both) for both in zip(found, totals, strict=True)]
        return found

    def start(self, e: Emitter, place: ir.Value, i: int) -> ir.Value:
        """Return what a token's integer sum ``i`` starts with. Starting with the inputs' sum times minus an offset
        subtracts it from all codes at no cost."""
        return words_of(0)

    def add(
        self, e: Emitter, products: ir.Value, factors: Sequence[ir.Value], place: ir.Value, total: ir.Value
    ) -> ir.Value:
        """Add a block's products to an output's sum."""
        raise NotImplementedError


class _Shifted(BlockSums):
    """A scale; codes have an offset."""

    factors = (FLOATS,)

    def __init__(self, offset: int) -> None:
        self._at = X_SHIFTS[offset]

    def start(self, e: Emitter, place: ir.Value, i: int) -> ir.Value:
        return integer_at(e, place, self._at)

    def add(
        self, e: Emitter, products: ir.Value, factors: Sequence[ir.Value], place: ir.Value, total: ir.Value
    ) -> ir.Value:
        return scaled(e, products, place, factors[0], total)


class _Minimum(BlockSums):
    """A scale, and a minimum added to every weight."""

    factors = (FLOATS, FLOATS)

    def add(
        self, e: Emitter, products: ir.Value, factors: Sequence[ir.Value], place: ir.Value, total: ir.Value
    ) -> ir.Value:
        scale, minimum = factors
        total = scaled(e, products, place, scale, total)
        return e.fma(minimum, e.everywhere(e.load(e.at(place, X_SCALED_SUM), F32)), total)


class _ShiftedHalves(BlockSums):
    """A scale, and two integer scales of 16 columns each; codes have the offset ``HALVES_SHIFT``."""

    factors = (FLOATS, WORDS, WORDS)
    sums = 2

    def start(self, e: Emitter, place: ir.Value, i: int) -> ir.Value:
        return integer_at(e, place, X_HALVES_SHIFTS[i])

    def add(
        self, e: Emitter, products: ir.Value, factors: Sequence[ir.Value], place: ir.Value, total: ir.Value
    ) -> ir.Value:
        return scaled(e, products, place, factors[0], total)


class _HalvesAndMinimum(BlockSums):
    """A scale, two integer scales and two integer minima of 16 columns each, and the minima's factor."""

    factors = (FLOATS, WORDS, WORDS, WORDS, FLOATS)
    sums = 2

    def add(
        self, e: Emitter, products: ir.Value, factors: Sequence[ir.Value], place: ir.Value, total: ir.Value
    ) -> ir.Value:
        scale, _, _, minima, minimum = factors
        total = scaled(e, products, place, scale, total)
        of_minima = shorts_by_words(e, minima, integer_at(e, place, X_SUMS), words_of(0))
        return scaled(e, of_minima, place, minimum, total)


SHIFTED = {offset: _Shifted(offset) for offset in X_SHIFTS}
MINIMUM, SHIFTED_HALVES, HALVES_AND_MINIMUM = _Minimum(), _ShiftedHalves(), _HalvesAndMinimum()
BLOCK_SUMS: tuple[BlockSums, ...] = (*SHIFTED.values(), MINIMUM, SHIFTED_HALVES, HALVES_AND_MINIMUM)
CODE_BYTES = LINE * (CODE_WORDS + max(len(each.factors) for each in BLOCK_SUMS))


def integer_at(e: Emitter, place: ir.Value, at: int) -> ir.Value:
    """Repeat one of a block's integers in every lane."""
    return e.everywhere(e.load(e.at(place, at), I32))


def scaled(e: Emitter, integers: ir.Value, place: ir.Value, factor: ir.Value, total: ir.Value) -> ir.Value:
    """Add integers, times the inputs' scale (rounded) and a factor, to ``total``."""
    floats = e.builder.fmul(e.builder.sitofp(integers, FLOATS), e.everywhere(e.load(e.at(place, X_SCALE), F32)))
    return e.fma(floats, factor, total)
