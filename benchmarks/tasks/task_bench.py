"""More contestants than ``forerun bench`` has: drafts that are never accepted, and other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.papers.lookahead_trie import RECIPES
from forerun.bench.contestants import Bench, Makers
from forerun.bench.rounds import BASELINE, Contestant, PromptSet
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source


class WrongSource(Source):
    """Drafts tokens that hardly ever come, and rates them as likely: measures the cost of useless drafts."""

    def open(self, row: Row) -> int:
        """Find a token that the prompt does not contain."""
        return int(np.setdiff1d(np.arange(len(row.request) + 1), row.request.prompt)[0])

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        both = zip(rows, limits, strict=True)
        return [self._draft(row.states[self], row.request, limit.nodes) for row, limit in both]

    def _draft(self, absent: int, request: Request, budget: int) -> DraftTree:
        length = max(0, min(budget, request.max_draft_depth))
        claimed = np.full(length, 0.9).cumprod()
        return DraftTree(np.full(length, absent), np.arange(-1, length - 1), probability=claimed)


class TaskBench(Bench):
    """The contestants of ``forerun bench``, drafts that are never accepted, and ``others`` by name."""

    recipes = RECIPES

    def __init__(self, *given: Any, others: Mapping[str, Contestant] | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        self.others = dict(others or {})

    def makers(self, prompts: PromptSet) -> Makers:
        wrong = {"forerun, wrong drafts": partial(self.forerun, lambda setup: WrongSource())}
        others = {name: lambda other=other: other for name, other in self.others.items()}  # type: ignore[misc]
        return {**super().makers(prompts), **wrong, **others}

    def _kept(self) -> Sequence[str]:
        return (BASELINE,)
