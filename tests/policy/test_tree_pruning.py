"""What is scored of drafts is what pays: much when they hit, next to nothing when they never do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from forerun.core.pass_context import PassContext
from forerun.policy.prices import LinearCost
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.request import Request
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome, Verdict
from forerun.policy.cost_curve import CostCurve
from forerun.policy.tree_pruning import TreePruner, TreeSelection

NO_LOGITS = torch.empty(0, 0)
CHAIN = 16
CURVE = CostCurve((1, 2, 9, 17, 33, 65), (1.0, 1.22, 1.45, 1.74, 2.1, 2.9))
"""As measured for the bundled model."""


def prune(
    pruner: TreePruner,
    trees: Sequence[DraftTree],
    pending: Sequence[int] = (),
    cached: Sequence[int] = (),
    left: int = 999,
) -> TreeSelection:
    pending, cached = pending or [1] * len(trees), cached or [0] * len(trees)
    rows = [Request([1] * (new + old), left + 1) for new, old in zip(pending, cached, strict=True)]
    return pruner.prune(PassContext(rows, [CHAIN] * len(rows), pending), trees)


def chain(length: int = CHAIN, chance: float | None = None) -> DraftTree:
    parents = np.arange(-1, length - 1)
    probability = None if chance is None else chance ** np.arange(1, length + 1)
    return DraftTree(np.arange(length), parents, probability=probability)


def follow(tree: DraftTree, right: int) -> Outcome:
    """The outcome of a chain of which so many tokens are right, whatever of it was scored."""
    path = list(range(min(right, len(tree))))
    return Outcome(tree, Verdict(path, [*path, len(path) if len(path) < right else 99]), NO_LOGITS)


def run(pruner: TreePruner, right: int, steps: int = 300, tree: DraftTree | None = None) -> list[int]:
    """Scored nodes per step, for chains of which ``right`` tokens are."""
    sizes = []
    for _ in range(steps):
        selection = prune(pruner, [tree or chain()])
        sizes.append(len(selection.trees[0]))
        outcome = follow(selection.trees[0], right)
        pruner.learn(0, outcome, False)
        pruner.end(selection, len(outcome.verdict.tokens))
    return sizes


def test_what_chains_gave_does_not_count_as_given_by_trees() -> None:
    pruner = TreePruner(CostCurve.linear(24))
    selection = pruner.keep_all(PassContext.decoding([Request([1, 2], 9)], 8), [chain()])
    pruner.end(selection, 9, chained=True)
    assert pruner.gain == 1.0
    pruner.end(selection, 9)
    assert pruner.gain > 1.0


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


@given(st.lists(trees(), min_size=1, max_size=4), st.floats(1, 300), st.integers(0, 2**16), st.integers(1, 5))
def test_what_is_kept_is_a_tree_of_nodes_that_can_be_accepted(
    rows: list[DraftTree], critical: float, seed: int, deepest: int
) -> None:
    rng = np.random.default_rng(seed)
    curve = CostCurve((1, 2), (1.0, 1 + 1 / critical), (1, 3), (1e-4, 1e-3))
    pruner = TreePruner(curve, vocabulary=15)
    for _ in range(3):
        pending, cached = rng.integers(1, 9, len(rows)).tolist(), rng.integers(0, 99, len(rows)).tolist()
        selection = prune(pruner, rows, pending, cached, deepest)
        assert selection.nodes == sum(map(len, selection.trees))
        fed = [1 + len(kept) - 1 + count for kept, count in zip(selection.trees, pending, strict=True)]
        assert selection.cost == pytest.approx(curve.of(fed, cached))
        for row, (tree, kept) in enumerate(zip(rows, selection.trees, strict=True)):
            assert branches(kept) <= branches(tree)
            assert all(len(branch) <= deepest and max(branch) < 15 for branch in branches(kept))
            leaf = int(rng.integers(-1, len(kept)))
            path = kept.ancestors[leaf].nonzero()[0].tolist() if leaf >= 0 else []
            pruner.learn(row, Outcome(kept, Verdict(path, [*kept.tokens[path].tolist(), 99]), NO_LOGITS), False)
        pruner.end(selection, len(rows))


def branches(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tokens down to each node."""
    return {tuple(tree.tokens[above].tolist()) for above in tree.ancestors}


@pytest.mark.parametrize("chance", [None, 0.1, 0.5, 0.9, 0.999])
def test_drafts_that_never_hit_cost_next_to_nothing(chance: float | None) -> None:
    sizes = np.array(run(TreePruner(CURVE), right=0, tree=chain(chance=chance)))
    assert (CURVE.passes(1 + sizes) - 1).sum() < 5  # passes, in three hundred steps
    assert not sizes[30:].any()


@pytest.mark.parametrize("chance", [None, 0.1, 0.5, 0.9])
def test_drafts_are_scored_again_soon_after_they_begin_to_hit(chance: float | None) -> None:
    """What was proposed and not scored is learnt from, too."""
    pruner, tree = TreePruner(CURVE), chain(chance=chance)
    assert not any(run(pruner, right=0, steps=1000, tree=tree)[30:])
    sizes = run(pruner, right=CHAIN, steps=100, tree=tree)
    assert np.flatnonzero(sizes)[0] < 25
    assert all(size == CHAIN for size in sizes[60:])


def test_drafts_that_always_hit_are_scored_in_full() -> None:
    assert np.mean(run(TreePruner(CURVE), right=CHAIN)[20:]) == CHAIN


def test_a_chain_of_a_drafter_that_says_nothing_is_cut_where_its_hits_end() -> None:
    assert set(run(TreePruner(CURVE), right=3)[150:]) <= {3, 4}


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.8])
def test_a_drafter_that_is_too_modest_is_corrected(chance: float) -> None:
    assert run(TreePruner(CURVE), right=CHAIN, tree=chain(chance=chance))[-1] == CHAIN


def test_likelier_branches_are_kept_first() -> None:
    tree = DraftTree(
        np.arange(6), np.array([-1, 0, -1, 2, -1, 4]), probability=np.array([0.02, 0.01, 0.8, 0.7, 0.02, 0])
    )
    (kept,) = prune(TreePruner(CURVE), [tree]).trees
    assert kept.tokens.tolist() == [2, 3]


def test_a_cheap_pass_scores_more() -> None:
    tree = chain(chance=0.8)
    kept = [prune(TreePruner(CostCurve.linear(critical)), [tree]).nodes for critical in (2, 24, 300)]
    assert kept[0] < kept[1] < kept[2]


def test_what_a_step_cost_already_makes_more_worth_scoring() -> None:
    tree, context = chain(chance=0.7), PassContext.decoding([Request([1], 99)], CHAIN)
    sizes = [TreePruner(CostCurve.linear(4)).prune(context, [tree], spent).nodes for spent in (0.0, 1.0, 4.0)]
    assert sizes[0] < sizes[1] < sizes[2]


def test_rows_of_a_batch_share_what_a_pass_costs() -> None:
    sure, unsure = chain(chance=0.95), chain(chance=0.3)
    selection = prune(TreePruner(CostCurve.linear(8)), [sure, unsure])
    assert len(selection.trees[0]) > 2 * len(selection.trees[1])


def test_the_row_with_the_shorter_text_is_given_more() -> None:
    curve = CostCurve((1, 2), (1.0, 1.02), (1, 2), (0.0, 1e-4))
    selection = prune(TreePruner(curve), [chain(chance=0.9), chain(chance=0.9)], cached=[400, 10])
    assert len(selection.trees[0]) < len(selection.trees[1])


def test_beside_rows_that_read_their_prompts_a_node_must_be_worth_what_it_adds() -> None:
    """At a quarter of a plain pass for each node, and a token for each plain pass of late."""
    context = PassContext([Request([1], 99)], [CHAIN], [1], beside=60)
    selection = TreePruner(CostCurve.linear(4)).prune(context, [chain(chance=0.8)])
    assert selection.nodes == 6  # 0.8 ** 6 > 1 / 4 > 0.8 ** 7
    assert not selection.context.decodes


def test_beside_a_prompt_many_rows_draft_less_than_one() -> None:
    """Nine rows alone give nine tokens for the cost of three plain passes; so a quarter of one must give 0.75."""
    rows = [Request([1], 99) for _ in range(9)]
    context = PassContext(rows, [CHAIN] * 9, [1] * 9, beside=60)
    selection = TreePruner(CostCurve.linear(4)).prune(context, [chain(chance=0.8) for _ in rows])
    assert [len(tree) for tree in selection.trees] == [1] * 9


@pytest.mark.parametrize("pending", [[1, 1, 1], [1, 30, 2]])
def test_one_chain_costs_what_it_costs_among_all_lengths(pending: list[int]) -> None:
    curve, correction = CostCurve(CURVE.sizes, CURVE.costs, (1, 2, 9), (1e-4, 2e-4, 4e-4), 0.1), LinearCost(1.1, 1.4)
    rows = [Request([1] * (count + 50 * n), 99) for n, count in enumerate(pending)]
    context, pruner = PassContext(rows, [CHAIN] * 3, pending, beside=pending[1] - 1), TreePruner(curve)
    passes = pruner.chain_passes(context, CHAIN, correction)
    assert [pruner.chain_pass(context, n, correction) for n in range(1, CHAIN + 1)] == pytest.approx(passes.tolist())
    for limit in (0.0, *(passes + 1e-9), *(passes - 1e-9)):
        affordable = pruner.affordable(context, CHAIN, limit, correction)
        assert affordable == np.searchsorted(passes, limit, side="right")


def test_a_drawn_token_s_own_probability_decides_nothing() -> None:
    q = torch.full((3, 5), 0.2)
    low, high = (DraftTree(np.arange(3), np.arange(-1, 2), q=q, probability=np.full(3, p)) for p in (0.01, 0.99))
    assert prune(TreePruner(CURVE), [low]).nodes == prune(TreePruner(CURVE), [high]).nodes > 0


def test_a_drawn_node_that_was_not_scored_teaches_nothing() -> None:
    """The first two of a chain were scored and accepted; that the next token is the third's shows nothing of it."""
    tree = DraftTree(np.arange(4), np.arange(-1, 3), q=torch.full((4, 5), 0.2))
    for drawn, shown in ((True, 2), (False, 3)):
        pruner = TreePruner(CostCurve.linear(2))
        selection = prune(pruner, [tree])
        (kept,) = selection.trees
        assert len(kept) == 2
        pruner.learn(0, Outcome(kept, Verdict([0, 1], [0, 1, 2]), NO_LOGITS), drawn)
        assert pruner.end(selection, 3) == shown
