"""Read the small integers of GGUF blocks as bytes in registers, for products with eight-bit inputs.

A vector of *codes* holds four columns of sixteen rows, a byte each. Eight of them are 32 columns, which share a block
of the inputs (``quantised_rows.py``). ``gguf_formats.py`` unpacks the same formats to floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from forerun.kernels.linear.block_sums import HALVES_AND_MINIMUM, MINIMUM, SHIFTED, SHIFTED_HALVES, BlockSums
from forerun.kernels.linear.byte_products import bytes_from_table, ignores_high_halves, spread, takes_large_bytes
from forerun.kernels.linear.gguf_formats import (
    FP4_VALUES,
    GGUF_FORMATS,
    IQ4_VALUES,
    VectorTable,
    bits,
    both_halves,
    halves_at,
    integers_at,
    power_at,
    quads,
    splat,
)
from forerun.kernels.runtime.vector_ir import I32, I64, LANES, WORDS, Emitter, constant, words_of

IQ4, FP4 = [value + 128 for value in IQ4_VALUES], [value + 16 for value in FP4_VALUES]
"""Tables with the offsets of their formats."""


class BlockCodes(NamedTuple):
    """32 columns of sixteen rows: eight vectors of four columns each, and the factors of ``BlockSums``."""

    words: Sequence[ir.Value]
    factors: tuple[ir.Value, ...]


class StridedRows(Sequence[ir.Value]):
    """Addresses of one place in sixteen rows at equal distances. Four are kept; loads add up to three rows to each.
    LLVM would keep all sixteen, most of them in memory, so how the four are computed is hidden from it."""

    def __init__(self, e: Emitter, w: ir.Value, row: ir.Value) -> None:
        self._e, self._row = e, row
        self._firsts = [e.at(w, e.times(row, i)) for i in range(0, LANES, 4)]

    def at(self, offset: ir.Value) -> StridedRows:
        moved = copy(self)
        moved._firsts = [self._e.hidden(self._e.at(first, offset)) for first in self._firsts]
        return moved

    def __len__(self) -> int:
        return LANES

    def __getitem__(self, i: Any) -> Any:
        return self._e.at(self._firsts[i // 4], self._e.times(self._row, i % 4))


class IntegerFormat:
    """The integers of a format's blocks, read in ``parts`` equal parts, each a multiple of 32 columns. ``most`` is the
    largest byte; ``sums`` turns sums into floats."""

    parts = 1

    def __init__(self, name: str, sums: BlockSums, most: int) -> None:
        block = next(each for each in GGUF_FORMATS if each.name == name)
        self.name, self.columns, self.bytes, self.sums, self.most = name, block.words, block.bytes, sums, most

    def scales(self, e: Emitter, rows: StridedRows) -> Any:
        return None

    def codes(self, e: Emitter, rows: StridedRows, scales: Any, part: ir.Value) -> Iterator[BlockCodes]:
        """Yield each 32 columns of a part, in order."""
        raise NotImplementedError


class _NibbleCodes(IntegerFormat):
    """Q4_0, Q4_1, Q5_0 and Q5_1."""

    def codes(self, e: Emitter, rows: StridedRows, scales: Any, part: ir.Value) -> Iterator[BlockCodes]:
        b = e.builder
        words = nibbles(e, quads(e, rows, self.bytes - 16))
        if self.most > 15:
            highest = integers_at(e, rows, self.bytes - 20, I32)
            for i, word in enumerate(words):
                four = b.and_(b.lshr(highest, words_of(4 * i)), words_of(15))
                fifth = b.and_(b.mul(four, words_of(0x02040810)), words_of(0x10101010))  # one bit to each byte
                words[i] = b.or_(word, fifth)
        if self.sums is MINIMUM:
            yield BlockCodes(words, both_halves(e, integers_at(e, rows, 0, I32)))
        else:
            yield BlockCodes(words, (halves_at(e, rows, 0),))


class _ByteCodes(IntegerFormat):
    def codes(self, e: Emitter, rows: StridedRows, scales: Any, part: ir.Value) -> Iterator[BlockCodes]:
        words = [e.builder.xor(word, words_of(0x80808080)) for at in (2, 18) for word in quads(e, rows, at)]
        yield BlockCodes(words, (halves_at(e, rows, 0),))


class _TableCodes(IntegerFormat):
    """IQ4_NL and MXFP4, whose codes stand for values of a table."""

    def codes(self, e: Emitter, rows: StridedRows, scales: Any, part: ir.Value) -> Iterator[BlockCodes]:
        words = quads(e, rows, self.bytes - 16)
        if self.name == "MXFP4":
            yield looked_up(e, words, FP4, power_at(e, rows, 0))
        else:
            yield looked_up(e, words, IQ4, halves_at(e, rows, 0))


class _SuperTableCodes(IntegerFormat):
    parts = 8

    def scales(self, e: Emitter, rows: StridedRows) -> Any:
        b, table = e.builder, VectorTable(e, 8)
        first, second, _, _ = quads(e, rows, 0)
        scale = both_halves(e, first)[0]
        for k in range(8):
            table.put(k, b.fmul(scale, b.fsub(bits(e, second, 4 * k, 4, first, 16 + 2 * k), constant(32.0))))
        return table

    def codes(self, e: Emitter, rows: StridedRows, scales: Any, part: ir.Value) -> Iterator[BlockCodes]:
        here = rows.at(e.times(part, 16))
        yield looked_up(e, quads(e, here, 8), IQ4, scales.get(part))


class _SuperNibbleCodes(IntegerFormat):
    """Q4_K and Q5_K; a part is 64 columns."""

    parts = 4

    @property
    def high_at(self) -> int:
        """First bit of the high halves' codes, in place where bytes may be so large: that saves a shift, and scales are
        divided. Products are equal unless inputs exceed 1e33 and overflow."""
        return 4 if self.most > 31 else 0

    def scales(self, e: Emitter, rows: StridedRows) -> Any:
        b = e.builder
        both, first, second, third = quads(e, rows, 0)
        scale, minus = both_halves(e, both)
        minus, table = b.fsub(constant(-0.0), minus), VectorTable(e, 16)
        scales = [scale, b.fmul(scale, constant(2.0**-self.high_at))]
        for k in range(4):
            table.put(k, b.fmul(scales[k % 2], bits(e, first, 8 * k, 6)))
            table.put(8 + k, b.fmul(minus, bits(e, second, 8 * k, 6)))
            table.put(4 + k, b.fmul(scales[k % 2], bits(e, third, 8 * k, 4, first, 8 * k + 6)))
            table.put(12 + k, b.fmul(minus, bits(e, third, 8 * k + 4, 4, second, 8 * k + 6)))
        return table, WordTable(e, quads(e, rows, 16) + quads(e, rows, 32) if self.name == "Q5_K" else [])

    def codes(self, e: Emitter, rows: StridedRows, scales: Any, part: ir.Value) -> Iterator[BlockCodes]:
        b, (table, highest) = e.builder, scales
        here = rows.at(e.times(part, 32))
        raw = quads(e, here, self.bytes - 128) + quads(e, here, self.bytes - 112)
        for high in (0, 1):
            number = b.add(e.times(part, 2), I64(high))
            words = [bits_of_bytes(e, word, 4 * high, 4, self.high_at * high) for word in raw]
            if self.name == "Q5_K":
                for i, word in enumerate(words):
                    bit = b.and_(b.lshr(highest.get(I64(i)), splat(e, number)), words_of(0x01010101))
                    words[i] = b.or_(word, b.shl(bit, words_of(4)))
            yield BlockCodes(words, (table.get(number), table.get(b.add(number, I64(8)))))


class _SixBitCodes(IntegerFormat):
    """Q6_K; a part is 128 columns."""

    parts = 2

    def scales(self, e: Emitter, rows: StridedRows) -> Any:
        b = e.builder
        signed = [
            b.ashr(b.shl(word, words_of(24 - 8 * k)), words_of(24)) for word in quads(e, rows, 192) for k in range(4)
        ]
        return halves_at(e, rows, 208), WordTable(e, signed)

    def codes(self, e: Emitter, rows: StridedRows, scales: Any, part: ir.Value) -> Iterator[BlockCodes]:
        b, (scale, table) = e.builder, scales
        low_rows, high_rows = (rows.at(e.times(part, size)) for size in (64, 32))
        low = [word for at in (0, 16, 32, 48) for word in quads(e, low_rows, at)]
        high = quads(e, high_rows, 128) + quads(e, high_rows, 144)
        for k in range(4):
            words = []
            for i in range(8):
                four = b.and_(shifted(e, low[8 * (k % 2) + i], 4 * (k // 2)), words_of(0x0F0F0F0F))
                two = b.and_(shifted(e, high[i], 2 * k), words_of(0x03030303))
                words.append(b.or_(four, b.shl(two, words_of(4))))
            yield BlockCodes(words, (scale, *table.two(part, k)))


class _ThreeBitCodes(IntegerFormat):
    """Q3_K; a part is 128 columns. Codes are multiplied by 8, for Q6_K's offset, and scales divided."""

    parts = 2

    def scales(self, e: Emitter, rows: StridedRows) -> Any:
        b, signed = e.builder, []
        words = quads(e, rows, 94)  # the scales from 96 on, followed by the block's
        for k in range(16):
            low, high = 2 + k % 8, 10 + k % 4
            four = b.lshr(words[low // 4], words_of(low % 4 * 8 + k // 8 * 4))
            two = b.lshr(words[high // 4], words_of(high % 4 * 8 + k // 4 * 2))
            six = b.or_(b.and_(four, words_of(15)), b.shl(b.and_(two, words_of(3)), words_of(4)))
            signed.append(b.sub(six, words_of(32)))
        return b.fmul(both_halves(e, words[3])[1], constant(1 / 8)), WordTable(e, signed)

    def codes(self, e: Emitter, rows: StridedRows, scales: Any, part: ir.Value) -> Iterator[BlockCodes]:
        b, (scale, table) = e.builder, scales
        raw = two_bit_words(e, rows, part, 32)
        masks = quads(e, rows, 0) + quads(e, rows, 16)
        for k in range(4):
            place = splat(e, b.add(e.times(part, 4), I64(k)))
            words = []
            for word, mask in zip(raw, masks, strict=True):
                third = b.shl(b.and_(b.lshr(mask, place), words_of(0x01010101)), words_of(5))
                words.append(b.or_(bits_of_bytes(e, word, 2 * k, 2, 3), third))
            yield BlockCodes(words, (scale, *table.two(part, k)))


class _TwoBitCodes(IntegerFormat):
    """Q2_K; a part is 128 columns. Codes stay in place as in ``_SuperNibbleCodes``."""

    parts = 2

    def scales(self, e: Emitter, rows: StridedRows) -> Any:
        b = e.builder
        scale, minus = both_halves(e, integers_at(e, rows, 80, I32))
        low, high = ([bits_of_bytes(e, word, at, 4, 0) for word in quads(e, rows, 0)] for at in (0, 4))
        small = [spread(e, word, (k, None, None, None)) for word in low for k in range(4)]
        minima = [spread(e, word, (k, None, k + 1, None)) for word in high for k in (0, 2)]
        scales = [b.fmul(scale, constant(2.0**-at)) for at in self._places()]
        return scales, b.fsub(constant(-0.0), minus), WordTable(e, small), WordTable(e, minima)

    def codes(self, e: Emitter, rows: StridedRows, scales: Any, part: ir.Value) -> Iterator[BlockCodes]:
        of_bits, minus, small, minima = scales
        raw = two_bit_words(e, rows, part, 16)
        for k, at in enumerate(self._places()):
            words = [bits_of_bytes(e, word, 2 * k, 2, at) for word in raw]
            number = e.builder.add(e.times(part, 4), I64(k))
            yield BlockCodes(words, (of_bits[k], *small.two(part, k), minima.get(number), minus))

    def _places(self) -> tuple[int, ...]:
        """Return the first bits of the codes of a part's four times 32 columns."""
        return (0, 2, 4, 6) if self.most > 3 else (0, 0, 0, 0)


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


class WordTable:
    """Vectors of integers, looked up by index."""

    def __init__(self, e: Emitter, values: Sequence[ir.Value]) -> None:
        self._e, self._place = e, cgutils.alloca_once(e.builder, ir.ArrayType(WORDS, len(values)))
        for i, value in enumerate(values):
            e.builder.store(value, e.builder.gep(self._place, [I32(0), I32(i)]))

    def get(self, i: ir.Value) -> ir.Value:
        return self._e.builder.load(self._e.builder.gep(self._place, [I64(0), i]))

    def two(self, part: ir.Value, k: int) -> tuple[ir.Value, ir.Value]:
        """Return the vectors of the 32 columns ``k`` of one of two parts, of 16 vectors for every 16 of 256 columns."""
        first = self._e.at(self._e.times(part, 8), 2 * k)
        return self.get(first), self.get(self._e.at(first, 1))


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


def two_bit_words(e: Emitter, rows: StridedRows, part: ir.Value, at: int) -> list[ir.Value]:
    """Return eight words with two bits of 128 columns, starting at ``at``."""
    here = rows.at(e.times(part, 32))
    return quads(e, here, at) + quads(e, here, at + 16)
