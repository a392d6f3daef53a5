"""A decoder's other operations: embedding, norms, scaled rows, rotary positions."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_fields import ROW_BYTES, kv_of, read_row
from forerun.kernels.linear.rowwise import TO_FLOATS, TO_WORDS, rotate, scale, squares, widen, words
from forerun.kernels.runtime.addresses import StructLayout, call, floats, integers
from forerun.kernels.runtime.executor import PER_OUTPUT, PER_TOKEN, Operation, Tasks, read_pass
from forerun.kernels.runtime.vector_ir import LANES


class EmbedOp(NamedTuple):
    """Embedding rows times a factor, as floats."""

    kind: int
    weight: int
    row: int
    dim: int
    x: int
    x_row: int
    factor: float


class LookupOp(NamedTuple):
    """Embedding rows of packed weights, times a factor, as floats; ``unpack`` is the address of ``panels.unpack``."""

    w: int
    row: int
    block: int
    unpack: int
    dim: int
    x: int
    x_row: int
    factor: float


class NormOp(NamedTuple):
    """A root mean square norm of each token's row; ``one`` is added to the weight. ``mode`` is as in ``rowwise.scale``.
    ``which`` is 0 for all tokens, 1 for those whose logits are wanted, with results side by side."""

    which: int
    kind: int
    mode: int
    one: int
    x: int
    x_row: int
    weight: int
    dim: int
    to: int
    to_row: int
    eps: float


class ScaledRowsOp(NamedTuple):
    """Each token's row of floats at ``x``, times ``factor`` (``TO_SUM``), or as a linear layer's input (``TO_WORDS``)
    of ``kind`` 0 float32 or 1 bfloat16; see ``rowwise.scale``."""

    kind: int
    mode: int
    x: int
    x_row: int
    dim: int
    to: int
    to_row: int
    factor: float


class RotaryOp(NamedTuple):
    """Rotate queries in place, and write keys and values to the cache; all three are side by side."""

    kind: int  # of the norms' weights
    kv_kind: int  # of the cache
    heads: int
    kv_heads: int
    dim: int
    y: int
    y_row: int
    q_norm: int  # weights of norms over each head, or 0
    k_norm: int
    one: int  # added to these weights
    cos: int  # by position, ``[positions, half]``
    sin: int
    half: int  # 0 if nothing rotates
    kv: int  # table with each row's addresses of this layer's keys and values
    eps: float


EMBED_LAYOUT, LOOKUP_LAYOUT = StructLayout(EmbedOp), StructLayout(LookupOp)
NORM_LAYOUT, SCALED_ROWS_LAYOUT, ROTARY_LAYOUT = (StructLayout(each) for each in (NormOp, ScaledRowsOp, RotaryOp))
read_embed, read_lookup = EMBED_LAYOUT.reader(), LOOKUP_LAYOUT.reader()
read_norm, read_scaled_rows, read_rotary = NORM_LAYOUT.reader(), SCALED_ROWS_LAYOUT.reader(), ROTARY_LAYOUT.reader()


@compiled
def embed(address: int, fields: int, code: int, token: int, slot: int) -> None:
    """Embed one token."""
    op, ids = read_embed(fields), read_pass(address).ids
    floats(slot, 1)[0] = np.float32(op.factor)
    widen(op.kind, op.weight + integers(ids + 8 * token, 1)[0] * op.row, slot, op.dim // LANES, op.x + token * op.x_row)


@compiled
def look_up(address: int, fields: int, code: int, token: int, slot: int) -> None:
    """Embed one token, unpacking its row as a panel of sixteen copies."""
    op = read_lookup(fields)
    w = op.w + integers(read_pass(address).ids + 8 * token, 1)[0] * op.row
    call(op.unpack, w, op.row, 0, op.dim // op.block, 0, slot)
    unpacked, x = floats(slot, op.dim * LANES), floats(op.x + token * op.x_row, op.dim)
    for i in range(op.dim):
        x[i] = unpacked[i * LANES] * op.factor


@compiled
def norm(address: int, fields: int, code: int, token: int, slot: int) -> None:
    """Normalise one token's row."""
    op, wanted = read_norm(fields), read_pass(address).output_indices
    x = op.x + (integers(wanted + 8 * token, 1)[0] if op.which else token) * op.x_row
    _norm(op.kind, op.mode, x, op.weight, op.one, op.eps, op.dim, op.to + token * op.to_row, slot)


@compiled
def _norm(kind: int, mode: int, x: int, weight: int, one: int, eps: float, dim: int, to: int, slot: int) -> None:
    mean = squares(x, dim // LANES) / np.float32(dim)
    floats(slot, 1)[0] = np.float32(1.0) / np.float32(math.sqrt(np.float32(mean + np.float32(eps))))
    scale(kind, mode, x, weight, one, slot, dim // LANES, to)


@compiled
def scaled_row(address: int, fields: int, code: int, token: int, slot: int) -> None:
    """Scale or convert one token's row."""
    op = read_scaled_rows(fields)
    x, to = op.x + token * op.x_row, op.to + token * op.to_row
    if op.mode == TO_WORDS:
        words(op.kind, x, op.dim // LANES, to)
        return
    source, target, factor = floats(x, op.dim), floats(to, op.dim), np.float32(op.factor)
    for i in range(op.dim):
        target[i] += np.float32(source[i] * factor)


@compiled
def turn(address: int, fields: int, code: int, token: int, slot: int) -> None:
    """Rotate and store one token's queries, keys and values."""
    op, this = read_rotary(fields), read_pass(address)
    number, position = integers(this.token_rows + 8 * token, 1)[0], integers(this.positions + 8 * token, 1)[0]
    row = read_row(this.rows + number * ROW_BYTES)
    place = row.start + token - row.first
    keys, values = kv_of(op, row, number, 0)
    cos, sin = op.cos + 4 * position * op.half, op.sin + 4 * position * op.half
    for head in range(op.heads + 2 * op.kv_heads):
        x = op.y + token * op.y_row + head * op.dim * 4
        weight = op.q_norm if head < op.heads else op.k_norm
        if head < op.heads + op.kv_heads:
            if weight:
                _norm(op.kind, TO_FLOATS, x, weight, op.one, op.eps, op.dim, x, slot)
            if op.half:
                _turn(op, x, cos, sin)
        if head >= op.heads + op.kv_heads:
            to = values + (head - op.heads - op.kv_heads) * row.v_head + place * row.v_row
            words(op.kv_kind, x, op.dim // LANES, to)
        elif head >= op.heads:
            words(op.kv_kind, x, op.dim // LANES, keys + (head - op.heads) * row.k_head + place * row.k_row)


@compiled
def _turn(op: RotaryOp, x: int, cos: int, sin: int) -> None:
    if op.half % LANES == 0:
        rotate(x, cos, sin, op.half // LANES)
        return
    first, second = floats(x, op.half), floats(x + 4 * op.half, op.half)
    c, s = floats(cos, op.half), floats(sin, op.half)
    for i in range(op.half):
        a, b = first[i], second[i]
        first[i] = np.float32(a * c[i]) - np.float32(b * s[i])
        second[i] = np.float32(b * c[i]) + np.float32(a * s[i])


EMBED = Operation(EMBED_LAYOUT, lambda op: Tasks(1, PER_TOKEN), embed)
LOOKUP = Operation(LOOKUP_LAYOUT, lambda op: Tasks(1, PER_TOKEN), look_up)
NORM = Operation(NORM_LAYOUT, lambda op: Tasks(1, PER_OUTPUT if op.which else PER_TOKEN), norm)
SCALED_ROWS = Operation(SCALED_ROWS_LAYOUT, lambda op: Tasks(1, PER_TOKEN), scaled_row)
ROTARY = Operation(ROTARY_LAYOUT, lambda op: Tasks(1, PER_TOKEN), turn)
