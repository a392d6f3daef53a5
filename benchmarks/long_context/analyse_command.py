"""``python -m benchmarks long-context analyse``: how well a model predicts itself over sparse caches, and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.long_context import needles
from benchmarks.long_context.long_bench import prefill
from benchmarks.long_context.sparse_analysis import Analysis, AnalysisSizes
from benchmarks.long_context.texts import Texts
from benchmarks.reporting import plots
from benchmarks.reporting.delivery import Delivery
from benchmarks.reporting.options import (
    ContextPrompts,
    Contexts,
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
from benchmarks.reporting.tables import Report
from forerun.bench.machine import plain_values
from forerun.cli.models import encoder, load_stretched
from forerun.cli.models import settings as settings_for
from forerun.cli.options import LONG_PANEL, LongOptions, ModelOptions, Out, OutputOptions
from forerun.cli.terminal import say
from forerun.engine.engine import Engine
from forerun.models.forward.inputs import position_limit

CACHES = ("low-rank", "retrieval", "streaming", "h2o", "topk")
ANALYSE_PARTS = ("acceptance", "budgets", "chunks", "recovery", "trees", "divergence")


@dataclass(frozen=True)
class AnalyseOptions(OutputOptions, LongOptions, ModelOptions):
    """How well a model predicts itself over sparse caches, and why: acceptance, divergence, attention, trees.

    At every position the sparse cache has read the true text. Writes JSON, Markdown and plots.
    """

    yarn: Yarn = None
    parts: Annotated[str, list_option("--parts", "Text", f"Of {', '.join(ANALYSE_PARTS)}.")] = ",".join(ANALYSE_PARTS)
    text: Text = None
    contexts: Contexts = "2000,4000,16000"
    temperatures: Temperatures = "0,0.6,1.0"
    budgets: Annotated[str, list_option("--budgets", LONG_PANEL, "Of the sparse caches, to compare.")] = (
        "64,256,1024,4096"
    )
    chunks: Annotated[str, list_option("--chunks", LONG_PANEL, "Chunk sizes, to compare at --cache-budget.")] = (
        "1,2,4,8,16,32,64,128"
    )
    caches: Annotated[
        str, list_option("--caches", LONG_PANEL, f"To compare, of {', '.join(CACHES)}; h2o and topk are slow.")
    ] = ",".join(CACHES)
    nodes: Annotated[str, list_option("--nodes", LONG_PANEL, "Sizes of draft trees.")] = "4,8,16,32,64"
    prompts: ContextPrompts = 1
    max_new_tokens: GeneratedTokens = 256
    needles: Needles = 10
    out: Out = Path("runs/analyse")

    def __post_init__(self) -> None:
        names("--parts", self.parts, ANALYSE_PARTS)
        names("--caches", self.caches, CACHES)
        check_yarn(self.yarn)
        numbers("--contexts", self.contexts, int, 16)
        numbers("--temperatures", self.temperatures, float, 0.0)
        numbers("--budgets", self.budgets, int, self.chunk)
        numbers("--chunks", self.chunks, int, 1)
        numbers("--nodes", self.nodes, int, 1)
        if max(numbers("--chunks", self.chunks, int, 1)) > self.cache_budget:
            raise ValueError(f"--chunks is {self.chunks!r}; none may exceed --cache-budget, {self.cache_budget}")


def run(options: AnalyseOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and plots."""
    plots.check()
    model, tokenizer = load_stretched(options)
    sizes = _sizes(options)
    room = sizes.new_tokens + max(sizes.nodes) + 64
    check_positions(sizes.contexts[-1], room, position_limit(model))
    texts = Texts.read(options.text or (), encoder(tokenizer))
    texts.check(options.prompts, sizes.contexts[-1])
    settings = settings_for(options, ["streaming"], model, tokenizer)
    engine, wanted = Engine(model, "none"), names("--parts", options.parts, ANALYSE_PARTS)
    haystack = needles.build(texts, 0, sizes.contexts[-1], options.needles) if "acceptance" in wanted else None
    prompts = []
    for index in range(options.prompts):
        say(f"reading prompt {index + 1} of {options.prompts}: {sizes.contexts[-1]:,} tokens")
        prompts.append(prefill(engine, texts.tokens(index, sizes.contexts[-1]), room, say))
    caches = names("--caches", options.caches, CACHES)
    report = Report("Sparse caches as drafters", plain_values(options))
    delivery = Delivery(report, options.out, "analyse", options.json)
    analysis = Analysis(engine.target, settings, sizes, prompts, report, say, caches, delivery.save, delivery.part)
    if haystack is not None:
        analysis.acceptance(lambda: needles.read_text(engine, haystack, room, say), haystack)
    for part in ANALYSE_PARTS:  # ordered so that no part destroys what a later one needs
        if part in wanted and part != "acceptance":
            getattr(analysis, part)()
    delivery.end()


def _sizes(options: AnalyseOptions) -> AnalysisSizes:
    return AnalysisSizes(
        contexts=sorted(numbers("--contexts", options.contexts, int, 1)),
        temperatures=numbers("--temperatures", options.temperatures, float, 0.0),
        budgets=numbers("--budgets", options.budgets, int, 1),
        chunks=numbers("--chunks", options.chunks, int, 1),
        nodes=numbers("--nodes", options.nodes, int, 1),
        new_tokens=options.max_new_tokens,
    )
