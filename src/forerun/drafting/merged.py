"""Two drafters in one tree: a model or a head where a trie knows nothing, a trie where it knows much.

Whether the model is worth its passes depends on what drafts with it: for a level whose own pass takes a few
milliseconds, a small model's four passes can take longer than they save. So where the level reports its rounds, the
model is asked only while rounds with it give more tokens a second than rounds without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer

from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter, OuterDrafter
from forerun.kv.cache import Cache
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer
from forerun.policy.exploration_budget import EXPLORATION_SHARE

TRIAL_ROUNDS = 4
"""Minimum rounds of a trial. Its rate leaves out the first, in which a model reads what it has missed. In simulation,
halving or doubling this number or the next changes tokens a second by at most 6 %."""
TINY = 1e-12
ROUND_MEMORY = 0.9
"""Weight of earlier rounds: some ten count."""


class MergedDrafter(Drafter):
    """Asks a cheap drafter first, and a costly one for rows where the first is not confident.

    Args:
        cheap: estimates the probabilities of its nodes, as a trie does.
        costly: a model.
        confident: accepted nodes expected of the cheap draft from which on the costly one is not asked.
    """

    def __init__(self, cheap: Drafter, costly: Drafter, confident: float) -> None:
        self.cheap = cheap
        self.costly = costly
        self.confident = confident
        self._choice = CostlyDrafterChoice()

    @property
    def best_tokens(self) -> int:  # type: ignore[override]
        """The larger number of both."""
        return max(self.cheap.best_tokens, self.costly.best_tokens)

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        self.cheap.bind(target, runtime)
        self.costly.bind(target, runtime)

    def spell(self, tokenizer: Tokenizer) -> None:
        self.cheap.spell(tokenizer)
        self.costly.spell(tokenizer)

    def warm_up(self) -> None:
        self.cheap.warm_up()
        self.costly.warm_up()

    def warm(self, namespace: str, sequences: Iterable[Sequence[int]]) -> None:
        """Let the cheap drafter learn."""
        self.cheap.warm(namespace, sequences)

    @property
    def nbytes(self) -> int:
        """What both keep."""
        return self.cheap.nbytes + self.costly.nbytes

    def begin(self, request: Request) -> None:
        self.cheap.begin(request)
        self.costly.begin(request)

    def prefilled(self, request: Request, cache: Cache) -> None:
        self.cheap.prefilled(request, cache)
        self.costly.prefilled(request, cache)

    def needs(self, tokens: int) -> int:
        return self.cheap.needs(tokens) + self.costly.needs(tokens)

    def catch_up(self, request: Request, tokens: int) -> bool:
        return self.cheap.catch_up(request, tokens) and self.costly.catch_up(request, tokens)

    def known_suffix(self, request: Request) -> int | None:
        return self.cheap.known_suffix(request)

    def propose(self, context: PassContext) -> list[DraftTree]:
        """Draft one tree for each row; the rows share the costly drafter's passes."""
        trees = self.cheap.propose(context)
        unsure = [row for row, tree in enumerate(trees) if _expected(tree) < self.confident]
        self._choice.open = bool(unsure)
        if not self._choice.costly:
            return trees
        for row, tree in zip(unsure, self.costly.propose(context.of(unsure)), strict=True):
            # under rejection sampling a tree without q would be worth less than the chain alone
            merge = len(tree) and tree.q is None
            trees[row] = tree.merged(trees[row], context.budgets[row]) if merge else (tree if len(tree) else trees[row])
        return trees

    def record_round(self, tokens: int, seconds: float) -> None:
        """Learn whether rounds with the costly drafter give more tokens a second."""
        self._choice.record(tokens, seconds)

    def observe(self, request: Request, outcome: Outcome) -> None:
        self.cheap.observe(request, outcome)
        self.costly.observe(request, outcome)

    def finish(self, request: Request) -> None:
        self.cheap.finish(request)
        self.costly.finish(request)


class MergedTreesDrafter(OuterDrafter):
    """Two drafters' trees as one, in which each node has the better of two estimates, so that they have one price.

    Where both estimate a node, the one that is surer is more often right: a trie where a text repeats what was said, a
    head elsewhere. The costly one is asked only while that gives more tokens a second.

    Args:
        inner: receives all events but those of ``costly``; it contains ``cheap``.
        cheap: estimates the probabilities of its nodes, as a trie does.
        costly: a trained head, which does so too.
        confident: accepted nodes expected of the cheap draft from which on the costly one is not asked.
    """

    def __init__(self, inner: Drafter, cheap: Drafter, costly: Drafter, confident: float) -> None:
        super().__init__(inner)
        self.cheap, self.costly, self.confident = cheap, costly, confident
        self._choice, self._prepared = CostlyDrafterChoice(), set[int]()
        self._waiting, self._tokens, self._began = set[int](), 0, 0.0

    @property
    def states(self) -> tuple[int, ...]:  # type: ignore[override]
        """What the costly drafter wants."""
        return self.costly.states

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        self._clock = runtime.clock
        self.inner.bind(target, runtime)
        self.costly.bind(target, runtime)

    def warm_up(self) -> None:
        self.inner.warm_up()
        self.costly.warm_up()

    def needs(self, tokens: int) -> int:
        return self.inner.needs(tokens) + self.costly.needs(tokens)

    def begin(self, request: Request) -> None:
        self.inner.begin(request)
        self.costly.begin(request)

    def prefilled(self, request: Request, cache: Cache) -> None:
        self._prepared.add(request.id)
        self.inner.prefilled(request, cache)
        self.costly.prefilled(request, cache)

    def catch_up(self, request: Request, tokens: int) -> bool:
        """Let the cheap drafter read on, and all that ``inner`` contains once it was told of the prompt."""
        return (self.inner if request.id in self._prepared else self.cheap).catch_up(request, tokens)

    def known_suffix(self, request: Request) -> int | None:
        """That of the cheap drafter; without one None, as the head may know what follows."""
        return self.cheap.known_suffix(request) or None

    def propose(self, context: PassContext) -> list[DraftTree]:
        """Draft one tree for each row."""
        self._began, self._tokens, self._waiting = self._clock(), 0, {row.id for row in context.rows}
        self.extra_seconds = 0.0
        trees = self.cheap.propose(context)
        unsure = [row for row, tree in enumerate(trees) if _expected(tree) < self.confident]
        self._choice.open = bool(unsure) and context.decodes
        if not self._choice.costly or not unsure:
            return trees
        asked = self._clock()
        for row, tree in zip(unsure, self.costly.propose(context.of(unsure)), strict=True):
            trees[row] = merged_estimates(tree, trees[row], context.budgets[row])
        self.extra_seconds = self._clock() - asked
        return trees

    def record_states(self, request: Request, start: int, states: torch.Tensor) -> None:
        self.costly.record_states(request, start, states)

    def observe(self, request: Request, outcome: Outcome) -> None:
        self.inner.observe(request, outcome)
        self.costly.observe(request, outcome)
        if request.id in self._waiting:
            self._waiting.discard(request.id)
            self._tokens += len(outcome.verdict.tokens)
            if not self._waiting:
                self._choice.record(self._tokens, self._clock() - self._began)

    def finish(self, request: Request) -> None:
        self._prepared.discard(request.id)
        self._waiting.discard(request.id)
        self.inner.finish(request)
        self.costly.finish(request)


def merged_estimates(first: DraftTree, second: DraftTree, budget: int) -> DraftTree:
    """The likeliest nodes of two trees, of which each has the greater estimate given its parent.

    A tree with ``q`` is worth more alone, and one without estimates comes first.
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


class CostlyDrafterChoice:
    """Whether to ask the costly drafter, by tokens a second. The slower choice is tried again as soon as what it lost
    the last time is less than ``EXPLORATION_SHARE`` of the time since then."""

    def __init__(self) -> None:
        self.costly = True
        self.open = False
        """Whether the last proposal was a case for the costly drafter."""
        self._sums = {True: (0.0, 0.0), False: (0.0, 0.0)}  # tokens and seconds
        self._trial = {True: (0.0, 0.0), False: (0.0, 0.0)}  # the same, of all rounds when it was slower the last time
        self._rounds, self._tokens, self._seconds = 0, 0, 0.0  # since the choice changed

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a round."""
        if not self.open:
            return
        self._rounds, self._tokens, self._seconds = self._rounds + 1, self._tokens + tokens, self._seconds + seconds
        if self._rounds > 1:
            before = self._sums[self.costly]
            self._sums[self.costly] = ROUND_MEMORY * before[0] + tokens, ROUND_MEMORY * before[1] + seconds
        if self._rounds < TRIAL_ROUNDS:
            return
        rate = self._rate(self.costly)
        if rate <= self._rate(not self.costly):
            self._trial[self.costly] = self._tokens, self._seconds
        else:
            trial_tokens, trial_seconds = self._trial[not self.costly]
            if trial_seconds - trial_tokens / rate > EXPLORATION_SHARE * self._seconds:
                return
        self.costly = not self.costly
        self._rounds, self._tokens, self._seconds = 0, 0, 0.0

    def _rate(self, costly: bool) -> float:
        """Tokens a second; infinite for a choice that was not tried yet."""
        tokens, seconds = self._sums[costly]
        return tokens / seconds if seconds else float("inf")


def _expected(tree: DraftTree) -> float:
    """Nodes that the drafter expects to be accepted."""
    return 0.0 if tree.probability is None else float(tree.probability.sum())
