"""What is scored of drafts is what pays: much when they hit, next to nothing when they never do."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome, Verdict
from forerun.policy.choice import Choice
from forerun.policy.cost_curve import CostCurve
from forerun.policy.decision import Decision, PassShape, Pruned
from forerun.policy.gains import AcceptanceRate, RowGains
from forerun.policy.policy_tables import PASSES

NO_LOGITS = torch.empty(0, 0)
CHAIN = 16
CURVE = CostCurve((1, 2, 9, 17, 33, 65), (1.0, 1.22, 1.45, 1.74, 2.1, 2.9))
"""As measured for the bundled model."""


VOCABULARY = 1 << 31


def shape(
    count: int, pending: Sequence[int] = (), cached: Sequence[int] = (), depth: int = 999, beside: int = 0
) -> PassShape:
    pending, cached = list(pending) or [1] * count, list(cached) or [0] * count
    return PassShape([depth + 1] * count, cached, pending, [CHAIN] * count, beside)


class Pruner:
    """The pruning of a ``Choice`` whose slack and costs a test sets."""

    def __init__(self, vocabulary: int = VOCABULARY, curve: CostCurve = CURVE) -> None:
        self.choice = Choice(curve, vocabulary)
        self.decision: Decision | None = None

    def prune(
        self, trees: Sequence[DraftTree], given: PassShape | None = None, value: float | None = 1.0,
        fixed: float = 0.0, slope: float = 1.0, slack: float = np.inf,
    ) -> Pruned:  # fmt: skip
        """Prune where a token of each row is worth ``value`` plain passes, or what the ledger says."""
        policy, (account,) = self.choice._policy, self.choice._policy.account
        account.stretch = 1.0
        decision = self.choice.decide(
            given or shape(len(trees)), [RowGains(AcceptanceRate()) for _ in trees], [40] * len(trees), True
        )
        account.slack = account.trials = slack
        if value is not None:
            for name, each in (("each", value), ("last", 0.0), ("weight", 1.0), ("spread", 1.0)):
                policy.rows[name] = each
        account.plain_measured, time = True, policy.times[PASSES]
        time.start, time.each = 1.0 + fixed / float(policy.step["alone"][0]), slope
        policy.step["proposing"], decision.proposing, decision.trees = 0, list(range(len(trees))), trees
        self.decision = decision
        return self.choice._pruned(decision, trees, True)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        assert self.decision is not None
        self.choice.learn(self.decision, outcomes, 1.0, 0.0)


def prune(trees: Sequence[DraftTree], curve: CostCurve = CURVE, **costs: float) -> Pruned:
    return Pruner(curve=curve).prune(trees, **costs)


def chain(length: int = CHAIN, chance: float | None = None) -> DraftTree:
    parents = np.arange(-1, length - 1)
    probability = None if chance is None else chance ** np.arange(1, length + 1)
    return DraftTree(np.arange(length), parents, probability=probability)


def follow(tree: DraftTree, right: int) -> Outcome:
    """The outcome of a chain of which so many tokens are right, whatever of it was scored."""
    path = list(range(min(right, len(tree))))
    return Outcome(tree, Verdict(path, [*path, len(path) if len(path) < right else 99]), NO_LOGITS)


def run(right: int, steps: int = 300, tree: DraftTree | None = None, pruner: Pruner | None = None) -> list[int]:
    """Scored nodes per step, for chains of which ``right`` tokens are."""
    sizes, pruner = [], pruner or Pruner()
    for _ in range(steps):
        (kept,) = pruner.prune([tree or chain()]).trees
        sizes.append(len(kept))
        pruner.learn([follow(kept, right)])
    return sizes


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
def test_what_is_kept_is_a_tree_of_nodes_that_can_be_accepted(rows, critical, seed, deepest):
    rng = np.random.default_rng(seed)
    curve = CostCurve((1, 2), (1.0, 1 + 1 / critical), (1, 3), (1e-4, 1e-3))
    pruner = Pruner(15, curve)
    for _ in range(3):
        pending, cached = rng.integers(1, 9, len(rows)).tolist(), rng.integers(0, 99, len(rows)).tolist()
        pruned = pruner.prune(rows, shape(len(rows), pending, cached, deepest))
        assert pruned.nodes == sum(map(len, pruned.trees))
        read = [len(kept) + count for kept, count in zip(pruned.trees, pending, strict=True)]
        assert pruned.added == pytest.approx(curve.of(read, cached) - curve.of(pending, cached))
        assert pruned.worth == pytest.approx(pruned.expected)
        outcomes = []
        for tree, kept in zip(rows, pruned.trees, strict=True):
            assert branches(kept) <= branches(tree)
            assert all(len(branch) <= deepest and max(branch) < 15 for branch in branches(kept))
            leaf = int(rng.integers(-1, len(kept)))
            path = kept.ancestors[leaf].nonzero()[0].tolist() if leaf >= 0 else []
            verdict = Verdict(path, [*kept.tokens[path].tolist(), 99])
            outcomes.append(Outcome(kept, verdict, NO_LOGITS))
        pruner.learn(outcomes)


def branches(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tokens down to each node."""
    return {tuple(tree.tokens[above].tolist()) for above in tree.ancestors}


@pytest.mark.parametrize("chance", [None, 0.1, 0.5, 0.9, 0.999])
def test_drafts_that_never_hit_cost_next_to_nothing(chance):
    sizes = np.array(run(right=0, tree=chain(chance=chance)))
    assert (CURVE.passes(1 + sizes) - 1).sum() < 5  # passes, in three hundred steps
    assert not sizes[30:].any()


@pytest.mark.parametrize("chance", [None, 0.1, 0.5, 0.9])
def test_drafts_are_scored_again_soon_after_they_begin_to_hit(chance):
    """What was proposed and not scored is learnt from, too."""
    pruner, tree = Pruner(), chain(chance=chance)
    assert not any(run(0, 1000, tree, pruner)[30:])
    sizes = run(CHAIN, 100, tree, pruner)
    assert np.flatnonzero(sizes)[0] < 25
    assert all(size == CHAIN for size in sizes[60:])


@pytest.mark.parametrize(("right", "chance", "after", "sizes"), [
    pytest.param(CHAIN, None, 20, {CHAIN}, id="all"), pytest.param(3, None, 150, {3, 4}, id="the first three"),
    *((CHAIN, chance, -1, {CHAIN}) for chance in (0.2, 0.5, 0.8)),
])  # fmt: skip
def test_a_chain_is_scored_as_far_as_it_hits_also_of_a_drafter_that_is_too_modest(right, chance, after, sizes):
    assert set(run(right, tree=chain(chance=chance))[after:]) <= sizes


def test_likelier_branches_are_kept_first():
    tree = DraftTree(
        np.arange(6), np.array([-1, 0, -1, 2, -1, 4]), probability=np.array([0.02, 0.01, 0.8, 0.7, 0.02, 0])
    )
    (kept,) = prune([tree]).trees
    assert kept.tokens.tolist() == [2, 3]


def test_a_cheap_pass_scores_more():
    tree = chain(chance=0.8)
    kept = [prune([tree], CostCurve.linear(critical)).nodes for critical in (2, 24, 300)]
    assert kept[0] < kept[1] < kept[2]


def test_rows_of_a_batch_share_what_a_pass_costs():
    sure, unsure = chain(chance=0.95), chain(chance=0.3)
    selection = prune([sure, unsure], CostCurve.linear(8))
    assert len(selection.trees[0]) > 2 * len(selection.trees[1])


def test_the_row_with_the_shorter_text_is_given_more():
    curve = CostCurve((1, 2), (1.0, 1.02), (1, 2), (0.0, 1e-4))
    both = [chain(chance=0.9), chain(chance=0.9)]
    selection = Pruner(curve=curve).prune(both, shape(2, cached=[4000, 10]))
    assert len(selection.trees[0]) < len(selection.trees[1])


def test_a_node_is_scored_where_its_token_is_worth_more_than_it_adds_if_all_pay_what_they_cost_together():
    """At a quarter of a plain pass for each node, or twice that, and a token worth one, or half of one."""
    for costs, nodes in (({}, 6), ({"value": 0.5}, 3), ({"slope": 2.0}, 3), ({"fixed": 0.5}, 6), ({"fixed": 5.0}, 0)):
        found = prune([chain(chance=0.8)], CostCurve.linear(4), **costs)
        assert found.nodes == nodes  # 0.8 ** 6 > 1 / 4 > 0.8 ** 7, and 0.8 ** 3 > 1 / 2 > 0.8 ** 4


def test_nodes_cost_no_more_than_the_slack():
    for slack in (0.0, 0.1, 0.3, 0.8, 9.0):
        found = prune([chain(chance=0.9)], CostCurve.linear(8), slack=slack)
        assert found.added <= slack
        assert found.nodes == min(int(8 * slack + 1e-9), CHAIN)  # an eighth of a plain pass each


def test_a_drawn_token_s_own_probability_decides_nothing():
    q = torch.full((3, 5), 0.2)
    low, high = (DraftTree(np.arange(3), np.arange(-1, 2), q=q, probability=np.full(3, p)) for p in (0.01, 0.99))
    assert prune([low]).nodes == prune([high]).nodes > 0


def test_a_drawn_node_that_was_not_scored_teaches_nothing():
    """The first two of a chain were scored and accepted; that the next token is the third's shows nothing of it."""
    for q, shown in ((torch.full((4, 5), 0.2), 2), (None, 3)):
        pruner = Pruner(curve=CostCurve.linear(1.8))
        (kept,) = pruner.prune([DraftTree(np.arange(4), np.arange(-1, 3), q=q)]).trees
        assert len(kept) == 2
        pruner.learn([Outcome(kept, Verdict([0, 1], [0, 1, 2]), NO_LOGITS)])
        assert pruner.choice._policy.calibration.seen.sum() == pytest.approx(shown, rel=0.05)


def test_a_row_alone_is_scored_until_it_no_longer_ends_last_and_all_rows_together_further() -> None:
    """Four rows of a closed batch that end after sixteen steps, with good drafts in one or in all of them."""
    sure, curve = chain(chance=0.93), CostCurve((1, 2), (1.0, 1.05))
    alone, together = (
        [len(tree) for tree in Pruner(curve=curve).prune(trees, shape(4, depth=16), value=None).trees]
        for trees in ([sure, *[DraftTree.empty()] * 3], [sure] * 4)
    )
    assert 2 <= alone[0] <= 10 and together == [CHAIN] * 4
