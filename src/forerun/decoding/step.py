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


@dataclass(frozen=True)
class Step:
    """One draft and one verifying pass for every row.

    Attributes:
        target: decides what is generated.
        drafter: proposes the trees.
        budget: the most nodes of a tree that may be accepted.
    """

    target: Scorer
    drafter: Drafter
    budget: int

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Row]) -> list[Commit]:
        """What it adds to each row, which is at least a token."""
        began = time.perf_counter()
        trees = self._propose(rows)
        proposed = time.perf_counter()
        blocks = [row.block(tree) for row, tree in zip(rows, trees, strict=True)]
        logits = self.target.score(blocks, [row.cache for row in rows])
        scored = time.perf_counter()
        outcomes = [self._verify(*parts) for parts in zip(rows, blocks, logits, strict=True)]
        verified = time.perf_counter()
        for row in rows:
            row.record_times(proposed - began, scored - proposed, verified - scored)
        return [
            Commit(row.request, outcome.verdict.tokens, len(outcome.verdict.path))
            for row, outcome in zip(rows, outcomes, strict=True)
        ]

    def _propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        """The trees to score."""
        requests = [row.request for row in rows]
        for row in rows:
            row.request.unread = len(row.pending)
        proposed = self.drafter.propose_batch(requests, self.budget)
        known = self.target.vocabulary
        return [tree.trim(request.max_draft_depth, known) for tree, request in zip(proposed, requests, strict=True)]

    def _verify(self, row: Row, block: Block, logits: torch.Tensor) -> Outcome:
        verdict = verify(block.tree, logits, row.request)
        row.commit(block, verdict)
        outcome = Outcome(block.tree, verdict, logits)
        self.drafter.observe(row.request, outcome)
        return outcome
