"""Two drafters in one tree: a model where a trie knows nothing, a trie where it knows much.

Whether the model is worth its passes depends on what drafts with it: for a level whose own pass takes a few
milliseconds, a small model's four passes can take longer than they save. So where the level says what its rounds gave,
the model is asked only while rounds with it give more tokens a second than rounds without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter
from forerun.kv.cache import Cache
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer
from forerun.policy.exploration_budget import SHARE

VISIT = 4
"""Rounds for which a way is tried, at least. The rate goes without the first, as a model then reads what it has missed.
In simulation, halving or doubling this number or the next changes tokens a second by 6 % at most."""
FADE = 0.9
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
        self._way = _Way()

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        self.cheap.bind(target, runtime)
        self.costly.bind(target, runtime)

    def spell(self, tokenizer: Tokenizer) -> None:
        """See ``Drafter.spell``."""
        self.cheap.spell(tokenizer)
        self.costly.spell(tokenizer)

    def warm_up(self) -> None:
        """See ``Drafter.warm_up``."""
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
        """See ``Drafter.begin``."""
        self.cheap.begin(request)
        self.costly.begin(request)

    def prefilled(self, request: Request, cache: Cache) -> None:
        """See ``Drafter.prefilled``."""
        self.cheap.prefilled(request, cache)
        self.costly.prefilled(request, cache)

    def needs(self, tokens: int) -> int:
        """See ``Drafter.needs``."""
        return self.cheap.needs(tokens) + self.costly.needs(tokens)

    def catch_up(self, request: Request, tokens: int) -> bool:
        """See ``Drafter.catch_up``."""
        return self.cheap.catch_up(request, tokens) and self.costly.catch_up(request, tokens)

    def propose(self, request: Request, budget: int) -> DraftTree:
        """One tree of both."""
        return self.propose_batch([request], budget)[0]

    def propose_batch(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """One tree for each row; the rows share the costly drafter's passes."""
        trees = self.cheap.propose_batch(requests, budget)
        unsure = [row for row, tree in enumerate(trees) if _expected(tree) < self.confident]
        self._way.open = bool(unsure)
        if not self._way.costly:
            return trees
        for row, tree in zip(unsure, self.costly.propose_batch([requests[row] for row in unsure], budget), strict=True):
            # under rejection sampling a tree without q would be worth less than the chain alone
            merge = len(tree) and tree.q is None
            trees[row] = tree.merged(trees[row], budget) if merge else (tree if len(tree) else trees[row])
        return trees

    def took(self, tokens: int, seconds: float) -> None:
        """See ``Drafter.took``: whether the costly drafter is asked next."""
        self._way.learn(tokens, seconds)

    def observe(self, request: Request, outcome: Outcome) -> None:
        """See ``Drafter.observe``."""
        self.cheap.observe(request, outcome)
        self.costly.observe(request, outcome)

    def finish(self, request: Request) -> None:
        """See ``Drafter.finish``."""
        self.cheap.finish(request)
        self.costly.finish(request)


class _Way:
    """Whether to ask the costly drafter: what gave more tokens a second. The slower way is tried again as soon as what
    that lost the last time is less than ``SHARE`` of the time since then."""

    def __init__(self) -> None:
        self.costly = True
        self.open = False
        """Whether the last proposal was a case for the costly drafter."""
        self._sums = {True: (0.0, 0.0), False: (0.0, 0.0)}  # tokens and seconds
        self._tried = {True: (0.0, 0.0), False: (0.0, 0.0)}  # the same, of all rounds when it was found slower last
        self._rounds, self._tokens, self._seconds = 0, 0, 0.0  # since the way changed

    def learn(self, tokens: int, seconds: float) -> None:
        """A round gave so many tokens in so long."""
        if not self.open:
            return
        self._rounds, self._tokens, self._seconds = self._rounds + 1, self._tokens + tokens, self._seconds + seconds
        if self._rounds > 1:
            before = self._sums[self.costly]
            self._sums[self.costly] = FADE * before[0] + tokens, FADE * before[1] + seconds
        if self._rounds < VISIT:
            return
        rate = self._rate(self.costly)
        if rate <= self._rate(not self.costly):
            self._tried[self.costly] = self._tokens, self._seconds
        else:
            tried, took = self._tried[not self.costly]
            if took - tried / rate > SHARE * self._seconds:
                return
        self.costly = not self.costly
        self._rounds, self._tokens, self._seconds = 0, 0, 0.0

    def _rate(self, costly: bool) -> float:
        """Tokens a second; without limit for a way that was not tried yet."""
        tokens, seconds = self._sums[costly]
        return tokens / seconds if seconds else float("inf")


def _expected(tree: DraftTree) -> float:
    """Nodes that the drafter expects to be accepted."""
    return 0.0 if tree.probability is None else float(tree.probability.sum())
