"""Connect kernels to Python: functions and arrays by address, and job layouts."""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Callable, Iterable
from typing import Any, cast, get_type_hints

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np import arrayobj

from forerun.kernels.runtime.vector_ir import (
    F32,
    F64,
    I32,
    I64,
    LANES,
    LINE,
    Code,
    Emitter,
    fused,
    intrinsic,
    llvm_function,
)

library_of = operator.attrgetter("library")


class StructLayout:
    """Memory layout of one call's data: a ``NamedTuple``'s fields as 64-bit integers and floats."""

    def __init__(self, fields: Any) -> None:
        kinds = list(get_type_hints(fields).values())
        self.layout = struct.Struct("".join("d" if kind is float else "q" for kind in kinds))
        self.kind = types.NamedTuple([types.float64 if kind is float else types.int64 for kind in kinds], fields)
        self.size = LINE * math.ceil(self.layout.size / LINE)
        """Reserved bytes, in whole cache lines."""

    def table(self, rows: Iterable[tuple[int | float, ...]]) -> bytearray:
        """Pack several records, ``size`` bytes each."""
        return bytearray().join(self.layout.pack(*row).ljust(self.size, b"\0") for row in rows)

    def reader(self) -> Any:
        """Return a compiled function that reads the fields from an address."""
        kind = self.kind

        @intrinsic
        def read_job(typing: Any, address: Any) -> Code:
            def write(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
                e = Emitter(builder)
                parts = [F64 if part == types.float64 else I64 for part in kind.types]
                fields = [e.load(e.at(values[0], 8 * i), part) for i, part in enumerate(parts)]
                return context.make_tuple(builder, kind, fields)

            return kind(types.int64), write

        return read_job


def head_rows(t: torch.Tensor) -> tuple[int, int, int]:
    """Return the address of rows ``[1, H, n, d]``, and the strides of heads and rows in bytes."""
    return t.data_ptr(), t.element_size() * t.stride(1), t.element_size() * t.stride(2)


def fits(*rows: torch.Tensor) -> bool:
    """Return whether kernels can read ``[1, H, n, d]``: on a CPU, of one type, with d a multiple of 16."""
    return fused() and all(
        t.shape[0] == 1
        and t.device.type == "cpu"
        and t.dtype == rows[0].dtype
        and t.shape[3] == rows[0].shape[3]
        and t.shape[3] % LANES == 0
        and t.stride(3) == 1
        and not t.requires_grad
        for t in rows
    )


@functools.cache
def address_of(work: Callable[..., None], arguments: int = 1) -> int:
    """Return the address of a compiled function of ``arguments`` integers, for ``run_on_threads`` and ``call``."""
    code = cast(Any, work).get_compile_result(types.void(*(types.int64,) * arguments))
    return int(library_of(code).get_pointer_to_function(code.fndesc.llvm_cfunc_wrapper_name))


@intrinsic
def call(typing: Any, address: Any, *values: Any) -> Code:
    """Call the machine code at an address (``address_of``): compiled once, unlike functions that are called by name."""

    def write(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), (I64,) * len(values))
        builder.call(builder.inttoptr(given[0], kind.as_pointer()), cgutils.unpack_tuple(builder, given[1]))
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, len(values))), write


def _array_at(kind: Any) -> Any:
    arrays, size = types.Array(kind, 1, "C"), kind.bitwidth // 8

    @intrinsic
    def array(typing: Any, address: Any, count: Any) -> Code:
        def write(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            found = arrayobj.make_array(arrays)(context, builder)
            data = builder.inttoptr(values[0], found.data.type)
            arrayobj.populate_array(found, data, [values[1]], [I64(size)], I64(size), None)
            return found._getvalue()

        return arrays(types.int64, types.int64), write

    return array


floats, doubles, integers = _array_at(types.float32), _array_at(types.float64), _array_at(types.int64)
bytes_at, signed_bytes = _array_at(types.uint8), _array_at(types.int8)


@llvm_function(types.float32)
def bfloat16_at(e: Emitter, address: ir.Value) -> ir.Value:
    """Read a bfloat16 as a float."""
    half = e.load(address, ir.IntType(16))
    return e.builder.bitcast(e.builder.shl(e.builder.zext(half, I32), I32(16)), F32)


@intrinsic
def part(typing: Any, array: Any, first: Any, count: Any) -> Code:
    """Return ``array[first : first + count]``, one-dimensional, without bounds checks."""
    size = array.dtype.bitwidth // 8

    def write(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        source, result = arrayobj.make_array(array)(context, builder, values[0]), arrayobj.make_array(array)
        piece = result(context, builder)
        data = builder.gep(source.data, [values[1]])
        arrayobj.populate_array(piece, data, [values[2]], [I64(size)], I64(size), None)
        return piece._getvalue()

    return array(array, types.int64, types.int64), write
