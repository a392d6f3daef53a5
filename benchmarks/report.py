"""Results of a bench as JSON, Markdown tables and plots; and tables written into pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks import plots
from benchmarks.machine import footer, machine
from benchmarks.plots import Frame
from benchmarks.speed import BASELINE, Decode, Series
from benchmarks.speed_plot import plot
from benchmarks.tables import pivot, replace

Row = dict[str, Any]
MEAN = "geometric mean"
"""The column over all tasks."""


def summarise(series: Sequence[Series], baseline: str = BASELINE, decode: Decode = str) -> list[Row]:
    """A row per task and contestant: speeds, tokens per pass, and the ratio to the baseline.

    Args:
        series: of all contestants.
        baseline: one of them.
        decode: tokens to text, for contestants that only give text.
    """
    baselines = {one.task: one for one in series if one.contestant == baseline}
    return [_row(one, baselines[one.task], decode) for one in series]


def _row(one: Series, baseline: Series, decode: Decode) -> Row:
    slow, fast = one.spread
    passes = one.tokens_per_pass
    return {
        "task": one.task,
        "contestant": one.contestant,
        "tokens_per_second": round(one.tokens_per_second, 1),
        "slowest": round(slow, 1),
        "fastest": round(fast, 1),
        "tokens_per_pass": None if passes is None else round(passes, 3),
        "speed_up": round(one.tokens_per_second / baseline.tokens_per_second, 3),
        "same_output": one.same_texts(baseline, decode),
        "texts": sum(len(rounds[0].texts) for rounds in one.runs),
        "tokens": sum(rounds[0].tokens for rounds in one.runs),
    }


def means(rows: Sequence[Row]) -> list[Row]:
    """Geometric means over tasks, for each contestant that ran every task; none for a single task."""
    tasks = {row["task"] for row in rows}
    found = []
    for contestant in dict.fromkeys(row["contestant"] for row in rows):
        mine = [row for row in rows if row["contestant"] == contestant]
        if 1 < len(mine) == len(tasks):
            names = ("tokens_per_second", "tokens_per_pass", "speed_up")
            values = {name: _mean([row[name] for row in mine]) for name in names}
            found.append({"task": MEAN, "contestant": contestant, **values})
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return round(geometric_mean(known), 3) if len(known) == len(values) else None


def markdown(rows: Sequence[Row]) -> str:
    """Speed-up over ``transformers`` greedy by task, with tokens per pass of the target in brackets."""
    named = [row | {"task": row["task"].replace("|", "\\|")} for row in [*rows, *means(rows)]]
    return pivot(named, "contestant", "task", _cell).replace("| contestant |", "| |", 1)


def _cell(row: Row) -> str:
    if row["contestant"] == BASELINE:
        return f"{row['tokens_per_second']:.0f} tokens/s"
    passes = "" if row["tokens_per_pass"] is None else f" ({row['tokens_per_pass']:.2f})"
    return f"{row['speed_up']:.2f}x{passes}"


def equality(rows: Sequence[Row]) -> str:
    """A sentence that says which texts differ from the baseline's."""
    parted: dict[str, list[float]] = {}
    for row in rows:
        parted.setdefault(row["contestant"], []).extend([row["same_output"]] * row["texts"])
    shares = {name: sum(found) / len(found) for name, found in parted.items() if sum(found) < len(found)}
    if not shares:
        return "Every text equals that of transformers.\n"
    listed = "; ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
    return (
        f"Texts equal to those of transformers: {listed}; all others 100 %. Rounding can part texts "
        "where two tokens are nearly as good; `forerun audit` tells whether it was that.\n"
    )


@dataclass(frozen=True)
class Result:
    """What a bench measured.

    Attributes:
        rows: of single prompts.
        settings: of the measurement.
        batches: rows with a ``batch`` column, if batches were measured.
        skipped: tasks and contestants that were not measured, and why.
        notes: remarks that a reader of the figures must know.
    """

    rows: Sequence[Row]
    settings: Row
    batches: Sequence[Row] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def json(self) -> Row:
        """Everything as plain values."""
        return {
            "machine": machine(),
            "settings": self.settings,
            "rows": list(self.rows),
            "means": means(self.rows),
            "batches": list(self.batches),
            "skipped": dict(self.skipped),
            "notes": list(self.notes),
        }

    @property
    def markdown(self) -> str:
        """All tables, and the machine and settings."""
        parts = [markdown(self.rows), equality(self.rows)]
        if self.batches:
            parts += ["## Batches\n", batch_table(self.batches), equality(self.batches)]
        parts += [f"{note}\n" for note in self.notes]
        parts += [f"Not measured: {name}: {reason}.\n" for name, reason in self.skipped.items()]
        return "\n".join([*parts, footer(self.settings)])


def batch_table(rows: Sequence[Row]) -> str:
    """Tokens per second of all rows, and the ratio to transformers' padded batches."""
    sized = [row | {"rows": f"{row['batch']} rows"} for row in rows]
    return pivot(sized, "contestant", "rows", lambda r: f"{r['tokens_per_second']:.0f} tokens/s ({r['speed_up']:.2f}x)")


def write(result: Result, folder: Path, name: str) -> list[Path]:
    """Write ``name.json``, ``name.md`` and the plots into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"json": json.dumps(result.json, indent=1) + "\n", "md": result.markdown}
    paths = [replace(folder / f"{name}.{suffix}", text) for suffix, text in texts.items()]
    paths.append(_drawn(folder / f"{name}.png", lambda path: plot(result.rows, path)))
    if result.batches:
        frame = Frame("Batches of ragged prompts, greedy", "rows", "tokens per second of all rows", log=True)
        lines = plots.by(result.batches, "contestant", "batch", "tokens_per_second")
        paths.append(_drawn(folder / f"{name}-batches.png", lambda path: plots.lines(path, frame, lines)))
    return paths


def _drawn(path: Path, draw: Callable[[Path], None]) -> Path:
    draw(path)
    return path


def into_readme(readme: Path, table: str, marker: str) -> None:
    """Put a table into a page, between ``<!-- marker:begin -->`` and ``<!-- marker:end -->``.

    Raises:
        ValueError: if the page has no such markers.
    """
    begin, end = f"<!-- {marker}:begin -->\n", f"<!-- {marker}:end -->"
    text = readme.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{readme} has no {begin.strip()} ... {end}")
    head, rest = text.split(begin, 1)
    readme.write_text(head + begin + "\n" + table + "\n" + end + rest.split(end, 1)[1])
