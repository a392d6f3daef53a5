"""From a name, as the command line takes it, to a freshly built drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from forerun.caches.full import FullCache
from forerun.caches.heavy_hitter import HeavyHitterCache
from forerun.caches.retrieval import Policy, RetrievalCache, RetrievalConfig
from forerun.caches.streaming import StreamingCache
from forerun.caches.topk import TopKCache
from forerun.drafters.base import Drafter, NoDrafter
from forerun.drafters.hierarchy import HierarchyDrafter
from forerun.drafters.jacobi import JacobiDrafter
from forerun.drafters.lookup import LookupDrafter
from forerun.drafters.merged import MergedDrafter
from forerun.drafters.model import ModelDrafter
from forerun.drafters.trie import TrieDrafter
from forerun.model import gate
from forerun.model.level import CacheFactory
from forerun.model.scorer import Scorer
from forerun.trie import TrieConfig


@dataclass(frozen=True)
class Settings:
    """What the drafters for long contexts are built with; the others take none of it.

    Attributes:
        draft_model: the small model of ``small``, ``streaming``, ``triforce`` and ``triforce-auto``.
        gamma1: tokens that the innermost drafter proposes at a time.
        gamma2: tokens that the target verifies at a time.
        cache_budget: tokens held by a sparse cache of the target, for each layer and KV head.
        chunk, refresh: of the retrieval cache; see ``RetrievalConfig``.
        sinks, window: first and last tokens that the small model's streaming cache holds.

    Raises:
        ValueError: for a value out of range.
    """

    draft_model: PreTrainedModel | None = None
    gamma1: int = 4
    gamma2: int = 12
    cache_budget: int = 4096
    chunk: int = 8
    refresh: Policy = "stride"
    sinks: int = 4
    window: int = 252

    def __post_init__(self) -> None:
        for name in ("gamma1", "gamma2", "cache_budget", "chunk", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        self.retrieval_config()

    def retrieval_config(self) -> RetrievalConfig:
        """Of the target's sparse cache."""
        return RetrievalConfig(self.cache_budget, self.chunk, refresh=self.refresh)

    def retrieval(self, scorer: Scorer, source: FullCache) -> RetrievalCache:
        """A factory of retrieval caches."""
        return RetrievalCache(source, self.retrieval_config())

    def streaming(self, scorer: Scorer, source: FullCache) -> StreamingCache:
        """A factory of the small model's streaming caches."""
        return StreamingCache(self.sinks, self.window, rotation=scorer.rotation)

    def budgeted(self, kind: str) -> CacheFactory:
        """A factory of the target's other sparse caches."""
        budget = self.cache_budget
        return {
            "streaming": lambda scorer, source: StreamingCache(
                self.sinks, max(1, budget - self.sinks), rotation=scorer.rotation
            ),
            "heavy_hitter": lambda scorer, source: HeavyHitterCache(budget),
            "topk": lambda scorer, source: TopKCache(source, budget),
        }[kind]

    def small(self) -> Scorer:
        """The small model.

        Raises:
            ValueError: if there is none.
            UnsupportedModelError: if it is of an architecture that is not supported.
        """
        if self.draft_model is None:
            raise ValueError("this drafter needs a small model: give draft_model; 'triforce-trie' needs none")
        gate.check(self.draft_model)
        return Scorer(self.draft_model)


def _small(settings: Settings) -> ModelDrafter:
    return ModelDrafter(settings.streaming, settings.gamma1, settings.small())


def _hierarchy(settings: Settings, inner: Drafter, nodes: int) -> Drafter:
    return HierarchyDrafter(inner, settings.retrieval, nodes, settings.gamma2)


RECIPES: dict[str, Callable[[Settings], Drafter]] = {
    "none": lambda s: NoDrafter(),
    "lookup": lambda s: LookupDrafter(),
    "jacobi": lambda s: JacobiDrafter(),
    "trie": lambda s: TrieDrafter(),
    "trie-hierarchical": lambda s: TrieDrafter(TrieConfig(form="hierarchical")),
    "trie-single": lambda s: TrieDrafter(TrieConfig(form="single")),
    "trie-parallel": lambda s: TrieDrafter(TrieConfig(form="parallel")),
    "streaming": lambda s: ModelDrafter(s.streaming, s.gamma2, s.small()),
    "retrieval": lambda s: ModelDrafter(s.retrieval, s.gamma2),
    "streaming-self": lambda s: ModelDrafter(s.budgeted("streaming"), s.gamma2),
    "h2o": lambda s: ModelDrafter(s.budgeted("heavy_hitter"), s.gamma2),
    "topk": lambda s: ModelDrafter(s.budgeted("topk"), s.gamma2),
    "streaming-hierarchy": lambda s: HierarchyDrafter(_small(s), s.budgeted("streaming"), s.gamma1, s.gamma2),
    "triforce": lambda s: _hierarchy(s, _small(s), s.gamma1),
    "triforce-trie": lambda s: _hierarchy(s, TrieDrafter(), 4 * s.gamma1),
    "triforce-auto": lambda s: _hierarchy(s, MergedDrafter(TrieDrafter(), _small(s), s.gamma1), 4 * s.gamma1),
}
"""``trie`` merges all it knows by probability; the other tries are the Lookahead paper's forms; ``none`` drafts nothing.

For long contexts (TriForce): ``triforce`` is the paper's hierarchy, ``triforce-trie`` has a trie in the small model's
place, ``triforce-auto`` both. Its baselines: ``streaming`` is the naive policy (the small model alone), ``retrieval``
TriForce without hierarchy, ``streaming-hierarchy`` with a streaming cache in the retrieval cache's place;
``streaming-self``, ``h2o`` and ``topk`` draft with the target over that cache alone.
"""


def build_drafter(name: str, settings: Settings | None = None) -> Drafter:
    """A drafter of this name.

    Raises:
        ValueError: for an unknown name, listing the known ones, or settings that lack what it needs.
    """
    if name not in RECIPES:
        raise ValueError(f"drafter is {name!r}; known are {', '.join(RECIPES)}")
    return RECIPES[name](settings or Settings())
