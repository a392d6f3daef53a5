"""From bytes in sixteen rows to vectors with one lane per row: words, small integers and scales."""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir
from numba.core import cgutils

from forerun.kernels.linear.weight_format import Rows
from forerun.kernels.runtime.vector_ir import (
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
