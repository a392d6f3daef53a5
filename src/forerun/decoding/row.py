"""A request during decoding at one level: tokens, cache, and the sources' states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """Anything that keeps a state per row: a source."""

    def open(self, row: Row) -> Any:
        """Start a row and return its state."""


class RowState:
    """A source's state of a row, from ``Source.open`` to the row's end."""

    def close(self) -> None:
        """Free what is private to the row; called once, however the row ends."""


@dataclass(eq=False)
class Row:
    """A request with everything kept for it during decoding. ``request`` is a fork at a lower level, whose last tokens
    are tentative; ``cache`` holds all tokens but the pending ones; ``states`` are by source, shared at all levels."""

    request: Request
    cache: Cache
    states: dict[Any, Any] = field(default_factory=dict, repr=False)

    tentative = False
    """Whether the last tokens may be dropped again: true at a lower level."""

    @property
    def pending(self) -> IntArray:
        """Tokens that the cache lacks, int64; always at least the last one."""
        return self.request.tokens[min(self.cache.length, len(self.request) - 1) :]

    @property
    def wants(self) -> int:
        """Tokens still to generate."""
        return self.request.remaining

    def open(self, sources: Iterable[Opener]) -> None:
        for source in sources:
            self.states[source] = source.open(self)

    def close(self) -> None:
        """Close all states, even if some fail."""
        states, self.states = self.states, {}
        with ExitStack() as every:
            for state in states.values():
                if isinstance(state, RowState):
                    every.callback(state.close)

    def followed_by(self, tokens: Sequence[int]) -> Row:
        """Return this row as if ``tokens`` were already committed. States are shared."""
        if not tokens:
            return self
        row = copy(self)
        row.request = self.request.fork()
        row.request.stats = self.request.stats
        for token in tokens:
            row.request.append(token)
        return row

    def block(self, tree: DraftTree) -> Block:
        """Return the input of a verifying pass: the pending tokens, with a tree after the last of them."""
        return Block(self.pending.copy(), tree, self.cache.length)

    def noise(self, tree: DraftTree) -> IntArray | None:
        """Return ``Sampler.noise`` of the next token and of those after the tree's nodes."""
        sampler, length = self.request.sampler, len(self.request)
        return sampler.noise([length, *(length + tree.depths).tolist()]) if sampler.divisor else None

    def commit(self, block: Block, verdict: Verdict) -> None:
        """Commit the accepted part of a block; the request has the tokens already."""
        self.cache.commit(block, verdict.path)
        self.request.stats.record(block.nodes, len(verdict.path), len(verdict.tokens))

    def commit_prompt(self, block: Block) -> None:
        """Commit a chunk of the prompt."""
        self.cache.commit(block, [])
