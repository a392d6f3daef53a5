"""Products with weights as a GGUF file stores them, unpacked in registers.

Two panels of sixteen rows are read side by side, because a single sum would wait for each product. For a few tokens the
columns are used as they are unpacked. For more, they are written to a buffer once and used like float32 weights. Either
way an output is the sum that the same weights in float32 give, column by column.

All arguments are addresses or counts; ``row`` is the stride between rows in bytes, and ``last`` the last existing row
of a panel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from forerun.kernels.linear.panels import by_kind, least
from forerun.kernels.quantized.formats import FORMATS, Format
from forerun.kernels.quantized.gather import Rows
from forerun.kernels.runtime.vector_ir import F32, I64, LANES, LINE, Code, Emitter, intrinsic, intrinsic_code

FEW = 5
"""The most tokens whose sums over two panels fit in registers while columns are unpacked."""
TOGETHER = 12
"""The most tokens whose sums over two panels fit in registers beside one column of each."""
SIZES = (4, 6, 8, 10, TOGETHER)
"""Token counts with code of their own in ``multiply``; a smaller rest uses the next larger one."""


@by_kind
def pair(
    typing: Any, which: Any, tokens: Any, w: Any, other: Any, row: Any, last: Any, other_last: Any, x: Any, x_row: Any,
    blocks: Any, ahead: Any, sums: Any,
) -> Code:  # fmt: skip
    """Add to two panels' sums ``[2][tokens][lanes]`` their products with the floats at ``x`` of up to ``FEW`` tokens.

    Meanwhile prefetches the panel ``ahead`` bytes after each.
    """
    each = FORMATS[which.literal_value]

    def emit(e: Emitter, _: ir.Value, tokens: ir.Value, *rest: ir.Value) -> None:
        for size in range(1, FEW + 1):
            with e.builder.if_then(e.builder.icmp_signed("==", tokens, I64(size))):
                _pair(e, each, size, *rest)

    return intrinsic_code(12, emit, constant=which)


@by_kind
def unpack(typing: Any, which: Any, w: Any, row: Any, last: Any, blocks: Any, ahead: Any, to: Any) -> Code:
    """Write the columns of a panel's blocks to ``to`` as floats, one after the other."""
    each = FORMATS[which.literal_value]
    return intrinsic_code(7, lambda e, _, *rest: _unpack(e, each, *rest), constant=which)


def _pair(
    e: Emitter, each: Format, size: int, w: ir.Value, other: ir.Value, row: ir.Value, last: ir.Value,
    other_last: ir.Value, x: ir.Value, x_row: ir.Value, blocks: ir.Value, ahead: ir.Value, sums: ir.Value,
) -> None:  # fmt: skip
    b = e.builder
    panels = [_rows(e, w, row, last), _rows(e, other, row, other_last)]
    places = [sums, e.at(sums, size * LINE)]
    totals = [[e.variable(e.load(e.at(place, t * LINE))) for t in range(size)] for place in places]
    tokens = [e.at(x, e.times(x_row, t)) for t in range(size)]
    with e.loop(blocks) as block:
        here = e.times(block, each.bytes)
        for start in (w, other):
            _ask(e, each, e.at(start, ahead), block)
        blocks_of = [[e.at(address, here) for address in rows] for rows in panels]
        scales = [each.scales(e, rows) for rows in blocks_of]
        with _parts(e, each) as part:
            width = each.columns // each.parts
            column = b.add(e.times(block, each.columns), e.times(part, width))
            words = [e.at(token, e.times(column, 4)) for token in tokens]
            unpacked = [each.unpack(e, rows, some, part) for rows, some in zip(blocks_of, scales, strict=True)]
            for i, columns in enumerate(zip(*unpacked, strict=True)):
                for t, at in enumerate(words):
                    word = e.everywhere(e.load(e.at(at, 4 * i), F32))
                    for total, weights in zip(totals, columns, strict=True):
                        b.store(e.fma(word, weights, b.load(total[t])), total[t])
    for place, some in zip(places, totals, strict=True):
        for t, total in enumerate(some):
            e.store(b.load(total), e.at(place, t * LINE))


def _unpack(
    e: Emitter, each: Format, w: ir.Value, row: ir.Value, last: ir.Value, blocks: ir.Value, ahead: ir.Value,
    to: ir.Value,
) -> None:  # fmt: skip
    rows = _rows(e, w, row, last)
    with e.loop(blocks) as block:
        here = e.times(block, each.bytes)
        _ask(e, each, e.at(w, ahead), block)
        places = [e.at(address, here) for address in rows]
        scales = each.scales(e, places)
        with _parts(e, each) as part:
            width = each.columns // each.parts
            column = e.builder.add(e.times(block, each.columns), e.times(part, width))
            at = e.at(to, e.times(column, LINE))
            for i, weights in enumerate(each.unpack(e, places, scales, part)):
                e.store(weights, e.at(at, i * LINE))


def _rows(e: Emitter, w: ir.Value, row: ir.Value, last: ir.Value) -> Rows:
    return [e.at(w, e.times(row, least(e, I64(i), last))) for i in range(LANES)]


def _ask(e: Emitter, each: Format, ahead: ir.Value, block: ir.Value) -> None:
    """Prefetch as many bytes of the panel ahead, in memory order, as one block of all rows has."""
    size = LANES * each.bytes
    here = e.at(ahead, e.times(block, size))
    for at in range(0, size, LINE):
        e.prefetch(e.at(here, at))


@contextmanager
def _parts(e: Emitter, each: Format) -> Iterator[ir.Value]:
    """Repeat the code inside for each part of a block; yields the part's number."""
    if each.parts == 1:
        yield I64(0)
    else:
        with e.loop(I64(each.parts)) as part:
            yield part


@intrinsic
def multiply(
    typing: Any, tokens: Any, columns: Any, other: Any, count: Any, x: Any, sums: Any, other_sums: Any
) -> Code:
    """Add to two panels' sums the products of ``count`` columns of each with the words of up to ``TOGETHER`` tokens.

    A column's words are one cache line. Sums after the last token's are overwritten, up to the next of ``SIZES``.
    """

    def emit(e: Emitter, tokens: ir.Value, *rest: ir.Value) -> None:
        b, before = e.builder, 0
        for size in SIZES:
            fits = b.and_(b.icmp_signed(">", tokens, I64(before)), b.icmp_signed("<=", tokens, I64(size)))
            with b.if_then(fits):
                _multiply(e, size, *rest)
            before = size

    return intrinsic_code(7, emit)


def _multiply(
    e: Emitter, size: int, columns: ir.Value, other: ir.Value, count: ir.Value, x: ir.Value, sums: ir.Value,
    other_sums: ir.Value,
) -> None:  # fmt: skip
    b, places = e.builder, (sums, other_sums)
    totals = [[e.variable(e.load(e.at(place, t * LINE))) for t in range(size)] for place in places]
    with e.loop(count) as i:
        here = e.times(i, LINE)
        weights = [e.load(e.at(start, here)) for start in (columns, other)]
        words = e.at(x, here)
        for t in range(size):
            word = e.everywhere(e.load(e.at(words, 4 * t), F32))
            for some, column in zip(totals, weights, strict=True):
                b.store(e.fma(word, column, b.load(some[t])), some[t])
    for place, some in zip(places, totals, strict=True):
        for t, total in enumerate(some):
            e.store(b.load(total), e.at(place, t * LINE))
