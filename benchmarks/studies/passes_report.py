"""Tables and plots of ``python -m benchmarks passes``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reporting import plots
from benchmarks.reporting.plots import Frame
from benchmarks.reporting.study_report import Report, listing
from benchmarks.studies.passes import MEMORY
from forerun.bench.machine import Row

PASSES = {
    "dtype": "dtype",
    "who": "by",
    "tokens": "tokens",
    "milliseconds": "ms",
    "fastest": "fastest",
    "slowest": "slowest",
    "ratio_to_one_token": "ratio to one token",
    "megabytes": "weights read, MB",
    "gigabytes_per_second": "GB/s",
    "share": "of the bandwidth",
}
PROMPTS = {
    "dtype": "dtype",
    "who": "by",
    "tokens": "tokens",
    "milliseconds": "ms",
    "fastest": "fastest",
    "slowest": "slowest",
    "tokens_per_second": "tokens/s",
}


def add_passes(report: Report, rows: Sequence[Row], context: int) -> None:
    """All tables and plots.

    Args:
        report: takes them.
        rows: from ``benchmarks.studies.passes``.
        context: tokens in the cache.
    """
    read = next(row for row in rows if row["who"] == MEMORY)
    passes = [_shown(row) for row in rows if row["kind"] == "pass"]
    prompts = [_shown(row) for row in rows if row["kind"] == "prompt"]
    said = f"This machine reads {read['gigabytes_per_second']:.1f} GB/s, measured in the same rounds.\n"
    heading = f"Passes after {context:,} tokens"
    report.add("passes", heading, [*passes, read], said, listing(passes, PASSES))
    frame = Frame(heading, "tokens in the pass", "milliseconds", log=True)
    report.lines("times", frame, plots.by(passes, "line", "tokens", "milliseconds", ("fastest", "slowest")))
    if prompts:
        report.add("prompts", "Reading a prompt", prompts, listing(prompts, PROMPTS))


def _shown(row: Row) -> Row:
    share = row["share_of_bandwidth"]
    more = {"line": f"{row['who']}, {row['dtype']}", "megabytes": round(row["bytes_read"] / 1e6, 1)}
    return row | more | {"share": None if share is None else f"{100 * share:.0f} %"}
