"""Weight formats: how sixteen rows of a matrix in memory become vectors with one number of each row.

A linear layer multiplies such columns by its tokens' words (``panels.py``). A *word* is what a token broadcasts to
all lanes: a float, a pair of bfloat16 or a double. ``gguf_formats.py`` has the formats of GGUF files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from forerun.kernels.runtime.vector_ir import F32, F64, FLOATS, HALVES, I32, LANES, LINE, Emitter, features, wide

Rows = Sequence[ir.Value]
"""Addresses of one place in each row of a panel."""


class _BFloat(ir.Type):  # type: ignore[misc]
    """bfloat16, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def multiplies_pairs() -> bool:
    """Return whether the processor can multiply pairs of bfloat16."""
    return "+avx512bf16" in features()


def add_pairs(e: Emitter, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """Add both products of two vectors of bfloat16 pairs to ``total``, lane by lane (AVX-512). Denormals count as 0."""
    kind = ir.FunctionType(FLOATS, (FLOATS, BFLOATS, BFLOATS))
    function = cgutils.get_or_insert_function(e.builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return e.builder.call(function, (total, e.builder.bitcast(a, BFLOATS), e.builder.bitcast(b, BFLOATS)))


def rounded(e: Emitter, values: ir.Value) -> ir.Value:
    """Round floats to bfloat16, 16 bits each (AVX-512)."""
    kind = ir.FunctionType(ir.VectorType(_BFloat(), LANES), (FLOATS,))
    function = cgutils.get_or_insert_function(e.builder.module, kind, "llvm.x86.avx512bf16.cvtneps2bf16.512")
    return e.builder.bitcast(e.builder.call(function, (values,)), HALVES)


class NumberType:
    """The type of a linear layer's inputs: a broadcast ``word`` of ``bytes`` bytes, and the accumulators' ``vector`` of
    ``lanes`` words, as many as rows per panel."""

    def __init__(self, word: ir.Type, lane: ir.Type, lanes: int) -> None:
        self.word, self.lanes, self.bytes, self.vector = word, lanes, LINE // lanes, ir.VectorType(lane, lanes)

    def broadcast(self, e: Emitter, word: ir.Value, lanes: int) -> ir.Value:
        """Repeat a word in every lane."""
        one = e.builder.insert_element(ir.VectorType(self.word, lanes)(ir.Undefined), word, I32(0))
        return e.builder.shuffle_vector(one, one, ir.VectorType(I32, lanes)([0] * lanes))

    def add(self, e: Emitter, line: ir.Value, word: ir.Value, total: ir.Value) -> ir.Value:
        """Add to ``total`` the products of a vector of words, or a part of one, and a broadcast word."""
        return e.fma(line, self.broadcast(e, word, total.type.count), total)


class _Pairs(NumberType):
    """Pairs of bfloat16, summed as floats: the first of each pair, then the second."""

    def add(self, e: Emitter, line: ir.Value, word: ir.Value, total: ir.Value) -> ir.Value:
        b, lanes = e.builder, total.type.count
        w, x = b.bitcast(line, ir.VectorType(I32, lanes)), self.broadcast(e, word, lanes)
        if multiplies_pairs():
            return add_pairs(e, w, x, total)
        sixteen, high = (ir.VectorType(I32, lanes)([value] * lanes) for value in (16, 0xFFFF0000))
        for one, other in ((b.shl(w, sixteen), b.shl(x, sixteen)), (b.and_(w, high), b.and_(x, high))):
            total = e.fma(b.bitcast(one, total.type), b.bitcast(other, total.type), total)
        return total


FLOAT32, BFLOAT16, FLOAT64 = NumberType(F32, F32, 16), _Pairs(I32, F32, 16), NumberType(F64, F64, 8)


class WeightFormat:
    """How weights are stored: each row is a sequence of blocks of ``words`` words and ``bytes`` bytes.

    Attributes:
        name: as in GGUF, or torch's name of the type.
        numbers: type of the words that the weights are multiplied by.
        parts: equal parts in which a block is unpacked.
        panels: unpacked side by side for a few tokens; two, where a single sum would wait for each product.
        few_tokens: token counts with separate code in ``panels.few``, up to the most whose sums fit in registers.
    """

    parts, panels = 1, 2
    few_tokens: tuple[int, ...] = (1, 2, 3, 4, 5)

    def __init__(self, name: str, numbers: NumberType, words: int, size: int) -> None:
        self.name, self.numbers, self.words, self.bytes = name, numbers, words, size

    def scales(self, e: Emitter, rows: Rows) -> Any:
        """Return values that all parts of a block need."""
        return None

    def unpack(self, e: Emitter, rows: Rows, scales: Any, part: ir.Value) -> Iterator[ir.Value]:
        """Yield the columns of one part, in order: vectors of words, or of numbers used as words."""
        raise NotImplementedError


class Plain(WeightFormat):
    """Words side by side; a block is one vector of them."""

    panels = 1
    few_tokens = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12) if wide() else (1, 2, 3, 4, 5)

    def __init__(self, name: str, numbers: NumberType) -> None:
        super().__init__(name, numbers, numbers.lanes, LINE)

    def unpack(self, e: Emitter, rows: Rows, scales: Any, part: ir.Value) -> Iterator[ir.Value]:
        yield from transposed(e, [e.load(row, self.numbers.vector) for row in rows])


PLAIN_FORMATS = (Plain("float32", FLOAT32), Plain("bfloat16", BFLOAT16), Plain("float64", FLOAT64))


def transposed(e: Emitter, rows: list[ir.Value]) -> list[ir.Value]:
    """Return the columns of a square tile, given its rows."""
    n = len(rows)
    pick = ir.VectorType(I32, n)

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
        """Return every second 128-bit block of ``a``, then of ``b``."""
        return shuffle(a, b, [s + k * width + w for s in (0, n) for k in (first, first + 2) for w in range(width)])

    columns: list[ir.Value] = [None] * n
    for j in range(width):
        q = [mixed[g][j] for g in range(4)]
        for odd in (0, 1):
            a, c = blocks(q[0], q[1], odd), blocks(q[2], q[3], odd)
            columns[odd * width + j] = blocks(a, c, 0)
            columns[(2 + odd) * width + j] = blocks(a, c, 1)
    return columns
