"""Named tuples of arrays, passed to compiled code by one address.

Numba unpacks a call's arrays one by one, at 0.2 us each; the trie's forty would cost a fifth of a draft's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numba.extending
import numpy as np
from llvmlite import ir
from numba import types
from numba.np import arrayobj

T = TypeVar("T", bound=NamedTuple)

INT64 = ir.IntType(64)

_HANDLES: WeakValueDictionary[int, ArrayHandles[Any]] = WeakValueDictionary()
"""By address, for readers that run as Python."""


class ArrayHandles(Generic[T]):
    """A block of memory with the address and shape of each array, for compiled code."""

    def __init__(self) -> None:
        self._arrays: T | None = None
        self._memory = np.zeros(0, np.int64)
        self._address = 0

    def __reduce__(self) -> tuple[type[ArrayHandles[T]], tuple[()]]:
        """Return an empty handle: the arrays of a copy have other addresses."""
        return ArrayHandles, ()

    def at(self, arrays: T) -> int:
        """Return the block's address; the arrays stay alive until a call with others."""
        if arrays is not self._arrays:
            self._memory = np.array([number for array in _arrays(arrays) for number in _layout(array)], np.int64)
            self._arrays, self._address = arrays, self._memory.ctypes.data
            if numba.config.DISABLE_JIT:
                _HANDLES[self._address] = self
        return self._address


def _arrays(found: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(found, np.ndarray):
        yield found
    else:
        for part in found:
            yield from _arrays(part)


def _layout(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    if not array.flags.carray:
        raise ValueError("compiled code needs contiguous, writable arrays")
    return array.ctypes.data, *array.shape


def reader(like: NamedTuple) -> Any:
    """Return a compiled function from the address of an ``ArrayHandles`` to its arrays, typed as ``like``."""
    if numba.config.DISABLE_JIT:
        return lambda address: _HANDLES[address]._arrays
    kind = numba.typeof(like)

    def read(typing: Any, address: Any) -> Any:
        def write(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            start = builder.inttoptr(values[0], INT64.as_pointer())
            numbers = (builder.load(builder.gep(start, [INT64(i)])) for i in count())
            return _build(context, builder, kind, numbers)

        return kind(types.int64), write

    return numba.extending.intrinsic(read)


def _build(context: Any, builder: ir.IRBuilder, kind: Any, numbers: Iterator[ir.Value]) -> Any:
    if not isinstance(kind, types.Array):
        parts = [_build(context, builder, part, numbers) for part in kind.types]
        return context.make_tuple(builder, kind, parts)
    array = arrayobj.make_array(kind)(context, builder)
    data = builder.inttoptr(next(numbers), array.data.type)
    shape = [next(numbers) for _ in range(kind.ndim)]
    size = INT64(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    strides = [size]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    arrayobj.populate_array(array, data, shape, strides, size, None)
    return array._getvalue()
