"""One step of the engine: a draft for each row that decodes, and a prompt chunk for each in prefill.

They share one pass (``Level.step``). An error in one row's sampler or cache ends only that row. A request's budget
bounds its draft; with budget 0 no source sees the request, so it costs no more than without drafts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forerun.core.block import Block
from forerun.core.origin import Origin
from forerun.core.tree import DraftTree
from forerun.decoding.level import Level
from forerun.decoding.planner import StepTimes
from forerun.decoding.row import Row
from forerun.engine.result import Commit
from forerun.kv.full_cache import FullCache
from forerun.kv.shared_prefix import SharedPrefix


@dataclass(eq=False, kw_only=True)
class BatchRow(Row):
    """A request of a batch with its cache.

    Prefill chunks end at multiples of ``chunk`` tokens, so that every prompt is cut at the same positions; where bits
    do not depend on the cuts, there may be more. The last chunk belongs to the row's first step, together with a tree.

    Attributes:
        whole: whether all chunks but the last share one pass; see ``Scorer.reads_whole``.
        pass_tokens: maximum tokens of such a pass, a multiple of the chunk; None for no limit.
        fixed: whether each complete chunk is one pass, at any duration; see ``Scorer.prompt_chunk``.
        own: whether the cache was made for this row, and is freed with it.
        reads, prepares: prompt tokens per step, for prefill and for preparing drafts, alongside decoding rows; see
            ``PrefillPacing``.
        drafting: whether the drafter has the cache, because only the last chunk is left to prefill.
        ready: whether the drafter has finished its prefill.
        served: number of the step that last prefilled a chunk.
    """

    cache: FullCache = field(kw_only=False)
    chunk: int
    whole: bool = False
    pass_tokens: int | None = None
    fixed: bool = False
    own: bool = False
    reads: int = field(init=False)
    prepares: int = field(init=False)
    drafting: bool = False
    ready: bool = False
    served: int = -1
    admitted: float = field(default_factory=time.perf_counter)
    begun: bool = False

    def __post_init__(self) -> None:
        self.reads = self.prepares = self.chunk

    def begin_with(self, beginning: SharedPrefix, length: int) -> None:
        """Start from the prompt's first ``length`` tokens, prefilled for another row."""
        self.cache.begin_with(beginning, length)
        self.request.cached_tokens = self.cache.length

    def next_chunk(self, limit: int | None = None) -> int:
        """Return the pending tokens up to the end of the next chunk, at most ``limit``."""
        if self.whole and self.unread:
            if self.pass_tokens is None:
                return self.unread
            return min(self.unread, self.pass_tokens - self.cache.length % self.pass_tokens)
        count = min(len(self.pending), self.chunk - self.cache.length % self.chunk)
        return count if limit is None or self.fixed else min(count, limit)

    @property
    def unread(self) -> int:
        """Pending tokens before the last chunk."""
        last = (self.request.prompt_length - 1) % self.chunk + 1
        return max(0, len(self.pending) - last)

    def prompt_block(self, tokens: int) -> Block:
        """Return the input of a prefill pass."""
        whole = self.fixed and tokens == self.chunk
        return Block(self.pending[:tokens], DraftTree.empty(), self.cache.length, whole)

    def stepped(self, times: StepTimes, seconds: float) -> float:
        """Record a step of ``seconds``; return how long its tokens ran: the first step ends the prefill."""
        stats = self.request.stats
        if self.begun:
            stats.add_seconds(*times)
            return seconds
        self.begun, stats.prefill_seconds = True, time.perf_counter() - self.admitted
        return stats.prefill_seconds


@dataclass
class StepSeconds:
    """Where the time of an engine's steps went, all rows together, without overlap: prefill by target and drafter
    (``read``), drafting, passes over drafts, and verifying and committing. A pass over prompts and drafts is split by
    tokens."""

    read: float = 0.0
    propose: float = 0.0
    score: float = 0.0
    verify: float = 0.0

    def add(self, propose: float, score: float, verify: float, prompts: float) -> None:
        """Add a step; ``prompts``: the share of prompt tokens in its pass."""
        self.read += prompts * score
        self.propose += propose
        self.score += (1 - prompts) * score
        self.verify += verify

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the time in the context as prefill."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.read += time.perf_counter() - began

    @property
    def total(self) -> float:
        return self.read + self.propose + self.score + self.verify


@dataclass(frozen=True)
class DecodingStep:
    """One pass for all rows, over a prompt chunk or a draft each.

    Args:
        level: the target and its sources.
        budget: maximum nodes of a row's tree, without the tokens that a grammar forces.
        closed: whether no rows replace those that end, so that the end of the last one counts.
    """

    level: Level
    budget: int
    closed: bool = True
    seconds: StepSeconds = field(default_factory=StepSeconds)

    def __call__(
        self, decoding: Sequence[BatchRow], reading: Mapping[BatchRow, int], budgets: Mapping[int, int] = {}
    ) -> list[Commit]:
        """Run the step over rows that decode, and rows in prefill with the tokens of their next chunk; return a commit
        for each row that decodes and each row that failed."""
        began = time.perf_counter()
        limits, prompts = list[int](), sum(reading.values())
        for row in decoding:
            own, allowed = row.request.budget, min(self.budget, budgets.get(row.request.id, self.budget))
            limits.append(allowed if own is None else min(allowed, own))
            prompts += 0 if row.begun else len(row.pending)
        chunks = [(row, row.prompt_block(tokens)) for row, tokens in reading.items()]
        outcomes, times = self.level.step(decoding, limits, chunks, self.closed)
        seconds, others, commits = time.perf_counter() - began, 0, list[Commit]()
        for row, outcome in zip(decoding, outcomes, strict=True):
            others += row.begun
            if outcome is None:  # its tokens of this step are not recorded
                commits.append(Commit(row.request, row.request.generated[row.request.stats.tokens :].tolist(), 0))
                continue
            nodes, verdict, took = len(outcome.tree.tokens), outcome.verdict, row.stepped(times, seconds)
            others += nodes
            origins = outcome.origins if verdict.path else [int(Origin.TARGET)] * len(verdict.tokens)
            commits.append(Commit(row.request, verdict.tokens, len(verdict.path), nodes, origins, took))
        self.seconds.add(*times, prompts / max(prompts + others, 1))
        return commits + [Commit(row.request, [], 0) for row in reading if row.request.error is not None]
