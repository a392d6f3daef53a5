"""Attention of each query over its own chunks, read in place, given the worth of every chunk to the query.

A thread takes one query of one head: it finds the best chunks, scores their keys, and adds up their values. Nothing is
copied. Many heads look at a few places only, so chunks that are worth almost nothing beside the best are skipped.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir

from forerun.core.compiling import compiled
from forerun.kernels import memory, team
from forerun.kernels.memory import Job, Room, address_of, floats, integers, place
from forerun.kernels.scan import CHUNK
from forerun.kernels.selection import choose, numbers_of
from forerun.kernels.tiles import ticket
from forerun.kernels.vector import F32, LANES, LINE, Code, Emitter, constant, intrinsic, intrinsic_code

KEYS = 4
"""Keys whose products are kept in registers at once."""
MARGIN = 7.0
"""Chunks further than this below the best score, in nats, are skipped: their keys weigh under a thousandth."""


class Fields(NamedTuple):
    """One call, as threads see it: addresses, strides in bytes, and counts."""

    next_task: int
    next_slot: int
    queries: int
    share: int
    dim: int
    chunks: int
    chosen: int
    slots: int
    slot_size: int
    worth: int
    worth_row: int
    q: int
    k: int
    k_head: int
    k_row: int
    v: int
    v_head: int
    v_row: int
    near: int
    near_k: int
    near_k_head: int
    near_k_row: int
    near_v: int
    near_v_head: int
    near_v_row: int
    out: int
    lse: int
    scale: float


JOB = Job(Fields)
read_job = JOB.reader()

Near = tuple[torch.Tensor, torch.Tensor, int]

_room = Room()


def attend_chosen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, worth: torch.Tensor, count: int, near: Near, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q`` over the first chunk, up to ``count`` chunks by worth to each query, and the near keys.

    For tensors that ``fits`` accepts.

    Args:
        q: ``[1, H, n, d]``.
        k, v: ``[1, Hkv, m, d]``.
        worth: each chunk's best product of a key with the query, float32 ``[H, n, chunks]``; the first chunk's entry is
            overwritten. Of equal chunks the earlier ones are taken; chunks whose scaled product is more than ``MARGIN``
            below the best are skipped.
        count: the most chunks; less than there are.
        near: keys, values, and how many of them all queries see. One more chunk of finite numbers must follow them.
        scaling: factor on the scores.

    Returns:
        The output ``[1, H, n, d]`` and the log-sum-exp ``[1, H, n]``.
    """
    _, heads, n, dim = q.shape
    q, worth, chunks = q.contiguous(), worth.contiguous(), worth.shape[2]
    threads = min(torch.get_num_threads(), heads * n)
    numbers, keys = 1 + numbers_of(chunks), (1 + count + math.ceil(near[2] / CHUNK)) * CHUNK
    slot_size = LINE * math.ceil((8 * (numbers + chunks) + 4 * (keys + dim)) / LINE)
    job = _room.claim(JOB.size + threads * slot_size)
    out, lse = q.new_empty(1, heads, n, dim), q.new_empty(1, heads, n)
    sizes = (0, 0, heads * n, n * (heads // k.shape[1]), dim, chunks, count, job + JOB.size, slot_size)
    recent = (near[2], *place(near[0]), *place(near[1]))
    places = (worth.data_ptr(), 4 * chunks, q.data_ptr(), *place(k), *place(v), *recent)
    JOB.layout.pack_into(_room.bytes.data, 0, *sizes, *places, out.data_ptr(), lse.data_ptr(), scaling / math.log(2))
    team.run(address_of(work), job, threads)
    return out, lse


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether ``attend_chosen`` can read these: floats on a CPU, in rows of a multiple of 16."""
    return q.dtype == torch.float32 and memory.fits(q, k, v)


@compiled
def work(address: int) -> None:
    """Each thread's loop: take queries until none are left."""
    job = read_job(address)
    slot = job.slots + ticket(address + 8) * job.slot_size
    while True:
        task = ticket(address)
        if task >= job.queries:
            return
        _attend(job, task, slot)


@compiled
def _attend(job: Fields, task: int, slot: int) -> None:
    """Output and log-sum-exp of one query of one head."""
    found, spare = slot, slot + 8 * (1 + numbers_of(job.chunks))
    weights = spare + 8 * job.chunks
    recent = (job.near + CHUNK - 1) // CHUNK
    q = weights + 4 * (1 + job.chosen + recent) * CHUNK
    query, scaled = floats(job.q + 4 * task * job.dim, job.dim), floats(q, job.dim)
    for c in range(job.dim):
        scaled[c] = np.float32(query[c] * job.scale)
    worth = floats(job.worth + task * job.worth_row, job.chunks)
    worth[0] = -np.inf
    count = 1 + choose(worth, job.chosen, MARGIN / (job.scale * math.log(2.0)), found + 8, spare)
    chosen, head = integers(found, count), task // job.share
    chosen[0] = 0
    k, v, chunk_k, chunk_v = job.k + head * job.k_head, job.v + head * job.v_head, CHUNK * job.k_row, CHUNK * job.v_row
    for i in range(count):
        after = k + chosen[min(i + 1, count - 1)] * chunk_k
        value = v + chosen[i] * chunk_v
        products(q, k + chosen[i] * chunk_k, job.k_row, job.dim, weights + 4 * i * CHUNK, after, value, job.v_row)
    k = job.near_k + head * job.near_k_head
    for i in range(recent):
        here = k + i * CHUNK * job.near_k_row
        products(q, here, job.near_k_row, job.dim, weights + 4 * (count + i) * CHUNK, here, here, job.near_k_row)
    floats(weights, (count + recent) * CHUNK)[count * CHUNK + job.near :] = -np.inf
    state = floats(spare, 2)
    exponentials(weights, count + recent, spare)
    out = job.out + 4 * task * job.dim
    result = floats(out, job.dim)
    result[:] = np.float32(0)
    for i in range(count):
        add(weights + 4 * i * CHUNK, v + chosen[i] * chunk_v, job.v_row, job.dim, out)
    v = job.near_v + head * job.near_v_head
    for i in range(recent):
        here = v + i * CHUNK * job.near_v_row
        add(weights + 4 * (count + i) * CHUNK, here, job.near_v_row, job.dim, out)
    for c in range(job.dim):
        result[c] = np.float32(result[c] / state[1])
    floats(job.lse + 4 * task, 1)[0] = np.float32((state[0] + math.log2(state[1])) * math.log(2.0))


@intrinsic
def products(
    typing: Any, q: Any, keys: Any, row: Any, dim: Any, out: Any, ahead: Any, values: Any, values_row: Any
) -> Code:
    """Products of a query with a chunk's keys; meanwhile prefetches the chunks at ``ahead`` and ``values``."""
    return intrinsic_code(8, _products)


@intrinsic
def exponentials(typing: Any, scores: Any, vectors: Any, state: Any) -> Code:
    """2 ** (score - largest score). The largest score is written to ``state``, and the sum of the results after it."""
    return intrinsic_code(3, _exponentials)


@intrinsic
def add(typing: Any, weights: Any, values: Any, row: Any, dim: Any, out: Any) -> Code:
    """Add a chunk's weighted values."""
    return intrinsic_code(5, _add)


def _products(
    e: Emitter,
    q: ir.Value,
    keys: ir.Value,
    row: ir.Value,
    dim: ir.Value,
    out: ir.Value,
    ahead: ir.Value,
    values: ir.Value,
    values_row: ir.Value,
) -> None:
    b = e.builder
    with e.loop(b.udiv(row.type(CHUNK), row.type(KEYS))) as group:
        first = e.times(group, KEYS)
        offsets = [e.times(e.at(first, j), row) for j in range(KEYS)]
        sums = [e.variable(constant(0.0)) for _ in range(KEYS)]
        with e.loop(b.udiv(dim, row.type(LANES))) as c:
            line = e.times(c, LINE)
            part = e.load(e.at(q, line))
            for j, (offset, place) in enumerate(zip(offsets, sums, strict=True)):
                e.prefetch(e.at(ahead, offset, line))
                e.prefetch(e.at(values, e.times(e.at(first, j), values_row), line))
                b.store(e.fma(e.load(e.at(keys, offset, line)), part, b.load(place)), place)
        for j, place in enumerate(sums):
            e.store(e.total(b.load(place)), e.at(out, e.times(first, 4), 4 * j))


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


def _add(e: Emitter, weights: ir.Value, values: ir.Value, row: ir.Value, dim: ir.Value, out: ir.Value) -> None:
    b = e.builder
    with e.loop(b.udiv(dim, row.type(LANES))) as c:
        line = e.times(c, LINE)
        parts = [e.variable(constant(0.0)) for _ in range(KEYS)]
        for key in range(CHUNK):
            offset = e.at(e.times(row, key), line)
            weight = e.everywhere(e.load(e.at(weights, 4 * key), F32))
            place = parts[key % KEYS]
            b.store(e.fma(e.load(e.at(values, offset)), weight, b.load(place)), place)
        low, high = (b.fadd(b.load(x), b.load(y)) for x, y in (parts[:2], parts[2:]))
        e.store(b.fadd(e.load(e.at(out, line)), b.fadd(low, high)), e.at(out, line))
