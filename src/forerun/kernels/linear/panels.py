"""Multiply tokens' words by a panel of a weight matrix, which is read once, in place.

A panel has as many rows as a vector has lanes. An output is one sum in one accumulator, in the order of the columns, so
it does not depend on what shares the pass, or on threads. For a few tokens the columns of two panels are used as they
are unpacked, and each lane is an output (``few``). For more, a block of unpacked columns is first written to a buffer
(``unpack``, ``many``). Weights that need no unpacking stay in rows, and each lane is a token (``many_in_rows``,
``many_in_tiles``): transposing a tile's weights cost 43 of 300 cycles. Only there the multiplication reads its
broadcast operand from memory itself: a separate instruction costs 1.34 cycles instead of 1 (Zen 4).

``row`` is the stride between rows in bytes, and ``last`` a panel's last existing row, which is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

from llvmlite import ir
from numba.core import cgutils

from forerun.kernels.linear.weight_format import FLOAT32, PLAIN_FORMATS, Rows, WeightFormat, transposed
from forerun.kernels.runtime.vector_ir import I64, LANES, LINE, Emitter, llvm_function, wide

MANY_TOKENS = (4, 6, 8, 10, 12)
"""Token counts with separate code, up to the most whose sums over two panels fit in registers with a column of each."""
INTEGER_TOKENS = (1, 2, 4, 8) if wide() else (1, 2, 4)
"""Token counts with separate code, up to the most whose sums fit in registers, as integers and as floats."""
FEW_INTEGER_TOKENS = 2 * INTEGER_TOKENS[-1] if wide() else INTEGER_TOKENS[-1]
"""Tokens up to which unpacking a panel again costs less than writing its codes to a buffer: 4 to 14 % for 16. With half
the registers, the buffer saves 5 to 35 % for 8 (Zen 4)."""
NARROW_ROWS = 4
"""Rows whose sums over a line's words of tokens fit in 16 half-line registers with a column and a weight."""
NARROW_TOKENS = 6
"""Tokens whose sums with a panel's column fit in them."""


def format_number(name: str) -> int:
    """Return a format's number in machine code: plain formats first, then those of GGUF files."""
    plain = [each.name for each in PLAIN_FORMATS]
    if name in plain:
        return plain.index(name)
    from forerun.kernels.linear.gguf_formats import GGUF_FORMATS  # not needed for plain weights

    return len(plain) + [each.name for each in GGUF_FORMATS].index(name)


def format_of(number: int) -> WeightFormat:
    """Return the format of a number."""
    if number < len(PLAIN_FORMATS):
        return PLAIN_FORMATS[number]
    from forerun.kernels.linear.gguf_formats import GGUF_FORMATS

    return GGUF_FORMATS[number - len(PLAIN_FORMATS)]


@llvm_function(constants=1)
def few(
    e: Emitter, which: int, tokens: ir.Value, w: ir.Value, other: ir.Value, row: ir.Value, last: ir.Value,
    other_last: ir.Value, x: ir.Value, x_row: ir.Value, blocks: ir.Value, ahead: ir.Value, sums: ir.Value,
) -> None:  # fmt: skip
    """Add products of one or two panels with a few tokens' words at ``x`` to the sums ``[panels][LANES][lanes]``.
    Prefetches the panel ``ahead`` bytes after each. Overwrites sums after the last token's, up to the next of the
    format's ``few_tokens``."""
    each = format_of(which)
    numbers, starts = each.numbers, (w, other)[: each.panels]
    for size in least_that_suffices(e, tokens, each.few_tokens):
        panels = [
            rows_of(e, each.numbers.lanes, *one) for one in ((w, row, last), (other, row, other_last))[: each.panels]
        ]
        places = [e.at(sums, panel * LANES * LINE) for panel in range(each.panels)]
        totals = [[e.variable(e.load(e.at(place, t * LINE), numbers.vector)) for t in range(size)] for place in places]
        final = e.builder.sub(tokens, I64(1))
        rows_of_x = [e.at(x, e.times(x_row, least(e, I64(t), final))) for t in range(size)]
        with e.loop(blocks) as block:
            blocks_of = [[e.at(address, e.times(block, each.bytes)) for address in rows] for rows in panels]
            scales = [each.scales(e, rows) for rows in blocks_of]
            with parts_of(e, each.parts) as part:
                for start in starts:
                    prefetch_part(e, each, each.numbers.lanes, e.at(start, ahead), row, block, part)
                words = [e.at(address, _word_bytes(e, each, block, part)) for address in rows_of_x]
                unpacked = [each.unpack(e, rows, some, part) for rows, some in zip(blocks_of, scales, strict=True)]
                for i, columns in enumerate(zip(*unpacked, strict=True)):
                    for t, at in enumerate(words):
                        word = e.load(e.at(at, i * numbers.bytes), numbers.word)
                        for some, column in zip(totals, columns, strict=True):
                            e.builder.store(numbers.add(e, column, word, e.builder.load(some[t])), some[t])
        for place, some in zip(places, totals, strict=True):
            for t, total in enumerate(some):
                e.store(e.builder.load(total), e.at(place, t * LINE))


def least_that_suffices(e: Emitter, tokens: ir.Value, sizes: Sequence[int]) -> Iterator[int]:
    """Write a loop's body for each of the token counts; at run time the smallest sufficient one runs."""
    b, before = e.builder, 0
    for size in sizes:
        fits = b.and_(b.icmp_signed(">", tokens, I64(before)), b.icmp_signed("<=", tokens, I64(size)))
        with b.if_then(fits):
            yield size
        before = size


@llvm_function(constants=1)
def unpack(
    e: Emitter, which: int, w: ir.Value, row: ir.Value, last: ir.Value, blocks: ir.Value, ahead: ir.Value, to: ir.Value
) -> None:
    """Write the columns of a panel's blocks to ``to``, one after the other."""
    _unpack(e, format_of(which), w, row, last, blocks, ahead, to)


@llvm_function(constants=1)
def transpose(e: Emitter, kind: int, x: ir.Value, row: ir.Value, last: ir.Value, steps: ir.Value, to: ir.Value) -> None:
    """Write the words of up to ``lanes`` tokens at ``x`` to ``to``, those of one column side by side."""
    _unpack(e, PLAIN_FORMATS[kind], x, row, last, steps, I64(0), to)


def _unpack(
    e: Emitter, each: WeightFormat, w: ir.Value, row: ir.Value, last: ir.Value, blocks: ir.Value, ahead: ir.Value,
    to: ir.Value,
) -> None:  # fmt: skip
    rows = rows_of(e, each.numbers.lanes, w, row, last)
    with e.loop(blocks) as block:
        places = [e.at(address, e.times(block, each.bytes)) for address in rows]
        scales = each.scales(e, places)
        with parts_of(e, each.parts) as part:
            prefetch_part(e, each, each.numbers.lanes, e.at(w, ahead), row, block, part)
            at = e.at(to, e.times(_word_bytes(e, each, block, part), each.numbers.lanes))
            for i, column in enumerate(each.unpack(e, places, scales, part)):
                e.store(column, e.at(at, i * LINE))


def rows_of(e: Emitter, count: int, w: ir.Value, row: ir.Value, last: ir.Value) -> Rows:
    """Return the addresses of a panel's rows."""
    return [e.at(w, e.times(row, least(e, I64(i), last))) for i in range(count)]


def least(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return the smaller of two counts."""
    return e.builder.select(e.builder.icmp_signed("<", a, b), a, b)


def _word_bytes(e: Emitter, each: WeightFormat, block: ir.Value, part: ir.Value) -> ir.Value:
    word = e.builder.add(e.times(block, each.words), e.times(part, each.words // each.parts))
    return e.times(word, each.numbers.bytes)


class InParts(Protocol):
    """Blocks that are read in parts: bytes per block, and parts."""

    bytes: int
    parts: int


def prefetch_part(
    e: Emitter, each: InParts, rows: int, ahead: ir.Value, row: ir.Value, block: ir.Value, part: ir.Value
) -> None:
    """Prefetch a part of a block of the panel ahead: line by line of its rows, or in memory order if blocks are not
    lines. In memory order, a float32 pass over 8 tokens was 14 % slower (SmolLM2, two threads)."""
    if each.bytes == LINE:
        for i in range(rows):
            e.prefetch(e.at(ahead, e.times(row, I64(i)), e.times(block, LINE)))
        return
    size = rows * each.bytes // each.parts
    here = e.at(ahead, e.times(e.builder.add(e.times(block, each.parts), part), size))
    for at in range(0, size, LINE):
        e.prefetch(e.at(here, at))


@contextmanager
def parts_of(e: Emitter, count: int) -> Iterator[ir.Value]:
    """Repeat the code inside for each part of a block; yields the part's number."""
    if count == 1:
        yield I64(0)
    else:
        with e.loop(I64(count)) as part:
            yield part


@llvm_function()
def many(
    e: Emitter, tokens: ir.Value, columns: ir.Value, other: ir.Value, count: ir.Value, x: ir.Value, sums: ir.Value,
    other_sums: ir.Value,
) -> None:  # fmt: skip
    """Add products of ``count`` columns of two panels with the floats of up to 12 tokens to the panels' sums. All
    tokens' floats for one column are one cache line. The second panel may repeat the first, with the same sums, which
    count once. Overwrites sums after the last token's, up to the next of ``MANY_TOKENS``."""
    panels, two = [(sums, columns), (other_sums, other)], e.builder.icmp_signed("!=", sums, other_sums)
    for size in least_that_suffices(e, tokens, MANY_TOKENS):
        at_once = size if wide() else NARROW_TOKENS
        for i, some in enumerate([panels] if wide() else [[panel] for panel in panels]):
            with e.builder.if_then(two) if i else nullcontext():
                for first in range(0, size, at_once):
                    _products(e, range(first, min(size, first + at_once)), some, count, x)


def _products(
    e: Emitter, tokens: range, panels: Sequence[tuple[ir.Value, ir.Value]], count: ir.Value, x: ir.Value
) -> None:
    b = e.builder
    totals = [[e.variable(e.load(e.at(place, t * LINE))) for t in tokens] for place, _ in panels]
    with e.loop(count) as i:
        here = e.times(i, LINE)
        weights, words = [e.load(e.at(columns, here)) for _, columns in panels], e.at(x, here)
        for at, t in enumerate(tokens):
            word = e.load(e.at(words, t * FLOAT32.bytes), FLOAT32.word)
            for some, column in zip(totals, weights, strict=True):
                b.store(FLOAT32.add(e, column, word, b.load(some[at])), some[at])
    for (place, _), some in zip(panels, totals, strict=True):
        for t, total in zip(tokens, some, strict=True):
            e.store(b.load(total), e.at(place, t * LINE))


@llvm_function(constants=1)
def many_in_rows(
    e: Emitter, kind: int, tokens: ir.Value, w: ir.Value, row: ir.Value, last: ir.Value, x: ir.Value, steps: ir.Value,
    ahead: ir.Value, tiles: ir.Value, sums: ir.Value,
) -> None:  # fmt: skip
    """Add products of a panel in rows with the words of up to ``lanes`` tokens to its sums ``[lanes][lanes]``. All
    tokens' words for one column are one cache line. Prefetches the panel ``ahead`` bytes after. With AVX-512, copies
    the panel to ``tiles`` ``[steps][lanes]``, a line each, for ``many_in_tiles``."""
    each = PLAIN_FORMATS[kind]
    lanes = each.numbers.lanes
    if not wide():
        for size in least_that_suffices(e, tokens, (lanes // 2, lanes)):
            _some_rows_at_once(e, each, size, w, row, last, x, steps, ahead, sums)
        return
    rows = rows_of(e, each.numbers.lanes, w, row, last)

    def copy(step: ir.Value) -> None:
        prefetch_part(e, each, each.numbers.lanes, e.at(w, ahead), row, step, I64(0))
        to = e.at(tiles, e.times(step, lanes * LINE))
        for r, address in enumerate(rows):
            e.store(e.load(e.at(address, e.times(step, LINE)), each.numbers.vector), e.at(to, r * LINE))

    _many_in_tiles(e, each, tiles, x, steps, sums, copy)


@llvm_function(constants=1)
def many_in_tiles(e: Emitter, kind: int, tiles: ir.Value, x: ir.Value, steps: ir.Value, sums: ir.Value) -> None:
    """Multiply further tokens with the copy of ``many_in_rows``. Copying again costs a sixth of the time (Zen 5)."""
    _many_in_tiles(e, PLAIN_FORMATS[kind], tiles, x, steps, sums)


def _many_in_tiles(
    e: Emitter, each: WeightFormat, tiles: ir.Value, x: ir.Value, steps: ir.Value, sums: ir.Value,
    copy: Callable[[ir.Value], None] | None = None,
) -> None:  # fmt: skip
    """Multiply a panel's tiles; ``copy`` writes each tile a step early, because a fresh store is not yet readable."""
    b, numbers = e.builder, each.numbers
    lanes, size = numbers.lanes, numbers.lanes * LINE
    begin = transposed(e, [e.load(e.at(sums, t * LINE), numbers.vector) for t in range(lanes)])
    totals = [e.variable(total) for total in begin]
    if copy is not None:
        copy(I64(0))
    with e.loop(steps) as step:
        if copy is not None:
            copy(least(e, b.add(step, I64(1)), b.sub(steps, I64(1))))
        words, tile = e.at(x, e.times(step, size)), e.at(tiles, e.times(step, size))
        with e.loop(I64(lanes)) as column:
            line = e.load(e.at(words, e.times(column, LINE)), numbers.vector)
            weights = e.at(tile, e.times(column, numbers.bytes))
            for r, total in enumerate(totals):
                weight = e.load(e.at(weights, r * LINE), numbers.word)
                b.store(numbers.add(e, line, weight, b.load(total)), total)
    for t, total in enumerate(transposed(e, [b.load(total) for total in totals])):
        e.store(total, e.at(sums, t * LINE))


def _some_rows_at_once(
    e: Emitter, each: WeightFormat, size: int, w: ir.Value, row: ir.Value, last: ir.Value, x: ir.Value,
    steps: ir.Value, ahead: ir.Value, sums: ir.Value,
) -> None:  # fmt: skip
    """Multiply with half as many registers of half the width: the rows whose sums fit in them, then the next ones."""
    b, numbers, rows = e.builder, each.numbers, rows_of(e, each.numbers.lanes, w, row, last)
    lanes, at_once = numbers.lanes, NARROW_ROWS * numbers.lanes // size
    vector = ir.VectorType(numbers.vector.element, size)
    kept = b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(numbers.vector, lanes)), I64)
    for r, total in enumerate(transposed(e, [e.load(e.at(sums, t * LINE), numbers.vector) for t in range(lanes)])):
        e.store(total, e.at(kept, r * LINE))
    for first in range(0, lanes, at_once):
        places = [e.at(kept, r * LINE) for r in range(first, first + at_once)]
        totals = [e.variable(e.load(place, vector)) for place in places]
        with e.loop(steps) as step:
            if not first:
                prefetch_part(e, each, each.numbers.lanes, e.at(w, ahead), row, step, I64(0))
            words, here = e.at(x, e.times(step, lanes * LINE)), e.times(step, LINE)
            weights = [e.at(address, here) for address in rows[first : first + at_once]]
            with e.loop(I64(lanes)) as column:
                line, at = e.load(e.at(words, e.times(column, LINE)), vector), e.times(column, numbers.bytes)
                for address, total in zip(weights, totals, strict=True):
                    weight = e.load(e.at(address, at), numbers.word)
                    b.store(numbers.add(e, line, weight, b.load(total)), total)
        for total, place in zip(totals, places, strict=True):
            e.store(b.load(total), place)
    done = [e.load(e.at(kept, r * LINE), numbers.vector) for r in range(lanes)]
    for t, total in enumerate(transposed(e, done)):
        e.store(total, e.at(sums, t * LINE))
