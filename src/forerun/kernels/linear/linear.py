"""Linear layers that sum every output in one fixed order, whatever else is in the pass.

An output starts with its bias and adds the products of weights and inputs column by column, in one accumulator. So the
bits of a token's outputs do not depend on the other tokens of the pass, on how many there are, or on threads. With
attention (``ordered_attention.py``) this makes speculative decoding bitwise exact. Weights are read once for all tokens of a
pass, row by row where the model stores them (``panels.py``). Nothing is packed, copied or kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from forerun.core.compiling import compiled
from forerun.kernels.linear.panels import few, many, transpose
from forerun.kernels.linear.rowwise import gated, words
from forerun.kernels.runtime.addresses import StructLayout, address_of, bytes_at, call5, call7, call8, doubles, floats
from forerun.kernels.runtime.executor import Operation, Tasks, read_pass
from forerun.kernels.runtime.vector_ir import LINE

CHUNK = 64
"""Tiles whose columns are written to a buffer at once: 64 KiB."""
PUT, ADD, GATE = 0, 1, 2
"""What happens to the sums. ``PUT``: stored. ``ADD``: added to floats. ``GATE``: activated, and multiplied by the sums
of the second matrix."""


class LinearOp(NamedTuple):
    """One to three matrices over the same tokens: addresses, strides in bytes, and counts.

    Attributes:
        which: 0 for all tokens of the pass, 1 for those whose logits are wanted.
        kind: type of the numbers: 0 float32, 1 bfloat16, 2 float64 (``panels.KINDS``).
        x: address of the tokens' rows, in whole vectors; 0 for those of the pass.
        row: bytes per row of weights.
        mode: ``PUT``, ``ADD`` or ``GATE``.
        to_kind: type of the results for ``PUT``.
        panels: of all matrices; of the first, for ``GATE``.
        share: panels that a thread takes at once.
        turn: panels in the shares of all threads; where a thread's next share begins if all are equally fast.
        w0: address of the first matrix, which has ``outs0`` rows; ``bias0`` is 0 if there is none.
        y: address of the results' rows; 0 for those of the pass. The matrices' results are side by side.
        activation: of gates.
    """

    which: int
    kind: int
    x: int
    x_row: int
    row: int
    mode: int
    to_kind: int
    panels: int
    share: int
    turn: int
    activation: int
    y: int
    y_row: int
    w0: int
    w1: int
    w2: int
    outs0: int
    outs1: int
    outs2: int
    bias0: int
    bias1: int
    bias2: int


class Panels(NamedTuple):
    """Addresses of the machine code for one kind of number (``panels.py``)."""

    few: int
    many: int
    transpose: int


LINEAR_LAYOUT, PANELS = StructLayout(LinearOp), StructLayout(Panels)
read_linear, read_panels = LINEAR_LAYOUT.reader(), PANELS.reader()


@functools.cache
def panels_of(kind: int) -> Panels:
    """The machine code for a kind, compiled or loaded at the first call."""

    @compiled
    def few_tokens(tokens: int, w: int, row: int, last: int, x: int, steps: int, ahead: int, sums: int) -> None:
        few(kind, tokens, w, row, last, x, steps, ahead, sums)

    @compiled
    def many_tokens(tokens: int, columns: int, x: int, steps: int, ahead: int, row: int, sums: int) -> None:
        many(kind, tokens, columns, x, steps, ahead, row, sums)

    @compiled
    def columns_of(w: int, row: int, last: int, steps: int, to: int) -> None:
        transpose(kind, w, row, last, steps, to)

    counts: tuple[tuple[Callable[..., None], int], ...] = ((few_tokens, 8), (many_tokens, 7), (columns_of, 5))
    return Panels(*(address_of(function, count) for function, count in counts))


def room(tokens: int, row: int) -> int:
    """Bytes that a thread needs, for ``tokens`` tokens and rows of ``row`` bytes."""
    blocks, steps = -(-tokens // 8), -(-row // LINE)
    return blocks * steps * 16 * LINE + 2 * tokens * LINE + CHUNK * 16 * LINE + 16 * LINE + LINE


@compiled
def _lanes(op: LinearOp) -> int:
    return 8 if op.kind == 2 else 16


@compiled
def linear_prepare(address: int, fields: int, code_address: int, task: int, slot: int) -> None:
    """A thread's preparation before its first piece of work: write all tokens' words side by side, block by block."""
    this, op, code = read_pass(address), read_linear(fields), read_panels(code_address)
    n, x = this.outputs if op.which else this.n, op.x if op.x else this.x
    lanes, steps = _lanes(op), (op.row + LINE - 1) // LINE
    for t in range(0, n, lanes):
        to = slot + t // lanes * steps * lanes * LINE
        call5(code.transpose, x + t * op.x_row, op.x_row, min(lanes, n - t) - 1, steps, to)


@compiled
def _begun(op: LinearOp, n: int) -> int:
    """Bytes of all tokens' words."""
    lanes = _lanes(op)
    return (n + lanes - 1) // lanes * ((op.row + LINE - 1) // LINE) * lanes * LINE


@compiled
def linear_run(address: int, fields: int, code_address: int, task: int, slot: int) -> None:
    """Compute the panels of one piece of work, for all tokens."""
    this, op, code = read_pass(address), read_linear(fields), read_panels(code_address)
    n, y = this.outputs if op.which else this.n, op.y if op.y else this.y
    lanes = _lanes(op)
    number = 4 if op.to_kind == 0 else 2 if op.to_kind == 1 else 8
    first0 = (op.outs0 + lanes - 1) // lanes
    first1 = first0 + (op.outs1 + lanes - 1) // lanes
    sums = slot + _begun(op, n)
    twin = sums + n * LINE
    spare = twin + n * LINE
    for panel in range(task * op.share, min(op.panels, (task + 1) * op.share)):
        w, outs, bias, before, p = op.w0, op.outs0, op.bias0, 0, panel
        if op.mode != GATE and panel >= first1:
            w, outs, bias, before, p = op.w2, op.outs2, op.bias2, op.outs0 + op.outs1, panel - first1
        elif op.mode != GATE and panel >= first0:
            w, outs, bias, before, p = op.w1, op.outs1, op.bias1, op.outs0, panel - first0
        valid = min(lanes, outs - p * lanes)
        further = 1 if panel + 1 < (task + 1) * op.share else op.turn - op.share + 1
        _panel(op, code, n, slot, w, p, further, valid, bias, sums, spare)
        place = y + (before + p * lanes) * number
        if op.mode == GATE:
            _panel(op, code, n, slot, op.w1, p, further, valid, op.bias1, twin, spare)
        finish(op, n, valid, sums, twin, place, number, spare)


@compiled
def _panel(
    op: LinearOp, code: Panels, n: int, x: int, w: int, p: int, further: int, valid: int, bias: int, sums: int,
    spare: int,
) -> None:  # fmt: skip
    """Sums of all tokens with one panel: whole vectors chunk by chunk, then the remaining columns. Meanwhile prefetches
    a later panel."""
    lanes, steps = _lanes(op), op.row // LINE
    size = (op.row + LINE - 1) // LINE * lanes * LINE
    begin_sums(op, n, bias, p * lanes, valid, sums)
    here = w + p * lanes * op.row
    row, first, columns = op.row, 0, spare + 16 * LINE
    after = here + further * lanes * row
    while True:
        if first >= steps:
            rest = op.row - steps * LINE
            if first > steps or not rest:
                return
            _last(here + steps * LINE, op.row, rest, valid, spare)
            here, row, count = spare - first * LINE, LINE, 1
            after = here
        else:
            count = steps if n <= lanes else min(CHUNK, steps - first)
        at = first * LINE
        if n <= lanes:
            call8(code.few, n, here + at, row, valid - 1, x + at * lanes, count, after + at, sums)
        else:
            call5(code.transpose, here + at, row, valid - 1, count, columns)
            for t in range(0, n, lanes):
                words_at = x + t // lanes * size + at * lanes
                next_panel, next_row = (after + at, row) if t == 0 else (columns, 0)
                number = min(lanes, n - t)
                call7(code.many, number, columns, words_at, count, next_panel, next_row, sums + t * LINE)
        first = first + count if first < steps else steps + 1


@compiled
def begin_sums(op: Any, n: int, bias: int, first: int, valid: int, sums: int) -> None:
    """Start every token's sums with the bias."""
    line = floats(sums, 16)
    line[:] = 0.0
    if bias:
        if op.kind == 0:
            source = floats(bias + 4 * first, valid)
            for i in range(valid):
                line[i] = source[i]
        elif op.kind == 1:
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
def _last(w: int, row: int, rest: int, valid: int, to: int) -> None:
    """Copy the columns after the last whole vector, padded with zeros."""
    for i in range(valid):
        source, tile = bytes_at(w + i * row, rest), bytes_at(to + i * LINE, LINE)
        for c in range(rest):
            tile[c] = source[c]
        for c in range(rest, LINE):
            tile[c] = 0


@compiled
def finish(op: Any, n: int, valid: int, sums: int, twin: int, y: int, number: int, spare: int) -> None:
    """Turn sums into results, as ``op.mode`` says."""
    whole = valid == _lanes(op)
    for t in range(n):
        at, place = sums + t * LINE, y + t * op.y_row
        to = place if whole else spare
        if op.mode == GATE:
            gated(op.to_kind, op.activation, at, twin + t * LINE, to)
        elif op.mode == ADD:
            source, target = floats(at, valid), floats(place, valid)
            for i in range(valid):
                target[i] += source[i]
            continue
        else:
            words(1 if op.to_kind == 1 else 0, at, 1, to)
        if not whole:
            source_bytes, target_bytes = bytes_at(spare, valid * number), bytes_at(place, valid * number)
            for i in range(valid * number):
                target_bytes[i] = source_bytes[i]


LINEAR = Operation(
    LINEAR_LAYOUT,
    lambda op: Tasks(-(-op.panels // op.share)),
    linear_run,
    lambda op: panels_of(op.kind),
    linear_prepare,
)
