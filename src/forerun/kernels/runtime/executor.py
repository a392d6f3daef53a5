"""A forward pass as a list of operations that threads go through together, without Python in between.

Each operation is cut into tasks. Threads take tasks until none are left, and start the next operation when all tasks of
this one are done. The result does not depend on how many threads take part, or when they start; one thread is enough.

What an operation is, its own file says in one place (``Operation``); nothing here knows any of them.
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
"""Bytes of an operation's counters: tasks taken and tasks done, in separate cache lines."""
SPINS = 2000
"""How often a waiting thread checks the counter before it yields its core: some ten microseconds."""
ONCE, PER_TOKEN, PER_OUTPUT, PER_UNIT = range(4)
"""What the tasks of an operation are counted by: the pass, its tokens, the tokens whose logits are wanted, or its units
of attention."""
HEAD_INTEGERS = 16
"""Integers before an operation's fields: the addresses of ``run`` and ``prepare``, by what its tasks are counted and
their number for each, and the addresses of other machine code."""


class PassFields(NamedTuple):
    """One pass, as threads see it: addresses and counts.

    Attributes:
        threads: threads that have started.
        operations, records, record_size, counters: the program's operations.
        n: number of tokens.
        outputs: number of tokens whose logits are computed; ``output_indices`` has their indices.
        x, y: default input and output of linear layers that name no addresses.
        rows, units, token_rows, parents: tables of attention (``ordered_attention.py``); ``token_rows`` has each
            token's row.
        positions: each token's position for the model, and ``cache_positions`` that in its cache.
        states: memory for attention's states.
        slots: each thread's scratch memory.
    """

    threads: int
    operations: int
    records: int
    record_size: int
    counters: int
    n: int = 0
    outputs: int = 0
    output_indices: int = 0
    ids: int = 0
    x: int = 0
    y: int = 0
    rows: int = 0
    units: int = 0
    unit_count: int = 0
    token_rows: int = 0
    positions: int = 0
    cache_positions: int = 0
    parents: int = 0
    states: int = 0
    slots: int = 0
    slot_size: int = 0


PASS_LAYOUT = StructLayout(PassFields)
read_pass = PASS_LAYOUT.reader()

Run = Callable[[int, int, int, int, int], None]


class Tasks(NamedTuple):
    """The number of an operation's tasks: ``each`` for the pass or each of its tokens, outputs or units."""

    each: int
    by: int = ONCE


@dataclass(frozen=True)
class Operation:
    """A kind of operation of a pass: all that the executor has to know of it.

    Attributes:
        job: the layout of its fields, which say what one such operation of a program reads and writes.
        tasks: the number of its tasks, by its fields. At least one, whatever the pass.
        run: compiled; does one task, given the addresses of the pass (``read_pass``), of the operation's fields and of
            ``code``, the task's number, and the address of the thread's scratch memory.
        code: addresses of other machine code that ``run`` calls, by the operation's fields.
        prepare: as ``run``; each thread calls it before its first task. None if there is nothing to prepare.
    """

    job: StructLayout
    tasks: Callable[[Any], Tasks]
    run: Run
    code: Callable[[Any], Sequence[int]] = lambda fields: ()
    prepare: Run | None = None

    def record(self, fields: Any) -> bytes:
        """One such operation as the executor reads it."""
        each, by = self.tasks(fields)
        prepare = 0 if self.prepare is None else address_of(self.prepare, 5)
        head = (address_of(self.run, 5), prepare, by, each, *self.code(fields))
        return struct.pack(f"{HEAD_INTEGERS}q", *head, *(0,) * (HEAD_INTEGERS - len(head))) + self.job.layout.pack(
            *fields
        )


@compiled
def work(address: int) -> None:
    """Each thread's loop over operations and tasks."""
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
    """Wait until ``tasks`` tasks are done."""
    spins = 0
    while load_counter(counter) < tasks:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            yield_core()


class _ScratchMemory(threading.local):
    """Memory for threads and for attention's states; each calling thread has its own."""

    def __init__(self) -> None:
        self.size = 0
        self._grow(1 << 16)

    def claim(self, size: int) -> int:
        """The address of ``size`` bytes. If the memory has to grow, its old contents are lost."""
        if self.size < size:
            self._grow(size)
        return self.address

    def _grow(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.size, self.address = size, int(self.bytes.ctypes.data)


_scratch = _ScratchMemory()
FLUSHING = 0x8040
"""The bits of x86's control word that turn denormal results and denormal operands into zeros."""


class Program:
    """Operations in order, with their counters.

    Args:
        operations: each one's kind and fields.
    """

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
        """Run all operations on this many of torch's threads; ``fields`` are those of ``PassFields``."""
        self._counters.fill(0)
        PASS_LAYOUT.layout.pack_into(self._buffer, 0, *PassFields(*self._own, **fields))
        run_on_threads(address_of(work), self._address, threads)

    def run_in_scratch(self, slot_bytes: int, states_bytes: int = 0, **fields: int) -> None:
        """The same in memory that later runs overwrite, of these sizes: for each thread, and for attention's states."""
        threads, size = torch.get_num_threads(), LINE * -(-slot_bytes // LINE)
        slots = _scratch.claim(threads * size + states_bytes)
        self.run(threads, slots=slots, slot_size=size, states=slots + threads * size, **fields)


def _aligned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeros, aligned to a cache line."""
    memory = np.zeros(size + LINE, np.uint8)
    begin = -memory.ctypes.data % LINE
    return memory[begin : begin + size]


@llvm_function(types.int64)
def ticket(e: Emitter, counter: ir.Value) -> ir.Value:
    """Increment a counter atomically; returns its old value."""
    return e.builder.atomic_rmw("add", e.builder.inttoptr(counter, I64.as_pointer()), I64(1), "acq_rel")


@llvm_function(types.int64)
def load_counter(e: Emitter, counter: ir.Value) -> ir.Value:
    """A counter's current value (acquire): what other threads wrote before they counted is visible afterwards."""
    return e.builder.load_atomic(e.builder.inttoptr(counter, I64.as_pointer()), "acquire", 8)


@llvm_function(types.int64)
def keep_denormals(e: Emitter) -> ir.Value:
    """Let this thread compute with denormal numbers; returns its mode before. ``torch.set_flush_denormal`` is a setting
    of the thread that calls it, and a number must not depend on which thread computes it."""
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
    """Read or write the processor's control word of vector arithmetic."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), (byte,))
    e.builder.call(cgutils.get_or_insert_function(e.builder.module, kind, name), (e.builder.bitcast(place, byte),))


@llvm_function()
def pause(e: Emitter) -> None:
    """Let the core's other hardware thread run for a moment."""
    if _is_x86(e):
        _call(e, "llvm.x86.sse2.pause")


@llvm_function()
def yield_core(e: Emitter) -> None:
    """Yield this core to another thread."""
    _call(e, "sched_yield", I32)


def _call(e: Emitter, name: str, result: ir.Type | None = None) -> None:
    kind = ir.FunctionType(result or ir.VoidType(), ())
    e.builder.call(cgutils.get_or_insert_function(e.builder.module, kind, name), ())


# Kernels run on torch's own threads if possible, else on a pool. After a matrix product torch's threads spin for a
# while, waiting for more work, and a second set of threads would compete with them for the same cores. They are reached
# through the OpenMP entry point that compilers use (``GOMP_parallel``, in GNU's and LLVM's libraries). The pool is for
# systems without it.


def run_on_threads(address: int, argument: int, threads: int) -> None:
    """Call the C function at ``address`` on up to ``threads`` threads at once, each with the same argument."""
    if threads == 1:
        callable_at(address)(argument)
    elif (parallel := openmp()) is not None:
        parallel(address, argument, threads, 0)
    else:
        run_in_pool(callable_at(address), argument, threads)


def run_in_pool(function: Callable[[int], None], argument: int, threads: int) -> None:
    """Call ``function`` here and in the pool. Pool calls that have not started when this one ends are cancelled."""
    calls = [pool().submit(function, argument) for _ in range(threads - 1)]
    try:
        function(argument)
    finally:  # the argument's memory may be reused only when no thread reads it
        for call in calls:
            if not call.cancel():
                call.result()


@functools.cache
def callable_at(address: int) -> Callable[[int], None]:
    """The C function at ``address``; calling it releases the GIL."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@functools.cache
def openmp() -> Callable[[int, int, int, int], None] | None:
    """``GOMP_parallel`` of torch's own OpenMP library, if torch uses OpenMP."""
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
    """This process's pool of threads."""
    return ThreadPoolExecutor(usable_cores(), "forerun-kernel")
