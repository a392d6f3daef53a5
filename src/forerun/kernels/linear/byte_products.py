"""Sum products of small integers exactly, with the processor's best instructions.

Sums of 32-bit integers have the same bits in any order, and so on every processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from forerun.kernels.runtime.vector_ir import BYTES, I32, LANES, WORDS, Emitter, features, wide, words_of

SHORT = ir.IntType(16)
SHORT_MOST = 32767
"""Largest 16-bit integer; ``maddubs`` adds two products of an unsigned and a signed byte in 16 bits."""
LEAST_SIGNED_BYTE = 127


def bytes_by_words(e: Emitter, a: ir.Value, b: ir.Value, c: ir.Value, most: int) -> ir.Value:
    """Add to each word of ``c`` four products of unsigned bytes of ``a``, up to ``most``, and signed bytes of ``b``."""
    if "+avx512vnni" in features():
        return _called(e, "llvm.x86.avx512.vpdpbusd.512", WORDS, c, a, b)
    if "+avxvnni" in features():
        return _in_halves(e, lambda *parts: _called(e, "llvm.x86.avx512.vpdpbusd.256", parts[0].type, *parts), c, a, b)
    if not _multiplies_shorts():
        return _one_by_one(e, a, b, c)
    if 2 * most * LEAST_SIGNED_BYTE <= SHORT_MOST:
        return e.builder.add(c, _shorts(e, _pairs_of_bytes(e, a, b), _both(1)))
    return e.builder.add(e.builder.add(c, _shorts(e, *_even(e, a, b))), _shorts(e, *_odd(e, a, b)))


def shorts_by_words(e: Emitter, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Add to each word of ``c`` two products of signed 16-bit integers."""
    if "+avx512vnni" in features():
        return _called(e, "llvm.x86.avx512.vpdpwssd.512", WORDS, c, a, b)
    return e.builder.add(c, _shorts(e, a, b))


def takes_large_bytes() -> bool:
    """Return whether ``bytes_by_words`` costs no more for bytes above 127."""
    return "+avx512vnni" in features() or "+avxvnni" in features()


def ignores_high_halves() -> bool:
    """Return whether ``bytes_from_table`` ignores the high halves of codes, so that nothing has to clear them."""
    return "+avx512vbmi" in features()


def bytes_from_table(e: Emitter, codes: ir.Value, values: Sequence[int]) -> ir.Value:
    """Look up each byte, a number below 16, in a table of 16 values; see ``ignores_high_halves``."""
    b, indices = e.builder, e.builder.bitcast(codes, BYTES)
    kind = ir.IntType(8)
    if ignores_high_halves():  # indices have six bits there, and the table repeats every 16 bytes
        table = BYTES([kind(value) for value in values] * (BYTES.count // 16))
        return b.bitcast(_called(e, "llvm.x86.avx512.permvar.qi.512", BYTES, table, indices), WORDS)
    if "+avx512bw" in features():
        table = BYTES([kind(value) for value in values] * (BYTES.count // 16))
        return b.bitcast(_called(e, "llvm.x86.avx512.pshuf.b.512", BYTES, table, indices), WORDS)
    if "+avx2" in features():
        half = ir.VectorType(kind, BYTES.count // 2)
        table = half([kind(value) for value in values] * (half.count // 16))

        def look(part: ir.Value) -> ir.Value:
            found = _called(e, "llvm.x86.avx2.pshuf.b", half, table, b.bitcast(part, half))
            return b.bitcast(found, part.type)

        return _in_halves(e, look, codes)
    left = [BYTES([kind(value)] * BYTES.count) for value in values]
    for k in range(4):
        odd = b.icmp_unsigned(
            "!=", b.and_(indices, BYTES([kind(1 << k)] * BYTES.count)), BYTES([kind(0)] * BYTES.count)
        )
        left = [b.select(odd, high, low) for low, high in zip(left[::2], left[1::2], strict=True)]
    return b.bitcast(left[0], WORDS)


def pair_of(e: Emitter, first: ir.Value, second: ir.Value) -> ir.Value:
    """Pack the lower halves of two vectors' words as two 16-bit integers per word."""
    b = e.builder
    return b.or_(b.and_(first, words_of(0xFFFF)), b.shl(second, words_of(16)))


def spread(e: Emitter, words: ir.Value, places: Sequence[int | None]) -> ir.Value:
    """Return for each word one with the bytes at four places of it, or zero for None."""
    zeros = BYTES([0] * BYTES.count)
    lanes = [BYTES.count if place is None else 4 * i + place for i in range(LANES) for place in places]
    return e.builder.bitcast(e.pick(e.builder.bitcast(words, BYTES), zeros, lanes), WORDS)


def _multiplies_shorts() -> bool:
    return "+avx512bw" in features() if wide() else "+avx2" in features()


def _both(value: int) -> ir.Constant:
    return words_of((value & 0xFFFF) * 0x10001)


def _even(e: Emitter, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the first and third bytes of each word as 16-bit integers."""
    builder, kind = e.builder, ir.VectorType(SHORT, 2 * LANES)
    eight = kind([8] * kind.count)
    signed = builder.ashr(builder.shl(builder.bitcast(b, kind), eight), eight)
    return builder.and_(a, words_of(0x00FF00FF)), builder.bitcast(signed, WORDS)


def _odd(e: Emitter, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the second and fourth bytes of each word as 16-bit integers."""
    builder, kind = e.builder, ir.VectorType(SHORT, 2 * LANES)
    eight = kind([8] * kind.count)
    parts = builder.lshr(builder.bitcast(a, kind), eight), builder.ashr(builder.bitcast(b, kind), eight)
    return builder.bitcast(parts[0], WORDS), builder.bitcast(parts[1], WORDS)


def _shorts(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    builder = e.builder
    if _multiplies_shorts():
        return _of_narrow_numbers(e, SHORT, "llvm.x86.avx512.pmaddw.d.512", "llvm.x86.avx2.pmadd.wd", I32, a, b)
    high = builder.mul(builder.ashr(a, words_of(16)), builder.ashr(b, words_of(16)))
    low = [builder.ashr(builder.shl(each, words_of(16)), words_of(16)) for each in (a, b)]
    return builder.add(builder.mul(*low), high)


def _pairs_of_bytes(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    byte = ir.IntType(8)
    names = "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx2.pmadd.ub.sw"
    return _of_narrow_numbers(e, byte, *names, SHORT, a, b)


def _of_narrow_numbers(
    e: Emitter, kind: ir.Type, wide_name: str, half_name: str, result: ir.Type, a: ir.Value, b: ir.Value
) -> ir.Value:
    builder = e.builder

    def call(name: str, *parts: ir.Value) -> ir.Value:
        words = parts[0].type.count
        given, found = (ir.VectorType(each, words * 32 // each.width) for each in (kind, result))
        value = _called(e, name, found, *(builder.bitcast(part, given) for part in parts))
        return builder.bitcast(value, parts[0].type)

    if wide():
        return call(wide_name, a, b)
    return _in_halves(e, lambda *parts: call(half_name, *parts), a, b)


def _one_by_one(e: Emitter, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    builder = e.builder
    for k in range(4):
        unsigned = builder.and_(builder.lshr(a, words_of(8 * k)), words_of(255))
        signed = builder.ashr(builder.shl(b, words_of(24 - 8 * k)), words_of(24))
        c = builder.add(c, builder.mul(unsigned, signed))
    return c


def _in_halves(e: Emitter, function: Callable[..., ir.Value], *vectors: ir.Value) -> ir.Value:
    b, half = e.builder, LANES // 2
    parts = [
        function(*(b.shuffle_vector(v, v, _indices(range(first, first + half))) for v in vectors))
        for first in (0, half)
    ]
    return b.shuffle_vector(*parts, _indices(range(LANES)))


def _indices(lanes: Sequence[int]) -> ir.Constant:
    return ir.VectorType(I32, len(lanes))(list(lanes))


def _called(e: Emitter, name: str, result: ir.Type, *values: ir.Value) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return e.builder.call(cgutils.get_or_insert_function(e.builder.module, kind, name), values)
