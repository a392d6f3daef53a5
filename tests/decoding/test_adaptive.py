"""The chooser against a simulated clock: it takes what pays, from where it pays, and loses next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from forerun.core.pass_context import PassContext
from forerun.drafting.adaptive import AdaptiveDrafter
from forerun.drafting.drafter import trees_of
from forerun.drafting.merged import MergedDrafter
from forerun.policy.ask_gain import RECENT_TREES, SUFFIX_FALLS, SUFFIX_GAINS, SUFFIXES, AskGain
from forerun.policy.chain_acceptance import ChainAcceptance
from forerun.policy.exploration_budget import EXPLORATION_SHARE, EXPLORATION_START
from forerun.policy.prices import LinearCost, Prices

from forerun.core.request import Request
from forerun.core.sampling import Salt, uniform
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome, Verdict
from forerun.decoding.recipes import reading
from forerun.kv.cache import READ_BLOCK
from forerun.kv.full_cache import FullCache
from forerun.models.forward.runtime import Runtime
from forerun.policy.calibration import LOWEST_ODDS, odds_of
from forerun.policy.cost_curve import CostCurve

RIGHT, WRONG = 7, 9


@dataclass
class World:
    """What parts of a step take, in seconds, and how often drafts are right.

    Attributes:
        plain: a pass without drafts.
        each: what a drafted token adds to it.
        asking: for branches.
        drafting: of a token of a chain.
        passes: of a chain by its length, how many tokens' time it takes.
        hits: by the number of the token in its text, whether the tree has it.
        accepted: how often a chain's token is right.
        settled: what a plain pass takes behind another one.
        loaded: what one seemed to take when the model was loaded.
        slowness: by the number of the step, how many times as long everything takes.
        said: what a drafted token adds, by the curve; by default as much as it does.
        known: by the number of the token in its text, how long a suffix before it the trees have seen.
        deepening: of asking a costly source to add to the branches.
        deep: by the number of the token in its text, how often that source's token is right.
        held, stalled: passes of the target, and chains, that something else holds up, and for how long.
    """

    plain: float = 1.0
    each: float = 0.02
    asking: float = 0.001
    drafting: float = 0.2
    passes: Callable[[int], float] = float
    hits: Callable[[int], bool] = lambda token: False
    accepted: Callable[[int], float] = lambda token: 0.0
    settled: float | None = None
    loaded: float | None = None
    slowness: Callable[[int], float] = lambda step: 1.0
    held: dict[int, float] = field(default_factory=dict)
    stalled: dict[int, float] = field(default_factory=dict)
    known: Callable[[int], int | None] = lambda token: None
    deepening: float = 0.5
    deep: Callable[[int], float] = lambda token: 0.0
    now: float = 0.0
    steps: int = 0
    nodes: int = 0
    quiet: int = 0
    said: float | None = None

    def clock(self) -> float:
        return self.now

    def right(self, token: int) -> bool:
        return uniform(0, token, Salt.ACCEPT) < self.accepted(token)

    def deep_right(self, token: int) -> bool:
        return uniform(1, token, Salt.ACCEPT) < self.deep(token)

    def take(self, seconds: float) -> None:
        self.now += seconds * self.slowness(self.steps)

    def verify(self, drafted: int, beside: int = 0) -> None:
        self.quiet = 0 if drafted else self.quiet + 1
        plain = self.settled if self.settled is not None and self.quiet > 1 else self.plain
        self.take(plain + (drafted + beside) * self.each)
        self.now += self.held.get(self.steps, 0.0)
        self.steps += 1
        self.nodes += drafted


class Branches(Source):
    """Eight tokens, as far as the text is foreseen; it is as sure of them as it is right on average."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked = list[int]()

    def known_suffixes(self, requests: Sequence[Request]) -> list[int | None]:
        return [self.world.known(len(request)) for request in requests]

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        return [self._draft(row.request, limit.nodes) for row, limit in zip(rows, limits, strict=True)]

    def _draft(self, request: Request, budget: int) -> DraftTree:
        self.asked.append(len(request))
        self.world.take(self.world.asking)
        tokens = [RIGHT if self.world.hits(len(request) + i) else WRONG for i in range(min(8, budget))]
        chance = (0.9 if tokens[0] == RIGHT else 0.2) ** np.arange(1, len(tokens) + 1)
        return DraftTree(np.array(tokens), np.arange(-1, len(tokens) - 1), probability=chance)


class Levels(Source):
    """Chains of as many tokens as it may."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.drafted: list[int] = []

    def propose(self, context: PassContext) -> list[DraftTree]:
        budget = max(context.budgets)
        self.world.take(self.world.passes(budget) * self.world.drafting)
        self.world.now += self.world.stalled.get(len(self.drafted), 0.0)
        self.drafted.append(budget)
        found = [[RIGHT if self.world.right(len(r) + i) else WRONG for i in range(budget)] for r in context.rows]
        return [DraftTree.chain(tokens) for tokens in found]


class Head(Source):
    """A costly source that adds four tokens to branches, and is as sure of them as it is right."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked = list[int]()

    def propose(self, context: PassContext) -> list[DraftTree]:
        self.asked += [len(request) for request in context.rows]
        self.world.take(self.world.deepening)
        return [self._draft(len(request)) for request in context.rows]

    def _draft(self, length: int) -> DraftTree:
        tokens = [RIGHT if self.world.deep_right(length + i) else WRONG + 1 for i in range(4)]
        chance = max(self.world.deep(length), 0.1) ** np.arange(1, 5)
        return DraftTree(np.array(tokens), np.arange(-1, 3), probability=chance)


class Target:
    vocabulary = 48
    device = torch.device("cpu")


def decode(
    world: World,
    tokens: int,
    rows: int = 1,
    most: int = 12,
    weight: float = 0.2,
    beside: Callable[[int], int] = lambda step: 0,
    undrafted: int = 0,
    **sources: bool,
) -> tuple[float, AdaptiveDrafter]:
    """Seconds for a text of so many tokens, all of them 7, and the chooser; ``beside``: tokens of prompts in a step;
    ``undrafted``: rows that decode in all steps without drafts."""
    trees: Any = Branches(world) if sources.get("trees", True) else None
    if sources.get("head", False):
        trees = MergedDrafter(trees, Head(world), 4.0)
    chains = Levels(world) if sources.get("chains", True) else None
    each = world.each if world.said is None else world.said
    curve = CostCurve((1, 2), (1.0, 1 + each / world.plain), unit=world.loaded)
    inner = trees or chains
    assert inner is not None
    chooser = AdaptiveDrafter(inner, trees=trees, chains=chains, max_length=most, weight=weight)
    chooser.bind(Target(), Runtime(world.clock, lambda target: curve))  # type: ignore[arg-type]
    requests = [Request([1, 2, 3], tokens) for _ in range(rows)]
    for request in requests:
        chooser.begin(request)
    live, idle = list(requests), [Request([1], 1) for _ in range(undrafted)]
    while live:
        others = beside(world.steps)
        waiting = PassContext([*live, *idle], [64] * (len(live) + undrafted), [1] * (len(live) + undrafted), others)
        context = waiting.of(range(len(live)))
        drafts = chooser.propose(context)
        trees_ = drafts or [DraftTree.empty()] * len(live)
        world.verify(sum(map(len, trees_)), others)
        chooser.scored()
        for request, tree in zip(live, trees_, strict=True):
            path: list[int] = []
            while len(path) < len(tree) and tree.tokens[len(path)] == RIGHT:
                path.append(len(path))
            emitted = [RIGHT] * (len(path) + 1)
            for token in emitted[: request.remaining]:
                request.append(token)
            if drafts is not None:
                chooser.observe(request, Outcome(tree, Verdict(path, emitted), torch.empty(len(tree) + 1, 0)))
        live = [request for request in live if request.finish_reason is None]
    return world.now, chooser


@pytest.mark.parametrize("trees", [True, False])
def test_chains_whose_further_tokens_seem_free_are_drafted_to_the_last_token(
    trees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one pass of a lower level gives as many tokens as it may. The last chain may have one token only."""
    monkeypatch.setattr(Prices, "chain", lambda self, cost, alone: LinearCost(0.2, 0.0))
    now, _ = decode(World(accepted=lambda token: 1.0, passes=lambda length: 1.0), 101, trees=trees)
    assert now < 101 / 2


@pytest.mark.one_in(5)
@pytest.mark.parametrize("tokens", [128, 2000])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("asking", [0.001, 0.05])
@pytest.mark.parametrize("loaded", [None, 0.7, 1.0])
def test_where_nothing_can_be_foreseen_next_to_nothing_is_lost(
    tokens: int, rows: int, asking: float, loaded: float | None
) -> None:
    now, _ = decode(World(asking=asking, loaded=loaded), tokens, rows)
    assert tokens / now >= 0.98


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("asking", [0.001, 0.05])
def test_under_load_what_is_lost_beside_prompts_counts_as_well(rows: int, asking: float) -> None:
    """One step in thirty only decodes."""
    world = World(asking=asking, loaded=1.0)
    now, _ = decode(world, 1000, rows, beside=lambda step: 20 if step % 30 else 0)
    reading = sum(20 * world.each for step in range(world.steps) if step % 30)
    assert 1000 / (now - reading) >= 0.98


@pytest.mark.parametrize("sources", ["trees", "chains", "head"])
@pytest.mark.parametrize("accepted", [0.0, 0.5, 0.7])
def test_rows_without_drafts_do_not_lose_what_one_row_gains(sources: str, accepted: float) -> None:
    """Alone, half of its drafts right, the row gains a third or more."""
    world = World(
        each=0.05,
        loaded=1.0,
        drafting=0.1,
        hits=lambda token: uniform(0, token, Salt.ACCEPT) < accepted,
        accepted=lambda token: accepted,
        deep=lambda token: accepted,
    )
    on = {"trees": sources != "chains", "chains": sources == "chains", "head": sources == "head"}
    now, _ = decode(world, 400, undrafted=15, weight=0.1, **on)
    assert (15 * world.steps + 400) / 16 / now >= 0.98


@pytest.mark.parametrize("tokens", [48, 400])
@pytest.mark.parametrize("rows", [1, 4])
def test_where_the_curve_says_too_little_the_budget_is_lost_that_many_times(tokens: int, rows: int) -> None:
    """The budget counts what the curve says. One more step is a plain one, beside which it is seen what drafts add."""
    said, each = 0.2, 0.5
    world = World(each=each, said=said, loaded=1.0, hits=lambda token: uniform(0, token, Salt.ACCEPT) < 0.1)
    now, _ = decode(world, tokens, rows, chains=False)
    assert now - tokens <= each / said * (EXPLORATION_START + EXPLORATION_SHARE * tokens) + world.plain


@pytest.mark.parametrize("loaded", [None, 1.0])
def test_while_others_read_prompts_drafts_do_not_wait_for_a_plain_step(loaded: float | None) -> None:
    """One step in thirty only decodes. The others cannot be measured as plain ones."""
    world = World(hits=lambda token: True, loaded=loaded)
    decode(world, 200, beside=lambda step: 20 if step % 30 else 0, chains=False)
    assert world.steps < 30


@pytest.mark.parametrize("asking", [0.02, 0.3, 0.7])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_passage_is_found_by_its_first_tokens_however_dear_asking_is(asking: float, rows: int) -> None:
    """Every other passage of forty tokens repeats what was seen; elsewhere asking gives nothing."""
    world = World(asking=asking / rows, loaded=1.0, each=0.02 / rows)
    world.known = lambda token: token % 40 if token // 40 % 2 else 0
    world.hits = lambda token: token // 40 % 2 == 1
    now, chooser = decode(world, 800, rows, chains=False)
    assert now < 800 * 0.72
    if asking > 0.25:
        in_vain = [length for length in chooser.trees.asked if not world.known(length)]  # type: ignore[union-attr]
        assert len(in_vain) <= 2 * rows  # what asking takes is a guess at first


@pytest.mark.parametrize("asking", [0.02, 0.3, 0.7])
@pytest.mark.parametrize("rows", [1, 4])
def test_suffixes_that_promise_too_much_cost_no_more_than_the_budget(asking: float, rows: int) -> None:
    world = World(asking=asking / rows, loaded=1.0, each=0.02 / rows, known=lambda token: 32)
    now, _ = decode(world, 800, rows, chains=False)
    last = 2 * asking + 8 * world.each  # one tree beyond the budget, and what asking takes is a guess at first
    assert now - 800 <= EXPLORATION_START + EXPLORATION_SHARE * 800 + last


def test_a_drafter_that_cannot_tell_is_tried_however_dear_it_is() -> None:
    world = World(asking=1.5, loaded=1.0, hits=lambda token: True)
    now, _ = decode(world, 900, chains=False)
    assert now < 300


def test_only_rows_whose_texts_repeat_something_are_asked_for() -> None:
    world = World(asking=0.1, loaded=1.0, hits=lambda token: True)
    trees = Branches(world)
    chooser = AdaptiveDrafter(trees, trees=trees)
    chooser.bind(Target(), Runtime(world.clock, lambda target: CostCurve((1, 2), (1.0, 1.02), unit=1.0)))  # type: ignore[arg-type]
    requests = [Request(list(range(1, 2 + n)), 100) for n in range(4)]
    world.known = lambda length: 9 if length == 3 else 0
    for request in requests:
        chooser.begin(request)
    for step in range(8):
        if step == 4:  # what asking takes was a guess at first, and a plain step was measured
            trees.asked.clear()
        drafts = trees_of(chooser, PassContext.decoding(requests, 64))
        world.verify(sum(map(len, drafts)))
        chooser.scored()
        for request, tree in zip(requests, drafts, strict=True):
            path = list(range(len(tree))) if len(request) == 3 else []
            outcome = Outcome(tree, Verdict(path, [RIGHT] * (len(path) + 1)), torch.empty(len(tree) + 1, 0))
            chooser.observe(request, outcome)
    assert trees.asked == [3] * 4
    assert [len(tree) > 0 for tree in drafts] == [False, False, True, False]


def test_what_asking_gave_is_followed_for_each_class_of_suffixes() -> None:
    gain = AskGain(SUFFIXES, SUFFIX_GAINS)
    before = [gain.expected(known) for known in (0, SUFFIXES[0], SUFFIXES[1], SUFFIXES[2])]
    assert before == sorted(before)
    for _ in range(3 * RECENT_TREES):
        gain.record(SUFFIXES[1] + 1, 2.0)
    assert [gain.expected(known) for known in (0, SUFFIXES[0])] == before[:2]
    assert gain.expected(SUFFIXES[2]) == before[3]
    assert gain.expected(SUFFIXES[1]) == pytest.approx(2.0, abs=0.2)


def test_what_asking_gives_is_known_at_other_costs_of_nodes_too() -> None:
    gain = AskGain(SUFFIXES, SUFFIX_GAINS, SUFFIX_FALLS)
    for known in (0, *SUFFIXES):
        assert gain.expected(known, 0.0) > gain.expected(known, 0.4) > gain.expected(known, 1.0) == 0.0
    for _ in range(3 * RECENT_TREES):
        gain.record(SUFFIXES[1], 2.0 * 0.9 ** SUFFIX_FALLS[2], 0.1)
    assert gain.expected(SUFFIXES[1], 0.0) == pytest.approx(2.0, rel=0.1)
    gain.record(SUFFIXES[1], 1.0, 1.0)  # a lucky one, where hardly anything can be gained
    assert gain.expected(SUFFIXES[1], 0.0) < 2.3


def test_where_nodes_are_dear_little_is_asked_for() -> None:
    """A node costs 0.045 of a step; in a batch of 16 each row waits for those of all. Nothing asked for is right."""
    lost, asked = {}, {}
    for rows in (1, 16):
        world = World(asking=0.01, each=0.045, loaded=1.0, known=lambda token: 5 if token % 2 else 20)
        now, chooser = decode(world, 100, rows, chains=False)
        lost[rows], asked[rows] = now - 100, len(chooser.trees.asked) / rows  # type: ignore[union-attr]
    assert asked[1] > 80
    assert asked[16] < 10
    assert lost[16] < 1.4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("deepening", "deep"), [(0.3, 0.9), (0.3, 0.6), (0.6, 0.9), (1.2, 0.95)])
def test_a_costly_source_is_asked_where_it_pays(deepening: float, deep: float, rows: int) -> None:
    """Every other passage of a hundred tokens is in the trees; there it is left alone."""
    world = World(deepening=deepening, deep=lambda token: deep, loaded=1.0, each=0.02 / rows)
    world.hits = lambda token: token // 100 % 2 == 1
    now, chooser = decode(world, 1200, rows, chains=False, head=True)
    alone, _ = decode(World(loaded=1.0, hits=world.hits, each=0.02 / rows), 1200, rows, chains=False)
    tokens = sum(deep**i for i in range(5))
    late = 40  # tokens until its second trial, where the first was wrong
    assert now < 1.1 * (alone - 600 + 600 * (1 + deepening + 4 * world.each * rows) / tokens) + late
    in_vain = sum(length // 100 % 2 for length in chooser.trees.costly.asked)  # type: ignore[union-attr]
    assert in_vain < 0.1 * len(chooser.trees.costly.asked)  # type: ignore[union-attr]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("deepening", "deep"), [(0.05, 0.0), (0.3, 0.0), (0.9, 0.3), (3.0, 0.5)])
def test_a_costly_source_that_does_not_pay_costs_no_more_than_the_budget(
    deepening: float, deep: float, rows: int
) -> None:
    world = World(deepening=deepening, deep=lambda token: deep, loaded=1.0, each=0.02 / rows)
    now, _ = decode(world, 800, rows, chains=False, head=True)
    last = 2 * deepening + 12 * world.each * rows  # one draft beyond the budget, and what it takes is a guess at first
    assert now - 800 <= EXPLORATION_START + EXPLORATION_SHARE * 800 + last


def test_a_costly_source_begins_to_be_asked_when_it_begins_to_pay() -> None:
    world = World(deepening=0.3, deep=lambda token: 0.9 * (token > 600), loaded=1.0)
    now, _ = decode(world, 2000, chains=False, head=True)
    assert now < 600 * 1.03 + 1400 * 0.55


@pytest.mark.parametrize("wrong", [4, 5, 6, 9])
def test_one_wrong_chain_does_not_end_chains_that_pay(wrong: int) -> None:
    """A long one after a first right token can take all that may be lost."""
    world = World(accepted=lambda token: float(token != wrong), drafting=0.4, loaded=1.0)
    now, _ = decode(world, 48, weight=0.4)
    assert now < 31


def test_a_text_that_is_foreseen_goes_by_the_tree() -> None:
    now, chooser = decode(World(hits=lambda token: True), 900)
    assert 900 / now > 0.97 * 9 / 1.161
    assert sum(chooser.chains.drafted) <= 2  # type: ignore[union-attr]


@pytest.mark.parametrize("accepted", [0.7, 0.9, 0.98])
def test_a_model_that_agrees_drafts_chains_of_about_the_best_length(accepted: float) -> None:
    now, _ = decode(World(accepted=lambda token: accepted), 2000)
    best = 0.0
    for length in range(1, 13):
        tokens = sum(accepted**i for i in range(length + 1))
        best = max(best, tokens / (1 + length * 0.22))
    assert 2000 / now > 0.95 * best


@pytest.mark.parametrize("accepted", [0.5, 0.7, 0.9])
def test_where_a_pass_takes_far_longer_than_drafts_a_wrong_chain_does_not_shorten_the_next(accepted: float) -> None:
    """As with keys and values off the device. Chains that began with one token gave 0.71 to 0.88 of the best."""
    now, _ = decode(
        World(accepted=lambda token: accepted, drafting=0.005, each=0.0001, loaded=1.0), 500, most=32, weight=0.005,
        trees=False,
    )  # fmt: skip
    lengths = np.arange(1, 33)
    best = ((1 - accepted ** (lengths + 1)) / (1 - accepted) / (1 + 0.0051 * lengths)).max()
    assert 500 / now > 0.95 * best


def test_each_passage_goes_by_the_source_that_foresees_it() -> None:
    def quoted(token: int) -> bool:
        return token // 60 % 2 == 0

    world = World(hits=quoted, accepted=lambda token: 0.9)
    now, _ = decode(world, 2400)
    by_tree, _ = decode(World(hits=quoted), 2400)
    by_chain, _ = decode(World(accepted=lambda token: 0.9), 2400, trees=False)
    assert now < 0.85 * min(by_tree, by_chain)


def test_it_notices_when_drafts_begin_to_be_right_and_when_they_cease() -> None:
    for sources in ({"trees": False}, {"chains": False}):
        late = World(hits=lambda token: token > 1000, accepted=lambda token: 0.95 * (token > 1000))
        now, _ = decode(late, 2000, **sources)
        early = World(hits=lambda token: token < 1000, accepted=lambda token: 0.95 * (token < 1000))
        before, _ = decode(early, 2000, **sources)
        always, _ = decode(World(hits=lambda token: True, accepted=lambda token: 0.95), 1000, **sources)
        assert now < 1.02 * 1000 + 1.3 * always
        assert before < 1.04 * 1000 + 1.05 * always


@pytest.mark.one_in(5)
@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("accepted", [0.95, 0.0])
def test_a_step_that_something_else_held_up_decides_nothing(at: int, accepted: float) -> None:
    calm, _ = decode(World(accepted=lambda token: accepted), 600, trees=False)
    held, _ = decode(World(accepted=lambda token: accepted, held={at: 20.0}), 600, trees=False)
    assert held - 20 < 1.1 * calm


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize(("accepted", "foreseen"), [(0.95, 999), (0.95, 8), (0.0, 8)])
def test_a_chain_that_something_else_held_up_decides_nothing(at: int, accepted: float, foreseen: int) -> None:
    """Of neither source: what it took is not booked as if it always took that."""
    sources: dict[str, Any] = {"accepted": lambda token: accepted, "hits": lambda token: token >= foreseen}
    calm, _ = decode(World(**sources), 128)
    held, chooser = decode(World(**sources, stalled={at: 20.0}), 128)
    stalled = 20 * (len(chooser.chains.drafted) > at)  # type: ignore[union-attr]
    assert held - stalled < 1.15 * calm


def test_where_it_is_known_what_a_pass_takes_chains_begin_with_the_first_step() -> None:
    later, at_once = (World(accepted=lambda token: 1.0, loaded=loaded) for loaded in (None, 0.75))
    for world in (later, at_once):
        decode(world, 3, trees=False)
    assert at_once.steps < later.steps == 3


@pytest.mark.parametrize("loaded", [None, 0.6])
def test_chains_are_measured_by_plain_steps_as_they_are_without_drafts(loaded: float | None) -> None:
    """Among drafts a plain step takes 1; alone it takes 0.6, and then chains of this model do not pay."""
    world = World(settled=0.6, loaded=loaded, drafting=0.55, accepted=lambda token: 0.9)
    now, _ = decode(world, 2000, trees=False)
    assert 2000 * 0.6 / now > 0.96


@pytest.mark.parametrize(("drafting", "late"), [(0.05, 6), (0.05, 10), (0.1, 6), (0.2, 6)])
def test_a_first_chain_that_happens_to_be_wrong_is_not_the_last(drafting: float, late: int) -> None:
    """Chains are right from some token on, where a few trials have failed: that costs little more than those tokens."""
    lucky, _ = decode(World(drafting=drafting, accepted=lambda token: 0.9), 128, weight=drafting)
    unlucky, _ = decode(
        World(drafting=drafting, accepted=lambda token: 0.9 * (token >= 3 + late)), 128, weight=drafting
    )
    assert unlucky < lucky + 2 * late


def test_chains_that_could_not_pay_are_tried_once() -> None:
    """Their cost is a guess until one was measured."""
    _, chooser = decode(World(drafting=1.0), 300, weight=1.0, trees=False)
    assert chooser.chains.drafted == [1]  # type: ignore[union-attr]


@pytest.mark.parametrize("period", [3, 8, 20])
@pytest.mark.parametrize("foreseen", [0.3, 0.0])
def test_a_machine_that_is_twice_as_slow_now_and_then_changes_few_decisions(foreseen: float, period: int) -> None:
    """Others use it for ``period`` steps of twice as many, so drafts often begin in a slow moment."""

    def steps(slow: bool) -> tuple[int, int]:
        def hits(token: int) -> bool:
            return uniform(1, token // 4, Salt.ACCEPT) < foreseen

        world = World(hits=hits, asking=0.02, each=0.03, loaded=1.0)
        if slow:
            world.slowness = lambda step: 2.0 if step // period % 2 else 1.0
        decode(world, 200, chains=False)
        return world.steps, world.nodes

    (calm, few), (busy, many) = steps(False), steps(True)
    assert busy <= 1.1 * calm + 1
    assert many <= 1.3 * few + 16


class Preparing(Levels):
    """Chains whose cache of the prompt takes a while: ten plain steps."""

    def __init__(self, world: World, small: Any = None) -> None:
        super().__init__(world)
        self.prepared, self.small_model = 0, small

    def catch_up(self, request: Request, tokens: int) -> bool:
        self.prepared += 1
        self.world.now += 10.0
        return True


PROMPT = list(range(1000))


def prepared_for(chooser: AdaptiveDrafter, tokens: int) -> Request:
    """A text after a long prompt, which was read if that was worth it."""
    request = Request(PROMPT, tokens)
    chooser.begin(request)
    chooser.prefilled(request, FullCache())
    assert chooser.catch_up(request, 512)
    return request


def ended(chooser: AdaptiveDrafter, request: Request, tokens: int) -> None:
    """A text ends after so many tokens, without drafts."""
    for _ in range(tokens):
        request.append(RIGHT)
    chooser.finish(request)


def with_preparing(
    world: World, drafting: float, cached: float = 0.0, beside: bool = True, reads: Callable[[int], int] = int
) -> tuple[AdaptiveDrafter, Preparing]:
    """``cached``: what a cached token adds to a pass; ``beside``: whether there are trees, too; ``reads``: which cached
    tokens a drafting pass reads."""
    trees, chains = Branches(world) if beside else None, Preparing(world)
    chooser = AdaptiveDrafter(chains, trees=trees, chains=chains, max_length=12, weight=drafting, reads=reads)
    curve = CostCurve((1, 2), (1.0, 1.02), (1, 2), (cached, cached), unit=1.0)
    chooser.bind(Target(), Runtime(world.clock, lambda target: curve))  # type: ignore[arg-type]
    return chooser, chains


@pytest.mark.parametrize(
    ("tokens", "drafting", "known", "prepared"),
    [(500, 0.2, False, True), (500, 0.9, False, False), (500, 0.2, True, True), (8, 0.2, True, False)],
)
def test_a_long_prompt_is_read_for_chains_if_they_are_expected_to_save_more_than_that_takes(
    tokens: int, drafting: float, known: bool, prepared: bool
) -> None:
    chooser, chains = with_preparing(World(loaded=1.0), drafting)
    if known:
        ended(chooser, prepared_for(chooser, 10_000), 200)
    before, request = chains.prepared, prepared_for(chooser, tokens)
    for _ in range(3):
        chooser.propose(PassContext.decoding([request], 64))
    assert (chains.prepared > before) == prepared


@pytest.mark.parametrize(("tokens", "prepared"), [(8, False), (60, True)])
def test_how_long_a_prompt_is_read_for_chains_is_guessed_in_the_first_text(tokens: int, prepared: bool) -> None:
    """From what its cached tokens add to a pass: here preparing is taken to take some seven plain steps."""
    chooser, chains = with_preparing(World(loaded=1.0), 0.3, cached=0.01, reads=reading(100))
    prepared_for(chooser, tokens)
    assert bool(chains.prepared) == prepared


@pytest.mark.parametrize("beside", [False, True])
def test_chains_are_prepared_for_what_they_save_more_than_trees(beside: bool) -> None:
    """They give 1.06 tokens in the time of a plain step: more than nothing does, and no more than trees."""
    chooser, chains = with_preparing(World(loaded=1.0), 3.85, cached=0.01, beside=beside, reads=reading(100))
    prepared_for(chooser, 600)
    assert bool(chains.prepared) == (not beside)


@pytest.mark.parametrize(("scanned", "prepared"), [(0.0, True), (0.1, True), (0.9, False)])
def test_a_drafting_pass_is_guessed_by_the_keys_that_it_chooses_from_too(scanned: float, prepared: bool) -> None:
    """A plain pass costs 11, and reads a thousand tokens; a drafting pass reads a hundred."""
    chooser, chains = with_preparing(World(loaded=1.0), 1.0, cached=0.01, reads=reading(100, scanned))
    prepared_for(chooser, 500)
    assert bool(chains.prepared) == prepared


def test_what_preparing_chains_takes_is_paid_from_what_texts_may_lose() -> None:
    """The next text begins without chains. After two hundred tokens more may be lost."""
    chooser, chains = with_preparing(World(loaded=1.0), 0.2)
    for tokens, prepared in ((1, 1), (200, 1), (1, 2)):
        ended(chooser, prepared_for(chooser, 500), tokens)
        assert chains.prepared == prepared


def test_whether_to_read_a_long_prompt_for_chains_is_decided_again_when_the_text_has_grown() -> None:
    """The second text cannot afford it at first. Later it can, and finds that out when 512 tokens are there."""
    chooser, chains = with_preparing(World(loaded=1.0), 0.2)
    ended(chooser, prepared_for(chooser, 500), 1)
    request = prepared_for(chooser, 10_000)
    for tokens, prepared in ((READ_BLOCK - 1, 1), (1, 2)):
        for _ in range(tokens):
            request.append(RIGHT)
        chooser.propose(PassContext.decoding([request], 64))
        chooser.catch_up(request, READ_BLOCK)
        assert chains.prepared == prepared


@pytest.mark.parametrize(("small", "prompt", "read"), [(0.1, 100, 1), (0.1, 500, 1), (0.9, 100, 0), (0.1, 510, 0)])
def test_a_short_prompt_is_read_by_a_small_model_that_is_measured_to_pay(small: float, prompt: int, read: int) -> None:
    """It reads 200 tokens at most. With more than 504 in the text, it drafts for another level."""
    world, own = World(loaded=1.0), Target()
    chains = Preparing(world, own)
    chooser = AdaptiveDrafter(
        chains, trees=Branches(world), chains=chains, max_length=12, weight=3.0, window=200, alone=504
    )

    def costs(scorer: object) -> CostCurve:
        return CostCurve((1, 2), (1.0, 1.02), unit=small if scorer is own else 1.0)

    chooser.bind(Target(), Runtime(world.clock, costs))  # type: ignore[arg-type]
    request = Request(PROMPT[:prompt], 200)
    chooser.begin(request)
    chooser.prefilled(request, FullCache())
    for _ in range(2):
        request.append(RIGHT)
        chooser.propose(PassContext.decoding([request], 64))
    assert chains.prepared == read


def test_costs_that_others_disturbed_are_asked_for_again_when_a_text_begins_alone() -> None:
    """The first time they are as doubtful as before, and so they are later while another text runs."""
    doubtful = CostCurve((1, 2), (1.0, 1.0), unit=8.0, doubtful=True)
    found = [doubtful, doubtful, CostCurve((1, 2), (1.0, 1.5), unit=1.0)]
    chooser = AdaptiveDrafter(Branches(World()), trees=Branches(World()))
    chooser.bind(Target(), Runtime(lambda: 0.0, lambda target: found.pop(0)))  # type: ignore[arg-type]
    texts = [Request([1, 2, 3], 8) for _ in range(6)]
    chooser.begin(texts[0])
    chooser.begin(texts[1])
    chooser.finish(texts[0])
    chooser.begin(texts[2])
    assert len(found) == 1
    chooser.finish(texts[1])
    chooser.finish(texts[2])
    context = PassContext.decoding([texts[3]], 8)
    chooser.begin(texts[3])
    assert not found
    chooser.propose(context)
    assert chooser._pruner.price(context)[0] == pytest.approx(1.0)
    assert chooser._prices.unit == 1.0


def test_a_small_models_costs_that_others_disturbed_are_asked_for_again() -> None:
    world, own = World(loaded=1.0), Target()
    found = [CostCurve((1, 2), (1.0, 1.5), unit=unit, doubtful=unit == 0.9) for unit in (0.9, 0.1)]

    def costs(scorer: object) -> CostCurve:
        return found.pop(0) if scorer is own else CostCurve((1, 2), (1.0, 1.02), unit=1.0)

    chains = Preparing(world, own)
    chooser = AdaptiveDrafter(chains, trees=Branches(world), chains=chains, window=200, alone=504)
    chooser.bind(Target(), Runtime(world.clock, costs))  # type: ignore[arg-type]
    for share in (0.9, 0.1):
        context = PassContext.decoding([Request(PROMPT[:9], 1)], 8)
        assert chooser._draft_size(context) == pytest.approx(share)
        chooser.begin(context.rows[0])


def test_a_batch_of_another_size_begins_with_what_was_learnt() -> None:
    """No plain steps are seen anew, and chains are drafted from the first step on."""
    world = World(accepted=lambda token: 0.9)
    _, chooser = decode(world, 600, rows=1, trees=False)
    requests = [Request([1, 2, 3], 100) for _ in range(4)]
    for request in requests:
        chooser.begin(request)
    assert all(len(tree) > 1 for tree in trees_of(chooser, PassContext.decoding(requests, 64)))
    _, fresh = decode(World(accepted=lambda token: 0.9), 1, rows=4, trees=False)
    for request in requests:
        fresh.begin(request)
    assert not any(map(len, trees_of(fresh, PassContext.decoding(requests, 64))))  # it has to see plain steps first


def test_a_model_whose_chances_are_no_numbers_counts_as_unsure() -> None:
    assert odds_of(float("nan")) == LOWEST_ODDS
    request, chains = Request([1, 2], 9), ChainAcceptance()
    chains.begin(request)
    chains.start([request], 0.5)
    assert chains.stop(request, float("nan"))
    for _ in range(3):
        chains.stop(request, 0.9)
    chains.record(request, 0, 3)
    assert chains._table.seen.sum() == 1 and all(np.isfinite(column).all() for column in chains._table)
