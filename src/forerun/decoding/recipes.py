"""Build a level with its sources from a drafter's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.core.long_context import MTP, QUANTISATIONS, LongContextConfig
from forerun.decoding.level import UNLIMITED, CacheFactory, Level
from forerun.decoding.planner import UNSURE, AdaptivePlanner, Planner
from forerun.decoding.source import Source
from forerun.decoding.sources.lookup import Lookup
from forerun.decoding.sources.trie_source import TrieSource
from forerun.kv.cache import ROLLBACK_TOKENS, Cache
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import LowRankCache, LowRankConfig
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.kv.streaming import Rotation, StreamingCache
from forerun.kv.tail import TailView
from forerun.models.forward import gate
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer, is_sharded
from forerun.policy.step_costs import DraftPasses
from forerun.trie.trie import Trie

if TYPE_CHECKING:
    from forerun.models.heads.head import Head

TRIE_NODES = 16
"""Maximum nodes of a trie's tree that the target verifies over its sparse cache."""

CONFIDENT_NODES = 4
"""Expected accepted nodes at which a trie's tree needs no head: a good head's tree yields as many."""

HELPED = 0.1
"""First guess of drafting a token over a sparse cache with a small model's or trie's help, in target passes: low, so
that drafting is tried and measured."""

COPY_ACCEPTED = 0.95
"""First guess of the acceptance rate of a copy of the target in fewer bits; it counts for two tokens. SmolLM2, from the
tokens per step of four prompts: 0.94 to 0.97 in q8_0, 0.6 to 0.9 in q4_0. With 0.8 and a
draft at two thirds of a plain pass, as there in bfloat16, ``ChainPreparation`` expects no gain, so it is not tried."""

SCANNED = 0.1
"""Share of a cached token that selection from short keys reads: 24 of 256 bytes per head in bfloat16 (512 in float32).
SmolLM2's drafting pass after 16,000 tokens costs 0.63 plain passes, as predicted (with half or double: 0.60, 0.67)."""


@dataclass(frozen=True)
class Setup:
    """What a level is built with; ``adaptive``: whether to score only what pays, rather than whole drafts."""

    settings: LongContextConfig
    target: Scorer
    runtime: Runtime
    adaptive: bool = True

    def planner(self, trees: Source | None = None, costly: Source | None = None, confident: float = UNSURE) -> Planner:
        """Make a planner over sources that propose trees."""
        if self.adaptive and trees is not None:
            return AdaptivePlanner(self.runtime, self.target, trees, costly, confident=confident)
        return Planner(trees, costly, confident=confident)

    def trie(self) -> TrieSource:
        """Make a new trie."""
        lists = partial(self.runtime.static_lists, self.target)
        return TrieSource(waits=self.runtime.waits_for_code, lists=lists)

    def over(self, planner: Planner) -> Level:
        """Make the engine's level."""
        return Level(self.target, planner, clock=self.runtime.clock)


@dataclass(frozen=True)
class Recipe:
    """How to build a level; ``small``: whether it needs a small model; ``sparse``: makes the target's sparse cache."""

    build: Callable[[Setup], Level]
    small: bool = False
    sparse: Callable[[LongContextConfig], CacheFactory] | None = None


def head_of(settings: LongContextConfig) -> Head | None:
    """Return the settings' trained head, if any: an object, from a folder (else ValueError), or ``mtp``."""
    given = settings.draft_model
    if not _is_head(given):
        return None
    from forerun.models.heads.loading import load_head

    return load_head(given) if isinstance(given, str | Path) else given


def _is_head(given: Any) -> bool:
    """Return whether a ``draft_model`` is or names a trained head. The code of heads is imported only then."""
    if given is None or given in QUANTISATIONS:
        return False
    from forerun.models.heads.head import Head

    return isinstance(given, str | Path | Head)


def _head_alone(setup: Setup, settings: LongContextConfig) -> Level:
    head = head_of(settings)
    if head is None:
        raise ValueError("this drafter needs a trained head; set draft_model")
    return setup.over(setup.planner(_head_source(head, setup)))


def _head_source(head: Head, setup: Setup) -> Source:
    from forerun.decoding.sources.head_source import HeadSource
    from forerun.models.heads.shortlist import frequent_tokens

    target = setup.target
    return HeadSource(
        head, target, frequent=lambda: frequent_tokens(setup.runtime.static_lists(target), target.vocabulary)
    )


def small_model(settings: LongContextConfig) -> Scorer:
    """Return the small model; raise ValueError if there is none or it cannot draft."""
    if settings.draft_model is None:
        raise ValueError("this drafter needs a small model; set draft_model, or use triforce-trie")
    if _is_head(settings.draft_model) or settings.draft_model in QUANTISATIONS:
        what = "a format of copies" if settings.draft_model in QUANTISATIONS else "a head"
        raise ValueError(
            f"draft_model is {settings.draft_model!r}, {what}; this drafter needs a small model that is loaded"
        )
    if is_sharded(settings.draft_model):
        raise ValueError("draft_model is sharded over several processes; load it unsharded, as only rank 0 drafts")
    scorer = gate.admit(settings.draft_model)
    if scorer.recurrent:
        raise ValueError(
            "draft_model has recurrent layers, whose states a streaming cache cannot keep; use another one"
        )
    return scorer


def small_level(setup: Setup, gamma: int) -> Level:
    """Make the level of the small model over a streaming cache, with draft length ``gamma``; raise ValueError for a
    vocabulary larger than the target's."""
    scorer, target = small_model(setup.settings), setup.target
    if scorer.vocabulary > target.vocabulary:
        raise ValueError(
            f"the draft model has {scorer.vocabulary} tokens and the target {target.vocabulary}: "
            "their tokenizers differ; the draft's vocabulary must equal the target's or its first part"
        )
    return Level(
        scorer, Planner(), cache=small_cache(setup.settings), chain=gamma, helper=True, clock=setup.runtime.clock
    )


def copy_level(setup: Setup, trie: TrieSource | None = None) -> Level:
    """Make the level of a copy of the target's weights in fewer bits, over the target's own keys and values: all of
    them, or in long sequences those that a sparse cache selects. It verifies drafts of the trie, if there is one."""
    from forerun.models.loading.stored_copy import stored_copy

    settings, target = setup.settings, setup.target
    kind = settings.draft_model or QUANTISATIONS[0]
    if kind not in QUANTISATIONS:
        raise ValueError(f"draft_model is {kind!r}; this drafter needs a format: {', '.join(QUANTISATIONS)}")
    copy = gate.admit(stored_copy(target.model, kind), kv_dtype=target.kv_dtype or target.model.dtype)
    target.keep_queries(settings.cache_budget)
    return Level(
        copy,
        Planner() if trie is None else replace(setup, target=copy).planner(trie),
        cache=copy_cache(settings),
        nodes=0 if trie is None else TRIE_NODES,
        chain=settings.gamma2,
        helper=True,
        reads=reading(settings.cache_budget, SCANNED),
        clock=setup.runtime.clock,
    )


def copy_cache(settings: LongContextConfig) -> CacheFactory:
    """Return the factory of a copy's cache: all of the target's, or a sparse one if that may have over the budget."""
    sparse = sparse_cache(settings)

    def made(scorer: Scorer, source: FullCache) -> Cache:
        return TailView(source) if source.capacity <= settings.cache_budget else sparse(scorer, source)

    return made


def small_cache(settings: LongContextConfig) -> CacheFactory:
    """Return the factory of the small model's cache, StreamingLLM's with ``LongContextConfig.window`` tokens."""
    return streaming_cache(settings, settings.window)


def rollback_tokens(settings: LongContextConfig) -> int:
    """Return how many tokens a level's cache must be able to roll back: what both levels draft in a step."""
    return max(ROLLBACK_TOKENS, settings.gamma1 + settings.gamma2)


def streaming_cache(settings: LongContextConfig, window: int) -> CacheFactory:
    """Return the factory of StreamingLLM's cache: ``LongContextConfig.sinks`` first tokens and the last ``window``."""
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
    """Return the middle level's cache factory: as configured, or the faster one on the model's device."""
    makers = {name: make(settings) for name, make in SPARSE.items()}

    def made(scorer: Scorer, source: FullCache) -> Cache:
        by_device = "retrieval" if scorer.device.type == "cuda" else "low-rank"
        return makers[settings.sparse or by_device](scorer, source)

    return made


def reading(most: int, scanned: float = 0.0) -> Callable[[int], int]:
    """Return how many cached tokens a pass reads: at most ``most``, and the share ``scanned`` of the others."""
    return lambda cached: min(cached, most) + int(scanned * max(cached - most, 0))


def middle_level(setup: Setup, planner: Planner, nodes: int, beyond: int = 0) -> Level:
    """Make TriForce's middle level: the target over a sparse cache, verifying trees of up to ``nodes`` nodes."""
    settings = setup.settings
    return Level(
        setup.target,
        planner,
        cache=sparse_cache(settings),
        nodes=nodes,
        chain=settings.gamma2,
        beyond=beyond,
        reads=reading(settings.cache_budget, SCANNED),
        clock=setup.runtime.clock,
    )


def _auto(setup: Setup) -> Level:
    """Make the level with all sources: a trie, a trained head, and the target over a sparse cache, drafted for by these
    or a small model. Without one, the sparse cache only helps beyond its own size."""
    settings, trie = setup.settings, setup.trie()
    head, budget = head_of(settings), settings.cache_budget
    if settings.draft_model in QUANTISATIONS:
        return _over_copy(setup, trie)
    costly = None if head is None else _head_source(head, setup)
    small = small_level(setup, settings.gamma1) if settings.draft_model is not None and head is None else None
    beyond = 0 if small else budget
    if small is None:
        inner = setup.planner(trie, costly, CONFIDENT_NODES)
    else:
        inner = setup.planner(trie, small, settings.gamma1)
    return setup.over(
        AdaptivePlanner(
            setup.runtime,
            setup.target,
            trie,
            costly,
            middle_level(setup, inner, TRIE_NODES, beyond),
            CONFIDENT_NODES,
            longest=settings.gamma2,
            beyond=beyond,
            draft=DraftPasses(reading(budget, SCANNED), window=settings.sinks + settings.window, alone=budget),
            small=None if small is None else small.model,
        )
    )


def _over_copy(setup: Setup, trie: TrieSource | None = None) -> Level:
    settings = setup.settings
    copy = copy_level(setup, trie)
    if trie is None and not settings.paced:
        return setup.over(Planner(chains=copy))
    passes = DraftPasses(window=settings.cache_budget, alone=UNLIMITED, prefills=False, accepted=COPY_ACCEPTED)
    planner = AdaptivePlanner(
        setup.runtime, setup.target, trie, chains=copy, longest=settings.gamma2, draft=passes, small=copy.model
    )
    return setup.over(planner)


def long_context(
    build: Callable[[Setup], Level],
    sparse: Callable[[LongContextConfig], CacheFactory] | None = None,
    small: bool = False,
) -> Recipe:
    """Make a recipe that drafts chains of at most ``gamma2`` tokens, or as many as pay if the settings say so."""

    def paced(setup: Setup) -> Level:
        settings, chains = setup.settings, build(setup)
        if not settings.paced:
            return setup.over(Planner(chains=chains))
        alone = not chains.planner.own and not small
        passes = DraftPasses(
            reading(settings.window if sparse is None else settings.cache_budget),
            1.0 if alone else HELPED,
            window=settings.sinks + settings.window,
            alone=UNLIMITED if sparse is None else settings.cache_budget,
        )
        helper = next((each.model for each in chains.walk() if isinstance(each, Level) and each.helper), None)
        planner = AdaptivePlanner(
            setup.runtime, setup.target, chains=chains, longest=settings.gamma2, draft=passes, small=helper
        )
        return setup.over(planner)

    return Recipe(paced, small, sparse)


def self_drafting(sparse: Callable[[LongContextConfig], CacheFactory]) -> Recipe:
    """Make the recipe of the target drafting alone over this cache."""
    return long_context(lambda setup: alone_over(setup, sparse(setup.settings)), sparse)


def alone_over(setup: Setup, cache: CacheFactory, gamma: int | None = None) -> Level:
    """Make the level of the target over a sparse cache, with draft length ``gamma``, by default ``gamma2``."""
    chain = setup.settings.gamma2 if gamma is None else gamma
    return Level(setup.target, Planner(), cache=cache, chain=chain, clock=setup.runtime.clock)


def _triforce(setup: Setup) -> Level:
    small = small_level(setup, setup.settings.gamma1)
    return middle_level(setup, Planner(chains=small), setup.settings.gamma1)


def _triforce_auto(setup: Setup) -> Level:
    gamma1 = setup.settings.gamma1
    return middle_level(setup, setup.planner(setup.trie(), small_level(setup, gamma1), gamma1), TRIE_NODES)


RECIPES: dict[str, Recipe] = {
    "none": Recipe(lambda setup: setup.over(Planner())),
    "lookup": Recipe(lambda setup: setup.over(setup.planner(Lookup()))),
    "trie": Recipe(lambda setup: setup.over(setup.planner(setup.trie()))),
    "auto": Recipe(_auto, sparse=sparse_cache),
    "triforce": long_context(_triforce, sparse_cache, small=True),
    "triforce-trie": long_context(
        lambda setup: middle_level(setup, setup.planner(setup.trie()), TRIE_NODES), sparse_cache
    ),
    "triforce-auto": long_context(_triforce_auto, sparse_cache, small=True),
    "retrieval": self_drafting(_retrieval),
    "low-rank": self_drafting(_low_rank),
    "streaming": long_context(lambda setup: small_level(setup, setup.settings.gamma2), small=True),
}
"""``none`` is plain decoding; ``trie`` merges all contexts by probability.

For long contexts: ``triforce`` is TriForce's hierarchy; ``triforce-trie`` has a trie in place of the small model,
``triforce-auto`` both; ``low-rank`` is the target alone over their middle cache. From the paper: ``retrieval`` is
TriForce without hierarchy, ``streaming`` the small model alone.
"""
COPY_RECIPES: dict[str, Recipe] = {"copy": Recipe(_over_copy)}
"""A copy of the target in fewer bits alone, by default ``q8_0``; ``auto`` uses one if ``draft_model`` is a format."""
HEAD_RECIPES: dict[str, Recipe] = {
    "head": Recipe(lambda setup: _head_alone(setup, setup.settings)),
    "mtp": Recipe(lambda setup: _head_alone(setup, replace(setup.settings, draft_model=MTP))),
}
"""Trained heads alone: from the folder ``LongContextConfig.draft_model``, or (``mtp``) from the target's checkpoint."""
DRAFTERS = RECIPES | HEAD_RECIPES | COPY_RECIPES


def trie_of(level: Level) -> Trie:
    """Return the trie of a level's sources; raise ValueError if there is none."""
    for source in level.planner.sources:
        if isinstance(source, TrieSource):
            return source.trie
    raise ValueError("this drafter keeps no earlier outputs: it has no trie")


def buildable(settings: LongContextConfig, recipes: Mapping[str, Recipe] = RECIPES) -> list[str]:
    """List the drafters that these settings suffice for, without ``none``."""
    head, copy = _is_head(settings.draft_model), settings.draft_model in QUANTISATIONS
    small = settings.draft_model is not None and not (head or copy)
    names = [name for name, recipe in recipes.items() if name != "none" and (small or not recipe.small)]
    return [*names, *["head"] * head, *["copy"] * copy]


def check_drafter(name: str, recipes: Mapping[str, Recipe] = DRAFTERS) -> None:
    """Raise ValueError for an unknown drafter, listing the known ones."""
    if name not in recipes:
        raise ValueError(f"drafter is {name!r}; known are {', '.join(recipes)}")


def build(name: str, setup: Setup, recipes: Mapping[str, Recipe] = DRAFTERS) -> Level:
    """Build the level of this drafter; raise ValueError for an unknown name, or settings that lack what it needs."""
    check_drafter(name, recipes)
    return recipes[name].build(setup)
