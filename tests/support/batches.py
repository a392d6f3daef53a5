"""Engines of the tiny Llama whose batches are small, prompts for them, and what they read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from forerun.core.block import RowScores
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.engine.batch import Batch
from forerun.engine.engine import Engine
from forerun.models.forward.scorer import Scorer
from support.tiny import tiny

CHUNK = 8
LONG = LongContextConfig(
    cache_budget=16, chunk=4, gamma1=2, gamma2=4, paced=False, draft_model=tiny("qwen2"), window=12
)


def engine(drafter: str = "none", dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
    return Engine(tiny("llama", dtype), drafter, settings=LONG, prune_drafts=False, prefill_block=CHUNK, **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(6, 48, length - 1).tolist()]


def repeated(length: int, seed: int = 0, period: int = 30) -> list[int]:
    """Some tokens again and again, so that there is something to draft."""
    return [1, *np.resize(np.random.default_rng(seed).integers(6, 48, period), length - 1).tolist()]


def finish(batch: Batch) -> None:
    """Step until all have ended; they must not wait for each other for good."""
    idle = 0
    while batch and idle < 50:
        idle = 0 if batch.step() else idle + 1
    assert not batch


class Reads:
    """Counts what a scorer reads of texts, drafts aside."""

    def __init__(self, scorer: Scorer) -> None:
        self.passes: list[list[int]] = []
        self._score = scorer.score_rows
        scorer.score_rows = self

    def __call__(self, blocks: Any, caches: Any, states_of: Any = ()) -> list[RowScores]:
        self.passes.append([len(block.pending) for block in blocks])
        return self._score(blocks, caches, states_of)

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.passes))


def finish_all(one: Engine, requests: Sequence[Request], **how: Any) -> None:
    with one.batch(**how) as batch:
        for request in requests:
            batch.admit(request)
        finish(batch)


def ask(one: Engine, tokens: list[int], namespace: str = "default", new: int = 6) -> tuple[list[int], int]:
    """An answer, and how many tokens of its prompt were found."""
    before = one.prefixes.hits
    (request,) = one.requests([tokens], max_new_tokens=new, namespace=namespace)
    finish_all(one, [request])
    one.flush()
    return request.generated.tolist(), one.prefixes.hits - before
