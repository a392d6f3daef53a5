"""The parts of ``python -m benchmarks long-context analyse``, measured over prompts that are read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.long_context import analysis_report as pages
from benchmarks.long_context.analysis import CacheReader, Readers, on_needles, on_prose
from benchmarks.long_context.attention_recovery import locality_rows, top_rows, watch
from benchmarks.long_context.draft_trees import tree_rows
from benchmarks.long_context.long_bench import Prefilled, sampled
from benchmarks.long_context.needles import Haystack
from benchmarks.long_context.rows import Row
from benchmarks.papers.recipes import SPARSE
from benchmarks.reporting.progress import Say
from benchmarks.reporting.tables import Report
from forerun.core.long_context import LongContextConfig
from forerun.drafting.recipes import small_cache, small_model
from forerun.engine.engine import Engine
from forerun.models.forward.scorer import Scorer

SMALL = "small model"


@dataclass(frozen=True)
class AnalysisSizes:
    """What is measured.

    Attributes:
        contexts: tokens of a prompt, ascending; all parts except the divergence use the longest.
        temperatures: for acceptance and divergence.
        budgets: of the sparse caches, in the part that compares them.
        chunks: chunk sizes of the retrieval cache, in the part that compares them.
        nodes: sizes of draft trees.
        new_tokens: tokens to generate, in every part.
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
        settings: of the sparse caches and, if there is one, of the small model.
        sizes: what is measured.
        prompts: of the longest context, already read.
        report: is filled.
        say: told the progress.
        caches: names from ``benchmarks.papers.recipes.SPARSE`` to compare.
        save: called when the report has new rows of a part, to save them.
        part: called when a part is complete.
    """

    target: Scorer
    settings: LongContextConfig
    sizes: AnalysisSizes
    prompts: Sequence[Prefilled]
    report: Report
    say: Say
    caches: Sequence[str] = tuple(SPARSE)
    save: Callable[[], None] = lambda: None
    part: Callable[[], None] = lambda: None

    def acceptance(self, read_text: Callable[[], Prefilled], haystack: Haystack) -> None:
        """Table 1, on prose and on needles."""
        self.say("acceptance on prose")
        readers, rows = self._sparse(self.settings), []
        for rows in self._prose(self.prompts, readers, self.sizes.temperatures):
            pages.report_acceptance(self.report, rows)
            self.save()
        self.say(f"acceptance on {len(haystack.questions)} needles in {len(haystack.text):,} tokens")
        pages.report_acceptance(self.report, rows + on_needles(self.target, read_text(), haystack, readers, self.say))
        self.part()

    def budgets(self) -> None:
        """Figures 3b and 6a."""
        done: list[Row] = []
        for budget in self.sizes.budgets:
            self.say(f"cache budget {budget:,}")
            readers = self._sparse(replace(self.settings, cache_budget=budget))
            done = self._greedy(done, readers, pages.report_budgets, budget=budget)
        self.part()

    def chunks(self) -> None:
        """Figure 6b."""
        done: list[Row] = []
        for chunk in self.sizes.chunks:
            self.say(f"chunks of {chunk:,}")
            readers = self._sparse(replace(self.settings, chunk=chunk), ["retrieval"])
            done = self._greedy(done, readers, pages.report_chunks, chunk=chunk)
        self.part()

    def recovery(self) -> None:
        """Figures 3a and 3c, on the first prompt."""
        self.say("attention to the prompt")
        prompt, budget = self.prompts[0], self.settings.cache_budget
        sizes = sorted({size for size in (*self.sizes.budgets, budget) if size < len(prompt.tokens)})
        probe = watch(self.target, prompt, sizes, budget, self.sizes.new_tokens)
        pages.report_recovery(self.report, top_rows(probe, sizes), locality_rows(probe), len(prompt.tokens), budget)
        self.part()

    def trees(self) -> None:
        """Figure 6c."""
        self.say("draft trees")
        engine = Engine(self.target.model, "none", prune_drafts=False, budget=max(self.sizes.nodes))
        make = sampled(0.0, self.sizes.new_tokens)
        pages.report_trees(
            self.report, tree_rows(engine, self.prompts, self.sizes.nodes, self.settings, make, self.say)
        )
        self.part()

    def divergence(self) -> None:
        """Figure 2a. It comes last, because it cuts the prompts to shorter contexts."""
        done: list[Row] = []
        sampling = [temperature for temperature in self.sizes.temperatures if temperature] or [1.0]
        for context in reversed(self.sizes.contexts):
            self.say(f"divergence at {context:,} tokens")
            cut, rows = [prompt.cut(context) for prompt in self.prompts], []
            for rows in self._prose(cut, {**self._sparse(self.settings), **self._small()}, sampling):
                pages.report_divergence(self.report, sorted(done + rows, key=lambda row: int(row["context"])))
                self.save()
            done += rows
        self.part()

    def _prose(
        self, prompts: Sequence[Prefilled], readers: Readers, temperatures: Sequence[float]
    ) -> Iterator[list[Row]]:
        return on_prose(self.target, prompts, readers, temperatures, self.sizes.new_tokens, self.say)

    def _greedy(
        self, done: list[Row], readers: Readers, page: Callable[[Report, list[Row]], None], **labels: int
    ) -> list[Row]:
        """The rows so far and those of these readers; the report is updated after each prompt."""
        found = done
        for rows in self._prose(self.prompts, readers, [0.0]):
            found = done + [row | labels for row in rows]
            page(self.report, found)
            self.save()
        return found

    def _sparse(self, settings: LongContextConfig, names: Sequence[str] = ()) -> dict[str, CacheReader]:
        return {name: CacheReader(self.target, SPARSE[name](settings)) for name in names or self.caches}

    def _small(self) -> dict[str, CacheReader]:
        if self.settings.draft_model is None:
            return {}
        return {SMALL: CacheReader(small_model(self.settings), small_cache(self.settings))}
