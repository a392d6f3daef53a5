"""The interface of sources of drafts. A level is one, too: it verifies another source's drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.decoding.row import Row


class Limit(NamedTuple):
    """How much to draft for a row.

    Attributes:
        nodes: maximum number.
        least: acceptance probability under which a node cannot pay. A hint: such nodes are cut later.
        beside: another source's proposal for the row.
    """

    nodes: int
    least: float = 0.0
    beside: DraftTree = DraftTree.empty()


class Wants(NamedTuple):
    """What a source needs from the target's passes besides tokens: the number of best tokens per row of logits
    (``Outcome.best``), and the layers whose hidden states it needs (``Outcome.states``)."""

    best: int = 0
    states: tuple[int, ...] = ()


class Source(ABC):
    """Proposes drafts. It changes only the speed, never the output.

    One source serves all rows of an engine. For each row, ``open`` is called once, ``read`` until it returns True, then
    ``propose`` and ``learn``; finally the state in ``row.states[self]`` is closed. At a lower level, ``propose`` gets
    rows whose last tokens are tentative; ``learn`` only gets what the target committed. A source that raises loses only
    its drafts for the row.
    """

    wants: Wants = Wants()
    follows = True
    """Whether it learns from steps in which no source proposed anything."""
    seconds: float | None = None
    """Measured seconds of a costly source's draft for one row, before the first; None if unknown."""
    trusted = True
    """Whether drafts are expected to pay; else states may be missing, and it prepares no more than a trial needs."""

    def open(self, row: Row) -> Any:  # noqa: B027
        """Start a row, whose prompt is known; return its state, a ``RowState`` if it must be closed."""

    def read(self, row: Row, tokens: int) -> bool:
        """Process about ``tokens`` more prompt tokens, which the target has prefilled except for its last block; return
        whether the prompt is done."""
        return True

    def promise(self, rows: Sequence[Row]) -> Sequence[int | None]:
        """Predict how well drafts would do: the length of each row's longest suffix seen before; None if unknown."""
        return [None] * len(rows)

    def ready(self, row: Row) -> bool:
        """Return whether a costly source knows enough of a row to be judged by what it proposes."""
        return True

    @abstractmethod
    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> Sequence[DraftTree]:
        """Return a draft per row, after ``row.request.tokens``; nodes beyond limit or ``max_draft_depth`` are cut."""

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:  # noqa: B027
        """Update from a step of the target; ``request.tokens`` already ends with the committed tokens. A source that
        needs hidden states also gets chunks of prompts, which commit none."""

    def needs(self, tokens: int) -> int:
        """Return the maximum bytes held for a row of ``tokens`` tokens."""
        return 0

    def warm_up(self) -> None:  # noqa: B027
        """Compile or load what proposing needs, so that no request waits for it."""

    def walk(self) -> Iterator[Source]:
        """Iterate over this source and those below it."""
        yield self
