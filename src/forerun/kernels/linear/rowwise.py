"""A decoder layer's operations on single rows: norms, rotary positions, gates, and type conversions.

Sums and products are float32, and a row's result depends only on that row. ``kind`` is the type of weights and of a
linear layer's input: 0 float32, 1 bfloat16. Arguments are addresses, or counts of vectors of 16 numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir
from numba import types

from forerun.kernels.runtime.vector_ir import (
    F32,
    FLOATS,
    HALVES,
    I64,
    LINE,
    WORDS,
    Emitter,
    constant,
    llvm_function,
    words_of,
)

HALF_LINE = LINE // 2
LOG2E = 1.4426950408889634
TO_WORDS, TO_FLOATS, TO_SUM = 0, 1, 2
"""Where a scaled row goes: to a linear layer's input (in its type), to floats, or added to existing floats."""
SILU, GELU = 0, 1
"""Activations of a gate; GELU in its tanh approximation."""


@llvm_function(types.float32)
def squares(e: Emitter, x: ir.Value, vectors: ir.Value) -> ir.Value:
    """Sum a row's squares."""
    total = e.variable(constant(0.0))
    with e.loop(vectors) as i:
        value = e.load(e.at(x, e.times(i, LINE)))
        e.builder.store(e.fma(value, value, e.builder.load(total)), total)
    return e.total(e.builder.load(total))


@llvm_function()
def scale(
    e: Emitter, kind: ir.Value, mode: ir.Value, x: ir.Value, weight: ir.Value, one: ir.Value, factor: ir.Value,
    vectors: ir.Value, to: ir.Value,
) -> None:  # fmt: skip
    """Multiply a row by the float at ``factor`` and a weight (plus 1 if ``one``); ``mode`` says where it goes."""
    b = e.builder
    for which in e.cases(mode, (TO_WORDS, TO_FLOATS, TO_SUM)):
        for half in by_kind(e, kind):
            times = e.everywhere(e.load(factor, F32))
            plus = e.everywhere(b.sitofp(one, F32))
            with e.loop(vectors) as i:
                value = b.fmul(e.load(e.at(x, e.times(i, LINE))), times)
                value = b.fmul(value, b.fadd(number(e, half, weight, i), plus))
                if which == TO_WORDS:
                    put(e, half, value, to, i)
                else:
                    place = e.at(to, e.times(i, LINE))
                    e.store(b.fadd(e.load(place), value) if which == TO_SUM else value, place)


@llvm_function()
def words(e: Emitter, kind: ir.Value, x: ir.Value, vectors: ir.Value, to: ir.Value) -> None:
    """Convert floats to a linear layer's input type."""
    for half in by_kind(e, kind):
        with e.loop(vectors) as i:
            put(e, half, e.load(e.at(x, e.times(i, LINE))), to, i)


@llvm_function()
def widen(e: Emitter, kind: ir.Value, source: ir.Value, factor: ir.Value, vectors: ir.Value, to: ir.Value) -> None:
    """Convert a row of weights to floats, times the float at ``factor``."""
    for half in by_kind(e, kind):
        times = e.everywhere(e.load(factor, F32))
        with e.loop(vectors) as i:
            e.store(e.builder.fmul(number(e, half, source, i), times), e.at(to, e.times(i, LINE)))


@llvm_function()
def rotate(e: Emitter, x: ir.Value, cos: ir.Value, sin: ir.Value, vectors: ir.Value) -> None:
    """Rotate a head's pairs (i, i + half) by their angles. A half, the cosines and the sines are ``vectors`` each."""
    b = e.builder
    second = e.at(x, e.times(vectors, LINE))
    with e.loop(vectors) as i:
        here = e.times(i, LINE)
        one, two, c, s = (e.load(e.at(address, here)) for address in (x, second, cos, sin))
        e.store(b.fsub(b.fmul(one, c), b.fmul(two, s)), e.at(x, here))
        e.store(b.fadd(b.fmul(two, c), b.fmul(one, s)), e.at(second, here))


@llvm_function()
def gated(e: Emitter, kind: ir.Value, activation: ir.Value, gate: ir.Value, up: ir.Value, to: ir.Value) -> None:
    """Multiply a vector of activated gates by ``up``, in the next linear layer's input type."""
    for which in e.cases(activation, (SILU, GELU)):
        for half in by_kind(e, kind):
            g = e.load(gate)
            active = _silu(e, g) if which == SILU else _gelu(e, g)
            put(e, half, e.builder.fmul(active, e.load(up)), to, I64(0))


@llvm_function()
def soften(e: Emitter, scores: ir.Value, vectors: ir.Value, cap: ir.Value) -> None:
    """Compute cap * tanh(x / cap) of every number; ``cap`` is the address of a float."""
    b = e.builder
    most = e.everywhere(e.load(cap, F32))
    with e.loop(vectors) as i:
        place = e.at(scores, e.times(i, LINE))
        e.store(b.fmul(_tanh(e, b.fdiv(e.load(place), most)), most), place)


def number(e: Emitter, half: bool, address: ir.Value, index: ir.Value) -> ir.Value:
    """Load the vector at an index, float32 or bfloat16, as floats."""
    if not half:
        return e.load(e.at(address, e.times(index, LINE)))
    halves = e.load(e.at(address, e.times(index, HALF_LINE)), HALVES)
    return e.builder.bitcast(e.builder.shl(e.builder.zext(halves, WORDS), words_of(16)), FLOATS)


def put(e: Emitter, half: bool, value: ir.Value, address: ir.Value, index: ir.Value) -> None:
    """Store floats as float32 or bfloat16, rounded to nearest, ties to even."""
    if not half:
        e.store(value, e.at(address, e.times(index, LINE)))
        return
    b = e.builder
    bits = b.bitcast(value, WORDS)
    odd = b.and_(b.lshr(bits, words_of(16)), words_of(1))
    rounded = b.lshr(b.add(bits, b.add(odd, words_of(0x7FFF))), words_of(16))
    quiet = b.or_(b.lshr(bits, words_of(16)), words_of(0x40))
    e.store(
        b.trunc(b.select(b.fcmp_unordered("uno", value, value), quiet, rounded), HALVES),
        e.at(address, e.times(index, HALF_LINE)),
    )


def by_kind(e: Emitter, kind: ir.Value) -> Iterator[bool]:
    """Write a loop's body for bfloat16 (True) and for float32; ``kind`` selects one at run time."""
    with e.builder.if_else(e.builder.icmp_signed("==", kind, I64(1))) as (then, otherwise):
        with then:
            yield True
        with otherwise:
            yield False


def _falling(e: Emitter, x: ir.Value, factor: float) -> tuple[ir.Value, ir.Value, ir.Value]:
    b = e.builder
    negative = b.fcmp_ordered("<", x, constant(0.0))
    size = b.select(negative, x, b.fsub(constant(-0.0), x))
    return e.exp2(b.fmul(size, constant(factor * LOG2E))), negative, constant(1.0)


def _silu(e: Emitter, x: ir.Value) -> ir.Value:
    b = e.builder
    power, negative, one = _falling(e, x, 1.0)
    return b.fmul(x, b.fdiv(b.select(negative, power, one), b.fadd(one, power)))


def _tanh(e: Emitter, x: ir.Value) -> ir.Value:
    b = e.builder
    power, negative, one = _falling(e, x, 2.0)
    size = b.fdiv(b.fsub(one, power), b.fadd(one, power))
    return b.select(negative, b.fsub(constant(-0.0), size), size)


def _gelu(e: Emitter, x: ir.Value) -> ir.Value:
    b = e.builder
    cubic = b.fmul(x, b.fmul(x, x))
    inner = b.fmul(constant(0.7978845608028654), b.fadd(x, b.fmul(constant(0.044715), cubic)))
    return b.fmul(b.fmul(constant(0.5), x), b.fadd(constant(1.0), _tanh(e, inner)))
