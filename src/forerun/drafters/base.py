"""The drafter's side of a step: propose a tree, then observe what became of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from tokenizers import Tokenizer

from forerun.caches.base import Cache
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.model.scorer import Scorer
from forerun.plan.costs import CostCurve


class Drafter(ABC):
    """Proposes what may come next. One drafter serves all rows of an engine, keyed by ``request.id``.

    The engine calls ``bind`` once; for every request ``begin``, ``prefilled``, and ``catch_up`` until nothing is left;
    then ``propose`` and ``observe`` in turn, and ``finish`` however it ends (an error and a cancellation included). A
    drafter can never change the output, only the speed.

    A drafter may serve as the inner level of a hierarchy. Then ``propose`` gets a fork of the request whose last tokens
    are on trial: they may be gone at the next call, and ``observe`` tells which of them came true.
    """

    sized: bool = False
    """Whether it knows how much to draft, so that nobody needs to cut its trees."""

    beside: int = 0
    """Tokens of prompts that share the next pass with the rows that are drafted for."""

    enough: Callable[[Request, float], bool] | None = None
    """Set by who paces this drafter: told how likely its model found each token of a chain, says where to end it. Who
    does not grow chains token by token need not ask."""

    def bind(self, target: Scorer) -> None:  # noqa: B027
        """An engine takes the drafter into service for its target.

        Raises:
            ValueError: if the drafter does not fit it.
        """

    def spell(self, tokenizer: Tokenizer) -> None:  # noqa: B027
        """What the tokens say, where that is known: a drafter may see the same word in different tokens."""

    def fit(self, costs: CostCurve) -> None:  # noqa: B027
        """What the target's passes cost, before the first request: a drafter may choose its sizes by it."""

    def begin(self, request: Request) -> None:  # noqa: B027
        """A request starts; ``request.prompt`` is known."""

    def prefilled(self, request: Request, cache: Cache) -> None:  # noqa: B027
        """The target has read the prompt but for its last block.

        Args:
            request: begun.
            cache: the target's own for this request, from now to its end; for reading only.
        """

    def catch_up(self, request: Request, tokens: int) -> bool:
        """Read on in a prompt, in a piece of about ``tokens`` tokens so that other rows do not wait long.

        Called after ``prefilled`` until there is nothing left to read; the request's first step comes then.

        Returns:
            Whether nothing is left.
        """
        return True

    @abstractmethod
    def propose(self, request: Request, budget: int) -> DraftTree:
        """A tree of at most ``budget`` nodes that may be accepted (probes come on top), at most
        ``request.max_draft_depth`` deep, to follow ``request.tokens``."""

    def propose_batch(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """One tree per row. Drafters that run a model override it to share the forward passes."""
        return [self.propose(request, budget) for request in requests]

    def observe(self, request: Request, outcome: Outcome) -> None:  # noqa: B027
        """A step was committed; ``request.tokens`` ends with ``outcome.verdict.tokens`` already."""

    def finish(self, request: Request) -> None:  # noqa: B027
        """The request ended: forget what was private to it."""

    def warm(self, namespace: str, sequences: Iterable[Sequence[int]]) -> None:
        """Learn from token ids as if they had been generated in ``namespace``.

        Raises:
            ValueError: for a drafter that keeps nothing from earlier texts.
        """
        raise ValueError(f"{type(self).__name__} keeps nothing from earlier texts and cannot be warmed")

    @property
    def nbytes(self) -> int:
        """Bytes kept from one request to the next."""
        return 0

    def needs(self, tokens: int) -> int:
        """Bytes that drafting for a request takes until its text has so many tokens, at most, with all levels' caches;
        they are freed when it ends. Known before the request begins."""
        return 0

    def warm_up(self) -> None:  # noqa: B027
        """Compile, or load, what drafting needs; an engine calls it once, so that no user's answer waits for it."""


class OuterDrafter(Drafter):
    """Passes everything on to an inner drafter, but for what a subclass does otherwise.

    Args:
        inner: the other drafter.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    def bind(self, target: Scorer) -> None:
        """See ``Drafter.bind``."""
        self.inner.bind(target)

    def spell(self, tokenizer: Tokenizer) -> None:
        """See ``Drafter.spell``."""
        self.inner.spell(tokenizer)

    def fit(self, costs: CostCurve) -> None:
        """See ``Drafter.fit``."""
        self.inner.fit(costs)

    def warm_up(self) -> None:
        """See ``Drafter.warm_up``."""
        self.inner.warm_up()

    def warm(self, namespace: str, sequences: Iterable[Sequence[int]]) -> None:
        """See ``Drafter.warm``."""
        self.inner.warm(namespace, sequences)

    @property
    def nbytes(self) -> int:
        """See ``Drafter.nbytes``."""
        return self.inner.nbytes

    def needs(self, tokens: int) -> int:
        """See ``Drafter.needs``."""
        return self.inner.needs(tokens)

    def begin(self, request: Request) -> None:
        """See ``Drafter.begin``."""
        self.inner.begin(request)

    def prefilled(self, request: Request, cache: Cache) -> None:
        """See ``Drafter.prefilled``."""
        self.inner.prefilled(request, cache)

    def catch_up(self, request: Request, tokens: int) -> bool:
        """See ``Drafter.catch_up``."""
        return self.inner.catch_up(request, tokens)

    def propose(self, request: Request, budget: int) -> DraftTree:
        """The tree that a batch of this row alone would get."""
        return self.propose_batch([request], budget)[0]

    def propose_batch(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """See ``Drafter.propose_batch``."""
        return self.inner.propose_batch(requests, budget)

    def observe(self, request: Request, outcome: Outcome) -> None:
        """See ``Drafter.observe``."""
        self.inner.observe(request, outcome)

    def finish(self, request: Request) -> None:
        """See ``Drafter.finish``."""
        self.inner.finish(request)


class NoDrafter(Drafter):
    """Plain autoregression, through the same engine."""

    sized = True

    def propose(self, request: Request, budget: int) -> DraftTree:
        """The empty tree."""
        return DraftTree.empty()
