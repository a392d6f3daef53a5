"""The drafter's side of a step: propose a tree, then observe its outcome."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from tokenizers import Tokenizer

from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.kv.cache import Cache
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer
from forerun.policy.cost_curve import CostCurve


class Drafter(ABC):
    """Proposes the next tokens. One drafter serves all rows of an engine, keyed by ``request.id``.

    The engine calls ``bind`` once; for every request ``begin``, ``prefilled``, and ``catch_up`` until nothing is left;
    then ``propose`` and ``observe`` in turn, and ``finish`` however it ends (an error and a cancellation included). A
    drafter can never change the output, only the speed.

    A drafter may serve as the inner level of a hierarchy. Then ``propose`` gets a fork of the request whose last tokens
    are on trial: they may be gone at the next call, and ``observe`` tells which of them were accepted.
    """

    sized: bool = False
    """Whether it decides itself how much to draft, so that its trees need no cutting."""

    weighs: bool = False
    """Whether it goes by the costs of the target's passes, and so wants ``fit``, though it is ``sized``."""

    beside: int = 0
    """Tokens of prompts that the next pass reads besides the rows that are drafted for."""

    enough: Callable[[Request, float], bool] | None = None
    """Set by the chooser. A drafter that grows chains token by token calls it with the request and the probability that
    its model gave to the last token; it returns whether the chain should end there."""

    def bind(self, target: Scorer, runtime: Runtime) -> None:  # noqa: B027
        """Called once, with the engine's target, its clock, and its way to measure what passes cost.

        Raises:
            ValueError: if the drafter does not fit it.
        """

    def spell(self, tokenizer: Tokenizer) -> None:  # noqa: B027
        """Called with the tokenizer, where there is one: a drafter may match words across different tokenizations."""

    def fit(self, costs: CostCurve) -> None:  # noqa: B027
        """Called before the first request, with the costs of the target's passes, by which it may choose its sizes."""

    def begin(self, request: Request) -> None:  # noqa: B027
        """A request starts; ``request.prompt`` is known."""

    def prefilled(self, request: Request, cache: Cache) -> None:  # noqa: B027
        """The target has read the prompt but for its last block.

        Args:
            request: begun.
            cache: the target's own for this request, from now to its end; for reading only.
        """

    def catch_up(self, request: Request, tokens: int) -> bool:
        """Read about ``tokens`` more tokens of the prompt; the pieces are small, so that other rows do not wait long.

        Called after ``prefilled`` until nothing is left to read. The request's first step comes then.

        Returns:
            Whether nothing is left.
        """
        return True

    @abstractmethod
    def propose(self, request: Request, budget: int) -> DraftTree:
        """A tree that follows ``request.tokens``: at most ``budget`` nodes, and at most
        ``request.max_draft_depth`` deep."""

    def propose_batch(self, requests: Sequence[Request], budget: int) -> list[DraftTree]:
        """One tree per row. Drafters that run a model override it to share the forward passes."""
        return [self.propose(request, budget) for request in requests]

    def observe(self, request: Request, outcome: Outcome) -> None:  # noqa: B027
        """A step was committed; ``request.tokens`` ends with ``outcome.verdict.tokens`` already."""

    def took(self, tokens: int, seconds: float) -> None:  # noqa: B027
        """Told by a level that drafts with this one: its round with the last proposal gave so many tokens, and took so
        long, proposing included."""

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
        """Maximum bytes that drafting takes for a text of so many tokens, all levels' caches included. They are freed
        when the request ends."""
        return 0

    def warm_up(self) -> None:  # noqa: B027
        """Compile or load what drafting needs. An engine calls it once, so that no request waits for it."""


class OuterDrafter(Drafter):
    """Passes everything on to an inner drafter, but for what a subclass does otherwise.

    Args:
        inner: the other drafter.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        self.inner.bind(target, runtime)

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
