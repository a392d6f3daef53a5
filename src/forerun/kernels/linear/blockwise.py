"""Linear layers over stored weights, one call each; and the descriptions of such weights for programs of kernels."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from forerun.kernels.linear.linear import GATE, PUT
from forerun.kernels.quantized import stored_linear
from forerun.kernels.quantized.formats import FORMATS
from forerun.kernels.quantized.stored_linear import MATRIX, NAMES, STORED, LookupOp, Matrix, StoredOp, format_code
from forerun.kernels.runtime import executor
from forerun.kernels.runtime.addresses import ScratchMemory
from forerun.kernels.runtime.executor import Operation
from forerun.kernels.runtime.vector_ir import LANES, LINE

SHARES = 8
"""An operation is cut into this many pieces of work per thread."""
_scratch = ScratchMemory()
_local = threading.local()

Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class Blocks(NamedTuple):
    """A matrix in a GGUF file's format.

    Attributes:
        rows: bytes ``[O, row]``, contiguous.
        kind: one of ``stored_linear.NAMES``.
        bias: float32 ``[O]``, or None.
    """

    rows: torch.Tensor
    kind: str
    bias: torch.Tensor | None = None


def described(matrices: Sequence[Blocks]) -> Table:
    """The matrices of one operation in the form that the kernel reads. Must outlive the operation."""
    return np.array([_matrix(each) for each in matrices], np.int64).reshape(-1, len(MATRIX.kind))


def _matrix(blocks: Blocks) -> Matrix:
    rows, which = blocks.rows, NAMES.index(blocks.kind)
    bias = 0 if blocks.bias is None else blocks.bias.data_ptr()
    block = FORMATS[which].columns
    return Matrix(rows.data_ptr(), rows.stride(0), len(rows), bias, block, *format_code(which))


def operation(
    table: Table, columns: int, x: tuple[int, int], y: tuple[int, int], threads: int, *, mode: int = PUT,
    which: int = 0, activation: int = 0,
) -> tuple[Operation, StoredOp]:  # fmt: skip
    """An operation over the described matrices with this many columns, cut for this many threads; see ``LinearOp``."""
    panels = [math.ceil(outs / LANES) for outs in table[:, Matrix._fields.index("outs")].tolist()]
    pairs = panels[0] if mode == GATE else sum(math.ceil(count / 2) for count in panels)
    share = max(1, pairs // (SHARES * threads))
    return STORED, StoredOp(
        which, 0, 0, *x, columns, mode, pairs, share, share * threads, activation, *y, table.ctypes.data,
        len(table),
    )  # fmt: skip


def look_up(blocks: Blocks, dim: int, x: tuple[int, int], factor: float) -> LookupOp:
    """Look up the pass's tokens in an embedding of ``dim`` columns, times a factor, and write them to rows at ``x``."""
    m = _matrix(blocks)
    return LookupOp(m.w, m.row, m.block, m.unpack, dim, *x, factor)


def product(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """``x @ weight.T + bias`` for rows of x ``[..., K]`` on a CPU, computed in float32, returned in x's type."""
    rows = x.detach().reshape(-1, x.shape[-1]).float()
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    n, columns = rows.shape
    y = rows.new_empty(n, len(blocks.rows))
    if n:
        threads = torch.get_num_threads()
        program = _program(blocks, columns, rows.stride(0) * 4, y.stride(0) * 4)
        size = LINE * math.ceil(stored_linear.room(n, columns) / LINE)
        slots = _scratch.claim(threads * size)
        program.run(n=n, x=rows.data_ptr(), y=y.data_ptr(), slots=slots, slot_size=size)
    return y.view(*x.shape[:-1], -1).to(x.dtype)


def _program(blocks: Blocks, columns: int, x_row: int, y_row: int) -> executor.Program:
    """A program of one operation, cached for later calls with the same weights."""
    kept: dict[Any, tuple[executor.Program, Table]] = _local.__dict__.setdefault("programs", {})
    bias, threads = 0 if blocks.bias is None else blocks.bias.data_ptr(), torch.get_num_threads()
    key = (blocks.rows.data_ptr(), blocks.rows.shape, blocks.kind, bias, x_row, y_row, threads)
    if key not in kept:
        if len(kept) > 4096:
            kept.clear()
        table = described([blocks])
        kept[key] = executor.Program([operation(table, columns, (0, x_row), (0, y_row), threads)]), table
    return kept[key][0]
