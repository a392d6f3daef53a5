"""Put the last measured tables into the pages that show them.

    python -m benchmarks update-pages [--tables bench,long,scaling,never-slower,activations,peers]

`bench`, of `python -m benchmarks tasks --out runs/bench-TYPE`, goes into README.md and docs/results/tasks.md; `long`,
of `python -m benchmarks papers triforce`, into docs/benchmarks.md; `never-slower`, of `forerun bench never-slower --out
runs/never-slower-NAME`, into docs/results/never-slower.md, and its short form and plot into docs/benchmarks.md;
`scaling`, of `python -m benchmarks capacity --predict`, into docs/scaling.md, with its plot, and
docs/results/what-fits.md; `activations`, of `python -m benchmarks activations`, is docs/results/activations.md, and
`peers`, of `python -m benchmarks peers --out runs/peers-NAME`, is docs/results/other-engines.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.capacity.capacity_tables import SIZES, SPEEDS
from benchmarks.capacity.predicted import predicted_table, share_plot
from benchmarks.long_context.long_bench import PLAIN
from benchmarks.reporting import plots, slowness, task_results
from benchmarks.reporting.common_options import names
from benchmarks.reporting.study_report import listing, speed_cell
from forerun.bench.machine import Row
from forerun.bench.never_slower import LEAST_MEDIAN, LEAST_OF_BEST, LEAST_SINGLE
from forerun.bench.report import means, pivot
from forerun.bench.rounds import BASELINE
from forerun.cli.options import DebugOptions

ROOT = Path(__file__).parents[2]
CAPACITY = ROOT / "runs" / "capacity" / "capacity.json"
TABLES = "bench", "long", "scaling", "never-slower", "activations", "peers"
COPIED = {
    "activations": ("activations/activations.md", "activations.md"),
    "peers": ("peers-*/peers.md", "other-engines.md"),
}
"""Reports in runs/ that are pages of docs/results as they are."""
SLOWNESS = ROOT / "docs" / "results" / "never-slower.md"
TASKS = ROOT / "docs" / "results" / "tasks.md"
SCALING = ROOT / "docs" / "scaling.md"
WHAT_FITS = ROOT / "docs" / "results" / "what-fits.md"
LONG = ROOT / "runs" / "triforce" / "triforce.json"
RAISED = "¹²³⁴"
"""Marks a cell of so many draws. By default there are more."""
REPORTS = {dtype: ROOT / "runs" / f"bench-{dtype}" / "speed.json" for dtype in ("float32", "bfloat16")}


def speed_table(reports: dict[str, Path]) -> str:
    """Tokens per second and the ratio to transformers by task, for each measured type of weights."""
    rows: list[Row] = []
    for dtype, report in reports.items():
        found = json.loads(report.read_text(encoding="utf-8"))["rows"]
        rows += [row | {"name": f"{row['contestant']}, {dtype}"} for row in [*found, *means(found)]]
    return pivot(rows, "name", "task", _speed).replace("| name |", "| |", 1)


def _speed(row: Row) -> str:
    if row["speed_up"] is None:
        raise ValueError(f"{row['contestant']}: the machine was busy while {row['task']} was measured; measure it anew")
    ratio = "" if row["contestant"] == BASELINE else f" ({row['speed_up']:.1f}x)"
    return f"{row['tokens_per_second']:.0f}{ratio}"


def long_table(report: Path) -> str:
    """Speed-up and acceptance rate by context, and by temperature at the longest one."""
    parts: dict[str, list[Row]] = json.loads(report.read_text(encoding="utf-8"))["parts"]
    contexts = [row | {"at": f"{row['context']:,} tokens"} for row in parts["contexts"]]
    shown = [row for row in parts.get("temperatures", []) if row["temperature"] in (0.6, 1.0)]
    warm = [row | {"at": f"{row['context']:,}, T {row['temperature']:g}"} for row in shown]
    return pivot([row | {"drafter": row["contestant"]} for row in contexts + warm], "drafter", "at", _cell)


def _cell(row: Row) -> str:
    return f"{row['tokens_per_second']:.0f} tokens/s" if row["contestant"] == PLAIN else speed_cell(row)


def slowness_table(reports: Sequence[Path]) -> str:
    """A drafter over plain decoding by model, context and batch, and by text and temperature: the median, and the worst
    draw in brackets. What breaks the promise is bold; a † marks less of the best other drafter's than promised, and a
    raised number fewer draws than usual.
    """
    rows: list[Row] = []
    for report in reports:
        found = json.loads(report.read_text(encoding="utf-8"))
        rows += [row | {"": _measured(found["settings"], row), "at": _text(row)} for row in found["rows"]]
    return pivot(rows, "", "at", _slowness)


def _measured(settings: Row, row: Row) -> str:
    """The model with its type, the context and the batch of a cell."""
    dtype = "" if settings["dtype"] == "auto" else f", {settings['dtype']}"
    return f"{Path(settings['model']).name}{dtype}: {row['context']:,} x {row['batch']}"


def _text(row: Row) -> str:
    """The kind of text and the temperature of a cell."""
    return f"{row['kind']}, T {row['temperature']:g}" if row["temperature"] else str(row["kind"])


def _slowness(row: Row) -> str:
    least = (row["median"], LEAST_MEDIAN), (row["worst"], LEAST_SINGLE)
    middle, worst = (f"**{value:.2f}**" if value < promised else f"{value:.2f}" for value, promised in least)
    draws = len(row["plain_against_itself"])
    few = "" if draws > len(RAISED) else RAISED[draws - 1]
    return f"{middle}{'†' * (row['of_best'] < LEAST_OF_BEST)} ({worst}){few}"


def scaling_tables(report: Path) -> dict[str, str]:
    """The capacity report's tables by their markers."""
    parts: dict[str, list[Row]] = json.loads(report.read_text(encoding="utf-8"))["parts"]
    found = {name: predicted_table(parts[name]) for name in ("predicted", "drafted")}
    return found | {name: listing(parts[name], shown) for name, shown in (("sizes", SIZES), ("speeds", SPEEDS))}


def into_page(page: Path, table: str, marker: str) -> None:
    """Put a table into a page, between ``<!-- marker:begin -->`` and ``<!-- marker:end -->``.

    Raises:
        ValueError: if the page has no such markers.
    """
    begin, end = f"<!-- {marker}:begin -->\n", f"<!-- {marker}:end -->"
    text = page.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{page} has no {begin.strip()} ... {end}")
    head, rest = text.split(begin, 1)
    page.write_text(head + begin + "\n" + table + "\n" + end + rest.split(end, 1)[1])


@dataclass(frozen=True, kw_only=True)
class UpdateOptions(DebugOptions):
    """Put the last measured tables into the pages that show them."""

    tables: Annotated[str, typer.Option(help="Which, with commas between.")] = ",".join(TABLES)


def run(options: UpdateOptions) -> None:
    """Write them."""
    wanted = names("--tables", options.tables, TABLES)
    if "bench" in wanted and (there := {dtype: path for dtype, path in REPORTS.items() if path.exists()}):
        into_page(ROOT / "README.md", speed_table(there), "bench")
        TASKS.write_text(task_results.page(there), encoding="utf-8")
        task_results.draw(there, TASKS.with_suffix(".svg"))
    if "long" in wanted and LONG.exists():
        into_page(ROOT / "docs" / "benchmarks.md", long_table(LONG), "long")
    if "never-slower" in wanted and (slow := sorted(ROOT.glob("runs/never-slower-*/never-slower.json"))):
        into_page(SLOWNESS, slowness_table(slow), "never-slower")
    if "never-slower" in wanted:
        page = SLOWNESS.read_text(encoding="utf-8")
        into_page(ROOT / "docs" / "benchmarks.md", slowness.short_table(page), "how-much-slower")
        slowness.draw(page, SLOWNESS.with_suffix(".svg"))
    for name, (reports, page) in COPIED.items():
        if name in wanted and (found := sorted((ROOT / "runs").glob(reports))):
            text = "\n".join(report.read_text(encoding="utf-8") for report in found)
            (ROOT / "docs" / "results" / page).write_text(text, encoding="utf-8")
    if "scaling" in wanted and CAPACITY.exists():
        for name, table in scaling_tables(CAPACITY).items():
            into_page(WHAT_FITS if name in ("sizes", "speeds") else SCALING, table, name)
        plain: list[Row] = json.loads(CAPACITY.read_text(encoding="utf-8"))["parts"]["predicted"]
        plots.bars(SCALING.with_suffix(".svg"), *share_plot(plain))
