"""The fields of a linear operation, as kernels read them, and the sizes that follow from them."""

from __future__ import annotations

from typing import NamedTuple

from forerun.core.compiling import compiled
from forerun.kernels.linear.block_sums import INPUT_BLOCK, X_BLOCK
from forerun.kernels.runtime.addresses import StructLayout
from forerun.kernels.runtime.vector_ir import LINE

PUT, ADD, GATE = 0, 1, 2
"""``PUT`` stores sums, ``ADD`` adds them to floats, ``GATE`` multiplies their activations by the second matrix's."""


class LinearOp(NamedTuple):
    """One to three matrices over the same tokens: addresses, strides in bytes, and counts.

    Two panels are computed side by side: two of one matrix, or one of each matrix of a ``GATE``.
    """

    which: int  # 0 for all tokens of the pass, 1 for those whose logits are wanted
    kind: int  # type of the inputs: 0 float32, 1 bfloat16, 2 float64
    to_kind: int  # and of the results
    x: int  # the tokens' rows, padded to vectors; 0 for those of the pass
    x_row: int
    words: int
    floats: int  # whether a matrix reads the tokens' words
    integers: int  # whether one reads quantised inputs
    few_tokens: int  # maximum tokens that the machine code ``few`` supports
    chunk: int  # words per row that more tokens are multiplied by before the next pair of panels
    mode: int
    pairs: int
    share: int  # pairs per task
    turn: int  # pairs in the shares of all threads; where a thread's next share starts if all are equally fast
    activation: int
    y: int  # rows of results, side by side; 0 for those of the pass
    y_row: int
    table: int
    matrices: int


class LinearCode(NamedTuple):
    """Addresses of machine code that all formats share, or 0 if no matrix needs it."""

    transpose: int
    many: int


LINEAR_LAYOUT, CODE = StructLayout(LinearOp), StructLayout(LinearCode)
read_linear, read_code = LINEAR_LAYOUT.reader(), CODE.reader()


@compiled
def lanes_of(op: LinearOp) -> int:
    """Return the inputs per vector, which are a panel's rows."""
    return 8 if op.kind == 2 else 16


@compiled
def group_bytes(op: LinearOp) -> int:
    """Return the bytes of the words, column by column, of as many tokens as a vector has lanes."""
    lanes = lanes_of(op)
    return (op.words + lanes - 1) // lanes * lanes * LINE


@compiled
def columns_bytes(op: LinearOp, n: int) -> int:
    """Return the bytes of ``n`` tokens' words, column by column."""
    return (n + lanes_of(op) - 1) // lanes_of(op) * group_bytes(op) if op.floats else 0


@compiled
def quantised_row(op: LinearOp) -> int:
    """Return the bytes of a token's quantised inputs."""
    return op.words // INPUT_BLOCK * X_BLOCK if op.integers else 0
