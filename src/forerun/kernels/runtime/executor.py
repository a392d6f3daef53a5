"""Run a forward pass as a list of operations that all threads work through without Python.

Each operation is cut into tasks. Threads claim tasks until none are left, and start the next operation once all tasks
of this one are done. The result does not depend on the number of threads or on when they start.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from forerun.core.compiling import compiled
from forerun.core.cpu_limit import usable_cores
from forerun.kernels.runtime.addresses import StructLayout, address_of, call, integers
from forerun.kernels.runtime.vector_ir import I32, I64, LINE, Emitter, llvm_function

COUNTER_BYTES = 2 * LINE
"""Bytes of an operation's counters: tasks claimed and tasks done, in separate cache lines."""
SPINS = 2000
"""Checks of the counter before a waiting thread yields its core: some ten microseconds."""
ONCE, PER_TOKEN, PER_OUTPUT, PER_UNIT = range(4)
"""What tasks are counted by: the pass, its tokens, its tokens whose logits are wanted, or its units of attention."""
HEAD_INTEGERS = 16
"""Integers before an operation's fields: addresses of its machine code, and the unit and number of its tasks."""


class PassFields(NamedTuple):
    """One pass, as threads see it: addresses and counts."""

    threads: int
    operations: int
    records: int
    record_size: int
    counters: int
    n: int = 0  # number of tokens
    outputs: int = 0  # number of tokens whose logits are computed
    output_indices: int = 0
    ids: int = 0
    x: int = 0  # with ``y``: default input and output of linear layers
    y: int = 0
    rows: int = 0  # with ``units`` and ``parents``: attention tables (``attention_fields.py``)
    units: int = 0
    unit_count: int = 0
    token_rows: int = 0  # each token's row
    positions: int = 0  # for the model
    cache_positions: int = 0
    parents: int = 0
    states: int = 0  # memory for attention states
    slots: int = 0  # scratch memory per thread
    slot_size: int = 0


PASS_LAYOUT = StructLayout(PassFields)
read_pass = PASS_LAYOUT.reader()

Run = Callable[[int, int, int, int, int], None]


class Tasks(NamedTuple):
    """Number of an operation's tasks: ``each`` for the pass, or for each token, output or unit."""

    each: int
    by: int = ONCE


@dataclass(frozen=True)
class Operation:
    """A kind of operation: all that the executor needs."""

    job: StructLayout  # layout of its fields, which say what one operation of a program reads and writes
    tasks: Callable[[Any], Tasks]
    run: Run  # compiled; does one task, given addresses of pass, fields, code and scratch memory, and the task's number
    code: Callable[[Any], Sequence[int]] = lambda fields: ()  # addresses of machine code that ``run`` calls
    prepare: Run | None = None  # as ``run``; each thread calls it before its first task

    def record(self, fields: Any) -> bytes:
        each, by = self.tasks(fields)
        prepare = 0 if self.prepare is None else address_of(self.prepare, 5)
        head = (address_of(self.run, 5), prepare, by, each, *self.code(fields))
        return struct.pack(f"{HEAD_INTEGERS}q", *head, *(0,) * (HEAD_INTEGERS - len(head))) + self.job.layout.pack(
            *fields
        )


@compiled
def work(address: int) -> None:
    """Run tasks of all operations in turn, on one thread."""
    this, mode = read_pass(address), keep_denormals()
    scratch, before = this.slots + ticket(address) * this.slot_size, 0
    for i in range(this.operations):
        head, counter = this.records + i * this.record_size, this.counters + i * COUNTER_BYTES
        run, prepare, by, each = integers(head, 4)
        op, code, tasks = head + 8 * HEAD_INTEGERS, head + 32, each * _count(this, by)
        ready, prepared = i == 0, prepare == 0
        while True:
            task = ticket(counter)
            if task >= tasks:
                break
            if not ready:
                _await(counter - COUNTER_BYTES + LINE, before)
            if not prepared:
                call(prepare, address, op, code, 0, scratch)
            ready = prepared = True
            call(run, address, op, code, task, scratch)
            ticket(counter + LINE)
        before = tasks
    restore_mode(mode)


@compiled
def _count(this: PassFields, by: int) -> int:
    if by == PER_TOKEN:
        return this.n
    if by == PER_OUTPUT:
        return this.outputs
    return this.unit_count if by == PER_UNIT else 1


@compiled
def _await(counter: int, tasks: int) -> None:
    spins = 0
    while load_counter(counter) < tasks:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            yield_core()


def _aligned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return zeros that begin with a cache line: vectors across two cost 64 tokens of Q8_0 2 %."""
    memory = np.zeros(size + LINE, np.uint8)
    begin = -memory.ctypes.data % LINE
    return memory[begin : begin + size]


class _ScratchMemory(threading.local):
    def __init__(self) -> None:
        self.size = 0
        self._grow(1 << 16)

    def claim(self, size: int) -> int:
        """Return the address of ``size`` bytes; growing discards the contents."""
        if self.size < size:
            self._grow(size)
        return self.address

    def _grow(self, size: int) -> None:
        self.bytes = _aligned(size)
        self.size, self.address = size, int(self.bytes.ctypes.data)


_scratch = _ScratchMemory()
FLUSHING = 0x8040
"""Bits of x86's control word that flush denormal results and operands to zero."""


class Program:
    """A sequence of operations, each given by kind and fields, with their counters."""

    def __init__(self, operations: Sequence[tuple[Operation, Any]]) -> None:
        records = [kind.record(fields) for kind, fields in operations]
        count, size = len(records), LINE * -(-max(map(len, records)) // LINE)
        self._memory = _aligned(PASS_LAYOUT.size + count * (COUNTER_BYTES + size))
        self._counters = self._memory[PASS_LAYOUT.size :][: count * COUNTER_BYTES]
        self._address = int(self._memory.ctypes.data)
        counters = self._address + PASS_LAYOUT.size
        first = PASS_LAYOUT.size + count * COUNTER_BYTES
        for i, record in enumerate(records):
            self._memory[first + i * size :][: len(record)] = np.frombuffer(record, np.uint8)
        self._own = (0, count, self._address + first, size, counters)
        self._buffer = self._memory.data

    def run(self, threads: int, **fields: int) -> None:
        """Run all operations on ``threads`` of torch's threads, with ``fields`` of ``PassFields``."""
        self._counters.fill(0)
        PASS_LAYOUT.layout.pack_into(self._buffer, 0, *PassFields(*self._own, **fields))
        run_on_threads(address_of(work), self._address, threads)

    def run_in_scratch(self, slot_bytes: int, states_bytes: int = 0, **fields: int) -> None:
        """Run on all of torch's threads, in memory that later runs overwrite; ``slot_bytes`` per thread."""
        threads, size = torch.get_num_threads(), LINE * -(-slot_bytes // LINE)
        slots = _scratch.claim(threads * size + states_bytes)
        self.run(threads, slots=slots, slot_size=size, states=slots + threads * size, **fields)


@llvm_function(types.int64)
def ticket(e: Emitter, counter: ir.Value) -> ir.Value:
    """Increment a counter atomically, and return its old value."""
    return e.builder.atomic_rmw("add", e.builder.inttoptr(counter, I64.as_pointer()), I64(1), "acq_rel")


@llvm_function(types.int64)
def load_counter(e: Emitter, counter: ir.Value) -> ir.Value:
    """Load a counter (acquire), so that what other threads wrote before counting is visible."""
    return e.builder.load_atomic(e.builder.inttoptr(counter, I64.as_pointer()), "acquire", 8)


@llvm_function(types.int64)
def keep_denormals(e: Emitter) -> ir.Value:
    """Enable denormals on this thread, and return its mode: results must not depend on which thread computes them."""
    if not _is_x86(e):
        return I64(0)
    place = cgutils.alloca_once(e.builder, I32)
    _control(e, "llvm.x86.sse.stmxcsr", place)
    before = e.builder.load(place)
    e.builder.store(e.builder.and_(before, I32(~FLUSHING & 0xFFFFFFFF)), place)
    _control(e, "llvm.x86.sse.ldmxcsr", place)
    return e.builder.zext(before, I64)


@llvm_function()
def restore_mode(e: Emitter, mode: ir.Value) -> None:
    """Undo ``keep_denormals``."""
    if _is_x86(e):
        place = cgutils.alloca_once(e.builder, I32)
        e.builder.store(e.builder.trunc(mode, I32), place)
        _control(e, "llvm.x86.sse.ldmxcsr", place)


def _is_x86(e: Emitter) -> bool:
    return "x86" in e.builder.module.triple


def _control(e: Emitter, name: str, place: ir.Value) -> None:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), (byte,))
    e.builder.call(cgutils.get_or_insert_function(e.builder.module, kind, name), (e.builder.bitcast(place, byte),))


@llvm_function()
def pause(e: Emitter) -> None:
    """Let the core's other hardware thread run briefly."""
    if _is_x86(e):
        _call(e, "llvm.x86.sse2.pause")


@llvm_function()
def yield_core(e: Emitter) -> None:
    """Yield this core to another thread."""
    _call(e, "sched_yield", I32)


def _call(e: Emitter, name: str, result: ir.Type | None = None) -> None:
    kind = ir.FunctionType(result or ir.VoidType(), ())
    e.builder.call(cgutils.get_or_insert_function(e.builder.module, kind, name), ())


# Kernels run on torch's own threads if possible. After a matrix product these spin while waiting for more work, and
# would compete for cores with a second set of threads. Compilers reach them through the OpenMP entry point
# ``GOMP_parallel``, in GNU's and LLVM's libraries, and so do we. Systems without it use a pool.


def run_on_threads(address: int, argument: int, threads: int) -> None:
    """Call the C function at ``address`` with ``argument`` on up to ``threads`` threads at once."""
    if threads == 1:
        callable_at(address)(argument)
    elif (parallel := openmp()) is not None:
        parallel(address, argument, threads, 0)
    else:
        run_in_pool(callable_at(address), argument, threads)


def run_in_pool(function: Callable[[int], None], argument: int, threads: int) -> None:
    """Call ``function`` here and in the pool, and cancel pool calls that have not started when this one ends."""
    calls = [pool().submit(function, argument) for _ in range(threads - 1)]
    try:
        function(argument)
    finally:  # the argument's memory may be reused only when no thread reads it
        for call in calls:
            if not call.cancel():
                call.result()


@functools.cache
def callable_at(address: int) -> Callable[[int], None]:
    """Return the C function at ``address``; calling it releases the GIL."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@functools.cache
def openmp() -> Callable[[int, int, int, int], None] | None:
    """Return ``GOMP_parallel`` of torch's OpenMP library, or None without OpenMP."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    folder = Path(torch.__file__).parent / "lib"
    for library in sorted(path for name in ("libgomp*", "libiomp5*", "libomp*") for path in folder.glob(name)):
        try:
            function = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return function
    return None


@functools.cache
def pool() -> ThreadPoolExecutor:
    """Return this process's thread pool."""
    return ThreadPoolExecutor(usable_cores(), "forerun-kernel")
