"""Prune trees to the nodes worth scoring: those whose tokens are worth more than they cost.

A node's probability is the drafter's, calibrated by how often similar nodes were correct (``calibration.py``). Nodes
that were not scored count, too: the committed tokens show whether they were correct. Not so under rejection sampling:
the decision must not depend on the drawn token's own probability, and only scoring shows whether it is accepted. So
nodes with ``q`` are judged by depth, and count only if scored. No clock is involved: for a given curve, pruning is
reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from forerun.core.array_handles import ArrayHandles
from forerun.core.tree import ROOT, DraftTree, IntArray
from forerun.core.verify import Outcome
from forerun.policy import node_table
from forerun.policy.calibration import CalibrationTable
from forerun.policy.cost_curve import CostTable, FloatArray
from forerun.policy.node_table import NodeTable
from forerun.policy.pass_shape import PassShape


class PrunedTrees(NamedTuple):
    """The part of a step's trees that is worth scoring: number of nodes, expected worth of their tokens in plain
    passes, expected number of accepted ones, and what they add to the pass by the curve."""

    trees: list[DraftTree]
    nodes: int
    worth: float
    tokens: float
    added: float


class TreePruner:
    """Prunes trees, and calibrates probabilities by what was accepted."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._calibration, self._nodes = CalibrationTable.empty(), NodeTable.allocate(64)
        self._handles: tuple[ArrayHandles[NodeTable], ArrayHandles[CalibrationTable]] = ArrayHandles(), ArrayHandles()
        self._begins = [0]  # first node of each row's tree in the table, and the end of the last
        self._outcomes: list[tuple[int, ...]] = []  # row, and a row of ``node_table.learn``
        self._committed: list[int] = []  # their tokens

    def prune(
        self,
        shape: PassShape,
        trees: Sequence[DraftTree],
        values: FloatArray,
        table: CostTable,
        fixed: float = 0.0,
        slope: float = 1.0,
        slack: float = float("inf"),
    ) -> PrunedTrees:
        """Keep what is worth scoring of each row's tree. ``values`` are of a row's token, in plain passes; nodes cost
        ``slope`` times what they add by the table, plus ``fixed``, and at most ``slack``."""
        self._begins, self._outcomes, self._committed = [0, *accumulate(map(len, trees))], [], []
        if not (size := self._begins[-1]):
            return PrunedTrees([DraftTree.empty()] * len(trees), 0, 0.0, 0.0, 0.0)
        if size > len(self._nodes.tokens):
            self._nodes = NodeTable.allocate(2 * size)
        flat, (nodes, calibration) = self._flat(shape, trees), self._handles
        curves = table.curves(shape.tokens + size + 1)
        kept, *found = node_table.prune(
            nodes.at(self._nodes), calibration.at(self._calibration), *flat, self._vocabulary, *curves, shape.tokens,
            fixed, slope, values, slack,
        )  # fmt: skip
        parts = self._parts(trees, *flat[:2], flat[4][-1].tolist()) if kept else [DraftTree.empty()] * len(trees)
        return PrunedTrees(parts, kept, *found)

    def _flat(
        self, shape: PassShape, trees: Sequence[DraftTree]
    ) -> tuple[IntArray, IntArray, FloatArray, IntArray, IntArray]:
        stated = [None if tree.q is not None else tree.probability for tree in trees]
        states = [p is not None for p in stated]
        return (
            np.concatenate([tree.tokens for tree in trees]),
            np.concatenate([tree.parents for tree in trees]),
            np.concatenate([np.ones(len(tree)) if p is None else p for tree, p in zip(trees, stated, strict=True)]),
            np.array(self._begins),
            np.array([shape.depths, states, shape.cached, shape.pending, [0] * len(trees)]),
        )

    def _parts(
        self, trees: Sequence[DraftTree], tokens: IntArray, parents: IntArray, sizes: Sequence[int]
    ) -> list[DraftTree]:
        parts = list(trees)
        for row, (tree, size) in enumerate(zip(trees, sizes, strict=True)):
            begin, end = self._begins[row : row + 2]
            if size == len(tree):
                continue
            if not size:
                parts[row] = DraftTree.empty()
                continue
            keep = self._nodes.kept[begin:end] >= 0
            if tree.q is not None:
                parts[row] = tree.select(keep)
            else:
                origins = None if tree.origins is None else tree.origins[keep]
                own = slice(begin, begin + size)
                parts[row] = DraftTree.unchecked(tokens[own], parents[own], origins=origins)
        return parts

    def note(self, row: int, outcome: Outcome, drawn: bool) -> None:
        """Note which nodes of a row's tree were correct; ``learn`` counts them. ``row`` is its index in the last
        ``prune``; of a tree that was ``drawn`` (with ``q``), only accepted and rejected nodes count."""
        begin, end = self._begins[row : row + 2]
        tokens, accepted = outcome.verdict.tokens, len(outcome.verdict.path)
        self._outcomes.append((row, begin, end, len(tokens), drawn, 0))
        self._committed += [*tokens[:accepted], *[ROOT] * (len(tokens) - accepted)] if drawn else tokens

    def learn(self) -> list[tuple[int, int]]:
        """Update the calibration from the noted outcomes. Returns each row with its number of correct nodes."""
        if not self._outcomes:
            return []
        outcomes, (nodes, calibration) = np.array(self._outcomes), self._handles
        addresses = nodes.at(self._nodes), calibration.at(self._calibration)
        node_table.learn(*addresses, outcomes, np.array(self._committed, np.int64))
        self._outcomes, self._committed = [], []
        return list(zip(outcomes[:, 0].tolist(), outcomes[:, -1].tolist(), strict=True))
