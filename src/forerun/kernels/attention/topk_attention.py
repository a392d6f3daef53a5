"""Attention of each query over its own chunks, read in place, given the worth of every chunk to the query.

A thread takes a token and a few heads: it finds the best chunks, scores their keys, and adds up their values. Nothing
is copied. Heads of a group choose together, and each key is then loaded once for all of them. Many heads look at a few
places only, so chunks that are worth almost nothing beside the best are skipped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from forerun.core.compiling import compiled
from forerun.kernels.attention.ordered_attention import ROW_BYTES, RowFields, read_row
from forerun.kernels.attention.short_key_scan import CHUNK
from forerun.kernels.attention.topk_rank import HEADS, SOUGHT_BYTES, SoughtFields, SoughtOp, read_sought
from forerun.kernels.attention.topk_select import choose, numbers_of
from forerun.kernels.linear.rowwise import HALF_LINE, by_kind, number, words
from forerun.kernels.runtime.addresses import floats, integers
from forerun.kernels.runtime.vector_ir import F32, I64, LANES, LINE, Code, Emitter, constant, intrinsic, intrinsic_code

KEYS = 4
"""Keys whose products are kept in registers at once."""
SUMS = 4
"""Sums of every fourth value that are kept apart, so that additions need not wait for each other."""
MARGIN = 7.0
"""Chunks further than this below the best score, in nats, are skipped: their keys weigh under a thousandth."""


@compiled
def choose_tasks(op: SoughtOp, tokens: int) -> int:
    """The number of tasks for so many tokens."""
    return tokens * op.kv_heads * _tiles(op)


@compiled
def _tiles(op: SoughtOp) -> int:
    """Tiles of heads of a KV head. Heads that choose together read what they chose together."""
    group = op.heads // op.kv_heads
    return (group + HEADS - 1) // HEADS if op.joint else group


@compiled
def attend_chosen(op: SoughtOp, rows: int, owners: int, parents: int, task: int, slot: int) -> None:
    """One token and tile of heads: outputs and log-sum-exps."""
    tiles, group = _tiles(op), op.heads // op.kv_heads
    token, own, tile = task // tiles // op.kv_heads, task // tiles % op.kv_heads, task % tiles
    each = HEADS if op.joint else 1
    head, heads = own * group + tile * each, min(each, group - tile * each)
    number = integers(owners + 8 * token, 1)[0]
    row, seek = read_row(rows + number * ROW_BYTES), read_sought(op.sought + number * SOUGHT_BYTES)
    near = row.start + (row.n if op.block else 0)
    recent, room = (near + CHUNK - 1) // CHUNK, min(1 + seek.most, seek.chunks)
    query, step = slot, 4 * (room + recent) * CHUNK  # each head's bytes of weights
    found = query + LINE * ((4 * HEADS * op.dim + LINE - 1) // LINE)
    weights = found + 8 * (1 + numbers_of(seek.chunks))
    spare = weights + heads * step
    for g in range(heads):
        source = floats(op.q + token * op.q_row + (head + g) * op.q_head, op.dim)
        scaled = floats(query + 4 * g * op.dim, op.dim)
        for c in range(op.dim):
            scaled[c] = np.float32(source[c] * op.scale)
    count = _choose(op, seek, row, token, head, found, spare)
    chosen = integers(found, max(count, 1))
    k, v = seek.k + own * seek.k_head, seek.v + own * seek.v_head
    chunk_k, chunk_v = CHUNK * seek.k_row, CHUNK * seek.v_row
    for i in range(count):
        after, value = k + chosen[min(i + 1, count - 1)] * chunk_k, v + chosen[i] * chunk_v
        here, to = k + chosen[i] * chunk_k, weights + 4 * i * CHUNK
        products(op.kind, heads, query, here, seek.k_row, op.dim, to, step, after, value, seek.v_row)
    k = integers(op.kv + 16 * number, 2)[0] + own * row.k_head
    for i in range(recent):
        here, to = k + i * CHUNK * row.k_row, weights + 4 * (count + i) * CHUNK
        products(op.kind, heads, query, here, row.k_row, op.dim, to, step, here, here, row.k_row)
    sums = spare + LINE * heads
    floats(sums, heads * op.dim)[:] = np.float32(0)
    for g in range(heads):
        _hide(op, row, parents, token, weights + g * step + 4 * count * CHUNK, recent)
        exponentials(weights + g * step, count + recent, spare + LINE * g)
    for i in range(count):
        add(op.kind, heads, weights + 4 * i * CHUNK, step, v + chosen[i] * chunk_v, seek.v_row, op.dim, sums)
    v = integers(op.kv + 16 * number, 2)[1] + own * row.v_head
    for i in range(recent):
        here, from_here = v + i * CHUNK * row.v_row, weights + 4 * (count + i) * CHUNK
        add(op.kind, heads, from_here, step, here, row.v_row, op.dim, sums)
    for g in range(heads):
        _write(op, row, token, head + g, spare + LINE * g, sums + 4 * g * op.dim)


@compiled
def _write(op: SoughtOp, row: RowFields, token: int, head: int, state: int, sums: int) -> None:
    """One head's output and log-sum-exp, from its largest score, the sum of its weights, and its weighted values."""
    top, total = floats(state, 2)[0], floats(state, 2)[1]
    result, width = floats(sums, op.dim), 2 if op.out_kind == 1 else 4
    for c in range(op.dim):
        result[c] = np.float32(result[c] / total)
    words(op.out_kind, sums, op.dim // LANES, op.out + token * op.out_row + head * op.dim * width)
    if op.lse:
        floats(op.lse + 4 * (head * row.n + token), 1)[0] = np.float32((top + math.log2(total)) * math.log(2.0))


@compiled
def _choose(op: SoughtOp, seek: SoughtFields, row: RowFields, token: int, head: int, found: int, spare: int) -> int:
    """Write the numbers of the chunks that a query sees, in ascending order; returns how many."""
    if seek.most >= seek.chunks:
        every = integers(found, max(seek.chunks, 1))
        for c in range(seek.chunks):
            every[c] = c
        return seek.chunks
    group, place = op.heads // op.kv_heads, token - row.first
    first = seek.worth + head // group * seek.worth_head + place * seek.worth_row
    step, chunks = row.n * seek.worth_row, seek.chunks
    if op.joint and group > 1:
        # a chunk's worth to a group: the largest of its worths beside each query's best chunk
        beside, rest = floats(spare + 8 * chunks, chunks), spare + 12 * chunks
        beside[:] = -np.inf
        for g in range(group):
            each = floats(first + g * step, chunks)
            each[0] = -np.inf
            peak(each.ctypes.data, chunks // LANES, rest)
            top = floats(rest, 1)
            for c in range(chunks // LANES * LANES, chunks):
                top[0] = max(top[0], each[c])
            lift(each.ctypes.data, rest, beside.ctypes.data, chunks // LANES)
            for c in range(chunks // LANES * LANES, chunks):
                beside[c] = max(beside[c], each[c] - top[0])
        worth = beside
    else:
        worth = floats(first + head % group * step, chunks)
        worth[0] = -np.inf
    count = choose(worth, seek.most, MARGIN / (op.scale * math.log(2.0)), found + 8, spare)
    integers(found, 1)[0] = 0
    return count + 1


@compiled
def _hide(op: SoughtOp, row: RowFields, parents: int, token: int, scores: int, recent: int) -> None:
    """Hide the near keys that a token does not see: of the pass, all but the token and its ancestors."""
    each = floats(scores, recent * CHUNK)
    if not op.block:
        each[row.start :] = -np.inf
        return
    place = token - row.first
    if place < row.straight:
        each[row.start + place + 1 :] = -np.inf
        return
    first, nodes = row.start + row.straight, row.n - row.straight
    each[first + nodes :] = -np.inf
    at = place - row.straight
    for node in range(nodes - 1, -1, -1):
        if node == at:
            at = integers(parents + 8 * (row.first + row.straight + node), 1)[0]
        else:
            each[first + node] = -np.inf


@intrinsic
def peak(typing: Any, values: Any, vectors: Any, out: Any) -> Code:
    """The largest of a row of floats; minus infinity of none."""

    def emit(e: Emitter, values: ir.Value, vectors: ir.Value, out: ir.Value) -> None:
        b, highest = e.builder, e.variable(constant(-math.inf))
        with e.loop(vectors) as i:
            b.store(e.larger(e.load(e.at(values, e.times(i, LINE))), b.load(highest)), highest)
        e.store(e.largest(b.load(highest)), out)

    return intrinsic_code(3, emit)


@intrinsic
def lift(typing: Any, values: Any, less: Any, to: Any, vectors: Any) -> Code:
    """Raise each number at ``to`` to that of ``values``, minus the float at ``less``, if it is larger."""

    def emit(e: Emitter, values: ir.Value, less: ir.Value, to: ir.Value, vectors: ir.Value) -> None:
        every = e.everywhere(e.load(less, F32))
        with e.loop(vectors) as i:
            place = e.at(to, e.times(i, LINE))
            value = e.builder.fsub(e.load(e.at(values, e.times(i, LINE))), every)
            e.store(e.larger(value, e.load(place)), place)

    return intrinsic_code(4, emit)


@intrinsic
def products(
    typing: Any, kind: Any, heads: Any, q: Any, keys: Any, row: Any, dim: Any, out: Any, step: Any, ahead: Any,
    values: Any, values_row: Any,
) -> Code:  # fmt: skip
    """Products of each head's query with a chunk's keys, ``step`` bytes from head to head; meanwhile prefetches the
    chunks at ``ahead`` and ``values``."""
    return intrinsic_code(11, lambda e, *arguments: _each(e, _products, *arguments))


@intrinsic
def add(typing: Any, kind: Any, heads: Any, weights: Any, step: Any, values: Any, row: Any, dim: Any, out: Any) -> Code:
    """Add a chunk's values, weighted by each head's weights, to its output."""
    return intrinsic_code(8, lambda e, *arguments: _each(e, _add, *arguments))


@intrinsic
def exponentials(typing: Any, scores: Any, vectors: Any, state: Any) -> Code:
    """2 ** (score - largest score). The largest score is written to ``state``, and the sum of the results after it."""
    return intrinsic_code(3, _exponentials)


def _each(e: Emitter, emit: Callable[..., None], kind: ir.Value, heads: ir.Value, *rest: ir.Value) -> None:
    """Write code for each number of heads and both types of numbers."""
    for count in range(1, HEADS + 1):
        with e.builder.if_then(e.builder.icmp_signed("==", heads, I64(count))):
            by_kind(e, kind, functools.partial(emit, e, count, *rest))


def _products(
    e: Emitter, heads: int, q: ir.Value, keys: ir.Value, row: ir.Value, dim: ir.Value, out: ir.Value, step: ir.Value,
    ahead: ir.Value, values: ir.Value, values_row: ir.Value, half: bool,
) -> None:  # fmt: skip
    b, width = e.builder, HALF_LINE if half else LINE
    with e.loop(b.udiv(row.type(CHUNK), row.type(KEYS))) as group:
        first = e.times(group, KEYS)
        offsets = [e.times(e.at(first, j), row) for j in range(KEYS)]
        sums = [[e.variable(constant(0.0)) for _ in range(KEYS)] for _ in range(heads)]
        with e.loop(b.udiv(dim, row.type(LANES))) as c:
            line = e.times(c, width)
            parts = [e.load(e.at(q, e.times(c, LINE), e.times(dim, 4 * g))) for g in range(heads)]
            for j, offset in enumerate(offsets):
                e.prefetch(e.at(ahead, offset, line))
                e.prefetch(e.at(values, e.times(e.at(first, j), values_row), line))
                key = number(e, half, e.at(keys, offset), c)
                for part, places in zip(parts, sums, strict=True):
                    b.store(e.fma(key, part, b.load(places[j])), places[j])
        for g, places in enumerate(sums):
            for j, place in enumerate(places):
                e.store(e.total(b.load(place)), e.at(out, e.times(step, g), e.times(first, 4), 4 * j))


def _exponentials(e: Emitter, scores: ir.Value, vectors: ir.Value, state: ir.Value) -> None:
    b = e.builder
    highest = e.variable(e.load(scores))
    with e.loop(vectors) as i:
        b.store(e.larger(e.load(e.at(scores, e.times(i, LINE))), b.load(highest)), highest)
    top = e.largest(b.load(highest))
    every, total = e.everywhere(top), e.variable(constant(0.0))
    with e.loop(vectors) as i:
        place = e.at(scores, e.times(i, LINE))
        weight = e.exp2(b.fsub(e.load(place), every))
        e.store(weight, place)
        b.store(b.fadd(b.load(total), weight), total)
    e.store(top, state)
    e.store(e.total(b.load(total)), e.at(state, 4))


def _add(
    e: Emitter, heads: int, weights: ir.Value, step: ir.Value, values: ir.Value, row: ir.Value, dim: ir.Value,
    out: ir.Value, half: bool,
) -> None:  # fmt: skip
    b = e.builder
    with e.loop(b.udiv(dim, row.type(LANES))) as c:
        parts = [[e.variable(constant(0.0)) for _ in range(SUMS)] for _ in range(heads)]
        for key in range(CHUNK):
            value = number(e, half, e.at(values, e.times(row, key)), c)
            for g, places in enumerate(parts):
                weight = e.everywhere(e.load(e.at(weights, e.times(step, g), 4 * key), F32))
                place = places[key % SUMS]
                b.store(e.fma(value, weight, b.load(place)), place)
        for g, places in enumerate(parts):
            to = e.at(out, e.times(dim, 4 * g), e.times(c, LINE))
            found = e.load(to)
            for place in places:
                found = b.fadd(found, b.load(place))
            e.store(found, to)
