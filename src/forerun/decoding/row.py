"""A request being decoded at one level: its tokens, its cache, and what its sources keep of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from forerun.core.block import Block
from forerun.core.request import Request
from forerun.core.tree import DraftTree, IntArray
from forerun.core.verify import Verdict
from forerun.kv.cache import Cache


class Opener(Protocol):
    """What keeps a state of each row: a source."""

    def open(self, row: Row) -> Any:
        """Begin with a row. Returns what is kept of it."""


class RowState:
    """What a source keeps of a row, from ``Source.open`` to the row's end."""

    def close(self) -> None:
        """Free what is private to the row; called once, however the row ends."""


@dataclass(eq=False)
class Row:
    """A request, with all that is kept for it while it is decoded. Nothing outside a row is keyed by it.

    Attributes:
        request: the text. At a lower level a fork, whose last tokens are on trial.
        cache: of the level's model; it holds all tokens but the pending ones.
        states: what each source keeps of the row, by the source. The rows of all levels of a request share them.
    """

    request: Request
    cache: Cache
    states: dict[Any, Any] = field(default_factory=dict, repr=False)

    settled = True
    """Whether its tokens are the request's own; false at a lower level, where they are on trial."""

    @property
    def pending(self) -> IntArray:
        """Tokens that the cache does not hold, int64; the last one at least."""
        return self.request.tokens[min(self.cache.length, len(self.request) - 1) :]

    @property
    def wants(self) -> int:
        """Tokens that the level still has to give it."""
        return self.request.remaining

    def open(self, sources: Iterable[Opener]) -> None:
        """Let each source keep a state of this row."""
        for source in sources:
            self.states[source] = source.open(self)

    def close(self) -> None:
        """Free the sources' states, whatever of that fails."""
        states, self.states = self.states, {}
        with ExitStack() as every:
            for state in states.values():
                if isinstance(state, RowState):
                    every.callback(state.close)

    def followed_by(self, tokens: Iterable[int]) -> Row:
        """This row as if ``tokens`` were part of its text already. Its states are the same."""
        row = copy(self)
        row.request = self.request.fork()
        row.request.stats = self.request.stats
        for token in tokens:
            row.request.append(token)
        return row

    def block(self, tree: DraftTree) -> Block:
        """Input of a verifying pass: the pending tokens, and a tree under the last of them."""
        return Block(self.pending.copy(), tree, self.cache.length)

    def commit(self, block: Block, verdict: Verdict) -> None:
        """Keep the part of a block that its verdict accepted; the request has the tokens already."""
        self.cache.commit(block, verdict.path)
        self.request.stats.record(len(block.tree), len(verdict.path), len(verdict.tokens))

    def commit_prompt(self, block: Block) -> None:
        """Keep a chunk of the prompt."""
        self.cache.commit(block, [])
