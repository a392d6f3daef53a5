"""How much of each draft to score: the nodes that pay for themselves, and none when drafts do not hit.

A pass costs what its ``CostCurve`` says, and a node adds its probability of being accepted to the tokens that the pass
gives. So the planner takes the likeliest nodes, over all rows of the batch, up to the number that gives the most tokens
per unit of cost. In a pass that reads a prompt only the nodes are its to choose: there a node must give as many tokens
for what it adds to the cost as passes lately gave for all of theirs.

A node's probability is the drafter's, corrected by what became of nodes like it (``calibration.py``). All that was
proposed is counted, scored or not, for what was committed shows whether it would have been right. So drafts need not be
scored to find out that they began to hit, and a drafter that never hits costs its proposals alone. Under rejection
sampling a drawn token's own probability must not decide about it, and whether it would have been accepted is not known
unless it is scored: trees with ``q`` are judged by depth, by what was scored.

Nothing here looks at a clock: for a given curve, what is planned repeats exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.core.tree import ROOT, BoolArray, DraftTree, IntArray
from forerun.core.verify import Outcome
from forerun.plan.calibration import ByDepth, ByOdds, Calibration
from forerun.plan.costs import CRITICAL_LENGTH, CostCurve, FloatArray
from forerun.plan.cutting import part, put_to_the_test, under
from forerun.plan.ledger import Ledger

RECENT = 0.9
"""What remains of tokens and costs after a step, where tokens by cost are asked for as of late."""
FEW, MORE, FADING = 8, 8, 0.8
"""A drafter is asked for this many nodes at least, and for so many times what was worth scoring; how that fades."""
PATIENCE, PAUSE, LONGEST_PAUSE = 16, 4, 16
"""After so many steps without a node that was scored or would have hit a drafter is asked now and then only: with such
pauses, in between an eighth of the steps without."""
ALLOWANCE, INTEREST = 4.0, 0.03
"""Passes that probes may cost before they pay, and what they are given for each pass without them."""


@dataclass(frozen=True)
class Plan:
    """What a step scores.

    Attributes:
        trees: the part of each proposed tree that is worth it.
        proposed: all of each.
        nodes: the part's nodes by their index in all, int64.
        plain: cost of a pass without trees, as the curve has it.
        cost: of this one.
        decoding: whether every row feeds one token only, besides its tree.
    """

    trees: list[DraftTree]
    proposed: list[DraftTree]
    nodes: list[IntArray]
    plain: float
    cost: float
    decoding: bool


class Planner:
    """Cuts trees to what is worth scoring, and learns from what is accepted.

    Args:
        costs: what a pass costs, or the number of tokens that double the cost of a pass over one token; by default that
            of a small model on a CPU.

    Raises:
        ValueError: for a number that is not positive.
    """

    def __init__(self, costs: CostCurve | float = CRITICAL_LENGTH) -> None:
        self._costs = costs if isinstance(costs, CostCurve) else CostCurve.linear(costs)
        self._by_odds, self._by_depth = ByOdds(), ByDepth()
        self._probing = Ledger(ALLOWANCE, INTEREST)
        self._tokens = self._spent = 1.0
        self._wanted = math.inf
        self._idle, self._asked = 0, PATIENCE
        self._known = np.empty(0)

    @property
    def costs(self) -> CostCurve:
        """What a pass costs."""
        return self._costs

    @costs.setter
    def costs(self, costs: CostCurve) -> None:
        if costs != self._costs:
            self._costs, self._known = costs, np.empty(0)

    def budget(self, most: int) -> int:
        """Nodes to ask a drafter for: no more than pay, going by the last plans, with room to find out that more do.

        None, but for a step now and then, while nothing is worth scoring and nothing would have hit for a while.
        """
        if self._idle >= PATIENCE and self._idle != self._asked:
            return 0
        return int(min(most, max(FEW, MORE * self._wanted)))

    def rest(self) -> None:
        """A step went by without asking the drafter, as ``budget`` said."""
        self._wait(self._idle + 1)

    def _wait(self, idle: int) -> None:
        """Note how many steps went by without a use for drafts, and up to which of them none is asked for."""
        if idle == 0:
            self._asked = PATIENCE
        elif idle > self._asked:
            self._asked += min(max(PAUSE, self._asked // 8), LONGEST_PAUSE)
        self._idle = idle

    def plan(self, trees: Sequence[DraftTree], pending: Sequence[int] = (), cached: Sequence[int] = ()) -> Plan:
        """What is worth scoring of each tree. Probes are kept or dropped together, as far as they pay.

        Args:
            trees: one for each row.
            pending: tokens that each row feeds before its tree; one each by default.
            cached: tokens that each row's cache holds; none by default.
        """
        proposed = list(trees) if self._probing.open else [_without_probes(tree) for tree in trees]
        pending, cached = pending or [1] * len(proposed), cached or [0] * len(proposed)
        masks = self._worth([self._estimate(tree) for tree in proposed], pending, cached)
        kept = [part(tree, mask) for tree, mask in zip(proposed, masks, strict=True)]
        most = max(map(len, proposed), default=0)
        self._wanted = max(FADING * min(self._wanted, most), *map(len, kept), 0)
        fed, scored = sum(pending), sum(pending) + sum(map(len, kept))
        plain = self._passes(scored + 1)[fed] + self._reading(pending, cached)
        more = self._costs.per_pair * sum(len(tree) * length for tree, length in zip(kept, cached, strict=True))
        cost = plain + self._passes(scored + 1)[scored] - self._passes(scored + 1)[fed] + more
        nodes = [np.flatnonzero(mask) for mask in masks]
        return Plan(kept, proposed, nodes, float(plain), float(cost), fed == len(pending))

    def observe(self, plan: Plan, outcomes: Sequence[Outcome]) -> None:
        """Learn from what became of a plan, row by row."""
        if any(map(len, plan.proposed)):
            self._by_odds.forget()
            self._by_depth.forget()
        useful = any(map(len, plan.trees))
        for proposed, nodes, outcome in zip(plan.proposed, plan.nodes, outcomes, strict=True):
            if len(proposed) and proposed.probe is None:
                tested, came = put_to_the_test(outcome) if proposed.q is not None else _shown(proposed, nodes, outcome)
                self._table(proposed).count(outcome.tree if proposed.q is not None else proposed, tested, came)
                useful = useful or bool(came.any())
        self._wait(0 if useful else self._idle + 1)
        if not plan.decoding or not outcomes:
            return
        tokens = sum(len(outcome.verdict.tokens) for outcome in outcomes)
        self._tokens, self._spent = RECENT * self._tokens + tokens, RECENT * self._spent + plan.cost
        probed = any(tree.probe is not None and tree.probe.any() for tree in plan.trees)
        saved = (tokens / len(outcomes) - 1) - (plan.cost / plan.plain - 1)
        self._probing.enter(saved if probed else None)

    def _worth(self, estimates: Sequence[FloatArray], pending: Sequence[int], cached: Sequence[int]) -> list[BoolArray]:
        """Which nodes of each tree give the most tokens by cost."""
        ends = list(itertools.accumulate(map(len, estimates)))
        chosen = np.zeros(ends[-1] if ends else 0, np.bool_)
        if len(chosen):
            chance = np.concatenate(estimates)
            order, tokens, cost = self._offers(chance, estimates, cached)
            fed, rows = sum(pending), len(pending)
            passes = self._passes(fed + len(chance) + 1)
            cost += passes[fed + 1 : fed + len(chance) + 1]
            plain, rate = float(passes[fed]), self._tokens / self._spent
            if fed == rows:
                plain += self._reading(pending, cached)
                worth, none = (rows + tokens) / (cost + (plain - float(passes[fed]))), rows / plain
            else:
                worth, none = tokens - rate * cost, -rate * plain
            best = int(worth.argmax())
            if worth[best] > none:
                chosen[order[: best + 1]] = True
        return [chosen[end - len(estimate) : end] for end, estimate in zip(ends, estimates, strict=True)]

    def _offers(
        self, chance: FloatArray, estimates: Sequence[FloatArray], cached: Sequence[int]
    ) -> tuple[IntArray, FloatArray, FloatArray]:
        """Nodes in the order of their worth, parents first for chances never rise along a path; then, by how many are
        taken, the tokens that they give and what looking back costs them."""
        if not self._costs.per_pair:
            order = np.argsort(-chance, kind="stable")
            return order, np.cumsum(chance[order]), np.zeros(len(chance))
        reading = self._costs.per_pair * np.repeat(np.asarray(cached, np.float64), list(map(len, estimates)))
        order = np.argsort(self._tokens / self._spent * reading - chance, kind="stable")
        return order, np.cumsum(chance[order]), np.cumsum(reading[order])

    def _reading(self, pending: Sequence[int], cached: Sequence[int]) -> float:
        """What a pass without trees pays for looking back."""
        pairs = sum(count * length for count, length in zip(pending, cached, strict=True))
        return self._costs.per_cached * sum(cached) + self._costs.per_pair * pairs

    def _passes(self, count: int) -> FloatArray:
        """Costs of passes over 0 to at least ``count`` - 1 tokens with empty caches, worked out once."""
        if len(self._known) < count:
            self._known = self._costs.passes(np.arange(2 * count))
        return self._known

    def _estimate(self, tree: DraftTree) -> FloatArray:
        """Each node's chance of being accepted; none for trees with probes, which are left as they are."""
        if not len(tree) or tree.probe is not None:
            return np.empty(0)
        chance: list[float] = self._table(tree).rates(tree).tolist()
        for node, parent in enumerate(tree.parents.tolist()):
            if parent != ROOT:
                chance[node] *= chance[parent]
        return np.array(chance)

    def _table(self, tree: DraftTree) -> Calibration:
        return self._by_depth if tree.probability is None or tree.q is not None else self._by_odds


def _shown(proposed: DraftTree, nodes: IntArray, outcome: Outcome) -> tuple[BoolArray, BoolArray]:
    """Which of the proposed nodes, scored or not, the committed tokens speak for or against, and which for."""
    path, tokens = nodes[outcome.verdict.path].tolist(), outcome.verdict.tokens
    if len(path) < len(tokens):  # the last token was not accepted but chosen: a node may have said it all the same
        last = path[-1] if path else ROOT
        path += np.flatnonzero((proposed.parents == last) & (proposed.tokens == tokens[-1]))[:1].tolist()
    return under(proposed, path, len(path) < len(tokens))


def _without_probes(tree: DraftTree) -> DraftTree:
    if tree.probe is None:
        return tree
    rest = tree.select(~tree.probe)
    return DraftTree(rest.tokens, rest.parents, q=rest.q, probability=rest.probability)
