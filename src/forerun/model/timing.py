"""Measures what passes of a model cost on this machine: a few of each size, in turns, within a fraction of a second.

The fastest pass of each size counts, because disturbances only slow passes down. If a model is so large that few passes
fit into that time, fewer sizes are measured, each at least once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import numpy as np
import torch

from forerun.caches.full import FullCache
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.model.scorer import Scorer
from forerun.plan.costs import CostCurve

SIZES = (1, 8, 16, 32, 64, 2)
"""Sizes of the passes in tokens, most informative first. The cost of Forerun's kernels bends at multiples of 8."""
LEAST = 3
"""How many of these sizes are always measured, however long they take."""
ROUNDS = 9
"""The most passes of each kind."""
SECONDS = 0.4
"""No pass starts after this time."""
NEAR, FAR = 64, 4096
"""Tokens in the cache. ``NEAR``: for the cost curve, so that it includes merging two attentions. ``FAR``: for the cost
of cached tokens, with passes over one token and over several."""
SEVERAL = 16


@torch.inference_mode()
def measure(scorer: Scorer, clock: Callable[[], float] = time.perf_counter) -> CostCurve:
    """The cost curve of a model, rounded so that it seldom differs from one measurement to the next.

    Args:
        scorer: the model.
        clock: gives seconds.
    """
    reach = _positions(scorer)
    near = NEAR if reach >= NEAR + max(SIZES) else 0
    kinds = [(size, near) for size in SIZES if size <= reach]
    kinds.insert(LEAST, kinds[0])  # the unit of all others: measured more often
    if reach >= FAR + SEVERAL:
        kinds += [(1, FAR), (SEVERAL, FAR), kinds[0]]
    times: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    caches = {cached: _blank(scorer, cached) for cached in {cached for _, cached in kinds}}
    for size, cached in _until(clock, clock() + SECONDS, kinds):
        begin = clock()
        _pass(scorer, caches[cached], size)
        times[size, cached].append(clock() - begin)
    return _curve({kind: min(runs) for kind, runs in times.items() if runs}, near)


def costs_of(scorer: Scorer) -> CostCurve:
    """The cost curve of a model, measured at the first call."""
    if scorer not in _measured:
        _measured[scorer] = measure(scorer)
    return _measured[scorer]


_measured: WeakKeyDictionary[Scorer, CostCurve] = WeakKeyDictionary()


def _until(clock: Callable[[], float], end: float, kinds: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for number, kind in enumerate(kinds * ROUNDS):
        if number >= LEAST and clock() > end:
            return
        yield kind


def _curve(seconds: dict[tuple[int, int], float], near: int) -> CostCurve:
    sizes = sorted(size for size, cached in seconds if cached == near)
    one = seconds[1, near]
    ratios = [min(seconds[size, near] / one, size) for size in sizes]  # at most the cost of single-token passes
    costs = np.maximum.accumulate(ratios).tolist()
    if (SEVERAL, FAR) not in seconds:
        return CostCurve(tuple(sizes), tuple(costs)).rounded()
    single, several = ((seconds[size, FAR] - seconds[size, near]) / one / (FAR - near) for size in (1, SEVERAL))
    per_pair = max((several - single) / (SEVERAL - 1), 0.0)
    return CostCurve(tuple(sizes), tuple(costs), max(single - per_pair, 0.0), per_pair).rounded()


def _positions(scorer: Scorer) -> int:
    """The number of positions of the model."""
    limit = getattr(scorer.model.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) else FAR + SEVERAL


def _blank(scorer: Scorer, cached: int) -> FullCache:
    """A cache that holds ``cached`` tokens of zeros."""
    cache = FullCache(cached + max(SIZES))
    _pass(scorer, cache, 1)
    cache.blank(cached)
    return cache


def _pass(scorer: Scorer, cache: FullCache, size: int) -> None:
    """Score a chain of ``size`` tokens, and wait for the result."""
    tokens = np.random.default_rng(0).integers(0, scorer.vocabulary, size)
    block = Block(tokens[:1], DraftTree.chain(tokens[1:]), cache.length)
    scorer.score([block], [cache])[0][0, 0].item()
