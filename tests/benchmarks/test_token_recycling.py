"""Token Recycling's matrix and tree."""

from __future__ import annotations

import torch
from support.mocks import draft, opened

from benchmarks.papers.token_recycling import NODES, TokenRecyclingSource, fixed_tree
from forerun.core.request import Request
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome, verify


def test_the_fixed_tree_is_the_likeliest_paths_and_favours_first_ranks() -> None:
    tree = fixed_tree()
    assert len(tree) == len(set(tree)) == NODES
    assert tree[0] == (ROOT, 0) and tree[1] == (0, 0)
    assert all(parent < node for node, (parent, _) in enumerate(tree))
    children = [sum(parent == node for parent, _ in tree) for node in range(NODES)]
    assert children[0] == max(children)


def test_a_draft_follows_the_last_rows_of_logits() -> None:
    drafter, request = TokenRecyclingSource(), Request([1, 2], 20)
    row = opened(drafter, request)
    assert len(draft(drafter, row, 8)) == 0
    for _ in range(3):  # 2 -> 3 -> 4 -> 5
        token = int(request.tokens[-1]) + 1
        logits = torch.zeros(1, 40)
        logits[0, token], logits[0, token + 20] = 9.0, 8.0
        verdict = verify(DraftTree.empty(), logits, request)
        drafter.learn([row], [Outcome(DraftTree.empty(), verdict, logits)])
    tree = draft(drafter, opened(drafter, Request([7, 2], 20)), 6)
    top = [int(token) for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == ROOT]
    assert top[:2] == [3, 23]
    assert tree.children[(tree.children[(ROOT, 3)], 4)] > 0
