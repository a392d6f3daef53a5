"""Compute linear layers over weights in any format, in place in the model's or a GGUF file's memory.

An output starts with its bias and adds products of weights and inputs column by column, in one accumulator. So a
token's outputs have the same bits whatever shares the pass and however many threads run. With attention
(``ordered_attention.py``) this makes speculative decoding bitwise exact. Weights are read once for all tokens.

Packed weights are unpacked to float32 in registers, with the bits of float32 weights of the same numbers, or used as
integers, with inputs quantised to eight bits (``integer_panels.py``): three to four times faster, rounded differently.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from forerun.core.compiling import compiled
from forerun.kernels.linear.block_sums import CODE_BYTES, INPUT_BLOCK, X_BLOCK
from forerun.kernels.linear.panels import (
    FEW_INTEGER_TOKENS,
    INTEGER_TOKENS,
    MANY_TOKENS,
    few,
    format_number,
    format_of,
    many,
    many_in_rows,
    many_in_tiles,
    transpose,
    unpack,
)
from forerun.kernels.linear.quantised_rows import quantise
from forerun.kernels.linear.rowwise import gated, words
from forerun.kernels.linear.weight_format import PLAIN_FORMATS, Plain, WeightFormat
from forerun.kernels.runtime.addresses import StructLayout, address_of, bytes_at, call, doubles, floats
from forerun.kernels.runtime.executor import Operation, Program, Tasks, read_pass
from forerun.kernels.runtime.vector_ir import LANES, LINE, wide

NUMBER_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
PLAIN_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in NUMBER_KINDS}
UNPACKED_COLUMNS = 256
"""Columns of two panels unpacked at once: 32 KiB; a multiple of every format's block."""
CHUNK_COLUMNS = 1024
"""Words per row that are summed over ``PAIRS_AT_ONCE`` pairs of panels before the next: those of 64 tokens are 256 KiB
and stay in the second cache. With 512, 1,024 and 2,048: 61, 70 and 70 GFLOP/s (float32, 1024 x 14336, 256 tokens; one
thread of an EPYC with AVX2 and a second cache of 512 KiB)."""
PAIRS_AT_ONCE = 8
"""Pairs of panels whose sums are kept between chunks: those of 64 tokens are 64 KiB. With 2, 4, 8 and 16: 71, 67, 73
and 74 GFLOP/s (as above, 4096 x 14336, best of two runs)."""
TASKS_PER_THREAD = 8
PUT, ADD, GATE = 0, 1, 2
"""``PUT`` stores sums, ``ADD`` adds them to floats, ``GATE`` multiplies their activations by the second matrix's."""


class Weights(NamedTuple):
    """A matrix and its bias."""

    rows: torch.Tensor  # contiguous ``[O, K]`` of a type of ``NUMBER_KINDS``, or packed bytes ``[O, row]``
    format: str  # its name in ``PLAIN_FORMATS`` or ``GGUF_FORMATS``
    bias: torch.Tensor | None = None  # ``[O]`` in the type of the inputs
    quantised: bool = False  # whether inputs are quantised to eight bits; ignored for formats without integers


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Weights:
    """Wrap a matrix of a type of ``NUMBER_KINDS``."""
    return Weights(weight, PLAIN_NAMES[weight.dtype], bias)


class Matrix(NamedTuple):
    """A matrix as kernels see it: addresses and counts; ``block`` is its words per block. Machine code is that of its
    format, or 0: ``few``, ``many_in_rows`` and, with AVX-512, ``many_in_tiles`` for plain weights; ``few`` and
    ``unpack``, or ``few_by_integers``, ``codes`` and ``many_by_integers``, for packed ones."""

    w: int
    row: int
    outs: int
    panels: int
    bias: int
    block: int
    few: int
    unpack: int
    many_in_rows: int
    many_in_tiles: int
    few_by_integers: int
    codes: int
    many_by_integers: int


class LinearOp(NamedTuple):
    """One to three matrices over the same tokens: addresses, strides in bytes, and counts.

    Two panels are computed side by side: two of one matrix, or one of each matrix of a ``GATE``.
    """

    which: int  # 0 for all tokens of the pass, 1 for those whose logits are wanted
    kind: int  # type of the inputs: 0 float32, 1 bfloat16, 2 float64
    to_kind: int  # and of the results
    x: int  # the tokens' rows, padded to vectors; 0 for those of the pass
    x_row: int
    words: int
    floats: int  # whether a matrix reads the tokens' words
    integers: int  # whether one reads quantised inputs
    few_tokens: int  # maximum tokens that the machine code ``few`` supports
    chunk: int  # words per row that more tokens are multiplied by before the next pair of panels
    mode: int
    pairs: int
    share: int  # pairs per task
    turn: int  # pairs in the shares of all threads; where a thread's next share starts if all are equally fast
    activation: int
    y: int  # rows of results, side by side; 0 for those of the pass
    y_row: int
    table: int
    matrices: int


class Panel(NamedTuple):
    """A panel: addresses of its matrix, first row's words and sums, its number, and the index of its last row."""

    matrix: int
    number: int
    w: int
    last: int
    sums: int


class TokenInputs(NamedTuple):
    """Columns of an operation's tokens: counts, and addresses of their rows, words by column, and quantised rows."""

    n: int
    words: int  # per row
    x: int
    columns: int
    quantised: int


class LinearCode(NamedTuple):
    """Addresses of machine code that all formats share, or 0 if no matrix needs it."""

    transpose: int
    many: int


LINEAR_LAYOUT, MATRIX, CODE = StructLayout(LinearOp), StructLayout(Matrix), StructLayout(LinearCode)
read_linear, read_matrix, read_code = LINEAR_LAYOUT.reader(), MATRIX.reader(), CODE.reader()
MATRIX_BYTES = 8 * len(Matrix._fields)

MatrixTable = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@functools.cache
def _shared_code(kind: int, floats: int) -> LinearCode:
    if not floats:
        return LinearCode(0, 0)

    @compiled
    def words_of_tokens(x: int, row: int, last: int, steps: int, to: int) -> None:
        transpose(kind, x, row, last, steps, to)

    @compiled
    def products(tokens: int, columns: int, other: int, count: int, x: int, sums: int, other_sums: int) -> None:
        many(tokens, columns, other, count, x, sums, other_sums)

    return LinearCode(address_of(words_of_tokens, 5), address_of(products, 7))


@functools.cache
def _format_code(which: int) -> tuple[int, int, int, int]:
    @compiled
    def products_of_few(
        tokens: int, w: int, other: int, row: int, last: int, other_last: int, x: int, x_row: int, blocks: int,
        ahead: int, sums: int,
    ) -> None:  # fmt: skip
        few(which, tokens, w, other, row, last, other_last, x, x_row, blocks, ahead, sums)

    @compiled
    def products_in_rows(
        tokens: int, w: int, row: int, last: int, x: int, steps: int, ahead: int, tiles: int, sums: int
    ) -> None:
        many_in_rows(which, tokens, w, row, last, x, steps, ahead, tiles, sums)

    @compiled
    def products_in_tiles(tiles: int, x: int, steps: int, sums: int) -> None:
        many_in_tiles(which, tiles, x, steps, sums)

    of_few = address_of(products_of_few, 11)
    if which < len(PLAIN_FORMATS):
        return of_few, 0, address_of(products_in_rows, 9), address_of(products_in_tiles, 4) if wide() else 0
    return of_few, unpack_code(which), 0, 0


@functools.cache
def unpack_code(which: int) -> int:
    """Return ``unpack`` for a packed format's number."""

    @compiled
    def columns_of(w: int, row: int, last: int, blocks: int, ahead: int, to: int) -> None:
        unpack(which, w, row, last, blocks, ahead, to)

    return address_of(columns_of, 6)


def matrix_of(weights: Weights) -> Matrix:
    """Describe a matrix for kernels."""
    rows, which = weights.rows, format_number(weights.format)
    bias = 0 if weights.bias is None else weights.bias.data_ptr()
    if by_integers(weights):
        from forerun.kernels.linear.integer_panels import integer_code  # not needed for plain weights

        code = (0, 0, 0, 0, *integer_code(which))
    else:
        code = (*_format_code(which), 0, 0, 0)
    row = rows.stride(0) * rows.element_size()
    each = format_of(which)
    panels = math.ceil(len(rows) / each.numbers.lanes)
    return Matrix(rows.data_ptr(), row, len(rows), panels, bias, each.words, *code)


def by_integers(weights: Weights) -> bool:
    """Return whether products with these weights are sums of integers."""
    if not weights.quantised or weights.format in PLAIN_NAMES.values():
        return False
    from forerun.kernels.linear.gguf_integers import INTEGER_FORMATS  # not needed for plain weights

    return weights.format in INTEGER_FORMATS


def table_of(matrices: Sequence[Weights]) -> MatrixTable:
    """Describe one operation's matrices for kernels; the table must outlive the operation."""
    return np.array([matrix_of(each) for each in matrices], np.int64).reshape(-1, len(Matrix._fields))


def operation(
    table: MatrixTable, kind: int, words: int, x: tuple[int, int], y: tuple[int, int], threads: int, *, mode: int = PUT,
    to_kind: int = 0, which: int = 0, activation: int = 0,
) -> tuple[Operation, LinearOp]:  # fmt: skip
    """Return an operation over these matrices, cut for ``threads`` threads; see ``LinearOp``."""
    panels = table[:, Matrix._fields.index("panels")].tolist()
    pairs = panels[0] if mode == GATE else sum(math.ceil(count / 2) for count in panels)
    share = max(1, pairs // (TASKS_PER_THREAD * threads))
    packed, integers = (table[:, Matrix._fields.index(name)] != 0 for name in ("unpack", "codes"))
    few_tokens = (WeightFormat if packed.any() else Plain).few_tokens[-1]
    chunk = words if packed.any() or integers.any() else min(words, CHUNK_COLUMNS)
    return LINEAR, LinearOp(
        which, kind, to_kind, *x, words, int(not integers.all()), int(integers.any()), few_tokens, chunk, mode, pairs,
        share, share * threads, activation, *y, table.ctypes.data, len(table),
    )  # fmt: skip


_local = threading.local()
KEPT_PROGRAMS = 1 << 16
"""Programs of one product each, a kilobyte apiece, kept per thread; DeepSeek-V3 has 44,544 matrices of experts."""


def product(x: torch.Tensor, weights: Weights, keep: bool = True) -> torch.Tensor:
    """Return ``x @ weights.T + bias`` for x ``[..., K]`` on a CPU, in x's type; ``keep`` its program for later."""
    dtype, outs, columns = x.dtype, weights.rows.shape[0], x.shape[-1]
    n = x.numel() // columns
    if weights.rows.dtype not in NUMBER_KINDS:
        x = x.float()
    kind, width = NUMBER_KINDS[x.dtype], x.element_size()
    if columns % (LINE // width):
        x = pad(x, (0, -columns % (LINE // width)))
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], outs)
    if n:
        words = columns * width // PLAIN_FORMATS[kind].numbers.bytes
        program, _ = (_kept if keep else _program)(weights, kind, words, x.shape[-1] * width, outs * width)
        program.run_in_scratch(scratch_bytes(n, words), n=n, x=x.data_ptr(), y=y.data_ptr())
    return y if dtype == y.dtype else y.to(dtype)


def _kept(weights: Weights, kind: int, words: int, x_row: int, y_row: int) -> tuple[Program, MatrixTable]:
    kept: dict[Any, tuple[Program, MatrixTable]] = _local.__dict__.setdefault("programs", {})
    bias, threads = 0 if weights.bias is None else weights.bias.data_ptr(), torch.get_num_threads()
    key = (weights.rows.data_ptr(), weights.rows.shape, weights.format, weights.quantised, bias, kind, threads)
    if key not in kept:
        if len(kept) >= KEPT_PROGRAMS:
            del kept[next(iter(kept))]
        kept[key] = _program(weights, kind, words, x_row, y_row)
    return kept[key]


def _program(weights: Weights, kind: int, words: int, x_row: int, y_row: int) -> tuple[Program, MatrixTable]:
    table = table_of([weights])
    op = operation(table, kind, words, (0, x_row), (0, y_row), torch.get_num_threads(), to_kind=kind)
    return Program([op]), table


@functools.cache
def scratch_bytes(tokens: int, words: int) -> int:
    """Return the scratch bytes per thread, for ``tokens`` tokens and rows of ``words`` words."""
    groups = -(-tokens // 8)
    panels = max(words, 2 * UNPACKED_COLUMNS)  # one copied, or parts of two unpacked
    inputs = -(-tokens * (words // INPUT_BLOCK + 1) * X_BLOCK // LINE)  # quantised; kernels read up to 3 rows after
    codes = UNPACKED_COLUMNS // INPUT_BLOCK * CODE_BYTES // LINE
    return LINE * (groups * (words + LANES) + inputs + 2 * PAIRS_AT_ONCE * groups * LANES + codes + panels + LANES + 1)


@compiled
def _lanes(op: LinearOp) -> int:
    return 8 if op.kind == 2 else 16


@compiled
def _group_bytes(op: LinearOp) -> int:
    lanes = _lanes(op)
    return (op.words + lanes - 1) // lanes * lanes * LINE


@compiled
def _columns_bytes(op: LinearOp, n: int) -> int:
    return (n + _lanes(op) - 1) // _lanes(op) * _group_bytes(op) if op.floats else 0


@compiled
def _quantised_row(op: LinearOp) -> int:
    return op.words // INPUT_BLOCK * X_BLOCK if op.integers else 0


@compiled
def _prepare(address: int, fields: int, code_address: int, task: int, slot: int) -> None:
    """Quantise inputs, and for many tokens write their words column by column, before a thread's first task."""
    this, op, code = read_pass(address), read_linear(fields), read_code(code_address)
    n, x = this.outputs if op.which else this.n, op.x if op.x else this.x
    if op.floats and n > op.few_tokens:
        lanes = _lanes(op)
        for t in range(0, n, lanes):
            to = slot + t // lanes * _group_bytes(op)
            call(code.transpose, x + t * op.x_row, op.x_row, min(lanes, n - t) - 1, (op.words + lanes - 1) // lanes, to)
    if op.integers:
        to = slot + _columns_bytes(op, n)
        for t in range(n):
            quantise(x + t * op.x_row, op.words // INPUT_BLOCK, to + t * _quantised_row(op))


@compiled
def _run(address: int, fields: int, code_address: int, task: int, slot: int) -> None:
    this, op = read_pass(address), read_linear(fields)
    n, x, y = this.outputs if op.which else this.n, op.x if op.x else this.x, op.y if op.y else this.y
    lanes = _lanes(op)
    size, quantised = (n + lanes - 1) // lanes * lanes * LINE, slot + _columns_bytes(op, n)
    all_sums = quantised + (n * _quantised_row(op) + LINE - 1) // LINE * LINE
    spare, end = all_sums + 2 * PAIRS_AT_ONCE * size, min(op.pairs, (task + 1) * op.share)
    chunk = op.chunk if n > op.few_tokens else op.words
    at_once = PAIRS_AT_ONCE if chunk < op.words else 1
    for begin in range(task * op.share, end, at_once):
        for column in range(0, op.words, chunk):
            words = min(chunk, op.words - column)
            inputs = TokenInputs(n, words, x + column * (LINE // lanes), slot + column * LINE, quantised)
            for pair in range(begin, min(begin + at_once, end)):
                further = 1 if pair + 1 < (task + 1) * op.share else op.turn - op.share + 1
                sums = all_sums + 2 * (pair - begin) * size
                _pair(fields, code_address, inputs, pair, column, further, y, sums, sums + size, spare)


@compiled
def _pair(
    fields: int, code: int, inputs: TokenInputs, pair: int, column: int, further: int, y: int, sums: int, twin: int,
    spare: int,
) -> None:  # fmt: skip
    """Sum over a pair of panels from a column on, and write the outputs after the last; prefetch ``further`` pairs."""
    op, n, lanes = read_linear(fields), inputs.n, _lanes(read_linear(fields))
    at, before, p = op.table, 0, pair if op.mode == GATE else 2 * pair
    a = read_matrix(at)
    while op.mode != GATE and p >= (a.panels + 1) // 2 * 2:
        p, before, at = p - (a.panels + 1) // 2 * 2, before + a.outs, at + MATRIX_BYTES
        a = read_matrix(at)
    other = at + MATRIX_BYTES if op.mode == GATE else at
    q = p if op.mode == GATE else min(p + 1, a.panels - 1)
    ahead = further * (1 if op.mode == GATE else 2) * lanes
    one, two = _panel(fields, n, at, p, column, sums), _panel(fields, n, other, q, column, twin)
    _both(fields, code, inputs, one, two, ahead, spare)
    if column + inputs.words < op.words:
        return
    number = 4 if op.to_kind == 0 else 2 if op.to_kind == 1 else 8
    place = y + (before + p * lanes) * number
    _finish(fields, n, min(lanes, a.outs - p * lanes), sums, twin, place, number, spare)
    if q > p:
        _finish(fields, n, min(lanes, a.outs - q * lanes), twin, twin, place + lanes * number, number, spare)


@compiled
def _panel(fields: int, n: int, address: int, number: int, column: int, sums: int) -> Panel:
    """Return a panel from a column on; at column 0, start its sums with the bias."""
    op, matrix = read_linear(fields), read_matrix(address)
    first = number * _lanes(op)
    last = min(_lanes(op), matrix.outs - first) - 1
    if column == 0:
        _begin(op.kind, n, matrix.bias, first, last + 1, sums)
    return Panel(address, number, matrix.w + first * matrix.row + column // matrix.block * LINE, last, sums)


@compiled
def _both(fields: int, code: int, inputs: TokenInputs, one: Panel, other: Panel, ahead: int, spare: int) -> None:
    """Sum over two panels, possibly of different matrices, for all tokens; prefetch the panels ``ahead`` rows after."""
    op, a, b, n = read_linear(fields), read_matrix(one.matrix), read_matrix(other.matrix), inputs.n
    if not (a.unpack or a.codes):
        _plain(fields, inputs, one, ahead, spare)
        if other.w != one.w:
            _plain(fields, inputs, other, ahead, spare)
    elif a.codes or b.codes or (n <= op.few_tokens and a.few != b.few):
        _alone(fields, code, inputs, one, ahead, spare)
        if other.w != one.w:
            if a.few:  # which writes two panels' sums
                other = _panel(fields, n, other.matrix, other.number, 0, other.sums)
            _alone(fields, code, inputs, other, ahead, spare)
    elif n > op.few_tokens:
        _unpacked(fields, code, n, inputs.columns, one, other, ahead, spare)
    else:
        blocks = op.words // a.block
        x, x_row = inputs.x, op.x_row
        call(a.few, n, one.w, other.w, a.row, one.last, other.last, x, x_row, blocks, ahead * a.row, one.sums)


@compiled
def _alone(fields: int, code: int, inputs: TokenInputs, panel: Panel, ahead: int, spare: int) -> None:
    """Sum over one panel of packed weights; floats are paired with themselves."""
    op, a, n, w, last = read_linear(fields), read_matrix(panel.matrix), inputs.n, panel.w, panel.last
    if a.codes:
        _integers(fields, n, inputs.quantised, panel, ahead, spare)
    elif n > op.few_tokens:
        _unpacked(fields, code, n, inputs.columns, panel, panel, ahead, spare)
    else:
        blocks = op.words // a.block
        call(a.few, n, w, w, a.row, last, last, inputs.x, op.x_row, blocks, ahead * a.row, panel.sums)


@compiled
def _integers(fields: int, n: int, quantised: int, panel: Panel, ahead: int, spare: int) -> None:
    op, matrix = read_linear(fields), read_matrix(panel.matrix)
    x_row, w, codes = _quantised_row(op), panel.w, spare + LANES * LINE
    further, blocks = ahead * matrix.row, op.words // matrix.block
    if panel.last < LANES - 1:
        w = codes + UNPACKED_COLUMNS // INPUT_BLOCK * CODE_BYTES
        _copy_rows(panel, w)
    if n <= FEW_INTEGER_TOKENS:
        for t in range(0, n, INTEGER_TOKENS[-1]):
            number, inputs, sums = min(INTEGER_TOKENS[-1], n - t), quantised + t * x_row, panel.sums + t * LINE
            call(matrix.few_by_integers, number, w, matrix.row, inputs, x_row, blocks, 0 if t else further, sums)
        return
    for first in range(0, op.words, UNPACKED_COLUMNS):
        count = min(UNPACKED_COLUMNS, op.words - first)
        at = matrix.row // blocks * (first // matrix.block)
        call(matrix.codes, w + at, matrix.row, count // matrix.block, further + (LANES - 1) * at, codes)
        inputs = quantised + first // INPUT_BLOCK * X_BLOCK
        for t in range(0, n, INTEGER_TOKENS[-1]):
            number, sums = min(INTEGER_TOKENS[-1], n - t), panel.sums + t * LINE
            call(matrix.many_by_integers, number, codes, count // INPUT_BLOCK, inputs + t * x_row, x_row, sums)


@compiled
def _copy_rows(panel: Panel, to: int) -> None:
    row = read_matrix(panel.matrix).row
    for i in range(LANES):
        source, target = bytes_at(panel.w + min(i, panel.last) * row, row), bytes_at(to + i * row, row)
        for c in range(row):
            target[c] = source[c]


@compiled
def _plain(fields: int, inputs: TokenInputs, panel: Panel, ahead: int, spare: int) -> None:
    """Sum over a panel that needs no unpacking: full vectors, then the remaining columns."""
    matrix, n, x, tokens = read_matrix(panel.matrix), inputs.n, inputs.x, inputs.columns
    steps = inputs.words // matrix.block
    if steps:
        _in_groups(fields, n, x, tokens, panel, panel.w, matrix.row, steps, ahead * matrix.row, spare)
    rest = inputs.words - steps * matrix.block
    if rest:
        at = steps * LINE
        _copy(panel.w + at, matrix.row, rest * (LINE // matrix.block), panel.last + 1, spare)
        _in_groups(fields, n, x + at, tokens + at * matrix.block, panel, spare, LINE, 1, 0, spare)


@compiled
def _in_groups(
    fields: int, n: int, x: int, tokens: int, panel: Panel, w: int, row: int, steps: int, ahead: int, spare: int
) -> None:
    op, matrix = read_linear(fields), read_matrix(panel.matrix)
    lanes, last, t, tiles = matrix.block, panel.last, 0, spare + LANES * LINE
    while t < n:
        sums = panel.sums + t * LINE
        if n - t <= op.few_tokens:
            few_rows = x + t * op.x_row
            call(matrix.few, n - t, w, w, row, last, last, few_rows, op.x_row, steps, ahead, sums)
            return
        words_of_group = tokens + t // lanes * _group_bytes(op)
        if t and matrix.many_in_tiles:
            call(matrix.many_in_tiles, tiles, words_of_group, steps, sums)
        else:
            call(matrix.many_in_rows, min(lanes, n - t), w, row, last, words_of_group, steps, ahead, tiles, sums)
        t += lanes


@compiled
def _unpacked(fields: int, code: int, n: int, tokens: int, one: Panel, other: Panel, ahead: int, spare: int) -> None:
    op, products = read_linear(fields), read_code(code).many
    columns, size = spare + LANES * LINE, _group_bytes(op)
    others = columns + UNPACKED_COLUMNS * LINE
    for first in range(0, op.words, UNPACKED_COLUMNS):
        count = min(UNPACKED_COLUMNS, op.words - first)
        _unpack(fields, one, first, count, ahead, columns)
        _unpack(fields, other, first, count, ahead, others)
        t = 0
        while t < n:
            left = min(LANES - t % LANES, n - t)
            number = left if left <= MANY_TOKENS[-1] else LANES // 2
            at = tokens + t // LANES * size + first * LINE + t % LANES * 4
            call(products, number, columns, others, count, at, one.sums + t * LINE, other.sums + t * LINE)
            t += number


@compiled
def _unpack(fields: int, panel: Panel, first: int, count: int, ahead: int, to: int) -> None:
    op, matrix = read_linear(fields), read_matrix(panel.matrix)
    at = matrix.row // (op.words // matrix.block) * (first // matrix.block)
    further = ahead * matrix.row + (LANES - 1) * at
    call(matrix.unpack, panel.w + at, matrix.row, panel.last, count // matrix.block, further, to)


@compiled
def _begin(kind: int, n: int, bias: int, first: int, valid: int, sums: int) -> None:
    line = floats(sums, 16)
    line[:] = 0.0
    if bias:
        if kind == 0:
            source = floats(bias + 4 * first, valid)
            for i in range(valid):
                line[i] = source[i]
        elif kind == 1:
            halves, bits = bytes_at(bias + 2 * first, 2 * valid), bytes_at(sums, LINE)
            for i in range(valid):
                bits[4 * i + 2] = halves[2 * i]
                bits[4 * i + 3] = halves[2 * i + 1]
        else:
            wide, numbers = doubles(sums, 8), doubles(bias + 8 * first, valid)
            for i in range(valid):
                wide[i] = numbers[i]
    for t in range(1, n):
        words(0, sums, 1, sums + t * LINE)


@compiled
def _copy(w: int, row: int, size: int, valid: int, to: int) -> None:
    """Copy the bytes after the last full vector of each row, padded with zeros."""
    for i in range(valid):
        source, tile = bytes_at(w + i * row, size), bytes_at(to + i * LINE, LINE)
        for c in range(size):
            tile[c] = source[c]
        for c in range(size, LINE):
            tile[c] = 0


@compiled
def _finish(fields: int, n: int, valid: int, sums: int, twin: int, y: int, number: int, spare: int) -> None:
    op = read_linear(fields)
    full = valid == _lanes(op)
    for t in range(n):
        at, place = sums + t * LINE, y + t * op.y_row
        to = place if full else spare
        if op.mode == GATE:
            gated(op.to_kind, op.activation, at, twin + t * LINE, to)
        elif op.mode == ADD:
            source, target = floats(at, valid), floats(place, valid)
            for i in range(valid):
                target[i] += source[i]
            continue
        else:
            words(1 if op.to_kind == 1 else 0, at, 1, to)
        if not full:
            source_bytes, target_bytes = bytes_at(spare, valid * number), bytes_at(place, valid * number)
            for i in range(valid * number):
                target_bytes[i] = source_bytes[i]


LINEAR = Operation(
    LINEAR_LAYOUT,
    lambda op: Tasks(-(-op.pairs // op.share)),
    _run,
    lambda op: _shared_code(op.kind, op.floats),
    _prepare,
)
