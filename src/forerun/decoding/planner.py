"""Decide what a level's step drafts: everything that its sources propose, or only what pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.decoding import proposals
from forerun.decoding.chain_preparation import ChainPreparation, PreparedRow
from forerun.decoding.row import Row, RowState
from forerun.decoding.source import Limit, Source, Wants
from forerun.kv.cache import READ_BLOCK
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer
from forerun.policy import choice
from forerun.policy.choice import Choice
from forerun.policy.cost_curve import CostTable
from forerun.policy.decision import Decision, PassShape, PlainSteps
from forerun.policy.step_costs import DraftPasses

UNSURE = float("inf")
"""Default confidence at which a tree needs no costly source: never, so that source always drafts."""


class StepTimes(NamedTuple):
    """Seconds of planning, of the pass, and of verifying and committing."""

    planning: float
    scoring: float
    verifying: float


class Planner:
    """Scores everything that its sources propose.

    Args:
        trees: a cheap source.
        costly: a head or small model, for rows where ``trees`` expects fewer than ``confident`` accepted nodes.
        chains: a source that needs a model pass per token; used only where there are no ``trees``.
    """

    def __init__(
        self,
        trees: Source | None = None,
        costly: Source | None = None,
        chains: Source | None = None,
        confident: float = UNSURE,
    ) -> None:
        self.trees, self.costly, self.chains, self.confident = trees, costly, chains, confident
        self.own = [source for source in (trees, costly, chains) if source is not None]
        self.sources = list(dict.fromkeys(each for source in self.own for each in source.walk()))
        """All sources, including those of lower levels, without duplicates."""
        self.wants = Wants(
            max((source.wants.best for source in self.sources), default=0),
            next((source.wants.states for source in self.sources if source.wants.states), ()),
        )
        self.states = self.wants.states
        """Layers whose hidden states the next pass keeps; none while no source needs them."""

    @contextmanager
    def watched_by(self, source: Source) -> Iterator[None]:
        """Let a source learn from everything committed meanwhile, without proposing."""
        self.sources.append(source)
        try:
            yield
        finally:
            self.sources.remove(source)

    def warm_up(self) -> None:
        """Compile or measure what planning needs, so that no request waits for it."""

    def open(self, row: Row) -> Any:
        """Start a row; see ``Source.open``."""

    def read(self, row: Row, tokens: int) -> bool:
        """Let the sources process a piece of a prompt; return whether all are done."""
        done = [proposals.read(source, row, tokens) for source in self.own]
        return all(done)

    def skips(self, rows: Sequence[Row], decodes: bool) -> bool:
        """Return whether it is known without planning that nothing is drafted; ``decodes``: the step only decodes."""
        return not self.own

    def plan(
        self, rows: Sequence[Row], budgets: Sequence[int], shape: Callable[[], PassShape]
    ) -> list[DraftTree] | None:
        """Return each row's draft, of up to ``budgets`` nodes; None for none. ``shape`` describes the pass."""
        return self.draft(rows, list(map(Limit, budgets)))

    def draft(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        """Draft with the cheap source, helped by the costly one where needed; without a cheap one, draft chains."""
        first = self.trees or self.chains
        trees = proposals.propose(first, rows, limits) if first is not None else [DraftTree.empty()] * len(rows)
        if self.costly is not None:
            wide = [Limit(limit.nodes) for limit in limits]
            trees = proposals.merge(trees, self.costly, rows, wide, self.confident)
        return trees

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome | None], seconds: StepTimes) -> None:
        """Update the planner and its sources after each step (``outcomes``: None for failed rows). Tokens of a lower
        level are tentative and teach nothing; chunks of prompts are for sources that need hidden states."""
        known = [
            (row, outcome)
            for row, outcome in (zip(rows, outcomes, strict=True) if self.sources else ())
            if outcome is not None and not row.tentative and row.request.drafts
            if outcome.verdict.tokens or self.wants.states
        ]
        if known:
            for source in self.sources:
                proposals.learn(source, [row for row, _ in known], [outcome for _, outcome in known])


@dataclass
class _RowPlan(RowState, PreparedRow):
    """An ``AdaptivePlanner``'s state of a row; ``closed`` is called when it ends."""

    closed: Callable[[], None] = field(kw_only=True)

    def close(self) -> None:
        self.closed()


class AdaptivePlanner(Planner):
    """Scores what pays by measured costs; see ``policy.choice``.

    Args:
        longest: maximum draft length of a chain.
        beyond: cached tokens that a row needs before chains are drafted.
        stops_early: whether chains end where a token is not worth its cost.
        draft, small: first guess of what the chains' passes cost, and the small model among their levels, if any.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: Scorer,
        trees: Source | None = None,
        costly: Source | None = None,
        chains: Source | None = None,
        confident: float = UNSURE,
        *,
        longest: int = 1,
        beyond: int = 0,
        stops_early: bool = True,
        draft: DraftPasses | None = None,
        small: Scorer | None = None,
    ) -> None:
        super().__init__(trees, costly, chains, confident)
        if costly is not None:
            self.states, costly.trusted = (), False
        self._clock, self._runtime, self._model, self._small = runtime.clock or model.clock, runtime, model, small
        self._longest, self._beyond, self._stops_early = longest, beyond, stops_early
        self._draft = draft or DraftPasses()
        others = [each for source in (trees, costly) if source is not None for each in source.walk()]
        self._levels = [each for each in self.sources if each not in others]
        """What only learns once a row is prepared for chains."""
        self._choice: Choice | None = None
        self._preparation: ChainPreparation | None = None
        self._doubtful = False  # whether passes were measured on a busy machine
        self._opened = self._live = 0  # rows so far, and now
        self._fresh = True  # no step since there were no rows
        self._planned: tuple[Decision, Sequence[Row]] | None = None  # of the step under way
        self._plain: PlainSteps | None = None
        self._plain_rows: list[dict[Any, Any]] = []  # the rows for which it holds, by their states
        self._followed = False  # whether a source learns from such steps
        self._skipped = False  # whether it holds in the step under way

    def warm_up(self) -> None:
        choice.warm_up()
        self._measure()

    @property
    def choice(self) -> Choice:
        """The decision maker, created when first needed."""
        return self._choice or self._measure()

    def _measure(self) -> Choice:
        costs = self._runtime.costs(self._model)
        small = None if self._small is None else self._runtime.costs(self._small)
        draft, costly = self._draft, self.costly
        self._doubtful = costs.doubtful or (small is not None and small.doubtful)
        if small is not None and small.unit and costs.unit:
            draft = replace(draft, small=CostTable(small), share=small.unit / costs.unit)
        measured = None if costly is None else lambda: costly.seconds
        self._choice = made = Choice(costs, self._model.vocabulary, draft, measured)
        if self.chains is not None:
            self._preparation = ChainPreparation(
                made, self.chains, self._longest, self._beyond, self.trees is not None, self._clock
            )
        return made

    def open(self, row: Row) -> _RowPlan:
        self._opened += 1
        if self._doubtful and not self._live and self._opened.bit_count() == 1:  # the 1st, 2nd, 4th, 8th request
            self._measure()
        self._fresh |= self._live == 0
        self._live += 1
        return _RowPlan(self.choice.chains.child(), closed=self._close_row)

    def _close_row(self) -> None:
        self._live -= 1
        if not self._live:
            self._end_plain_steps()

    def read(self, row: Row, tokens: int) -> bool:
        """Let the cheap sources process the prompt, and prepare it for chains if that is expected to pay."""
        cheap = [source for source in (self.trees, self.costly) if source is not None]
        done = [proposals.read(source, row, tokens) for source in cheap]
        if not all(done):
            return False
        return self._preparation is None or self._preparation.read(row, row.states[self], tokens)

    def skips(self, rows: Sequence[Row], decodes: bool) -> bool:
        """Return whether the last decision to draft nothing holds: for the same rows, if none promises more."""
        plain, self._skipped = self._plain, False
        if plain is None or not decodes or not plain.left or len(rows) != len(self._plain_rows):
            return False
        if any(row.states is not own for row, own in zip(rows, self._plain_rows, strict=True)):
            return False
        if plain.unchecked > 0:
            plain.unchecked -= 1
        elif self._promises_more(plain, rows):
            return False
        plain.left -= 1
        plain.steps += 1
        self._skipped = True
        return True

    def _promises_more(self, plain: PlainSteps, rows: Sequence[Row]) -> bool:
        assert self.trees is not None
        began = self._clock()
        more = self.choice.promises_more(plain, proposals.promises(self.trees, rows))
        plain.deciding += self._clock() - began
        return more

    def plan(
        self, rows: Sequence[Row], budgets: Sequence[int], shape: Callable[[], PassShape]
    ) -> list[DraftTree] | None:
        """Return the best part of each tree, or chains, or None, whichever is worth most."""
        began = self._clock()
        self._end_plain_steps()
        known = None if self.trees is None else proposals.promises(self.trees, rows)
        decision = self.choice.decide(shape(), [row.states[self] for row in rows], known, self._fresh)
        self._fresh = False
        trees = self._draft_best(rows, decision)
        decision.planning = self._clock() - began
        self._planned = decision, rows
        return trees

    def _draft_best(self, rows: Sequence[Row], decision: Decision) -> list[DraftTree] | None:
        shape = decision.shape
        if self.costly is not None:
            self.states = self.wants.states if decision.costly else ()
            self.costly.trusted = decision.trusted
        if decision.due:
            return None
        trees = None if self.trees is None else self._trees(self.trees, rows, decision)
        if self._preparation is not None and shape.decodes and max(shape.cached[: len(rows)]) >= self._beyond:
            trees = self._chains(self._preparation, rows, decision) or trees
        return trees

    def _trees(self, source: Source, rows: Sequence[Row], decision: Decision) -> list[DraftTree] | None:
        proposing = decision.proposing
        if not proposing and not decision.costly:
            return None
        began, trees = self._clock(), [DraftTree.empty()] * len(rows)
        limits = [Limit(*limit) for limit in decision.limits]
        if proposing:
            found = proposals.propose(source, [rows[row] for row in proposing], [limits[row] for row in proposing])
            for row, tree in zip(proposing, found, strict=True):
                trees[row] = tree
        if decision.costly:
            trees = self._extended(trees, rows, limits, decision)
        if decision.plain_step:
            return None
        kept = self.choice.prune(decision, trees)
        if proposing:
            decision.proposal = self._clock() - began - decision.extension
        return kept

    def _extended(
        self, trees: list[DraftTree], rows: Sequence[Row], limits: Sequence[Limit], decision: Decision
    ) -> list[DraftTree]:
        assert self.costly is not None
        began, wide = self._clock(), [Limit(limit.nodes) for limit in limits]
        trees = proposals.merge(
            trees, self.costly, rows, wide, self.confident,
            lambda unsure: self.choice.choose_extensions(decision, unsure),
        )  # fmt: skip
        if decision.extended:
            decision.extension = self._clock() - began
        return trees

    def _chains(self, preparation: ChainPreparation, rows: Sequence[Row], decision: Decision) -> list[DraftTree] | None:
        assert self.chains is not None
        shape, states = decision.shape, [row.states[self] for row in rows]
        most = min(self._longest, max(shape.budgets), max(shape.left[: len(rows)]) - 1)
        if most < 1 or not preparation.allows(rows, states):
            return None
        length, least = self.choice.chain_length(decision, most, self._stops_early)
        if not length:
            return None
        ready = [preparation.go_on(row, state, READ_BLOCK) for row, state in zip(rows, states, strict=True)]
        if not all(ready):
            self.choice.drop_chain(decision)
            return None
        began = self._clock()
        limits = [Limit(min(length, budget), each) for budget, each in zip(shape.budgets, least, strict=True)]
        trees = proposals.propose(self.chains, rows, limits)
        decision.drafting = self._clock() - began
        return trees

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome | None], seconds: StepTimes) -> None:
        passed = seconds.scoring + seconds.verifying  # without drafts, these are the plain pass
        if self._skipped and self._plain is not None:
            self._skipped, self._plain.passed = False, self._plain.passed + passed
            if self._followed:
                super().learn(rows, outcomes, seconds)
            return
        began = self._clock()
        super().learn(rows, outcomes, seconds)
        if self._planned is None:
            return
        taught = self._clock() - began
        (decision, planned), self._planned = self._planned, None
        if decision.proposing:
            decision.proposal += taught
        elif decision.extended:
            decision.extension += taught
        by_row = {id(row.states): outcome for row, outcome in zip(rows, outcomes, strict=True)}
        self.choice.learn(decision, [by_row.get(id(row.states)) for row in planned], passed, taught)
        until_chains = (
            float("inf") if self.chains is None else self._beyond - max(decision.shape.cached[: len(planned)])
        )
        self._plain = self.choice.plain_steps(decision, until_chains)
        if self._plain is not None:
            self._plain_rows = [row.states for row in planned]
            chaining = not all(row.states[self].unread for row in planned)
            self._followed = any(each.follows and (chaining or each not in self._levels) for each in self.sources)

    def _end_plain_steps(self) -> None:
        """Book the steps that drafted nothing by the last decision."""
        plain, self._plain = self._plain, None
        if plain is not None:
            self.choice.learn_plain(plain)
