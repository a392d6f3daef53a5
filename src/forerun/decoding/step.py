"""One step: propose, score, verify, commit, observe. Plain autoregression is this step with an empty tree."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome, verify
from forerun.decoding.commit import Commit
from forerun.decoding.row import Row
from forerun.drafters.base import Drafter
from forerun.model.scorer import Scorer
from forerun.plan.planner import Plan, Planner


@dataclass(frozen=True)
class Step:
    """One draft and one verifying pass for every row.

    Attributes:
        target: decides what is generated.
        drafter: proposes the trees.
        planner: cuts them to what is worth scoring; None scores all that is drafted.
        budget: the most nodes of a tree that may be accepted.
    """

    target: Scorer
    drafter: Drafter
    planner: Planner | None
    budget: int

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Row]) -> list[Commit]:
        """What it adds to each row, which is at least a token."""
        began = time.perf_counter()
        trees, plan = self._propose(rows)
        proposed = time.perf_counter()
        blocks = [row.block(tree) for row, tree in zip(rows, trees, strict=True)]
        logits = self.target.score(blocks, [row.cache for row in rows])
        scored = time.perf_counter()
        outcomes = [self._verify(*parts) for parts in zip(rows, blocks, logits, strict=True)]
        if self.planner is not None and plan is not None:
            self.planner.observe(plan, outcomes)
        verified = time.perf_counter()
        for row in rows:
            row.record_times(proposed - began, scored - proposed, verified - scored)
        return [
            Commit(row.request, outcome.verdict.tokens, len(outcome.verdict.path))
            for row, outcome in zip(rows, outcomes, strict=True)
        ]

    def _propose(self, rows: Sequence[Row]) -> tuple[list[DraftTree], Plan | None]:
        """The trees to score, and the plan that cut them."""
        requests = [row.request for row in rows]
        for row in rows:
            row.request.unread = len(row.pending)
        planner = None if self.drafter.sized else self.planner
        budget = self.budget if planner is None else planner.budget(self.budget)
        if planner is not None and not budget:
            planner.rest()
            return [DraftTree.empty() for _ in rows], None
        proposed = self.drafter.propose_batch(requests, budget)
        known = self.target.vocabulary
        trees = [tree.trim(request.max_draft_depth, known) for tree, request in zip(proposed, requests, strict=True)]
        if planner is None:
            return trees, None
        plan = planner.plan(trees, [len(row.pending) for row in rows], [row.cache.length for row in rows])
        return plan.trees, plan

    def _verify(self, row: Row, block: Block, logits: torch.Tensor) -> Outcome:
        verdict = verify(block.tree, logits, row.request)
        row.commit(block, verdict)
        outcome = Outcome(block.tree, verdict, logits)
        self.drafter.observe(row.request, outcome)
        return outcome
