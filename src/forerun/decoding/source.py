"""A source of drafts: the trie, a lookup, a trained head, or a level, which verifies what another source proposes."""

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
        nodes: maximum number of nodes.
        least: least chance of being accepted at which a node can be worth its cost. A hint: other nodes are cut off.
        beside: what another source has proposed for the row already.
    """

    nodes: int
    least: float = 0.0
    beside: DraftTree = DraftTree.empty()


class Wants(NamedTuple):
    """What a source wants of the target's passes besides the tokens that they commit.

    Attributes:
        best: number of best tokens of each row of logits; see ``Outcome.best``.
        states: layers whose hidden states it wants of every committed token; see ``Outcome.states``.
    """

    best: int = 0
    states: tuple[int, ...] = ()


class Source(ABC):
    """Proposes the next tokens of rows. It can never change the output, only the speed.

    A source serves all rows of an engine, and keeps what it knows of a row in the state that ``open`` returns, which it
    finds in ``row.states[self]``. For each row, ``open`` is called once, ``read`` until nothing is left, then
    ``propose`` and ``learn``; the state is closed however the row ends.

    A source may serve a lower level. Then ``propose`` gets rows whose last tokens are on trial (``row.settled`` is
    false); ``learn`` gets only what the target committed. An error in a source ends nothing but its drafts for a row.
    """

    wants: Wants = Wants()
    """What it wants of the target's passes."""

    def open(self, row: Row) -> Any:  # noqa: B027
        """Begin with a row, whose prompt is known. Returns what is kept of it; a ``RowState`` if it is to be closed."""

    def read(self, row: Row, tokens: int) -> bool:
        """Read about ``tokens`` more tokens of the prompt, which the target has read into ``row.cache`` but for its
        last block. The pieces are small, so that other rows do not wait long.

        Returns:
            Whether nothing is left.
        """
        return True

    def promise(self, rows: Sequence[Row]) -> Sequence[int | None]:
        """Tell what proposing is likely to give: the length of each row's longest suffix that was seen before, found in
        far less time than a draft. None if the source cannot tell."""
        return [None] * len(rows)

    @abstractmethod
    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> Sequence[DraftTree]:
        """Draft for rows.

        Args:
            rows: a draft follows ``row.request.tokens``.
            limits: of each row's draft.

        Returns:
            One tree for each row, with no more nodes than its limit and no deeper than ``request.max_draft_depth``; the
            rest is cut off.
        """

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:  # noqa: B027
        """Learn from a step of the target: ``request.tokens`` ends with ``outcome.verdict.tokens`` already. If the
        source wants hidden states, it is called for chunks of prompts, too, which commit no tokens."""

    def needs(self, tokens: int) -> int:
        """Maximum bytes that a row of ``tokens`` tokens takes here, until it ends."""
        return 0

    def warm_up(self) -> None:  # noqa: B027
        """Compile or load what proposing needs, so that no request waits for it."""

    def walk(self) -> Iterator[Source]:
        """This source, and those below it."""
        yield self
