"""The planner scores what pays: much when drafts hit, next to nothing when they never do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import PROMPTS, OracleDrafter, tiny

import forerun
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome, Verdict
from forerun.plan.costs import CostCurve
from forerun.plan.planner import ALLOWANCE, FEW, INTEREST, Planner

NO_LOGITS = torch.empty(0, 0)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(0, 20))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    if draw(st.booleans()):
        return DraftTree(np.arange(n), np.array(parents, np.int64))
    p: list[float] = []
    for parent in parents:
        p.append(draw(st.floats(0, 1)) * (p[parent] if parent != ROOT else 1))
    return DraftTree(np.arange(n), np.array(parents, np.int64), probability=np.array(p))


@given(st.lists(trees(), min_size=1, max_size=4), st.floats(1, 300), st.integers(0, 2**16))
@settings(max_examples=100, deadline=None)
def test_what_is_kept_is_a_tree(rows: list[DraftTree], critical: float, seed: int) -> None:
    planner, rng = Planner(critical), np.random.default_rng(seed)
    for _ in range(3):
        plan = planner.plan(rows, rng.integers(1, 9, len(rows)).tolist(), rng.integers(0, 99, len(rows)).tolist())
        outcomes = []
        for tree, part, nodes in zip(rows, plan.trees, plan.nodes, strict=True):
            assert part.tokens.tolist() == tree.tokens[nodes].tolist()
            leaf = int(rng.integers(-1, len(part)))
            path = part.ancestors[leaf].nonzero()[0].tolist() if leaf >= 0 else []
            outcomes.append(Outcome(part, Verdict(path, [*part.tokens[path].tolist(), 99]), NO_LOGITS))
        planner.observe(plan, outcomes)


CHAIN = 16
CURVE = CostCurve((1, 2, 9, 17, 33, 65), (1.0, 1.22, 1.45, 1.74, 2.1, 2.9))
"""As measured for the bundled model."""


def chain(length: int = CHAIN, chance: float | None = None) -> DraftTree:
    parents = np.arange(-1, length - 1)
    probability = None if chance is None else chance ** np.arange(1, length + 1)
    return DraftTree(np.arange(length), parents, probability=probability)


def follow(tree: DraftTree, right: int) -> Outcome:
    """The outcome of a chain of which so many tokens are right, whatever of it was scored."""
    path = list(range(min(right, len(tree))))
    return Outcome(tree, Verdict(path, [*path, len(path) if len(path) < right else 99]), NO_LOGITS)


def run(planner: Planner, right: int, steps: int = 300, tree: DraftTree | None = None) -> list[int]:
    """Scored nodes per step, for chains of which ``right`` tokens are; a drafter that is not asked gives none."""
    sizes = []
    for _ in range(steps):
        plan = planner.plan([(tree or chain()) if planner.budget(64) else DraftTree.empty()])
        sizes.append(len(plan.trees[0]))
        planner.observe(plan, [follow(plan.trees[0], right)])
    return sizes


@pytest.mark.parametrize("chance", [None, 0.1, 0.5, 0.9, 0.999])
def test_drafts_that_never_hit_cost_next_to_nothing(chance: float | None) -> None:
    sizes = np.array(run(Planner(CURVE), right=0, tree=chain(chance=chance)))
    assert (CURVE.passes(1 + sizes) - 1).sum() < 5  # passes, in three hundred steps
    assert not sizes[30:].any()


def test_a_drafter_that_never_hits_is_asked_for_little() -> None:
    planner = Planner(CURVE)
    assert planner.budget(64) == 64
    asked = []
    for _ in range(800):
        asked.append(planner.budget(64))
        run(planner, right=0, steps=1, tree=chain(64, 0.9))
    assert set(asked[-100:]) == {0, FEW}
    assert asked[-320:].count(FEW) == 20
    run(planner, right=64, steps=100, tree=chain(64, 0.9))
    assert planner.budget(64) == 64
    assert planner.budget(5) == 5


@pytest.mark.parametrize("chance", [None, 0.1, 0.5, 0.9])
def test_drafts_are_scored_again_soon_after_they_begin_to_hit(chance: float | None) -> None:
    planner, tree = Planner(CURVE), chain(chance=chance)
    assert not any(run(planner, right=0, steps=1000, tree=tree)[30:])
    sizes = run(planner, right=CHAIN, steps=100, tree=tree)
    assert np.flatnonzero(sizes)[0] < 25
    assert all(size == CHAIN for size in sizes[60:])


def test_drafts_that_always_hit_are_scored_in_full() -> None:
    assert np.mean(run(Planner(CURVE), right=CHAIN)[20:]) == CHAIN


def test_a_chain_is_cut_where_its_hits_end() -> None:
    assert 4 <= np.mean(run(Planner(CURVE), right=4)[50:]) < 7


def test_a_long_chain_that_is_nearly_certain_is_scored_whole() -> None:
    planner = Planner(CURVE)
    assert run(planner, right=64, steps=4, tree=chain(64, 0.9995))[1:] == [64, 64, 64]
    run(planner, right=0, steps=1, tree=chain(64, 0.9995))
    assert run(planner, right=64, steps=4, tree=chain(64, 0.9995))[-1] == 64


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.8])
def test_a_drafter_that_is_too_modest_is_corrected(chance: float) -> None:
    sizes = run(Planner(CURVE), right=CHAIN, steps=60, tree=chain(chance=chance))
    assert sizes[0] < CHAIN == sizes[-1]


def test_a_correction_never_turns_the_order_of_nodes() -> None:
    planner = Planner(CURVE)
    low, high = chain(4, 0.5), chain(4, 0.95)
    for _ in range(50):
        for tree, right in ((low, 4), (high, 0)):  # what is thought likely fails, what is thought unlikely hits
            plan = planner.plan([tree])
            planner.observe(plan, [follow(plan.trees[0], right)])
    every = DraftTree(np.arange(9), np.full(9, ROOT), probability=np.array([*np.linspace(0.05, 0.95, 9)]))
    rates = planner._by_odds.rates(every)
    assert (np.diff(rates) >= -1e-12).all()


def test_likelier_branches_are_kept_first() -> None:
    tree = DraftTree(np.arange(4), np.array([ROOT, ROOT, 0, 1]), probability=np.array([0.1, 0.6, 0.09, 0.55]))
    kept = [set(Planner(critical).plan([tree]).trees[0].tokens.tolist()) for critical in (1.5, 2, 4, 8, 16, 32, 64)]
    assert {1, 3} in kept
    assert all(small <= large for small, large in itertools.pairwise(kept))


def test_a_cheap_pass_scores_more() -> None:
    assert len(Planner(8).plan([chain(40)]).trees[0]) < len(Planner(64).plan([chain(40)]).trees[0])


def test_a_first_token_that_costs_much_must_be_likely() -> None:
    tree = DraftTree(np.arange(1), np.array([ROOT]), probability=np.array([0.3]))
    smooth, steep = CostCurve((1, 2, 65), (1.0, 1.05, 2.9)), CostCurve((1, 2, 65), (1.0, 1.5, 2.9))
    assert [len(Planner(curve).plan([tree]).trees[0]) for curve in (smooth, steep)] == [1, 0]


def test_rows_of_a_batch_share_what_a_pass_costs() -> None:
    curve = CostCurve((1, 8, 16), (1.0, 1.05, 8.0))  # a few tokens more are all but free, the others are not
    tree = chain(4, 0.9)
    alone = len(Planner(curve).plan([tree]).trees[0])
    assert alone == 4
    assert sum(map(len, Planner(curve).plan([tree] * 8).trees)) < 8 * alone


def test_a_prompt_s_pass_scores_what_adds_little_to_it() -> None:
    unlikely = chain(8, 0.15)
    assert len(Planner(CURVE).plan([unlikely], [1]).trees[0]) < len(Planner(CURVE).plan([unlikely], [500]).trees[0])
    assert len(Planner(CURVE).plan([unlikely], [500]).trees[0]) < 8


def test_behind_a_long_text_each_node_costs_more() -> None:
    curve = CostCurve(CURVE.sizes, CURVE.costs, per_cached=1e-5, per_pair=1e-5)
    sizes = [len(Planner(curve).plan([chain(40, 0.9)], [1], [length]).trees[0]) for length in (0, 10_000, 100_000)]
    assert sizes[0] > sizes[1] > sizes[2]


def test_the_row_with_the_shorter_text_is_given_more() -> None:
    curve = CostCurve(CURVE.sizes, CURVE.costs, per_cached=1e-5, per_pair=1e-5)
    long, short = Planner(curve).plan([chain(40, 0.9), chain(40, 0.9)], [1, 1], [50_000, 1000]).trees
    assert len(long) < len(short)


def test_the_same_history_gives_the_same_plan() -> None:
    assert run(Planner(CURVE), right=3) == run(Planner(CURVE), right=3)


def test_a_drawn_token_s_own_probability_decides_nothing() -> None:
    q = torch.full((4, 8), 0.125)
    plans = []
    for chance in (0.999, 0.001):
        tree = DraftTree(np.arange(4), np.arange(-1, 3), q=q, probability=chance ** np.arange(1, 5))
        planner = Planner(CURVE)
        sizes = []
        for right in (4, 1, *[0] * 20, 4, 4):
            plan = planner.plan([tree])
            sizes.append(len(plan.trees[0]))
            planner.observe(plan, [follow(plan.trees[0], right)])
        plans.append(sizes)
    assert plans[0] == plans[1]
    assert len(set(plans[0])) > 1


def test_a_drawn_node_that_was_not_scored_teaches_nothing() -> None:
    tree = DraftTree(np.arange(4), np.arange(-1, 3), q=torch.full((4, 8), 0.125))
    planner, other = Planner(CURVE), Planner(CURVE)
    for one, next_token in ((planner, 0), (other, 5)):
        plan = one.plan([tree])
        cut = DraftTree.empty()
        one.observe(plan, [Outcome(cut, Verdict([], [next_token]), NO_LOGITS)])
    assert planner._by_depth.rates(tree).tolist() == other._by_depth.rates(tree).tolist()


def probing(planner: Planner, tokens: int, steps: int) -> list[bool]:
    """Whether the probes of each step were sent; steps with probes give so many tokens, others one."""
    tree = DraftTree(np.arange(12), np.arange(-1, 11), probe=np.ones(12, np.bool_))
    sent = []
    for _ in range(steps):
        plan = planner.plan([tree])
        sent.append(len(plan.trees[0]) > 0)
        given = list(range(100, 100 + (tokens if sent[-1] else 1)))
        planner.observe(plan, [Outcome(plan.trees[0], Verdict([], given), NO_LOGITS)])
    return sent


def test_probes_that_do_not_pay_lose_no_more_than_the_allowance_and_the_interest() -> None:
    steps, sent = 2000, probing(Planner(CURVE), 1, 2000)
    lost = sum(sent) * (float(CURVE.passes(13)) - 1)
    assert lost <= ALLOWANCE + INTEREST * steps + 1
    assert sum(sent) > 1.5 * sent.index(False)  # they are given another chance


def test_probes_that_pay_are_always_sent() -> None:
    assert all(probing(Planner(CURVE), 2, 500))


def test_probes_are_left_alone_while_they_pay() -> None:
    tree = DraftTree(np.arange(3), np.array([ROOT, 0, 1]), probe=np.array([False, True, True]))
    assert Planner(0.1).plan([tree]).trees[0] is tree


def test_without_its_probes_a_tree_is_cut_like_any_other() -> None:
    planner = Planner(CURVE)
    probing(planner, 1, 100)
    tree = DraftTree(np.arange(3), np.array([ROOT, 0, ROOT]), probe=np.array([False, False, True]))
    plan = planner.plan([tree])
    assert plan.proposed[0].tokens.tolist() == [0, 1]
    assert plan.proposed[0].probe is None


def test_an_impossible_critical_length_is_refused() -> None:
    with pytest.raises(ValueError, match="critical_length is 0; it must be positive"):
        Planner(0)


def test_output_does_not_depend_on_the_plan() -> None:
    model, options = tiny("llama"), {"max_new_tokens": 30, "do_sample": False}
    plain = forerun.Engine(model, "none").generate(list(PROMPTS), **options)
    drafter = OracleDrafter([request.tokens for request in plain.requests])
    for planner in (None, Planner(0.5), Planner(8), Planner(1000)):
        engine = forerun.Engine(model, drafter, planner=planner)
        assert engine.generate(list(PROMPTS), **options).generated == plain.generated
