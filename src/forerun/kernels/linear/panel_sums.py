"""Sum products over panels of weights, for all tokens of an operation; see ``panels.py`` for what a panel is.

Plain weights are used in place, one panel after the other. Packed weights are unpacked to float32 for two panels at a
time, or used as integers.
"""

from __future__ import annotations

from typing import NamedTuple

from forerun.core.compiling import compiled
from forerun.kernels.linear.block_sums import CODE_BYTES, INPUT_BLOCK, X_BLOCK
from forerun.kernels.linear.linear_op import group_bytes, lanes_of, quantised_row, read_code, read_linear
from forerun.kernels.linear.panels import FEW_INTEGER_TOKENS, INTEGER_TOKENS, MANY_TOKENS
from forerun.kernels.linear.rowwise import words
from forerun.kernels.linear.weight_matrix import read_matrix
from forerun.kernels.runtime.addresses import bytes_at, call, doubles, floats
from forerun.kernels.runtime.vector_ir import LANES, LINE

UNPACKED_COLUMNS = 256
"""Columns of two panels unpacked at once: 32 KiB; a multiple of every format's block."""


class TokenInputs(NamedTuple):
    """Columns of an operation's tokens: counts, and addresses of their rows, words by column, and quantised rows."""

    n: int
    words: int  # per row
    x: int
    columns: int
    quantised: int


class Panel(NamedTuple):
    """A panel: addresses of its matrix, first row's words and sums, its number, and the index of its last row."""

    matrix: int
    number: int
    w: int
    last: int
    sums: int


@compiled
def panel_of(fields: int, n: int, address: int, number: int, column: int, sums: int) -> Panel:
    """Return a panel from a column on; at column 0, start its sums with the bias."""
    op, matrix = read_linear(fields), read_matrix(address)
    first = number * lanes_of(op)
    last = min(lanes_of(op), matrix.outs - first) - 1
    if column == 0:
        _begin(op.kind, n, matrix.bias, first, last + 1, sums)
    return Panel(address, number, matrix.w + first * matrix.row + column // matrix.block * LINE, last, sums)


@compiled
def sum_over(fields: int, code: int, inputs: TokenInputs, one: Panel, other: Panel, ahead: int, spare: int) -> None:
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
                other = panel_of(fields, n, other.matrix, other.number, 0, other.sums)
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
    x_row, w, codes = quantised_row(op), panel.w, spare + LANES * LINE
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
        words_of_group = tokens + t // lanes * group_bytes(op)
        if t and matrix.many_in_tiles:
            call(matrix.many_in_tiles, tiles, words_of_group, steps, sums)
        else:
            call(matrix.many_in_rows, min(lanes, n - t), w, row, last, words_of_group, steps, ahead, tiles, sums)
        t += lanes


@compiled
def _unpacked(fields: int, code: int, n: int, tokens: int, one: Panel, other: Panel, ahead: int, spare: int) -> None:
    op, products = read_linear(fields), read_code(code).many
    columns, size = spare + LANES * LINE, group_bytes(op)
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
