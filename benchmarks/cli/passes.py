"""``forerun bench passes``: the time of a model's passes."""

from __future__ import annotations

from benchmarks import passes, plots
from benchmarks.cli.deliver import deliver
from benchmarks.cli.long_options import names, numbers, plain
from benchmarks.cli.passes_options import DTYPES, PassesOptions
from benchmarks.passes import Sizes
from benchmarks.passes_report import add_passes
from benchmarks.tables import Report
from forerun.cli.terminal import measuring, stderr, working
from forerun.models.loading.load import load


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
