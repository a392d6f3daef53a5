"""``python -m benchmarks long-context analyse``: how well a model predicts itself over sparse caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from benchmarks.long_context import needles
from benchmarks.long_context.analysis import Makers, on_needles, on_prose
from benchmarks.long_context.analysis_report import report_acceptance, report_budgets
from benchmarks.long_context.long_bench import Prefilled, prefill
from benchmarks.long_context.needles import Haystack
from benchmarks.long_context.texts import Texts
from benchmarks.papers.baselines import SPARSE
from benchmarks.reporting import plots
from benchmarks.reporting.common_options import (
    ContextPrompts,
    GeneratedTokens,
    Needles,
    Temperatures,
    Text,
    Yarn,
    check_positions,
    check_yarn,
    list_option,
    names,
    numbers,
)
from benchmarks.reporting.study_report import Delivery, Report
from forerun.bench.machine import Row, plain_values
from forerun.cli.models import encoder, load_stretched
from forerun.cli.options import LONG_PANEL, LongOptions, ModelOptions, Out, OutputOptions, option
from forerun.cli.terminal import say
from forerun.core.long_context import LongContextConfig
from forerun.engine.engine import Engine
from forerun.models.forward.inputs import position_limit

CACHES = ("low-rank", "retrieval", "streaming", "h2o", "topk")
ANALYSE_PARTS = ("acceptance", "budgets")


@dataclass(frozen=True)
class AnalyseOptions(OutputOptions, LongOptions, ModelOptions):
    """How well a model predicts itself over sparse caches: acceptance on prose and on needles, and by cache budget.

    At every position the sparse cache has read the true text. Writes JSON, Markdown and plots.
    """

    yarn: Yarn = None
    parts: Annotated[str, list_option("--parts", "Text", f"Of {', '.join(ANALYSE_PARTS)}.")] = ",".join(ANALYSE_PARTS)
    text: Text = None
    context: Annotated[int, option("--context", panel="Text", help="Prompt tokens.", min=16)] = 16_000
    temperatures: Temperatures = "0,0.6,1.0"
    budgets: Annotated[str, list_option("--budgets", LONG_PANEL, "Of the sparse caches, to compare.")] = (
        "64,256,1024,4096"
    )
    caches: Annotated[
        str, list_option("--caches", LONG_PANEL, f"To compare, of {', '.join(CACHES)}; h2o and topk are slow.")
    ] = ",".join(CACHES)
    prompts: ContextPrompts = 1
    max_new_tokens: GeneratedTokens = 256
    needles: Needles = 10
    out: Out = Path("runs/analyse")

    def __post_init__(self) -> None:
        names("--parts", self.parts, ANALYSE_PARTS)
        names("--caches", self.caches, CACHES)
        check_yarn(self.yarn)
        numbers("--temperatures", self.temperatures, float, 0.0)
        numbers("--budgets", self.budgets, int, self.chunk)

    def makers(self, settings: LongContextConfig) -> Makers:
        """What makes each of the caches to compare."""
        return {name: SPARSE[name](settings) for name in names("--caches", self.caches, CACHES)}


def run(options: AnalyseOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and plots."""
    plots.check()
    model, tokenizer = load_stretched(options)
    check_positions(options.context, _room(options), position_limit(model))
    texts = Texts.read(options.text or (), encoder(tokenizer))
    texts.check(options.prompts, options.context)
    engine, wanted = Engine(model, "none"), names("--parts", options.parts, ANALYSE_PARTS)
    haystack = needles.build(texts, 0, options.context, options.needles) if "acceptance" in wanted else None
    prompts = []
    for index in range(options.prompts):
        say(f"reading prompt {index + 1} of {options.prompts}: {options.context:,} tokens")
        prompts.append(prefill(engine, texts.tokens(index, options.context), _room(options)))
    report = Report("Sparse caches as drafters", plain_values(options))
    delivery = Delivery(report, options.out, "analyse", options.json)
    if haystack is not None:
        _acceptance(delivery, engine, prompts, options, haystack)
    if "budgets" in wanted:
        _budgets(delivery, engine, prompts, options)
    delivery.end()


def _room(options: AnalyseOptions) -> int:
    """Tokens that may follow a prompt: questions and generated text."""
    return options.max_new_tokens + 64


def _acceptance(
    delivery: Delivery, engine: Engine, prompts: Sequence[Prefilled], options: AnalyseOptions, haystack: Haystack
) -> None:
    """TriForce's table 1, on prose and on needles; the text of needles is read when the prompts are done."""
    say("acceptance on prose")
    temperatures = numbers("--temperatures", options.temperatures, float, 0.0)
    makers, rows = options.makers(options.settings()), list[Row]()
    for rows in on_prose(engine.target, prompts, makers, temperatures, options.max_new_tokens):
        report_acceptance(delivery.report, rows)
        delivery.save()
    say(f"acceptance on {len(haystack.questions)} needles in {len(haystack.text):,} tokens")
    text = needles.read_text(engine, haystack, _room(options))
    report_acceptance(delivery.report, rows + on_needles(engine.target, text, haystack, makers))
    delivery.part()


def _budgets(delivery: Delivery, engine: Engine, prompts: Sequence[Prefilled], options: AnalyseOptions) -> None:
    """Figures 3b and 6a."""
    done: list[Row] = []
    for budget in numbers("--budgets", options.budgets, int, 1):
        say(f"cache budget {budget:,}")
        makers, found = options.makers(replace(options.settings(), cache_budget=budget)), done
        for rows in on_prose(engine.target, prompts, makers, [0.0], options.max_new_tokens):
            found = done + [row | {"budget": budget} for row in rows]
            report_budgets(delivery.report, found)
            delivery.save()
        done = found
    delivery.part()
