"""One step: propose, score, verify, commit, observe. Plain autoregression is this step with an empty tree.

Rows that still read their prompt share the pass with those that decode. An error in what belongs to one row (its
sampler, its cache) ends that row, and the others go on.

A request may add to what is drafted. Its budget bounds the nodes, and with budget 0 the drafter never hears of it: such
a text costs what it costs without a drafter, and nothing is learned from it. Where its grammar allows one token only,
the model's opinion does not count: a chain of these tokens comes first, and the drafter is asked what follows it, as if
they were part of the text already.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import torch

from forerun.core.block import Block
from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.transfers import BestTokens, RowChoices, foresee, settle
from forerun.core.tree import DraftTree, IntArray
from forerun.core.verify import Outcome, Verdict, verify
from forerun.drafting.drafter import Drafter, NoDrafter, checked_trees
from forerun.engine.result import Commit
from forerun.kv.full_cache import FullCache
from forerun.kv.shared_prefix import SharedPrefix
from forerun.models.forward.scorer import Scorer

log = logging.getLogger(__name__)

RETRY_STEPS = 256
"""Steps until a pass over all rows is tried again after one has failed."""


class RowScores(NamedTuple):
    """A row's logits, and the hidden states that the drafter wants, if it does; see ``Scorer.score_with_states``."""

    logits: torch.Tensor
    states: torch.Tensor | None


Scored = RowScores | Exception
"""What a pass gave for a row, or why there is nothing."""


@dataclass(eq=False)
class Row:
    """A request of a batch with its cache.

    A prompt is read in chunks that end at multiples of ``chunk`` tokens, so that every prompt is cut at the same
    positions. The last chunk is read by the row's first step, together with a tree. Where bits do not depend on the
    cuts, there may be more of them.

    Attributes:
        request: decoded in this row.
        cache: the target's, of this request.
        chunk: maximum tokens of a chunk.
        whole: whether chunks but the last are read together in one pass; see ``Scorer.reads_whole``.
        pass_tokens: maximum tokens of such a pass, in whole chunks; None for no limit.
        fixed: whether whole chunks are read in one pass each, however long that takes; see ``Scorer.prompt_chunk``.
        own: whether the cache was made for this row alone, and goes with it.
        reads, prepares: tokens of its prompt that a step reads, or prepares drafts for, beside others; see
            ``PrefillPacing``.
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
    pass_tokens: int | None = None
    fixed: bool = False
    own: bool = False
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
        self.request.cached_tokens = self.cache.length
        self.pending = self.request.prompt[self.cache.length :]

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

    def block(self, tree: DraftTree) -> Block:
        """Input of a verifying pass: the pending tokens, and a tree under the last of them."""
        return Block(self.pending, tree, self.cache.length)

    def read(self, block: Block) -> None:
        """Keep a chunk of the prompt."""
        self.cache.commit(block, [])
        self.pending = self.pending[len(block) :]

    def commit(self, block: Block, verdict: Verdict) -> None:
        """Keep the part of a block that its verdict accepted; the request has the tokens already."""
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


@dataclass
class PassLimit:
    """How many rows may have a pass together, where one with all of them fails though each has none to blame: for want
    of memory, as a rule."""

    rows: int | None = None
    steps: int = 0

    def now(self, rows: int) -> int:
        """The rows of the next pass. After ``RETRY_STEPS`` all have a pass together again."""
        self.steps -= 1
        if self.rows is None or self.steps < 0:
            self.rows = None
            return rows
        return self.rows

    def lower(self, rows: int) -> None:
        """A pass over so many rows has failed, and none alone."""
        self.rows, self.steps = max(1, rows // 2), RETRY_STEPS


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
        target: decides what is generated.
        drafter: proposes the trees.
        budget: maximum number of nodes of a row's tree, without the tokens that a grammar forces.
        limit: of the rows in a pass.
        seconds: where the time of its steps is counted.
    """

    target: Scorer
    drafter: Drafter
    budget: int
    limit: PassLimit = field(default_factory=PassLimit)
    seconds: StepSeconds = field(default_factory=StepSeconds)

    @torch.inference_mode()
    def __call__(
        self, decoding: Sequence[Row], reading: Mapping[Row, int], budgets: Mapping[int, int] = {}
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
        limits = [min(self.budget, budgets.get(row.request.id, self.budget)) for row in decoding]
        most = [row.request.allowed(limit) for row, limit in zip(decoding, limits, strict=True)]
        forced = [self._forced(row.request, length) for row, length in zip(decoding, most, strict=True)]
        trees, rests = self._propose(decoding, forced, most, sum(reading.values())) if decoding else ([], True)
        proposed = time.perf_counter()
        rows = [*decoding, *reading]
        blocks = [row.block(tree) for row, tree in zip(decoding, trees, strict=True)]
        blocks += [row.prompt_block(tokens) for row, tokens in reading.items()]
        prompts = sum(reading.values()) + sum(len(row.pending) for row in decoding if not row.begun)
        results = self._score(rows, blocks)
        choices = self._choices(decoding, trees, results)
        scored = time.perf_counter()
        self.drafter.scored()
        lengths = [len(row.request) for row in rows]
        scores = list(zip(rows, blocks, results, strict=True))
        outcomes = [
            self._verify(*parts, len(chain), choice, rests)
            for parts, chain, choice in zip(scores, forced, choices, strict=False)
        ]
        for row, block, result in scores[len(decoding) :]:
            self._take_in(row, block, result)
        verified = time.perf_counter()
        times = proposed - began, scored - proposed, verified - scored
        self.seconds.add(*times, prompts / sum(map(len, blocks)))
        for row, outcome in zip(decoding, outcomes, strict=True):
            if outcome is not None:
                row.record_times(*times)
        commits = [
            _commit(row.request, length, outcome, verified - began)
            for row, length, outcome in zip(rows, lengths, [*outcomes, *[None] * len(reading)], strict=True)
        ]
        return [commit for commit in commits if commit.tokens or commit.request.error is not None]

    def _take_in(self, row: Row, block: Block, result: Scored) -> None:
        """Take in a chunk of a prompt that was read. An error ends this row alone."""
        try:
            if isinstance(result, Exception):
                raise result
            row.read(block)
            self._record_states(row.request, block, [], result.states)
        except Exception as error:
            row.request.fail(error)

    def _forced(self, request: Request, most: int) -> list[int]:
        """Tokens that the request's grammar forces. Plain decoding drafts nothing, so it leaves them out."""
        if isinstance(self.drafter, NoDrafter):
            return []
        return request.forced(min(most, request.max_draft_depth))

    def _propose(
        self, rows: Sequence[Row], forced: Sequence[list[int]], most: Sequence[int], beside: int
    ) -> tuple[list[DraftTree], bool]:
        """The trees to score: forced tokens, and under the last of them the drafter's tree. And whether it rests."""
        texts = [_extended(row.request, chain) for row, chain in zip(rows, forced, strict=True)]
        pending = [len(row.pending) + len(chain) for row, chain in zip(rows, forced, strict=True)]
        drafted = [n for n, text in enumerate(texts) if text.drafts and text.finish_reason is None]
        context = PassContext(texts, list(most), pending, beside).of(drafted)
        trees, proposed = [DraftTree.empty()] * len(rows), checked_trees(self.drafter, context) if drafted else []
        if proposed is None and not any(forced):
            return trees, True
        for n, tree, budget in zip(drafted, proposed or trees, context.budgets, strict=False):
            trees[n] = tree.first(budget)
        known = self.target.vocabulary
        whole = [
            tree.under(chain).trim(row.request.max_draft_depth, known)
            for row, chain, tree in zip(rows, forced, trees, strict=True)
        ]
        return whole, proposed is None

    def _choices(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], results: Sequence[Scored]
    ) -> Sequence[RowChoices]:
        """What verification and the drafter need of the pass, once it is done: one transfer for all rows that decode.
        If nothing is brought, this waits for the pass, so that a clock can be read."""
        logits = [result.logits if isinstance(result, RowScores) else None for result in results]
        choices = foresee(trees, logits[: len(rows)], [row.request for row in rows], self.drafter.best_tokens)
        if all(each.choices is None and each.best is None for each in choices) and logits[-1] is not None:
            settle(logits[-1].device)
        return choices

    def _score(self, rows: Sequence[Row], blocks: Sequence[Block]) -> Sequence[Scored]:
        """Logits of each row; on a GPU they may be still to come. A pass that fails leaves no trace. Then each row has
        a pass of its own, and those that fail again are the ones to blame."""
        most = self.limit.now(len(rows))
        parts = [slice(first, first + most) for first in range(0, len(rows), most)]
        if len(parts) > 1:
            return [each for part in parts for each in self._pass(rows[part], blocks[part])]
        return self._pass(rows, blocks)

    def _pass(self, rows: Sequence[Row], blocks: Sequence[Block]) -> Sequence[Scored]:
        try:
            caches, wanted = [row.cache for row in rows], self.drafter.states
            if wanted:
                logits, states = self.target.score_with_states(blocks, caches, wanted)
            else:
                logits, states = self.target.score(blocks, caches), []
            return [RowScores(*each) for each in zip_longest(logits, states)]
        except Exception as error:
            if len(rows) == 1:
                return [error]
            log.warning("a pass over %d rows failed (%s); each of them has its own now", len(rows), error)
        scored = [self._pass([row], [block])[0] for row, block in zip(rows, blocks, strict=True)]
        if not any(isinstance(each, Exception) for each in scored):
            self.limit.lower(len(rows))
        return scored

    def _record_states(self, request: Request, block: Block, path: Sequence[int], states: torch.Tensor | None) -> None:
        """Hand the drafter the states of a block's pending tokens and of the accepted nodes, ``path``."""
        if states is not None and request.drafts:
            pending = len(block.pending)
            rows = [*range(pending), *(pending + node for node in path)]
            chain = len(path) == 0 or path[-1] == len(path) - 1
            self.drafter.record_states(request, block.start, states[: len(rows)] if chain else states[rows])

    def _verify(
        self, row: Row, block: Block, scored: Scored, forced: int, choices: RowChoices, rests: bool
    ) -> Outcome | None:
        """Verify a row's tree, which begins with ``forced`` forced tokens; None for a row that failed. ``choices`` are
        from ``foresee``; a drafter that ``rests`` is not told."""
        if isinstance(scored, Exception):
            row.request.fail(scored)
            return None
        try:
            logits = scored.logits
            verdict = verify(block.tree, logits, row.request, choices.choices)
            row.commit(block, verdict)
            row.request.keep_logprobs(verdict.tokens, logits, [0, *(node + 1 for node in verdict.path)])
            outcome = Outcome(block.tree, verdict, logits, choices.best)
            self._record_states(row.request, block, verdict.path, scored.states)
            if row.request.drafts and not rests:
                self.drafter.observe(row.request, _behind(outcome, forced))
        except Exception as error:
            row.request.fail(error)
            return None
        return outcome


def _extended(request: Request, chain: Sequence[int]) -> Request:
    """The request, or a fork of it with a chain behind its text."""
    if not chain:
        return request
    fork = request.fork()
    fork.stats = request.stats
    for token in chain:
        fork.append(token)
    return fork


def _behind(outcome: Outcome, chain: int) -> Outcome:
    """The outcome of the tree under a chain of ``chain`` nodes."""
    if not chain:
        return outcome
    verdict = outcome.verdict
    path = [node - chain for node in verdict.path[chain:]]
    best = outcome.best
    best = None if best is None else BestTokens(best.tokens[chain:], best.scores[chain:])
    return Outcome(outcome.tree.behind(chain), Verdict(path, verdict.tokens[chain:]), outcome.logits[chain:], best)


def _commit(request: Request, length: int, outcome: Outcome | None, seconds: float) -> Commit:
    """The tokens that a step of ``seconds`` added behind the first ``length``. Without an outcome the request failed,
    or read its prompt."""
    tokens = request.tokens[length:].tolist()
    if outcome is None:
        return Commit(request, tokens, 0)
    if request.stats.steps == 1:
        seconds = request.stats.prefill_seconds
    return Commit(request, tokens, len(outcome.verdict.path), len(outcome.tree), outcome.origins, seconds)
