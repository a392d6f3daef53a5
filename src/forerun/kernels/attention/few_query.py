"""Attention of a few queries over many keys on a CPU: for long texts, where it decides the speed of decoding.

Keys are cut into splits, which are computed separately and merged by their log-sum-exp, so that few heads keep all
cores busy (Flash-Decoding, Dao et al. 2023). Within a split, tiles of queries go over blocks of keys with a running
maximum and sum (FlashAttention, Dao et al. 2022; ``attention_tile.py``). While one block is computed, the next is
prefetched.

The split depends only on the number of keys. So a query's result has the same bits for any number of threads, alone or
among other queries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_tile import (
    STATE_BYTES,
    TILE_QUERIES,
    TILES_AT_ONCE,
    VECTORS_AT_ONCE,
    copy_floats,
    gather,
    gather_vectors,
    score,
    score_tiles,
    weigh,
    widen_bfloat16,
    widen_float16,
)
from forerun.kernels.runtime import addresses, thread_pool
from forerun.kernels.runtime.addresses import ScratchMemory, StructLayout, address_of, floats, head_rows
from forerun.kernels.runtime.executor import ticket
from forerun.kernels.runtime.vector_ir import LANES, LINE

BLOCK_KEYS = 32
"""Keys per block; with their values they fit in the nearest cache."""
LEAST_SPLIT_KEYS = 1024
"""The least keys per split."""
MOST_SPLITS = 64
"""The most splits."""
LOWEST_SUM = -3e38
"""Initial value of the running maximum. Finite, so that differences are never NaN."""
FEW_QUERY_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types of keys and values. 16-bit numbers are widened block by block; all sums are float32."""


class FewQueryCall(NamedTuple):
    """One call, as threads see it: addresses, strides in bytes, and counts."""

    next_task: int
    next_slot: int
    heads: int
    n: int
    m: int
    dim: int
    split: int
    splits: int
    kind: int
    width: int
    q: int
    q_head: int
    q_row: int
    k: int
    k_head: int
    k_row: int
    v: int
    v_head: int
    v_row: int
    out: int
    lse: int
    done: int
    slots: int
    slot_size: int
    states: int
    part_size: int
    scale: float


FEW_QUERY_LAYOUT = StructLayout(FewQueryCall)
read_job = FEW_QUERY_LAYOUT.reader()

_scratch = ScratchMemory()


def few_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q`` ``[1, H, n, d]`` over all of ``k``, ``v`` ``[1, H, m, d]``; see ``fits``.

    Returns:
        The output ``[1, H, n, d]`` and the log-sum-exp ``[1, H, n]``.
    """
    _, heads, n, dim = q.shape
    m, threads, floats_of_q = k.shape[2], torch.get_num_threads(), q.float()
    split = max(LEAST_SPLIT_KEYS, math.ceil(m / MOST_SPLITS / BLOCK_KEYS) * BLOCK_KEYS)
    splits, tiles = math.ceil(m / split), math.ceil(n / TILE_QUERIES)
    slot_size = tiles * TILE_QUERIES * 4 * (dim + BLOCK_KEYS) + BLOCK_KEYS * dim * 4
    part_size = tiles * (TILE_QUERIES * dim * 4 + STATE_BYTES)
    job = _scratch.claim(FEW_QUERY_LAYOUT.size + 8 * heads + threads * slot_size + heads * splits * part_size)
    done = job + FEW_QUERY_LAYOUT.size
    slots = done + 8 * heads
    _scratch.bytes[FEW_QUERY_LAYOUT.size : FEW_QUERY_LAYOUT.size + 8 * heads] = 0
    out, lse = floats_of_q.new_empty(1, heads, n, dim), floats_of_q.new_empty(1, heads, n)
    rows = (*head_rows(floats_of_q), *head_rows(k), *head_rows(v))
    sizes = (slots, slot_size, slots + threads * slot_size, part_size, scaling / math.log(2))
    counts = (0, 0, heads, n, m, dim, split, splits, FEW_QUERY_DTYPES[k.dtype], k.element_size())
    FEW_QUERY_LAYOUT.layout.pack_into(
        _scratch.bytes.data, 0, *counts, *rows, out.data_ptr(), lse.data_ptr(), done, *sizes
    )
    thread_pool.run(address_of(work), job, threads)
    return out.to(q.dtype), lse


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether ``few_queries`` can read these CPU tensors: rows of a multiple of 16 numbers."""
    return q.dtype in FEW_QUERY_DTYPES and addresses.fits(q, k, v)


@compiled
def work(address: int) -> None:
    """Each thread's loop: take splits until none are left. The thread that finishes a head's last split merges them."""
    job = read_job(address)
    slot = job.slots + ticket(address + 8) * job.slot_size
    while True:
        task = ticket(address)
        if task >= job.heads * job.splits:
            return
        _split(job, task, slot)
        head = task // job.splits
        if ticket(job.done + 8 * head) == job.splits - 1:
            _merge(job, head)


@compiled
def _split(job: FewQueryCall, task: int, slot: int) -> None:
    """Outputs and states of all queries over one split of one head's keys."""
    tiles = (job.n + TILE_QUERIES - 1) // TILE_QUERIES
    head, first = task // job.splits, task % job.splits * job.split
    last = min(job.m, first + job.split)
    scores = slot + tiles * TILE_QUERIES * job.dim * 4
    spare = scores + tiles * TILE_QUERIES * BLOCK_KEYS * 4
    out = job.states + task * job.part_size
    state = out + tiles * TILE_QUERIES * job.dim * 4
    floats(out, job.part_size // 4)[:] = np.float32(0)
    for t in range(tiles):
        floats(state + t * STATE_BYTES, LANES)[:] = np.float32(LOWEST_SUM)
    _pack(job, job.q + head * job.q_head, slot)
    for start in range(first, last, BLOCK_KEYS):
        k = job.k + head * job.k_head + start * job.k_row
        v = job.v + head * job.v_head + start * job.v_row
        after = k + BLOCK_KEYS * job.k_row if start + BLOCK_KEYS < last else k
        _block(job, slot, k, v, min(BLOCK_KEYS, last - start), scores, spare, out, state, after)


@compiled
def _pack(job: FewQueryCall, q: int, to: int) -> None:
    """Pack scaled queries into vectors of four numbers of four queries. The last query pads the last tile."""
    packed = floats(to, (job.n + TILE_QUERIES - 1) // TILE_QUERIES * TILE_QUERIES * job.dim)
    for i in range(packed.size // job.dim):
        row = floats(q + min(i, job.n - 1) * job.q_row, job.dim)
        begin = i // TILE_QUERIES * TILE_QUERIES * job.dim + i % TILE_QUERIES * 4
        for c in range(job.dim):
            packed[begin + c // 4 * LANES + c % 4] = np.float32(row[c] * job.scale)


@compiled
def _copy(job: FewQueryCall, rows: int, row: int, count: int, to: int) -> None:
    """Copy ``count`` rows, widened to float32, and pad them with zeros to a whole block."""
    for i in range(count):
        for c in range(0, job.dim, LANES):
            source, place = rows + i * row + c * job.width, to + 4 * (i * job.dim + c)
            if job.kind == 0:
                copy_floats(source, place)
            elif job.kind == 1:
                widen_bfloat16(source, place)
            else:
                widen_float16(source, place)
    if count < BLOCK_KEYS:
        floats(to + 4 * count * job.dim, (BLOCK_KEYS - count) * job.dim)[:] = np.float32(0)


@compiled
def _block(
    job: FewQueryCall, q: int, k: int, v: int, count: int, scores: int, spare: int, out: int, state: int, after: int
) -> None:
    """All tiles over one block of keys; values are fetched with the scores, the next keys with the values."""
    tiles, size = (job.n + TILE_QUERIES - 1) // TILE_QUERIES, BLOCK_KEYS * TILE_QUERIES * 4
    copied, k_row, v_row, ahead = count < BLOCK_KEYS or job.width < 4, job.k_row, job.v_row, v
    if copied:
        _copy(job, k, k_row, count, spare)
        k, k_row = spare, 4 * job.dim
    _score_all(job, tiles, q, k, k_row, scores, ahead)
    if count < BLOCK_KEYS:
        _hide(scores, tiles, count)
    for t in range(tiles):
        weigh(scores + t * size, BLOCK_KEYS, state + t * STATE_BYTES)
    if copied:
        _copy(job, v, v_row, count, spare)
        v, v_row = spare, 4 * job.dim
    _gather_all(job, tiles, scores, state, v, v_row, out, after)


@compiled
def _score_all(job: FewQueryCall, tiles: int, q: int, k: int, k_row: int, scores: int, ahead: int) -> None:
    size, tile = BLOCK_KEYS * TILE_QUERIES * 4, TILE_QUERIES * job.dim * 4
    pace, t = LANES * job.width // ((tiles + TILES_AT_ONCE - 1) // TILES_AT_ONCE), 0
    share = pace * (BLOCK_KEYS * job.dim // LANES)
    while t < tiles:
        if t + TILES_AT_ONCE <= tiles:
            score_tiles(q + t * tile, k, k_row, job.dim, BLOCK_KEYS, scores + t * size, ahead, pace)
            t += TILES_AT_ONCE
        else:
            score(q + t * tile, k, k_row, job.dim, BLOCK_KEYS, scores + t * size, ahead, pace)
            t += 1
        ahead += share


@compiled
def _gather_all(
    job: FewQueryCall, tiles: int, weights: int, state: int, v: int, v_row: int, out: int, ahead: int
) -> None:
    size, tile, pace = BLOCK_KEYS * TILE_QUERIES * 4, TILE_QUERIES * job.dim * 4, LANES * job.width // tiles
    for t in range(tiles):
        p, factors, c = weights + t * size, state + t * STATE_BYTES, 0
        while c + VECTORS_AT_ONCE * LANES <= job.dim:
            gather_vectors(p, factors, v + 4 * c, v_row, job.dim, BLOCK_KEYS, out + t * tile + 4 * c, ahead, pace)
            ahead += pace * BLOCK_KEYS * VECTORS_AT_ONCE
            c += VECTORS_AT_ONCE * LANES
        while c < job.dim:
            gather(p, factors, v + 4 * c, v_row, job.dim, BLOCK_KEYS, out + t * tile + 4 * c, ahead, pace)
            ahead += pace * BLOCK_KEYS
            c += LANES


@compiled
def _hide(scores: int, tiles: int, count: int) -> None:
    """Set the weights of keys from ``count`` on to 0."""
    for t in range(tiles):
        tile = floats(scores + t * BLOCK_KEYS * TILE_QUERIES * 4, BLOCK_KEYS * TILE_QUERIES)
        for key in range(count, BLOCK_KEYS):
            for i in range(TILE_QUERIES):
                tile[key // 4 * LANES + i * 4 + key % 4] = -np.inf


@compiled
def _merge(job: FewQueryCall, head: int) -> None:
    """Output and log-sum-exp of one head, merged from its splits in order."""
    tiles = (job.n + TILE_QUERIES - 1) // TILE_QUERIES
    states = tiles * TILE_QUERIES * job.dim * 4
    lse = floats(job.lse + 4 * head * job.n, job.n)
    for i in range(job.n):
        out = floats(job.out + 4 * (head * job.n + i) * job.dim, job.dim)
        out[:] = np.float32(0)
        begin = job.states + head * job.splits * job.part_size
        at = states + i // TILE_QUERIES * STATE_BYTES + i % TILE_QUERIES * 16
        highest, total = -np.inf, 0.0
        for p in range(job.splits):
            highest = max(highest, floats(begin + p * job.part_size + at, 1)[0])
        for p in range(job.splits):
            part = begin + p * job.part_size
            sums, weight = floats(part + at + LINE, 4), 2.0 ** (floats(part + at, 1)[0] - highest)
            total += weight * (np.float64(sums[0]) + sums[1] + sums[2] + sums[3])
            source = floats(part + 4 * i * job.dim, job.dim)
            for c in range(job.dim):
                out[c] += np.float32(weight) * source[c]
        for c in range(job.dim):
            out[c] = np.float32(out[c] / total)
        lse[i] = (highest + math.log2(total)) * math.log(2.0)
