"""Arrays that compiled code finds by an address."""

import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from forerun.core.array_handles import ArrayHandles, reader
from forerun.core.compiling import compiled


class Inner(NamedTuple):
    halves: npt.NDArray[np.float32]
    cube: npt.NDArray[np.int64]


class Outer(NamedTuple):
    table: npt.NDArray[np.int32]
    inner: Inner
    last: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, rows: int, start: int = 0) -> "Outer":
        table = np.arange(start, start + rows * 3, dtype=np.int32).reshape(rows, 3)
        inner = Inner(np.arange(rows, dtype=np.float32) / 2, np.arange(rows * 8, dtype=np.int64).reshape(rows, 2, 4))
        return cls(table, inner, np.full(rows, 2**63, np.uint64))


outer_at = reader(Outer.of(1))


@compiled
def total(address: int) -> float:
    """Of all numbers; the last of each array is set to 0."""
    found = outer_at(address)
    result = float(found.last.sum()) + found.table.sum() + found.inner.halves.sum() + found.inner.cube.sum()
    found.table[-1, -1], found.inner.cube[-1, -1, -1], found.inner.halves[-1], found.last[-1] = 0, 0, 0, 0
    return float(result)


def test_compiled_code_reads_and_writes_arrays_by_address():
    handles: ArrayHandles[Outer] = ArrayHandles()
    for arrays in (Outer.of(4), Outer.of(9, start=5)):  # others, of other sizes, take the place of the first
        expected = sum(float(a.sum()) for a in (arrays.table, *arrays.inner, arrays.last))
        assert total(handles.at(arrays)) == expected and handles.at(arrays) == handles.at(arrays)
        ends = (arrays.table, *arrays.inner, arrays.last)
        assert all(not array.ravel()[-1] and array.ravel()[-2] for array in ends)


def test_a_copy_s_address_is_that_of_the_copied_arrays():
    """Copied with what it holds, a handles would go on writing to the original's arrays, or to freed memory."""
    handles: ArrayHandles[Outer] = ArrayHandles()
    arrays = Outer.of(4)
    address = handles.at(arrays)
    twin, same = copy.deepcopy((handles, arrays))
    assert twin.at(same) != address
    assert total(twin.at(same)) > 0 and not same.table[-1, -1] and arrays.table[-1, -1]


def test_arrays_that_compiled_code_would_misread_are_refused():
    frozen, apart = Outer.of(4), Outer.of(4)
    frozen.last.flags.writeable = False
    for arrays in (frozen, apart._replace(table=apart.table[:, :2])):
        with pytest.raises(ValueError, match="compiled code needs contiguous, writable arrays"):
            ArrayHandles[Outer]().at(arrays)
