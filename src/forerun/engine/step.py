"""One step of the engine: of a draft for each row that decodes, and of a chunk of a prompt for each that reads.

Rows that still read their prompt share the pass with those that decode. An error in what belongs to one row (its
sampler, its cache) ends that row, and the others go on. The step itself is ``Level.step``.

A request may add to what is drafted. Its budget bounds the nodes, and with budget 0 no source hears of it: such a
text costs what it costs without drafts, and nothing is learned from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forerun.core.block import Block
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.decoding.level import Level
from forerun.decoding.row import Row
from forerun.engine.result import Commit
from forerun.kv.full_cache import FullCache
from forerun.kv.shared_prefix import SharedPrefix


@dataclass(eq=False, kw_only=True)
class BatchRow(Row):
    """A request of a batch with its cache.

    A prompt is read in chunks that end at multiples of ``chunk`` tokens, so that every prompt is cut at the same
    positions. The last chunk is read by the row's first step, together with a tree. Where bits do not depend on the
    cuts, there may be more of them.

    Attributes:
        chunk: maximum tokens of a chunk.
        whole: whether chunks but the last are read together in one pass; see ``Scorer.reads_whole``.
        pass_tokens: maximum tokens of such a pass, in whole chunks; None for no limit.
        fixed: whether whole chunks are read in one pass each, however long that takes; see ``Scorer.prompt_chunk``.
        own: whether the cache was made for this row alone, and goes with it.
        reads, prepares: tokens of its prompt that a step reads, or prepares drafts for, beside others; see
            ``PrefillPacing``.
        drafting: whether the drafter knows the cache, because the prompt is read but for its last chunk.
        ready: whether the drafter has read of the prompt what it needs.
        served: the number of the step that last read of its prompt.
        admitted: when, in seconds.
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

    def __post_init__(self) -> None:
        self.reads = self.prepares = self.chunk

    def begin_with(self, beginning: SharedPrefix, length: int) -> None:
        """Begin with the prompt's first ``length`` tokens, which were read for another row."""
        self.cache.begin_with(beginning, length)
        self.request.cached_tokens = self.cache.length

    def next_chunk(self, limit: int | None = None) -> int:
        """Pending tokens up to where the next chunk ends, or ``limit`` of them if that is less."""
        if self.whole and self.unread:
            if self.pass_tokens is None:
                return self.unread
            return min(self.unread, self.pass_tokens - self.cache.length % self.pass_tokens)
        count = min(len(self.pending), self.chunk - self.cache.length % self.chunk)
        return count if limit is None or self.fixed else min(count, limit)

    @property
    def begun(self) -> bool:
        """Whether its first step is done."""
        return len(self.request) > self.request.prompt_length

    @property
    def unread(self) -> int:
        """Pending tokens but for the last chunk."""
        last = (self.request.prompt_length - 1) % self.chunk + 1
        return max(0, len(self.pending) - last)

    def prompt_block(self, tokens: int) -> Block:
        """Input of a pass that reads on in the prompt."""
        whole = self.fixed and tokens == self.chunk
        return Block(self.pending[:tokens], DraftTree.empty(), self.cache.length, whole)

    def record_times(self, planning: float, scoring: float, verifying: float) -> None:
        """Seconds of the parts of its last step; the first step ends the reading of the prompt."""
        stats = self.request.stats
        if stats.steps == 1:
            stats.prefill_seconds = time.perf_counter() - self.admitted
        else:
            stats.add_seconds(planning, scoring, verifying)


@dataclass
class StepSeconds:
    """Where the time of an engine's steps went, all rows together. The parts do not overlap.

    Attributes:
        read: reading prompts, by the target and by the drafter. A pass over prompts and drafts is divided by tokens.
        propose, score, verify: seconds of drafting, of passes over drafts, and of walking the trees and committing.
    """

    read: float = 0.0
    propose: float = 0.0
    score: float = 0.0
    verify: float = 0.0

    def add(self, propose: float, score: float, verify: float, prompts: float) -> None:
        """Count a step; ``prompts``: the part of its pass's tokens that were of prompts."""
        self.read += prompts * score
        self.propose += propose
        self.score += (1 - prompts) * score
        self.verify += verify

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count what is done in this context as the reading of prompts."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.read += time.perf_counter() - began

    @property
    def total(self) -> float:
        """All of it."""
        return self.read + self.propose + self.score + self.verify


@dataclass(frozen=True)
class DecodingStep:
    """One pass for every row: of a chunk of its prompt, or of its draft.

    Attributes:
        level: the target, which decides what is generated, and its sources.
        budget: maximum number of nodes of a row's tree, without the tokens that a grammar forces.
        closed: whether no rows come in the place of those that end, so that the last one's end counts.
        seconds: where the time of its steps is counted.
    """

    level: Level
    budget: int
    closed: bool = True
    seconds: StepSeconds = field(default_factory=StepSeconds)

    def __call__(
        self, decoding: Sequence[BatchRow], reading: Mapping[BatchRow, int], budgets: Mapping[int, int] = {}
    ) -> list[Commit]:
        """Take the step.

        Args:
            decoding: rows that decode.
            reading: rows that read on in their prompt, with the tokens of the next chunk.
            budgets: see ``Batch.step``.

        Returns:
            A commit for each row that decodes and each row that failed.
        """
        began = time.perf_counter()
        limits = [row.request.allowed(min(self.budget, budgets.get(row.request.id, self.budget))) for row in decoding]
        chunks = [(row, row.prompt_block(tokens)) for row, tokens in reading.items()]
        prompts = sum(reading.values()) + sum(len(row.pending) for row in decoding if not row.begun)
        rows, lengths = [*decoding, *reading], [len(row.request) for row in (*decoding, *reading)]
        outcomes, times = self.level.step(decoding, limits, chunks, self.closed)
        seconds = time.perf_counter() - began
        nodes = sum(len(outcome.tree) for outcome in outcomes if outcome is not None)
        self.seconds.add(*times, prompts / max(prompts + sum(row.begun for row in decoding) + nodes, 1))
        for row, outcome in zip(decoding, outcomes, strict=True):
            if outcome is not None:
                row.record_times(*times)
        commits = [
            _commit(row.request, length, outcome, seconds)
            for row, length, outcome in zip(rows, lengths, [*outcomes, *[None] * len(reading)], strict=True)
        ]
        return [commit for commit in commits if commit.tokens or commit.request.error is not None]


def _commit(request: Request, length: int, outcome: Outcome | None, seconds: float) -> Commit:
    """The tokens that a step of ``seconds`` added behind the first ``length``. Without an outcome the request failed,
    or read its prompt."""
    tokens = request.tokens[length:].tolist()
    if outcome is None:
        return Commit(request, tokens, 0)
    if request.stats.steps == 1:
        seconds = request.stats.prefill_seconds
    return Commit(request, tokens, len(outcome.verdict.path), len(outcome.tree), outcome.origins, seconds)
