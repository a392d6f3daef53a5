"""The drafter's side of a step: propose trees, then observe what became of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from tokenizers import Tokenizer

from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.kv.cache import Cache
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer


class Drafter(ABC):
    """Proposes the next tokens. One drafter serves all rows of an engine, keyed by ``request.id``.

    The engine calls ``bind`` once; for every request ``begin``, ``prefilled``, and ``catch_up`` until nothing is left;
    then ``propose``, ``scored`` and ``observe`` in turn, and ``finish`` however it ends (an error and a cancellation
    included). A drafter can never change the output, only the speed.

    A drafter may serve as the inner level of a hierarchy. Then ``propose`` gets forks of the requests whose last tokens
    are on trial. They may be gone at the next call. ``verified`` tells what the level took of each draft, ``observe``
    what the target took of the whole.
    """

    sized: bool = False
    """Whether it decides itself how much to draft, so that its trees need no pruning."""

    best_tokens: int = 0
    """Number of best tokens that it wants of each row of the target's logits; see ``Outcome.best``."""

    states: tuple[int, ...] = ()
    """Layers of the target whose hidden states it wants of every committed token; see ``Scorer.score_with_states``."""

    small_model: Scorer | None = None
    """The small model whose passes its chains take; None if the target drafts alone, or no model does."""

    def bind(self, target: Scorer, runtime: Runtime) -> None:  # noqa: B027
        """Called once, with the engine's target, its clock, and its way to measure what passes cost.

        Raises:
            ValueError: if the drafter does not fit it.
        """

    def spell(self, tokenizer: Tokenizer) -> None:  # noqa: B027
        """Called with the tokenizer, where there is one: a drafter may match words across different tokenizations."""

    def pruned_by(self, prune: Callable[[Drafter], Drafter]) -> Drafter:
        """This drafter, of whose trees only what pays is scored: as it is if it is ``sized``, else through ``prune``.

        A level of a hierarchy does the same with the drafter below it.
        """
        return self if self.sized else prune(self)

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

    def known_suffixes(self, requests: Sequence[Request]) -> Sequence[int | None]:
        """Length of each text's longest suffix that the drafter has seen before, found in far less time than a draft.

        The longer, the more a draft promises. None if the drafter cannot tell.
        """
        return [None] * len(requests)

    @abstractmethod
    def propose(self, context: PassContext) -> list[DraftTree] | None:
        """Draft for the rows of a pass.

        Args:
            context: the rows and their budgets.

        Returns:
            One tree for each row. It follows ``row.tokens``, and should have no more nodes than the row's budget and be
            no deeper than ``row.max_draft_depth``; the rest is cut off. None if the drafter rests: then nothing is
            drafted, and it need not be told what the step commits. It finds that in ``row.tokens`` at the next call.
        """

    def scored(self) -> None:  # noqa: B027
        """The step's pass is done, and none of its rows is verified yet. Called whether the drafter rests or not, so
        that it can read a clock."""

    def record_states(self, request: Request, start: int, states: torch.Tensor) -> None:  # noqa: B027
        """The target has read tokens of a request; only called if ``states`` names layers.

        It is called as soon as tokens are committed, from ``begin`` on, and before ``observe``. Tokens that the target
        did not read itself, because another text began alike, are left out.

        Args:
            request: begun.
            start: place of the first token in the text.
            states: hidden states of the tokens from there on, ``[n, layers * hidden]``.
        """

    def observe(self, request: Request, outcome: Outcome) -> None:  # noqa: B027
        """A step was committed; ``request.tokens`` ends with ``outcome.verdict.tokens`` already."""

    def verified(self, request: Request, outcome: Outcome) -> None:  # noqa: B027
        """A level of a hierarchy has verified a draft for ``request``, a fork.

        ``observe`` tells later what the target took of the whole chain.
        """

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
        """Maximum bytes that drafting takes for a text of ``tokens`` tokens, all levels' caches included. They are
        freed when the request ends."""
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

    @property
    def best_tokens(self) -> int:  # type: ignore[override]
        """That of the inner drafter."""
        return self.inner.best_tokens

    @property
    def states(self) -> tuple[int, ...]:  # type: ignore[override]
        """What the inner drafter wants."""
        return self.inner.states

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        self.inner.bind(target, runtime)

    def spell(self, tokenizer: Tokenizer) -> None:
        self.inner.spell(tokenizer)

    def warm_up(self) -> None:
        self.inner.warm_up()

    def warm(self, namespace: str, sequences: Iterable[Sequence[int]]) -> None:
        self.inner.warm(namespace, sequences)

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def needs(self, tokens: int) -> int:
        return self.inner.needs(tokens)

    def begin(self, request: Request) -> None:
        self.inner.begin(request)

    def prefilled(self, request: Request, cache: Cache) -> None:
        self.inner.prefilled(request, cache)

    def catch_up(self, request: Request, tokens: int) -> bool:
        return self.inner.catch_up(request, tokens)

    @property
    def small_model(self) -> Scorer | None:  # type: ignore[override]
        """That of the inner drafter."""
        return self.inner.small_model

    def known_suffixes(self, requests: Sequence[Request]) -> Sequence[int | None]:
        return self.inner.known_suffixes(requests)

    def propose(self, context: PassContext) -> list[DraftTree] | None:
        return self.inner.propose(context)

    def scored(self) -> None:
        self.inner.scored()

    def verified(self, request: Request, outcome: Outcome) -> None:
        self.inner.verified(request, outcome)

    def record_states(self, request: Request, start: int, states: torch.Tensor) -> None:
        self.inner.record_states(request, start, states)

    def observe(self, request: Request, outcome: Outcome) -> None:
        self.inner.observe(request, outcome)

    def finish(self, request: Request) -> None:
        self.inner.finish(request)


class NoDrafter(Drafter):
    """Plain autoregression, through the same engine."""

    sized = True

    def propose(self, context: PassContext) -> list[DraftTree] | None:
        return None


def checked_trees(drafter: Drafter, context: PassContext) -> list[DraftTree] | None:
    """What a drafter proposes.

    Raises:
        TypeError: if that is neither None nor one ``DraftTree`` for each row.
    """
    trees, rows = drafter.propose(context), len(context)
    if trees is None:
        return None
    if not isinstance(trees, Sequence) or len(trees) != rows or not all(isinstance(tree, DraftTree) for tree in trees):
        raise TypeError(
            f"{type(drafter).__name__}.propose returned {trees!r}; it must be one DraftTree for each of {rows} rows"
        )
    return trees


def trees_of(drafter: Drafter, context: PassContext) -> list[DraftTree]:
    """The same; empty trees from a drafter that rests."""
    return checked_trees(drafter, context) or [DraftTree.empty()] * len(context)
