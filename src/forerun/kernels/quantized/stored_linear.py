"""Linear layers and embeddings over weights as a GGUF file stores them, unpacked only in registers and caches.

An output equals, bit for bit, what ``linear.py`` gives for the same weights in float32: it starts with the bias and
adds column by column, in one accumulator. So it depends neither on the other tokens of the pass nor on threads, and the
text is that of a model dequantised to float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from forerun.core.compiling import compiled
from forerun.kernels.linear.linear import GATE, begin_sums, finish
from forerun.kernels.linear.panels import transpose
from forerun.kernels.linear.rowwise import words
from forerun.kernels.quantized.formats import FORMATS
from forerun.kernels.quantized.unpack import FEW, TOGETHER, multiply, pair, unpack
from forerun.kernels.runtime.addresses import StructLayout, address_of, call5, call6, call7, call11, floats, integers
from forerun.kernels.runtime.executor import PER_TOKEN, Operation, Tasks, read_pass
from forerun.kernels.runtime.vector_ir import LANES, LINE

CHUNK = 256
"""Columns of two panels that are unpacked at once: 32 KiB; a multiple of every format's block."""
NAMES = tuple(each.name for each in FORMATS)


class Matrix(NamedTuple):
    """One matrix: address, bytes per row, rows, address of the bias or 0, columns per block, and addresses of code."""

    w: int
    row: int
    outs: int
    bias: int
    block: int
    pair: int
    unpack: int


class StoredOp(NamedTuple):
    """One to three matrices over the same tokens, in any formats; other fields as in ``LinearOp``.

    Attributes:
        kind, to_kind: type of inputs and outputs: 0, float32.
        columns: of every matrix.
        table: address of the descriptions of the ``matrices`` matrices.
        pairs: pairs of panels of all matrices; for ``GATE``, panels of the first.
        share: pairs of panels that a thread takes at once.
        turn: pairs in the shares of all threads; where a thread's next share begins if all are equally fast.
    """

    which: int
    kind: int
    to_kind: int
    x: int
    x_row: int
    columns: int
    mode: int
    pairs: int
    share: int
    turn: int
    activation: int
    y: int
    y_row: int
    table: int
    matrices: int


class LookupOp(NamedTuple):
    """Embedding rows, times a factor, as floats; ``w``, ``row``, ``block`` and ``unpack`` as in ``Matrix``."""

    w: int
    row: int
    block: int
    unpack: int
    dim: int
    x: int
    x_row: int
    factor: float


class StoredCode(NamedTuple):
    """Addresses of the machine code that all formats share."""

    transpose: int
    multiply: int


STORED_LAYOUT, LOOKUP_LAYOUT, MATRIX, CODE = (
    StructLayout(StoredOp),
    StructLayout(LookupOp),
    StructLayout(Matrix),
    StructLayout(StoredCode),
)
read_stored, read_lookup = STORED_LAYOUT.reader(), LOOKUP_LAYOUT.reader()
read_matrix, read_stored_code = MATRIX.reader(), CODE.reader()
MATRIX_BYTES = 8 * len(Matrix._fields)


@functools.cache
def stored_code() -> StoredCode:
    """The machine code that all formats share, compiled or loaded at the first call."""

    @compiled
    def words_of_tokens(x: int, row: int, last: int, steps: int, to: int) -> None:
        transpose(0, x, row, last, steps, to)

    @compiled
    def products(tokens: int, columns: int, other: int, count: int, x: int, sums: int, other_sums: int) -> None:
        multiply(tokens, columns, other, count, x, sums, other_sums)

    return StoredCode(address_of(words_of_tokens, 5), address_of(products, 7))


@functools.cache
def format_code(which: int) -> tuple[int, int]:
    """Addresses of ``pair`` and ``unpack`` for one of ``FORMATS``."""

    @compiled
    def pairs_of(
        tokens: int, w: int, other: int, row: int, last: int, other_last: int, x: int, x_row: int, blocks: int,
        ahead: int, sums: int,
    ) -> None:  # fmt: skip
        pair(which, tokens, w, other, row, last, other_last, x, x_row, blocks, ahead, sums)

    @compiled
    def columns_of(w: int, row: int, last: int, blocks: int, ahead: int, to: int) -> None:
        unpack(which, w, row, last, blocks, ahead, to)

    counts: tuple[tuple[Callable[..., None], int], ...] = ((pairs_of, 11), (columns_of, 6))
    first, second = (address_of(function, count) for function, count in counts)
    return first, second


def room(tokens: int, columns: int) -> int:
    """Bytes that a thread needs."""
    groups = -(-tokens // TOGETHER)
    return groups * columns * LINE + 2 * groups * TOGETHER * LINE + 2 * CHUNK * LINE + LANES * LINE + LINE


@compiled
def _panels(matrix: Matrix) -> int:
    return (matrix.outs + LANES - 1) // LANES


@compiled
def stored_prepare(address: int, fields: int, code_address: int, task: int, slot: int) -> None:
    """A thread's preparation before its first piece of work, for many tokens: write their words by groups."""
    this, op, code = read_pass(address), read_stored(fields), read_stored_code(code_address)
    n, x = this.outputs if op.which else this.n, op.x if op.x else this.x
    if n > FEW:
        for t in range(0, n, TOGETHER):
            to = slot + t // TOGETHER * op.columns * LINE
            call5(code.transpose, x + t * op.x_row, op.x_row, min(TOGETHER, n - t) - 1, op.columns // LANES, to)


@compiled
def stored_run(address: int, fields: int, code_address: int, task: int, slot: int) -> None:
    """Compute the pairs of panels of one piece of work, for all tokens."""
    this, op, code = read_pass(address), read_stored(fields), read_stored_code(code_address)
    n, x, y = this.outputs if op.which else this.n, op.x if op.x else this.x, op.y if op.y else this.y
    groups = (n + TOGETHER - 1) // TOGETHER
    sums = slot + groups * op.columns * LINE
    twin = sums + (n if n <= FEW else groups * TOGETHER) * LINE
    spare = sums + 2 * groups * TOGETHER * LINE
    for number in range(task * op.share, min(op.pairs, (task + 1) * op.share)):
        further = 1 if number + 1 < (task + 1) * op.share else op.turn - op.share + 1
        if op.mode == GATE:
            one, other = read_matrix(op.table), read_matrix(op.table + MATRIX_BYTES)
            valid = min(LANES, one.outs - number * LANES)
            _both(op, code, n, x, slot, one, other, number, number, further, sums, twin, spare)
            finish(op, n, valid, sums, twin, y + number * LINE, 4, spare)
            continue
        i, before, p = 0, 0, 2 * number
        matrix = read_matrix(op.table)
        while p >= (_panels(matrix) + 1) // 2 * 2:
            p, before, i = p - (_panels(matrix) + 1) // 2 * 2, before + matrix.outs, i + 1
            matrix = read_matrix(op.table + i * MATRIX_BYTES)
        q = min(p + 1, _panels(matrix) - 1)
        _both(op, code, n, x, slot, matrix, matrix, p, q, 2 * further, sums, twin, spare)
        place = y + (before + p * LANES) * 4
        finish(op, n, min(LANES, matrix.outs - p * LANES), sums, sums, place, 4, spare)
        if q > p:
            finish(op, n, min(LANES, matrix.outs - q * LANES), twin, twin, place + LINE, 4, spare)


@compiled
def _both(
    op: StoredOp, code: StoredCode, n: int, x: int, slot: int, a: Matrix, b: Matrix, p: int, q: int, further: int,
    sums: int, twin: int, spare: int,
) -> None:  # fmt: skip
    """Sums of all tokens with two panels, which may be of different matrices; prefetches later panels."""
    last, other_last = min(LANES, a.outs - p * LANES) - 1, min(LANES, b.outs - q * LANES) - 1
    begin_sums(op, n, a.bias, p * LANES, last + 1, sums)
    begin_sums(op, n, b.bias, q * LANES, other_last + 1, twin)
    w, other = a.w + p * LANES * a.row, b.w + q * LANES * b.row
    ahead = further * LANES
    if n > FEW:
        _by_chunks(op, code, n, slot, a, b, w, other, last, other_last, ahead, sums, twin, spare)
        return
    blocks = op.columns // a.block
    if a.pair == b.pair:
        call11(a.pair, n, w, other, a.row, last, other_last, x, op.x_row, blocks, ahead * a.row, sums)
    else:  # two formats: each panel is paired with itself
        kept = spare + LANES * LINE
        call11(a.pair, n, w, w, a.row, last, last, x, op.x_row, blocks, ahead * a.row, sums)
        begin_sums(op, n, b.bias, q * LANES, other_last + 1, twin)
        begin_sums(op, n, b.bias, q * LANES, other_last + 1, kept)
        blocks = op.columns // b.block
        call11(b.pair, n, other, other, b.row, other_last, other_last, x, op.x_row, blocks, ahead * b.row, kept)
        for t in range(n):
            words(0, kept + t * LINE, 1, twin + t * LINE)


@compiled
def _by_chunks(
    op: StoredOp, code: StoredCode, n: int, tokens: int, a: Matrix, b: Matrix, w: int, other: int, last: int,
    other_last: int, ahead: int, sums: int, twin: int, spare: int,
) -> None:  # fmt: skip
    """The same for many tokens: unpack columns once for all of them, chunk by chunk."""
    columns = spare + LANES * LINE
    others = columns + CHUNK * LINE
    for first in range(0, op.columns, CHUNK):
        count = min(CHUNK, op.columns - first)
        _columns(op, a, w, last, first, count, ahead, columns)
        _columns(op, b, other, other_last, first, count, ahead, others)
        for t in range(0, n, TOGETHER):
            words_at = tokens + (t // TOGETHER * op.columns + first) * LINE
            to, other_to = sums + t * LINE, twin + t * LINE
            call7(code.multiply, min(TOGETHER, n - t), columns, others, count, words_at, to, other_to)


@compiled
def _columns(op: StoredOp, matrix: Matrix, w: int, last: int, first: int, count: int, ahead: int, to: int) -> None:
    """Unpack some columns of a panel; prefetches from ``ahead`` on, in memory order."""
    at = matrix.row // (op.columns // matrix.block) * (first // matrix.block)
    further = ahead * matrix.row + (LANES - 1) * at
    call6(matrix.unpack, w + at, matrix.row, last, count // matrix.block, further, to)


@compiled
def lookup(address: int, fields: int, code: int, token: int, slot: int) -> None:
    """One token's row, unpacked as a panel of sixteen times the same row."""
    op = read_lookup(fields)
    w = op.w + integers(read_pass(address).ids + 8 * token, 1)[0] * op.row
    call6(op.unpack, w, op.row, 0, op.dim // op.block, 0, slot)
    unpacked, x = floats(slot, op.dim * LANES), floats(op.x + token * op.x_row, op.dim)
    for i in range(op.dim):
        x[i] = unpacked[i * LANES] * op.factor


STORED = Operation(
    STORED_LAYOUT, lambda op: Tasks(-(-op.pairs // op.share)), stored_run, lambda op: stored_code(), stored_prepare
)
LOOKUP = Operation(LOOKUP_LAYOUT, lambda op: Tasks(1, PER_TOKEN), lookup)
