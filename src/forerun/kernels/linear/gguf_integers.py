"""Read the small integers of GGUF blocks as bytes in registers, for products with eight-bit inputs.

A vector of *codes* holds four columns of sixteen rows, a byte each. Eight of them are 32 columns, which share a block
of the inputs (``quantised_rows.py``). ``gguf_formats.py`` unpacks the same formats to floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

from llvmlite import ir

from forerun.kernels.linear.block_sums import HALVES_AND_MINIMUM, MINIMUM, SHIFTED, SHIFTED_HALVES, BlockSums
from forerun.kernels.linear.byte_products import bytes_from_table, ignores_high_halves, spread, takes_large_bytes
from forerun.kernels.linear.gguf_formats import (
    FP4_VALUES,
    GGUF_FORMATS,
    IQ4_VALUES,
    bits,
    both_halves,
    halves_at,
    integers_at,
    power_at,
    quads,
)
from forerun.kernels.runtime.vector_ir import BYTES, I32, LANES, WORDS, Emitter, constant, words_of

IQ4, FP4 = [value + 128 for value in IQ4_VALUES], [value + 16 for value in FP4_VALUES]
"""Tables with the offsets of their formats."""


Vectors = Sequence[ir.Value]


class BlockCodes(NamedTuple):
    """32 columns of sixteen rows: eight vectors of four columns each, and the factors of ``BlockSums``."""

    words: Vectors
    factors: Vectors


class StridedRows(Sequence[ir.Value]):
    """Addresses of one place in rows at equal distances. Every fourth is kept; loads add up to three rows to each.
    LLVM would keep all and advance each in every turn of a loop, most of them in memory, so how they are computed is
    hidden from it."""

    def __init__(self, e: Emitter, w: ir.Value, row: ir.Value, count: int = LANES) -> None:
        self._e, self._row, self._count = e, row, count
        self._firsts = [e.at(w, e.times(row, i)) for i in range(0, count, 4)]

    def at(self, offset: ir.Value) -> StridedRows:
        moved = copy(self)
        moved._firsts = [self._e.hidden(self._e.at(first, offset)) for first in self._firsts]
        return moved

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        if i >= self._count:
            raise IndexError(i)
        return self._e.at(self._firsts[i // 4], self._e.times(self._row, i % 4))


class IntegerFormat:
    """The integers of a format's blocks, in ``parts`` equal parts, each a multiple of 32 columns. ``most`` is the
    largest byte; ``sums`` turns sums into floats."""

    parts = 1

    def __init__(self, name: str, sums: BlockSums, most: int) -> None:
        block = next(each for each in GGUF_FORMATS if each.name == name)
        self.name, self.columns, self.bytes, self.sums, self.most = name, block.words, block.bytes, sums, most

    def scales(self, e: Emitter, rows: StridedRows) -> Vectors:
        """Return what all parts of a block need."""
        return ()

    def read(self, e: Emitter, rows: StridedRows, part: int) -> Vectors:
        """Return a part's bytes, a lane per row."""
        raise NotImplementedError

    def codes(self, e: Emitter, read: Vectors, scales: Vectors, part: int) -> Iterator[BlockCodes]:
        """Yield each 32 columns of a part, in order."""
        raise NotImplementedError


class _NibbleCodes(IntegerFormat):
    """Q4_0, Q4_1, Q5_0 and Q5_1."""

    def read(self, e: Emitter, rows: StridedRows, part: int) -> Vectors:
        highest = [integers_at(e, rows, self.bytes - 20, I32)] if self.most > 15 else []
        scales = both_halves(e, integers_at(e, rows, 0, I32)) if self.sums is MINIMUM else [halves_at(e, rows, 0)]
        return [*words_at(e, rows, self.bytes - 16), *highest, *scales]

    def codes(self, e: Emitter, read: Vectors, scales: Vectors, part: int) -> Iterator[BlockCodes]:
        words = nibbles(e, read[:4])
        if self.most > 15:
            words = [e.builder.or_(word, fifth_bits(e, read[4], i)) for i, word in enumerate(words)]
        yield BlockCodes(words, read[-len(self.sums.factors) :])


class _ByteCodes(IntegerFormat):
    def read(self, e: Emitter, rows: StridedRows, part: int) -> Vectors:
        return [*words_at(e, rows, 2), *words_at(e, rows, 18), halves_at(e, rows, 0)]

    def codes(self, e: Emitter, read: Vectors, scales: Vectors, part: int) -> Iterator[BlockCodes]:
        yield BlockCodes([e.builder.xor(word, words_of(0x80808080)) for word in read[:8]], read[8:])


class _TableCodes(IntegerFormat):
    """IQ4_NL and MXFP4, whose codes stand for values of a table."""

    def read(self, e: Emitter, rows: StridedRows, part: int) -> Vectors:
        scale = power_at(e, rows, 0) if self.name == "MXFP4" else halves_at(e, rows, 0)
        return [*words_at(e, rows, self.bytes - 16), scale]

    def codes(self, e: Emitter, read: Vectors, scales: Vectors, part: int) -> Iterator[BlockCodes]:
        yield looked_up(e, read[:4], FP4 if self.name == "MXFP4" else IQ4, read[4])


class _SuperTableCodes(IntegerFormat):
    parts = 8

    def scales(self, e: Emitter, rows: StridedRows) -> Vectors:
        b = e.builder
        first, second, _, _ = quads(e, rows, 0)
        scale = both_halves(e, first)[0]
        numbers = [bits(e, second, 4 * k, 4, first, 16 + 2 * k) for k in range(8)]
        return [b.fmul(scale, b.fsub(number, constant(32.0))) for number in numbers]

    def read(self, e: Emitter, rows: StridedRows, part: int) -> Vectors:
        return words_at(e, rows, 8 + 16 * part)

    def codes(self, e: Emitter, read: Vectors, scales: Vectors, part: int) -> Iterator[BlockCodes]:
        yield looked_up(e, read, IQ4, scales[part])


class _SuperNibbleCodes(IntegerFormat):
    """Q4_K and Q5_K; a part is 64 columns."""

    parts = 4

    @property
    def high_at(self) -> int:
        """First bit of the high halves' codes, in place where bytes may be so large: that saves a shift, and scales are
        divided. Products are equal unless inputs exceed 1e33 and overflow."""
        return 4 if self.most > 31 else 0

    def scales(self, e: Emitter, rows: StridedRows) -> Vectors:
        b = e.builder
        both, first, second, third = quads(e, rows, 0)
        scale, minus = both_halves(e, both)
        minus = b.fsub(constant(-0.0), minus)
        factors = [scale, b.fmul(scale, constant(2.0**-self.high_at))]
        small = [bits(e, first, 8 * k, 6) for k in range(4)]
        small += [bits(e, third, 8 * k, 4, first, 8 * k + 6) for k in range(4)]
        minima = [bits(e, second, 8 * k, 6) for k in range(4)]
        minima += [bits(e, third, 8 * k + 4, 4, second, 8 * k + 6) for k in range(4)]
        highest = quads(e, rows, 16) + quads(e, rows, 32) if self.name == "Q5_K" else []
        return [
            *(b.fmul(factors[k % 2], each) for k, each in enumerate(small)), *(b.fmul(minus, each) for each in minima),
            *highest,
        ]  # fmt: skip

    def read(self, e: Emitter, rows: StridedRows, part: int) -> Vectors:
        at = self.bytes - 128 + 32 * part
        return words_at(e, rows, at) + words_at(e, rows, at + 16)

    def codes(self, e: Emitter, read: Vectors, scales: Vectors, part: int) -> Iterator[BlockCodes]:
        for high in (0, 1):
            number = 2 * part + high
            words = [bits_of_bytes(e, word, 4 * high, 4, self.high_at * high) for word in read]
            if self.name == "Q5_K":
                fifth = [bits_of_bytes(e, word, number, 1, 4) for word in scales[16:]]
                words = [e.builder.or_(*both) for both in zip(words, fifth, strict=True)]
            yield BlockCodes(words, (scales[number], scales[8 + number]))


class _SixBitCodes(IntegerFormat):
    """Q6_K; a part is 128 columns."""

    parts = 2

    def scales(self, e: Emitter, rows: StridedRows) -> Vectors:
        return [
            *(signed_byte(e, word, k) for word in quads(e, rows, 192) for k in range(4)),
            halves_at(e, rows, 208),
        ]

    def read(self, e: Emitter, rows: StridedRows, part: int) -> Vectors:
        places = [*range(64 * part, 64 * part + 64, 16), 128 + 32 * part, 144 + 32 * part]
        return [word for at in places for word in words_at(e, rows, at)]

    def codes(self, e: Emitter, read: Vectors, scales: Vectors, part: int) -> Iterator[BlockCodes]:
        for k in range(4):
            low, high = read[8 * (k % 2) :][:8], read[16:]
            four = [bits_of_bytes(e, word, 4 * (k // 2), 4, 0) for word in low]
            two = [bits_of_bytes(e, word, 2 * k, 2, 4) for word in high]
            words = [e.builder.or_(*both) for both in zip(four, two, strict=True)]
            yield BlockCodes(words, (scales[16], *two_of(scales, part, k)))


class _ThreeBitCodes(IntegerFormat):
    """Q3_K; a part is 128 columns. Codes are multiplied by 8, for Q6_K's offset, and scales divided."""

    parts = 2

    def scales(self, e: Emitter, rows: StridedRows) -> Vectors:
        b, signed = e.builder, []
        words = quads(e, rows, 94)  # the scales from 96 on, followed by the block's
        for k in range(16):
            low, high = 2 + k % 8, 10 + k % 4
            four = b.lshr(words[low // 4], words_of(low % 4 * 8 + k // 8 * 4))
            two = b.lshr(words[high // 4], words_of(high % 4 * 8 + k // 4 * 2))
            six = b.or_(b.and_(four, words_of(15)), b.shl(b.and_(two, words_of(3)), words_of(4)))
            signed.append(b.sub(six, words_of(32)))
        return [*signed, b.fmul(both_halves(e, words[3])[1], constant(1 / 8))]

    def read(self, e: Emitter, rows: StridedRows, part: int) -> Vectors:
        masks = [bits_of_bytes(e, word, 4 * part, 4, 0) for at in (0, 16) for word in words_at(e, rows, at)]
        return [*two_bit_words(e, rows, part, 32), *masks]

    def codes(self, e: Emitter, read: Vectors, scales: Vectors, part: int) -> Iterator[BlockCodes]:
        for k in range(4):
            two = [bits_of_bytes(e, word, 2 * k, 2, 3) for word in read[:8]]
            third = [bits_of_bytes(e, word, k, 1, 5) for word in read[8:]]
            words = [e.builder.or_(*both) for both in zip(two, third, strict=True)]
            yield BlockCodes(words, (scales[16], *two_of(scales, part, k)))


class _TwoBitCodes(IntegerFormat):
    """Q2_K; a part is 128 columns. Codes stay in place as in ``_SuperNibbleCodes``."""

    parts = 2

    def scales(self, e: Emitter, rows: StridedRows) -> Vectors:
        scale, minus = both_halves(e, integers_at(e, rows, 80, I32))
        low, high = ([bits_of_bytes(e, word, at, 4, 0) for word in quads(e, rows, 0)] for at in (0, 4))
        small = [spread(e, word, (k, None, None, None)) for word in low for k in range(4)]
        minima = [spread(e, word, (k, None, k + 1, None)) for word in high for k in (0, 2)]
        return [*small, *minima, scale, e.builder.fsub(constant(-0.0), minus)]

    def read(self, e: Emitter, rows: StridedRows, part: int) -> Vectors:
        return two_bit_words(e, rows, part, 16)

    def codes(self, e: Emitter, read: Vectors, scales: Vectors, part: int) -> Iterator[BlockCodes]:
        *_, scale, minus = scales
        for k in range(4):
            at = 2 * k if self.most > 3 else 0
            words = [bits_of_bytes(e, word, 2 * k, 2, at) for word in read]
            factor = e.builder.fmul(scale, constant(2.0**-at))
            yield BlockCodes(words, (factor, *two_of(scales, part, k), scales[16 + 4 * part + k], minus))


INTEGER_FORMATS: dict[str, IntegerFormat] = {
    each.name: each
    for each in (
        _NibbleCodes("Q4_0", SHIFTED[8], 15),
        _NibbleCodes("Q4_1", MINIMUM, 15),
        _NibbleCodes("Q5_0", SHIFTED[16], 31),
        _NibbleCodes("Q5_1", MINIMUM, 31),
        _ByteCodes("Q8_0", SHIFTED[128], 255),
        _TwoBitCodes("Q2_K", HALVES_AND_MINIMUM, 192 if takes_large_bytes() else 3),
        _ThreeBitCodes("Q3_K", SHIFTED_HALVES, 56),
        _SuperNibbleCodes("Q4_K", MINIMUM, 240 if takes_large_bytes() else 15),
        _SuperNibbleCodes("Q5_K", MINIMUM, 31),
        _SixBitCodes("Q6_K", SHIFTED_HALVES, 63),
        _TableCodes("IQ4_NL", SHIFTED[128], max(IQ4)),
        _SuperTableCodes("IQ4_XS", SHIFTED[128], max(IQ4)),
        _TableCodes("MXFP4", SHIFTED[16], max(FP4)),
    )
}
"""By name; F32, F16 and BF16 hold no small integers."""


def two_of(scales: Vectors, part: int, k: int) -> Vectors:
    """Return the scales of the 32 columns ``k`` of a part of 128, of 16 columns each."""
    return scales[8 * part + 2 * k :][:2]


def signed_byte(e: Emitter, words: ir.Value, k: int) -> ir.Value:
    """Return the ``k``-th byte of each word."""
    return e.builder.ashr(e.builder.shl(words, words_of(24 - 8 * k)), words_of(24))


def fifth_bits(e: Emitter, highest: ir.Value, i: int) -> ir.Value:
    """Return each word's bits ``4 * i`` to ``4 * i + 3`` as bit 4 of four bytes. Costs neither a product nor a
    comparison, which would occupy the units that multiply (Zen 4)."""
    b, copies = e.builder, spread(e, highest, (i // 2,) * 4)
    high = copies if i % 2 else b.shl(copies, words_of(4))
    bit, sixteen = (b.bitcast(each, BYTES) for each in (b.and_(high, words_of(0x80402010)), words_of(0x10101010)))
    return b.bitcast(b.select(b.icmp_unsigned("<", bit, sixteen), bit, sixteen), WORDS)


def nibbles(e: Emitter, words: Sequence[ir.Value]) -> list[ir.Value]:
    """Return the low halves of four words' bytes, then the high halves."""
    return [e.builder.and_(shifted(e, word, at), words_of(0x0F0F0F0F)) for at in (0, 4) for word in words]


def looked_up(e: Emitter, words: Sequence[ir.Value], table: Sequence[int], scale: ir.Value) -> BlockCodes:
    """Return codes that stand for bytes of a table: by the low halves of four words' bytes, then by the high halves."""
    halves = [shifted(e, word, at) for at in (0, 4) for word in words] if ignores_high_halves() else nibbles(e, words)
    return BlockCodes([bytes_from_table(e, word, table) for word in halves], (scale,))


def bits_of_bytes(e: Emitter, words: ir.Value, at: int, count: int, to: int) -> ir.Value:
    """Return ``count`` bits of each byte, from ``at`` on, moved to bit ``to``."""
    return e.builder.and_(shifted(e, words, at - to), words_of(((1 << count) - 1 << to) * 0x01010101))


def shifted(e: Emitter, word: ir.Value, count: int) -> ir.Value:
    """Shift words right, or left by a negative count."""
    if not count:
        return word
    return e.builder.lshr(word, words_of(count)) if count > 0 else e.builder.shl(word, words_of(-count))


def two_bit_words(e: Emitter, rows: StridedRows, part: int, at: int) -> list[ir.Value]:
    """Return eight words with two bits of 128 columns, starting at ``at``."""
    return words_at(e, rows, at + 32 * part) + words_at(e, rows, at + 32 * part + 16)


def words_at(e: Emitter, rows: StridedRows, at: int) -> list[ir.Value]:
    """Return four words of each row, computed beside the products that are interleaved with this."""
    return [e.computed_here(word) for word in quads(e, rows, at)]
