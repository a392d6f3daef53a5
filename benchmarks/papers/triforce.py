"""Measures TriForce's tables 2 and 4 and its figures 1 (right) and 5: what each part runs and reports."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import NamedTuple

from benchmarks.long_context import needles
from benchmarks.long_context.bytes_read import at_end
from benchmarks.long_context.long_bench import PLAIN, LongBench, LongSeries, Prefilled, combine, shortened
from benchmarks.long_context.measured_model import MeasuredModel
from benchmarks.long_context.needles import Haystack
from benchmarks.long_context.rows import summarise
from benchmarks.papers.baselines import RECIPES
from benchmarks.papers.triforce_report import report_batches, report_contexts, report_needles, report_temperatures
from benchmarks.reporting.study_report import Delivery
from forerun.bench.machine import Row
from forerun.cli.terminal import say
from forerun.core.long_context import LongContextConfig


@dataclass(frozen=True)
class TriforceSizes:
    """What is measured.

    Attributes:
        contexts: tokens of a prompt, ascending; the first parts use the longest.
        temperatures: of the first part.
        drafters: names from ``benchmarks.papers.baselines``.
        prompts: per context.
        batches: batch sizes.
        batch_context: tokens of each row of a batch; None for ragged rows that share the longest context's tokens.
        batch_budgets, batch_temperatures: budgets per row, and temperatures, of batches.
        needle_tokens: tokens generated per question about the longest context.
    """

    contexts: Sequence[int]
    temperatures: Sequence[float]
    drafters: Sequence[str]
    prompts: int
    batches: Sequence[int]
    batch_context: int | None
    batch_budgets: Sequence[int]
    batch_temperatures: Sequence[float]
    needle_tokens: int

    def rows(self, size: int) -> list[int]:
        """Tokens of each row of a batch."""
        if self.batch_context is not None:
            return [self.batch_context] * size
        longest = self.contexts[-1] // size
        return [max(2, longest - row * longest // (10 * size)) for row in range(size)]


class Case(NamedTuple):
    """One measurement with single rows."""

    context: int
    temperature: float


Reads = dict[Case, dict[str, Row]]


@dataclass(frozen=True)
class TriforceBench:
    """The parts, which fill a report.

    Args:
        bench: contestants over one target.
        measured: the model and its prompts.
        sizes: what is measured.
        delivery: of the report.
    """

    bench: LongBench
    measured: MeasuredModel
    sizes: TriforceSizes
    delivery: Delivery
    _held: dict[tuple[int, int], Prefilled] = field(default_factory=dict)

    def alone(self, parts: Collection[str]) -> None:
        """One row at a time: the longest context at all temperatures, then the shorter ones.

        Args:
            parts: which of ``temperatures`` and ``contexts`` to report.
        """
        longest = self.sizes.contexts[-1]
        found: dict[Case, list[list[LongSeries]]] = {case: [] for case in self._cases(parts)}
        reads: Reads = {}
        for index in range(self.sizes.prompts):
            say(f"reading prompt {index + 1} of {self.sizes.prompts}: {longest:,} tokens")
            prompt = self.measured.read(self.bench.engine, index, longest)
            for case, series in found.items():
                say(f"prompt {index + 1}: {case.context:,} tokens, T {case.temperature:g}")
                cut, settings = shortened(self.bench.engine, prompt, case.context), self.measured.settings
                series.append(self._run([[cut]], case.temperature, settings))
                if case not in reads:
                    reads[case] = self._reads([cut], settings)
            rows = [
                row
                for case, series in found.items()
                for row in summarise(combine(series), reads[case], **case._asdict())
            ]
            self._report_alone(parts, rows)
            self.delivery.save()
        self.delivery.part()

    def _report_alone(self, parts: Collection[str], rows: Sequence[Row]) -> None:
        if "temperatures" in parts:
            mine = [row for row in rows if row["context"] == self.sizes.contexts[-1]]
            report_temperatures(
                self.delivery.report, [row for row in mine if row["temperature"] in self.sizes.temperatures]
            )
        if "contexts" in parts:
            report_contexts(self.delivery.report, [row for row in rows if row["temperature"] == 0])

    def _cases(self, parts: Collection[str]) -> list[Case]:
        """The cases, long contexts first, because cutting a cache loses its end."""
        longest = self.sizes.contexts[-1]
        cases = {
            "temperatures": [Case(longest, temperature) for temperature in self.sizes.temperatures],
            "contexts": [Case(context, 0.0) for context in reversed(self.sizes.contexts)],
        }
        return list(dict.fromkeys(case for part in cases if part in parts for case in cases[part]))

    def batches(self) -> None:
        """Batches of each size with each budget; the report is updated after each of them."""
        rows: list[Row] = []
        for size in self.sizes.batches:
            prompts = self._rows(size)
            longest = max(len(prompt.tokens) for prompt in prompts)
            for budget in self.sizes.batch_budgets:
                for temperature in self.sizes.batch_temperatures:
                    say(f"batch of {size}, budget {budget:,}, temperature {temperature:g}")
                    settings = replace(self.measured.settings, cache_budget=budget)
                    labels = {"batch": size, "budget": budget, "context": longest, "temperature": temperature}
                    series = self._run([prompts], temperature, settings)
                    rows += summarise(series, self._reads(prompts, settings), **labels)
                    report_batches(self.delivery.report, rows)
                    self.delivery.save()
        self.delivery.part()

    def _rows(self, size: int) -> list[Prefilled]:
        """The prompts of a batch, read; rows that an earlier batch had are not read again."""
        wanted = list(enumerate(self.sizes.rows(size)))
        for gone in set(self._held) - set(wanted):
            del self._held[gone]
        for row, length in wanted:
            if (row, length) not in self._held:
                say(f"reading row {row + 1} of {size}: {length:,} tokens")
                self._held[row, length] = self.measured.read(self.bench.engine, row, length)
        return [self._held[each] for each in wanted]

    def needles(self, haystack: Haystack, text: Prefilled) -> None:
        """Eviction alone, compared with lossless drafting."""
        say(f"asking for {len(haystack.questions)} needles in {len(haystack.text):,} tokens")
        bench = LongBench(self.bench.engine, 1)  # one round: the questions are repetition enough
        rows = needles.run(bench, haystack, text, self.sizes.drafters, self.measured.settings, self.sizes.needle_tokens)
        report_needles(self.delivery.report, rows)
        self.delivery.part()

    def _reads(self, rows: Sequence[Prefilled], settings: LongContextConfig) -> dict[str, Row]:
        """What a token reads at the prompts' ends, by contestant, as a mean over rows; the target's passes only."""
        found: dict[str, Row] = {}
        for name in (PLAIN, *self.sizes.drafters):
            make = RECIPES[name].sparse
            if name == PLAIN or make is not None:
                factory = None if make is None else make(settings)
                each = [at_end(self.bench.engine.target, row, factory).total for row in rows]
                found[name] = {"bytes_read": round(mean(each)), "megabytes_read": round(mean(each) / 1e6, 3)}
        return found

    def _run(
        self, prompts: Sequence[Sequence[Prefilled]], temperature: float, settings: LongContextConfig
    ) -> list[LongSeries]:
        return self.bench.run(prompts, self.sizes.drafters, settings, self.measured.make(temperature))
