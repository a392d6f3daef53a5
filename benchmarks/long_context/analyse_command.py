"""``python -m benchmarks long-context analyse``: how well a model predicts itself over sparse caches, and why."""

from __future__ import annotations

from benchmarks.long_context import needles
from benchmarks.long_context.analyse_options import ANALYSE_PARTS, CACHES, AnalyseOptions
from benchmarks.long_context.long_bench import prefill
from benchmarks.long_context.sparse_analysis import Analysis, AnalysisSizes
from benchmarks.long_context.texts import Texts
from benchmarks.reporting import plots
from benchmarks.reporting.delivery import Delivery
from benchmarks.reporting.options import check_positions, names, numbers
from benchmarks.reporting.tables import Report
from forerun.bench.machine import plain_values
from forerun.cli.models import encoder
from forerun.cli.models import settings as settings_for
from forerun.cli.terminal import say, stderr, working
from forerun.engine.engine import Engine
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.load import load


def run(options: AnalyseOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and plots."""
    plots.check()
    with working(stderr(), "loading"):
        model, tokenizer = load(
            options.model,
            options.dtype,
            device=options.device,
            trust_remote_code=options.trust_remote_code,
            yarn=options.yarn,
        )
        sizes = _sizes(options)
        room = sizes.new_tokens + max(sizes.nodes) + 64
        check_positions(sizes.contexts[-1], room, position_limit(model))
        texts = Texts.read(options.text or (), encoder(tokenizer))
        texts.check(options.prompts, sizes.contexts[-1])
        settings = settings_for(options, options.model, ["streaming"], model, tokenizer, options.trust_remote_code)
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
