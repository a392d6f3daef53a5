"""A forward pass as a list of operations that threads go through together, without Python in between.

Each operation is cut into tasks. Threads take tasks until there are none, and begin with the next operation when all of
the one before are done. Nothing depends on how many threads come, or when: one alone does everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from forerun.index.compiling import compiled
from forerun.kernels import team
from forerun.kernels.canonical import ATTEND, read_attend, scan, settle
from forerun.kernels.layers import EMBED, NORM, ROTARY, embed, norm, read_embed, read_norm, read_rotary, turn
from forerun.kernels.linear import LINEAR, linear_begin, linear_task, linear_tasks, read_linear
from forerun.kernels.memory import Job, address_of, integers
from forerun.kernels.plain import attend_plainly
from forerun.kernels.tiles import ticket
from forerun.kernels.vector import I64, LINE, Code, Emitter, intrinsic, intrinsic_code

OP_BYTES = LINE * math.ceil(max(job.size for job in (ATTEND, EMBED, NORM, ROTARY, LINEAR)) / LINE)
COUNTER = 2 * LINE
"""Bytes of an operation's counters: tasks taken, and in another line of memory tasks done."""
DO_EMBED, DO_NORM, DO_LINEAR, DO_TURN, DO_SCAN, DO_SETTLE, DO_PLAINLY = range(7)
SPINS = 2000
"""Times that a thread looks again before it lets others have its core: some ten microseconds."""


class TapeFields(NamedTuple):
    """One pass, as the threads see it: addresses and counts.

    Attributes:
        threads: how many have come.
        n, wanted: tokens, and those whose logits are wanted, which are listed.
        x, y: of what a linear layer that names no place reads, and of its results.
        rows, units, owners, positions, parents: of attention, see ``canonical.py``; ``owners`` has each token's row.
        parts: room for attention's states.
        slots: each thread's own room.
    """

    threads: int
    ops: int
    first: int
    counters: int
    n: int
    wanted: int
    wanted_list: int
    ids: int
    x: int
    y: int
    rows: int
    units: int
    unit_count: int
    owners: int
    positions: int
    parents: int
    parts: int
    slots: int
    slot_size: int


TAPE = Job(TapeFields)
read_tape = TAPE.reader()


@compiled
def work(address: int) -> None:
    """What each thread does."""
    tape = read_tape(address)
    slot = tape.slots + ticket(address) * tape.slot_size
    for i in range(tape.ops):
        op, counter = tape.first + i * OP_BYTES, tape.counters + i * COUNTER
        tasks, ready, begun = _tasks(tape, op), i == 0, False
        while True:
            task = ticket(counter)
            if task >= tasks:
                break
            if not ready:
                _await(counter - COUNTER + LINE, _tasks(tape, op - OP_BYTES))
            if not begun:
                _begin(tape, op, slot)
            ready = begun = True
            _do(tape, op, task, slot)
            ticket(counter + LINE)


@compiled
def _await(counter: int, tasks: int) -> None:
    """Wait until so many tasks are done."""
    spins = 0
    while look(counter) < tasks:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            give_way()


@compiled
def _tasks(tape: TapeFields, op: int) -> int:
    code = integers(op, 1)[0]
    if code == DO_LINEAR:
        return linear_tasks(read_linear(op))
    if code == DO_NORM:
        return tape.wanted if read_norm(op).which else tape.n
    if code == DO_SCAN:
        return tape.unit_count * read_attend(op).kv_heads
    if code == DO_SETTLE:
        return tape.n * read_attend(op).kv_heads
    if code == DO_PLAINLY:
        return tape.n * read_attend(op).heads
    return tape.n


@compiled
def _begin(tape: TapeFields, op: int, slot: int) -> None:
    """What a thread does once before its tasks of an operation."""
    if integers(op, 1)[0] == DO_LINEAR:
        linear = read_linear(op)
        x = linear.x if linear.x else tape.x
        linear_begin(linear, tape.wanted if linear.which else tape.n, x, slot)


@compiled
def _do(tape: TapeFields, op: int, task: int, slot: int) -> None:
    code = integers(op, 1)[0]
    if code == DO_LINEAR:
        linear = read_linear(op)
        linear_task(linear, tape.wanted if linear.which else tape.n, linear.y if linear.y else tape.y, task, slot)
    elif code == DO_NORM:
        norm(read_norm(op), tape.wanted_list, task, slot)
    elif code == DO_EMBED:
        embed(read_embed(op), tape.ids, task, slot)
    elif code == DO_TURN:
        turn(read_rotary(op), tape.rows, tape.owners, tape.positions, task, slot)
    elif code == DO_SCAN:
        scan(read_attend(op), tape.rows, tape.units, tape.positions, tape.parts, task, slot)
    elif code == DO_PLAINLY:
        attend_plainly(read_attend(op), tape.rows, tape.owners, tape.positions, tape.parents, task, slot)
    else:
        attend = read_attend(op)
        settle(attend, tape.rows, tape.owners, tape.positions, tape.parents, tape.parts, task, slot)


class Program:
    """Operations in their order, with their counters.

    Args:
        ops: a job's layout and the fields of each.
    """

    def __init__(self, ops: Sequence[tuple[Job, Any]]) -> None:
        self._records = _aligned(len(ops) * OP_BYTES)
        self._counters = _aligned(len(ops) * COUNTER)
        self._header = _aligned(TAPE.size)
        self._count = len(ops)
        for i, (job, fields) in enumerate(ops):
            job.layout.pack_into(self._records.data, i * OP_BYTES, *fields)

    def run(self, **fields: int) -> None:
        """Go through all operations on torch's threads."""
        threads = torch.get_num_threads()
        self._counters[:] = 0
        given = TapeFields(
            0, self._count, self._records.ctypes.data, self._counters.ctypes.data, **{**_NOTHING, **fields}
        )
        TAPE.layout.pack_into(self._header.data, 0, *given)
        team.run(address_of(work), self._header.ctypes.data, threads)


_NOTHING = dict.fromkeys(TapeFields._fields[4:], 0)


def _aligned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeros that begin with a line of memory."""
    room = np.zeros(size + LINE, np.uint8)
    begin = -room.ctypes.data % LINE
    return room[begin : begin + size]


@intrinsic
def look(typing: Any, counter: Any) -> Code:
    """A counter as it is now; what other threads wrote before they counted is there to be read."""

    def emit(e: Emitter, counter: ir.Value) -> ir.Value:
        place = e.builder.inttoptr(counter, I64.as_pointer())
        return e.builder.load_atomic(place, "acquire", 8)

    return intrinsic_code(1, emit, types.int64)


@intrinsic
def pause(typing: Any) -> Code:
    """Let the core's other thread run for a moment."""

    def emit(e: Emitter) -> None:
        _call(e, "llvm.x86.sse2.pause") if "x86" in e.builder.module.triple else None

    return intrinsic_code(0, emit)


@intrinsic
def give_way(typing: Any) -> Code:
    """Let another thread have this core."""
    return intrinsic_code(0, lambda e: _call(e, "sched_yield", ir.IntType(32)))


def _call(e: Emitter, name: str, result: ir.Type | None = None) -> None:
    kind = ir.FunctionType(result or ir.VoidType(), ())
    e.builder.call(cgutils.get_or_insert_function(e.builder.module, kind, name), ())
