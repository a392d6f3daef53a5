"""A forward pass as a list of operations that threads go through together, without Python in between.

Each operation is cut into tasks. Threads take tasks until none are left, and start the next operation when all tasks of
this one are done. The result does not depend on how many threads take part, or when they start; one thread is enough.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_tile import ticket
from forerun.kernels.attention.ordered_attention import ATTEND
from forerun.kernels.attention.topk_rank import SOUGHT_OP
from forerun.kernels.linear.decoder_ops import EMBED, NORM, ROTARY
from forerun.kernels.linear.linear import LINEAR
from forerun.kernels.quantized.stored_linear import LOOKUP, STORED
from forerun.kernels.runtime import thread_pool
from forerun.kernels.runtime.addresses import Job, address_of, call5, integers
from forerun.kernels.runtime.ops import BEGIN, TAPE, TapeFields, code_of, read_tape, tasks_of
from forerun.kernels.runtime.ops import DO_CHOOSE as DO_CHOOSE
from forerun.kernels.runtime.ops import DO_EMBED as DO_EMBED
from forerun.kernels.runtime.ops import DO_LINEAR as DO_LINEAR
from forerun.kernels.runtime.ops import DO_LOOKUP as DO_LOOKUP
from forerun.kernels.runtime.ops import DO_NORM as DO_NORM
from forerun.kernels.runtime.ops import DO_PLAINLY as DO_PLAINLY
from forerun.kernels.runtime.ops import DO_RANK as DO_RANK
from forerun.kernels.runtime.ops import DO_SCAN as DO_SCAN
from forerun.kernels.runtime.ops import DO_SETTLE as DO_SETTLE
from forerun.kernels.runtime.ops import DO_SHORTEN as DO_SHORTEN
from forerun.kernels.runtime.ops import DO_STORED as DO_STORED
from forerun.kernels.runtime.ops import DO_TURN as DO_TURN
from forerun.kernels.runtime.ops import STEPS as STEPS
from forerun.kernels.runtime.vector_ir import I64, LINE, Code, Emitter, intrinsic, intrinsic_code

OP_BYTES = LINE + max(job.size for job in (ATTEND, EMBED, NORM, ROTARY, LINEAR, STORED, LOOKUP, SOUGHT_OP))
"""Bytes per operation: a line with the addresses of its machine code, and its fields."""
COUNTER = 2 * LINE
"""Bytes of an operation's counters: tasks taken and tasks done, in separate cache lines."""
SPINS = 2000
"""How often a waiting thread checks the counter before it yields its core: some ten microseconds."""


@compiled
def work(address: int) -> None:
    """Each thread's loop over operations and tasks."""
    tape = read_tape(address)
    slot = tape.slots + ticket(address) * tape.slot_size
    for i in range(tape.ops):
        op, counter = tape.first + i * OP_BYTES + LINE, tape.counters + i * COUNTER
        tasks, ready, begun = tasks_of(tape, op), i == 0, False
        step, code = integers(op - LINE, 1)[0], op - LINE + 8
        while True:
            task = ticket(counter)
            if task >= tasks:
                break
            if not ready:
                _await(counter - COUNTER + LINE, tasks_of(tape, op - OP_BYTES))
            if not begun:
                call5(step, address, op, code, BEGIN, slot)
            ready = begun = True
            call5(step, address, op, code, task, slot)
            ticket(counter + LINE)


@compiled
def _await(counter: int, tasks: int) -> None:
    """Wait until ``tasks`` tasks are done."""
    spins = 0
    while look(counter) < tasks:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            give_way()


class Program:
    """Operations in order, with their counters.

    Args:
        ops: each operation's job layout and fields.
    """

    def __init__(self, ops: Sequence[tuple[Job, Any]]) -> None:
        self._records = _aligned(len(ops) * OP_BYTES)
        self._counters = _aligned(len(ops) * COUNTER)
        self._header = _aligned(TAPE.size)
        self._count = len(ops)
        for i, (job, fields) in enumerate(ops):
            code = code_of(fields)
            struct.pack_into(f"{len(code)}q", self._records.data, i * OP_BYTES, *code)
            job.layout.pack_into(self._records.data, i * OP_BYTES + LINE, *fields)

    def run(self, **fields: int) -> None:
        """Run all operations on torch's threads."""
        threads = torch.get_num_threads()
        self._counters[:] = 0
        given = TapeFields(
            0, self._count, self._records.ctypes.data, self._counters.ctypes.data, **{**_NOTHING, **fields}
        )
        TAPE.layout.pack_into(self._header.data, 0, *given)
        thread_pool.run(address_of(work), self._header.ctypes.data, threads)


_NOTHING = dict.fromkeys(TapeFields._fields[4:], 0)


def _aligned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeros, aligned to a cache line."""
    room = np.zeros(size + LINE, np.uint8)
    begin = -room.ctypes.data % LINE
    return room[begin : begin + size]


@intrinsic
def look(typing: Any, counter: Any) -> Code:
    """A counter's current value (acquire): what other threads wrote before they counted is visible afterwards."""

    def emit(e: Emitter, counter: ir.Value) -> ir.Value:
        place = e.builder.inttoptr(counter, I64.as_pointer())
        return e.builder.load_atomic(place, "acquire", 8)

    return intrinsic_code(1, emit, types.int64)


@intrinsic
def pause(typing: Any) -> Code:
    """Let the core's other hardware thread run for a moment."""

    def emit(e: Emitter) -> None:
        _call(e, "llvm.x86.sse2.pause") if "x86" in e.builder.module.triple else None

    return intrinsic_code(0, emit)


@intrinsic
def give_way(typing: Any) -> Code:
    """Yield this core to another thread."""
    return intrinsic_code(0, lambda e: _call(e, "sched_yield", ir.IntType(32)))


def _call(e: Emitter, name: str, result: ir.Type | None = None) -> None:
    kind = ir.FunctionType(result or ir.VoidType(), ())
    e.builder.call(cgutils.get_or_insert_function(e.builder.module, kind, name), ())
