"""``forerun analyse``: how well a model foresees itself over sparse caches, and why."""

from __future__ import annotations

from forerun.bench import needles
from forerun.bench.longcontext import prefill
from forerun.bench.sparsity import Analysis, Sizes
from forerun.bench.tables import Report
from forerun.bench.texts import Texts
from forerun.cli.deliver import deliver
from forerun.cli.long_options import ANALYSE_PARTS, AnalyseOptions, names, numbers, plain
from forerun.cli.models import encoder
from forerun.cli.models import settings as settings_for
from forerun.cli.terminal import stderr, working
from forerun.engine import Engine
from forerun.model.load import load


def run(options: AnalyseOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and plots."""
    console = stderr()
    with working(console, "loading"):
        model, tokenizer = load(
            options.model, options.dtype, device=options.device, trust_remote_code=options.trust_remote_code
        )
        texts = Texts.read(options.text, encoder(tokenizer))
        settings = settings_for(options, options.model, ["streaming"], model, tokenizer, options.trust_remote_code)
    engine, sizes = Engine(model, "none"), _sizes(options)
    room = sizes.new_tokens + max(sizes.nodes) + 64
    wanted = names("--parts", options.parts, ANALYSE_PARTS)
    prompts = []
    for index in range(options.prompts):
        console.print(f"reading prompt {index + 1} of {options.prompts}: {sizes.contexts[-1]:,} tokens")
        prompts.append(prefill(engine, texts.tokens(index, sizes.contexts[-1]), room))
    report = Report("Sparse caches as drafters", plain(options))
    analysis = Analysis(engine.target, settings, sizes, prompts, report, console.print)
    if "acceptance" in wanted:
        haystack = needles.build(texts, 0, sizes.contexts[-1], options.needles)
        console.print(f"reading a text of {len(haystack.text):,} tokens")
        analysis.acceptance(needles.read_text(engine, haystack, room), haystack)
    for part in ANALYSE_PARTS:  # in an order in which none takes away what another needs
        if part in wanted and part != "acceptance":
            getattr(analysis, part)()
    deliver(report, options.out, "analyse", options.json)


def _sizes(options: AnalyseOptions) -> Sizes:
    return Sizes(
        contexts=sorted(numbers("--contexts", options.contexts, int, 1)),
        temperatures=numbers("--temperatures", options.temperatures, float, 0.0),
        budgets=numbers("--budgets", options.budgets, int, 1),
        chunks=numbers("--chunks", options.chunks, int, 1),
        nodes=numbers("--nodes", options.nodes, int, 1),
        new_tokens=options.max_new_tokens,
    )
