"""Rank a sequence's chunks for a query by its product with each chunk's best key, in few dimensions of a byte each.

The first operation projects each query into the index's dimensions and rounds it to bytes; the second scans the index;
the third attends (``topk_attention.py``). A vector of the index holds four numbers of one key from each of 16 chunks.
Processors that multiply bytes (VNNI) add four products at once; others widen bytes to floats, exactly.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_fields import ATTEND_LAYOUT, ROW_BYTES, AttendOp, read_attend, read_row
from forerun.kernels.runtime.addresses import StructLayout, floats, integers, signed_bytes
from forerun.kernels.runtime.executor import PER_TOKEN, PER_UNIT, Operation, Tasks, read_pass
from forerun.kernels.runtime.vector_ir import (
    BYTE,
    BYTES,
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    LINE,
    WORDS,
    Emitter,
    constant,
    features,
    llvm_function,
    words_of,
)

CHUNK_KEYS = 16
GROUP_CHUNKS = LANES
"""Chunks whose keys are stored side by side."""
QUAD_NUMBERS = 4
"""Numbers of a key that are stored side by side."""
ZERO_BYTE = 128
"""The byte for 0 in a key, whose bytes are unsigned."""
QUERIES_AT_ONCE = 4
"""Queries, or keys for one query, whose sums are kept in registers at once."""
PREFETCH_BYTES = 16384
UNIT_GROUPS = 16
LARGEST_BYTE, SMALLEST_UNIT = 127.0, 1e-30
"""The byte for a query's largest number, and the least unit of a query's bytes."""
DOTS = "+avx512vnni" in features()


class TopkFields(NamedTuple):
    """One layer of one row: what queries select from. Strides are in bytes."""

    chunks: int  # 0 if all tokens are recent
    most: int  # that a query sees besides the first; from ``chunks`` on it sees all, and ranks nothing
    rank: int  # dimensions of the index
    short: int  # the index, as in ``by_definition``
    short_head: int
    projection: int  # of queries, float32 ``[Hkv, d, rank]``
    k: int
    k_head: int
    k_row: int
    v: int
    v_head: int
    v_row: int
    queries: int = 0
    bytes: int = 0  # room for the rounded queries, ``[Hkv, queries, rank]``
    units: int = 0  # and for their units
    worth: int = 0  # each chunk's worth to each query, float32 ``[Hkv, queries, ...]``
    worth_head: int = 0
    worth_row: int = 0


class RankUnit(NamedTuple):
    """A thread's unit of ranking: some groups of a row's chunks."""

    row: int
    first: int
    groups: int


TOPK_LAYOUT, RANK_UNIT_LAYOUT = StructLayout(TopkFields), StructLayout(RankUnit)
TOPK_BYTES, RANK_UNIT_BYTES = TOPK_LAYOUT.size, RANK_UNIT_LAYOUT.size
read_topk, read_rank_unit = TOPK_LAYOUT.reader(), RANK_UNIT_LAYOUT.reader()


def padded_queries(n: int, group: int) -> int:
    """Return a KV head's queries for ``n`` tokens, padded, because tiles are faster than single queries."""
    return n if n * group == 1 else QUERIES_AT_ONCE * math.ceil(n * group / QUERIES_AT_ONCE)


def rank_units(chunks: list[int]) -> bytearray:
    """Return the table of ranking units, ``RANK_UNIT_BYTES`` each, given each row's number of chunks."""
    units = [
        RankUnit(row, first, min(UNIT_GROUPS, math.ceil(count / GROUP_CHUNKS) - first))
        for row, count in enumerate(chunks)
        for first in range(0, math.ceil(count / GROUP_CHUNKS), UNIT_GROUPS)
    ]
    units = units or [RankUnit(0, 0, 0)]  # an operation has at least one task
    return RANK_UNIT_LAYOUT.table(units)


def by_definition(index: torch.Tensor, count: int, q: torch.Tensor) -> torch.Tensor:
    """Return each query's largest product with any key of each chunk, plus a constant, float32 ``[H, n, count]``.
    ``index``: keys, uint8 ``[Hkv, groups, CHUNK_KEYS, rank / QUAD_NUMBERS, GROUP_CHUNKS, QUAD_NUMBERS]``; ``ZERO_BYTE``
    is not subtracted, hence the constant. ``q``: float32 ``[H, n, rank]``, rounded to bytes here."""
    heads, rank = index.shape[0], q.shape[2]
    scale = q.abs().amax(-1, keepdim=True) / LARGEST_BYTE
    rounded = (q / scale.clamp_min(SMALLEST_UNIT)).round()
    keys = index[:, : math.ceil(count / GROUP_CHUNKS)].to(q.dtype)
    products = torch.einsum("hnrj,hgkrcj->hngck", rounded.view(heads, -1, rank // QUAD_NUMBERS, QUAD_NUMBERS), keys)
    return products.amax(-1).flatten(2)[..., :count].reshape(*q.shape[:2], count) * scale


@compiled
def project_queries(address: int, fields: int, code: int, task: int, slot: int) -> None:
    """Project and round one token's queries of one KV head."""
    this, op = read_pass(address), read_attend(fields)
    token, head = task // op.kv_heads, task % op.kv_heads
    number = integers(this.token_rows + 8 * token, 1)[0]
    row, topk = read_row(this.rows + number * ROW_BYTES), read_topk(op.topk + number * TOPK_BYTES)
    if topk.most >= topk.chunks:
        return
    group, place = op.heads // op.kv_heads, token - row.first
    for g in range(group):
        _project(op, topk, token, head * group + g, head, slot)
        _round(topk, head, g * row.n + place, slot)
    if place == row.n - 1:  # padding of the last tile
        floats(slot, topk.rank)[:] = np.float32(0)
        for i in range(group * row.n, topk.queries):
            _round(topk, head, i, slot)


@compiled
def _round(topk: TopkFields, head: int, i: int, query: int) -> None:
    place = head * topk.queries + i
    round_query(query, topk.rank, topk.units + 4 * place, topk.bytes + place * topk.rank)


@compiled
def _project(op: AttendOp, topk: TopkFields, token: int, head: int, own: int, to: int) -> None:
    query, short = floats(op.q + token * op.q_row + head * op.q_head, op.dim), floats(to, topk.rank)
    turn = floats(topk.projection + 4 * own * op.dim * topk.rank, op.dim * topk.rank)
    short[:] = np.float32(0)
    for c in range(op.dim):
        x = query[c]
        for r in range(topk.rank):
            short[r] += np.float32(x * turn[c * topk.rank + r])


@compiled
def rank(address: int, fields: int, code: int, task: int, slot: int) -> None:
    """Rank one unit's chunks of one KV head for all queries."""
    this, op = read_pass(address), read_attend(fields)
    unit, head = read_rank_unit(this.units + task // op.kv_heads * RANK_UNIT_BYTES), task % op.kv_heads
    topk = read_topk(op.topk + unit.row * TOPK_BYTES)
    keys = topk.short + head * topk.short_head + unit.first * CHUNK_KEYS * topk.rank * GROUP_CHUNKS
    place, scores = head * topk.queries, topk.worth + head * topk.worth_head + 4 * GROUP_CHUNKS * unit.first
    q, units_of = topk.bytes + place * topk.rank, topk.units + 4 * place
    score_all(keys, q, topk.queries, topk.rank, unit.groups, units_of, scores, topk.worth_row)


@compiled
def round_query(query: int, rank: int, unit: int, to: int) -> None:
    """Round a query to bytes, and write its unit, a float."""
    numbers, rounded, largest = floats(query, rank), signed_bytes(to, rank), np.float32(0)
    for d in range(rank):
        largest = max(largest, abs(numbers[d]))
    floats(unit, 1)[0] = largest / np.float32(LARGEST_BYTE)
    step = max(floats(unit, 1)[0], np.float32(SMALLEST_UNIT))
    for d in range(rank):
        rounded[d] = int(np.rint(numbers[d] / step))


@compiled
def score_all(keys: int, q: int, rows: int, rank: int, groups: int, scales: int, out: int, out_row: int) -> None:
    """Score some groups for all of a KV head's rounded queries: full tiles first, then single queries."""
    row = 0
    while row < rows:
        query, scale, to = q + row * rank, scales + 4 * row, out + row * out_row
        if row + QUERIES_AT_ONCE <= rows:
            score_tile(QUERIES_AT_ONCE, 1, keys, query, rank, groups, scale, to, out_row)
            row += QUERIES_AT_ONCE
        else:
            score_tile(1, QUERIES_AT_ONCE, keys, query, rank, groups, scale, to, 0)
            row += 1


@llvm_function(constants=2)
def score_tile(
    e: Emitter, queries: int, keys: int, first: ir.Value, q: ir.Value, rank: ir.Value, groups: ir.Value,
    scale: ir.Value, out: ir.Value, row: ir.Value,
) -> None:  # fmt: skip
    """Score ``queries`` queries over all keys of some groups, ``keys`` keys of each chunk at a time."""
    b, size = e.builder, e.times(rank, GROUP_CHUNKS)
    zero = words_of(0) if DOTS else constant(0.0)
    with e.loop(groups) as group:
        best = [e.variable(words_of(-(2**31)) if DOTS else constant(-math.inf)) for _ in range(queries)]
        with e.loop(I64(CHUNK_KEYS // keys)) as step:
            begin = e.at(first, e.times(e.at(e.times(group, CHUNK_KEYS), e.times(step, keys)), size))
            sums = [[e.variable(zero) for _ in range(keys)] for _ in range(queries)]
            with e.loop(b.udiv(e.times(size, keys), I64(LINE))) as line:
                e.prefetch(e.at(begin, e.times(line, LINE), PREFETCH_BYTES))
            with e.loop(b.udiv(rank, I64(QUAD_NUMBERS))) as quad:
                here = e.at(begin, e.times(quad, LINE))
                places = [e.at(here, e.times(size, j)) for j in range(keys)]
                fours = [e.at(q, e.times(rank, i), e.times(quad, QUAD_NUMBERS)) for i in range(queries)]
                (_add_dots if DOTS else _add_products)(e, places, fours, sums)
            for i in range(queries):
                for place in sums[i]:
                    b.store(e.larger(b.load(place), b.load(best[i])), best[i])
        for i in range(queries):
            found = b.load(best[i])
            found = b.sitofp(found, FLOATS) if DOTS else found
            factor = e.everywhere(e.load(e.at(scale, 4 * i), F32))
            e.store(b.fmul(found, factor), e.at(out, e.times(row, i), e.times(group, LINE)))


def _add_dots(e: Emitter, places: list[ir.Value], fours: list[ir.Value], sums: list[list[ir.Value]]) -> None:
    """Add products of unsigned and signed bytes, four products per lane."""
    b = e.builder
    found = [e.load(place, WORDS) for place in places]
    for four, rows in zip(fours, sums, strict=True):
        query = e.everywhere(e.load(four, I32))
        for keys, place in zip(found, rows, strict=True):
            b.store(e.dots(keys, query, b.load(place)), place)


def _add_products(e: Emitter, places: list[ir.Value], fours: list[ir.Value], sums: list[list[ir.Value]]) -> None:
    b = e.builder
    found = [e.load(place, BYTES) for place in places]
    for j in range(QUAD_NUMBERS):
        numbers = [b.uitofp(b.zext(e.every_fourth(keys, j), WORDS), FLOATS) for keys in found]
        for four, rows in zip(fours, sums, strict=True):
            query = e.everywhere(b.sitofp(e.load(e.at(four, j), BYTE), F32))
            for number, place in zip(numbers, rows, strict=True):
                b.store(e.fma(number, query, b.load(place)), place)


PROJECT_QUERIES = Operation(ATTEND_LAYOUT, lambda op: Tasks(op.kv_heads, PER_TOKEN), project_queries)
RANK_CHUNKS = Operation(ATTEND_LAYOUT, lambda op: Tasks(op.kv_heads, PER_UNIT), rank)
