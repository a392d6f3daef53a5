"""What ``forerun analyse`` measures, part by part, over prompts that are read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forerun.bench import analysis_report as pages
from forerun.bench.analysis import Reader, Readers, on_needles, on_prose
from forerun.bench.longcontext import Prefilled, sampled
from forerun.bench.longrows import Row
from forerun.bench.needles import Haystack
from forerun.bench.recovery import locality_rows, top_rows, watch
from forerun.bench.tables import Report
from forerun.bench.trees import tree_rows
from forerun.engine import Engine
from forerun.model.scorer import Scorer
from forerun.recipes import SPARSE, small_cache, small_model
from forerun.settings import Settings

SMALL = "small model"


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        contexts: tokens of a prompt, rising; all parts but the divergence use the longest.
        temperatures: of acceptance and divergence.
        budgets: of the sparse caches, where they are compared.
        chunks: chunk sizes of the retrieval cache, likewise.
        nodes: sizes of draft trees.
        new_tokens: generated, in every part.
    """

    contexts: Sequence[int]
    temperatures: Sequence[float]
    budgets: Sequence[int]
    chunks: Sequence[int]
    nodes: Sequence[int]
    new_tokens: int


@dataclass(frozen=True)
class Analysis:
    """The parts, which fill a report.

    Args:
        target: the model.
        settings: of its sparse caches, and the small model's if there is one.
        sizes: what is measured.
        prompts: the longest contexts, read.
        report: to be filled.
        say: told what is under way.
    """

    target: Scorer
    settings: Settings
    sizes: Sizes
    prompts: Sequence[Prefilled]
    report: Report
    say: Callable[[str], None]

    def acceptance(self, text: Prefilled, haystack: Haystack) -> None:
        """Table 1, on prose and on needles."""
        self.say("acceptance on prose")
        readers = self._sparse(self.settings)
        rows = on_prose(self.target, self.prompts, readers, self.sizes.temperatures, self.sizes.new_tokens)
        self.say(f"acceptance on {len(haystack.questions)} needles")
        pages.report_acceptance(self.report, rows + on_needles(self.target, text, haystack, readers))

    def budgets(self) -> None:
        """Figures 3b and 6a."""
        rows = []
        for budget in self.sizes.budgets:
            self.say(f"cache budget {budget:,}")
            readers = self._sparse(replace(self.settings, cache_budget=budget))
            rows += self._greedy(readers, budget=budget)
        pages.report_budgets(self.report, rows)

    def chunks(self) -> None:
        """Figure 6b."""
        rows = []
        for chunk in self.sizes.chunks:
            self.say(f"chunks of {chunk:,}")
            readers = self._sparse(replace(self.settings, chunk=chunk))
            rows += self._greedy({"retrieval": readers["retrieval"]}, chunk=chunk)
        pages.report_chunks(self.report, rows)

    def recovery(self) -> None:
        """Figures 3a and 3c, on the first prompt."""
        self.say("attention to the prompt")
        prompt, budget = self.prompts[0], self.settings.cache_budget
        sizes = sorted({size for size in (*self.sizes.budgets, budget) if size < len(prompt.tokens)})
        probe = watch(self.target, prompt, sizes, budget, self.sizes.new_tokens)
        pages.report_recovery(self.report, top_rows(probe, sizes), locality_rows(probe), len(prompt.tokens), budget)

    def trees(self) -> None:
        """Figure 6c."""
        self.say("draft trees")
        engine = Engine(self.target.model, "none", planner=None, budget=max(self.sizes.nodes))
        make = sampled(0.0, self.sizes.new_tokens)
        pages.report_trees(self.report, tree_rows(engine, self.prompts, self.sizes.nodes, self.settings, make))

    def divergence(self) -> None:
        """Figure 2a. It comes last: shorter contexts are cut from the prompts, whose ends are lost."""
        rows: list[Row] = []
        sampling = [temperature for temperature in self.sizes.temperatures if temperature] or [1.0]
        for context in reversed(self.sizes.contexts):
            self.say(f"divergence at {context:,} tokens")
            cut = [prompt.cut(context) for prompt in self.prompts]
            readers = {**self._sparse(self.settings), **self._small()}
            rows += on_prose(self.target, cut, readers, sampling, self.sizes.new_tokens)
        pages.report_divergence(self.report, sorted(rows, key=lambda row: int(row["context"])))

    def _greedy(self, readers: Readers, **labels: int) -> list[Row]:
        return [row | labels for row in on_prose(self.target, self.prompts, readers, [0.0], self.sizes.new_tokens)]

    def _sparse(self, settings: Settings) -> dict[str, Reader]:
        return {name: Reader(self.target, make(settings)) for name, make in SPARSE.items()}

    def _small(self) -> dict[str, Reader]:
        if self.settings.draft_model is None:
            return {}
        return {SMALL: Reader(small_model(self.settings), small_cache(self.settings))}
