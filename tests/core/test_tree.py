"""DraftTree against a brute-force reading of its parent list."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.origin import Origin
from forerun.core.tree import ROOT, DraftTree


@st.composite
def trees(draw: st.DrawFn, max_size: int = 12) -> DraftTree:
    """Any tree over four tokens, with ``q`` and so on that tell its nodes apart, or without."""
    n = draw(st.integers(0, max_size))
    parents = [draw(st.integers(ROOT, i - 1)) for i in range(n)]
    tokens = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    if draw(st.booleans()):
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))
    return DraftTree(
        np.array(tokens, np.int64),
        np.array(parents, np.int64),
        q=torch.arange(4 * n, dtype=torch.float64).reshape(n, 4),
        probability=np.arange(n) / 16,
        origins=np.arange(n, dtype=np.int8) % 6,
    )


def path_to(tree: DraftTree, node: int) -> list[int]:
    """The node and all above it, from the top."""
    path = []
    while node != ROOT:
        path.append(node)
        node = int(tree.parents[node])
    return path[::-1]


def assert_same_nodes(part: DraftTree, whole: DraftTree, nodes: list[int]) -> None:
    """``part`` consists of the ``nodes`` of ``whole``, in order, with everything known of them."""
    assert part.tokens.tolist() == [whole.tokens[i] for i in nodes]
    assert [path_to(part, i) for i in range(len(part))] == [[nodes.index(j) for j in path_to(whole, i)] for i in nodes]
    for name in ("q", "probability", "origins"):
        value, all_values = getattr(part, name), getattr(whole, name)
        assert (value is None) == (all_values is None)
        if all_values is not None:
            assert value.tolist() == [all_values[i].tolist() for i in nodes]


@given(trees())
def test_depths_ancestors_children_and_chains_follow_the_parents(tree):
    paths = [path_to(tree, i) for i in range(len(tree))]
    assert tree.depths.tolist() == [len(path) for path in paths]
    assert tree.ancestors.shape == (len(tree), len(tree))
    assert [np.flatnonzero(row).tolist() for row in tree.ancestors] == paths
    assert tree.is_chain == all(len(path) == i + 1 for i, path in enumerate(paths))
    for node, token in itertools.product(range(ROOT, len(tree)), range(5)):
        found = [i for i in range(len(tree)) if tree.parents[i] == node and tree.tokens[i] == token]
        assert tree.children.get((node, token)) == (found[0] if found else None)


@given(trees(), st.data())
def test_select_keeps_the_marked_nodes_and_what_is_known_of_them(tree, data):
    keep = np.zeros(len(tree), np.bool_)
    for i in range(len(tree)):
        keep[i] = (tree.parents[i] == ROOT or keep[tree.parents[i]]) and data.draw(st.booleans())
    assert_same_nodes(tree.select(keep), tree, np.flatnonzero(keep).tolist())


@given(trees(), st.data())
def test_select_refuses_to_orphan_a_node(tree, data):
    keep = np.array([data.draw(st.booleans()) for _ in range(len(tree))], np.bool_)
    if all(keep[path_to(tree, i)].all() for i in np.flatnonzero(keep)):
        tree.select(keep)
    else:
        with pytest.raises(ValueError, match=r"^a kept node's parent is not kept$"):
            tree.select(keep)


@given(trees(), st.integers(0, 9), st.integers(0, 6))
def test_cut_keeps_the_first_nodes_down_to_a_depth(tree, count, max_depth):
    nodes = [i for i in range(len(tree))[:count] if len(path_to(tree, i)) <= max_depth]
    left = tree.cut(count, max_depth, 1 << 31)
    assert_same_nodes(left, tree, nodes)
    assert (left is tree) == (len(nodes) == len(tree))


def test_merged_trees_keep_the_origins_of_both():
    model = DraftTree.chain([1, 2]).by(Origin.MODEL)
    text = DraftTree.from_branches([[1, 3], [4]], 8).by(Origin.TEXT)
    both = model.merged(text, 3)
    assert both.tokens.tolist() == [1, 2, 3]
    assert both.sources.tolist() == [Origin.MODEL, Origin.MODEL, Origin.TEXT]
    assert model.merged(DraftTree.chain([7]), 3).sources.tolist() == [Origin.MODEL, Origin.MODEL, Origin.DRAFTER]


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=8), st.integers(0, 12))
def test_from_branches_shares_prefixes_until_the_budget_is_used(branches, budget):
    prefixes = dict.fromkeys(tuple(b[:k]) for b in branches for k in range(1, len(b) + 1))
    expected = []
    for prefix in prefixes:  # a prefix whose own prefix found no room has none either, as the budget stays used up
        if len(expected) < budget:
            expected.append(prefix)
    tree = DraftTree.from_branches(branches, budget)
    assert [tuple(tree.tokens[path_to(tree, i)].tolist()) for i in range(len(tree))] == expected
    assert tree.q is None and tree.probability is None


def test_branches_of_a_generator_and_of_numpy_are_matched_from_the_root_down():
    tree = DraftTree.from_branches((np.array(branch) for branch in ([1, 2, 3], [1, 4])), 8)
    assert tree.tokens.tolist() == [1, 2, 3, 4] and tree.parents.tolist() == [ROOT, 0, 1, 0] and not tree.is_chain
    assert [tree.matches(tokens) for tokens in ([1, 4, 3], [1, 2, 3, 3], [2, 2], [])] == [2, 3, 0, 0]
    assert DraftTree.empty().matches([1]) == 0


def test_a_chain_is_one_branch_and_carries_q():
    q = torch.ones(3, 5) / 5
    tree = DraftTree.chain(np.array([4, 0, 4], np.int32), q)
    assert tree.tokens.dtype == tree.parents.dtype == np.int64
    assert tree.parents.tolist() == [ROOT, 0, 1] and tree.is_chain
    assert tree.q is q and tree.expected == 0
    assert DraftTree(np.array([1, 2]), np.array([-1, 0]), probability=np.array([0.5, 0.25])).expected == 0.75


def test_an_empty_tree_is_plain_autoregression():
    for tree in (DraftTree.empty(), DraftTree.chain([]), DraftTree.from_branches([[1]], 0)):
        assert len(tree) == tree.expected == 0 and tree.is_chain
        assert tree.depths.shape == (0,) and tree.ancestors.shape == (0, 0) and not tree.children
        assert tree.cut(0, 0, 1 << 31) is tree
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.tokens = np.zeros(1, np.int64)


@pytest.mark.parametrize(("tokens", "parents", "message"), [
    ([1, 2], [-1], r"tokens \(2,\) and parents \(1,\) must be equally long vectors"),
    ([[1, 2]], [[-1, 0]], r"tokens \(1, 2\) and parents \(1, 2\) must be equally long vectors"),
    ([1, 2], [-1, 1], r"parents must be ROOT \(-1\) or the index of an earlier node"),
    ([1, 2], [1, -1], r"parents must be ROOT \(-1\) or the index of an earlier node"),
    ([1, 2], [-2, 0], r"parents must be ROOT \(-1\) or the index of an earlier node"),
])  # fmt: skip
def test_malformed_parents_are_refused(tokens, parents, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        DraftTree(np.array(tokens), np.array(parents))


def test_per_node_values_must_match_the_nodes():
    values = {"q": torch.ones(3, 5), "probability": np.zeros(3), "origins": np.zeros(3, np.int8)}
    for name, value in values.items():
        with pytest.raises(ValueError, match=f"^{name} has 3 rows for 2 nodes$"):
            DraftTree(np.array([1, 2]), np.array([-1, 0]), **{name: value})


def test_cut_drops_tokens_that_the_vocabulary_lacks_with_all_under_them():
    tree = DraftTree(np.array([3, 9, 2, -1, 4]), np.array([ROOT, 0, 1, ROOT, 0]))
    assert tree.cut(5, 5, 9).tokens.tolist() == [3, 4]
    assert tree.cut(5, 1, 10).tokens.tolist() == [3]
    assert tree.cut(5, 5, 10).tokens.tolist() == [3, 9, 2, 4]
