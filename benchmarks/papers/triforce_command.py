"""``python -m benchmarks papers triforce``: decoding after long prompts, compared with plain autoregression over the
same cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.long_context import needles
from benchmarks.long_context.long_bench import LongBench
from benchmarks.long_context.measured_model import LongStudyOptions, real_model, simulated_model
from benchmarks.long_context.texts import Texts
from benchmarks.papers.baselines import RECIPES
from benchmarks.papers.simulated_acceptance import SIMULATED
from benchmarks.papers.triforce import TriforceBench, TriforceSizes
from benchmarks.reporting import plots
from benchmarks.reporting.common_options import (
    ContextPrompts,
    Contexts,
    GeneratedTokens,
    Needles,
    Temperatures,
    list_option,
    names,
    numbers,
)
from benchmarks.reporting.study_report import Delivery, Report
from forerun.bench.machine import plain_values
from forerun.cli.models import check_drafters
from forerun.cli.options import LONG_PANEL, Out, option
from forerun.cli.terminal import say
from forerun.decoding.recipes import buildable
from forerun.engine.engine import Engine
from forerun.models.forward.architecture import dtype_name

TRIFORCE_PARTS = ("temperatures", "contexts", "batches", "needles")


@dataclass(frozen=True)
class TriforceOptions(LongStudyOptions):
    """Decoding after long prompts: TriForce and its baselines compared with plain autoregression over the same cache.

    Measures speed-up and acceptance rate by temperature, by context and in batches, and the needles that
    eviction alone loses. Each prompt is read once. Writes JSON, Markdown and plots.
    """

    parts: Annotated[str, list_option("--parts", "Text", f"Of {', '.join(TRIFORCE_PARTS)}.")] = ",".join(TRIFORCE_PARTS)
    contexts: Contexts = "4000,16000"
    temperatures: Temperatures = "0,0.2,0.4,0.6,0.8,1.0,1.2"
    drafters: Annotated[str | None, list_option("--drafters", "Model", "Default: all that can be built.")] = None
    prompts: ContextPrompts = 1
    max_new_tokens: GeneratedTokens = 128
    batches: Annotated[str, list_option("--batches", "Text", "Rows that are decoded together.")] = "2,6,10"
    batch_context: Annotated[
        int | None,
        option("--batch-context", panel="Text", help="Tokens of each row of a batch; by default rows are ragged and "
               "share the longest context's.", min=16),
    ] = None  # fmt: skip
    batch_budgets: Annotated[str, list_option("--batch-budgets", LONG_PANEL, "Cache budget of a row in a batch.")] = (
        "256,1024"
    )
    batch_temperatures: Annotated[str, list_option("--batch-temperatures", "Text", "Of batches.")] = "0,0.6"
    needles: Needles = 10
    needle_tokens: Annotated[int, option("--needle-tokens", panel="Text", help="Generated for each.", min=2)] = 48
    out: Out = Path("runs/triforce")

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = names("--parts", self.parts, TRIFORCE_PARTS)
        numbers("--batches", self.batches, int, 1)
        numbers("--batch-budgets", self.batch_budgets, int, self.chunk)
        numbers("--batch-temperatures", self.batch_temperatures, float, 0.0)
        simulated = self.simulate_acceptance is not None
        if simulated and "needles" in wanted and self.parts != ",".join(TRIFORCE_PARTS):
            raise ValueError("--parts has needles, which random weights cannot find; leave them out")

    @property
    def room(self) -> int:
        """Tokens that may follow a prompt: questions as well."""
        return max(self.max_new_tokens, self.needle_tokens) + self.gamma2 + 128


DRAFTERS = ("triforce", "triforce-trie", "triforce-auto", "low-rank", "streaming", "retrieval")
"""TriForce, Forerun's own drafters, and the paper's baselines: the naive policy and no hierarchy."""

ALONE = frozenset({"temperatures", "contexts"})
"""Parts that measure single rows."""


def run(options: TriforceOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and plots."""
    plots.check()
    parts, named = names("--parts", options.parts, TRIFORCE_PARTS), _named(options)
    contexts = sorted(numbers("--contexts", options.contexts, int, 1))
    if options.simulate_acceptance is None:
        measured = real_model(options, named or DRAFTERS, max(contexts[-1], options.batch_context or 0))
        drafters = named or [name for name in DRAFTERS if name in buildable(measured.settings, RECIPES)]
    else:
        drafters = named or [name for name in DRAFTERS if name in SIMULATED]
        measured = simulated_model(options, drafters)
    sizes = TriforceSizes(
        contexts=contexts,
        temperatures=measured.temperatures(options.temperatures),
        drafters=drafters,
        prompts=options.prompts,
        batches=numbers("--batches", options.batches, int, 1),
        batch_context=options.batch_context,
        batch_budgets=numbers("--batch-budgets", options.batch_budgets, int, 1),
        batch_temperatures=measured.temperatures(options.batch_temperatures),
        needle_tokens=options.needle_tokens,
    )
    haystack = None
    if measured.texts is not None:
        _check_texts(sizes, measured.texts, parts)
        if "needles" in parts:
            haystack = needles.build(measured.texts, 0, contexts[-1], options.needles)
    engine = Engine(measured.model, "none", tokenizer=measured.tokenizer)
    settings = plain_values(options) | {"dtype": dtype_name(measured.model)}
    delivery = Delivery(
        Report("TriForce on long contexts", settings, measured.label), options.out, "triforce", options.json
    )
    bench = TriforceBench(LongBench(engine, options.rounds), measured, sizes, delivery)
    if ALONE & set(parts):
        bench.alone(parts)
    if "batches" in parts:
        bench.batches()
    if haystack is not None:
        say(f"reading a text of {len(haystack.text):,} tokens")
        bench.needles(haystack, needles.read_text(engine, haystack, options.room))
    delivery.end()


def _check_texts(sizes: TriforceSizes, texts: Texts, parts: Sequence[str]) -> None:
    """Check that the texts are long enough for all that will be read."""
    if ALONE & set(parts):
        texts.check(sizes.prompts, sizes.contexts[-1])
    if "batches" in parts:
        for size in sizes.batches:
            for row, length in enumerate(sizes.rows(size)):
                texts.tokens(row, length)


def _named(options: TriforceOptions) -> list[str]:
    """The drafters named on the command line, if any."""
    named = [] if options.drafters is None else [name.strip() for name in options.drafters.split(",")]
    check_drafters(named, options, RECIPES)
    if set(named) == {"none"}:
        raise ValueError("--drafters is 'none', which is measured in any case; name others to compare with it")
    return named
