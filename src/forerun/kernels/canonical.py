"""Attention in one order: a token's bits do not depend on what shares the pass, nor on whether keys were drafted.

Positions are cut into pieces, and those into blocks, at fixed places. Within a piece a query goes block by block with a
running maximum and sum (FlashAttention, Dao et al. 2022; ``tiles.py``); pieces are joined in their order
(Flash-Decoding, Dao et al. 2023). A block in which a query sees nothing changes nothing, to the bit; so it may be
skipped or not. Keys that a drafted token does not share with the others, its ancestors in the tree, are written out in
the order of their positions and go the same way. The second half of what makes speculative decoding exact.

There are two operations. *Scan* (``pieces.py``): units of a row's pieces and tiles of queries, over the keys that lie
in the order of the text. *Settle* (``settling.py``): for each token, join the pieces, go through what only this token
sees, and divide. Here is what they are told.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from forerun.kernels.memory import Job
from forerun.kernels.tiles import QUERIES, STATE
from forerun.kernels.vector import LINE

BLOCK = 32
"""Positions of a block."""
PIECE = 256
"""Positions of a piece: what is summed by itself, so that few heads of a long text keep all threads busy."""
SIGHT = 96
"""Bytes that say what a tile's queries see: least and greatest end, least and greatest beginning, and each one's."""
SEQUENTIAL = -1
"""In a unit's place of a piece: all of them, one after the other."""


class RowFields(NamedTuple):
    """One row of the batch.

    Attributes:
        first: its first token in the pass.
        n: its tokens in the pass.
        straight: how many of them lie in the order of the text; the others are a tree's nodes.
        start: committed tokens, the position of the first.
        k_head: bytes from one head's keys to the next one's.
        parts: where its states are in the room for them.
        pieces: how many states there are for each tile; 0 where units go through all pieces themselves.
    """

    first: int
    n: int
    straight: int
    start: int
    k_head: int
    k_row: int
    v_head: int
    v_row: int
    parts: int
    pieces: int


class UnitFields(NamedTuple):
    """What a thread scans at a time: a row's piece (or ``SEQUENTIAL``) and tiles from ``first`` to ``last``."""

    row: int
    piece: int
    first: int
    last: int


class AttendOp(NamedTuple):
    """One layer's attention: addresses, distances in bytes, and counts.

    Attributes:
        code: of the operation, for the tape.
        kind: of keys and values: 0 float32, 1 bfloat16, 2 float16.
        width: bytes of a number of them.
        dim: numbers of a key; ``out_dim`` of a value.
        window: as in ``AttentionSpec``, or 0.
        q: floats, of a token and of a head at these distances.
        kv: addresses of keys and values of this layer, row by row.
        sinks: a number for each head, of the type of the queries, or 0.
        out: a token's heads side by side, of ``out_kind``: 0 float32, 1 bfloat16.
    """

    code: int
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
    """Where machine code is that both operations use (``blocks.py``)."""

    scores: int
    gather: int


ROW, UNIT, ATTEND, ATTEND_CODE = Job(RowFields), Job(UnitFields), Job(AttendOp), Job(AttendCode)
ROW_BYTES, UNIT_BYTES = ROW.size, UNIT.size
read_row, read_unit, read_attend, read_attend_code = (job.reader() for job in (ROW, UNIT, ATTEND, ATTEND_CODE))


def tile_bytes(out_dim: int) -> int:
    """Bytes of a tile's output and state."""
    return QUERIES * out_dim * 4 + STATE


def room(tiles: int, group: int, dim: int, out_dim: int) -> int:
    """Bytes that a thread needs for units of so many tiles, and for settling tokens of so many heads."""
    most, own = max(tiles, 1), math.ceil(group / QUERIES)
    scan = most * (QUERIES * (dim + BLOCK) * 4 + 2 * tile_bytes(out_dim) + SIGHT)
    settle = own * (QUERIES * (dim + BLOCK) * 4 + 2 * tile_bytes(out_dim))
    return max(scan, settle) + BLOCK * (dim + out_dim) * 4 + 8 * LINE
