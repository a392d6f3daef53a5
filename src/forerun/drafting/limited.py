"""What a request allows of drafts: so many nodes, or none."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter, OuterDrafter
from forerun.kv.cache import Cache


class LimitedDrafter(OuterDrafter):
    """Keeps every request's budget. The drafter inside never hears of a request whose budget is 0.

    So a text without drafts costs what it costs without a drafter, and nothing is learned from it.

    Args:
        inner: the drafter of the engine, bound already.
    """

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.sized = inner.sized

    def begin(self, request: Request) -> None:
        """See ``Drafter.begin``."""
        if request.budget != 0:
            super().begin(request)

    def prefilled(self, request: Request, cache: Cache) -> None:
        """See ``Drafter.prefilled``."""
        if request.budget != 0:
            super().prefilled(request, cache)

    def catch_up(self, request: Request, tokens: int) -> bool:
        """See ``Drafter.catch_up``."""
        return request.budget == 0 or super().catch_up(request, tokens)

    def propose_batch(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """A tree for each row, cut to what its request allows. Rows without drafts are left out of what the inner
        drafter knows of the pass: they add one token each."""
        wanted = [request for request in requests if request.budget != 0]
        if not wanted:
            return [DraftTree.empty() for _ in requests]
        most = {request.id: request.allowed(budget) for request in wanted}
        self.inner.beside = self.beside
        trees = iter(self.inner.propose_batch(wanted, max(most.values())))
        return [
            next(trees).first(most[request.id]) if request.id in most else DraftTree.empty() for request in requests
        ]

    def observe(self, request: Request, outcome: Outcome) -> None:
        """See ``Drafter.observe``."""
        if request.budget != 0:
            super().observe(request, outcome)

    def finish(self, request: Request) -> None:
        """See ``Drafter.finish``."""
        if request.budget != 0:
            super().finish(request)
