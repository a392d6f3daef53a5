"""Two drafters in one tree: a model or a head where a trie knows nothing, a trie where it knows much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer

from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter, OuterDrafter, trees_of
from forerun.kv.cache import Cache
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer

TINY = 1e-12


class MergedDrafter(OuterDrafter):
    """Asks a cheap drafter first, and a costly one for rows where the first is not confident.

    Whether the costly one is worth its time depends on what its level's pass takes, which ``PassContext.deepens``
    knows. Where the context does not say, it is asked.

    Args:
        cheap: estimates the probabilities of its nodes, as a trie does.
        costly: a small model, or a trained head.
        confident: accepted nodes expected of the cheap draft from which on the costly one is not asked.
    """

    def __init__(self, cheap: Drafter, costly: Drafter, confident: float) -> None:
        super().__init__(cheap)
        self.costly, self.confident = costly, confident

    @property
    def best_tokens(self) -> int:  # type: ignore[override]
        """The larger number of both."""
        return max(self.inner.best_tokens, self.costly.best_tokens)

    @property
    def states(self) -> tuple[int, ...]:  # type: ignore[override]
        """What the costly drafter wants."""
        return self.costly.states

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        self.inner.bind(target, runtime)
        self.costly.bind(target, runtime)

    def spell(self, tokenizer: Tokenizer) -> None:
        self.inner.spell(tokenizer)
        self.costly.spell(tokenizer)

    def warm_up(self) -> None:
        self.inner.warm_up()
        self.costly.warm_up()

    @property
    def nbytes(self) -> int:
        """What both keep."""
        return self.inner.nbytes + self.costly.nbytes

    def needs(self, tokens: int) -> int:
        return self.inner.needs(tokens) + self.costly.needs(tokens)

    def begin(self, request: Request) -> None:
        self.inner.begin(request)
        self.costly.begin(request)

    def prefilled(self, request: Request, cache: Cache) -> None:
        self.inner.prefilled(request, cache)
        self.costly.prefilled(request, cache)

    def catch_up(self, request: Request, tokens: int) -> bool:
        return self.inner.catch_up(request, tokens) and self.costly.catch_up(request, tokens)

    @property
    def small_model(self) -> Scorer | None:  # type: ignore[override]
        """The costly drafter's, or one below the cheap one."""
        return self.costly.small_model or self.inner.small_model

    def known_suffixes(self, requests: Sequence[Request]) -> Sequence[int | None]:
        """Those of the cheap drafter; without one None, as the costly one may know what follows."""
        return [known or None for known in self.inner.known_suffixes(requests)]

    def propose(self, context: PassContext) -> list[DraftTree]:
        """Draft one tree for each row; the rows share the costly drafter's passes."""
        trees = trees_of(self.inner, context)
        unsure = [row for row, tree in enumerate(trees) if tree.expected < self.confident]
        if context.deepens is not None:
            unsure = [row for row in unsure if context.deepens(context.rows[row], trees[row])]
        if unsure:
            for row, tree in zip(unsure, trees_of(self.costly, context.of(unsure)), strict=True):
                trees[row] = merged_estimates(tree, trees[row], context.budgets[row])
        return trees

    def record_states(self, request: Request, start: int, states: torch.Tensor) -> None:
        self.costly.record_states(request, start, states)

    def observe(self, request: Request, outcome: Outcome) -> None:
        self.inner.observe(request, outcome)
        self.costly.observe(request, outcome)

    def finish(self, request: Request) -> None:
        self.inner.finish(request)
        self.costly.finish(request)


def merged_estimates(first: DraftTree, second: DraftTree, budget: int) -> DraftTree:
    """The likeliest nodes of two trees, of which each has the greater estimate given its parent.

    Where both estimate a node, the one that is surer is more often right: a trie where a text repeats what was said, a
    head elsewhere. A tree with ``q`` is worth more alone, and one without estimates comes first.
    """
    if first.q is not None or not len(second):
        return first
    if not len(first):
        return second
    if first.probability is None or second.probability is None:
        return first.merged(second, budget)
    tokens, parents, given, origins = list[int](), list[int](), list[float](), list[int]()
    known: dict[tuple[int, int], int] = {}
    for tree, stated in ((first, first.probability), (second, second.probability)):
        index = {ROOT: ROOT}
        shares = (stated / np.maximum(np.append(stated, 1.0)[tree.parents], TINY)).tolist()
        for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            place = known.setdefault((index[parent], token), len(tokens))
            index[node] = place
            if place == len(tokens):
                tokens.append(token)
                parents.append(index[parent])
                given.append(0.0)
                origins.append(0)
            if shares[node] > given[place]:
                given[place], origins[place] = min(shares[node], 1.0), int(tree.sources[node])
    chances: list[float] = []
    for parent, share in zip(parents, given, strict=True):
        chances.append(share * (1.0 if parent == ROOT else chances[parent]))
    keep = np.zeros(len(tokens), np.bool_)
    keep[np.argsort(-np.array(chances), kind="stable")[:budget]] = True
    whole = DraftTree(
        np.array(tokens), np.array(parents), probability=np.array(chances), origins=np.array(origins, np.int8)
    )
    return whole.select(keep)
