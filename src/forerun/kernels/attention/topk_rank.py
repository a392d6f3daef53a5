"""Attention over the chunks that a query chooses, as operations of a program: for the low-rank cache.

*Shorten* projects each query into the dimensions of the index, and rounds it to bytes. *Rank* scores all chunks of a
text by their best key (``scan.py``). *Choose* (``chosen.py``) takes each query's best chunks and attends to them, to
the recent tokens, and to the query's own branch of the tree. This file has the data of all three, and the first two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.kernels.attention.ordered_attention import ROW_BYTES, read_row
from forerun.kernels.attention.short_key_scan import CHUNK, GROUP, PIECE, TILE, round_query, score_all
from forerun.kernels.attention.topk_select import numbers_of
from forerun.kernels.runtime.addresses import Job, floats, integers
from forerun.kernels.runtime.vector_ir import LINE

HEADS = 4
"""Heads of a group that are computed at once, at most."""


class SoughtFields(NamedTuple):
    """One layer of one row: what queries choose among. Strides are in bytes.

    Attributes:
        chunks: chunks that there are; 0 if everything is near.
        most: chunks that a query sees besides the first, at most; from ``chunks`` on it sees all, and ranks nothing.
        rank: dimensions of the index.
        short: address of the index, as in ``scan.best_keys``.
        turn: address of the projections of queries, float32 ``[Hkv, d, rank]``.
        k, v: addresses of all keys and values.
        asked: number of queries of a KV head in the pass, padded to a whole tile.
        bytes, units: addresses of room for the rounded queries, ``[Hkv, asked, rank]``, and for their units.
        worth: address of each chunk's worth to each query, float32 ``[Hkv, asked, ...]``.
    """

    chunks: int
    most: int
    rank: int
    short: int
    short_head: int
    turn: int
    k: int
    k_head: int
    k_row: int
    v: int
    v_head: int
    v_row: int
    asked: int = 0
    bytes: int = 0
    units: int = 0
    worth: int = 0
    worth_head: int = 0
    worth_row: int = 0


class SoughtOp(NamedTuple):
    """One layer's operation: addresses, strides in bytes, and counts; as in ``AttendOp``, but for these.

    Attributes:
        kv: address of the table with each row's addresses of recent keys and values, the pass's own among them. In
            ``RowFields``, ``start`` is their number before the pass.
        sought: address of each row's ``SoughtFields`` of this layer.
        joint: whether the queries of a group choose together.
        block: whether a token sees itself and its ancestors in the pass.
        lse: address for each head's and token's log-sum-exp, or 0.
    """

    code: int
    kind: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    q: int
    q_row: int
    q_head: int
    kv: int
    sought: int
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


SOUGHT, SOUGHT_OP, RANK_UNIT = Job(SoughtFields), Job(SoughtOp), Job(RankUnit)
SOUGHT_BYTES, RANK_BYTES = SOUGHT.size, RANK_UNIT.size
read_sought, read_sought_op, read_rank_unit = (job.reader() for job in (SOUGHT, SOUGHT_OP, RANK_UNIT))


def asked(n: int, group: int) -> int:
    """Queries of a KV head for ``n`` tokens, padded: a tile is faster than single queries."""
    return n if n * group == 1 else TILE * math.ceil(n * group / TILE)


def rank_units(chunks: list[int]) -> bytearray:
    """The table of units that rank so many chunks in each row; ``RANK_BYTES`` each."""
    units = [
        RankUnit(row, first, min(PIECE, math.ceil(count / GROUP) - first))
        for row, count in enumerate(chunks)
        for first in range(0, math.ceil(count / GROUP), PIECE)
    ]
    units = units or [RankUnit(0, 0, 0)]  # an operation has at least one task
    table = bytearray(RANK_BYTES * len(units))
    for i, unit in enumerate(units):
        RANK_UNIT.layout.pack_into(table, i * RANK_BYTES, *unit)
    return table


def room(chunks: int, most: int, near: int, dim: int) -> int:
    """Bytes that a thread needs to choose among so many chunks, with ``near`` recent tokens, the pass's among them."""
    keys = (min(1 + most, chunks) + math.ceil(near / CHUNK)) * CHUNK
    return 8 * (1 + numbers_of(chunks)) + 12 * chunks + 4 * HEADS * (keys + 2 * dim) + (HEADS + 4) * LINE


@compiled
def shorten(op: SoughtOp, rows: int, owners: int, task: int, slot: int) -> None:
    """One token's queries of one KV head."""
    token, head = task // op.kv_heads, task % op.kv_heads
    number = integers(owners + 8 * token, 1)[0]
    row, seek = read_row(rows + number * ROW_BYTES), read_sought(op.sought + number * SOUGHT_BYTES)
    if seek.most >= seek.chunks:
        return
    group, place = op.heads // op.kv_heads, token - row.first
    for g in range(group):
        _turn(op, seek, token, head * group + g, head, slot)
        _keep(seek, head, g * row.n + place, slot)
    if place == row.n - 1:  # what pads the last tile
        floats(slot, seek.rank)[:] = np.float32(0)
        for i in range(group * row.n, seek.asked):
            _keep(seek, head, i, slot)


@compiled
def _keep(seek: SoughtFields, head: int, i: int, query: int) -> None:
    """Keep a query, rounded."""
    place = head * seek.asked + i
    round_query(query, seek.rank, seek.units + 4 * place, seek.bytes + place * seek.rank)


@compiled
def _turn(op: SoughtOp, seek: SoughtFields, token: int, head: int, own: int, to: int) -> None:
    """A query in the dimensions of the index."""
    query, short = floats(op.q + token * op.q_row + head * op.q_head, op.dim), floats(to, seek.rank)
    turn = floats(seek.turn + 4 * own * op.dim * seek.rank, op.dim * seek.rank)
    short[:] = np.float32(0)
    for c in range(op.dim):
        x = query[c]
        for r in range(seek.rank):
            short[r] += np.float32(x * turn[c * seek.rank + r])


@compiled
def rank(op: SoughtOp, units: int, task: int, slot: int) -> None:
    """One unit and KV head: the worth of its chunks to all queries."""
    unit, head = read_rank_unit(units + task // op.kv_heads * RANK_BYTES), task % op.kv_heads
    seek = read_sought(op.sought + unit.row * SOUGHT_BYTES)
    keys = seek.short + head * seek.short_head + unit.first * CHUNK * seek.rank * GROUP
    place, scores = head * seek.asked, seek.worth + head * seek.worth_head + 4 * GROUP * unit.first
    q, units_of = seek.bytes + place * seek.rank, seek.units + 4 * place
    score_all(keys, q, seek.asked, seek.rank, unit.groups, units_of, scores, seek.worth_row)
