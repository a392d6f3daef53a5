"""Steps on a simulated clock: a planner with sources whose accuracy and cost a world defines.

Only the world adds noise, so a planner's losses can be compared with their bound, and its choices with the best source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome, Verdict
from forerun.decoding.planner import AdaptivePlanner, StepTimes
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source, Wants
from forerun.models.forward.runtime import Runtime
from forerun.models.heads.head import CONTEXT_ENTRIES
from forerun.policy.cost_curve import CostCurve
from forerun.policy.decision import PassShape
from forerun.policy.step_costs import DraftPasses

RIGHT, WRONG, OTHER = 7, 9, 10  # the token of every request, and those of rejected drafts


def never(row: int, place: int) -> bool:
    return False


@dataclass
class World:
    """Seconds of the parts of a step, and what drafts predict. A row is given by its number, a token by its place in
    the row, the prompt of three tokens included."""

    curve: CostCurve = field(default_factory=lambda: CostCurve((1, 2), (1.0, 1.02), unit=1.0))
    """Costs of passes, which the planner knows; ``unit`` is what it was told of the machine's speed."""
    true_curve: CostCurve | None = None  # what passes really cost; by default curve
    plain: float = 1.0  # seconds of a pass of cost 1
    asking: float = 0.001  # of proposing trees; asking_row, of each row
    asking_row: float = 0.0
    looking: float = 0.0  # of looking up a row's known suffix
    verifying: float = 0.0  # of a scored token after the pass
    drafting: float = 0.2  # of a token of chains
    passes: Callable[[int], float] = float  # the time of chains by their length, in tokens
    deepening: float = 0.5  # of a costly source's drafts
    carrying: float = 0.0  # of a costly source at each step that keeps states for it, besides its drafts
    most: int = 8  # tokens of a tree
    hits: Callable[[int, int], bool] = never  # whether the trees have a token
    stated: Callable[[int, int], float] | None = None  # how sure they are of their first token
    known: Callable[[int, int], int | None] = lambda row, place: None
    """Length of the suffix before a token that the trees know; None if they cannot tell."""
    accepted: Callable[[int, int], bool] = never  # whether the chains' token is accepted
    deep: Callable[[int, int], tuple[bool, float]] = lambda row, place: (False, 0.1)
    """Whether the costly source's token is accepted, and how sure it is of it."""
    slowness: Callable[[int], float] = lambda step: 1.0  # factor on all times, by the number of the step
    beside: Callable[[int], int] = lambda step: 0  # tokens of prompts in a step
    now: float = 0.0
    steps: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    """Rows and places at which trees were proposed; ``deepened``, those of the costly source."""
    deepened: list[tuple[int, int]] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)  # lengths of the chains

    def clock(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds * self.slowness(self.steps)

    def take_pass(self, tokens: Sequence[int], cached: int, beside: int) -> None:
        """Advance the clock by a pass; each row attends to ``cached`` tokens."""
        curve, looks = self.true_curve or self.curve, [cached] * len(tokens)
        self.take(self.plain * (curve.of([*tokens, beside], [*looks, 0]) if beside else curve.of(tokens, looks)))
        self.steps += 1


@dataclass(eq=False)
class _Simulated(Source):
    """A source in a world; the number of a row is its state."""

    world: World
    numbers: list[int] = field(default_factory=lambda: [0])

    def open(self, row: Row) -> int:
        self.numbers[0] += 1
        return self.numbers[0] - 1

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        raise NotImplementedError


class Branches(_Simulated):
    """Trees of one branch."""

    def promise(self, rows: Sequence[Row]) -> list[int | None]:
        self.world.take(self.world.looking * len(rows))
        return [self.world.known(row.states[self], len(row.request)) for row in rows]

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        self.world.take(self.world.asking + self.world.asking_row * len(rows))
        both = zip(rows, limits, strict=True)
        return [self._draft(row.states[self], len(row.request), limit.nodes) for row, limit in both]

    def _draft(self, row: int, place: int, nodes: int) -> DraftTree:
        world = self.world
        world.asked.append((row, place))
        tokens = [RIGHT if world.hits(row, place + i) else WRONG for i in range(min(world.most, nodes))]
        sure = (0.9 if world.hits(row, place) else 0.1) if world.stated is None else world.stated(row, place)
        count = len(tokens)
        return DraftTree(np.array(tokens), np.arange(-1, count - 1), probability=sure ** np.arange(1, count + 1))


class Chains(_Simulated):
    """Chains of as many tokens as they may have."""

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        length, world = max(limit.nodes for limit in limits), self.world
        world.take(world.passes(length) * world.drafting)
        world.chains.append(length)
        return [DraftTree.chain([self._token(row, i) for i in range(length)]) for row in rows]

    def _token(self, row: Row, i: int) -> int:
        return RIGHT if self.world.accepted(row.states[self], len(row.request) + i) else WRONG


@dataclass(eq=False)
class Deep(_Simulated):
    """A costly source: four tokens. It is ready after the states of as many tokens as a head."""

    wants = Wants(states=(1,))
    seen: int = 0

    def ready(self, row: Row) -> bool:
        return self.seen >= CONTEXT_ENTRIES

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        self.world.take(self.world.deepening)
        return [self._draft(row.states[self], len(row.request)) for row in rows]

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        if outcomes[0].states is None:
            self.seen = 0
        else:
            self.seen += len(outcomes[0].verdict.tokens)
            self.world.take(self.world.carrying)

    def _draft(self, row: int, place: int) -> DraftTree:
        self.world.deepened.append((row, place))
        found = [self.world.deep(row, place + i) for i in range(4)]
        tokens = [RIGHT if right else OTHER for right, _ in found]
        return DraftTree(np.array(tokens), np.arange(-1, 3), probability=np.cumprod([sure for _, sure in found]))


class _Model:
    """What a planner asks of a model."""

    vocabulary = 48
    device = torch.device("cpu")


@dataclass(frozen=True)
class Outline:
    """A batch of requests to decode.

    Attributes:
        rows: that are drafted for; ``undrafted`` rows decode beside them in all steps.
        cached: tokens that each row attends to, in all steps.
        sources: ``t`` for trees, ``d`` for a costly source beside them, ``c`` for chains.
        most: maximum length of a chain.
        weight: first guess of the cost of a chain's token.
        closed: whether the batch ends with its last row.
        batches: such batches, one after the other.
    """

    rows: int = 1
    tokens: int = 64
    cached: int = 0
    undrafted: int = 0
    sources: str = "tc"
    most: int = 12
    weight: float = 0.2
    closed: bool = True
    batches: int = 1


def simulate(world: World, outline: Outline) -> tuple[float, AdaptivePlanner]:
    """Decode the requests; return the seconds, and the planner."""
    numbers = [[0], [0], [0]]
    kinds = zip("tdc", (Branches, Deep, Chains), numbers, strict=True)
    trees, deep, chains = (kind(world, own) if each in outline.sources else None for each, kind, own in kinds)
    model: Any = _Model()
    planner = AdaptivePlanner(
        Runtime(world.clock, lambda scorer: world.curve), model, trees, deep, chains, 4.0,
        longest=outline.most, stops_early=False, draft=DraftPasses(weight=outline.weight),
    )  # fmt: skip
    planner.warm_up()
    began = world.now
    for _ in range(outline.batches):
        for counter in numbers:
            counter[0] = 0
        _decode(world, outline, planner)
    return world.now - began, planner


def plain_seconds(world: World, outline: Outline) -> float:
    rows = outline.rows + outline.undrafted
    cost = (world.true_curve or world.curve).of([1] * rows, [outline.cached] * rows)
    return world.plain * cost * outline.tokens * outline.batches


def _decode(world: World, outline: Outline, planner: AdaptivePlanner) -> None:
    cache: Any = None
    live = [Row(Request([1, 2, 3], outline.tokens), cache) for _ in range(outline.rows)]
    for row in live:
        row.open(planner.sources)
        row.states[planner] = planner.open(row)
        row.states[planner].unread, row.states[planner].ready = False, True
    while live:
        live = _step(world, outline, planner, live)


def _step(world: World, outline: Outline, planner: AdaptivePlanner, live: list[Row]) -> list[Row]:
    count, beside = len(live), world.beside(world.steps)
    left = [row.wants for row in live]
    shape = PassShape(
        left + [max(left)] * outline.undrafted, [outline.cached] * (count + outline.undrafted), [1] * count,
        [64] * count, beside, outline.closed,
    )  # fmt: skip
    began = world.now
    skips = planner.skips(live, shape.decodes and not outline.undrafted)
    trees = (None if skips else planner.plan(live, shape.budgets, lambda: shape)) or [DraftTree.empty()] * count
    trees = [tree.cut(64, row.wants - 1, 48) for tree, row in zip(trees, live, strict=True)]
    planned = world.now
    world.take_pass([*(1 + len(tree) for tree in trees), *[1] * outline.undrafted], outline.cached, beside)
    passed = world.now
    states = torch.empty(1, 0) if planner.states else None
    outcomes = [_verified(world, row, tree, states) for row, tree in zip(live, trees, strict=True)]
    times = StepTimes(planned - began, passed - planned, world.now - passed)
    planner.learn(live, outcomes, times)
    for row in live:
        if row.request.finish_reason is not None:
            row.close()
    return [row for row in live if row.request.finish_reason is None]


def _verified(world: World, row: Row, tree: DraftTree, states: torch.Tensor | None) -> Outcome:
    world.take(world.verifying * (1 + len(tree)))
    path: list[int] = []
    node = -1
    while (node := tree.children.get((node, RIGHT), -1)) != -1:
        path.append(node)
    tokens = [RIGHT] * min(len(path) + 1, row.wants)
    for token in tokens:
        row.request.append(token)
    return Outcome(tree, Verdict(path[: len(tokens)], tokens), torch.empty(len(tree) + 1, 0), states=states)
