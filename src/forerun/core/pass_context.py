"""What a drafter is asked for: drafts for the rows of the next pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from forerun.core.request import Request
from forerun.core.tree import DraftTree


@dataclass(frozen=True)
class PassContext:
    """The rows that are drafted for, and all that the pass reads besides their drafts.

    Iterating yields each row with its budget.

    Attributes:
        rows: the texts; a draft follows ``row.tokens``.
        budgets: maximum number of nodes of each row's draft.
        pending: committed tokens of each row that the pass reads; 1 for a row that only decodes.
        beside: tokens that the pass reads for rows that are not drafted for.
        deepens: called by drafters that can add the draft of a costly source to a tree, with the row and the tree;
            whether to do so. None if they decide it themselves.
        stop: called by drafters that extend chains token by token, with the row and the probability that the drafting
            model gave to the last token; the chain ends there if it returns true. None if chains end by their budget.
        cached: cached tokens of each row that the pass looks back on; by default all before ``pending``.
        undrafted: the same of each row that decodes in the pass without a draft.
        waiting: number of rows that decode in the pass, so that they wait for it and for all drafts.
        tokens: that the pass reads without drafts.
        decodes: whether it reads one token of each of these rows and nothing else.
    """

    rows: Sequence[Request]
    budgets: Sequence[int]
    pending: Sequence[int]
    beside: int = 0
    deepens: Callable[[Request, DraftTree], bool] | None = None
    stop: Callable[[Request, float], bool] | None = None
    cached: Sequence[int] = ()
    undrafted: Sequence[int] = ()
    waiting: int = field(init=False)
    tokens: int = field(init=False)
    decodes: bool = field(init=False)

    def __post_init__(self) -> None:
        cached = self.cached or [len(row) - pending for row, pending in zip(self.rows, self.pending, strict=True)]
        tokens, waiting = sum(self.pending) + self.beside, len(cached) + len(self.undrafted)
        self.__dict__.update(cached=cached, tokens=tokens, waiting=waiting, decodes=tokens == waiting)

    @classmethod
    def decoding(cls, rows: Sequence[Request], budget: int) -> PassContext:
        """A pass in which every row reads one token, with the same budget for all."""
        return cls(rows, [budget] * len(rows), [1] * len(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[Request, int]]:
        return zip(self.rows, self.budgets, strict=True)

    def of(self, rows: Sequence[int]) -> PassContext:
        """The context of some rows, by their numbers in rising order. The others are in the pass without drafts."""
        if len(rows) == len(self):
            return self
        texts = [self.rows[row] for row in rows]
        budgets, pending, cached = ([each[row] for row in rows] for each in (self.budgets, self.pending, self.cached))
        undrafted = [*self.undrafted, *(length for row, length in enumerate(self.cached) if row not in rows)]
        beside = self.tokens - sum(pending)
        return PassContext(texts, budgets, pending, beside, self.deepens, self.stop, cached, undrafted)

    def within(self, budget: int) -> PassContext:
        """The context with no row's budget above ``budget``."""
        return replace(self, budgets=[min(own, budget) for own in self.budgets])
