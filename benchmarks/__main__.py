"""``python -m benchmarks``: the papers' tables, studies, load tests and predictions. Not part of the package."""

from __future__ import annotations

import typer

from benchmarks.cli.bench_options import BenchOptions
from benchmarks.cli.bench_serve_options import ServingOptions
from benchmarks.cli.capacity_options import CapacityOptions
from benchmarks.cli.long_options import AnalyseOptions, TriforceOptions
from benchmarks.cli.lookahead_options import LookaheadOptions
from benchmarks.cli.offload_options import OffloadOptions
from benchmarks.cli.passes_options import PassesOptions
from forerun.cli.commands import command
from forerun.cli.options import ReplayOptions

app = typer.Typer(name="benchmarks", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")

command(app, "tasks", BenchOptions, "benchmarks.cli.bench")
command(app, "triforce", TriforceOptions, "benchmarks.cli.triforce")
command(app, "lookahead", LookaheadOptions, "benchmarks.cli.lookahead")
command(app, "replay", ReplayOptions, "benchmarks.cli.replay")
command(app, "analyse", AnalyseOptions, "benchmarks.cli.analyse")
command(app, "passes", PassesOptions, "benchmarks.cli.passes")
command(app, "offload", OffloadOptions, "benchmarks.cli.offload")
command(app, "serve", ServingOptions, "benchmarks.cli.bench_serve")
command(app, "capacity", CapacityOptions, "benchmarks.cli.capacity")

if __name__ == "__main__":
    app()
