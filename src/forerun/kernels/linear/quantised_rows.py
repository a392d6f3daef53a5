"""Inputs of a linear layer as integers of eight bits, each token alone, in blocks of 32 columns with a scale each.

A block of smaller numbers than ``LEAST_SIZE`` becomes zeros. One with an infinite number or a NaN has such a scale, so
the outputs are not finite either.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from forerun.kernels.linear.block_sums import X_BLOCK, X_SCALE, X_SCALED_SUM, X_SUMS
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
"""The integer of a block's largest number."""
LEAST_SIZE = 2.0**-120
"""``LARGEST`` divided by it is a float."""


@llvm_function()
def quantise(e: Emitter, x: ir.Value, blocks: ir.Value, to: ir.Value) -> None:
    """Quantise a row of floats; writes blocks of ``X_BLOCK`` bytes, see ``block_sums.py``."""
    b, bits = e.builder, ir.IntType(32)
    with e.loop(blocks) as block:
        source, target = e.at(x, e.times(block, 2 * LINE)), e.at(to, e.times(block, X_BLOCK))
        halves = [e.load(e.at(source, i * LINE)) for i in (0, 1)]
        sizes = [b.and_(b.bitcast(half, WORDS), words_of(0x7FFFFFFF)) for half in halves]
        size = b.bitcast(_reduced(e, "smax", e.larger(*sizes)), F32)  # a NaN's bits are larger than any number's
        small = b.fcmp_ordered("<", size, F32(LEAST_SIZE))
        inverse = e.everywhere(b.select(small, F32(0.0), b.fdiv(F32(LARGEST), size)))
        scale = b.fdiv(size, F32(LARGEST))
        sums = []
        for i, half in enumerate(halves):
            rounded = b.bitcast(b.fadd(b.fmul(half, inverse), constant(ROUND)), WORDS)
            integers = b.ashr(b.shl(rounded, words_of(24)), words_of(24))
            e.store(b.trunc(integers, ir.VectorType(ir.IntType(8), LANES)), e.at(target, i * LANES))
            sums.append(_reduced(e, "add", integers))
        e.store(b.or_(b.and_(sums[0], bits(0xFFFF)), b.shl(sums[1], bits(16))), e.at(target, X_SUMS))
        e.store(scale, e.at(target, X_SCALE))
        e.store(b.fmul(scale, b.sitofp(b.add(*sums), F32)), e.at(target, X_SCALED_SUM))


def _reduced(e: Emitter, how: str, x: ir.Value) -> ir.Value:
    """All words of a vector as one."""
    kind = ir.FunctionType(I32, (WORDS,))
    return e.builder.call(
        cgutils.get_or_insert_function(e.builder.module, kind, f"llvm.vector.reduce.{how}.v{LANES}i32"), (x,)
    )
