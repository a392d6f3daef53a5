"""Rows of a pass times a factor: as a linear layer's input where no norm comes before it, or added to others."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.kernels.linear.rowwise import TO_WORDS, words
from forerun.kernels.runtime.addresses import StructLayout, floats
from forerun.kernels.runtime.executor import PER_TOKEN, Operation, Tasks
from forerun.kernels.runtime.vector_ir import LANES


class ScaledRowsOp(NamedTuple):
    """Each token's row at ``x``, floats.

    Attributes:
        kind: type of a linear layer's input: 0 float32, 1 bfloat16.
        mode: ``TO_WORDS`` for a linear layer's input, which takes no factor, or ``TO_SUM``; see ``rowwise.scale``.
    """

    kind: int
    mode: int
    x: int
    x_row: int
    dim: int
    to: int
    to_row: int
    factor: float


SCALED_ROWS_LAYOUT = StructLayout(ScaledRowsOp)
read_scaled_rows = SCALED_ROWS_LAYOUT.reader()


@compiled
def scaled_row(address: int, fields: int, code: int, token: int, slot: int) -> None:
    """One token's row."""
    op = read_scaled_rows(fields)
    x, to = op.x + token * op.x_row, op.to + token * op.to_row
    if op.mode == TO_WORDS:
        words(op.kind, x, op.dim // LANES, to)
        return
    source, target, factor = floats(x, op.dim), floats(to, op.dim), np.float32(op.factor)
    for i in range(op.dim):
        target[i] += np.float32(source[i] * factor)


SCALED_ROWS = Operation(SCALED_ROWS_LAYOUT, lambda op: Tasks(1, PER_TOKEN), scaled_row)
