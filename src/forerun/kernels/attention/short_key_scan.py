"""The best key of each chunk for each query, over short keys of one byte per number: how a sparse cache finds chunks.

A vector holds four numbers of one key from each of 16 chunks. Processors that multiply bytes (VNNI) add four products
at once; others widen bytes to floats, which hold the same integers. Over a chunk's 16 keys the maximum is kept.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir

from forerun.core.compiling import compiled
from forerun.kernels import gpu
from forerun.kernels.runtime import thread_pool
from forerun.kernels.runtime.addresses import ScratchMemory, StructLayout, address_of, floats, signed_bytes
from forerun.kernels.runtime.executor import ticket
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
    Code,
    Emitter,
    constant,
    features,
    fused,
    intrinsic,
    intrinsic_code,
    words_of,
)

CHUNK_KEYS = 16
"""Keys per chunk."""
GROUP_CHUNKS = LANES
"""Chunks whose keys are stored side by side."""
QUAD_NUMBERS = 4
"""Numbers of a key that are stored side by side."""
ZERO_BYTE = 128
"""The byte that stands for 0 in a key, as its bytes are unsigned."""
QUERIES_AT_ONCE = 4
"""Queries, or keys for one query, whose sums are kept in registers at once."""
PREFETCH_BYTES = 16384
"""Prefetch distance in bytes."""
UNIT_GROUPS = 16
"""Groups that a thread takes at once."""
LARGEST_BYTE, SMALLEST_UNIT = 127.0, 1e-30
"""The byte for a query's largest number, and the least unit of a query's bytes."""
DOTS = "+avx512vnni" in features()
"""Whether the processor can multiply bytes, 64 at once."""


class ShortKeyScan(NamedTuple):
    """One call, as threads see it: addresses, strides in bytes, and counts."""

    next_task: int
    next_slot: int
    heads: int
    rows: int
    rank: int
    groups: int
    pieces: int
    keys: int
    keys_head: int
    q: int
    out: int
    slots: int
    slot_size: int


SCAN_CALL_LAYOUT = StructLayout(ShortKeyScan)
read_job = SCAN_CALL_LAYOUT.reader()

_scratch = ScratchMemory()


def best_keys(index: torch.Tensor, count: int, q: torch.Tensor) -> torch.Tensor:
    """The largest product of each query with any key of each chunk, plus an offset that is constant per query.

    Args:
        index: keys, uint8 ``[Hkv, groups, CHUNK_KEYS, rank / QUAD_NUMBERS, GROUP_CHUNKS, QUAD_NUMBERS]``. ``ZERO_BYTE``
            is not subtracted from them; that is the offset.
        count: number of chunks, stored group by group.
        q: float32 ``[H, n, rank]``; H is a multiple of Hkv. Rounded to bytes here.

    Returns:
        float32 ``[H, n, count]``.
    """
    if index.device.type != "cpu" or not fused():
        return by_definition(index, count, q)
    heads, rank = index.shape[0], q.shape[2]
    groups, grouped = math.ceil(count / GROUP_CHUNKS), q.reshape(heads, -1, rank)
    rows = grouped.shape[1]
    if rows > 1 and rows % QUERIES_AT_ONCE:  # a tile is faster than single queries
        grouped = torch.nn.functional.pad(grouped, (0, 0, 0, QUERIES_AT_ONCE - rows % QUERIES_AT_ONCE))
    grouped = grouped.contiguous()
    out = grouped.new_empty(*grouped.shape[:2], groups * GROUP_CHUNKS)
    threads, each = torch.get_num_threads(), LINE * math.ceil(heads * grouped.shape[1] * (4 + rank) / LINE)
    job = _scratch.claim(SCAN_CALL_LAYOUT.size + threads * each)
    sizes = (0, 0, heads, grouped.shape[1], rank, groups, math.ceil(groups / UNIT_GROUPS))
    places = (index.data_ptr(), index.stride(0), grouped.data_ptr(), out.data_ptr(), job + SCAN_CALL_LAYOUT.size, each)
    SCAN_CALL_LAYOUT.layout.pack_into(_scratch.bytes.data, 0, *sizes, *places)
    thread_pool.run(address_of(work), job, threads)
    return out[:, :rows, :count].reshape(*q.shape[:2], count)


def by_definition(index: torch.Tensor, count: int, q: torch.Tensor) -> torch.Tensor:
    """The same with torch's operations; on a GPU, with a kernel that reads the bytes."""
    heads, rank = index.shape[0], q.shape[2]
    scale = q.abs().amax(-1, keepdim=True) / LARGEST_BYTE
    rounded = (q / scale.clamp_min(SMALLEST_UNIT)).round()
    if gpu.runs_on(index.device) and count:
        from forerun.kernels.gpu import scan as there  # which needs Triton

        grouped = (t.reshape(heads, -1, t.shape[2]) for t in (rounded, scale))
        return there.best_keys(index, count, *grouped).reshape(*q.shape[:2], count)
    keys = index[:, : math.ceil(count / GROUP_CHUNKS)].to(q.dtype)
    products = torch.einsum("hnrj,hgkrcj->hngck", rounded.view(heads, -1, rank // QUAD_NUMBERS, QUAD_NUMBERS), keys)
    return products.amax(-1).flatten(2)[..., :count].reshape(*q.shape[:2], count) * scale


@compiled
def work(address: int) -> None:
    """Each thread's loop: take pieces until none are left."""
    job = read_job(address)
    slot = job.slots + ticket(address + 8) * job.slot_size
    queries = job.heads * job.rows
    for i in range(queries):
        round_query(job.q + 4 * i * job.rank, job.rank, slot + 4 * i, slot + 4 * queries + i * job.rank)
    while True:
        task = ticket(address)
        if task >= job.heads * job.pieces:
            return
        head, first = task // job.pieces, task % job.pieces * UNIT_GROUPS
        size, groups = CHUNK_KEYS * job.rank * GROUP_CHUNKS, min(UNIT_GROUPS, job.groups - first)
        keys, place = job.keys + head * job.keys_head + first * size, head * job.rows
        scales, q = slot + 4 * place, slot + 4 * queries + place * job.rank
        row = 4 * GROUP_CHUNKS * job.groups
        score_all(keys, q, job.rows, job.rank, groups, scales, job.out + place * row + 4 * GROUP_CHUNKS * first, row)


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
    """All of a KV head's rounded queries over some groups: tiles of them first, then single ones."""
    row = 0
    while row < rows:
        query, scale, to = q + row * rank, scales + 4 * row, out + row * out_row
        if row + QUERIES_AT_ONCE <= rows:
            score_queries(keys, query, rank, groups, scale, to, out_row)
            row += QUERIES_AT_ONCE
        else:
            score_query(keys, query, rank, groups, scale, to, 0)
            row += 1


@intrinsic
def score_query(typing: Any, keys: Any, q: Any, rank: Any, groups: Any, scale: Any, out: Any, row: Any) -> Code:
    """One query, ``QUERIES_AT_ONCE`` keys at a time."""
    return intrinsic_code(7, lambda e, *arguments: _score(e, 1, QUERIES_AT_ONCE, *arguments))


@intrinsic
def score_queries(typing: Any, keys: Any, q: Any, rank: Any, groups: Any, scale: Any, out: Any, row: Any) -> Code:
    """``QUERIES_AT_ONCE`` queries, one key at a time."""
    return intrinsic_code(7, lambda e, *arguments: _score(e, QUERIES_AT_ONCE, 1, *arguments))


def _score(
    e: Emitter,
    queries: int,
    keys: int,
    first: ir.Value,
    q: ir.Value,
    rank: ir.Value,
    groups: ir.Value,
    scale: ir.Value,
    out: ir.Value,
    row: ir.Value,
) -> None:
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
    """Add products of unsigned and signed bytes, four products to a lane."""
    b = e.builder
    found = [e.load(place, WORDS) for place in places]
    for four, rows in zip(fours, sums, strict=True):
        query = e.everywhere(e.load(four, I32))
        for keys, place in zip(found, rows, strict=True):
            b.store(e.dots(keys, query, b.load(place)), place)


def _add_products(e: Emitter, places: list[ir.Value], fours: list[ir.Value], sums: list[list[ir.Value]]) -> None:
    """The same with floats, number by number."""
    b = e.builder
    found = [e.load(place, BYTES) for place in places]
    for j in range(QUAD_NUMBERS):
        numbers = [b.uitofp(b.zext(e.every_fourth(keys, j), WORDS), FLOATS) for keys in found]
        for four, rows in zip(fours, sums, strict=True):
            query = e.everywhere(b.sitofp(e.load(e.at(four, j), BYTE), F32))
            for number, place in zip(numbers, rows, strict=True):
                b.store(e.fma(number, query, b.load(place)), place)
