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
from typing import Any

import torch
from torch.nn.functional import pad

from forerun.core.compiling import compiled
from forerun.kernels.linear.block_sums import CODE_BYTES, INPUT_BLOCK, X_BLOCK
from forerun.kernels.linear.linear_op import (
    ADD,
    GATE,
    LINEAR_LAYOUT,
    PUT,
    LinearCode,
    LinearOp,
    columns_bytes,
    group_bytes,
    lanes_of,
    quantised_row,
    read_code,
    read_linear,
)
from forerun.kernels.linear.panel_sums import UNPACKED_COLUMNS, TokenInputs, panel_of, sum_over
from forerun.kernels.linear.panels import many, transpose
from forerun.kernels.linear.quantised_rows import quantise
from forerun.kernels.linear.rowwise import gated, words
from forerun.kernels.linear.weight_format import PLAIN_FORMATS, Plain, WeightFormat
from forerun.kernels.linear.weight_matrix import (
    MATRIX_BYTES,
    NUMBER_KINDS,
    Matrix,
    MatrixTable,
    Weights,
    read_matrix,
    table_of,
)
from forerun.kernels.runtime.addresses import address_of, bytes_at, call, floats
from forerun.kernels.runtime.executor import Operation, Program, Tasks, read_pass
from forerun.kernels.runtime.vector_ir import LANES, LINE

CHUNK_COLUMNS = 1024
"""Words per row that are summed over ``PAIRS_AT_ONCE`` pairs of panels before the next: those of 64 tokens are 256 KiB
and stay in the second cache. With 512, 1,024 and 2,048: 61, 70 and 70 GFLOP/s (float32, 1024 x 14336, 256 tokens; one
thread of an EPYC with AVX2 and a second cache of 512 KiB)."""
PAIRS_AT_ONCE = 8
"""Pairs of panels whose sums are kept between chunks: those of 64 tokens are 64 KiB. With 2, 4, 8 and 16: 71, 67, 73
and 74 GFLOP/s (as above, 4096 x 14336, best of two runs)."""
TASKS_PER_THREAD = 8


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
def _prepare(address: int, fields: int, code_address: int, task: int, slot: int) -> None:
    """Quantise inputs, and for many tokens write their words column by column, before a thread's first task."""
    this, op, code = read_pass(address), read_linear(fields), read_code(code_address)
    n, x = this.outputs if op.which else this.n, op.x if op.x else this.x
    if op.floats and n > op.few_tokens:
        lanes = lanes_of(op)
        for t in range(0, n, lanes):
            to = slot + t // lanes * group_bytes(op)
            call(code.transpose, x + t * op.x_row, op.x_row, min(lanes, n - t) - 1, (op.words + lanes - 1) // lanes, to)
    if op.integers:
        to = slot + columns_bytes(op, n)
        for t in range(n):
            quantise(x + t * op.x_row, op.words // INPUT_BLOCK, to + t * quantised_row(op))


@compiled
def _run(address: int, fields: int, code_address: int, task: int, slot: int) -> None:
    this, op = read_pass(address), read_linear(fields)
    n, x, y = this.outputs if op.which else this.n, op.x if op.x else this.x, op.y if op.y else this.y
    lanes = lanes_of(op)
    size, quantised = (n + lanes - 1) // lanes * lanes * LINE, slot + columns_bytes(op, n)
    all_sums = quantised + (n * quantised_row(op) + LINE - 1) // LINE * LINE
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
    op, n, lanes = read_linear(fields), inputs.n, lanes_of(read_linear(fields))
    at, before, p = op.table, 0, pair if op.mode == GATE else 2 * pair
    a = read_matrix(at)
    while op.mode != GATE and p >= (a.panels + 1) // 2 * 2:
        p, before, at = p - (a.panels + 1) // 2 * 2, before + a.outs, at + MATRIX_BYTES
        a = read_matrix(at)
    other = at + MATRIX_BYTES if op.mode == GATE else at
    q = p if op.mode == GATE else min(p + 1, a.panels - 1)
    ahead = further * (1 if op.mode == GATE else 2) * lanes
    one, two = panel_of(fields, n, at, p, column, sums), panel_of(fields, n, other, q, column, twin)
    sum_over(fields, code, inputs, one, two, ahead, spare)
    if column + inputs.words < op.words:
        return
    number = 4 if op.to_kind == 0 else 2 if op.to_kind == 1 else 8
    place = y + (before + p * lanes) * number
    _finish(fields, n, min(lanes, a.outs - p * lanes), sums, twin, place, number, spare)
    if q > p:
        _finish(fields, n, min(lanes, a.outs - q * lanes), twin, twin, place + lanes * number, number, spare)


@compiled
def _finish(fields: int, n: int, valid: int, sums: int, twin: int, y: int, number: int, spare: int) -> None:
    op = read_linear(fields)
    full = valid == lanes_of(op)
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
