"""From a name, as the command line takes it, to a freshly built drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.core.long_context import MTP, LongContextConfig
from forerun.drafting.adaptive import AdaptiveDrafter
from forerun.drafting.drafter import Drafter, NoDrafter, OuterDrafter
from forerun.drafting.hierarchy import HierarchyDrafter
from forerun.drafting.lookup import LookupDrafter
from forerun.drafting.merged import MergedDrafter
from forerun.drafting.model_drafter import ModelDrafter
from forerun.drafting.trie_drafter import TrieDrafter
from forerun.kv.cache import ROLLBACK_TOKENS, Cache
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import LowRankCache, LowRankConfig
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.kv.streaming import Rotation, StreamingCache
from forerun.models.forward import gate
from forerun.models.forward.level import UNLIMITED, CacheFactory
from forerun.models.forward.scorer import Scorer, is_sharded
from forerun.trie.trie import Trie

if TYPE_CHECKING:
    from forerun.models.heads.head import Head

TRIE_NODES = 16
"""Maximum size of a trie's tree that the target verifies over its sparse cache."""

CONFIDENT_NODES = 4
"""Accepted nodes expected of a trie's tree from which on a head is not asked: as many as a good head's tree gives."""

HELPED = 0.1
"""First guess of what it costs to draft a token over a sparse cache with the help of a small model or a trie; a pass of
the target costs 1. It is low, so that drafting is tried, and then measured. A small model alone is measured at load."""


SCANNED = 0.1
"""Share of a cached token that choosing from short keys reads: 24 bytes where the key and the value of a head take 256
in bfloat16 and 512 in float32. SmolLM2's drafting pass behind 16,000 tokens takes 0.63 of a plain one, as is guessed
with it; without, 0.58 is. Halved and doubled, the guess is 0.60 and 0.67."""


@dataclass(frozen=True)
class Recipe:
    """How a drafter is built.

    Attributes:
        build: from settings, each time anew.
        small: whether it needs a small model, ``LongContextConfig.draft_model``.
        sparse: from settings, the sparse cache over which the target drafts, if it does.
    """

    build: Callable[[LongContextConfig], Drafter]
    small: bool = False
    sparse: Callable[[LongContextConfig], CacheFactory] | None = None


def head_of(settings: LongContextConfig) -> Head | None:
    """The trained head among the settings: an object, the folder of one, or ``mtp``.

    Raises:
        ValueError: if the folder holds none.
    """
    given = settings.draft_model
    if not _is_head(given):
        return None
    from forerun.models.heads.loading import load_head

    return load_head(given) if isinstance(given, str | Path) else given


def _is_head(given: Any) -> bool:
    """Whether a ``draft_model`` is a trained head, or names one. Few users have one; theirs alone import its code."""
    if given is None:
        return False
    from forerun.models.heads.head import Head

    return isinstance(given, str | Path | Head)


def _head_alone(settings: LongContextConfig) -> Drafter:
    head = head_of(settings)
    if head is None:
        raise ValueError("this drafter needs a trained head, draft_model, and there is none")
    return _head_drafter(head)


def _head_drafter(head: Head) -> Drafter:
    from forerun.drafting.head_drafter import HeadDrafter

    return HeadDrafter(head)


def small_model(settings: LongContextConfig) -> Scorer:
    """The small model.

    Raises:
        ValueError: if there is none.
    """
    if settings.draft_model is None:
        raise ValueError("this drafter needs a small model, draft_model, and there is none; triforce-trie needs none")
    if _is_head(settings.draft_model):
        raise ValueError(f"draft_model is {settings.draft_model!r}, a head; this drafter needs a small model, loaded")
    if is_sharded(settings.draft_model):
        raise ValueError("draft_model lies in several processes; load it whole, as rank 0 alone drafts")
    scorer = gate.admit(settings.draft_model)
    if scorer.recurrent:
        raise ValueError(
            "draft_model has recurrent layers, whose states a streaming cache cannot keep; give another one"
        )
    return scorer


def small_drafter(settings: LongContextConfig, gamma: int) -> ModelDrafter:
    """The small model over the first and last tokens, with chains of ``gamma`` tokens."""
    return ModelDrafter(small_cache(settings), gamma, small_model(settings))


def small_cache(settings: LongContextConfig) -> CacheFactory:
    """The small model's cache: StreamingLLM's, of ``LongContextConfig.window`` tokens."""
    return streaming_cache(settings, settings.window)


def rollback_tokens(settings: LongContextConfig) -> int:
    """Tokens that a level's cache must be able to take back: those that both levels draft in a step."""
    return max(ROLLBACK_TOKENS, settings.gamma1 + settings.gamma2)


def streaming_cache(settings: LongContextConfig, window: int) -> CacheFactory:
    """StreamingLLM's cache: ``LongContextConfig.sinks`` first tokens, and the last ``window``."""
    rotations: dict[Scorer, Rotation | None] = {}

    def make(scorer: Scorer, source: FullCache) -> StreamingCache:
        if scorer not in rotations:
            rotations[scorer] = scorer.rotation()
        return StreamingCache(window, settings.sinks, rollback_tokens(settings), rotations[scorer])

    return make


def _retrieval(settings: LongContextConfig) -> CacheFactory:
    config = RetrievalConfig(settings.cache_budget, settings.chunk, refresh=settings.refresh)
    return lambda scorer, source: RetrievalCache(source, config)


def _low_rank(settings: LongContextConfig) -> CacheFactory:
    config = LowRankConfig(settings.cache_budget)
    return lambda scorer, source: LowRankCache(source, config)


SPARSE: dict[str, Callable[[LongContextConfig], CacheFactory]] = {
    "retrieval": _retrieval,
    "low-rank": _low_rank,
}
"""The target's sparse caches, of ``LongContextConfig.cache_budget`` tokens."""


def sparse_cache(settings: LongContextConfig) -> CacheFactory:
    """The middle level's cache: the one that is set, or the faster one on the model's device."""
    makers = {name: make(settings) for name, make in SPARSE.items()}

    def made(scorer: Scorer, source: FullCache) -> Cache:
        by_device = "retrieval" if scorer.device.type == "cuda" else "low-rank"
        return makers[settings.sparse or by_device](scorer, source)

    return made


def reading(most: int, scanned: float = 0.0) -> Callable[[int], int]:
    """How many of a row's cached tokens a pass reads: at most ``most``, and a share of the others to choose these."""
    return lambda cached: min(cached, most) + int(scanned * max(cached - most, 0))


def _triforce(settings: LongContextConfig, inner: Drafter, nodes: int, beyond: int = 0) -> Drafter:
    reads = reading(settings.cache_budget, SCANNED)
    return HierarchyDrafter(inner, sparse_cache(settings), nodes, settings.gamma2, beyond=beyond, reads=reads)


def _auto(settings: LongContextConfig) -> Drafter:
    """All sources: a trie, a trained head, and the target over a sparse cache, for which these or a small model draft.

    Without a small model, the sparse cache is of use beyond its own size only.
    """
    trie, head, budget = TrieDrafter(), head_of(settings), settings.cache_budget
    small = settings.draft_model is not None and head is None
    trees: Drafter = trie if head is None else MergedDrafter(trie, _head_drafter(head), CONFIDENT_NODES)
    inner = MergedDrafter(trie, small_drafter(settings, settings.gamma1), settings.gamma1) if small else trees
    beyond = 0 if small else budget
    levels = _triforce(settings, inner, TRIE_NODES, beyond)
    return AdaptiveDrafter(
        levels,
        trees=trees,
        chains=levels,
        max_length=settings.gamma2,
        reads=reading(budget, SCANNED),
        beyond=beyond,
        window=settings.sinks + settings.window,
        alone=budget,
    )


def long_context(
    build: Callable[[LongContextConfig], Drafter],
    sparse: Callable[[LongContextConfig], CacheFactory] | None = None,
    small: bool = False,
) -> Recipe:
    """For long contexts: drafts at most ``gamma2`` tokens, and if the settings say so only as many as pay."""

    def paced(settings: LongContextConfig) -> Drafter:
        chains = build(settings)
        if not settings.paced:
            return chains
        reads = reading(settings.window if sparse is None else settings.cache_budget)
        alone = isinstance(chains, ModelDrafter) and not small
        return AdaptiveDrafter(
            chains,
            chains=chains,
            max_length=settings.gamma2,
            reads=reads,
            weight=1.0 if alone else HELPED,
            window=settings.sinks + settings.window,
            alone=UNLIMITED if sparse is None else settings.cache_budget,
        )

    return Recipe(paced, small, sparse)


def self_drafting(sparse: Callable[[LongContextConfig], CacheFactory]) -> Recipe:
    """The target alone, over this cache."""
    return long_context(lambda s: ModelDrafter(sparse(s), s.gamma2), sparse)


RECIPES: dict[str, Recipe] = {
    "none": Recipe(lambda s: NoDrafter()),
    "lookup": Recipe(lambda s: LookupDrafter()),
    "trie": Recipe(lambda s: TrieDrafter()),
    "auto": Recipe(_auto, sparse=sparse_cache),
    "triforce": long_context(lambda s: _triforce(s, small_drafter(s, s.gamma1), s.gamma1), sparse_cache, small=True),
    "triforce-trie": long_context(lambda s: _triforce(s, TrieDrafter(), TRIE_NODES), sparse_cache),
    "triforce-auto": long_context(
        lambda s: _triforce(s, MergedDrafter(TrieDrafter(), small_drafter(s, s.gamma1), s.gamma1), TRIE_NODES),
        sparse_cache,
        small=True,
    ),
    "retrieval": self_drafting(_retrieval),
    "low-rank": self_drafting(_low_rank),
    "streaming": long_context(lambda s: small_drafter(s, s.gamma2), small=True),
}
"""``trie`` merges all it knows by probability; ``none`` is plain.

For long contexts: ``triforce`` is TriForce's hierarchy, ``triforce-trie`` has a trie in the small model's place, and
``triforce-auto`` both; ``low-rank`` is the target alone over their middle cache. From the paper: ``retrieval`` is
TriForce without hierarchy, ``streaming`` the small model alone.
"""
HEAD_RECIPES: dict[str, Recipe] = {
    "head": Recipe(_head_alone),
    "mtp": Recipe(lambda s: _head_alone(replace(s, draft_model=MTP))),
}
"""Trained heads alone: ``head`` is that of the folder ``LongContextConfig.draft_model``, of the kind that it says;
``mtp`` are those in the target's own checkpoint.
"""
DRAFTERS = RECIPES | HEAD_RECIPES


def trie_of(drafter: Drafter) -> Trie:
    """The index that a drafter learns in.

    Raises:
        ValueError: if it has none.
    """
    if isinstance(drafter, TrieDrafter):
        return drafter.trie
    if isinstance(drafter, OuterDrafter):
        return trie_of(drafter.inner)
    raise ValueError(f"{type(drafter).__name__} has no trie")


def buildable(settings: LongContextConfig, recipes: Mapping[str, Recipe] = RECIPES) -> list[str]:
    """Names of the drafters that these settings suffice for, without ``none``."""
    head = _is_head(settings.draft_model)
    small = settings.draft_model is not None and not head
    names = [name for name, recipe in recipes.items() if name != "none" and (small or not recipe.small)]
    return [*names, "head"] if head else names


def check_drafter(name: str, recipes: Mapping[str, Recipe] = DRAFTERS) -> None:
    """Refuse an unknown name.

    Raises:
        ValueError: listing the known ones.
    """
    if name not in recipes:
        raise ValueError(f"drafter is {name!r}; known are {', '.join(recipes)}")


def build_drafter(
    name: str, settings: LongContextConfig | None = None, recipes: Mapping[str, Recipe] = DRAFTERS
) -> Drafter:
    """A drafter of this name.

    Raises:
        ValueError: for an unknown name, listing the known ones, or settings that lack what it needs.
    """
    check_drafter(name, recipes)
    return recipes[name].build(settings or LongContextConfig())
