"""Attention over the chunks that a query chooses, as operations of a program: for the low-rank cache.

The first projects each query into the dimensions of the index and rounds it to bytes. The second ranks all chunks of a
text by their best key (``short_key_scan.py``). The third (``topk_attention.py``) takes each query's best chunks and
attends to them, to the recent tokens, and to the query's own branch of the tree. This file has the data of all three,
and the first two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.kernels.attention.ordered_attention import ROW_BYTES, read_row
from forerun.kernels.attention.short_key_scan import (
    CHUNK_KEYS,
    GROUP_CHUNKS,
    QUERIES_AT_ONCE,
    UNIT_GROUPS,
    round_query,
    score_all,
)
from forerun.kernels.attention.topk_select import selection_numbers
from forerun.kernels.runtime.addresses import StructLayout, floats, integers
from forerun.kernels.runtime.executor import PER_TOKEN, PER_UNIT, Operation, Tasks, read_pass
from forerun.kernels.runtime.vector_ir import LINE

HEADS_AT_ONCE = 4
"""The most heads of a group that are computed at once."""


class TopkFields(NamedTuple):
    """One layer of one row: what queries select_topk among. Strides are in bytes.

    Attributes:
        chunks: chunks that there are; 0 if everything is near.
        most: the most chunks that a query sees besides the first; from ``chunks`` on it sees all, and ranks nothing.
        rank: dimensions of the index.
        short: address of the index, as in ``short_key_scan.best_keys``.
        projection: address of the projections of queries, float32 ``[Hkv, d, rank]``.
        k, v: addresses of all keys and values.
        queries: number of queries of a KV head in the pass, padded to a whole tile.
        bytes, units: addresses of room for the rounded queries, ``[Hkv, queries, rank]``, and for their units.
        worth: address of each chunk's worth to each query, float32 ``[Hkv, queries, ...]``.
    """

    chunks: int
    most: int
    rank: int
    short: int
    short_head: int
    projection: int
    k: int
    k_head: int
    k_row: int
    v: int
    v_head: int
    v_row: int
    queries: int = 0
    bytes: int = 0
    units: int = 0
    worth: int = 0
    worth_head: int = 0
    worth_row: int = 0


class TopkOp(NamedTuple):
    """One layer's operation: addresses, strides in bytes, and counts; as in ``AttendOp``, but for these.

    Attributes:
        kv: address of the table with each row's addresses of recent keys and values, the pass's own among them. In
            ``RowFields``, ``start`` is their number before the pass.
        topk: address of each row's ``TopkFields`` of this layer.
        joint: whether the queries of a group select_topk together.
        block: whether a token sees itself and its ancestors in the pass.
        lse: address for each head's and token's log-sum-exp, or 0.
    """

    kind: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    q: int
    q_row: int
    q_head: int
    kv: int
    topk: int
    joint: int
    block: int
    out: int
    out_row: int
    out_kind: int
    lse: int
    scale: float


class RankUnit(NamedTuple):
    """A thread's unit of ranking: some groups of chunks of a row."""

    row: int
    first: int
    groups: int


TOPK_LAYOUT, TOPK_OP_LAYOUT, RANK_UNIT_LAYOUT = StructLayout(TopkFields), StructLayout(TopkOp), StructLayout(RankUnit)
TOPK_BYTES, RANK_UNIT_BYTES = TOPK_LAYOUT.size, RANK_UNIT_LAYOUT.size
read_topk, read_topk_op, read_rank_unit = (job.reader() for job in (TOPK_LAYOUT, TOPK_OP_LAYOUT, RANK_UNIT_LAYOUT))


def padded_queries(n: int, group: int) -> int:
    """Queries of a KV head for ``n`` tokens, padded: a tile is faster than single queries."""
    return n if n * group == 1 else QUERIES_AT_ONCE * math.ceil(n * group / QUERIES_AT_ONCE)


def rank_units(chunks: list[int]) -> bytearray:
    """The table of units that rank each row's chunks, ``RANK_UNIT_BYTES`` each, by the rows' numbers of chunks."""
    units = [
        RankUnit(row, first, min(UNIT_GROUPS, math.ceil(count / GROUP_CHUNKS) - first))
        for row, count in enumerate(chunks)
        for first in range(0, math.ceil(count / GROUP_CHUNKS), UNIT_GROUPS)
    ]
    units = units or [RankUnit(0, 0, 0)]  # an operation has at least one task
    table = bytearray(RANK_UNIT_BYTES * len(units))
    for i, unit in enumerate(units):
        RANK_UNIT_LAYOUT.layout.pack_into(table, i * RANK_UNIT_BYTES, *unit)
    return table


def scratch_bytes(chunks: int, most: int, near: int, dim: int) -> int:
    """Bytes that a thread needs to choose among ``chunks`` chunks, with ``near`` recent tokens, the pass's among
    them."""
    keys = (min(1 + most, chunks) + math.ceil(near / CHUNK_KEYS)) * CHUNK_KEYS
    return (
        8 * (1 + selection_numbers(chunks))
        + 12 * chunks
        + 4 * HEADS_AT_ONCE * (keys + 2 * dim)
        + (HEADS_AT_ONCE + 4) * LINE
    )


@compiled
def project_queries(address: int, fields: int, code: int, task: int, slot: int) -> None:
    """One token's queries of one KV head."""
    this, op = read_pass(address), read_topk_op(fields)
    token, head = task // op.kv_heads, task % op.kv_heads
    number = integers(this.token_rows + 8 * token, 1)[0]
    row, topk = read_row(this.rows + number * ROW_BYTES), read_topk(op.topk + number * TOPK_BYTES)
    if topk.most >= topk.chunks:
        return
    group, place = op.heads // op.kv_heads, token - row.first
    for g in range(group):
        _project(op, topk, token, head * group + g, head, slot)
        _round(topk, head, g * row.n + place, slot)
    if place == row.n - 1:  # what pads the last tile
        floats(slot, topk.rank)[:] = np.float32(0)
        for i in range(group * row.n, topk.queries):
            _round(topk, head, i, slot)


@compiled
def _round(topk: TopkFields, head: int, i: int, query: int) -> None:
    """Keep a query, rounded."""
    place = head * topk.queries + i
    round_query(query, topk.rank, topk.units + 4 * place, topk.bytes + place * topk.rank)


@compiled
def _project(op: TopkOp, topk: TopkFields, token: int, head: int, own: int, to: int) -> None:
    """A query in the dimensions of the index."""
    query, short = floats(op.q + token * op.q_row + head * op.q_head, op.dim), floats(to, topk.rank)
    turn = floats(topk.projection + 4 * own * op.dim * topk.rank, op.dim * topk.rank)
    short[:] = np.float32(0)
    for c in range(op.dim):
        x = query[c]
        for r in range(topk.rank):
            short[r] += np.float32(x * turn[c * topk.rank + r])


@compiled
def rank(address: int, fields: int, code: int, task: int, slot: int) -> None:
    """One unit and KV head: the worth of its chunks to all queries."""
    this, op = read_pass(address), read_topk_op(fields)
    unit, head = read_rank_unit(this.units + task // op.kv_heads * RANK_UNIT_BYTES), task % op.kv_heads
    topk = read_topk(op.topk + unit.row * TOPK_BYTES)
    keys = topk.short + head * topk.short_head + unit.first * CHUNK_KEYS * topk.rank * GROUP_CHUNKS
    place, scores = head * topk.queries, topk.worth + head * topk.worth_head + 4 * GROUP_CHUNKS * unit.first
    q, units_of = topk.bytes + place * topk.rank, topk.units + 4 * place
    score_all(keys, q, topk.queries, topk.rank, unit.groups, units_of, scores, topk.worth_row)


PROJECT_QUERIES = Operation(TOPK_OP_LAYOUT, lambda op: Tasks(op.kv_heads, PER_TOKEN), project_queries)
RANK_CHUNKS = Operation(TOPK_OP_LAYOUT, lambda op: Tasks(op.kv_heads, PER_UNIT), rank)
