"""Attention in one fixed order: a token's bits depend neither on what shares the pass nor on which keys were drafted.

Keys are cut into splits, and splits into blocks, at fixed positions. Within a split, a query goes block by block with a
running maximum and sum (FlashAttention, Dao et al. 2022; ``attention_tile.py``). Splits are merged in order
(Flash-Decoding, Dao et al. 2023). A block without visible keys changes no bit, so it may be skipped. A drafted token
also sees its ancestors in the tree. Their keys are copied out in the order of their positions, and go through the same
steps. With the linear layers (``linear.py``) this makes speculative decoding bitwise exact.

There are two operations. *Scan* (``attention_scan.py``) goes over the keys that are stored in text order, by units of a
row's splits and tiles of queries. *Combine* (``attention_combine.py``) merges each token's splits, adds the keys that
only this token sees, and divides. This file has the data that both read.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from forerun.kernels.attention.attention_tile import STATE_BYTES, TILE_QUERIES
from forerun.kernels.runtime.addresses import StructLayout
from forerun.kernels.runtime.vector_ir import LINE

BLOCK_TOKENS = 32
"""Positions per block."""
SPLIT_TOKENS = 256
"""Positions per split. Splits are summed separately, so that few heads of a long text keep all threads busy."""
RANGE_BYTES = 96
"""Bytes that hold a tile's visible range: least and greatest end, least and greatest start, then those per query."""
ALL_SPLITS = -1
"""Instead of a unit's split: all splits, one after the other."""


class RowFields(NamedTuple):
    """One row of the batch.

    Attributes:
        first: index of its first token in the pass.
        n: its tokens in the pass.
        in_order: the number of them in text order; the others are tree nodes.
        start: committed tokens; the position of its first token.
        k_head: bytes from one head's keys to the next head's.
        states: offset of its states in the buffer of states.
        splits: states per tile; 0 if units go through all splits themselves.
    """

    first: int
    n: int
    in_order: int
    start: int
    k_head: int
    k_row: int
    v_head: int
    v_row: int
    states: int
    splits: int


class UnitFields(NamedTuple):
    """A thread's unit of a scan: a row's split (or ``ALL_SPLITS``), and tiles ``first`` to ``last``."""

    row: int
    split: int
    first: int
    last: int


class AttendOp(NamedTuple):
    """One layer's attention: addresses, strides in bytes, and counts.

    Attributes:
        kind: type of keys and values: 0 float32, 1 bfloat16, 2 float16.
        width: bytes per number of keys and values.
        dim: numbers per key; ``out_dim`` per value.
        window: as in ``AttentionSpec``, or 0.
        q: address of the queries, float32; with the strides of tokens and of heads.
        kv: address of the table with each row's addresses of keys and values of this layer.
        sinks: address of one number per head, in the queries' type, or 0.
        out: address of the outputs, a token's heads side by side; of ``out_kind``: 0 float32, 1 bfloat16.
    """

    kind: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    out_dim: int
    window: int
    q: int
    q_row: int
    q_head: int
    kv: int
    sinks: int
    out: int
    out_row: int
    out_kind: int
    scale: float
    softcap: float


class AttendCode(NamedTuple):
    """Addresses of machine code that both operations call (``attention_block.py``)."""

    scores: int
    gather: int


ROW_LAYOUT, UNIT_LAYOUT, ATTEND_LAYOUT, ATTEND_CODE_LAYOUT = (
    StructLayout(RowFields),
    StructLayout(UnitFields),
    StructLayout(AttendOp),
    StructLayout(AttendCode),
)
ROW_BYTES, UNIT_BYTES = ROW_LAYOUT.size, UNIT_LAYOUT.size
read_row, read_unit, read_attend, read_attend_code = (
    job.reader() for job in (ROW_LAYOUT, UNIT_LAYOUT, ATTEND_LAYOUT, ATTEND_CODE_LAYOUT)
)


def tile_bytes(out_dim: int) -> int:
    """Bytes for a tile's output and state."""
    return TILE_QUERIES * out_dim * 4 + STATE_BYTES


def scratch_bytes(tiles: int, group: int, dim: int, out_dim: int) -> int:
    """Bytes that a thread needs for units of ``tiles`` tiles, and for settling tokens of ``group`` heads."""
    most, own = max(tiles, 1), math.ceil(group / TILE_QUERIES)
    scan = most * (TILE_QUERIES * (dim + BLOCK_TOKENS) * 4 + 2 * tile_bytes(out_dim) + RANGE_BYTES)
    settle = own * (TILE_QUERIES * (dim + BLOCK_TOKENS) * 4 + 2 * tile_bytes(out_dim))
    return max(scan, settle) + BLOCK_TOKENS * (dim + out_dim) * 4 + 8 * LINE
