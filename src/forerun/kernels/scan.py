"""The best key of each chunk for each query, over short keys of a byte a number: how a sparse cache finds its chunks.

A vector holds one number of one key of 16 chunks: it is widened to floats once for the queries of a tile, and each
query adds it with its own number. Of a chunk's 16 keys, one after the other, the larger vector remains each time.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from llvmlite import ir

from forerun.index.compiling import compiled
from forerun.kernels import team
from forerun.kernels.memory import Job, Room, address_of
from forerun.kernels.tiles import ticket
from forerun.kernels.vector import (
    BYTES,
    F32,
    FLOATS,
    I64,
    LANES,
    LINE,
    WORDS,
    Code,
    Emitter,
    constant,
    fused,
    intrinsic,
    intrinsic_code,
)

CHUNK = 16
"""Keys of a chunk."""
GROUP = LANES
"""Chunks whose keys lie side by side."""
TILE = 4
"""Queries, or keys of one query, whose sums are in registers at a time."""
PIECE = 16
"""Groups that a thread takes at a time."""


class Fields(NamedTuple):
    """One call, as the threads see it: addresses, distances in bytes, and counts."""

    next_task: int
    heads: int
    rows: int
    rank: int
    groups: int
    pieces: int
    keys: int
    keys_head: int
    q: int
    out: int
    unused: float


JOB = Job(Fields)
read_job = JOB.reader()

_room = Room()


def best_keys(index: torch.Tensor, count: int, q: torch.Tensor) -> torch.Tensor:
    """The largest product of each query with a key of each chunk.

    Args:
        index: the keys, int8 ``[Hkv, groups, CHUNK, rank, GROUP]``.
        count: chunks; the first of them in the first group, and so on.
        q: float32 ``[H, n, rank]``; H is a multiple of Hkv.

    Returns:
        float32 ``[H, n, count]``.
    """
    if index.device.type != "cpu" or not fused():
        return by_definition(index, count, q)
    heads, _, _, rank, _ = index.shape
    groups, grouped = math.ceil(count / GROUP), q.reshape(heads, -1, rank)
    rows = grouped.shape[1]
    if rows > 1 and rows % TILE:  # a tile is faster than its queries one by one
        grouped = torch.nn.functional.pad(grouped, (0, 0, 0, TILE - rows % TILE))
    grouped = grouped.contiguous()
    out = grouped.new_empty(*grouped.shape[:2], groups * GROUP)
    sizes = (0, heads, grouped.shape[1], rank, groups, math.ceil(groups / PIECE))
    places = (index.data_ptr(), index.stride(0), grouped.data_ptr(), out.data_ptr())
    JOB.layout.pack_into(_room.bytes.data, 0, *sizes, *places, 0.0)
    team.run(warm_up(), _room.address, torch.get_num_threads())
    return out[:, :rows, :count].reshape(*q.shape[:2], count)


def by_definition(index: torch.Tensor, count: int, q: torch.Tensor) -> torch.Tensor:
    """The same by torch's operations."""
    grouped = q.view(index.shape[0], -1, q.shape[2])
    keys = index[:, : math.ceil(count / GROUP)].to(q.dtype)
    products = torch.einsum("hnr,hgkrc->hngck", grouped, keys)
    return products.amax(-1).flatten(2)[..., :count].reshape(*q.shape[:2], count)


@functools.cache
def warm_up() -> int:
    """Compile, or load what an earlier process has compiled; gives the address of ``work``."""
    return address_of(work)


@compiled
def work(address: int) -> None:
    """What each thread does: take pieces until there are none."""
    job = read_job(address)
    while True:
        task = ticket(address)
        if task >= job.heads * job.pieces:
            return
        head, first = task // job.pieces, task % job.pieces * PIECE
        size, groups = CHUNK * job.rank * GROUP, min(PIECE, job.groups - first)
        keys, row = job.keys + head * job.keys_head + first * size, 0
        while row < job.rows:
            place = head * job.rows + row
            q, out = job.q + 4 * place * job.rank, job.out + 4 * GROUP * (place * job.groups + first)
            if row + TILE <= job.rows:
                score_queries(keys, q, job.rank, groups, out, 4 * GROUP * job.groups)
                row += TILE
            else:
                score_query(keys, q, job.rank, groups, out, 0)
                row += 1


@intrinsic
def score_query(typing: Any, keys: Any, q: Any, rank: Any, groups: Any, out: Any, row: Any) -> Code:
    """One query, ``TILE`` keys at a time."""
    return intrinsic_code(6, lambda e, *arguments: _score(e, 1, TILE, *arguments))


@intrinsic
def score_queries(typing: Any, keys: Any, q: Any, rank: Any, groups: Any, out: Any, row: Any) -> Code:
    """``TILE`` queries, a key at a time."""
    return intrinsic_code(6, lambda e, *arguments: _score(e, TILE, 1, *arguments))


def _score(
    e: Emitter,
    queries: int,
    keys: int,
    first: ir.Value,
    q: ir.Value,
    rank: ir.Value,
    groups: ir.Value,
    out: ir.Value,
    row: ir.Value,
) -> None:
    b, size = e.builder, e.times(rank, GROUP)
    with e.loop(groups) as group:
        best = [e.variable(constant(-math.inf)) for _ in range(queries)]
        with e.loop(I64(CHUNK // keys)) as step:
            begin = e.at(first, e.times(e.at(e.times(group, CHUNK), e.times(step, keys)), size))
            sums = [[e.variable(constant(0.0)) for _ in range(keys)] for _ in range(queries)]
            with e.loop(rank) as d:
                here = e.at(begin, e.times(d, GROUP))
                found = [e.load(e.at(here, e.times(size, j)), BYTES) for j in range(keys)]
                numbers = [b.sitofp(b.sext(part, WORDS), FLOATS) for part in found]
                for i in range(queries):
                    factor = e.everywhere(e.load(e.at(q, e.times(e.at(e.times(rank, i), d), 4)), F32))
                    for number, place in zip(numbers, sums[i], strict=True):
                        b.store(e.fma(number, factor, b.load(place)), place)
            for i in range(queries):
                for place in sums[i]:
                    b.store(e.larger(b.load(place), b.load(best[i])), best[i])
        for i in range(queries):
            e.store(b.load(best[i]), e.at(out, e.times(row, i), e.times(group, LINE)))
