"""One linear operation as a program of its own, over plain or stored weights."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from forerun.kernels.linear import linear
from forerun.kernels.linear.linear import LINEAR, operation
from forerun.kernels.linear.linear_op import GATE, PUT
from forerun.kernels.linear.rowwise import SILU
from forerun.kernels.linear.weight_matrix import NUMBER_KINDS, MatrixTable, Weights, plain, table_of
from forerun.kernels.runtime import executor


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` of float32, rounded once: in float64 the product is exact, and the sum is rounded to odd."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    even = (np.ascontiguousarray(total).view(np.int64) & 1) == 0
    return np.where((lost != 0) & even, np.nextafter(total, np.copysign(np.inf, lost)), total).astype(np.float32)


def layer(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = (), *, mode: int = PUT,
    to: torch.dtype | None = None, onto: torch.Tensor | None = None, share: int = 2, activation: int = SILU,
) -> torch.Tensor:  # fmt: skip
    """One operation over one to three matrices; sums are put as ``to``, or added to ``onto``."""
    kind, size, (n, columns) = NUMBER_KINDS[x.dtype], x.dtype.itemsize, x.shape
    x, words = pad(x, (0, -columns % (64 // size))).contiguous(), columns * size // (8 if kind == 2 else 4)
    outs = [len(w) for w in weights]
    y = onto if onto is not None else torch.zeros(n, outs[0] if mode == GATE else sum(outs), dtype=to or x.dtype)
    table = table_of([plain(w, bias) for w, bias in zip_longest(weights, biases)])
    return run(table, kind, words, x, y, mode, share, activation)


def run_stored(
    x: torch.Tensor, weights: Sequence[tuple[str, torch.Tensor]], biases: Sequence[torch.Tensor] = (), *,
    mode: int = PUT, onto: torch.Tensor | None = None, share: int = 2, activation: int = SILU, quantised: bool = False,
) -> torch.Tensor:  # fmt: skip
    """One operation over one to three stored matrices, with their formats' names; ``quantised``: multiply integers."""
    outs = [len(rows) for _, rows in weights]
    y = onto if onto is not None else torch.zeros(len(x), outs[0] if mode == GATE else sum(outs))
    table = table_of([Weights(rows, name, bias, quantised) for (name, rows), bias in zip_longest(weights, biases)])
    return run(table, 0, x.shape[1], x, y, mode, share, activation)


def run(
    table: MatrixTable, kind: int, words: int, x: torch.Tensor, y: torch.Tensor, mode: int, share: int, activation: int
) -> torch.Tensor:
    """Run one operation, with this many pairs of panels a task."""
    places = [(t.data_ptr(), t.stride(0) * t.dtype.itemsize) for t in (x, y)]
    how: Any = {"mode": mode, "to_kind": NUMBER_KINDS[y.dtype], "activation": activation}
    _, op = operation(table, kind, words, *places, torch.get_num_threads(), **how)
    op = op._replace(share=share, turn=share * torch.get_num_threads())
    room = -(-linear.scratch_bytes(len(x), words) // 64) * 64
    slots = torch.zeros(torch.get_num_threads() * room + 64, dtype=torch.uint8)
    executor.Program([(LINEAR, op)]).run(torch.get_num_threads(), n=len(x), slots=slots.data_ptr(), slot_size=room)
    return y
