"""One step: propose, score, verify, commit, observe. Plain autoregression is this step with an empty tree.

Rows that still read their prompt share the pass with those that decode. An error in what belongs to one row (its
sampler, its cache) ends that row, and the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forerun.core.block import Block
from forerun.core.transfers import foresee, settle
from forerun.core.tree import DraftTree, IntArray
from forerun.core.verify import Outcome, verify
from forerun.drafting.drafter import Drafter, NoDrafter
from forerun.drafting.forced import ForcedDrafter
from forerun.drafting.limited import LimitedDrafter
from forerun.engine.commit import Commit, committed
from forerun.engine.row import Row
from forerun.models.forward.scorer import Scorer

log = logging.getLogger(__name__)

Scored = torch.Tensor | Exception
"""A row's logits, or why there are none."""


def by_request(drafter: Drafter) -> Drafter:
    """A drafter with what each request adds to it: its budget, and what its grammar forces."""
    return drafter if isinstance(drafter, NoDrafter) else ForcedDrafter(LimitedDrafter(drafter))


@dataclass(frozen=True)
class Step:
    """One pass for every row: of a chunk of its prompt, or of its draft.

    Attributes:
        target: decides what is generated.
        drafter: proposes the trees.
        budget: the most nodes of a tree that may be accepted.
    """

    target: Scorer
    drafter: Drafter
    budget: int

    @torch.inference_mode()
    def __call__(self, decoding: Sequence[Row], reading: Sequence[Row]) -> list[Commit]:
        """What it adds to each row that decodes: a token at least, unless the row failed; and which others failed."""
        began = time.perf_counter()
        trees = self._propose(decoding, reading) if decoding else []
        proposed = time.perf_counter()
        rows = [*decoding, *reading]
        blocks = [row.block(tree) for row, tree in zip(decoding, trees, strict=True)]
        blocks += [row.prompt_block() for row in reading]
        logits = self._score(rows, blocks)
        scored = time.perf_counter()
        lengths = [len(row.request) for row in rows]
        scores = list(zip(rows, blocks, logits, strict=True))
        told = foresee(trees, logits[: len(decoding)], [row.request for row in decoding])
        outcomes = [self._verify(*parts, told=own) for parts, own in zip(scores, told, strict=False)]
        for row, block, found in scores[len(decoding) :]:
            if isinstance(found, Exception):
                row.request.fail(found)
            else:
                row.read(block)
        verified = time.perf_counter()
        for row, outcome in zip(decoding, outcomes, strict=True):
            if outcome is not None:
                row.record_times(proposed - began, scored - proposed, verified - scored)
        commits = [
            committed(row.request, length, outcome, verified - began)
            for row, length, outcome in zip(rows, lengths, [*outcomes, *[None] * len(reading)], strict=True)
        ]
        return [commit for commit in commits if commit.tokens or commit.request.error is not None]

    def _propose(self, rows: Sequence[Row], reading: Sequence[Row]) -> list[DraftTree]:
        """The trees to score."""
        requests = [row.request for row in rows]
        for row in rows:
            row.request.unread = len(row.pending)
        self.drafter.beside = sum(row.next_chunk for row in reading)
        proposed = self.drafter.propose_batch(requests, self.budget)
        known = self.target.vocabulary
        return [tree.trim(request.max_draft_depth, known) for tree, request in zip(proposed, requests, strict=True)]

    def _score(self, rows: Sequence[Row], blocks: Sequence[Block]) -> Sequence[Scored]:
        """Logits of each row, once they are there. A pass that fails leaves no trace; then each row has a pass of its
        own, and those that fail again are the ones to blame."""
        try:
            logits = self.target.score(blocks, [row.cache for row in rows])
            settle(logits[-1].device)
            return logits
        except Exception as error:
            if len(rows) == 1:
                return [error]
            log.warning("a pass over %d rows failed (%s); each of them has its own now", len(rows), error)
        return [self._score([row], [block])[0] for row, block in zip(rows, blocks, strict=True)]

    def _verify(self, row: Row, block: Block, logits: Scored, told: IntArray | None) -> Outcome | None:
        """What became of a row's tree; None for a row that failed. ``told`` is what ``foresee`` said of it."""
        if isinstance(logits, Exception):
            row.request.fail(logits)
            return None
        try:
            verdict = verify(block.tree, logits, row.request, told)
            row.commit(block, verdict)
            row.request.keep_logprobs(verdict.tokens, logits, [0, *(node + 1 for node in verdict.path)])
            outcome = Outcome(block.tree, verdict, logits)
            self.drafter.observe(row.request, outcome)
        except Exception as error:
            row.request.fail(error)
            return None
        return outcome
