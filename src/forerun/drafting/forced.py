"""What a grammar forces comes first: a chain of tokens that are certain, and another drafter's tree under its end.

Where a row's constraint allows one token only, the model's opinion does not count, so the chain is drafted for nothing
and accepted whole. The inner drafter is asked what follows it, as if these tokens were part of the text already. Its
outcome tells only of its own tree. To all that weighs costs inside, they are tokens that the pass reads anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome, Verdict
from forerun.drafting.drafter import Drafter, OuterDrafter


class ForcedDrafter(OuterDrafter):
    """Drafts what constraints force, and what an inner drafter makes of the rest.

    Rows without a constraint are the inner drafter's alone.

    Args:
        inner: drafts what may follow.
    """

    sized = True

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self._chains: dict[int, int] = {}
        """Tokens of each request's chain in the step under way."""

    def propose_batch(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """One tree for each row. Chains, of ``budget`` tokens at most, come on top of the inner drafter's budget: they
        take places in the cache that the text takes in any case."""
        chains = [request.forced(min(request.allowed(budget), request.max_draft_depth)) for request in requests]
        self._chains |= {request.id: len(chain) for request, chain in zip(requests, chains, strict=True) if chain}
        texts = [_extended(request, chain) for request, chain in zip(requests, chains, strict=True)]
        unended = [row for row, text in enumerate(texts) if text.finish_reason is None]
        trees = [DraftTree.empty()] * len(requests)
        if unended:
            self.inner.beside = self.beside
            proposed = self.inner.propose_batch([texts[row] for row in unended], budget)
            for row, tree in zip(unended, proposed, strict=True):
                trees[row] = tree
        return [tree.under(chain) for tree, chain in zip(trees, chains, strict=True)]

    def observe(self, request: Request, outcome: Outcome) -> None:
        """Tell the inner drafter what became of its own tree."""
        super().observe(request, _behind(outcome, self._chains.pop(request.id, 0)))

    def finish(self, request: Request) -> None:
        """See ``Drafter.finish``."""
        self._chains.pop(request.id, None)
        super().finish(request)


def _extended(request: Request, chain: Sequence[int]) -> Request:
    """The request, or a fork of it with a chain behind its text."""
    if not chain:
        return request
    twin = request.fork()
    twin.stats = request.stats
    twin.unread = request.unread + len(chain)
    for token in chain:
        twin.append(token)
    return twin


def _behind(outcome: Outcome, chain: int) -> Outcome:
    """What became of the tree under a chain of so many nodes."""
    if not chain:
        return outcome
    verdict = outcome.verdict
    path = [node - chain for node in verdict.path[chain:]]
    return Outcome(outcome.tree.behind(chain), Verdict(path, verdict.tokens[chain:]), outcome.logits[chain:])
