"""A row of a batch: a request, its cache, and what the cache does not hold of the request's text."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.caches.base import Cache
from forerun.core.block import Block
from forerun.core.request import Request
from forerun.core.tree import DraftTree, IntArray
from forerun.core.verify import Verdict


@dataclass
class Row:
    """A request with its cache. ``pending`` are the tokens of its text that the cache does not hold."""

    request: Request
    cache: Cache
    pending: IntArray = field(init=False)

    def __post_init__(self) -> None:
        self.pending = self.request.prompt[self.cache.length :]

    def block(self, tree: DraftTree) -> Block:
        """What a pass reads: the pending tokens, and a tree under the last of them."""
        return Block(self.pending, tree, self.cache.length)

    def commit(self, block: Block, verdict: Verdict) -> None:
        """Keep of a block what its verdict, which the request has taken in, accepted."""
        self.cache.commit(block, verdict.path)
        self.pending = self.request.tokens[-1:].copy()
        self.request.stats.record(block.tree.drafted, len(verdict.path), len(verdict.tokens))

    def record_times(self, drafting: float, scoring: float, verifying: float) -> None:
        """Seconds of the parts of its last step; the first step ends the reading of the prompt."""
        stats = self.request.stats
        if stats.steps == 1:
            stats.prefill_seconds += drafting + scoring + verifying
        else:
            stats.add_seconds(drafting, scoring, verifying)
