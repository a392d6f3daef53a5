"""Two drafters in one tree: a model where a trie knows nothing, a trie where it knows much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from forerun.caches.base import Cache
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafters.base import Drafter
from forerun.model.scorer import Scorer


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

    def bind(self, target: Scorer) -> None:
        """See ``Drafter.bind``."""
        self.cheap.bind(target)
        self.costly.bind(target)

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
        for row, tree in zip(unsure, self.costly.propose_batch([requests[row] for row in unsure], budget), strict=True):
            # under rejection sampling a tree without q would be worth less than the chain alone
            merge = len(tree) and tree.q is None
            trees[row] = tree.merged(trees[row], budget) if merge else (tree if len(tree) else trees[row])
        return trees

    def observe(self, request: Request, outcome: Outcome) -> None:
        """See ``Drafter.observe``."""
        self.cheap.observe(request, outcome)
        self.costly.observe(request, outcome)

    def finish(self, request: Request) -> None:
        """See ``Drafter.finish``."""
        self.cheap.finish(request)
        self.costly.finish(request)


def _expected(tree: DraftTree) -> float:
    """Nodes that the drafter expects to be accepted."""
    return 0.0 if tree.probability is None else float(tree.probability.sum())
