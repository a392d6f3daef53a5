"""Run the gated delta rule and Mamba-2's recurrence over a draft tree, token by token, in one fixed order.

Both keep a matrix per head, which a gate decays, a key and a value update, and a query reads:

    S = exp(g) * S_parent
    u = beta * (v - S^T k)      (delta rule; https://arxiv.org/abs/2412.06464, and with a gate per channel, Kimi Linear)
    u = v                       (Mamba-2, whose v is dt * x; https://arxiv.org/abs/2405.21060)
    S = S + k u^T
    o = S^T q

Each task is a head. It sums over the key's dimensions in order, so a token's bits depend only on its ancestors. States
and sums have the inputs' type, float32 or float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from forerun.core.compiling import compiled
from forerun.core.tree import IntArray
from forerun.kernels import gpu
from forerun.kernels.runtime.addresses import StructLayout, doubles, floats, integers, part
from forerun.kernels.runtime.executor import Operation, Program, Tasks

L2_EPSILON = 1e-6
"""Added to a key's or query's sum of squares before the root, as in transformers and FLA."""
BEFORE = -1
"""Parent of the first token, and the place of the state before it."""
UNSAVED = -1
"""Saved-state index of a token whose state is not saved."""


class GatedStateOp(NamedTuple):
    """One call: addresses and sizes."""

    rows: int  # each token's keys, values, gates and betas, side by side (``GatedShape``)
    row_width: int
    q: int  # of the tokens from ``first`` on, as ``out``; earlier ones only update the state
    out: int
    state: int
    saved: int  # where saved states are written, one after the other
    order: int
    tokens: int
    first: int
    places: int
    key_heads: int
    heads: int
    dim: int
    out_dim: int
    gates: int  # per head: 1, or ``dim``
    delta: int  # whether it is the delta rule
    normalise: int  # whether keys and queries are divided by their norms
    wide: int  # whether numbers are float64
    scale: float  # factor on the queries


GATED_LAYOUT = StructLayout(GatedStateOp)
read_gated = GATED_LAYOUT.reader()


class GatedShape(NamedTuple):
    """A layer's recurrence and its sizes; see ``GatedStateOp``."""

    key_heads: int
    heads: int
    dim: int
    out_dim: int
    gates: int
    delta: bool
    normalise: bool
    scale: float

    @property
    def row_width(self) -> int:
        """Numbers per token that update the state: a key per key head, and value, gates and beta per head."""
        return self.key_heads * self.dim + self.heads * (self.out_dim + self.gates + int(self.delta))


@dataclass(frozen=True)
class TokenOrder:
    """The order in which a recurrence visits a draft tree. A parent's state is kept, in place, until its last child is
    computed, so a chain of any length needs one state. ``table`` has each token's parent's place, own place and index
    of the saved state, int64 ``[n, 3]``; ``places`` is the number of states that exist at once."""

    table: torch.Tensor
    places: int

    @classmethod
    def of(cls, parents: IntArray, saved: Mapping[int, int], device: torch.device) -> TokenOrder:
        """Order tokens with ``parents`` ``[n]``, parents first; ``saved`` maps tokens to saved-state indices."""
        children = np.bincount(parents + 1, minlength=len(parents) + 1).tolist()
        rows, places, free = [], 0, list[int]()
        own: list[int] = []
        for token, parent in enumerate(parents.tolist()):
            source = BEFORE if parent < 0 else own[parent]
            children[parent + 1] -= 1
            if parent >= 0 and not children[parent + 1]:
                place = source
            elif free:
                place = free.pop()
            else:
                place, places = places, places + 1
            own.append(place)
            rows.append((source, place, saved.get(token, UNSAVED)))
            if not children[token + 1]:
                free.append(place)
        return cls(torch.tensor(rows, dtype=torch.int64, device=device), places)


def run_states(
    shape: GatedShape,
    rows: torch.Tensor,
    q: torch.Tensor,
    state: torch.Tensor | None,
    saved: torch.Tensor,
    order: TokenOrder,
) -> torch.Tensor:
    """Return outputs ``[m, heads, out_dim]`` of the last m tokens, and save states on the way.

    ``rows``, ``[n, row_width]``, and ``q``, ``[m, key_heads, dim]``, are contiguous; all are float32 or float64.
    ``state``: ``[heads, dim, out_dim]`` before the first token, None for zeros; ``saved``: ``[s, heads, dim,
    out_dim]``.
    """
    if gpu.runs_on(q.device):
        from forerun.kernels.gpu import recurrences as there  # needs Triton

        return there.run_states(shape, rows, q, state, saved, order)
    out = q.new_empty(len(q), shape.heads, shape.out_dim)
    wide = q.dtype == torch.float64
    op = GatedStateOp(
        rows.data_ptr(), shape.row_width, q.data_ptr(), out.data_ptr(), 0 if state is None else state.data_ptr(),
        saved.data_ptr(), order.table.data_ptr(), len(rows), len(rows) - len(q), order.places,
        *shape[:5], int(shape.delta), int(shape.normalise), int(wide), shape.scale,
    )  # fmt: skip
    numbers = (order.places * shape.dim + 1) * shape.out_dim + 3 * shape.dim
    Program([(GATED_STATES, op)]).run_in_scratch(numbers * (8 if wide else 4))
    return out


@compiled
def gated_states(address: int, fields: int, code: int, task: int, slot: int) -> None:
    """Run one head over all tokens."""
    op = read_gated(fields)
    size = op.heads * op.dim * op.out_dim
    order = integers(op.order, 3 * op.tokens)
    rows, outputs = op.tokens * op.row_width, op.tokens - op.first
    scratch = (op.places * op.dim + 1) * op.out_dim + 3 * op.dim
    if op.wide:
        run_head(
            op, task, order, doubles(op.rows, rows), doubles(op.q, outputs * op.key_heads * op.dim),
            doubles(op.out, outputs * op.heads * op.out_dim), doubles(op.state, size), doubles(op.saved, size),
            doubles(slot, scratch),
        )  # fmt: skip
    else:
        run_head(
            op, task, order, floats(op.rows, rows), floats(op.q, outputs * op.key_heads * op.dim),
            floats(op.out, outputs * op.heads * op.out_dim), floats(op.state, size), floats(op.saved, size),
            floats(slot, scratch),
        )  # fmt: skip


@compiled
def run_head(
    op: GatedStateOp, head: int, order: np.ndarray, rows: np.ndarray, q: np.ndarray, out: np.ndarray,
    state: np.ndarray, saved: np.ndarray, scratch: np.ndarray,
) -> None:  # fmt: skip
    """Run one head over all tokens."""
    size, key_head = op.dim * op.out_dim, head // (op.heads // op.key_heads)
    key, query = part(scratch, op.places * size, op.dim), part(scratch, op.places * size + op.dim, op.dim)
    decays = part(scratch, op.places * size + 2 * op.dim, op.dim)
    update = part(scratch, op.places * size + 3 * op.dim, op.out_dim)
    for token in range(op.tokens):
        source, place, save = order[3 * token], order[3 * token + 1], order[3 * token + 2]
        row = part(rows, token * op.row_width, op.row_width)
        values, own = op.key_heads * op.dim, part(scratch, place * size, size)
        gates = values + op.heads * op.out_dim
        value, gate = part(row, values + head * op.out_dim, op.out_dim), part(row, gates + head * op.gates, op.gates)
        copy_vector(op, part(row, key_head * op.dim, op.dim), key, 1.0)
        for i in range(op.gates):
            decays[i] = math.exp(gate[i])
        before, in_place = own, True
        if source >= 0:
            before, in_place = part(scratch, source * size, size), source == place
        elif op.state:
            before, in_place = part(state, head * size, size), False
        else:
            own[:] = 0
        at, result = token - op.first, update
        if at >= 0:
            copy_vector(op, part(q, (at * op.key_heads + key_head) * op.dim, op.dim), query, op.scale)
            result = part(out, (at * op.heads + head) * op.out_dim, op.out_dim)
            result[:] = 0
        for j in range(op.out_dim):
            update[j] = 0 if op.delta else value[j]
        for i in range(op.dim):
            line = part(own, i * op.out_dim, op.out_dim)
            decay(part(before, i * op.out_dim, op.out_dim), decays[i if op.gates > 1 else 0], in_place, line)
            if op.delta:
                add_product(update, key[i], line)
            else:
                take_in(line, key[i], update, query[i], result, at >= 0)
        if op.delta:
            for j in range(op.out_dim):
                update[j] = (value[j] - update[j]) * row[gates + op.heads * op.gates + head]
            for i in range(op.dim):
                take_in(part(own, i * op.out_dim, op.out_dim), key[i], update, query[i], result, at >= 0)
        if save >= 0:
            kept = part(saved, (save * op.heads + head) * size, size)
            for i in range(size):
                kept[i] = own[i]


@compiled
def copy_vector(op: GatedStateOp, vector: np.ndarray, to: np.ndarray, scale: float) -> None:
    """Copy a key or query times ``scale``, normalised if the layer does so."""
    factor = scale
    if op.normalise:
        total = 0.0
        for i in range(op.dim):
            total += np.float64(vector[i]) * np.float64(vector[i])
        factor = scale / math.sqrt(total + L2_EPSILON)
    for i in range(op.dim):
        to[i] = vector[i] * factor


@compiled
def decay(before: np.ndarray, factor: float, in_place: bool, line: np.ndarray) -> None:
    """Decay a line of the parent's state. Compilers do not vectorise loops over arrays that may overlap."""
    if in_place:
        for j in range(line.size):
            line[j] *= factor
    else:
        for j in range(line.size):
            line[j] = before[j] * factor


@compiled
def add_product(total: np.ndarray, weight: float, vector: np.ndarray) -> None:
    """Add ``weight`` times a vector."""
    for j in range(total.size):
        total[j] += weight * vector[j]


@compiled
def take_in(line: np.ndarray, key: float, update: np.ndarray, query: float, result: np.ndarray, answers: bool) -> None:
    """Add ``key`` times the update to a line of the state, and ``query`` times the new line to the result."""
    if answers:
        for j in range(line.size):
            line[j] += key * update[j]
            result[j] += query * line[j]
    else:
        add_product(line, key, update)


GATED_STATES = Operation(GATED_LAYOUT, lambda op: Tasks(op.heads), gated_states)
