"""One layer's keys and values in text order, followed by the block being scored; shared by several caches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forerun.core.block import Block
from forerun.core.tree import IntArray
from forerun.kernels.attention.attention import AttentionSpec, AttentionState, attend
from forerun.kernels.runtime.addresses import head_rows
from forerun.kv.cache import Addresses

Rows = tuple[torch.Tensor, ...]
"""Keys, values and other tensors that a cache keeps per token; tokens are dimension 2: ``[1, Hkv, m, ...]``."""


def append(rows: Rows | None, new: Rows, held: int, capacity: int) -> Rows:
    """Write ``new`` after the first ``held`` rows; if they do not fit, move to a buffer for ``capacity`` tokens."""
    end = held + new[0].shape[2]
    rows = reserve(rows, new, held, end, capacity)
    for room, part in zip(rows, new, strict=True):
        room[:, :, held:end] = part
    return rows


def reserve(rows: Rows | None, like: Rows, held: int, end: int, capacity: int) -> Rows:
    """Rows with room for ``end`` tokens: these, or their first ``held`` in a new buffer for ``capacity`` tokens, whose
    shape is otherwise that of ``like``."""
    if rows is not None and rows[0].shape[2] >= end:
        return rows
    grown = tuple(t.new_empty(*t.shape[:2], max(capacity, end), *t.shape[3:]) for t in like)
    for old, room in zip(rows or (), grown, strict=bool(rows)):
        room[:, :, :held] = old[:, :, :held]
    return grown


def addresses_of(rows: Sequence[Rows], index: int, topk: IntArray | None = None) -> Addresses | None:
    """Where a program finds each layer's keys and values; see ``Addresses``. None if the layers' strides differ, as a
    pass that failed half-way may leave them."""
    keys, values = rows[0]
    if any(k.stride() != keys.stride() or v.stride() != values.stride() for k, v in rows):
        return None
    found = np.array([[k.data_ptr(), v.data_ptr()] for k, v in rows], np.int64)
    return Addresses(found, (*head_rows(keys)[1:], *head_rows(values)[1:]), index, topk)


def compact(rows: Rows, start: int, path: Sequence[int]) -> None:
    """Move the nodes of ``path`` side by side. The tree starts at row ``start``; a chain needs no move."""
    if list(path) == list(range(len(path))):
        return
    chosen = torch.tensor([start + node for node in path], device=rows[0].device)
    for t in rows:
        t[:, :, start : start + len(path)] = t.index_select(2, chosen)


def attend_in_order(q: torch.Tensor, rows: Rows, held: int, block: Block, spec: AttentionSpec) -> list[AttentionState]:
    """Attention of the block's queries over ``held`` committed rows and the block after them, as parts to be merged.

    A layer with a sliding window measures distances in rows. The caller merges learned attention sinks.

    Args:
        q: ``[1, H, n, d]``.
        rows: keys and values, ``[1, Hkv, >= held + n, d]``.
        held: committed rows.
        block: what is being scored.
        spec: the layer's attention parameters.
    """
    keys, values = rows
    end = held + len(block)
    if len(block) == 1:  # one token sees all rows, including its own: no mask, nothing to merge
        first = 0 if spec.window is None else max(0, end - spec.window)
        return [attend(q, keys[:, :, first:end], values[:, :, first:end], spec)]
    edge, prefix = _split(held, block, spec.window)
    k, v = keys[:, :, held:end], values[:, :, held:end]
    if edge:
        k = torch.cat((keys[:, :, edge.start : edge.stop], k), 2)
        v = torch.cat((values[:, :, edge.start : edge.stop], v), 2)
    gone = block.start - held
    local = attend(q, k, v, spec, block.bias(spec.window, range(edge.start + gone, edge.stop + gone), q))
    if not prefix:
        return [local]
    seen = slice(prefix.start, prefix.stop)
    return [attend(q, keys[:, :, seen], values[:, :, seen], spec), local]


def _split(held: int, block: Block, window: int | None) -> tuple[range, range]:
    """Rows that only some of the block's tokens see, and rows that all of them see."""
    if window is None or held + block.deepest < window:
        return range(0), range(held)
    common = min(held, held + block.deepest - window + 1)
    return range(max(0, held - window + 1), common), range(common, held)
