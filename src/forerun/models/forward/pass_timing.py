"""Measure what passes of a model cost on this machine: a few of each size, in turns, in a second or two.

The fastest pass of each size counts, because disturbances only slow passes down. Large models run fewer sizes, each at
least twice, as the first pass meets cold memory. If a larger pass is faster than a smaller one, more passes follow. A
busy processor slows all sizes alike; CPU time far below the elapsed time reveals that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.core.work_clock import work_seconds
from forerun.kv.full_cache import FullCache
from forerun.models.forward.inputs import position_limit
from forerun.models.forward.scorer import Scorer
from forerun.policy.cost_curve import CostCurve

PASS_SIZES = (1, 8, 16, 32, 64, 2)
"""Pass sizes in tokens, most informative first. The cost of Forerun's kernels bends at multiples of 8."""
MIN_KINDS = 3
"""Number of sizes that are always measured, at any cost."""
MAX_ROUNDS = 9
MIN_ROUNDS, MOST_DISTURBED = 2, 5
"""Minimum rounds, and maximum rounds while larger passes seem faster than smaller ones."""
DISTURBED = 1.05
"""Ratio by which a larger pass must be faster to show that the smaller one was disturbed."""
OWN_TIME = 0.9
"""Minimum CPU share of an undisturbed thread. Measured on two cores, both models: 1.00 alone, 0.58 to 0.71 beside one
busy process, 0.43 to 0.49 beside two."""
SLICES_SECONDS = 0.02
"""Time in which a busy machine shows: its scheduler preempts every few milliseconds. Of 30 tries beside one busy
process, 5 to 7 seemed undisturbed in 20 or 40 ms, 6 to 10 in 10 and 11 in 5; beside two, none."""
MEASURING_SECONDS = 1.0
"""Time after which no round starts. A round on a model of 135 M parameters lasts 0.4 s."""
NEAR_TOKENS, FAR_TOKENS = 64, 4096
"""Cached tokens: near for the cost curve, with the merging of two attentions; far for the cost of cached tokens."""
FAR_SIZES = (1, 8, 16, 2, 9)
"""Pass sizes with a far cache. If a model's keys are read slower than they are scored, eight tokens cost as much as
one, and the ninth shows; otherwise each token does."""
BATCH_ROWS = 4
"""Rows of the pass that shows the cost of a row beyond its tokens."""
Kind = tuple[int, int, int]
"""Rows of a pass, tokens per row, and cached tokens per row."""


@torch.inference_mode()
def measure(
    scorer: Scorer,
    clock: Callable[[], float] = work_seconds,
    thread_clock: Callable[[], float] = time.thread_time,
) -> CostCurve:
    """Measure a model's cost curve, rounded for stability, by clocks of seconds and of this thread's CPU seconds."""
    reach = _positions(scorer)
    near = NEAR_TOKENS if reach >= NEAR_TOKENS + max(PASS_SIZES) else 0
    kinds = [(1, size, near) for size in PASS_SIZES if size <= reach]
    kinds.insert(MIN_KINDS, kinds[0])  # the unit of all others: measured more often
    if reach >= FAR_TOKENS + max(FAR_SIZES):
        kinds[MIN_KINDS:MIN_KINDS] = [(1, size, FAR_TOKENS) for size in FAR_SIZES]
    kinds.append((BATCH_ROWS, 1, near))
    times: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    caches = {
        cached: [_blank(scorer, cached) for _ in range(BATCH_ROWS if cached == near else 1)]
        for cached in {cached for _, _, cached in kinds}
    }
    began, own, end = clock(), thread_clock(), clock() + MEASURING_SECONDS
    for turn in range(MAX_ROUNDS):
        best = {kind: min(runs) for kind, runs in times.items() if runs}
        wanted = turn < MIN_ROUNDS or (turn < MOST_DISTURBED and _disturbed(best, near))
        for number, (rows, size, cached) in enumerate(kinds):
            if clock() > end and (number >= MIN_KINDS if turn == 0 else not wanted):
                break
            begin = clock()
            _pass(scorer, caches[cached][:rows], size)
            times[rows, size, cached].append(clock() - begin)
        kinds = [kind for kind in kinds if times[kind]]
    curve = _curve({kind: min(runs) for kind, runs in times.items() if runs}, near)
    return replace(curve, doubtful=thread_clock() - own < OWN_TIME * (clock() - began))


@torch.inference_mode()
def undisturbed(scorer: Scorer, thread_clock: Callable[[], float]) -> bool:
    """Return whether this thread has its core to itself during a few passes."""
    cache = _blank(scorer, 0)
    began, own, seconds = time.perf_counter(), thread_clock(), 0.0
    while seconds < SLICES_SECONDS:
        _pass(scorer, [cache], 1)
        seconds = time.perf_counter() - began
    return thread_clock() - own >= OWN_TIME * seconds


@torch.inference_mode()
def seconds_of_passes(scorer: Scorer, sizes: Sequence[int]) -> list[float]:
    """Measure one pass of each size, in seconds, after a warm-up pass."""
    near = NEAR_TOKENS if _positions(scorer) >= NEAR_TOKENS + max(PASS_SIZES) else 0
    cache, seconds = _blank(scorer, near), []
    for size in (sizes[0], *sizes):
        begin = work_seconds()
        _pass(scorer, [cache], size)
        seconds.append(work_seconds() - begin)
    return seconds[1:]


def _disturbed(seconds: dict[Kind, float], near: int) -> bool:
    by_size = [seconds[kind] for kind in sorted(seconds) if kind[::2] == (1, near)]
    return any(larger * DISTURBED < smaller for smaller, larger in pairwise(by_size))


def _curve(seconds: dict[Kind, float], near: int) -> CostCurve:
    sizes = sorted(size for rows, size, cached in seconds if (rows, cached) == (1, near))
    one = seconds[1, 1, near]
    ratios = [min(seconds[1, size, near] / one, size) for size in sizes]  # at most the cost of single-token passes
    costs = tuple(np.maximum.accumulate(ratios).tolist())
    far = sorted(size for rows, size, cached in seconds if (rows, cached) == (1, FAR_TOKENS))
    close = np.interp(far, sizes, ratios)
    looks = [(seconds[1, n, FAR_TOKENS] / one - at) / (FAR_TOKENS - near) for n, at in zip(far, close, strict=True)]
    rising = np.maximum.accumulate([0.0, *looks])[1:].tolist()
    cached_sizes, cached_costs = (tuple(far), tuple(rising)) if len(far) > 1 else ((1, 2), (0.0, 0.0))
    per_row = 0.0
    if (BATCH_ROWS, 1, near) in seconds:
        alone = float(np.interp(BATCH_ROWS, sizes, costs))
        per_row = max(min(seconds[BATCH_ROWS, 1, near] / one, BATCH_ROWS) - alone, 0.0) / (BATCH_ROWS - 1)
    return CostCurve(tuple(sizes), costs, cached_sizes, cached_costs, per_row, one).rounded()


def _positions(scorer: Scorer) -> int:
    limit = position_limit(scorer.model)
    return FAR_TOKENS + max(FAR_SIZES) if limit is None else limit


def _blank(scorer: Scorer, cached: int) -> FullCache:
    cache = FullCache(cached + max(PASS_SIZES))
    _pass(scorer, [cache], 1)
    cache.blank(cached)
    return cache


def _pass(scorer: Scorer, caches: Sequence[FullCache], size: int) -> None:
    tokens = np.random.default_rng(0).integers(0, scorer.vocabulary, size)
    blocks = [Block(tokens[:1], DraftTree.chain(tokens[1:]), cache.length) for cache in caches]
    scorer.score(blocks, caches)[0][0, 0].item()
