"""Attention of a few queries over many keys on a CPU: for long texts, where it decides the speed of decoding.

Keys are split into pieces, which are computed separately and merged by their log-sum-exp, so that few heads keep all
cores busy (Flash-Decoding, Dao et al. 2023). Within a piece, tiles of queries go over blocks of keys with a running
maximum and sum (FlashAttention, Dao et al. 2022; ``tiles.py``). While one block is computed, the next is prefetched.

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
    QUERIES,
    STATE,
    TILES,
    VECTORS,
    copy_floats,
    gather,
    gather_vectors,
    score,
    score_tiles,
    ticket,
    weigh,
    widen_bfloat16,
    widen_float16,
)
from forerun.kernels.runtime import addresses, thread_pool
from forerun.kernels.runtime.addresses import Job, Room, address_of, floats, place
from forerun.kernels.runtime.vector_ir import LANES, LINE

BLOCK = 32
"""Keys per block; with their values they fit in the nearest cache."""
PIECE = 1024
"""The least keys per piece."""
PIECES = 64
"""The most pieces."""
LOWEST = -3e38
"""Initial value of the running maximum. Finite, so that differences are never NaN."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types of keys and values. 16-bit numbers are widened block by block; all sums are float32."""


class Fields(NamedTuple):
    """One call, as threads see it: addresses, strides in bytes, and counts."""

    next_task: int
    next_slot: int
    heads: int
    n: int
    m: int
    dim: int
    piece: int
    pieces: int
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
    parts: int
    part_size: int
    scale: float


JOB = Job(Fields)
read_job = JOB.reader()

_room = Room()


def few_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q`` ``[1, H, n, d]`` over all of ``k``, ``v`` ``[1, H, m, d]``; see ``fits``.

    Returns:
        The output ``[1, H, n, d]`` and the log-sum-exp ``[1, H, n]``.
    """
    _, heads, n, dim = q.shape
    m, threads, floats_of_q = k.shape[2], torch.get_num_threads(), q.float()
    piece = max(PIECE, math.ceil(m / PIECES / BLOCK) * BLOCK)
    pieces, tiles = math.ceil(m / piece), math.ceil(n / QUERIES)
    slot_size = tiles * QUERIES * 4 * (dim + BLOCK) + BLOCK * dim * 4
    part_size = tiles * (QUERIES * dim * 4 + STATE)
    job = _room.claim(JOB.size + 8 * heads + threads * slot_size + heads * pieces * part_size)
    done = job + JOB.size
    slots = done + 8 * heads
    _room.bytes[JOB.size : JOB.size + 8 * heads] = 0
    out, lse = floats_of_q.new_empty(1, heads, n, dim), floats_of_q.new_empty(1, heads, n)
    rows = (*place(floats_of_q), *place(k), *place(v))
    sizes = (slots, slot_size, slots + threads * slot_size, part_size, scaling / math.log(2))
    counts = (0, 0, heads, n, m, dim, piece, pieces, KINDS[k.dtype], k.element_size())
    JOB.layout.pack_into(_room.bytes.data, 0, *counts, *rows, out.data_ptr(), lse.data_ptr(), done, *sizes)
    thread_pool.run(address_of(work), job, threads)
    return out.to(q.dtype), lse


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether ``few_queries`` can read these CPU tensors: rows of a multiple of 16 numbers."""
    return q.dtype in KINDS and addresses.fits(q, k, v)


@compiled
def work(address: int) -> None:
    """Each thread's loop: take pieces until none are left. The thread that finishes a head's last piece merges them."""
    job = read_job(address)
    slot = job.slots + ticket(address + 8) * job.slot_size
    while True:
        task = ticket(address)
        if task >= job.heads * job.pieces:
            return
        _piece(job, task, slot)
        head = task // job.pieces
        if ticket(job.done + 8 * head) == job.pieces - 1:
            _merge(job, head)


@compiled
def _piece(job: Fields, task: int, slot: int) -> None:
    """Outputs and states of all queries over one piece of one head's keys."""
    tiles = (job.n + QUERIES - 1) // QUERIES
    head, first = task // job.pieces, task % job.pieces * job.piece
    last = min(job.m, first + job.piece)
    scores = slot + tiles * QUERIES * job.dim * 4
    spare = scores + tiles * QUERIES * BLOCK * 4
    out = job.parts + task * job.part_size
    state = out + tiles * QUERIES * job.dim * 4
    floats(out, job.part_size // 4)[:] = np.float32(0)
    for t in range(tiles):
        floats(state + t * STATE, LANES)[:] = np.float32(LOWEST)
    _pack(job, job.q + head * job.q_head, slot)
    for start in range(first, last, BLOCK):
        k = job.k + head * job.k_head + start * job.k_row
        v = job.v + head * job.v_head + start * job.v_row
        after = k + BLOCK * job.k_row if start + BLOCK < last else k
        _block(job, slot, k, v, min(BLOCK, last - start), scores, spare, out, state, after)


@compiled
def _pack(job: Fields, q: int, to: int) -> None:
    """Pack scaled queries into vectors of four numbers of four queries. The last query pads the last tile."""
    packed = floats(to, (job.n + QUERIES - 1) // QUERIES * QUERIES * job.dim)
    for i in range(packed.size // job.dim):
        row = floats(q + min(i, job.n - 1) * job.q_row, job.dim)
        begin = i // QUERIES * QUERIES * job.dim + i % QUERIES * 4
        for c in range(job.dim):
            packed[begin + c // 4 * LANES + c % 4] = np.float32(row[c] * job.scale)


@compiled
def _copy(job: Fields, rows: int, row: int, count: int, to: int) -> None:
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
    if count < BLOCK:
        floats(to + 4 * count * job.dim, (BLOCK - count) * job.dim)[:] = np.float32(0)


@compiled
def _block(
    job: Fields, q: int, k: int, v: int, count: int, scores: int, spare: int, out: int, state: int, after: int
) -> None:
    """All tiles over one block of keys; values are fetched with the scores, the next keys with the values."""
    tiles, size = (job.n + QUERIES - 1) // QUERIES, BLOCK * QUERIES * 4
    copied, k_row, v_row, ahead = count < BLOCK or job.width < 4, job.k_row, job.v_row, v
    if copied:
        _copy(job, k, k_row, count, spare)
        k, k_row = spare, 4 * job.dim
    _score_all(job, tiles, q, k, k_row, scores, ahead)
    if count < BLOCK:
        _hide(scores, tiles, count)
    for t in range(tiles):
        weigh(scores + t * size, BLOCK, state + t * STATE)
    if copied:
        _copy(job, v, v_row, count, spare)
        v, v_row = spare, 4 * job.dim
    _gather_all(job, tiles, scores, state, v, v_row, out, after)


@compiled
def _score_all(job: Fields, tiles: int, q: int, k: int, k_row: int, scores: int, ahead: int) -> None:
    size, tile = BLOCK * QUERIES * 4, QUERIES * job.dim * 4
    pace, t = LANES * job.width // ((tiles + TILES - 1) // TILES), 0
    share = pace * (BLOCK * job.dim // LANES)
    while t < tiles:
        if t + TILES <= tiles:
            score_tiles(q + t * tile, k, k_row, job.dim, BLOCK, scores + t * size, ahead, pace)
            t += TILES
        else:
            score(q + t * tile, k, k_row, job.dim, BLOCK, scores + t * size, ahead, pace)
            t += 1
        ahead += share


@compiled
def _gather_all(job: Fields, tiles: int, weights: int, state: int, v: int, v_row: int, out: int, ahead: int) -> None:
    size, tile, pace = BLOCK * QUERIES * 4, QUERIES * job.dim * 4, LANES * job.width // tiles
    for t in range(tiles):
        p, factors, c = weights + t * size, state + t * STATE, 0
        while c + VECTORS * LANES <= job.dim:
            gather_vectors(p, factors, v + 4 * c, v_row, job.dim, BLOCK, out + t * tile + 4 * c, ahead, pace)
            ahead += pace * BLOCK * VECTORS
            c += VECTORS * LANES
        while c < job.dim:
            gather(p, factors, v + 4 * c, v_row, job.dim, BLOCK, out + t * tile + 4 * c, ahead, pace)
            ahead += pace * BLOCK
            c += LANES


@compiled
def _hide(scores: int, tiles: int, count: int) -> None:
    """Set the weights of keys from ``count`` on to 0."""
    for t in range(tiles):
        tile = floats(scores + t * BLOCK * QUERIES * 4, BLOCK * QUERIES)
        for key in range(count, BLOCK):
            for i in range(QUERIES):
                tile[key // 4 * LANES + i * 4 + key % 4] = -np.inf


@compiled
def _merge(job: Fields, head: int) -> None:
    """Output and log-sum-exp of one head, merged from its pieces in order."""
    tiles = (job.n + QUERIES - 1) // QUERIES
    states = tiles * QUERIES * job.dim * 4
    lse = floats(job.lse + 4 * head * job.n, job.n)
    for i in range(job.n):
        out = floats(job.out + 4 * (head * job.n + i) * job.dim, job.dim)
        out[:] = np.float32(0)
        begin = job.parts + head * job.pieces * job.part_size
        at = states + i // QUERIES * STATE + i % QUERIES * 16
        highest, total = -np.inf, 0.0
        for p in range(job.pieces):
            highest = max(highest, floats(begin + p * job.part_size + at, 1)[0])
        for p in range(job.pieces):
            part = begin + p * job.part_size
            sums, weight = floats(part + at + LINE, 4), 2.0 ** (floats(part + at, 1)[0] - highest)
            total += weight * (np.float64(sums[0]) + sums[1] + sums[2] + sums[3])
            source = floats(part + 4 * i * job.dim, job.dim)
            for c in range(job.dim):
                out[c] += np.float32(weight) * source[c]
        for c in range(job.dim):
            out[c] = np.float32(out[c] / total)
        lse[i] = (highest + math.log2(total)) * math.log(2.0)
