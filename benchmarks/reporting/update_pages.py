"""``python -m benchmarks update-pages``: put the last measured tables into the pages that show them.

- ``bench``, of ``tasks --out runs/bench-TYPE``: README.md and docs/results/tasks.md
- ``long``, of ``papers triforce``: docs/benchmarks.md
- ``never-slower``, of ``forerun bench never-slower --out runs/never-slower-NAME``: docs/results/never-slower.md; its
  short form and plot: docs/benchmarks.md
- ``scaling``, of ``capacity --predict``: docs/scaling.md with its plot, and docs/results/what-fits.md
- ``activations`` and ``peers --out runs/peers-NAME``: docs/results/activations.md and other-engines.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated

from benchmarks.capacity.capacity import COLUMNS
from benchmarks.capacity.gpu_cost import predicted_table, share_plot
from benchmarks.long_context.long_bench import PLAIN
from benchmarks.reporting import plots
from benchmarks.reporting.common_options import ListOptions, list_option, names_of
from benchmarks.reporting.study_report import listing, speed_cell
from forerun.bench.machine import Row
from forerun.bench.never_slower import LEAST_MEDIAN, LEAST_OF_BEST, LEAST_SINGLE
from forerun.bench.report import COLOURS, figure, means, pivot
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
"""Marks a cell of so many runs. By default there are more."""
REPORTS = {dtype: ROOT / "runs" / f"bench-{dtype}" / "speed.json" for dtype in ("float32", "bfloat16")}
LINE = re.compile(r"^\| ([^,|]+)[^|]*: ([\d,]+) x \d+ \|(.*)\|$", re.MULTILINE)
MEASURED = re.compile(r"^Measured [^;]*", re.MULTILINE)
CELL = re.compile(r"\**(\d\.\d\d)\**†? \(\**(\d\.\d\d)")
SHORT_HEAD = (
    "| model, prompt | cells | lowest | middle | highest | under 0.97 | worst run |\n|---|---|---|---|---|---|---|\n"
)
TASKS_HEAD = """# Six chat tasks, all results

Measured on {dates}; the [short form](../benchmarks.md#six-chat-tasks). Brackets hold the slowest and the fastest
round. `python -m benchmarks update-pages --tables bench` writes this page.

<img src="tasks.svg" alt="Tokens per second by task, for each type of weights">
"""


def speed_table(reports: dict[str, Path]) -> str:
    """Return tokens per second and the ratio to transformers by task, for each type of weights."""
    rows: list[Row] = []
    for dtype, report in reports.items():
        found = json.loads(report.read_text(encoding="utf-8"))["rows"]
        rows += [row | {"name": f"{row['contestant']}, {dtype}"} for row in [*found, *means(found)]]
    return pivot(rows, "name", "task", _speed).replace("| name |", "| |", 1)


def _speed(row: Row) -> str:
    if row["speed_up"] is None:
        raise ValueError(f"{row['contestant']}: the machine was busy while {row['task']} was measured")
    ratio = "" if row["contestant"] == BASELINE else f" ({row['speed_up']:.1f}x)"
    return f"{row['tokens_per_second']:.0f}{ratio}"


def long_table(report: Path) -> str:
    """Return speed-up and acceptance rate by context, and by temperature at the longest one."""
    parts: dict[str, list[Row]] = json.loads(report.read_text(encoding="utf-8"))["parts"]
    contexts = [row | {"at": f"{row['context']:,} tokens"} for row in parts["contexts"]]
    shown = [row for row in parts.get("temperatures", []) if row["temperature"] in (0.6, 1.0)]
    warm = [row | {"at": f"{row['context']:,}, T {row['temperature']:g}"} for row in shown]
    return pivot([row | {"drafter": row["contestant"]} for row in contexts + warm], "drafter", "at", _cell)


def _cell(row: Row) -> str:
    return f"{row['tokens_per_second']:.0f} tokens/s" if row["contestant"] == PLAIN else speed_cell(row)


def slowness_table(reports: Sequence[Path]) -> str:
    """Return a drafter's speed over plain decoding by model, context and batch, and by text and temperature.

    A cell is the median, and the worst run in brackets. What misses a goal is bold, a † marks less of the best other
    drafter's speed than the goal, and a raised number fewer runs than usual.
    """
    rows: list[Row] = []
    for report in reports:
        found = json.loads(report.read_text(encoding="utf-8"))
        dtype = "" if found["settings"]["dtype"] == "auto" else f", {found['settings']['dtype']}"
        model = f"{Path(found['settings']['model']).name}{dtype}"
        for row in found["rows"]:
            at = f"{row['kind']}, T {row['temperature']:g}" if row["temperature"] else str(row["kind"])
            rows.append(row | {"": f"{model}: {row['context']:,} x {row['batch']}", "at": at})
    return pivot(rows, "", "at", _slowness)


def _slowness(row: Row) -> str:
    least = (row["median"], LEAST_MEDIAN), (row["worst"], LEAST_SINGLE)
    middle, worst = (f"**{value:.2f}**" if value < promised else f"{value:.2f}" for value, promised in least)
    draws = len(row["plain_against_itself"])
    few = "" if draws > len(RAISED) else RAISED[draws - 1]
    return f"{middle}{'†' * (row['of_best'] < LEAST_OF_BEST)} ({worst}){few}"


def scaling_tables(report: Path) -> dict[str, str]:
    """Return the capacity report's tables by their markers."""
    parts: dict[str, list[Row]] = json.loads(report.read_text(encoding="utf-8"))["parts"]
    found = {name: predicted_table(parts[name]) for name in ("predicted", "drafted")}
    return found | {"capacity": listing(parts["capacity"], COLUMNS)}


def slowness_cells(page: str) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return the medians and worst runs of a page's table, by model and tokens of the prompt."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for model, context, line in LINE.findall(page):
        values = [(float(middle), float(worst)) for middle, worst in CELL.findall(line)]
        found.setdefault((model.removesuffix("-Instruct"), context), []).extend(values)
    order = sorted(found, key=lambda key: (key[0] == "bundled", int(key[1].replace(",", ""))))
    return {key: found[key] for key in order}


def short_slowness(page: str) -> str:
    """Return a row for each model and length of prompt, over types, batches, texts and temperatures."""
    lines = [SHORT_HEAD]
    for (model, context), values in slowness_cells(page).items():
        middles = sorted(middle for middle, _ in values)
        slow = sum(middle < LEAST_MEDIAN for middle in middles)
        low, middle, high, worst = middles[0], median(middles), middles[-1], min(worst for _, worst in values)
        shown = f"{low:.2f} | {middle:.2f} | {high:.2f} | {slow} | {worst:.2f}"
        lines.append(f"| {model}, {context} tokens | {len(values)} | {shown} |\n")
    return "".join(lines)


def draw_slowness(page: str, path: Path) -> None:
    """Draw one dot for each cell's median and a tick for its worst run, in a row per model and length of prompt."""
    groups = slowness_cells(page)
    colours = dict(zip(dict.fromkeys(model for model, _ in groups), COLOURS, strict=False))
    title = f"Speed of auto relative to none: {sum(map(len, groups.values()))} cells"
    with figure(path, title=title, note=" ".join(MEASURED.findall(page)), figsize=(8, 3.8)) as (_, axis):
        for place, ((model, _), values) in enumerate(groups.items()):
            heights = [place - 0.3 + 0.6 * i / len(values) for i in range(len(values))]
            ordered = sorted(values)
            axis.plot([worst for _, worst in ordered], heights, "|", ms=4, color="0.6")
            axis.plot([middle for middle, _ in ordered], heights, ".", ms=4, color=colours[model])
        axis.axvline(1.0, color="black", lw=0.8)
        axis.axvline(LEAST_SINGLE, color="tab:red", lw=0.8, ls=":")
        axis.set_xlim(left=0)
        axis.set_yticks(range(len(groups)), [f"{model}, {context} tokens" for model, context in groups])
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.3)
        axis.set_xlabel(f"times as fast as none (dot: median of a cell; tick: its worst run; dotted: {LEAST_SINGLE})")


def tasks_page(reports: Mapping[str, Path]) -> str:
    """Return the page: each type's date, tables, machine and settings."""
    days = sorted({datetime.fromtimestamp(report.stat().st_mtime).strftime("%-d %B %Y") for report in reports.values()})
    texts = {dtype: report.with_suffix(".md").read_text(encoding="utf-8") for dtype, report in reports.items()}
    tables = [f"## {dtype}\n\n{text}" for dtype, text in texts.items()]
    return "\n".join([TASKS_HEAD.format(dates=" and ".join(days)), *tables])


def draw_tasks(reports: Mapping[str, Path], path: Path) -> None:
    """Draw a panel of tokens per second by task for each type of weights."""
    found = {dtype: json.loads(report.read_text(encoding="utf-8")) for dtype, report in reports.items()}
    first = next(iter(found.values()))
    here, model = first["machine"], Path(first["settings"]["model"]).name
    note = f"{here['processor']}, {here['threads']} threads, {here['device']}; torch {here['torch']}"
    title = f"{model}, greedy, one request at a time: median, slowest and fastest round"
    with figure(path, len(found), title=title, note=note, figsize=(8, 2.6 * len(found)), squeeze=False) as (_, axes):
        for axis, (dtype, report) in zip(axes[:, 0], found.items(), strict=True):
            plots.bars_on(axis, *plots.grouped(report["rows"], lambda row: str(row["task"]), "tokens_per_second"))
            axis.grid(axis="y", alpha=0.3)
            axis.set_ylabel(f"tokens/s, {dtype}")
        plots.legend(axes[0, 0])


def into_page(page: Path, table: str, marker: str) -> None:
    """Put a table into a page, between ``<!-- marker:begin -->`` and ``<!-- marker:end -->``, which must be there."""
    begin, end = f"<!-- {marker}:begin -->\n", f"<!-- {marker}:end -->"
    text = page.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{page} has no {begin.strip()} ... {end}")
    head, rest = text.split(begin, 1)
    page.write_text(head + begin + "\n" + table + "\n" + end + rest.split(end, 1)[1])


@dataclass(frozen=True, kw_only=True)
class UpdateOptions(ListOptions, DebugOptions):
    """Put the last measured tables into the pages that show them."""

    tables: Annotated[str, list_option("Output", "Which.")] = ",".join(TABLES)

    names = names_of("tables", TABLES)


def run(options: UpdateOptions) -> None:
    wanted = options.names
    if "bench" in wanted and (there := {dtype: path for dtype, path in REPORTS.items() if path.exists()}):
        into_page(ROOT / "README.md", speed_table(there), "bench")
        TASKS.write_text(tasks_page(there), encoding="utf-8")
        draw_tasks(there, TASKS.with_suffix(".svg"))
    if "long" in wanted and LONG.exists():
        into_page(ROOT / "docs" / "benchmarks.md", long_table(LONG), "long")
    if "never-slower" in wanted and (slow := sorted(ROOT.glob("runs/never-slower-*/never-slower.json"))):
        into_page(SLOWNESS, slowness_table(slow), "never-slower")
    if "never-slower" in wanted:
        page = SLOWNESS.read_text(encoding="utf-8")
        into_page(ROOT / "docs" / "benchmarks.md", short_slowness(page), "how-much-slower")
        draw_slowness(page, SLOWNESS.with_suffix(".svg"))
    for name, (reports, page) in COPIED.items():
        if name in wanted and (found := sorted((ROOT / "runs").glob(reports))):
            text = "\n".join(report.read_text(encoding="utf-8") for report in found)
            (ROOT / "docs" / "results" / page).write_text(text, encoding="utf-8")
    if "scaling" in wanted and CAPACITY.exists():
        for name, table in scaling_tables(CAPACITY).items():
            into_page(WHAT_FITS if name == "capacity" else SCALING, table, name)
        plain: list[Row] = json.loads(CAPACITY.read_text(encoding="utf-8"))["parts"]["predicted"]
        plots.bars(SCALING.with_suffix(".svg"), *share_plot(plain))
