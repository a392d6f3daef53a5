"""Choose what a step drafts: a tree from cheap sources, a chain from a model, or nothing; and learn from the outcomes.

The rules and the state that they share are compiled; see ``rules`` and ``policy_tables``. Python only converts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from forerun.core.array_handles import ArrayHandles
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome
from forerun.policy import rules
from forerun.policy.cost_curve import CostCurve, CostTable
from forerun.policy.decision import Decision, PassShape, PlainSteps, Pruned
from forerun.policy.gains import SUFFIXES, AcceptanceRate, RowGains, first_gains
from forerun.policy.ledger import START_SLACK, TRIAL_SLACK
from forerun.policy.policy_tables import CHAINS, EXTENSIONS, PASSES, PREPARING, ROW, SMALL_CHAINS, NodeTable, Policy
from forerun.policy.step_costs import (
    SLOPE_NODES,
    DraftPasses,
    begin_times,
)
from forerun.policy.time_model import LinearCost
from forerun.policy.tree_pruning import ALL_JUDGED, NOT_JUDGED, SCORED_JUDGED

EMPTY = DraftTree.empty()


class Choice:
    """Decides what a level drafts, and learns from the outcomes. ``chains`` is the acceptance rate of all chains.

    Args:
        costs: of the target's passes; ``draft``: first guess of those that draft chains.
        costly: returns the measured seconds of a costly source's draft, or None; None without such a source.
    """

    def __init__(
        self,
        costs: CostCurve,
        vocabulary: int,
        draft: DraftPasses | None = None,
        costly: Callable[[], float | None] | None = None,
    ) -> None:
        self.costs, self.draft = CostTable(costs), draft or DraftPasses()
        self.chains = AcceptanceRate.guessed(self.draft.accepted)
        self._vocabulary, self._costly = vocabulary, costly
        self._policy, self._handles = Policy.allocate(self.costs, *first_gains()), ArrayHandles[Policy]()
        self.ledger = account = self._policy.account[0]
        account.slack, account.trials = START_SLACK, TRIAL_SLACK
        account.stretch = account.tokens = account.spent = 1.0
        account.per_row = costs.per_row
        begin_times(self._policy, costs.unit)

    def _address(self, tokens: int = 0, nodes: int = 0, rows: int = 0) -> int:
        """Return the address of the state for a pass over up to so many tokens, proposed nodes, and rows."""
        policy = self._policy
        if len(policy.passes) <= tokens:
            passes, looks = self.costs.curves(2 * tokens)
            policy = policy._replace(passes=passes, looks=looks)
        if len(policy.nodes.tokens) < nodes:
            policy = policy._replace(nodes=NodeTable.allocate(2 * nodes))
        if len(policy.rows) < rows:
            policy = policy._replace(rows=np.zeros(2 * rows, ROW))
        self._policy = policy
        return self._handles.at(policy)

    @property
    def gain(self) -> float:
        """Recent tokens per row in the time of a plain step."""
        return float(self.ledger.tokens / self.ledger.spent)

    @property
    def unit(self) -> float:
        """Seconds of a plain pass over one token; 0 if unknown."""
        passes = self._policy.times[PASSES]
        return float(passes.scale) if self.ledger.loaded or passes.count else 0.0

    @property
    def node_share(self) -> float:
        """What nodes really cost, as a share of the curve's figure."""
        return float(self._policy.times[PASSES].each) if self.ledger.plain_measured else 1.0

    @property
    def preparing(self) -> float:
        """Cost of preparing requests for chains, relative to the first guess."""
        return float(self._policy.times[PREPARING].scale)

    def draft_line(self, cached: Sequence[int]) -> LinearCost:
        """Return the cost of drafting chains, by draft length."""
        time, size = self._policy.times[self._part(cached)], self.draft.cost(cached, self.costs)
        return LinearCost(float(time.scale * time.start) * size, float(time.scale * time.each) * size)

    def _part(self, cached: Sequence[int]) -> int:
        return SMALL_CHAINS if self.draft.are_alone(cached) else CHAINS

    # deciding

    def decide(
        self, shape: PassShape, rows: Sequence[RowGains], known: Sequence[int | None] | None, fresh: bool = False
    ) -> Decision:
        """Choose the rows that propose trees.

        Args:
            rows: those that may have drafts; ``known``: the length of each one's known suffix, None if unknown; None
                without a cheap source.
            fresh: whether it is the first step of a batch.
        """
        others = len(shape.left) - len(rows)
        suffixes = [-1] * len(rows) if known is None else [-1 if each is None else each for each in known]
        drafted = [*shape.pending, *[1] * others, *shape.budgets, *[0] * others, *suffixes, *[-1] * others]
        given = np.array([*shape.left, *shape.cached, *drafted])
        gains = np.array([row.tokens for row in rows] + [1.0] * others)
        if self._costly is not None:
            self._policy.seconds[EXTENSIONS] = self._costly() or 0.0
        address = self._address(shape.tokens + max(len(rows), SLOPE_NODES) + 2, rows=len(shape.left))
        self._policy.clear()
        sizes = len(rows), shape.beside, shape.closed
        asks, extends = known is not None, self._costly is not None
        due, costly, trusted = rules.decide(address, given, gains, *sizes, fresh, asks, extends)
        proposes, most, least = (self._column(name, len(rows)) for name in ("proposes", "limit", "least"))
        return Decision(
            shape, rows, None if due else known, [row for row, yes in enumerate(proposes) if yes],
            list(zip(most, least, strict=True)), due, costly, trusted,
        )  # fmt: skip

    def choose_extensions(self, decision: Decision, trees: Mapping[int, DraftTree]) -> list[int]:
        """Choose the rows, among these with their trees, that a costly source drafts for."""
        table = self._policy.rows
        for row, tree in trees.items():
            table["promise"][row], table["extends"][row] = tree.expected, table["budget"][row] > 0
        rules.choose_extensions(self._address())
        extends = self._column("extends", len(decision.rows))
        decision.extended = {row: trees[row] for row, yes in enumerate(extends) if yes}
        return list(decision.extended)

    def prune(self, decision: Decision, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Return the part of each row's tree that is worth scoring."""
        decision.trees = trees
        if decision.extended:
            before = [decision.extended.get(row, tree) for row, tree in enumerate(trees)]
            decision.worth_it = self._pruned(decision, before, False), self._pruned(decision, trees, False)
        return self._pruned(decision, trees, True).trees

    def _pruned(self, decision: Decision, trees: Sequence[DraftTree], limited: bool) -> Pruned:
        begins = [0, *accumulate(map(len, trees))]
        address = self._address(decision.shape.tokens + begins[-1] + 1, begins[-1])
        nodes, stated = self._policy.nodes, [tree.q is None and tree.probability is not None for tree in trees]
        for tree, begin, end, states in zip(trees, begins, begins[1:], stated, strict=False):
            if end > begin:
                nodes.tokens[begin:end], nodes.parents[begin:end] = tree.tokens, tree.parents
                if states:
                    nodes.stated[begin:end] = tree.probability
        found = rules.prune_trees(address, np.array([*begins, *stated]), self._vocabulary, limited)
        return Pruned(list(map(self._part_of, trees, self._column("kept", len(trees)), begins)), *found)

    def _part_of(self, tree: DraftTree, size: int, begin: int) -> DraftTree:
        if size == len(tree) or not size:
            return tree if size else EMPTY
        end, nodes = begin + size, self._policy.nodes
        keep = nodes.kept[begin : begin + len(tree)] >= 0
        if tree.q is not None:
            return tree.select(keep)
        origins = None if tree.origins is None else tree.origins[keep]
        return DraftTree.unchecked(
            nodes.kept_tokens[begin:end].copy(), nodes.kept_parents[begin:end].copy(), origins=origins
        )

    def chain_length(self, decision: Decision, most: int, stops_early: bool) -> tuple[int, list[float]]:
        """Choose the draft length of chains, up to ``most``, after the step's tree was pruned; 0 if the tree or nothing
        is better. Also return, by row, the probability of full acceptance at which another token does not pay."""
        table, count = self._policy.rows, len(decision.rows)
        cached = decision.shape.cached[:count]
        for name, values in (
            ("sure", [row.rate.rate() for row in decision.rows]),
            ("surer", [row.rate.rate(rules.DOUBT) for row in decision.rows]),
            ("longest", [row.rate.longest for row in decision.rows]),
        ):
            table[name][:count] = values
        address = self._address(decision.shape.tokens + most * count + 1)
        decision.chain = rules.chain_length(address, *self.draft_line(cached), most, stops_early)
        if decision.chain:
            self._policy.step["passes"] = self.draft.cost(cached, self.costs)
        return decision.chain, self._column("least", count)

    def drop_chain(self, decision: Decision) -> None:
        """Take back the decision to draft chains."""
        decision.chain, self._policy.step["passes"] = 0, 0.0

    def plain_steps(self, decision: Decision, most: float) -> PlainSteps | None:
        """Return how many steps, at most ``most``, a decision to draft nothing holds: until the slack has grown by what
        it lacked, or a row promises enough. None if the next step must decide again."""
        shape, known = decision.shape, decision.known
        if not (decision.plain_step and known and shape.decodes) or len(shape.left) > len(known):
            return None
        count, suffix = rules.hold(self._address(), most, None not in known)
        if count <= 0:
            return None
        plain = PlainSteps(decision.rows, self._column("kind", len(known)), count)
        if suffix:
            plain.suffix = suffix
            self.promises_more(plain, known)
        return plain

    def promises_more(self, plain: PlainSteps, known: Sequence[int | None]) -> bool:
        """Return whether a known suffix is long enough to end a decision to draft nothing, else note when it may be."""
        missing = [
            max(plain.suffix, SUFFIXES[kind]) - max(each or 0, SUFFIXES[0] - 1)
            for each, kind in zip(known, plain.kinds, strict=True)
            if kind < len(SUFFIXES)
        ]
        plain.unchecked = min(missing, default=math.inf) - 1
        return plain.unchecked < 0

    # learning

    def learn(self, decision: Decision, outcomes: Sequence[Outcome | None], passed: float, taught: float) -> None:
        """Update from a step, and book it; seconds ``passed``: pass and verifying; ``taught``: updating sources."""
        got = [1 if outcome is None else len(outcome.verdict.tokens) for outcome in outcomes]
        sizes = [0 if outcome is None else len(outcome.tree) for outcome in outcomes]
        judged, tokens = ([NOT_JUDGED] * len(got), []) if decision.plain_step else self._judged(decision, outcomes)
        parts = decision.proposal, decision.extension, decision.drafting
        seconds = np.array([max(decision.planning + taught - sum(parts), 0.0), *parts, passed])
        given = np.array([*got, *sizes, *judged, *tokens]), seconds, self._part(decision.shape.cached[: len(got)])
        address = self._address(decision.shape.tokens + sum(sizes) + 1)
        rules.learn(address, *given, decision.plain_step)
        self._keep_gains(decision.rows)

    def _keep_gains(self, rows: Sequence[RowGains]) -> None:
        for row, gain in zip(rows, self._column("gain", len(rows)), strict=True):
            row.tokens = gain

    def _column(self, name: str, count: int) -> list[Any]:
        return self._policy.rows[name][:count].tolist()  # type: ignore[no-any-return]

    def learn_plain(self, plain: PlainSteps) -> None:
        """Update from the steps for which a decision to draft nothing held, and book them."""
        if plain.steps:
            rules.learn_plain(self._address(), plain.steps, plain.deciding, plain.passed)
            self._keep_gains(plain.rows)

    def learn_preparation(self, seconds: float, guess: float, free: float) -> None:
        """Update from a request that was prepared for chains, which was guessed to cost ``guess`` plain passes; book
        what it cost beyond ``free``."""
        if unit := self.unit:
            rules.learn_preparation(self._address(), seconds / unit, guess, free)

    def _judged(self, decision: Decision, outcomes: Sequence[Outcome | None]) -> tuple[list[int], list[int]]:
        """Return by row whether committed tokens show which drafts were correct, scored or not; and these tokens."""
        judged, committed = [NOT_JUDGED] * len(outcomes), list[int]()
        for row, outcome in enumerate(outcomes):
            if outcome is None:
                continue
            accepted, tokens = len(outcome.verdict.path), outcome.verdict.tokens
            if decision.chain and (drafted := len(outcome.tree)):
                decision.rows[row].rate.record(accepted, drafted)
                self.chains.record(accepted, drafted)
            extended = row in decision.extended
            drawn = (extended or row in decision.proposing) and decision.trees[row].q is not None
            if not (extended or row in decision.proposing) or (decision.chain and drawn):
                continue
            judged[row] = SCORED_JUDGED if drawn else ALL_JUDGED
            committed += [*tokens[:accepted], *[ROOT] * (len(tokens) - accepted)] if drawn else tokens
            if extended:
                self._policy.rows["added"][row] = self._added(decision, row, outcome)
                self._policy.rows["before"][row] = decision.extended[row].matches(tokens)
        return judged, committed

    def _added(self, decision: Decision, row: int, outcome: Outcome) -> float:
        """Return the tokens that a costly source added to a row, minus the cost of its nodes, by what was worth scoring
        with it and without it, scored or not. A chain with ``q`` counts as far as it was accepted."""
        assert decision.worth_it is not None
        right = [each.trees[row].matches(outcome.verdict.tokens) for each in decision.worth_it]
        if decision.trees[row].q is not None:
            right[1] = len(outcome.verdict.path)
        before, after = decision.worth_it
        each_row = (after.cost - before.cost) / len(decision.extended)
        return float(right[1] - right[0] - each_row / self._policy.rows["value"][row])


def warm_up() -> None:
    """Compile the rules, or load them from the cache."""
    choice = Choice(CostCurve.linear(10.0), 2, costly=lambda: 1e-3)
    tree = DraftTree(np.ones(1, np.int64), np.full(1, ROOT), probability=np.ones(1))
    decision = choice.decide(PassShape([2], [0], [1], [1]), [RowGains(AcceptanceRate())], [9], True)
    choice.choose_extensions(decision, {0: tree})
    choice.prune(decision, [tree])
    choice.chain_length(decision, 1, True)
    choice.plain_steps(decision, 1.0)
    choice.learn(decision, [None], 1e-3, 0.0)
    rules.hold(choice._address(), 1.0, True)
    choice.learn_plain(PlainSteps(decision.rows, [0], 1, steps=1))
    rules.learn_preparation(choice._address(), 1.0, 1.0, 1.0)
