"""A row of a batch: a request, its cache, and what the cache does not hold of the request's text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from forerun.core.block import Block
from forerun.core.request import Request
from forerun.core.tree import DraftTree, IntArray
from forerun.core.verify import Verdict
from forerun.kv.full_cache import FullCache
from forerun.kv.shared_prefix import SharedPrefix


@dataclass(eq=False)
class Row:
    """A request with its cache.

    A prompt is read in chunks that end at multiples of ``chunk`` tokens, so that every prompt is cut at the same
    positions. The last chunk is read by the row's first step, together with a tree. Where bits do not depend on the
    cuts, there may be more of them.

    Attributes:
        request: decoded in this row.
        cache: the target's, of this request.
        chunk: tokens of a chunk, at most.
        whole: whether chunks but the last are read together in one pass; see ``Scorer.reads_whole``.
        piece: tokens of such a pass, at most, in whole chunks; None for no limit.
        most: tokens of the next chunk, at most, where prompts may be cut anywhere.
        reads, prepares: tokens of its prompt that a step reads, or prepares drafts for, beside others; see ``Pace``.
        own: whether the cache was made for this row alone, and goes with it.
        pending: tokens of the request's text that the cache does not hold, int64.
        drafting: whether the drafter knows the cache, because the prompt is read but for its last chunk.
        ready: whether the drafter has read of the prompt what it needs.
        served: the number of the step that last read of its prompt.
        admitted: when, in seconds.
    """

    request: Request
    cache: FullCache
    chunk: int
    whole: bool = False
    piece: int | None = None
    own: bool = False
    most: int | None = None
    reads: int = field(init=False)
    prepares: int = field(init=False)
    pending: IntArray = field(init=False)
    drafting: bool = False
    ready: bool = False
    served: int = -1
    admitted: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.reads = self.prepares = self.chunk
        self.pending = self.request.prompt[self.cache.length :]

    def begin_with(self, beginning: SharedPrefix, length: int) -> None:
        """Begin with the prompt's first ``length`` tokens, which were read for another row."""
        self.cache.begin_with(beginning, length)
        self.pending = self.request.prompt[length:]

    @property
    def next_chunk(self) -> int:
        """Pending tokens up to where the next chunk ends."""
        if self.whole and self.unread:
            return self.unread if self.piece is None else min(self.unread, self.piece - self.cache.length % self.piece)
        count = min(len(self.pending), self.chunk - self.cache.length % self.chunk)
        return count if self.most is None else min(count, self.most)

    @property
    def begun(self) -> bool:
        """Whether its first step is done."""
        return len(self.request) > self.request.prompt_length

    @property
    def reading(self) -> bool:
        """Whether a chunk is pending that is not the last one."""
        return self.next_chunk < len(self.pending)

    @property
    def unread(self) -> int:
        """Pending tokens but for the last chunk."""
        last = (self.request.prompt_length - 1) % self.chunk + 1
        return max(0, len(self.pending) - last)

    def prompt_block(self) -> Block:
        """What a pass reads of the prompt: the next chunk."""
        return Block(self.pending[: self.next_chunk], DraftTree.empty(), self.cache.length)

    def block(self, tree: DraftTree) -> Block:
        """What a verifying pass reads: the pending tokens, and a tree under the last of them."""
        return Block(self.pending, tree, self.cache.length)

    def read(self, block: Block) -> None:
        """Keep a chunk of the prompt."""
        self.cache.commit(block, [])
        self.pending = self.pending[len(block) :]

    def commit(self, block: Block, verdict: Verdict) -> None:
        """Keep of a block what its verdict, which the request has taken in, accepted."""
        self.cache.commit(block, verdict.path)
        self.pending = self.request.tokens[-1:].copy()
        self.request.stats.record(len(block.tree), len(verdict.path), len(verdict.tokens))

    def record_times(self, drafting: float, scoring: float, verifying: float) -> None:
        """Seconds of the parts of its last step; the first step ends the reading of the prompt."""
        stats = self.request.stats
        if stats.steps == 1:
            stats.prefill_seconds = time.perf_counter() - self.admitted
        else:
            stats.add_seconds(drafting, scoring, verifying)
