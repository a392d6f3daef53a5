"""Quantise a linear layer's inputs to eight-bit integers, each token alone, in blocks of 32 columns with a scale each.

A block of numbers below ``LEAST_SIZE`` becomes zeros. Infinity or NaN becomes the scale, so outputs are not finite.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from forerun.kernels.linear.block_sums import (
    HALVES_SHIFT,
    X_BLOCK,
    X_HALVES_SHIFTS,
    X_SCALE,
    X_SCALED_SUM,
    X_SHIFTS,
    X_SUMS,
)
from forerun.kernels.linear.byte_products import pair_of
from forerun.kernels.runtime.vector_ir import (
    F32,
    I32,
    LANES,
    LINE,
    ROUND,
    WORDS,
    Emitter,
    constant,
    llvm_function,
    words_of,
)

LARGEST = 127.0
LEAST_SIZE = 2.0**-120
"""``LARGEST`` divided by it is a float."""


@llvm_function()
def quantise(e: Emitter, x: ir.Value, blocks: ir.Value, to: ir.Value) -> None:
    """Quantise a row of floats to blocks of ``X_BLOCK`` bytes; see ``block_sums.py``."""
    b = e.builder
    with e.loop(blocks) as block:
        source, target = e.at(x, e.times(block, 2 * LINE)), e.at(to, e.times(block, X_BLOCK))
        halves = [e.load(e.at(source, i * LINE)) for i in (0, 1)]
        sizes = [b.and_(b.bitcast(half, WORDS), words_of(0x7FFFFFFF)) for half in halves]
        size = b.bitcast(_largest(e, e.larger(*sizes)), F32)  # a NaN's bits are larger than any number's
        small = b.fcmp_ordered("<", size, F32(LEAST_SIZE))
        inverse = e.everywhere(b.select(small, F32(0.0), b.fdiv(F32(LARGEST), size)))
        scale = b.fdiv(size, F32(LARGEST))
        rounded_halves = []
        for i, half in enumerate(halves):
            rounded = b.bitcast(b.fadd(b.fmul(half, inverse), constant(ROUND)), WORDS)
            integers = b.ashr(b.shl(rounded, words_of(24)), words_of(24))
            e.store(b.trunc(integers, ir.VectorType(ir.IntType(8), LANES)), e.at(target, i * LANES))
            rounded_halves.append(integers)
        sums = _both_sums(e, pair_of(e, *rounded_halves))
        first, second = b.ashr(b.shl(sums, I32(16)), I32(16)), b.ashr(sums, I32(16))
        total = b.add(first, second)
        e.store(sums, e.at(target, X_SUMS))
        for offset, at in X_SHIFTS.items():
            e.store(b.mul(total, I32(-offset)), e.at(target, at))
        for half, at in zip((first, second), X_HALVES_SHIFTS, strict=True):
            e.store(b.mul(half, I32(-HALVES_SHIFT)), e.at(target, at))
        e.store(scale, e.at(target, X_SCALE))
        e.store(b.fmul(scale, b.sitofp(total, F32)), e.at(target, X_SCALED_SUM))


def _largest(e: Emitter, x: ir.Value) -> ir.Value:
    kind = ir.FunctionType(I32, (WORDS,))
    function = cgutils.get_or_insert_function(e.builder.module, kind, f"llvm.vector.reduce.smax.v{LANES}i32")
    return e.builder.call(function, (x,))


def _both_sums(e: Emitter, pairs: ir.Value) -> ir.Value:
    b, count = e.builder, LANES
    while count > 1:
        count //= 2
        lanes = [ir.VectorType(I32, count)(list(range(first, first + count))) for first in (0, count)]
        shorts = ir.VectorType(ir.IntType(16), 2 * count)
        low, high = (b.bitcast(b.shuffle_vector(pairs, pairs, some), shorts) for some in lanes)
        pairs = b.bitcast(b.add(low, high), ir.VectorType(I32, count))
    return b.extract_element(pairs, I32(0))
