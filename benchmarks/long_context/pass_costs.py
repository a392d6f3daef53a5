"""The cost of passes at a context length, and the largest speed-up for these costs and an acceptance rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from benchmarks.capacity.speculation import chain_seconds, expected_tokens
from benchmarks.long_context.long_bench import Prefilled
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.core.tree import DraftTree
from forerun.drafting.recipes import small_cache, small_model, sparse_cache
from forerun.kv.cache import Cache
from forerun.kv.view import View
from forerun.models.forward.level import read
from forerun.models.forward.scorer import Scorer


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass by its number of tokens.

    Attributes:
        full: the target over its full cache.
        middle: the target over its sparse cache.
        small: the small model, one token; None without one.
    """

    full: Mapping[int, float]
    middle: Mapping[int, float]
    small: float | None = None

    def full_at(self, tokens: int) -> float:
        """Interpolated."""
        return _at(self.full, tokens)

    def middle_at(self, tokens: int) -> float:
        """Interpolated."""
        return _at(self.middle, tokens)


def _at(costs: Mapping[int, float], tokens: int) -> float:
    sizes = sorted(costs)
    return float(np.interp(tokens, sizes, [costs[size] for size in sizes]))


def drafting_seconds(costs: Costs, drafts: int, gamma1: int, inner_acceptance: float) -> float:
    """Seconds for the middle level to make ``drafts`` tokens, with the small model's help if there is one."""
    return chain_seconds(drafts, gamma1, inner_acceptance, costs.middle_at, costs.small)[drafts]


def speed_up_limit(costs: Costs, acceptance: float, inner_acceptance: float, gamma1: int, gamma2: int) -> float:
    """The best speed-up over plain autoregression with up to ``gamma2`` drafts per step."""
    plain = costs.full_at(1)
    return max(
        expected_tokens(acceptance, drafts)
        * plain
        / (costs.full_at(drafts + 1) + drafting_seconds(costs, drafts, gamma1, inner_acceptance))
        for drafts in range(gamma2 + 1)
    )


@torch.inference_mode()
def measure(target: Scorer, prompt: Prefilled, settings: LongContextConfig, repeats: int = 5) -> Costs:
    """Median seconds of TriForce's passes after a prompt; the prompt's cache stays unchanged."""
    prompt.rewind()
    token = prompt.tokens[-1]
    full = {n: _time(target, prompt.cache, token, n, repeats) for n in _sizes(settings.gamma2)}
    sparse = sparse_cache(settings)(target, prompt.cache)
    assert isinstance(sparse, View)
    sparse.sync()
    middle = {n: _time(target, sparse, token, n, repeats) for n in _sizes(settings.gamma1)}
    if settings.draft_model is None:
        return Costs(full, middle)
    draft = small_model(settings)
    small = small_cache(settings)(draft, prompt.cache)
    read(draft, small, np.array(prompt.tokens[:-1]))
    return Costs(full, middle, _time(draft, small, token % draft.vocabulary, 1, repeats))


def _sizes(drafts: int) -> Sequence[int]:
    return sorted({1, 2, 1 + drafts // 2, 1 + drafts} - {0})


def _time(scorer: Scorer, cache: Cache, token: int, tokens: int, repeats: int) -> float:
    tree = DraftTree.chain([token] * (tokens - 1))
    pending = np.array([token])

    def score() -> None:
        logits = scorer.score([Block(pending, tree, cache.length)], [cache])
        float(logits[0][-1, -1])  # waits for the result

    return _median_time(score, repeats)


def _median_time(work: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:])
