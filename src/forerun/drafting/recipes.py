"""From a name, as the command line takes it, to a freshly built drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.core.long_context import LongContextConfig
from forerun.drafting.adaptive import AdaptiveDrafter
from forerun.drafting.drafter import Drafter, NoDrafter, OuterDrafter
from forerun.drafting.hierarchy import HierarchyDrafter
from forerun.drafting.jacobi import JacobiDrafter
from forerun.drafting.lookup import LookupDrafter
from forerun.drafting.merged import MergedDrafter
from forerun.drafting.model_drafter import ModelDrafter
from forerun.drafting.trie_drafter import TrieDrafter
from forerun.kv.bounded import SLACK
from forerun.kv.full_cache import FullCache
from forerun.kv.heavy_hitter import HeavyHitterCache
from forerun.kv.low_rank import LowRankCache, LowRankConfig
from forerun.kv.rerotation import Rotation
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.kv.streaming import StreamingCache
from forerun.kv.topk_cache import TopKCache
from forerun.models.forward import gate
from forerun.models.forward.level import CacheFactory
from forerun.models.forward.scorer import Scorer
from forerun.models.forward.sharded import is_sharded
from forerun.trie.trie import Form, Trie, TrieConfig

TRIE_NODES = 16
"""Maximum size of a trie's tree that the target verifies over its sparse cache."""

HELPED = 0.1
"""First guess of what it costs to draft a token over a sparse cache with the help of a small model or a trie; a pass of
the target costs 1. It is low, so that drafting is tried, and then measured."""


@dataclass(frozen=True)
class Recipe:
    """How a drafter is built.

    Attributes:
        build: from settings, each time anew.
        small: whether it needs ``LongContextConfig.draft_model``.
        sparse: from settings, the sparse cache over which the target drafts, if it does.
    """

    build: Callable[[LongContextConfig], Drafter]
    small: bool = False
    sparse: Callable[[LongContextConfig], CacheFactory] | None = None


def small_model(settings: LongContextConfig) -> Scorer:
    """The small model.

    Raises:
        ValueError: if there is none.
    """
    if settings.draft_model is None:
        raise ValueError("this drafter needs a small model, draft_model, and there is none; triforce-trie needs none")
    if is_sharded(settings.draft_model):
        raise ValueError("draft_model lies in several processes; load it whole, as rank 0 alone drafts")
    gate.check(settings.draft_model)
    return Scorer(settings.draft_model)


def _small(settings: LongContextConfig, gamma: int) -> ModelDrafter:
    """The small model over the first and last tokens."""
    return ModelDrafter(small_cache(settings), gamma, small_model(settings))


def small_cache(settings: LongContextConfig) -> CacheFactory:
    """The small model's cache: StreamingLLM's, of ``LongContextConfig.window`` tokens."""
    return _streaming(settings, settings.window)


def _slack(settings: LongContextConfig) -> int:
    """Tokens that a level's cache can take back: what both levels draft in a step, at least."""
    return max(SLACK, settings.gamma1 + settings.gamma2)


def _streaming(settings: LongContextConfig, window: int) -> CacheFactory:
    rotations: dict[Scorer, Rotation | None] = {}

    def make(scorer: Scorer, source: FullCache) -> StreamingCache:
        if scorer not in rotations:
            rotations[scorer] = scorer.rotation()
        return StreamingCache(window, settings.sinks, _slack(settings), rotations[scorer])

    return make


def _heavy_hitter(settings: LongContextConfig) -> CacheFactory:
    """Half of the budget for heavy hitters, half for recent tokens, as in H2O's experiments."""
    recent = max(1, settings.cache_budget // 2)
    return lambda scorer, source: HeavyHitterCache(settings.cache_budget - recent, recent, _slack(settings))


def _self_streaming(settings: LongContextConfig) -> CacheFactory:
    return _streaming(settings, max(1, settings.cache_budget - settings.sinks))


def _retrieval(settings: LongContextConfig) -> CacheFactory:
    config = RetrievalConfig(settings.cache_budget, settings.chunk, refresh=settings.refresh)
    return lambda scorer, source: RetrievalCache(source, config)


def _low_rank(settings: LongContextConfig) -> CacheFactory:
    config = LowRankConfig(settings.cache_budget)
    return lambda scorer, source: LowRankCache(source, config)


def _topk(settings: LongContextConfig) -> CacheFactory:
    return lambda scorer, source: TopKCache(source, settings.cache_budget)


SPARSE: dict[str, Callable[[LongContextConfig], CacheFactory]] = {
    "topk": _topk,
    "streaming": _self_streaming,
    "h2o": _heavy_hitter,
    "retrieval": _retrieval,
    "low-rank": _low_rank,
}
"""The target's sparse caches, of ``LongContextConfig.cache_budget`` tokens; ``topk`` is the oracle that they are measured by."""


def sparse_cache(settings: LongContextConfig) -> CacheFactory:
    """The middle level's cache."""
    return SPARSE[settings.sparse](settings)


def _triforce(settings: LongContextConfig, inner: Drafter, nodes: int) -> Drafter:
    return HierarchyDrafter(inner, sparse_cache(settings), nodes, settings.gamma2)


def _auto(settings: LongContextConfig) -> Drafter:
    """All sources: a trie, and the target over a sparse cache, which the trie and a small model draft for."""
    trie = TrieDrafter()
    small = settings.draft_model is not None
    inner = MergedDrafter(trie, _small(settings, settings.gamma1), settings.gamma1) if small else trie
    levels = _triforce(settings, inner, TRIE_NODES)
    budget = settings.cache_budget
    beyond = 0 if small else budget
    return AdaptiveDrafter(levels, trees=trie, chains=levels, most=settings.gamma2, reach=budget, beyond=beyond)


def _long(
    build: Callable[[LongContextConfig], Drafter],
    sparse: Callable[[LongContextConfig], CacheFactory] | None = None,
    small: bool = False,
) -> Recipe:
    """For long contexts: drafts at most ``gamma2`` tokens, and if the settings say so only as many as pay."""

    def paced(settings: LongContextConfig) -> Drafter:
        chains = build(settings)
        if not settings.paced:
            return chains
        reach = settings.window if sparse is None else settings.cache_budget
        alone = isinstance(chains, ModelDrafter) and not small
        return AdaptiveDrafter(
            chains, chains=chains, most=settings.gamma2, reach=reach, weight=1.0 if alone else HELPED
        )

    return Recipe(paced, small, sparse)


def _self_drafting(sparse: Callable[[LongContextConfig], CacheFactory]) -> Recipe:
    """The target alone, over this cache."""
    return _long(lambda s: ModelDrafter(sparse(s), s.gamma2), sparse)


def _trie(form: Form) -> Recipe:
    return Recipe(lambda s: TrieDrafter(TrieConfig(form=form)))


RECIPES: dict[str, Recipe] = {
    "none": Recipe(lambda s: NoDrafter()),
    "lookup": Recipe(lambda s: LookupDrafter()),
    "jacobi": Recipe(lambda s: JacobiDrafter()),
    "trie": Recipe(lambda s: TrieDrafter()),
    "trie-hierarchical": _trie("hierarchical"),
    "trie-single": _trie("single"),
    "trie-parallel": _trie("parallel"),
    "auto": Recipe(_auto, sparse=sparse_cache),
    "triforce": _long(lambda s: _triforce(s, _small(s, s.gamma1), s.gamma1), sparse_cache, small=True),
    "triforce-trie": _long(lambda s: _triforce(s, TrieDrafter(), TRIE_NODES), sparse_cache),
    "triforce-auto": _long(
        lambda s: _triforce(s, MergedDrafter(TrieDrafter(), _small(s, s.gamma1), s.gamma1), TRIE_NODES),
        sparse_cache,
        small=True,
    ),
    "retrieval": _self_drafting(_retrieval),
    "low-rank": _self_drafting(_low_rank),
    "streaming": _long(lambda s: _small(s, s.gamma2), small=True),
    "streaming-hierarchy": _long(
        lambda s: HierarchyDrafter(_small(s, s.gamma1), _self_streaming(s), s.gamma1, s.gamma2),
        _self_streaming,
        small=True,
    ),
    "streaming-self": _self_drafting(_self_streaming),
    "h2o": _self_drafting(_heavy_hitter),
    "topk": _self_drafting(_topk),
}
"""``trie`` merges all it knows by probability; the other tries are the Lookahead paper's forms; ``none`` is plain.

For long contexts: ``triforce`` is TriForce's hierarchy, ``triforce-trie`` has a trie in the small model's place, and
``triforce-auto`` both; ``low-rank`` is the target alone over their middle cache. The paper's baselines: ``retrieval``
is TriForce without hierarchy, ``streaming`` the naive policy (the small model alone), ``streaming-hierarchy`` has a
streaming cache in the middle; ``streaming-self``, ``h2o`` and ``topk`` let the target draft over that cache alone.
"""


def trie_of(drafter: Drafter) -> Trie:
    """The index that a drafter learns in.

    Raises:
        ValueError: if it has none.
    """
    if isinstance(drafter, TrieDrafter):
        return drafter.trie
    if isinstance(drafter, MergedDrafter):
        return trie_of(drafter.cheap)
    if isinstance(drafter, OuterDrafter):
        return trie_of(drafter.inner)
    raise ValueError(f"{type(drafter).__name__} has no trie")


def buildable(settings: LongContextConfig) -> list[str]:
    """Names of the drafters that these settings suffice for, without ``none``."""
    have = settings.draft_model is not None
    return [name for name, recipe in RECIPES.items() if name != "none" and (have or not recipe.small)]


def check_drafter(name: str) -> None:
    """Refuse an unknown name.

    Raises:
        ValueError: listing the known ones.
    """
    if name not in RECIPES:
        raise ValueError(f"drafter is {name!r}; known are {', '.join(RECIPES)}")


def build_drafter(name: str, settings: LongContextConfig | None = None) -> Drafter:
    """A drafter of this name.

    Raises:
        ValueError: for an unknown name, listing the known ones, or settings that lack what it needs.
    """
    check_drafter(name)
    return RECIPES[name].build(settings or LongContextConfig())
