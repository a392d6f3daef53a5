"""Steps on a simulated clock: a planner with sources that are right as often, and take as long, as a world says.

Nothing is noisy but what the world makes so, and thousands of texts take seconds. So a planner's losses can be compared
with their bound, and its choices with the best single source.
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
from forerun.policy.pass_shape import PassShape
from forerun.policy.step_costs import DraftPasses

RIGHT, WRONG, OTHER = 7, 9, 10
"""The token of every text, and what drafts have where they are wrong."""


def never(row: int, place: int) -> bool:
    return False


@dataclass
class World:
    """What the parts of a step take, in seconds, and what drafts foresee.

    A row is given by its number, and a token by its place in the row's sequence, the prompt of three tokens included.
    """

    curve: CostCurve = field(default_factory=lambda: CostCurve((1, 2), (1.0, 1.02), unit=1.0))
    """Costs of passes, which the planner knows; ``unit`` is what it was told of the machine's speed."""
    true_curve: CostCurve | None = None
    """What passes really cost; by default ``curve``."""
    plain: float = 1.0
    """Seconds of a pass of cost 1."""
    asking: float = 0.001
    """Of proposing trees; ``asking_row``, of each row."""
    asking_row: float = 0.0
    looking: float = 0.0
    """Of looking up a row's known suffix."""
    verifying: float = 0.0
    """Of a scored token after the pass."""
    drafting: float = 0.2
    """Of a token of chains."""
    passes: Callable[[int], float] = float
    """The time of chains by their length, in tokens."""
    deepening: float = 0.5
    """Of a costly source's drafts."""
    carrying: float = 0.0
    """Of a costly source at each step that keeps states for it, besides its drafts."""
    hits: Callable[[int, int], bool] = never
    """Whether the trees have a token."""
    stated: Callable[[int, int], float] | None = None
    """How sure they are of their first token."""
    known: Callable[[int, int], int | None] = lambda row, place: None
    """Length of the suffix before a token that the trees know; None if they cannot tell."""
    accepted: Callable[[int, int], bool] = never
    """Whether the chains' token is accepted."""
    deep: Callable[[int, int], tuple[bool, float]] = lambda row, place: (False, 0.1)
    """Whether the costly source's token is accepted, and how sure it is of it."""
    slowness: Callable[[int], float] = lambda step: 1.0
    """Factor on all times, by the number of the step."""
    beside: Callable[[int], int] = lambda step: 0
    """Tokens of prompts in a step."""
    now: float = 0.0
    steps: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    """Rows and places at which trees were proposed; ``deepened``, those of the costly source."""
    deepened: list[tuple[int, int]] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)
    """Lengths of the chains."""

    def clock(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds * self.slowness(self.steps)

    def take_pass(self, tokens: Sequence[int], cached: int, beside: int) -> None:
        """Let the time of a pass pass; ``cached``: tokens that each row looks back on."""
        curve, looks = self.true_curve or self.curve, [cached] * len(tokens)
        self.take(self.plain * (curve.of([*tokens, beside], [*looks, 0]) if beside else curve.of(tokens, looks)))
        self.steps += 1


@dataclass
class _Simulated(Source):
    """A source in a world; the number of a row is its state."""

    world: World
    numbers: list[int] = field(default_factory=lambda: [0])

    __hash__ = object.__hash__

    def open(self, row: Row) -> int:
        self.numbers[0] += 1
        return self.numbers[0] - 1

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        raise NotImplementedError


class Branches(_Simulated):
    """Trees of up to eight tokens."""

    __hash__ = object.__hash__

    def promise(self, rows: Sequence[Row]) -> list[int | None]:
        self.world.take(self.world.looking * len(rows))
        return [self.world.known(row.states[self], len(row.request)) for row in rows]

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        self.world.take(self.world.asking + self.world.asking_row * len(rows))
        return [
            self._draft(row.states[self], len(row.request), limit.nodes)
            for row, limit in zip(rows, limits, strict=True)
        ]

    def _draft(self, row: int, place: int, nodes: int) -> DraftTree:
        world = self.world
        world.asked.append((row, place))
        tokens = [RIGHT if world.hits(row, place + i) else WRONG for i in range(min(8, nodes))]
        sure = (0.9 if world.hits(row, place) else 0.1) if world.stated is None else world.stated(row, place)
        return DraftTree(
            np.array(tokens), np.arange(-1, len(tokens) - 1), probability=sure ** np.arange(1, len(tokens) + 1)
        )


class Chains(_Simulated):
    """Chains of as many tokens as they may have."""

    __hash__ = object.__hash__

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        length, world = max(limit.nodes for limit in limits), self.world
        world.take(world.passes(length) * world.drafting)
        world.chains.append(length)
        return [
            DraftTree.chain(
                [RIGHT if world.accepted(row.states[self], len(row.request) + i) else WRONG for i in range(length)]
            )
            for row in rows
        ]


@dataclass
class Deep(_Simulated):
    """A costly source: four tokens. It is ready after the states of as many tokens as a head."""

    wants = Wants(states=(1,))
    seen: int = 0
    __hash__ = object.__hash__

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
    """A batch of texts to decode.

    Attributes:
        rows: that are drafted for.
        tokens: of each text.
        cached: tokens that each row looks back on, from the first step to the last.
        undrafted: rows that decode in all steps without drafts.
        sources: ``t`` for trees, ``d`` for a costly source beside them, ``c`` for chains.
        most: maximum length of a chain.
        weight: first guess of the cost of a chain's token.
        closed: whether the batch ends with its last row.
        batches: how many such batches are decoded, one after the other.
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
    """Decode the texts; their seconds, and the planner."""
    numbers = [[0], [0], [0]]
    trees = Branches(world, numbers[0]) if "t" in outline.sources else None
    deep = Deep(world, numbers[1]) if "d" in outline.sources else None
    chains = Chains(world, numbers[2]) if "c" in outline.sources else None
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
    """Return the seconds of these requests without drafts."""
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
        left, [outline.cached] * count, [1] * count, [64] * count, beside,
        [max(left)] * outline.undrafted, [outline.cached] * outline.undrafted, outline.closed,
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
