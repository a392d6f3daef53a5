"""The papers' baselines by name, beside Forerun's own drafters and caches; only the benchmarks know these names."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.papers import h2o, topk
from benchmarks.papers.lookahead_decoding import JacobiDrafter
from benchmarks.papers.lookahead_trie import LookaheadTrieDrafter
from benchmarks.papers.token_recycling import TokenRecyclingDrafter
from forerun.core.long_context import LongContextConfig
from forerun.drafting import recipes
from forerun.drafting.drafter import Drafter
from forerun.drafting.hierarchy import HierarchyDrafter
from forerun.drafting.recipes import Recipe, long_context, self_drafting, small_drafter, streaming_cache
from forerun.models.forward.level import CacheFactory


def streaming_llm(settings: LongContextConfig) -> CacheFactory:
    """StreamingLLM's cache for the target itself (Xiao et al. 2023): its first and last tokens,
    ``LongContextConfig.cache_budget`` of them."""
    return streaming_cache(settings, max(1, settings.cache_budget - settings.sinks))


def streaming_hierarchy(settings: LongContextConfig) -> Drafter:
    """TriForce's hierarchy with a streaming cache in the middle."""
    small = small_drafter(settings, settings.gamma1)
    return HierarchyDrafter(small, streaming_llm(settings), settings.gamma1, settings.gamma2)


SPARSE: dict[str, Callable[[LongContextConfig], CacheFactory]] = {
    "topk": topk.target_cache,
    "streaming": streaming_llm,
    "h2o": h2o.target_cache,
    **recipes.SPARSE,
}
"""The target's sparse caches; ``topk`` is the oracle that the others are compared with."""

RECIPES: dict[str, Recipe] = {
    **recipes.RECIPES,
    "lookahead-trie": Recipe(lambda settings: LookaheadTrieDrafter()),
    "token-recycling": Recipe(lambda settings: TokenRecyclingDrafter()),
    "jacobi": Recipe(lambda settings: JacobiDrafter()),
    "streaming-hierarchy": long_context(streaming_hierarchy, streaming_llm, small=True),
    "streaming-self": self_drafting(streaming_llm),
    "h2o": self_drafting(h2o.target_cache),
    "topk": self_drafting(topk.target_cache),
}
"""Forerun's recipes and the baselines: ``lookahead-trie`` is the paper's trie, all of whose drafts are scored,
``jacobi`` is lookahead decoding, ``streaming-hierarchy`` is TriForce with a
streaming cache in the middle; ``streaming-self``, ``h2o`` and ``topk`` let the target draft over that cache alone."""
