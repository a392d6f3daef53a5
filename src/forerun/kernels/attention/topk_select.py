"""The chunks with the highest worth, found by two selections: of groups, then of chunks. Nothing is sorted."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from forerun.core.compiling import compiled
from forerun.kernels.runtime.addresses import floats, integers
from forerun.kernels.runtime.vector_ir import LANES, LINE, Code, Emitter, intrinsic, intrinsic_code

SELECTION_GROUP = LANES
"""Chunks per group; a group is looked at only if its best chunk is good enough."""


@compiled
def selection_numbers(chunks: int) -> int:
    """How many numbers ``select_topk`` needs room for: one per chunk and one per group."""
    return chunks + (chunks + SELECTION_GROUP - 1) // SELECTION_GROUP


@compiled
def select_topk(worth: Any, count: int, margin: float, found: int, spare: int) -> int:
    """Indices of the ``count`` chunks with the highest worth, or of fewer, in ascending order.

    The best ``count`` chunks are in the best ``count`` groups, so the worth of the least of these groups is a bound.

    Args:
        worth: of each chunk.
        count: at most the number of chunks.
        margin: chunks whose worth is further than this below the best are left out.
        found: address of room for ``selection_numbers`` numbers of 8 bytes; the first ones become the result.
        spare: address of room for two floats per chunk.

    Returns:
        Number of chunks found.
    """
    groups, numbers = (
        (len(worth) + SELECTION_GROUP - 1) // SELECTION_GROUP,
        integers(found, selection_numbers(len(worth))),
    )
    maxima, copy = floats(spare, groups), floats(spare + 4 * len(worth), len(worth))
    whole = len(worth) // SELECTION_GROUP
    if whole < groups:
        maxima[whole] = worth[whole * SELECTION_GROUP]
        for c in range(whole * SELECTION_GROUP + 1, len(worth)):
            maxima[whole] = max(maxima[whole], worth[c])
    largest(worth.ctypes.data, whole, spare)
    top = maxima[0]
    for g in range(groups):
        copy[g] = maxima[g]
        top = max(top, maxima[g])
    bound = np.float32(top - margin)
    if groups > count:
        bound = max(bound, np.float32(nth_largest(copy[:groups], count)))
    likely = 0
    for g in range(groups):
        if maxima[g] >= bound:
            for c in range(g * SELECTION_GROUP, min(g * SELECTION_GROUP + SELECTION_GROUP, len(worth))):
                if worth[c] >= bound:
                    numbers[likely], copy[likely] = c, worth[c]
                    likely += 1
    if likely <= count:
        return likely
    bound = np.float32(nth_largest(copy[:likely], count))
    ties = count
    for i in range(likely):
        ties -= worth[numbers[i]] > bound
    kept = 0
    for i in range(likely):
        chunk = numbers[i]
        if worth[chunk] == bound:
            ties -= 1
        if worth[chunk] > bound or (worth[chunk] == bound and ties >= 0):
            numbers[kept] = chunk
            kept += 1
    return kept


@compiled
def nth_largest(values: Any, n: int) -> float:
    """The ``n``-th largest value, counted from 1, by Hoare's selection; reorders ``values``."""
    low, high, place = 0, len(values) - 1, n - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if place <= j:
            high = j
        elif place >= i:
            low = i
        else:
            break
    return float(values[place])


@intrinsic
def largest(typing: Any, values: Any, vectors: Any, out: Any) -> Code:
    """The largest float of each vector."""
    return intrinsic_code(3, _largest)


def _largest(e: Emitter, values: ir.Value, vectors: ir.Value, out: ir.Value) -> None:
    with e.loop(vectors) as i:
        e.store(e.largest(e.load(e.at(values, e.times(i, LINE)))), e.at(out, e.times(i, 4)))
