"""The papers' baselines by name, beside Forerun's own drafters and caches; only the benchmarks know these names."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.papers import h2o, streaming_llm, topk
from benchmarks.papers.lookahead_decoding import JacobiDrafter
from benchmarks.papers.lookahead_trie import LookaheadTrieDrafter
from benchmarks.papers.token_recycling import TokenRecyclingDrafter
from forerun.core.long_context import LongContextConfig
from forerun.drafting import recipes
from forerun.drafting.recipes import Recipe, long_context, self_drafting
from forerun.models.forward.level import CacheFactory

SPARSE: dict[str, Callable[[LongContextConfig], CacheFactory]] = {
    "topk": topk.target_cache,
    "streaming": streaming_llm.target_cache,
    "h2o": h2o.target_cache,
    **recipes.SPARSE,
}
"""The target's sparse caches; ``topk`` is the oracle that the others are compared with."""

RECIPES: dict[str, Recipe] = {
    **recipes.RECIPES,
    "lookahead-trie": Recipe(lambda settings: LookaheadTrieDrafter()),
    "token-recycling": Recipe(lambda settings: TokenRecyclingDrafter()),
    "jacobi": Recipe(lambda settings: JacobiDrafter()),
    "streaming-hierarchy": long_context(streaming_llm.hierarchy, streaming_llm.target_cache, small=True),
    "streaming-self": self_drafting(streaming_llm.target_cache),
    "h2o": self_drafting(h2o.target_cache),
    "topk": self_drafting(topk.target_cache),
}
"""Forerun's recipes and the baselines: ``lookahead-trie`` is the paper's trie, all of whose drafts are scored,
``jacobi`` is lookahead decoding, ``streaming-hierarchy`` is TriForce with a
streaming cache in the middle; ``streaming-self``, ``h2o`` and ``topk`` let the target draft over that cache alone."""
