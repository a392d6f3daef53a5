"""Weight formats of GGUF files, and how sixteen rows become columns of floats in registers.

A row is a sequence of blocks; a block holds some weights as small integers, and their scale. The unpacked numbers equal
those of ``gguf.dequantize`` bit for bit: scales have so few bits that each product is exact or rounded once. The
formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from forerun.kernels.linear.weight_format import FLOAT32, Rows, WeightFormat
from forerun.kernels.runtime.vector_ir import (
    BYTES,
    FLOATS,
    HALVES,
    I32,
    I64,
    LANES,
    WORDS,
    Emitter,
    constant,
    features,
    wide,
    words_of,
)

FOUR_WORDS = ir.VectorType(I32, 4)
I16 = ir.IntType(16)
TOP = 2.0**-24
"""Factor that turns a byte in a word's highest place into its value."""


class GgufFormat(WeightFormat):
    """A format of GGUF files.

    Attributes:
        number: its ``ggml_type``.
    """

    def __init__(self, name: str, number: int, columns: int, size: int) -> None:
        super().__init__(name, FLOAT32, columns, size)
        self.number = number


class Floats(GgufFormat):
    """F32, F16 and BF16: numbers without a scale; sixteen of them count as a block."""

    def unpack(self, e: Emitter, rows: Rows, scales: Any, part: ir.Value) -> Iterator[ir.Value]:
        b = e.builder
        for at in range(0, self.bytes, 16):
            for word in quads(e, rows, at):
                if self.name == "F32":
                    yield b.bitcast(word, FLOATS)
                elif self.name == "F16":
                    yield from both_halves(e, word)
                else:
                    yield b.bitcast(b.shl(word, words_of(16)), FLOATS)
                    yield b.bitcast(b.and_(word, words_of(0xFFFF0000)), FLOATS)


class Nibbles(GgufFormat):
    """Q4_0, Q4_1, Q5_0, Q5_1: 32 numbers of four bits, the first 16 in the low halves of the bytes, and a scale.

    Q4_1 and Q5_1 have a minimum that is added; Q4_0 and Q5_0 subtract half the range. The fifth bits of Q5_0 and Q5_1
    are in a separate word.
    """

    def unpack(self, e: Emitter, rows: Rows, scales: Any, part: ir.Value) -> Iterator[ir.Value]:
        five, added = self.name.startswith("Q5"), self.name.endswith("1")
        scale, plus = both_halves(e, words_at(e, rows, 0)) if added else (halves_at(e, rows, 0), None)
        highest = words_at(e, rows, self.bytes - 20) if five else None
        least = 0 if added else -16 if five else -8
        words = quads(e, rows, self.bytes - 16)
        for column in range(32):
            word, shift = words[column % 16 // 4], column % 4 * 8 + column // 16 * 4
            if highest is None:
                number = nibble(e, word, shift, least)
            else:
                number = five_bits(e, word, shift, highest, column, least)
            yield e.builder.fmul(number, scale) if plus is None else e.fma(number, scale, plus)


class Bytes(GgufFormat):
    """Q8_0: 32 signed bytes and a scale."""

    def unpack(self, e: Emitter, rows: Rows, scales: Any, part: ir.Value) -> Iterator[ir.Value]:
        scale = e.builder.fmul(halves_at(e, rows, 0), constant(TOP))
        for at in (2, 18):
            for word in quads(e, rows, at):
                yield from (e.builder.fmul(number, scale) for number in bytes_of(e, word))


class Super(GgufFormat):
    """Q4_K and Q5_K: 256 numbers. Every 32 have a scale and a minimum of six bits, each times the block's own.

    The minimum is subtracted. A part is 64 numbers, the first 32 in the low bits.
    """

    parts = 4

    def scales(self, e: Emitter, rows: Rows) -> Any:
        b = e.builder
        both, first, second, third = quads(e, rows, 0)
        scale, minus = both_halves(e, both)
        scale, minus = b.fmul(scale, constant(TOP)), b.fsub(constant(-0.0), minus)
        table = VectorTable(e, 16)
        for k in range(4):
            table.put(k, b.fmul(scale, bits(e, first, 8 * k, 6)))
            table.put(8 + k, b.fmul(minus, bits(e, second, 8 * k, 6)))
            table.put(4 + k, b.fmul(scale, bits(e, third, 8 * k, 4, first, 8 * k + 6)))
            table.put(12 + k, b.fmul(minus, bits(e, third, 8 * k + 4, 4, second, 8 * k + 6)))
        return table

    def unpack(self, e: Emitter, rows: Rows, scales: Any, part: ir.Value) -> Iterator[ir.Value]:
        b, five = e.builder, self.name == "Q5_K"
        here = [e.at(row, e.times(part, 32)) for row in rows]
        words = [word for at in (self.bytes - 128, self.bytes - 112) for word in quads(e, here, at)]
        highest = [word for at in (16, 32) for word in quads(e, rows, at)] if five else []
        for high in (0, 1):
            number = b.add(e.times(part, 2), I64(high))
            scale, minus = scales.get(number), scales.get(b.add(number, I64(8)))
            for i, word in enumerate(words):
                low = b.and_(b.lshr(word, words_of(4)) if high else word, words_of(0x0F0F0F0F))
                if five:
                    bit = b.and_(b.lshr(highest[i], splat(e, number)), words_of(0x01010101))
                    low = b.or_(low, b.shl(bit, words_of(4)))
                yield from (e.fma(value, scale, minus) for value in bytes_of(e, low))


class Six(GgufFormat):
    """Q6_K: 256 numbers of six bits, four low and two high bits stored apart; every 16 have a signed scale.

    A part is 32 numbers.
    """

    parts = 8

    def scales(self, e: Emitter, rows: Rows) -> Any:
        b, table = e.builder, VectorTable(e, 16)
        scale = b.fmul(halves_at(e, rows, 208), constant(TOP * TOP))
        for j, word in enumerate(quads(e, rows, 192)):
            for k, number in enumerate(bytes_of(e, word)):
                table.put(4 * j + k, b.fmul(number, scale))
        return table

    def unpack(self, e: Emitter, rows: Rows, scales: Any, part: ir.Value) -> Iterator[ir.Value]:
        b = e.builder
        half, quarter = b.lshr(part, I64(2)), b.and_(part, I64(3))
        low_at = b.add(e.times(half, 64), e.times(b.and_(part, I64(1)), 32))
        low_rows, high_rows = [e.at(row, low_at) for row in rows], [e.at(row, e.times(half, 32)) for row in rows]
        low_shift = splat(e, e.times(b.lshr(quarter, I64(1)), 4))
        high_shift = splat(e, e.times(quarter, 2))
        for i in (0, 1):
            scale = scales.get(b.add(e.times(part, 2), I64(i)))
            words = zip(quads(e, low_rows, 16 * i), quads(e, high_rows, 128 + 16 * i), strict=True)
            for low, high in words:
                low = b.and_(b.lshr(low, low_shift), words_of(0x0F0F0F0F))
                high = b.shl(b.and_(b.lshr(high, high_shift), words_of(0x03030303)), words_of(4))
                moved = b.sub(b.bitcast(b.or_(low, high), BYTES), BYTES([32] * (4 * LANES)))
                yield from (b.fmul(number, scale) for number in bytes_of(e, b.bitcast(moved, WORDS)))


GGUF_FORMATS: tuple[GgufFormat, ...] = (
    Floats("F32", 0, 16, 64),
    Floats("F16", 1, 16, 32),
    Floats("BF16", 30, 16, 32),
    Nibbles("Q4_0", 2, 32, 18),
    Nibbles("Q4_1", 3, 32, 20),
    Nibbles("Q5_0", 6, 32, 22),
    Nibbles("Q5_1", 7, 32, 24),
    Bytes("Q8_0", 8, 32, 34),
    Super("Q4_K", 12, 256, 144),
    Super("Q5_K", 13, 256, 176),
    Six("Q6_K", 14, 256, 210),
)


# from bytes in sixteen rows to vectors with one lane per row: words, small integers and scales


class VectorTable:
    """Vectors of floats, looked up by index."""

    def __init__(self, e: Emitter, count: int) -> None:
        self._builder = e.builder
        self._place = cgutils.alloca_once(e.builder, ir.ArrayType(FLOATS, count))

    def put(self, i: int, value: ir.Value) -> None:
        """Store the vector at index ``i``."""
        self._builder.store(value, self._builder.gep(self._place, [I32(0), I32(i)]))

    def get(self, i: ir.Value) -> ir.Value:
        """The vector at index ``i``."""
        return self._builder.load(self._builder.gep(self._place, [I64(0), i]))


def bytes_of(e: Emitter, word: ir.Value) -> Iterator[ir.Value]:
    """The four signed bytes of each word as floats. Each is moved to the highest place, so it is divided by ``TOP``."""
    b = e.builder
    for k in range(4):
        high = b.shl(word, words_of(24 - 8 * k)) if k < 3 else word
        yield b.sitofp(b.and_(high, words_of(0xFF000000)) if k else high, FLOATS)


def bits(e: Emitter, word: ir.Value, at: int, count: int, upper: ir.Value | None = None, upper_at: int = 0) -> ir.Value:
    """``count`` bits of each word as a float; two bits of the word ``upper`` may go above them."""
    b = e.builder
    found = b.and_(b.lshr(word, words_of(at)), words_of((1 << count) - 1))
    if upper is not None:
        found = b.or_(found, b.shl(b.and_(b.lshr(upper, words_of(upper_at)), words_of(3)), words_of(count)))
    return b.sitofp(found, FLOATS)


def splat(e: Emitter, number: ir.Value) -> ir.Value:
    """A 64-bit integer in every word."""
    return e.everywhere(e.builder.trunc(number, I32))


def five_bits(e: Emitter, word: ir.Value, shift: int, highest: ir.Value, column: int, least: int) -> ir.Value:
    """Four bits of each word and a fifth of another as a float, plus ``least``."""
    b = e.builder
    low = b.and_(b.lshr(word, words_of(shift)), words_of(15))
    moved = b.lshr(highest, words_of(column - 4)) if column >= 4 else b.shl(highest, words_of(4 - column))
    number = b.or_(low, b.and_(moved, words_of(16)))
    return b.sitofp(b.add(number, words_of(least & 0xFFFFFFFF)) if least else number, FLOATS)


def nibble(e: Emitter, word: ir.Value, shift: int, least: int) -> ir.Value:
    """Four bits of each word as a float, plus ``least``."""
    b = e.builder
    moved = b.lshr(word, words_of(shift)) if shift else word
    if wide():
        kind = ir.FunctionType(FLOATS, (FLOATS, WORDS))
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.permvar.sf.512")
        return b.call(function, (FLOATS([float(least + i) for i in range(LANES)]), moved))
    number = b.and_(moved, words_of(15))
    return b.sitofp(b.add(number, words_of(least & 0xFFFFFFFF)) if least else number, FLOATS)


def quads(e: Emitter, rows: Rows, at: int) -> list[ir.Value]:
    """Four words of each row as four columns."""

    def load(i: int) -> ir.Value:
        return e.load(e.at(rows[i], at), FOUR_WORDS)

    def join(a: ir.Value, b: ir.Value) -> ir.Value:
        n = a.type.count
        return e.builder.shuffle_vector(a, b, ir.VectorType(I32, 2 * n)(list(range(2 * n))))

    a, b, c, d = (join(join(load(k), load(k + 4)), join(load(k + 8), load(k + 12))) for k in range(4))
    low, high, pair, other = [0, 4, 1, 5], [2, 6, 3, 7], [0, 1, 4, 5], [2, 3, 6, 7]
    ab, cd = [[e.within(*two, lanes) for lanes in (low, high)] for two in ((a, b), (c, d))]
    return [e.within(ab[i], cd[i], lanes) for i in (0, 1) for lanes in (pair, other)]


def words_at(e: Emitter, rows: Rows, at: int) -> ir.Value:
    """One word of each row."""
    found = WORDS(ir.Undefined)
    for i, row in enumerate(rows):
        found = e.builder.insert_element(found, e.load(e.at(row, at), I32), I32(i))
    return found


def halves_at(e: Emitter, rows: Rows, at: int) -> ir.Value:
    """One float16 of each row, as floats."""
    found = HALVES(ir.Undefined)
    for i, row in enumerate(rows):
        found = e.builder.insert_element(found, e.load(e.at(row, at), I16), I32(i))
    return widened(e, found)


def both_halves(e: Emitter, words: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The lower and the upper float16 of each word, as floats."""
    b = e.builder
    low, high = b.trunc(words, HALVES), b.trunc(b.lshr(words, words_of(16)), HALVES)
    return widened(e, low), widened(e, high)


def widened(e: Emitter, halves: ir.Value) -> ir.Value:
    """float16 numbers as floats."""
    b = e.builder
    if "+f16c" in features():
        return b.fpext(b.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    words = b.zext(halves, WORDS)
    size = b.bitcast(b.shl(b.and_(words, words_of(0x7FFF)), words_of(13)), FLOATS)
    bits = b.bitcast(b.fmul(size, constant(2.0**112)), WORDS)
    return b.bitcast(b.or_(bits, b.shl(b.and_(words, words_of(0x8000)), words_of(16))), FLOATS)
