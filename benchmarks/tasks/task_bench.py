"""More contestants than ``forerun bench`` has: drafts that never hit, other engines, and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.papers.baselines import RECIPES
from forerun.bench.contestants import Bench, Makers
from forerun.bench.journal import Journal
from forerun.bench.rounds import BASELINE, Contestant, PromptSet, Rows, Series, Tokens, measure
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source

PADDED = "transformers padded"


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
    """The contestants of ``forerun bench``, drafts that are never accepted, ``others`` by name, and batches of
    prompts."""

    recipes = RECIPES

    def __init__(self, *given: Any, others: Mapping[str, Contestant] | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        self.others = dict(others or {})
        self.measures_batches = False

    def makers(self, prompts: PromptSet) -> Makers:
        others: dict[str, Callable[[], Contestant]] = {
            "forerun, wrong drafts": lambda: self.forerun(lambda setup: WrongSource())
        }
        others |= {name: lambda other=other: other for name, other in self.others.items()}  # type: ignore[misc]
        return {**super().makers(prompts), **others}

    def run_batches(
        self, prompts: Sequence[Tokens], size: int, max_new_tokens: int, rounds: int, journal: Journal | None = None
    ) -> Iterator[list[Series]]:
        """Measure prompts in batches: padded by transformers, ragged by Forerun. A last partial batch is left out."""
        contestants = self._built(self._batch_makers())
        return measure(contestants, f"batches of {size}", in_batches(prompts, size), max_new_tokens, rounds, journal)

    def _batch_makers(self) -> Makers:
        ours = {f"forerun {name}": partial(self.forerun, self._drafter(name)) for name in ("none", "trie")}
        return {PADDED: self.transformers, **ours}

    def _all_makers(self, sets: Sequence[PromptSet]) -> list[Makers]:
        return super()._all_makers(sets) + ([self._batch_makers()] if self.measures_batches else [])

    def _kept(self) -> Sequence[str]:
        return (BASELINE, PADDED)


def in_batches(prompts: Sequence[Tokens], size: int) -> list[Rows]:
    return [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
