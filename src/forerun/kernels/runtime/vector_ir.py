"""Write vector code directly in LLVM, for loops that the compiler does not vectorise.

LLVM lowers vector types, ``fma`` and ``prefetch`` to every instruction set: 16 floats are one register of AVX-512, two
of AVX2, or four of NEON.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numba.extending
from llvmlite import ir
from numba import types
from numba.core import cgutils, codegen, config

LANES = 16
LINE = 4 * LANES
"""Bytes per vector, and per cache line."""
EXP2 = (
    1.0,
    0.6931471824645996,
    0.24022646248340607,
    0.05550328642129898,
    0.009618489071726799,
    0.0013399930903688073,
    0.0001534581242594868,
)
"""Polynomial for 2 ** x, abs(x) <= 1/2, with the least relative error (2e-9); in float32 within one unit."""
ROUND = 1.5 * 2.0**23
"""Adding this to a small float rounds it to an integer, in the last bits."""

I32, I64, F32, F64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
FLOATS, WORDS, FOUR = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(F32, 4)
HALVES, BYTE = ir.VectorType(ir.IntType(16), LANES), ir.IntType(8)
BYTES = ir.VectorType(BYTE, 4 * LANES)

Code = tuple[Any, Callable[..., Any]]


@functools.cache
def features() -> str:
    """Return the processor's features, in LLVM's notation."""
    return str(codegen.get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES)


def wide() -> bool:
    """Return whether 32 registers hold a vector each."""
    return "+avx512f" in features()


def fused() -> bool:
    """Return whether kernels can be used."""
    return unusable() is None


def unusable() -> str | None:
    """Return why kernels cannot be used (no compiler, Windows, no ``fma``), or None if they can."""
    if config.DISABLE_JIT:
        return "numba's compiler is switched off (NUMBA_DISABLE_JIT)"
    if sys.platform == "win32":
        return "kernels yield cores by sched_yield, which Windows lacks"
    if "+fma" in features() or platform.machine().lower() in ("aarch64", "arm64"):
        return None
    return "the processor has no fused multiply-add"


def intrinsic(function: Callable[..., Code]) -> Any:
    """Let compiled functions call a function that writes LLVM code."""
    return numba.extending.intrinsic(function)


def llvm_function(result: Any = types.void, constants: int = 0) -> Callable[[Callable[..., ir.Value | None]], Any]:
    """Let compiled functions call a function that writes LLVM code, given an ``Emitter`` and integers. ``result`` is
    the value's type. Code depends on the first ``constants`` integers, known when compiling; numba caches code by
    them."""

    def mark(emit: Callable[..., ir.Value | None]) -> Any:
        @functools.wraps(emit)  # numba reads its parameters; the first one stands for numba's own
        def code(typing: Any, *kinds: Any) -> Code:
            known = [kind.literal_value for kind in kinds[:constants]]

            def write(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
                return emit(Emitter(builder), *known, *values[constants:]) or context.get_dummy_value()

            return result(*kinds[:constants], *(types.int64,) * (len(kinds) - constants)), write

        return numba.extending.intrinsic(prefer_literal=constants > 0)(code)

    return mark


class Emitter:
    """Writes vector instructions. Addresses are integers; loads may be unaligned, stores need even addresses."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def at(self, address: ir.Value, *offsets: ir.Value | int) -> ir.Value:
        for offset in offsets:
            address = self.builder.add(address, I64(offset) if isinstance(offset, int) else offset)
        return address

    def times(self, a: ir.Value, b: ir.Value | int) -> ir.Value:
        """Multiply two integers."""
        return self.builder.mul(a, I64(b) if isinstance(b, int) else b)

    def hidden(self, value: ir.Value) -> ir.Value:
        """Hide from LLVM how an integer was computed."""
        kind = ir.FunctionType(value.type, (value.type,))
        return self.builder.asm(kind, "", "=r,0", (value,), False)

    def computed_here(self, vector: ir.Value) -> ir.Value:
        """Return a vector that LLVM computes between the barriers around this place; without AVX-512, wherever it
        likes."""
        if not wide():
            return vector
        kind = ir.FunctionType(vector.type, (vector.type,))
        return self.builder.asm(kind, "", "=v,0", (vector,), True)

    @contextmanager
    def interleaved(self, pieces: int) -> Iterator[Callable[[], None]]:
        """Interleave streams of instructions without branches: a piece of each, a barrier, the next piece of each.
        Yields a function to call between two streams. Without 32 registers the streams stay one after the other."""
        b, written = self.builder, self.builder.block.instructions
        starts, pieces = [len(written)], pieces if wide() else 1
        yield lambda: starts.append(len(written))
        streams = [written[first:end] for first, end in pairwise([*starts, len(written)])]
        del written[starts[0] :]
        for piece in range(pieces):
            for stream in streams:
                written += stream[piece * len(stream) // pieces : (piece + 1) * len(stream) // pieces]
            b.position_at_end(b.block)
            self.barrier()

    def barrier(self) -> None:
        """Keep LLVM from moving loads, stores and prefetches past this place; the processor may."""
        self.builder.asm(ir.FunctionType(ir.VoidType(), ()), "", "~{memory}", (), True)

    def load(self, address: ir.Value, kind: ir.Type = FLOATS) -> ir.Value:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def store(self, value: ir.Value, address: ir.Value) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=2)

    def prefetch(self, address: ir.Value) -> None:
        """Prefetch the line at ``address``, which may be invalid."""
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), (byte, I32, I32, I32))
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, (self.builder.inttoptr(address, byte), I32(0), I32(2), I32(1)))

    def variable(self, value: ir.Value) -> ir.Value:
        """Return a stack variable set to ``value`` here; the optimiser turns it into a register."""
        place = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, place)
        return place

    @contextmanager
    def loop(self, count: ir.Value) -> Iterator[ir.Value]:
        """Repeat the code inside; yields the counter."""
        with cgutils.for_range(self.builder, count, intp=I64) as loop:
            yield loop.index

    def cases(self, number: ir.Value, values: Iterable[int]) -> Iterator[int]:
        """Write a loop's body once per value; only the case that equals ``number`` runs."""
        for value in values:
            with self.builder.if_then(self.builder.icmp_signed("==", number, I64(value))):
                yield value

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Return a * b + c of vectors, rounded once."""
        kind = ir.FunctionType(a.type, (a.type,) * 3)
        name = f"llvm.fma.v{a.type.count}f{32 if a.type.element == F32 else 64}"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), (a, b, c))

    def dots(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Add to each lane of c four products of unsigned bytes of ``a`` and signed bytes of ``b`` (AVX-512)."""
        kind = ir.FunctionType(WORDS, (WORDS,) * 3)
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        return self.builder.call(function, (c, a, b))

    def larger(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return the maximum of ``a`` and ``b``, lane by lane."""
        integral = a.type == WORDS
        more = self.builder.icmp_signed(">", a, b) if integral else self.builder.fcmp_ordered(">", a, b)
        return self.builder.select(more, a, b)

    def largest(self, x: ir.Value) -> ir.Value:
        """Return the largest float of a vector."""
        kind = ir.FunctionType(F32, (FLOATS,))
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.vector.reduce.fmax.v{LANES}f32")
        return self.builder.call(function, (x,), fastmath=("nnan",))

    def total(self, x: ir.Value) -> ir.Value:
        """Sum a vector's floats, in no fixed order."""
        kind = ir.FunctionType(F32, (F32, FLOATS))
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
        return self.builder.call(function, (F32(-0.0), x), fastmath=("reassoc",))

    def exp2(self, x: ir.Value) -> ir.Value:
        """Return 2 ** x for x <= 0: within one unit in the last place, 0 below -126.5, NaN for NaN."""
        b = self.builder
        x = self.larger(constant(-127.0), x)
        shifted = b.fadd(x, constant(ROUND))
        rest = b.fsub(x, b.fsub(shifted, constant(ROUND)))
        power = constant(EXP2[-1])
        for coefficient in EXP2[-2::-1]:
            power = self.fma(power, rest, constant(coefficient))
        exponent = b.add(b.bitcast(shifted, WORDS), words_of(127))
        return b.fmul(power, b.bitcast(b.shl(exponent, words_of(23)), FLOATS))

    def every_fourth(self, a: ir.Value, first: int) -> ir.Value:
        """Return every fourth of 64 bytes from ``first`` on: 16 bytes."""
        return self.pick(a, a, list(range(first, 4 * LANES, 4)))

    def everywhere(self, value: ir.Value) -> ir.Value:
        """Repeat one float or integer, or four floats, across the vector."""
        if value.type == I32:
            value = self.builder.insert_element(WORDS(ir.Undefined), value, I32(0))
            return self.pick(value, value, [0] * LANES)
        if value.type == F32:
            value = self.builder.insert_element(FOUR(ir.Undefined), value, I32(0))
            return self.pick(value, value, [0] * LANES)
        return self.pick(value, value, [0, 1, 2, 3] * (LANES // 4))

    def within(self, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
        """Shuffle each group of four lanes alike: 0 to 3 pick lanes of ``a``, 4 to 7 those of ``b``."""
        groups = range(0, LANES, 4)
        return self.pick(a, b, [g + lane if lane < 4 else g + LANES + lane - 4 for g in groups for lane in lanes])

    def pick(self, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
        """Pick lanes of ``a`` followed by ``b``."""
        return self.builder.shuffle_vector(a, b, ir.VectorType(I32, len(lanes))(lanes))


def constant(value: float) -> ir.Constant:
    """Return a vector with one number in all lanes."""
    return FLOATS([value] * LANES)


def words_of(value: int) -> ir.Constant:
    """Return a vector with one integer in all lanes."""
    return WORDS([value] * LANES)
