"""Attention of each query over chunks of its own choice, read in place, given what every chunk is worth to it.

One thread takes one query of one head: it finds the best chunks by two selections, of groups and of chunks, scores
their keys, and adds up their values. Nothing is sorted and nothing is copied. Many heads look at a few places only, so
what is worth next to nothing beside the best is left out.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir

from forerun.index.compiling import compiled
from forerun.kernels import team
from forerun.kernels.memory import Job, Room, address_of, floats, integers
from forerun.kernels.tiles import ticket
from forerun.kernels.vector import F32, LANES, LINE, Code, Emitter, constant, fused, intrinsic, intrinsic_code

CHUNK = LANES
"""Keys of a chunk."""
GROUP = LANES
"""Chunks whose best one decides whether they are looked at one by one."""
KEYS = 4
"""Keys whose products are in registers at a time."""
MARGIN = 7.0
"""What is further below the best score, in nats, has a thousandth of its weight."""
JOB_ROOM = 256
"""Bytes that are kept for the job."""


class Fields(NamedTuple):
    """One call, as the threads see it: addresses, distances in bytes, and counts."""

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
    """Attention of ``q`` over the first chunk, up to ``count`` that are worth most to each query, and near keys.

    See ``fits``.

    Args:
        q: ``[1, H, n, d]``.
        k, v: ``[1, Hkv, m, d]``.
        worth: of each chunk, its best key's product with the query, float32 ``[H, n, chunks]``; of equal ones the first
            are taken, and none whose scaled product is more than ``MARGIN`` below the best. The first chunk's is lost.
        count: less than there are chunks.
        near: keys, values and how many of them all queries see; behind them lies a chunk more of finite numbers.
        scaling: of the scores.

    Returns:
        The output ``[1, H, n, d]`` and the log-sum-exp ``[1, H, n]``.
    """
    _, heads, n, dim = q.shape
    q, worth, chunks = q.contiguous(), worth.contiguous(), worth.shape[2]
    threads = min(torch.get_num_threads(), heads * n)
    numbers, keys = 1 + chunks + math.ceil(chunks / GROUP), (1 + count + math.ceil(near[2] / CHUNK)) * CHUNK
    slot_size = LINE * math.ceil((8 * (numbers + chunks) + 4 * (keys + dim)) / LINE)
    if _room.bytes.nbytes < JOB_ROOM + threads * slot_size:
        _room.reserve(JOB_ROOM + threads * slot_size)
    job = _room.address
    out, lse = q.new_empty(1, heads, n, dim), q.new_empty(1, heads, n)
    sizes = (0, 0, heads * n, n * (heads // k.shape[1]), dim, chunks, count, job + JOB_ROOM, slot_size)
    recent = (near[2], *_place(near[0]), *_place(near[1]))
    places = (worth.data_ptr(), 4 * chunks, q.data_ptr(), *_place(k), *_place(v), *recent)
    JOB.layout.pack_into(_room.bytes.data, 0, *sizes, *places, out.data_ptr(), lse.data_ptr(), scaling / math.log(2))
    team.run(warm_up(), job, threads)
    return out, lse


def _place(t: torch.Tensor) -> tuple[int, int, int]:
    """Address, and bytes from head to head and from row to row."""
    return t.data_ptr(), 4 * t.stride(1), 4 * t.stride(2)


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether these are such as ``attend_chosen`` reads: floats on a CPU, in rows of a multiple of 16."""
    return (
        fused()
        and q.device.type == "cpu"
        and q.dtype == k.dtype == v.dtype == torch.float32
        and q.shape[3] == v.shape[3]
        and q.shape[3] % LANES == 0
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
    )


@functools.cache
def warm_up() -> int:
    """Compile, or load what an earlier process has compiled; gives the address of ``work``."""
    return address_of(work)


@compiled
def work(address: int) -> None:
    """What each thread does: take queries until there are none."""
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
    found, spare = slot, slot + 8 * (1 + job.chunks + (job.chunks + GROUP - 1) // GROUP)
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


@compiled
def choose(worth: Any, count: int, margin: float, found: int, spare: int) -> int:
    """The numbers of the ``count`` chunks that are worth most, or of fewer, in their order.

    The best ``count`` chunks lie in the best ``count`` groups, so what the least of those groups is worth is a bound.

    Args:
        worth: of each chunk.
        count: no more than there are.
        margin: what is worth so much less than the best is left out.
        found: room for a number of each chunk and each group, 8 bytes each; the first of them are the result.
        spare: room for two floats of each chunk.

    Returns:
        How many there are.
    """
    groups = (len(worth) + GROUP - 1) // GROUP
    numbers = integers(found, len(worth) + groups)
    maxima, copy = floats(spare, groups), floats(spare + 4 * len(worth), len(worth))
    whole = len(worth) // GROUP
    if whole < groups:
        maxima[whole] = worth[whole * GROUP]
        for c in range(whole * GROUP + 1, len(worth)):
            maxima[whole] = max(maxima[whole], worth[c])
    largest(worth.ctypes.data, whole, spare)
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
            for c in range(g * GROUP, min(g * GROUP + GROUP, len(worth))):
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
    """The ``n``-th largest value, counted from 1; the values change places (Hoare's selection)."""
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


@intrinsic
def largest(typing: Any, values: Any, vectors: Any, out: Any) -> Code:
    """The largest float of each vector."""
    return intrinsic_code(3, _largest)


@intrinsic
def products(
    typing: Any, q: Any, keys: Any, row: Any, dim: Any, out: Any, ahead: Any, values: Any, values_row: Any
) -> Code:
    """Products of a query with the keys of a chunk; the chunks at ``ahead`` and ``values`` are fetched meanwhile."""
    return intrinsic_code(8, _products)


@intrinsic
def exponentials(typing: Any, scores: Any, vectors: Any, state: Any) -> Code:
    """2 to the power of scores less the largest of them, which goes to ``state``, the sum behind it."""
    return intrinsic_code(3, _exponentials)


@intrinsic
def add(typing: Any, weights: Any, values: Any, row: Any, dim: Any, out: Any) -> Code:
    """Add a chunk's weighted values."""
    return intrinsic_code(5, _add)


def _largest(e: Emitter, values: ir.Value, vectors: ir.Value, out: ir.Value) -> None:
    with e.loop(vectors) as i:
        e.store(e.largest(e.load(e.at(values, e.times(i, LINE)))), e.at(out, e.times(i, 4)))


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
