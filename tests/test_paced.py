"""The paced drafter against a simulated clock: it drafts what pays, and nothing where nothing pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tiny import tiny

import forerun
from forerun.core.request import Request
from forerun.core.sampling import Salt, uniform
from forerun.core.settings import Settings
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome, Verdict
from forerun.drafters.base import Drafter
from forerun.drafters.paced import PacedDrafter
from forerun.plan.ledger import Purse
from forerun.plan.planner import Plan, Planner


@dataclass
class World:
    """Seconds a step takes, and how likely a draft is right."""

    verify: float
    each_verified: float
    each_drafted: float
    acceptance: float
    now: float = 0.0

    def clock(self) -> float:
        return self.now

    def step(self, drafted: int) -> float:
        return self.verify + drafted * self.each_verified


class Chains(Drafter):
    """Drafts as many tokens as it may."""

    def __init__(self, world: World) -> None:
        self.world = world

    def propose(self, request: Request, budget: int) -> DraftTree:
        self.world.now += budget * self.world.each_drafted
        return DraftTree.chain([7] * budget)


def run(
    world: World, tokens: int, most: int = 16, drafter: Callable[[World], Drafter] | None = None
) -> tuple[float, list[int]]:
    """Seconds a token, and the lengths drafted."""
    paced = PacedDrafter((drafter or Chains)(world), most, world.clock)
    request = Request([1, 2, 3], tokens)
    paced.begin(request)
    lengths = []
    while request.finish_reason is None:
        tree = paced.propose(request, 64)
        lengths.append(len(tree))
        world.now += world.step(len(tree))
        path = []
        while len(path) < len(tree) and uniform(0, len(request) + len(path), Salt.ACCEPT) < world.acceptance:
            path.append(len(path))
        emitted = [7] * len(path) + [8]
        for token in emitted[: request.remaining]:
            request.append(token)
        paced.observe(request, Outcome(tree, Verdict(path, emitted), torch.empty(0)))
    paced.finish(request)
    return world.now / tokens, lengths


class Choosing(Chains):
    """The first draft of a text costs twenty passes, as a sparse cache's first choice would."""

    def propose(self, request: Request, budget: int) -> DraftTree:
        if not hasattr(self, "chosen"):
            self.world.now += 600
            self.chosen = True
        return super().propose(request, budget)


def test_what_a_first_choice_costs_is_not_held_against_drafts() -> None:
    for drafter in (Chains, Choosing):
        seconds, _ = run(World(30, 2, 4, 0.9), 400, drafter=drafter)
        assert seconds - (600 / 400 if drafter is Choosing else 0) < 14  # plain is 30, the best length 12.8


def test_drafts_that_do_not_pay_cost_a_few_passes_and_one_in_a_hundred() -> None:
    """Whatever their acceptance: a small model whose drafts cost a third of a pass, and half of them are wrong."""
    for acceptance in (0.0, 0.3, 0.5):
        for tokens in (128, 1000):
            seconds, lengths = run(World(30, 4, 10, acceptance), tokens)
            assert sum(lengths) > 0
            assert seconds * tokens < 30 * (1.01 * tokens + 3)


@dataclass
class Cold(World):
    """Plain steps take a third longer behind a prompt and among drafts, until there were ten of them in a row."""

    row: int = 0

    def step(self, drafted: int) -> float:
        self.row = 0 if drafted else self.row + 1
        return self.verify * (1 if self.row > 10 else 4 / 3) + drafted * self.each_verified


def test_drafts_are_measured_by_plain_steps_as_they_are_without_drafts() -> None:
    """They would pay if plain steps took what they take among drafts."""
    seconds, lengths = run(Cold(0.003, 0.0002, 0.001, 0.5), 2000)
    assert sum(lengths) > 0
    assert seconds < 1.06 * 0.003  # 1.08 if plain steps among drafts were the measure


@dataclass
class Interrupted(World):
    """Something else has the machine during one step."""

    at: int = 0
    count: int = 0

    def step(self, drafted: int) -> float:
        self.count += 1
        return super().step(drafted) + (20 * self.verify if self.count == self.at else 0)


@pytest.mark.parametrize("at", range(1, 8))
def test_a_step_that_something_else_held_up_decides_nothing(at: int) -> None:
    seconds, _ = run(Interrupted(30, 2, 4, 0.9, at=at), 600)
    assert seconds - 600 / 600 < 14  # plain is 30, the best length 12.8
    seconds, _ = run(Interrupted(3, 0.5, 4, 0.5, at=at), 600)
    assert seconds - 60 / 600 < 3.1  # nothing pays


class Asking(Drafter):
    """Grows chains whose tokens are easy or hard in stretches, and knows which, as a model does; it may ask how far."""

    def __init__(self, world: World, asks: bool) -> None:
        self.world = world
        self.asks = asks

    def chance(self, position: int) -> float:
        return 0.99 if uniform(0, position // 6, Salt.DRAFT) < 0.6 else 0.3

    def propose(self, request: Request, budget: int) -> DraftTree:
        drafted = 0
        while drafted < budget:
            self.world.now += self.world.each_drafted
            drafted += 1
            likely = 0.9 * self.chance(len(request) + drafted - 1)  # it doubts itself too much
            if self.asks and self.enough is not None and self.enough(request, likely):
                break
        return DraftTree.chain([7] * drafted)


def run_asking(asks: bool, tokens: int = 3000) -> float:
    """Seconds a token."""
    world = World(30, 0.5, 4, 0.0)
    inner = Asking(world, asks)
    drafter = PacedDrafter(inner, 16, world.clock)
    request = Request([1, 2, 3], tokens)
    drafter.begin(request)
    while request.finish_reason is None:
        tree = drafter.propose(request, 64)
        world.now += world.verify + len(tree) * world.each_verified
        path: list[int] = []
        at = len(request)
        while len(path) < len(tree) and uniform(0, at + len(path), Salt.ACCEPT) < inner.chance(at + len(path)):
            path.append(len(path))
        emitted = [7] * len(path) + [8]
        for token in emitted[: request.remaining]:
            request.append(token)
        drafter.observe(request, Outcome(tree, Verdict(path, emitted), torch.empty(0)))
    return world.now / tokens


def test_a_chain_ends_where_its_model_is_not_sure() -> None:
    assert run_asking(True) < 0.9 * run_asking(False)


def test_it_drafts_nearly_as_well_as_the_best_fixed_length() -> None:
    for acceptance in (0.6, 0.9, 0.98):
        seconds, lengths = run(World(30, 2, 4, acceptance), 2000)
        best = min((30 + 6 * n) / sum(acceptance**i for i in range(n + 1)) for n in range(17))
        assert seconds < 1.05 * best
        assert len(set(lengths[20:])) > 1 or acceptance > 0.9


@pytest.mark.parametrize("world", [World(3, 0.5, 4, 0.9), World(30, 2, 4, 0.0), World(10, 10, 1, 0.5)])
def test_where_nothing_pays_it_stops_and_costs_little(world: World) -> None:
    seconds, lengths = run(world, 2000)
    assert seconds < world.verify / 0.97
    assert sum(map(bool, lengths)) < 50


def test_it_notices_when_drafts_begin_to_pay() -> None:
    world = World(30, 2, 4, 0.0)
    drafter = PacedDrafter(Chains(world), 16, world.clock)
    request = Request([1, 2, 3], 3000)
    drafter.begin(request)
    lengths = []
    for step in range(900):
        tree = drafter.propose(request, 64)
        lengths.append(len(tree))
        world.now += world.verify + len(tree) * world.each_verified
        path = list(range(len(tree))) if step >= 400 else []
        request.append(7)
        drafter.observe(request, Outcome(tree, Verdict(path, [7] * (len(path) + 1)), torch.empty(0)))
    assert sum(lengths[200:400]) < 30 and sum(lengths[600:]) > 16 * 250


def test_it_waits_for_the_prefill_and_counts_costs_apart_by_context() -> None:
    world = World(30, 2, 4, 0.9)
    drafter = PacedDrafter(Chains(world), 8, world.clock)
    for prompt in ([1] * 10, [1] * 1000):
        request = Request(prompt, 40)
        drafter.begin(request)
        world.now += 1e6  # a long prefill, in the first step
        assert len(drafter.propose(request, 64)) == 0
    assert len(drafter._paces) == 2
    assert all(pace.steps == 0 for pace in drafter._paces.values())


def test_times_that_make_no_sense_do_no_harm() -> None:
    """A clock that stands still, and one by which a pass over more tokens takes less time."""
    for each_verified in (0.0, -7.0):
        seconds, lengths = run(World(0 if not each_verified else 30, each_verified, 0, 0.9), 200)
        assert seconds < 31 and len(lengths) <= 200
    purse = Purse(2.0, 0.02, 16.0)
    purse.enter(3, 1.0, 0.0, guessed=True)
    assert purse.balance == 2


def test_a_step_without_drafts_teaches_no_plan_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Plan] = []
    monkeypatch.setattr(Planner, "observe", lambda self, plan, outcomes: seen.append(plan))
    settings = Settings(gamma2=5, cache_budget=128)  # the text fits, so drafts go past the middle level
    engine = forerun.Engine(tiny("llama"), "triforce-trie", settings=settings, prefill_block=4)
    stats = engine.generate([3, 4, 5] * 5, max_new_tokens=60, eos_token_id=None, do_sample=False).stats[0]
    assert 0 in stats.drafted and any(stats.drafted)
    assert seen and len({id(plan) for plan in seen}) == len(seen)
