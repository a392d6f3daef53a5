"""Decide what a level's step drafts: everything that its sources propose, or only what pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.decoding import asking
from forerun.decoding.row import Row, RowState
from forerun.decoding.source import Limit, Source, Wants
from forerun.kv.cache import READ_BLOCK
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer
from forerun.policy import choice
from forerun.policy.chain_preparation import ChainPreparation, Prompt
from forerun.policy.choice import Choice
from forerun.policy.cost_curve import CostCurve, CostTable
from forerun.policy.decision import Decision, DraftPasses
from forerun.policy.gains import AcceptanceRate
from forerun.policy.pass_shape import PassShape

UNSURE = float("inf")
"""Default confidence at which a tree needs no costly source: none, so that source always drafts."""


GAIN_WEIGHT = 0.2
"""Weight of the last step in a row's recent tokens per step: averages over a handful of steps."""


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
        """Let the sources process a piece of a prompt. Returns whether all are done."""
        unread = [source for source in self.own if not asking.read(source, row, tokens)]
        return not unread

    def rests(self, rows: Sequence[Row], decodes: bool) -> bool:
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
        trees = asking.propose(first, rows, limits) if first is not None else [DraftTree.empty()] * len(rows)
        if self.costly is not None:
            wide = [Limit(limit.nodes) for limit in limits]
            trees = asking.merge(trees, self.costly, rows, wide, self.confident)
        return trees

    def learns_from(self, seconds: StepTimes) -> bool:
        """Record what a step took, and return whether any source learns from its outcomes."""
        return bool(self.sources)

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome | None], seconds: StepTimes) -> None:
        """Update the sources. Tokens of a lower level are tentative and teach nothing."""
        known = [(row, outcome) for row, outcome in zip(rows, outcomes, strict=True) if outcome and not row.tentative]
        if known:
            for source in self.sources:
                asking.learn(source, [row for row, _ in known], [outcome for _, outcome in known])


@dataclass(slots=True)
class _RowPlan(RowState):
    """An ``AdaptivePlanner``'s state of a row.

    Attributes:
        unread, ready: whether preparing the prompt for chains has not started, or is finished.
        due: length of the request at which to reconsider whether preparing pays; ``pays``: the last answer.
        seconds: spent on preparing.
    """

    planner: AdaptivePlanner
    rate: AcceptanceRate
    gain: float = 1.0
    unread: bool = True
    ready: bool = False
    due: int = 0
    pays: bool = False
    seconds: float = 0.0

    def close(self) -> None:
        self.planner.live -= 1
        if not self.planner.live:
            self.planner.end_rest()


@dataclass(slots=True)
class _PlannedStep:
    decision: Decision
    rows: Sequence[Row]
    states: Sequence[_RowPlan]


@dataclass(slots=True)
class _Rest:
    """A decision to draft nothing, which holds for ``left`` more steps after ``steps`` so far.

    ``deciding`` and ``passed`` are seconds spent on checking that it holds, and on these steps' passes.
    """

    plan: _PlannedStep
    left: int
    steps: int = 0
    deciding: float = 0.0
    passed: float = 0.0


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
        self._clock, self._runtime, self._models = runtime.clock, runtime, [model, *([small] if small else [])]
        self._vocabulary, self._longest, self._beyond, self._stops_early = (
            model.vocabulary,
            longest,
            beyond,
            stops_early,
        )
        self._draft = draft or DraftPasses()
        others = [each for source in (trees, costly) if source is not None for each in source.walk()]
        self._levels = [each for each in self.sources if each not in others]
        """What only learns once a row is prepared for chains."""
        self._measured: list[CostCurve] = []
        self._under_way: _PlannedStep | None = None
        self._rest: _Rest | None = None
        self._resting = False  # in the step under way
        self._fresh = True  # no step since there were no rows
        self.live = 0
        """Open rows."""
        self._opened = 0

    def warm_up(self) -> None:
        choice.warm_up()
        self._choose()

    @property
    def choice(self) -> Choice:
        """The decision maker, created when first needed."""
        if not self._measured:
            self._choose()
        return self._choice

    def _choose(self) -> None:
        self._measured = [self._runtime.costs(model) for model in self._models]
        target, *small = self._measured
        draft = self._draft
        if small and small[0].unit and target.unit:
            share = small[0].unit / target.unit
            draft = DraftPasses(draft.reads, draft.weight, CostTable(small[0]), share, draft.window, draft.alone)
        costly = self.costly
        self._choice = Choice(target, self._vocabulary, draft, None if costly is None else lambda: costly.seconds)
        self._preparation = ChainPreparation(self._choice, self._longest, self.trees is not None)

    def open(self, row: Row) -> _RowPlan:
        self._opened += 1
        doubtful = any(costs.doubtful for costs in self._measured)
        if doubtful and not self.live and self._opened.bit_count() == 1:  # before the 1st, 2nd, 4th, 8th request
            self._choose()
        self._fresh |= self.live == 0
        self.live += 1
        return _RowPlan(self, self.choice.chains.child())

    # reading prompts

    def read(self, row: Row, tokens: int) -> bool:
        """Let the cheap sources process the prompt, and prepare it for chains if that is expected to pay."""
        state: _RowPlan = row.states[self]
        cheap = [source for source in (self.trees, self.costly) if source is not None]
        unread = [source for source in cheap if not asking.read(source, row, tokens)]
        if unread:
            return False
        if self.chains is None or state.ready:
            return True
        if state.unread and (not self._may_read(row, state) or _is_short(row)):
            return True
        return self._read_on(row, state, tokens)

    def _may_read(self, row: Row, state: _RowPlan) -> bool:
        """Decide whether to prepare a row for chains, anew every ``READ_BLOCK`` tokens; for a short request, whose
        cache needs a single pass, whenever its answer has doubled."""
        short = _is_short(row)
        if not state.unread or self.trees is None:
            return True
        length = len(row.request)
        if length >= state.due:
            state.due = length + (length - row.request.prompt_length + 1 if short else READ_BLOCK)
            state.pays = length > self._beyond and self._preparation.pays(self._prompt(row), self.choice.gain)
        return state.pays

    def _prompt(self, row: Row) -> Prompt:
        return Prompt(len(row.request), row.request.prompt_length, row.wants, _is_short(row))

    def _read_on(self, row: Row, state: _RowPlan, tokens: int) -> bool:
        assert self.chains is not None
        state.unread, began = False, self._clock()
        state.ready = asking.read(self.chains, row, tokens)
        state.seconds += self._clock() - began
        if state.ready:
            self._preparation.record(self._prompt(row), state.seconds)
        return state.ready

    def _chains_ready(self, rows: Sequence[Row], states: Sequence[_RowPlan]) -> bool:
        """Return whether all rows can have chains. Short rows are prepared here if another row already is."""
        begun = not all(state.unread for state in states)
        allowed = [
            self._may_read(row, state) or (begun and _is_short(row)) for row, state in zip(rows, states, strict=True)
        ]
        return all(allowed)

    # a step

    def rests(self, rows: Sequence[Row], decodes: bool) -> bool:
        """Return whether the last decision to draft nothing holds: for the same rows, if none promises more."""
        rest, self._resting = self._rest, False
        if rest is None or not decodes or not rest.left or self.trees is None:
            return False
        if [id(row.states) for row in rows] != [id(row.states) for row in rest.plan.rows]:
            return False
        began = self._clock()
        kinds = self._choice.kinds(self.trees.promise(rows))
        self._resting = all(now <= then for now, then in zip(kinds, rest.plan.decision.kinds, strict=True))
        if self._resting:
            rest.left -= 1
            rest.steps += 1
            rest.deciding += self._clock() - began
        return self._resting

    def plan(
        self, rows: Sequence[Row], budgets: Sequence[int], shape: Callable[[], PassShape]
    ) -> list[DraftTree] | None:
        """Return the best part of each tree, or chains, or None, whichever is worth most."""
        began = self._clock()
        self.end_rest()
        trees = self._decide(rows, shape())
        if self._under_way is not None:
            self._under_way.decision.planning = self._clock() - began
        return trees

    def end_rest(self) -> None:
        """Book the steps that drafted nothing by the last decision."""
        rest, self._rest = self._rest, None
        if rest is not None and rest.steps:
            self._choice.rested(rest.plan.decision, rest.steps, rest.deciding, rest.passed)
            for state in rest.plan.states:
                state.gain = 1.0 + (1.0 - GAIN_WEIGHT) ** rest.steps * (state.gain - 1.0)

    def _decide(self, rows: Sequence[Row], shape: PassShape) -> list[DraftTree] | None:
        states = [row.states[self] for row in rows]
        chosen = self.choice
        decision = chosen.begin(shape, [state.gain for state in states], self._fresh)
        self._fresh = False
        self._under_way = _PlannedStep(decision, rows, states)
        if self.costly is not None:
            self.states = self.wants.states if decision.costly else ()
            self.costly.trusted = decision.trusted
        if shape.decodes and chosen.costs.plain_step_due(chosen.gain):
            return None
        trees = self._trees(rows, decision)
        if self.chains is not None and shape.decodes and max(shape.cached) >= self._beyond:
            trees = self._chains(rows, states, decision) or trees
        return trees

    def _trees(self, rows: Sequence[Row], decision: Decision) -> list[DraftTree] | None:
        if self.trees is None:
            return None
        asked = self._choice.ask(decision, self.trees.promise(rows))
        if not asked and not decision.costly:
            return None
        began = self._clock()
        limits, trees = [Limit(*limit) for limit in self._choice.limits(decision)], [DraftTree.empty()] * len(rows)
        if asked:
            found = asking.propose(self.trees, [rows[row] for row in asked], [limits[row] for row in asked])
            for row, tree in zip(asked, found, strict=True):
                trees[row] = tree
        if decision.costly:
            trees = self._deepened(trees, rows, limits, decision)
        if decision.rests:
            return None
        kept = self._choice.prune(decision, trees)
        if asked:
            decision.asking = self._clock() - began - decision.deepening
        return kept

    def _deepened(
        self, trees: list[DraftTree], rows: Sequence[Row], limits: Sequence[Limit], decision: Decision
    ) -> list[DraftTree]:
        assert self.costly is not None
        began, wide = self._clock(), [Limit(limit.nodes) for limit in limits]
        trees = asking.merge(
            trees, self.costly, rows, wide, self.confident, lambda unsure: self._choice.deepen(decision, unsure)
        )
        if decision.deeper:
            decision.deepening = self._clock() - began
        return trees

    def _chains(self, rows: Sequence[Row], states: Sequence[_RowPlan], decision: Decision) -> list[DraftTree] | None:
        assert self.chains is not None
        most = min(self._longest, max(decision.shape.budgets), max(decision.shape.depths))
        if most < 1 or not self._chains_ready(rows, states):
            return None
        length, least = self._choice.chain_length(decision, [state.rate for state in states], most, self._stops_early)
        if not length:
            return None
        unread = [
            row for row, state in zip(rows, states, strict=True)
            if not (state.ready or self._read_on(row, state, READ_BLOCK))
        ]  # fmt: skip
        if unread:
            decision.chain = 0
            return None
        began = self._clock()
        limits = [Limit(min(length, budget), each) for budget, each in zip(decision.shape.budgets, least, strict=True)]
        trees = asking.propose(self.chains, rows, limits)
        decision.drafting = self._clock() - began
        return trees

    def learns_from(self, seconds: StepTimes) -> bool:
        if self._resting and self._rest is not None:
            self._rest.passed += seconds.scoring + seconds.verifying
            chaining = not all(state.unread for state in self._rest.plan.states)
            return any(source.follows and (chaining or source not in self._levels) for source in self.sources)
        return True

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome | None], seconds: StepTimes) -> None:
        began = self._clock()
        super().learn(rows, outcomes, seconds)
        plan, self._under_way = self._under_way, None
        if plan is None:
            return
        taught = self._clock() - began
        by_row = {id(row.states): outcome for row, outcome in zip(rows, outcomes, strict=True)}
        own = [by_row.get(id(row.states)) for row in plan.rows]
        if plan.decision.asked:
            plan.decision.asking += taught
        elif plan.decision.deeper:
            plan.decision.deepening += taught
        rates = [state.rate for state in plan.states]
        passed = seconds.scoring + seconds.verifying  # without drafts, these are the plain pass
        tokens = self._choice.learn(plan.decision, own, rates, passed, taught)
        for state, got in zip(plan.states, tokens, strict=True):
            state.gain += GAIN_WEIGHT * (got - state.gain)
        steps = self._choice.patience(plan.decision)
        if self.chains is not None:
            steps = min(steps, self._beyond - max(plan.decision.shape.cached))
        if steps > 0:
            self._rest = _Rest(plan, steps)


def _is_short(row: Row) -> bool:
    """Return whether a row's cache for chains needs a single pass."""
    return len(row.request) <= READ_BLOCK
