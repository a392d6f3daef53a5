"""StreamingLLM's cache for the target itself (Xiao et al. 2023): TriForce's baselines without retrieval."""

from __future__ import annotations

from forerun.core.long_context import LongContextConfig
from forerun.drafting.drafter import Drafter
from forerun.drafting.hierarchy import HierarchyDrafter
from forerun.drafting.recipes import small_drafter, streaming_cache
from forerun.models.forward.level import CacheFactory


def target_cache(settings: LongContextConfig) -> CacheFactory:
    """The target's first and last tokens, ``LongContextConfig.cache_budget`` of them."""
    return streaming_cache(settings, max(1, settings.cache_budget - settings.sinks))


def hierarchy(settings: LongContextConfig) -> Drafter:
    """TriForce's hierarchy with a streaming cache in the middle."""
    small = small_drafter(settings, settings.gamma1)
    return HierarchyDrafter(small, target_cache(settings), settings.gamma1, settings.gamma2)
