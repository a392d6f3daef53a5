"""Compute attention in a fixed order where the fast kernel cannot: float64, and heads of any width.

A query visits its keys one by one, by position, in double precision.
"""

from __future__ import annotations

import math

import numpy as np

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_fields import (
    ATTEND_LAYOUT,
    ROW_BYTES,
    AttendOp,
    RowFields,
    kv_of,
    read_attend,
    read_row,
)
from forerun.kernels.runtime.addresses import bfloat16_at, doubles, floats, integers
from forerun.kernels.runtime.executor import PER_TOKEN, Operation, Tasks, read_pass

FLOAT64_KIND = 3
"""Float64, besides the kinds of ``AttendOp``."""


@compiled
def attend_float64(address: int, fields: int, code: int, task: int, slot: int) -> None:
    """Compute attention of one token and head."""
    this, op = read_pass(address), read_attend(fields)
    token, head = task // op.heads, task % op.heads
    number, position = integers(this.token_rows + 8 * token, 1)[0], integers(this.cache_positions + 8 * token, 1)[0]
    row = read_row(this.rows + number * ROW_BYTES)
    low = max(0, position - op.window + 1) if op.window else 0
    count = position + 1 - low
    places, weights = integers(slot, count), doubles(slot + 8 * count, count)
    _visible_keys(row, token - row.first, position, low, this.parents, places)
    k, v = kv_of(op, row, number, head // (op.heads // op.kv_heads))
    total = _weights(op, k, row.k_row, head, token, places, weights)
    _weighted_sum(op, v, row.v_row, head, token, places, weights, total, slot + 16 * count)


@compiled
def _visible_keys(row: RowFields, place: int, position: int, low: int, parents: int, places: np.ndarray) -> None:
    root = row.start + row.in_order
    if place >= row.in_order:
        node, at = place - row.in_order, position
        while node >= 0:
            if at >= low:
                places[at - low] = root + node
            node = integers(parents + 8 * (row.first + row.in_order + node), 1)[0]
            at -= 1
        position = root - 1
    for p in range(low, position + 1):
        places[p - low] = p


@compiled
def _weights(op: AttendOp, k: int, k_row: int, head: int, token: int, places: np.ndarray, weights: np.ndarray) -> float:
    """Turn scores into weights relative to the largest, and return their sum, including a sink's."""
    query, highest = op.q + token * op.q_row + head * op.q_head, -math.inf
    kind = FLOAT64_KIND if op.kind == FLOAT64_KIND else 0  # of queries and sinks
    for i in range(weights.size):
        score = 0.0
        for c in range(op.dim):
            score += _number(kind, query, c) * _number(op.kind, k + places[i] * k_row, c)
        score *= op.scale
        weights[i] = op.softcap * math.tanh(score / op.softcap) if op.softcap > 0 else score
        highest = max(highest, weights[i])
    total = 0.0
    if op.sinks:
        sink = _number(kind, op.sinks, head)
        highest = max(highest, sink)
        total = math.exp(sink - highest)
    for i in range(weights.size):
        weights[i] = math.exp(weights[i] - highest)
        total += weights[i]
    return total


@compiled
def _weighted_sum(
    op: AttendOp, v: int, v_row: int, head: int, token: int, places: np.ndarray, weights: np.ndarray,
    total: float, spare: int,
) -> None:  # fmt: skip
    sums = doubles(spare, op.out_dim)
    sums[:] = 0.0
    for i in range(weights.size):
        for c in range(op.out_dim):
            sums[c] += weights[i] * _number(op.kind, v + places[i] * v_row, c)
    out = op.out + token * op.out_row + head * op.out_dim * (8 if op.kind == FLOAT64_KIND else 4)
    for c in range(op.out_dim):
        if op.kind == FLOAT64_KIND:
            doubles(out, op.out_dim)[c] = sums[c] / total
        else:
            floats(out, op.out_dim)[c] = np.float32(sums[c] / total)


@compiled
def _number(kind: int, address: int, index: int) -> float:
    if kind == FLOAT64_KIND:
        return float(doubles(address + 8 * index, 1)[0])
    if kind == 1:
        return np.float64(bfloat16_at(address + 2 * index))
    return np.float64(floats(address + 4 * index, 1)[0])


def scratch_bytes(positions: int, out_dim: int) -> int:
    """Return the scratch bytes per thread for sequences of ``positions`` positions."""
    return 16 * positions + 8 * out_dim


ATTEND_FLOAT64 = Operation(ATTEND_LAYOUT, lambda op: Tasks(op.heads, PER_TOKEN), attend_float64)
