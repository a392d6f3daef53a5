"""The papers' baselines by name, beside Forerun's own drafters and caches; only the benchmarks know these names."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.papers import topk
from benchmarks.papers.lookahead_trie import LookaheadTrieSource
from forerun.core.long_context import LongContextConfig
from forerun.decoding import recipes
from forerun.decoding.level import CacheFactory
from forerun.decoding.planner import Planner
from forerun.decoding.recipes import Recipe, self_drafting, streaming_cache


def streaming_llm(settings: LongContextConfig) -> CacheFactory:
    """Return StreamingLLM's cache for the target itself (Xiao et al. 2023): its first and last tokens,
    ``LongContextConfig.cache_budget`` of them."""
    return streaming_cache(settings, max(1, settings.cache_budget - settings.sinks))


SPARSE: dict[str, Callable[[LongContextConfig], CacheFactory]] = {
    "topk": topk.target_cache,
    "streaming": streaming_llm,
    **recipes.SPARSE,
}
"""The target's sparse caches; ``topk`` is the oracle that the others are compared with."""

RECIPES: dict[str, Recipe] = {
    **recipes.RECIPES,
    "lookahead-trie": Recipe(lambda setup: setup.over(Planner(LookaheadTrieSource()))),
    "streaming-self": self_drafting(streaming_llm),
    "topk": self_drafting(topk.target_cache),
}
"""Forerun's recipes and the baselines: ``lookahead-trie`` is the paper's trie, all of whose drafts are scored;
``streaming-self`` and ``topk`` let the target draft over that cache alone."""
