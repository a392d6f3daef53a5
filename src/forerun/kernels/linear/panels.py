"""Products of a few tokens' rows with a panel of a weight matrix, which is read once, where the model stores it.

A panel has as many rows of the matrix as a vector has lanes. A tile of it, one vector from each row, is transposed in
registers, so that each lane belongs to one output. Every token has its own vector of sums and adds its products in the
order of the columns. So an output does not depend on which tokens share the pass, how many there are, or which thread
computes it. All of this takes less time than memory needs to deliver the next tile.

Tokens are transposed as well, once per layer: one line of memory holds the same word of all tokens.

A *word* is what a token broadcasts to all lanes: a float, a pair of bfloat16 or a double. The two products of a pair
are added one after the other, or by ``vdpbf16ps`` if the processor has it. All arguments are addresses or counts;
``row`` is the stride between rows in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba.extending
from llvmlite import ir
from numba.core import cgutils

from forerun.kernels.runtime.vector_ir import (
    F32,
    FLOATS,
    I32,
    I64,
    LINE,
    WORDS,
    Code,
    Emitter,
    features,
    intrinsic_code,
)

F64X8 = ir.VectorType(ir.DoubleType(), 8)


class _BFloat(ir.Type):  # type: ignore[misc]
    """bfloat16, for which llvmlite has no name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOATS = ir.VectorType(_BFloat(), 32)


def pairs() -> bool:
    """Whether the processor can multiply pairs of bfloat16."""
    return "+avx512bf16" in features()


class Kind:
    """One type of number.

    Attributes:
        lanes: words per vector, and rows per panel.
        vector: type of the accumulators.
        word: type of what a token broadcasts.
    """

    def __init__(self, lanes: int, vector: ir.VectorType, word: ir.Type) -> None:
        self.lanes, self.vector, self.word = lanes, vector, word
        self.bytes = LINE // lanes

    def broadcast(self, e: Emitter, word: ir.Value) -> ir.Value:
        """A word in every lane."""
        b = e.builder
        one = b.insert_element(ir.VectorType(self.word, self.lanes)(ir.Undefined), word, I32(0))
        return b.shuffle_vector(one, one, ir.VectorType(I32, self.lanes)([0] * self.lanes))

    def add(self, e: Emitter, word: ir.Value, column: ir.Value, total: ir.Value) -> ir.Value:
        """``total`` plus the products of a broadcast word and a column of the tile."""
        return _fma(e, self.broadcast(e, word), column, total)


class _Pairs(Kind):
    """Pairs of bfloat16, summed as floats: the first of each pair, then the second."""

    def add(self, e: Emitter, word: ir.Value, column: ir.Value, total: ir.Value) -> ir.Value:
        b = e.builder
        x, w = self.broadcast(e, word), b.bitcast(column, WORDS)
        if pairs():
            kind = ir.FunctionType(FLOATS, (FLOATS, BFLOATS, BFLOATS))
            function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
            return b.call(function, (total, b.bitcast(x, BFLOATS), b.bitcast(w, BFLOATS)))
        sixteen, high = WORDS([16] * 16), WORDS([0xFFFF0000] * 16)
        for one, other in ((b.shl(x, sixteen), b.shl(w, sixteen)), (b.and_(x, high), b.and_(w, high))):
            total = _fma(e, b.bitcast(one, FLOATS), b.bitcast(other, FLOATS), total)
        return total


KINDS = (Kind(16, FLOATS, F32), _Pairs(16, FLOATS, I32), Kind(8, F64X8, ir.DoubleType()))
"""float32, bfloat16, float64."""


def _fma(e: Emitter, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    kind = ir.FunctionType(a.type, (a.type,) * 3)
    name = "llvm.fma.v16f32" if a.type == FLOATS else "llvm.fma.v8f64"
    return e.builder.call(cgutils.get_or_insert_function(e.builder.module, kind, name), (a, b, c))


def transposed(e: Emitter, kind: Kind, rows: list[ir.Value]) -> list[ir.Value]:
    """The columns of a tile, from its rows."""
    n, pick = kind.lanes, ir.VectorType(I32, kind.lanes)

    def shuffle(a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
        return e.builder.shuffle_vector(a, b, pick(lanes))

    width = n // 4  # 128-bit words per vector, and rows per group
    groups = [rows[i : i + width] for i in range(0, n, width)]
    if width == 4:
        unpack = [[j + w for j in range(0, n, 4) for w in (k, k + n, k + 1, k + n + 1)] for k in (0, 2)]
        both = [[0, 1, n, n + 1], [2, 3, n + 2, n + 3]]
        wide = [[j + w for j in range(0, n, 4) for w in some] for some in both]
        mixed = []
        for r in groups:
            low0, high0 = (shuffle(r[0], r[1], lanes) for lanes in unpack)
            low1, high1 = (shuffle(r[2], r[3], lanes) for lanes in unpack)
            mixed.append([shuffle(a, b, lanes) for a, b in ((low0, low1), (high0, high1)) for lanes in wide])
    else:
        pair = [[j + w for j in range(0, n, 2) for w in (k, k + n)] for k in (0, 1)]
        mixed = [[shuffle(r[0], r[1], lanes) for lanes in pair] for r in groups]

    def blocks(a: ir.Value, b: ir.Value, first: int) -> ir.Value:
        """Every second 128-bit block of ``a``, then of ``b``."""
        return shuffle(a, b, [s + k * width + w for s in (0, n) for k in (first, first + 2) for w in range(width)])

    columns: list[ir.Value] = [None] * n
    for j in range(width):
        q = [mixed[g][j] for g in range(4)]
        for odd in (0, 1):
            a, c = blocks(q[0], q[1], odd), blocks(q[2], q[3], odd)
            columns[odd * width + j] = blocks(a, c, 0)
            columns[(2 + odd) * width + j] = blocks(a, c, 1)
    return columns


FEW = (1, 2, 3, 4, 6, 8, 12, 16)
"""Token counts with code of their own in ``few``, which uses tiles as they are transposed."""
TOGETHER = 4
"""The most tokens whose sums fit in registers beside a tile. For more, a tile's columns go through memory."""
MANY = (4, 8, 12, 16)
"""Token counts with code of their own in ``many``, which uses columns that were transposed before."""


def by_kind(function: Callable[..., Code]) -> Any:
    """Mark a function that writes code for one kind of number; its first argument, a constant, says which."""
    return numba.extending.intrinsic(prefer_literal=True)(function)


@by_kind
def few(
    typing: Any, kind: Any, tokens: Any, w: Any, row: Any, last: Any, x: Any, steps: Any, ahead: Any, sums: Any
) -> Code:
    """Add to ``sums`` ``[tokens][lanes]`` the products of the tokens' words at ``x`` with the panel at ``w``.

    Rows after ``last`` repeat row ``last``. While a tile at ``w`` is used, the corresponding one at ``ahead`` is
    prefetched.
    """
    each = KINDS[kind.literal_value]
    return intrinsic_code(
        9, lambda e, _, tokens, *rest: _least_that_suffices(e, each, tokens, FEW, _few, rest), constant=kind
    )


@by_kind
def transpose(typing: Any, kind: Any, w: Any, row: Any, last: Any, steps: Any, to: Any) -> Code:
    """Write the columns of a panel to ``to``, one after the other."""
    each = KINDS[kind.literal_value]
    return intrinsic_code(6, lambda e, _, *rest: _transpose(e, each, *rest), constant=kind)


@by_kind
def many(
    typing: Any, kind: Any, tokens: Any, columns: Any, x: Any, steps: Any, ahead: Any, row: Any, sums: Any
) -> Code:
    """Add to ``sums`` the products of the words at ``x`` with the columns of ``steps`` tiles.

    Meanwhile prefetches the rows of the panel at ``ahead``.
    """
    each = KINDS[kind.literal_value]
    return intrinsic_code(
        8, lambda e, _, tokens, *rest: _least_that_suffices(e, each, tokens, MANY, _many, rest), constant=kind
    )


def _least_that_suffices(
    e: Emitter, kind: Kind, tokens: ir.Value, sizes: tuple[int, ...], emit: Callable[..., None], rest: Any
) -> None:
    """Write code for each of the token counts; at run time the smallest sufficient one is used."""
    b, before = e.builder, -1
    for size in sizes:
        if size <= kind.lanes:
            fits = b.and_(b.icmp_signed(">", tokens, I64(before)), b.icmp_signed("<=", tokens, I64(size)))
            with b.if_then(fits):
                emit(e, kind, size, *rest)
            before = size


def _few(
    e: Emitter, kind: Kind, size: int, w: ir.Value, row: ir.Value, last: ir.Value, x: ir.Value, steps: ir.Value,
    ahead: ir.Value, out: ir.Value,
) -> None:  # fmt: skip
    b = e.builder
    rows = [e.at(w, e.times(row, least(e, I64(i), last))) for i in range(kind.lanes)]
    asked = [e.at(ahead, e.times(row, i)) for i in range(kind.lanes)]
    sums = [e.variable(e.load(e.at(out, t * LINE), kind.vector)) for t in range(size)]
    tile = cgutils.alloca_once(b, ir.ArrayType(kind.vector, kind.lanes)) if size > TOGETHER else None
    with e.loop(steps) as step:
        here = e.times(step, LINE)
        for address in asked:
            e.prefetch(e.at(address, here))
        columns = transposed(e, kind, [e.load(e.at(address, here), kind.vector) for address in rows])
        words = e.at(x, e.times(here, kind.lanes))
        if tile is None:
            for i, column in enumerate(columns):
                _add(e, kind, column, e.at(words, i * LINE), sums)
        else:
            for i, column in enumerate(columns):
                b.store(column, b.gep(tile, [I32(0), I32(i)]))
            with e.loop(I64(kind.lanes)) as i:  # a short loop body: a longer one runs out of registers
                _add(e, kind, b.load(b.gep(tile, [I64(0), i])), e.at(words, e.times(i, LINE)), sums)
    for t in range(size):
        e.store(b.load(sums[t]), e.at(out, t * LINE))


def _add(e: Emitter, kind: Kind, column: ir.Value, words: ir.Value, sums: list[ir.Value]) -> None:
    """Add the products of one column and the tokens' words to the tokens' sums."""
    for t, total in enumerate(sums):
        word = e.load(e.at(words, t * kind.bytes), kind.word)
        e.builder.store(kind.add(e, word, column, e.builder.load(total)), total)


def _transpose(
    e: Emitter, kind: Kind, w: ir.Value, row: ir.Value, last: ir.Value, steps: ir.Value, to: ir.Value
) -> None:
    rows = [e.at(w, e.times(row, least(e, I64(i), last))) for i in range(kind.lanes)]
    with e.loop(steps) as step:
        here = e.times(step, LINE)
        tile = [e.load(e.at(address, here), kind.vector) for address in rows]
        place = e.at(to, e.times(here, kind.lanes))
        for i, column in enumerate(transposed(e, kind, tile)):
            e.store(column, e.at(place, i * LINE))


def _many(
    e: Emitter, kind: Kind, size: int, columns: ir.Value, x: ir.Value, steps: ir.Value, ahead: ir.Value,
    row: ir.Value, out: ir.Value,
) -> None:  # fmt: skip
    b = e.builder
    sums = [e.variable(e.load(e.at(out, t * LINE), kind.vector)) for t in range(size)]
    with e.loop(steps) as step, e.loop(I64(kind.lanes)) as i:  # a short loop body: a longer one runs out of registers
        e.prefetch(e.at(ahead, e.times(step, LINE), b.mul(row, i)))
        at = e.times(b.add(e.times(step, kind.lanes), i), LINE)
        _add(e, kind, e.load(e.at(columns, at), kind.vector), e.at(x, at), sums)
    for t in range(size):
        e.store(b.load(sums[t]), e.at(out, t * LINE))


def least(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """The smaller of two integers."""
    return e.builder.select(e.builder.icmp_signed("<", a, b), a, b)
