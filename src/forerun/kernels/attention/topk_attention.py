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
import torch
from llvmlite import ir

from forerun.core.compiling import compiled
from forerun.kernels.attention.ordered_attention import ROW_BYTES, ROW_LAYOUT, RowFields, read_row
from forerun.kernels.attention.short_key_scan import CHUNK_KEYS
from forerun.kernels.attention.topk_rank import (
    HEADS_AT_ONCE,
    TOPK_BYTES,
    TOPK_LAYOUT,
    TOPK_OP_LAYOUT,
    TopkFields,
    TopkOp,
    read_topk,
    read_topk_op,
    scratch_bytes,
)
from forerun.kernels.attention.topk_select import select_topk, selection_numbers
from forerun.kernels.linear.rowwise import HALF_LINE, by_kind, number, words
from forerun.kernels.runtime import addresses
from forerun.kernels.runtime.addresses import ScratchMemory, floats, head_rows, integers
from forerun.kernels.runtime.executor import PER_TOKEN, Operation, Program, Tasks, read_pass
from forerun.kernels.runtime.vector_ir import F32, I64, LANES, LINE, Code, Emitter, constant, intrinsic, intrinsic_code

CHUNK_KEYS_AT_ONCE = 4
"""Keys whose products are kept in registers at once."""
VALUE_SUMS = 4
"""Sums of every fourth value that are kept apart, so that additions need not wait for each other."""
MARGIN_NATS = 7.0
"""Chunks further than this below the best score, in nats, are skipped: their keys weigh under a thousandth."""
TOPK_DTYPES = {torch.float32: 0, torch.bfloat16: 1}

Near = tuple[torch.Tensor, torch.Tensor, int]

_scratch = ScratchMemory()


@compiled
def _tiles(op: TopkOp) -> int:
    """Tiles of heads of a KV head. Heads that select_topk together read what they chose together."""
    group = op.heads // op.kv_heads
    return (group + HEADS_AT_ONCE - 1) // HEADS_AT_ONCE if op.joint else group


@compiled
def attend_topk(address: int, fields: int, code: int, task: int, slot: int) -> None:
    """One token and tile of heads: outputs and log-sum-exps."""
    this, op = read_pass(address), read_topk_op(fields)
    parents = this.parents
    tiles, group = _tiles(op), op.heads // op.kv_heads
    token, own, tile = task // tiles // op.kv_heads, task // tiles % op.kv_heads, task % tiles
    each = HEADS_AT_ONCE if op.joint else 1
    head, heads = own * group + tile * each, min(each, group - tile * each)
    number = integers(this.token_rows + 8 * token, 1)[0]
    row, topk = read_row(this.rows + number * ROW_BYTES), read_topk(op.topk + number * TOPK_BYTES)
    near = row.start + (row.n if op.block else 0)
    recent, room = (near + CHUNK_KEYS - 1) // CHUNK_KEYS, min(1 + topk.most, topk.chunks)
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
        _hide(op, row, parents, token, weights + g * step + 4 * count * CHUNK_KEYS, recent)
        exponentials(weights + g * step, count + recent, spare + LINE * g)
    for i in range(count):
        add(op.kind, heads, weights + 4 * i * CHUNK_KEYS, step, v + chosen[i] * chunk_v, topk.v_row, op.dim, sums)
    v = integers(op.kv + 16 * number, 2)[1] + own * row.v_head
    for i in range(recent):
        here, from_here = v + i * CHUNK_KEYS * row.v_row, weights + 4 * (count + i) * CHUNK_KEYS
        add(op.kind, heads, from_here, step, here, row.v_row, op.dim, sums)
    for g in range(heads):
        _write(op, row, token, head + g, spare + LINE * g, sums + 4 * g * op.dim)


@compiled
def _write(op: TopkOp, row: RowFields, token: int, head: int, state: int, sums: int) -> None:
    """One head's output and log-sum-exp, from its largest score, the sum of its weights, and its weighted values."""
    top, total = floats(state, 2)[0], floats(state, 2)[1]
    result, width = floats(sums, op.dim), 2 if op.out_kind == 1 else 4
    for c in range(op.dim):
        result[c] = np.float32(result[c] / total)
    words(op.out_kind, sums, op.dim // LANES, op.out + token * op.out_row + head * op.dim * width)
    if op.lse:
        floats(op.lse + 4 * (head * row.n + token), 1)[0] = np.float32((top + math.log2(total)) * math.log(2.0))


@compiled
def _choose(op: TopkOp, topk: TopkFields, row: RowFields, token: int, head: int, found: int, spare: int) -> int:
    """Write the numbers of the chunks that a query sees, in ascending order; returns their number."""
    if topk.most >= topk.chunks:
        every = integers(found, max(topk.chunks, 1))
        for c in range(topk.chunks):
            every[c] = c
        return topk.chunks
    group, place = op.heads // op.kv_heads, token - row.first
    first = topk.worth + head // group * topk.worth_head + place * topk.worth_row
    step, chunks = row.n * topk.worth_row, topk.chunks
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
    count = select_topk(worth, topk.most, MARGIN_NATS / (op.scale * math.log(2.0)), found + 8, spare)
    integers(found, 1)[0] = 0
    return count + 1


@compiled
def _hide(op: TopkOp, row: RowFields, parents: int, token: int, scores: int, recent: int) -> None:
    """Hide the near keys that a token does not see: of the pass, all but the token and its ancestors."""
    each = floats(scores, recent * CHUNK_KEYS)
    if not op.block:
        each[row.start :] = -np.inf
        return
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
    for count in range(1, HEADS_AT_ONCE + 1):
        with e.builder.if_then(e.builder.icmp_signed("==", heads, I64(count))):
            by_kind(e, kind, functools.partial(emit, e, count, *rest))


def _products(
    e: Emitter, heads: int, q: ir.Value, keys: ir.Value, row: ir.Value, dim: ir.Value, out: ir.Value, step: ir.Value,
    ahead: ir.Value, values: ir.Value, values_row: ir.Value, half: bool,
) -> None:  # fmt: skip
    b, width = e.builder, HALF_LINE if half else LINE
    with e.loop(b.udiv(row.type(CHUNK_KEYS), row.type(CHUNK_KEYS_AT_ONCE))) as group:
        first = e.times(group, CHUNK_KEYS_AT_ONCE)
        offsets = [e.times(e.at(first, j), row) for j in range(CHUNK_KEYS_AT_ONCE)]
        sums = [[e.variable(constant(0.0)) for _ in range(CHUNK_KEYS_AT_ONCE)] for _ in range(heads)]
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
        parts = [[e.variable(constant(0.0)) for _ in range(VALUE_SUMS)] for _ in range(heads)]
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


def _tasks(op: TopkOp) -> Tasks:
    group = op.heads // op.kv_heads
    return Tasks(op.kv_heads * (-(-group // HEADS_AT_ONCE) if op.joint else group), PER_TOKEN)


ATTEND_TOPK = Operation(TOPK_OP_LAYOUT, _tasks, attend_topk)


def attend_topk_at_once(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, worth: torch.Tensor, count: int, near: Near, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q`` over the first chunk, up to ``count`` chunks by worth to each query, and the near keys.

    For tensors that ``fits`` accepts.

    Args:
        q: ``[1, H, n, d]``.
        k, v: ``[1, Hkv, m, d]``.
        worth: each chunk's best product of a key with the query, float32 ``[H, n, chunks]``; the first chunk's entry is
            overwritten. Of equal chunks the earlier ones are taken; chunks whose scaled product is more than
            ``MARGIN_NATS`` below the best are skipped.
        count: the most chunks; less than there are.
        near: keys, values, and how many of them all queries see. One more chunk of finite numbers must follow them.
        scaling: factor on the scores.

    Returns:
        The output ``[1, H, n, d]`` and the log-sum-exp ``[1, H, n]``.
    """
    (_, heads, n, dim), kv_heads, kind = q.shape, k.shape[1], TOPK_DTYPES[k.dtype]
    queries, worth, chunks = q.float().transpose(1, 2).contiguous(), worth.contiguous(), worth.shape[2]
    out, lse = queries.new_empty(n, heads, dim), queries.new_empty(1, heads, n)
    rows = bytearray(ROW_LAYOUT.size)
    ROW_LAYOUT.layout.pack_into(
        rows, 0, *RowFields(0, n, n, near[2], *head_rows(near[0])[1:], *head_rows(near[1])[1:], 0, 0)
    )
    row = 4 * chunks
    topk = TopkFields(
        chunks, count, 0, 0, 0, 0, *head_rows(k), *head_rows(v), 0, 0, 0, worth.data_ptr(),
        heads // kv_heads * n * row, row,
    )  # fmt: skip
    record = np.zeros(TOPK_LAYOUT.size, np.uint8)
    TOPK_LAYOUT.layout.pack_into(record.data, 0, *topk)
    kv, owners = np.array([near[0].data_ptr(), near[1].data_ptr()], np.int64), np.zeros(n, np.int64)
    op = TopkOp(
        kind, k.element_size(), heads, kv_heads, dim, queries.data_ptr(), 4 * heads * dim, 4 * dim,
        kv.ctypes.data, record.ctypes.data, 0, 0, out.data_ptr(), 4 * heads * dim, 0, lse.data_ptr(),
        scaling / math.log(2),
    )  # fmt: skip
    size = LINE * math.ceil(scratch_bytes(chunks, count, near[2], dim) / LINE)
    slots = _scratch.claim(size * torch.get_num_threads())
    where = {"rows": int(np.frombuffer(rows, np.uint8).ctypes.data), "token_rows": owners.ctypes.data}
    Program([(ATTEND_TOPK, op)]).run(n=n, **where, slots=slots, slot_size=size)
    return out.transpose(0, 1)[None].to(q.dtype), lse


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether ``attend_topk_at_once`` can read these: float32 or bfloat16 on a CPU, in rows of a multiple of 16."""
    return q.dtype in TOPK_DTYPES and addresses.fits(q, k, v)
