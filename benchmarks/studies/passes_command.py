"""``python -m benchmarks passes``: the time of a model's passes."""

from __future__ import annotations

from benchmarks.reporting import plots
from benchmarks.reporting.delivery import deliver
from benchmarks.reporting.options import names, numbers
from benchmarks.reporting.tables import Report
from benchmarks.studies import passes
from benchmarks.studies.passes import PassSizes
from benchmarks.studies.passes_options import DTYPES, PassesOptions
from benchmarks.studies.passes_report import add_passes
from forerun.bench.machine import plain_values
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
    sizes = PassSizes(
        passes=sorted({1, *numbers("--passes", options.passes, int, 1)}),
        context=options.context,
        prompts=[length for length in sorted(numbers("--prompt-tokens", options.prompt_tokens, int, 0)) if length],
        rounds=options.rounds,
    )
    with measuring(console) as progress:
        rows = passes.measure(models, sizes, progress=progress)
    report = Report("What passes cost", plain_values(options))
    add_passes(report, rows, options.context)
    deliver(report, options.out, "passes", options.json)
