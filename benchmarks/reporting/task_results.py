"""Write ``docs/results/tasks.md`` from the reports of ``python -m benchmarks tasks``: all figures, and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from forerun.bench.machine import Row
from forerun.bench.report import bar_styles, bars_with_spread, figure

HEAD = """# Six chat tasks, all results

Measured on {dates}; the [short form](../benchmarks.md#six-chat-tasks). Brackets hold the slowest and the fastest
round. `python -m benchmarks update-pages --tables bench` writes this page.

<img src="tasks.svg" alt="Tokens per second by task, for each type of weights">
"""


def page(reports: Mapping[str, Path]) -> str:
    """Return the page of the reports, by type of weights: when each was measured, its tables, machine and settings."""
    days = sorted({datetime.fromtimestamp(report.stat().st_mtime).strftime("%-d %B %Y") for report in reports.values()})
    tables = [
        f"## {dtype}\n\n{report.with_suffix('.md').read_text(encoding='utf-8')}" for dtype, report in reports.items()
    ]
    return "\n".join([HEAD.format(dates=" and ".join(days)), *tables])


def draw(reports: Mapping[str, Path], path: Path) -> None:
    """Draw a panel of tokens per second by task for each type of weights."""
    found = {dtype: json.loads(report.read_text(encoding="utf-8")) for dtype, report in reports.items()}
    first = next(iter(found.values()))
    here, model = first["machine"], Path(first["settings"]["model"]).name
    note = f"{here['processor']}, {here['threads']} threads, {here['device']}; torch {here['torch']}"
    title = f"{model}, greedy, one request at a time: median, slowest and fastest round"
    with figure(path, len(found), title=title, note=note, figsize=(8, 2.6 * len(found)), squeeze=False) as (_, axes):
        for axis, (dtype, report) in zip(axes[:, 0], found.items(), strict=True):
            _panel(axis, report["rows"])
            axis.set_ylabel(f"tokens/s, {dtype}")
        axes[0, 0].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _panel(axis: Any, rows: list[Row]) -> None:
    tasks, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "contestant"))
    width = 0.8 / len(names)
    for i, (name, style) in enumerate(bar_styles(names).items()):
        shift = (i - (len(names) - 1) / 2) * width
        places = {tasks.index(row["task"]) + shift: row for row in rows if row["contestant"] == name}
        bars_with_spread(axis, places, width * 0.92, name, style)
    axis.set_xticks(range(len(tasks)), tasks)
    axis.grid(axis="y", alpha=0.3)
