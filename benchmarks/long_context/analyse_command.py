"""``python -m benchmarks long-context analyse``: how well a model predicts itself over sparse caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.long_context import needles
from benchmarks.long_context.analysis import Makers, on_needles, on_prose
from benchmarks.long_context.long_bench import prefill
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
from benchmarks.reporting.plots import Frame, Line
from benchmarks.reporting.study_report import Delivery, Report, listing, number_cell
from forerun.bench.machine import Row, plain_values
from forerun.bench.report import pivot
from forerun.cli.models import encoder, load_stretched
from forerun.cli.options import LONG_PANEL, LongOptions, ModelOptions, Out, OutputOptions, option
from forerun.cli.terminal import say
from forerun.core.long_context import LongContextConfig
from forerun.engine.engine import Engine
from forerun.models.forward.inputs import position_limit

CACHES = ("low-rank", "retrieval", "streaming", "h2o", "topk")
READ = (
    "What a drafted token reads of keys, values and indexes, in megabytes; and what a choice of chunks reads besides:\n"
)


@dataclass(frozen=True)
class AnalyseOptions(OutputOptions, LongOptions, ModelOptions):
    """How well a model predicts itself over sparse caches: acceptance on prose and on needles.

    At every position the sparse cache has read the true text. Writes JSON, Markdown and a plot.
    """

    yarn: Yarn = None
    text: Text = None
    context: Annotated[int, option("--context", panel="Text", help="Prompt tokens.", min=16)] = 16_000
    temperatures: Temperatures = "0,0.6,1.0"
    caches: Annotated[
        str, list_option("--caches", LONG_PANEL, f"To compare, of {', '.join(CACHES)}; h2o and topk are slow.")
    ] = ",".join(CACHES)
    prompts: ContextPrompts = 1
    max_new_tokens: GeneratedTokens = 256
    needles: Needles = 10
    out: Out = Path("runs/analyse")

    def __post_init__(self) -> None:
        names("--caches", self.caches, CACHES)
        check_yarn(self.yarn)
        numbers("--temperatures", self.temperatures, float, 0.0)

    def makers(self, settings: LongContextConfig) -> Makers:
        """What makes each of the caches to compare."""
        return {name: SPARSE[name](settings) for name in names("--caches", self.caches, CACHES)}


def run(options: AnalyseOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and a plot."""
    plots.check()
    model, tokenizer = load_stretched(options)
    check_positions(options.context, _room(options), position_limit(model))
    texts = Texts.read(options.text or (), encoder(tokenizer))
    texts.check(options.prompts, options.context)
    engine, haystack = Engine(model, "none"), needles.build(texts, 0, options.context, options.needles)
    prompts = []
    for index in range(options.prompts):
        say(f"reading prompt {index + 1} of {options.prompts}: {options.context:,} tokens")
        prompts.append(prefill(engine, texts.tokens(index, options.context), _room(options)))
    report = Report("Sparse caches as drafters", plain_values(options))
    delivery = Delivery(report, options.out, "analyse", options.json)
    say("acceptance on prose")
    temperatures = numbers("--temperatures", options.temperatures, float, 0.0)
    makers, rows = options.makers(options.settings()), list[Row]()
    for rows in on_prose(engine.target, prompts, makers, temperatures, options.max_new_tokens):
        report_acceptance(report, rows)
        delivery.save()
    say(f"acceptance on {len(haystack.questions)} needles in {len(haystack.text):,} tokens")
    text = needles.read_text(engine, haystack, _room(options))
    report_acceptance(report, rows + on_needles(engine.target, text, haystack, makers))
    delivery.end()


def _room(options: AnalyseOptions) -> int:
    """Tokens that may follow a prompt: questions and generated text."""
    return options.max_new_tokens + 64


def report_acceptance(report: Report, rows: Sequence[Row]) -> None:
    """TriForce's table 1."""
    named = [
        row | {"task": f"{row['task']}, T {row['temperature']:g} ({row['positions']:,} positions)"} for row in rows
    ]
    heading = f"Acceptance of sparse caches of {report.settings['cache_budget']:,} tokens"
    report.add(
        "acceptance", heading, rows, pivot(named, "task", "reader", number_cell("acceptance")), READ, bytes_table(rows)
    )
    groups = list(dict.fromkeys(f"{row['task']}, T {row['temperature']:g}" for row in rows))
    found = [
        Line(name, [], [row["acceptance"] for row in rows if row["reader"] == name])
        for name in dict.fromkeys(row["reader"] for row in rows)
    ]
    title = f"{heading}, at {max(row['context'] for row in rows):,} tokens of context"
    report.bars("acceptance", Frame(title, "task and temperature", "acceptance", share=True), groups, found)


def bytes_table(rows: Sequence[Row]) -> str:
    """One line per reader, from its first row; its other rows read nearly the same number of bytes."""
    first = {row["reader"]: row for row in reversed(rows)}
    return listing(
        [
            {
                "reader": name,
                "total": megabytes(row["bytes_read"]),
                "layer": megabytes(row["bytes_read"] / len(row["bytes_read_by_layer"])),
                "index": megabytes(row["index_bytes_read"]),
                "choice": megabytes(row["choice_bytes_read"]),
            }
            for name, row in sorted(first.items(), key=lambda item: -int(item[1]["bytes_read"]))
        ],
        {"reader": "cache", "total": "in all", "layer": "a layer", "index": "of it the index", "choice": "a choice"},
    )


def megabytes(count: float) -> str:
    """Bytes as megabytes with three figures; a dash for none."""
    return f"{count / 1e6:#.3g}".rstrip(".") if count else "-"
