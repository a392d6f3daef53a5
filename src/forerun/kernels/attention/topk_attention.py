"""Compute attention of each query over its best chunks, read in place, given each chunk's worth to the query.

A task is a token and a few heads: it finds the best chunks, scores their keys, and adds up their values, without
copying or sorting. Heads of a group select together, so each key is loaded once for all. Chunks of negligible weight
are skipped, because many heads attend to a few places only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_fields import (
    ATTEND_LAYOUT,
    ROW_BYTES,
    AttendOp,
    RowFields,
    read_attend,
    read_row,
)
from forerun.kernels.attention.topk_rank import CHUNK_KEYS, TOPK_BYTES, TopkFields, read_topk
from forerun.kernels.linear.rowwise import HALF_LINE, LOG2E, by_kind, number, soften, words
from forerun.kernels.runtime.addresses import floats, integers
from forerun.kernels.runtime.executor import PER_TOKEN, Operation, Tasks, read_pass
from forerun.kernels.runtime.vector_ir import F32, LANES, LINE, Emitter, constant, llvm_function

HEADS_AT_ONCE = 4
CHUNK_KEYS_AT_ONCE = 4
"""Keys whose products are kept in registers at once."""
VALUE_SUMS = 4
"""Independent sums of every fourth value, so that additions need not wait for each other."""
MARGIN_NATS = 7.0
"""Chunks further than this below the best score, in nats, are skipped: their keys weigh under a thousandth."""
SELECTION_GROUP = LANES
"""Chunks per group; a group is searched only if its best chunk is good enough."""


def scratch_bytes(chunks: int, most: int, near: int, dim: int) -> int:
    """Return the scratch bytes per thread for ``chunks`` chunks and ``near`` recent tokens, including the pass's."""
    keys = (min(1 + most, chunks) + math.ceil(near / CHUNK_KEYS)) * CHUNK_KEYS
    return (
        8 * (1 + selection_numbers(chunks))
        + 12 * chunks
        + 4 * HEADS_AT_ONCE * (keys + 2 * dim)
        + (HEADS_AT_ONCE + 4) * LINE
    )


@compiled
def attend_topk(address: int, fields: int, code: int, task: int, slot: int) -> None:
    """Compute attention of one token and tile of heads."""
    this, op = read_pass(address), read_attend(fields)
    group = op.heads // op.kv_heads
    tiles = (group + HEADS_AT_ONCE - 1) // HEADS_AT_ONCE
    token, own, tile = task // tiles // op.kv_heads, task // tiles % op.kv_heads, task % tiles
    head, heads = own * group + tile * HEADS_AT_ONCE, min(HEADS_AT_ONCE, group - tile * HEADS_AT_ONCE)
    number = integers(this.token_rows + 8 * token, 1)[0]
    row, topk = read_row(this.rows + number * ROW_BYTES), read_topk(op.topk + number * TOPK_BYTES)
    recent, room = (row.start + row.n + CHUNK_KEYS - 1) // CHUNK_KEYS, min(1 + topk.most, topk.chunks)
    query, step = slot, 4 * (room + recent) * CHUNK_KEYS  # each head's bytes of weights
    found = query + LINE * ((4 * HEADS_AT_ONCE * op.dim + LINE - 1) // LINE)
    weights = found + 8 * (1 + selection_numbers(topk.chunks))
    spare = weights + heads * step
    for g in range(heads):
        source = floats(op.q + token * op.q_row + (head + g) * op.q_head, op.dim)
        scaled = floats(query + 4 * g * op.dim, op.dim)
        for c in range(op.dim):
            scaled[c] = np.float32(source[c] * op.scale)
    count = _choose(op, topk, row, token, head, found, spare)
    chosen = integers(found, max(count, 1))
    k, v = topk.k + own * topk.k_head, topk.v + own * topk.v_head
    chunk_k, chunk_v = CHUNK_KEYS * topk.k_row, CHUNK_KEYS * topk.v_row
    for i in range(count):
        after, value = k + chosen[min(i + 1, count - 1)] * chunk_k, v + chosen[i] * chunk_v
        here, to = k + chosen[i] * chunk_k, weights + 4 * i * CHUNK_KEYS
        products(op.kind, heads, query, here, topk.k_row, op.dim, to, step, after, value, topk.v_row)
    k = integers(op.kv + 16 * number, 2)[0] + own * row.k_head
    for i in range(recent):
        here, to = k + i * CHUNK_KEYS * row.k_row, weights + 4 * (count + i) * CHUNK_KEYS
        products(op.kind, heads, query, here, row.k_row, op.dim, to, step, here, here, row.k_row)
    sums = spare + LINE * heads
    floats(sums, heads * op.dim)[:] = np.float32(0)
    for g in range(heads):
        if op.softcap > 0:
            floats(query, 1)[0] = np.float32(op.softcap * LOG2E)  # the queries are no longer needed
            soften(weights + g * step, count + recent, query)
        _hide(row, this.parents, token, weights + g * step + 4 * count * CHUNK_KEYS, recent)
        exponentials(weights + g * step, count + recent, spare + LINE * g)
    for i in range(count):
        add(op.kind, heads, weights + 4 * i * CHUNK_KEYS, step, v + chosen[i] * chunk_v, topk.v_row, op.dim, sums)
    v = integers(op.kv + 16 * number, 2)[1] + own * row.v_head
    for i in range(recent):
        here, from_here = v + i * CHUNK_KEYS * row.v_row, weights + 4 * (count + i) * CHUNK_KEYS
        add(op.kind, heads, from_here, step, here, row.v_row, op.dim, sums)
    for g in range(heads):
        _write(op, token, head + g, spare + LINE * g, sums + 4 * g * op.dim)


@compiled
def _write(op: AttendOp, token: int, head: int, state: int, sums: int) -> None:
    top, total = floats(state, 2)[0], floats(state, 2)[1]
    if op.sinks:
        total += np.float32(2.0 ** (np.float64(floats(op.sinks + 4 * head, 1)[0]) * LOG2E - top))
    result, width = floats(sums, op.dim), 2 if op.out_kind == 1 else 4
    for c in range(op.dim):
        result[c] = np.float32(result[c] / total)
    words(op.out_kind, sums, op.dim // LANES, op.out + token * op.out_row + head * op.dim * width)


@compiled
def _choose(op: AttendOp, topk: TopkFields, row: RowFields, token: int, head: int, found: int, spare: int) -> int:
    """Write the indices of the chunks that a query sees, in ascending order, and return their number."""
    if topk.most >= topk.chunks:
        every = integers(found, max(topk.chunks, 1))
        for c in range(topk.chunks):
            every[c] = c
        return topk.chunks
    group, place = op.heads // op.kv_heads, token - row.first
    first = topk.worth + head // group * topk.worth_head + place * topk.worth_row
    step, chunks = row.n * topk.worth_row, topk.chunks
    if group > 1:
        # a chunk's worth to a group: the largest of its worths relative to each query's best chunk
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
        worth = floats(first, chunks)
        worth[0] = -np.inf
    count = select_topk(worth, topk.most, MARGIN_NATS / (op.scale * math.log(2.0)), found + 8, spare)
    integers(found, 1)[0] = 0
    return count + 1


@compiled
def _hide(row: RowFields, parents: int, token: int, scores: int, recent: int) -> None:
    """Mask recent keys that a token does not see: all of the pass but the token and its ancestors."""
    each = floats(scores, recent * CHUNK_KEYS)
    place = token - row.first
    if place < row.in_order:
        each[row.start + place + 1 :] = -np.inf
        return
    first, nodes = row.start + row.in_order, row.n - row.in_order
    each[first + nodes :] = -np.inf
    at = place - row.in_order
    for node in range(nodes - 1, -1, -1):
        if node == at:
            at = integers(parents + 8 * (row.first + row.in_order + node), 1)[0]
        else:
            each[first + node] = -np.inf


@llvm_function()
def peak(e: Emitter, values: ir.Value, vectors: ir.Value, out: ir.Value) -> None:
    """Return the largest of a row of floats; minus infinity if empty."""
    b, highest = e.builder, e.variable(constant(-math.inf))
    with e.loop(vectors) as i:
        b.store(e.larger(e.load(e.at(values, e.times(i, LINE))), b.load(highest)), highest)
    e.store(e.largest(b.load(highest)), out)


@llvm_function()
def lift(e: Emitter, values: ir.Value, less: ir.Value, to: ir.Value, vectors: ir.Value) -> None:
    """Raise each number at ``to`` to that of ``values``, minus the float at ``less``, if it is larger."""
    every = e.everywhere(e.load(less, F32))
    with e.loop(vectors) as i:
        place = e.at(to, e.times(i, LINE))
        value = e.builder.fsub(e.load(e.at(values, e.times(i, LINE))), every)
        e.store(e.larger(value, e.load(place)), place)


def _head_counts(e: Emitter, kind: ir.Value, heads: ir.Value) -> Iterator[tuple[int, bool]]:
    for count in e.cases(heads, range(1, HEADS_AT_ONCE + 1)):
        for half in by_kind(e, kind):
            yield count, half


@llvm_function()
def products(
    e: Emitter, kind: ir.Value, heads: ir.Value, q: ir.Value, keys: ir.Value, row: ir.Value, dim: ir.Value,
    out: ir.Value, step: ir.Value, ahead: ir.Value, values: ir.Value, values_row: ir.Value,
) -> None:  # fmt: skip
    """Multiply each head's query by a chunk's keys, ``step`` bytes apart; prefetch ``ahead`` and ``values``."""
    b = e.builder
    for count, half in _head_counts(e, kind, heads):
        with e.loop(b.udiv(row.type(CHUNK_KEYS), row.type(CHUNK_KEYS_AT_ONCE))) as group:
            first = e.times(group, CHUNK_KEYS_AT_ONCE)
            offsets = [e.times(e.at(first, j), row) for j in range(CHUNK_KEYS_AT_ONCE)]
            sums = [[e.variable(constant(0.0)) for _ in range(CHUNK_KEYS_AT_ONCE)] for _ in range(count)]
            with e.loop(b.udiv(dim, row.type(LANES))) as c:
                line = e.times(c, HALF_LINE if half else LINE)
                parts = [e.load(e.at(q, e.times(c, LINE), e.times(dim, 4 * g))) for g in range(count)]
                for j, offset in enumerate(offsets):
                    e.prefetch(e.at(ahead, offset, line))
                    e.prefetch(e.at(values, e.times(e.at(first, j), values_row), line))
                    key = number(e, half, e.at(keys, offset), c)
                    for part, places in zip(parts, sums, strict=True):
                        b.store(e.fma(key, part, b.load(places[j])), places[j])
            for g, places in enumerate(sums):
                for j, place in enumerate(places):
                    e.store(e.total(b.load(place)), e.at(out, e.times(step, g), e.times(first, 4), 4 * j))


@llvm_function()
def exponentials(e: Emitter, scores: ir.Value, vectors: ir.Value, state: ir.Value) -> None:
    """Compute 2 ** (score - largest score); write the largest score to ``state``, followed by the sum of results."""
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


@llvm_function()
def add(
    e: Emitter, kind: ir.Value, heads: ir.Value, weights: ir.Value, step: ir.Value, values: ir.Value, row: ir.Value,
    dim: ir.Value, out: ir.Value,
) -> None:  # fmt: skip
    """Add a chunk's values, weighted by each head's weights, to its output."""
    b = e.builder
    for count, half in _head_counts(e, kind, heads):
        with e.loop(b.udiv(dim, row.type(LANES))) as c:
            parts = [[e.variable(constant(0.0)) for _ in range(VALUE_SUMS)] for _ in range(count)]
            for key in range(CHUNK_KEYS):
                value = number(e, half, e.at(values, e.times(row, key)), c)
                for g, places in enumerate(parts):
                    weight = e.everywhere(e.load(e.at(weights, e.times(step, g), 4 * key), F32))
                    place = places[key % VALUE_SUMS]
                    b.store(e.fma(value, weight, b.load(place)), place)
            for g, places in enumerate(parts):
                to = e.at(out, e.times(dim, 4 * g), e.times(c, LINE))
                found = e.load(to)
                for place in places:
                    found = b.fadd(found, b.load(place))
                e.store(found, to)


@compiled
def selection_numbers(chunks: int) -> int:
    """Return how many numbers ``select_topk`` needs room for: one per chunk and one per group."""
    return chunks + (chunks + SELECTION_GROUP - 1) // SELECTION_GROUP


@compiled
def select_topk(worth: Any, count: int, margin: float, found: int, spare: int) -> int:
    """Write the indices of at most ``count`` chunks with the highest worth, in ascending order; return their number.
    They are in the best ``count`` groups, the worst of which is a bound. Chunks over ``margin`` below the best are left
    out. ``found`` has room for ``selection_numbers`` numbers of 8 bytes, ``spare`` for two floats per chunk."""
    groups = (len(worth) + SELECTION_GROUP - 1) // SELECTION_GROUP
    numbers = integers(found, selection_numbers(len(worth)))
    maxima, copy = floats(spare, groups), floats(spare + 4 * len(worth), len(worth))
    full_groups = len(worth) // SELECTION_GROUP
    if full_groups < groups:
        maxima[full_groups] = worth[full_groups * SELECTION_GROUP]
        for c in range(full_groups * SELECTION_GROUP + 1, len(worth)):
            maxima[full_groups] = max(maxima[full_groups], worth[c])
    largest(worth.ctypes.data, full_groups, spare)
    top = maxima[0]
    for g in range(groups):
        copy[g] = maxima[g]
        top = max(top, maxima[g])
    bound = np.float32(top - margin)
    if groups > count:
        bound = max(bound, np.float32(nth_largest(copy[:groups], count)))
    likely = 0
    for g in range(groups):
        if maxima[g] >= bound:
            for c in range(g * SELECTION_GROUP, min(g * SELECTION_GROUP + SELECTION_GROUP, len(worth))):
                if worth[c] >= bound:
                    numbers[likely], copy[likely] = c, worth[c]
                    likely += 1
    if likely <= count:
        return likely
    bound = np.float32(nth_largest(copy[:likely], count))
    ties = count
    for i in range(likely):
        ties -= worth[numbers[i]] > bound
    kept = 0
    for i in range(likely):
        chunk = numbers[i]
        if worth[chunk] == bound:
            ties -= 1
        if worth[chunk] > bound or (worth[chunk] == bound and ties >= 0):
            numbers[kept] = chunk
            kept += 1
    return kept


@compiled
def nth_largest(values: Any, n: int) -> float:
    """Return the ``n``-th largest value, counted from 1, by Hoare's selection; reorders ``values``."""
    low, high, place = 0, len(values) - 1, n - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if place <= j:
            high = j
        elif place >= i:
            low = i
        else:
            break
    return float(values[place])


@llvm_function()
def largest(e: Emitter, values: ir.Value, vectors: ir.Value, out: ir.Value) -> None:
    """Write the largest float of each vector."""
    with e.loop(vectors) as i:
        e.store(e.largest(e.load(e.at(values, e.times(i, LINE)))), e.at(out, e.times(i, 4)))


ATTEND_TOPK = Operation(
    ATTEND_LAYOUT,
    lambda op: Tasks(op.kv_heads * -(-(op.heads // op.kv_heads) // HEADS_AT_ONCE), PER_TOKEN),
    attend_topk,
)
