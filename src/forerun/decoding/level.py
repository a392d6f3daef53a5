"""A level: a model over a cache, and a planner over sources. One step is plan, score, verify, commit, update.

The engine's target is a level, and so is each level below it, since *a verifier over a drafter is itself a drafter*
(TriForce, section 4): it drafts a chain by taking steps with forks of the rows. Its tokens are distributed as if its
model had drawn them one by one, so ``q`` for the level above is the model's own distribution, even after a rejection,
unlike in the authors' code. A small model alone is a level without sources.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from forerun.core.block import Block, RowScores
from forerun.core.origin import Origin
from forerun.core.request import Request
from forerun.core.transfers import BestTokens, RowChoices, choose_rows
from forerun.core.tree import DraftTree, IntArray
from forerun.core.verify import Outcome, Verdict, verify
from forerun.decoding import device_chain
from forerun.decoding.planner import Planner, StepTimes
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source
from forerun.decoding.trial_row import TrialRow, probabilities
from forerun.kv.cache import READ_BLOCK, Cache
from forerun.kv.full_cache import FullCache
from forerun.models.forward.prefill import read_prompt
from forerun.models.forward.scorer import Scorer
from forerun.policy.calibration import ChainConfidence
from forerun.policy.decision import PassShape

log = logging.getLogger(__name__)

RETRY_STEPS = 256
"""Steps before a pass over all rows is tried again after one failed."""
UNLIMITED = 1 << 30
EMPTY_TREE = DraftTree.empty()
NOTHING_FETCHED = RowChoices()

CacheFactory = Callable[[Scorer, FullCache], Cache]
"""Makes a row's cache from the level's model and the target's cache of the row."""


Scored = RowScores | Exception
"""A pass's result for a row, or its error."""


@dataclass
class PassLimit:
    """Maximum rows per pass after a pass over all rows failed though none fails alone, usually for lack of memory."""

    rows: int | None = None
    steps: int = 0

    def now(self, rows: int) -> int:
        """Return the number of rows of the next pass; after ``RETRY_STEPS`` it is all of them again."""
        self.steps -= 1
        if self.rows is None or self.steps < 0:
            self.rows = None
            return rows
        return self.rows

    def lower(self, rows: int) -> None:
        """Halve the limit after a pass over ``rows`` rows failed."""
        self.rows, self.steps = max(1, rows // 2), RETRY_STEPS


class Level(Source):
    """Takes steps with rows; as a source, proposes what its steps commit.

    Args:
        cache: makes a row's cache at a lower level; None for the engine's level, whose rows bring theirs.
        nodes: maximum nodes of the trees that a lower level verifies, at least 0.
        chain: draft length of a lower level, at least 1.
        helper: whether the model differs from the target, so that it can always contribute.
        beyond: tokens of a request before which nothing is drafted over the cache.
        reads: how many of a row's cached tokens a pass reads.
        clock: measures the seconds of a step's parts; by default the model's.
    """

    def __init__(
        self,
        model: Scorer,
        planner: Planner,
        *,
        cache: CacheFactory | None = None,
        nodes: int = 0,
        chain: int = 1,
        helper: bool = False,
        beyond: int = 0,
        reads: Callable[[int], int] = lambda cached: cached,
        clock: Callable[[], float] | None = None,
    ) -> None:
        for name, value, least in (("nodes", nodes, 0), ("chain", chain, 1)):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        self.model, self.planner, self.limit = model, planner, PassLimit()
        self.helper, self.nodes, self.chain = helper, nodes, chain
        self._make, self._reads, self._clock = cache, reads, clock or model.clock
        self._confidence = ChainConfidence()
        self._origin = Origin.MODEL if helper else Origin.SELF
        self.wants = planner.wants
        if cache is not None and not helper:
            model.keep_queries(beyond)

    @property
    def makes_none(self) -> bool:
        """Whether rows bring their caches, as at the engine's level."""
        return self._make is None

    # the step

    @torch.inference_mode()
    def step(
        self,
        rows: Sequence[Row],
        budgets: Sequence[int],
        reading: Sequence[tuple[Row, Block]] = (),
        closed: bool = True,
    ) -> tuple[list[Outcome | None], StepTimes]:
        """Take one step: a pass in which each row verifies its draft or prefills a chunk of its prompt.

        Args:
            budgets: maximum nodes of each row's tree, without tokens that a grammar forces.
            reading: rows in prefill, with their blocks.
            closed: whether no further rows will join.

        Returns each decoding row's outcome, None if it failed; and the seconds of the step's parts.
        """
        began = self._clock()
        trees, forced, plain = self._plan(rows, budgets, reading, closed)
        blocks, every = [row.block(tree) for row, tree in zip(rows, trees, strict=True)], list(rows)
        if self.model.by_tables:  # the pass chooses
            for row, block in zip(rows, blocks, strict=True):
                block.noise = row.noise(block.tree)
        for row, block in reading:
            every.append(row)
            blocks.append(block)
        planned = self._clock()
        scored = self._score(every, blocks)
        choices = self._choices(rows, trees, scored, plain)
        passed = self._clock()
        outcomes, end = list(map(self._verify, rows, blocks, scored, choices)), len(rows)
        read = list(map(self._take_in, every[end:], blocks[end:], scored[end:]))
        times = StepTimes(planned - began, passed - planned, self._clock() - passed)
        learned = list(map(_after, outcomes, forced)) if any(forced) else outcomes
        self.planner.learn(every, [*learned, *read], times)
        return outcomes, StepTimes(times.planning, times.scoring, self._clock() - passed)

    def _forced(self, row: Row, budget: int) -> list[int]:
        """Return tokens that the row's grammar forces; plain decoding drafts nothing, not even these."""
        return row.request.forced(min(budget, row.wants - 1)) if self.planner.own else []

    def _plan(
        self, rows: Sequence[Row], budgets: Sequence[int], reading: Sequence[tuple[Row, Block]], closed: bool
    ) -> tuple[Sequence[DraftTree], Sequence[list[int]], bool]:
        """Return the trees to score, their forced tokens, and whether the planner drafts nothing."""
        forced, trees = list(map(self._forced, rows, budgets)), [EMPTY_TREE] * len(rows)
        constrained = any(forced)
        if not constrained and self.planner.skips(rows, not reading):
            return trees, forced, True
        texts = list(map(Row.followed_by, rows, forced)) if constrained else rows
        drafted = [n for n, row in enumerate(texts) if row.request.drafts and row.request.finish_reason is None]
        shape = partial(self._shape, texts, drafted, budgets, forced, reading, closed)
        found = (
            self.planner.plan([texts[n] for n in drafted], [budgets[n] for n in drafted], shape) if drafted else None
        )
        known = self.model.vocabulary
        for n, tree in zip(drafted, found or (), strict=False):
            trees[n] = tree.cut(budgets[n], rows[n].wants - 1 - len(forced[n]), known)
        if constrained:
            trees = [
                tree.under(chain).cut(UNLIMITED, row.wants - 1, known)
                for row, chain, tree in zip(rows, forced, trees, strict=True)
            ]
        return trees, forced, found is None

    def _shape(
        self,
        texts: Sequence[Row],
        drafted: Sequence[int],
        budgets: Sequence[int],
        forced: Sequence[list[int]],
        reading: Sequence[tuple[Row, Block]],
        closed: bool,
    ) -> PassShape:
        pending = [len(row.request) - row.cache.length for row in texts]
        left = [row.wants - len(chain) * row.tentative for row, chain in zip(texts, forced, strict=True)]
        cached = [self._reads(len(row.request) - tokens) for row, tokens in zip(texts, pending, strict=True)]
        others = [n for n in range(len(texts)) if n not in drafted] if len(drafted) < len(texts) else []
        return PassShape(
            [left[n] for n in (*drafted, *others)],
            [cached[n] for n in (*drafted, *others)],
            [pending[n] for n in drafted],
            [budgets[n] for n in drafted],
            sum(len(block) for _, block in reading) + sum(pending[n] - 1 for n in others),
            closed,
        )

    def _score(self, rows: Sequence[Row], blocks: Sequence[Block]) -> Sequence[Scored]:
        """Score all rows; on a GPU the results may be pending."""
        most = self.limit.now(len(rows))
        if most >= len(rows):
            return self._pass(rows, blocks)
        parts = [slice(first, first + most) for first in range(0, len(rows), most)]
        return [each for part in parts for each in self._pass(rows[part], blocks[part])]

    def _pass(self, rows: Sequence[Row], blocks: Sequence[Block]) -> Sequence[Scored]:
        """Run a pass. If it fails, each row gets its own, and rows that fail again end (at a lower level, drafts)."""
        caches, layers = [row.cache for row in rows], () if rows[0].tentative else self.planner.states
        try:
            return self.model.score_rows(blocks, caches, layers)
        except Exception as error:
            if rows[0].tentative:
                raise
            if len(rows) == 1:
                return [error]
            log.warning("a pass over %d rows failed (%s); retrying row by row", len(rows), error)
        scored = [self._pass([row], [block])[0] for row, block in zip(rows, blocks, strict=True)]
        if not any(isinstance(each, Exception) for each in scored):
            self.limit.lower(len(rows))
        return scored

    def _choices(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scored: Sequence[Scored], plain: bool
    ) -> Sequence[RowChoices]:
        """Wait for the pass, so that timings are right, and fetch what verification and the sources need of it."""
        if isinstance(scored[0], RowScores) and scored[0].logits.is_cpu:
            return [NOTHING_FETCHED] * len(rows)
        best = self.wants.best if rows and not (plain or rows[0].tentative) else 0
        chances = any(isinstance(row, TrialRow) and row.least > 0 for row in rows)
        return choose_rows(trees, scored, [row.request for row in rows], best, chances)

    def _verify(self, row: Row, block: Block, scored: Scored, choices: RowChoices) -> Outcome | None:
        """Verify a row's tree, commit what is accepted; an error ends only this row, at a lower level its draft."""
        try:
            if isinstance(scored, Exception):
                raise scored
            verdict = verify(block.tree, scored.logits, row.request, choices.choices)
            if row.request.top_logprobs is not None and not row.tentative:
                row.request.keep_logprobs(verdict.tokens, scored.logits, verdict.path)
            states = None if scored.states is None else _kept(scored.states, block, verdict.path)
            row.commit(block, verdict)
            return Outcome(block.tree, verdict, scored.logits, choices.best, states, block.start, choices.chances)
        except Exception as error:
            if row.tentative:
                raise
            row.request.fail(error)
            return None

    def _take_in(self, row: Row, block: Block, scored: Scored) -> Outcome | None:
        """Commit a chunk of a prompt. An error ends only this row."""
        try:
            if isinstance(scored, Exception):
                raise scored
            row.commit_prompt(block)
            states = None if scored.states is None else _kept(scored.states, block, [])
            return Outcome(block.tree, Verdict([], []), scored.logits[:0], None, states, block.start)
        except Exception as error:
            row.request.fail(error)
            return None

    # a level as a source

    def walk(self) -> Iterator[Source]:
        yield self
        yield from self.planner.sources

    def warm_up(self) -> None:
        for states in {(), self.wants.states if self.makes_none else ()}:
            self.model.warm_up(states)
        self.planner.warm_up()
        if self._make is not None:
            self._make(self.model, FullCache())  # a model's first cache determines how positions rotate

    def begin(self, row: Row) -> None:
        """Start a row of the engine's level, and its state in each source."""
        row.open(self.planner.sources)
        row.states[self.planner] = self.planner.open(row)

    def open(self, row: Row) -> TrialRow:
        row.states[self.planner] = self.planner.open(row)
        reading = np.empty(row.request.max_new_tokens + 1, np.int64)
        return TrialRow(row.request, row.cache, row.states, upper=row, reading=reading)

    def needs(self, tokens: int) -> int:
        """Return the maximum bytes of a row's cache for ``tokens`` tokens, and of its forked recurrent states."""
        if self._make is None:
            return 0
        return self._make(self.model, FullCache(tokens)).needs(self.model.kv, tokens) + self.model.kv.state_bytes

    def read(self, row: Row, tokens: int) -> bool:
        own: TrialRow = row.states[self]
        if not own.prepared:
            assert self._make is not None
            own.cache, own.prepared = self.model.adopt(self._make(self.model, row.cache)), True  # type: ignore[arg-type]
        return self._read_own(own, tokens) and self.planner.read(row, tokens)

    def _read_own(self, own: TrialRow, tokens: int) -> bool:
        request = own.upper.request
        if own.cache.source is not None:
            return self._prepare(own, request, tokens)
        if self._room_after(request.prompt) > 0:
            text = request.tokens[: own.first]
            read_prompt(self.model, own.cache, text, min(READ_BLOCK, tokens), most=tokens)
            return own.cache.length >= own.first
        return True

    def _prepare(self, own: TrialRow, request: Request, tokens: int) -> bool:
        """Prepare a sparse view piece by piece, then run its first selection and a pass whose result is discarded: both
        cost more than later ones, and would spoil the first measured draft."""
        cache = own.cache
        if cache.synced or not cache.ready or cache.whole:
            return True
        if not cache.prepare(tokens):
            return False
        cache.sync()
        next_token = request.tokens[cache.length : cache.length + 1]
        if len(next_token) and self._room_after(next_token, cache.length + 1) > 0:
            self.model.score([Block(next_token.copy(), DraftTree.empty(), cache.length)], [cache])
        return True

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        """Draft a chain for each row; the rows share passes at every level. A level over the target's own model passes
        on its sources' trees while the cache holds all of a request."""
        own: list[TrialRow] = [row.states[self] for row in rows]
        direct = [n for n, each in enumerate(own) if self._adds_nothing(each)]
        chains = [n for n in range(len(rows)) if n not in direct]
        for n in chains:
            self._start(own[n], rows[n], limits[n])
        while active := [own[n] for n in chains if own[n].missing > 0]:
            self._extend(active)
        trees = {n: own[n].tree(self._origin) for n in chains}
        if direct:
            within = [Limit(min(self.nodes, limits[n].nodes)) for n in direct]
            trees |= zip(direct, self.planner.draft([rows[n] for n in direct], within), strict=True)
        return [trees[n] for n in range(len(rows))]

    def _adds_nothing(self, own: TrialRow) -> bool:
        return bool(self.planner.own) and not self.helper and own.prepared and own.cache.whole

    def _start(self, own: TrialRow, row: Row, limit: Limit) -> None:
        request = row.request
        length = min(self.chain, limit.nodes, row.wants - 1)
        own.start(request, min(length, self._room(own, request)) if length > 0 else 0, limit.least)
        if self.planner.own:
            own.request.stats = request.stats.inner()
        else:  # a level without sources draws what the level above tests
            sampler = own.request.sampler
            own.request.sampler = replace(sampler, salt=sampler.draft_salt())
        if own.missing > 0:
            own.follow()

    def _extend(self, rows: Sequence[TrialRow]) -> None:
        """Take a step with rows whose chains are too short, or several where tokens can stay on the device."""
        if not self.planner.own and device_chain.fits(self.model, [row.request for row in rows]):
            self._extend_on_device(rows)
            return
        before = [row.request.fork() if row.request.sampler.method == "rejection" else None for row in rows]
        outcomes, seconds = self.step(rows, [self.nodes] * len(rows))
        for row, fork, outcome in zip(rows, before, outcomes, strict=True):
            assert outcome is not None
            row.extend(outcome, fork)
            row.request.stats.add_seconds(*seconds)
            if row.least > 0:
                row.stop_if_unlikely(probabilities(row.request, outcome), self._confidence)

    def _extend_on_device(self, rows: Sequence[TrialRow]) -> None:
        began, early = time.perf_counter(), any(row.least > 0 for row in rows)
        most = device_chain.TOKENS_BEFORE_A_LOOK if early else UNLIMITED
        pieces = device_chain.draft(self.model, rows, min(most, *(row.missing for row in rows)), early)
        seconds = time.perf_counter() - began
        for row, piece in zip(rows, pieces, strict=True):
            row.take_piece(piece, self._confidence)
            row.request.stats.add_seconds(0.0, seconds, 0.0)

    def _room(self, own: TrialRow, request: Request) -> int:
        """Return how many tokens can be drafted: none before the prefill's end, or after an unknown token."""
        if not own.prepared:
            return 0
        cache, source = own.cache, own.cache.source
        if source is not None:
            ready = (cache.synced > 0 or cache.whole) and cache.ready and source.length == len(own.upper.request) - 1
        else:
            ready = cache.length >= own.first
        return self._room_after(request.tokens[own.first :], len(request)) if ready else 0

    def _room_after(self, tokens: IntArray, length: int | None = None) -> int:
        """Return how many tokens the model can draft after ``tokens``, the end of (by default, all of) a
        ``length``-token request."""
        if int(tokens.max()) >= self.model.vocabulary:
            return 0
        limit = self.model.limit
        return UNLIMITED if limit is None else max(0, limit + 1 - (len(tokens) if length is None else length))

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        """Reselect the sparse cache's tokens by the target's last queries, and calibrate confidence in chains."""
        for row, outcome in zip(rows, outcomes, strict=True):
            own: TrialRow = row.states[self]
            if not own.prepared or not outcome.verdict.tokens:
                continue
            accepted, drafted = len(outcome.verdict.path), len(outcome.tree)
            self._confidence.learn(own.probabilities[:drafted], accepted)
            own.probabilities = []
            if own.cache.source is None or own.cache.whole:
                continue
            if drafted:
                nodes = drafted + 1  # the root and the tree's nodes are the pass's last rows
                queries = [-nodes, *(node + 1 - nodes for node in outcome.verdict.path)]
                own.cache.verified(queries, drafted, accepted)
            self._prepare(own, row.request, READ_BLOCK)


def _kept(states: torch.Tensor, block: Block, path: Sequence[int]) -> torch.Tensor:
    """Return the states of the pending tokens and the accepted nodes."""
    pending = len(block.pending)
    rows = [*range(pending), *(pending + node for node in path)]
    chain = len(path) == 0 or path[-1] == len(path) - 1
    return states[: len(rows)] if chain else states[rows]


def _after(outcome: Outcome | None, forced: Sequence[int]) -> Outcome | None:
    """Return an outcome without the forced tokens that its tree begins with."""
    if outcome is None or not forced:
        return outcome
    count, verdict, best = len(forced), outcome.verdict, outcome.best
    path = [node - count for node in verdict.path[count:]]
    best = None if best is None else BestTokens(best.tokens[count:], best.scores[count:])
    tree, logits = outcome.tree.behind(count), outcome.logits[count:]
    return Outcome(tree, Verdict(path, verdict.tokens[count:]), logits, best, outcome.states, outcome.start)
