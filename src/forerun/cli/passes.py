"""``forerun bench passes``: the time of a model's passes."""

from __future__ import annotations

from forerun.bench import passes, plots
from forerun.bench.passes import Sizes
from forerun.bench.passes_report import add_passes
from forerun.bench.tables import Report
from forerun.cli.deliver import deliver
from forerun.cli.long_options import names, numbers, plain
from forerun.cli.passes_options import DTYPES, PassesOptions
from forerun.cli.terminal import measuring, stderr, working
from forerun.model.load import load


def run(options: PassesOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and a plot."""
    plots.check()
    console = stderr()
    with working(console, "loading"):
        models = [
            load(options.model, dtype, device=options.device, trust_remote_code=options.trust_remote_code)[0]
            for dtype in dict.fromkeys(names("--dtypes", options.dtypes, DTYPES))
        ]
    sizes = Sizes(
        passes=sorted({1, *numbers("--passes", options.passes, int, 1)}),
        context=options.context,
        prompts=[length for length in sorted(numbers("--prompt-tokens", options.prompt_tokens, int, 0)) if length],
        rounds=options.rounds,
    )
    with measuring(console) as progress:
        rows = passes.measure(models, sizes, progress=progress)
    report = Report("What passes cost", plain(options))
    add_passes(report, rows, options.context)
    deliver(report, options.out, "passes", options.json)
