"""What a bench measured, as JSON, a Markdown table and plots; and the README's table from the Markdown one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.bench.machine import machine
from forerun.bench.speed import BASELINE, Series

Row = dict[str, Any]


def summarise(series: Sequence[Series]) -> list[Row]:
    """A row per task and contestant: speeds, tokens per pass, and the ratio to ``transformers`` greedy."""
    baselines = {one.task: one for one in series if one.contestant == BASELINE}
    return [_row(one, baselines[one.task]) for one in series]


def _row(one: Series, baseline: Series) -> Row:
    slow, fast = one.spread
    same = [mine[0].tokens == theirs[0].tokens for mine, theirs in zip(one.runs, baseline.runs, strict=True)]
    return {
        "task": one.task,
        "contestant": one.contestant,
        "tokens_per_second": round(one.tokens_per_second, 1),
        "slowest": round(slow, 1),
        "fastest": round(fast, 1),
        "tokens_per_pass": round(one.tokens_per_pass, 3),
        "speed_up": round(one.tokens_per_second / baseline.tokens_per_second, 3),
        "same_output": sum(same) / len(same),
    }


def markdown(rows: Sequence[Row]) -> str:
    """Speed-up over ``transformers`` greedy by task, with tokens per pass of the target in brackets."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    cells = {(row["contestant"], row["task"]): row for row in rows}
    lines = [f"| | {' | '.join(tasks)} |", "|---|" + "---|" * len(tasks)]
    for contestant in dict.fromkeys(row["contestant"] for row in rows):
        found = [cells.get((contestant, task)) for task in tasks]
        lines.append(f"| {contestant} | {' | '.join(_cell(row) for row in found)} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row["contestant"] == BASELINE:
        return f"{row['tokens_per_second']:.0f} tokens/s"
    return f"{row['speed_up']:.2f}x ({row['tokens_per_pass']:.2f})"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bars of tokens per second, with the spread of the rounds, and of tokens per pass, by task."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    contestants = list(dict.fromkeys(row["contestant"] for row in rows))
    figure, axes = plt.subplots(2, 1, figsize=(2.2 + 1.6 * len(tasks), 8), sharex=True, layout="constrained")
    theirs = [name for name in contestants if name.startswith("transformers")]
    ours = [name for name in contestants if name not in theirs]
    colours = dict(zip(theirs, plt.get_cmap("Greys")(_spaced(len(theirs), 0.7, 0.3)), strict=True))
    colours |= dict(zip(ours, plt.get_cmap("viridis")(_spaced(len(ours), 0.9, 0.1)), strict=True))
    width = 0.86 / len(contestants)
    for i, contestant in enumerate(contestants):
        mine = {row["task"]: row for row in rows if row["contestant"] == contestant}
        at = [x + (i - (len(contestants) - 1) / 2) * width for x, task in enumerate(tasks) if task in mine]
        found = [mine[task] for task in tasks if task in mine]
        speeds = [row["tokens_per_second"] for row in found]
        spread = [
            [row["tokens_per_second"] - row["slowest"] for row in found],
            [row["fastest"] - row["tokens_per_second"] for row in found],
        ]
        axes[0].bar(
            at, speeds, width * 0.92, yerr=spread, label=contestant, color=colours[contestant], error_kw={"lw": 0.8}
        )
        axes[1].bar(at, [row["tokens_per_pass"] for row in found], width * 0.92, color=colours[contestant])
    axes[0].set_ylabel("tokens per second")
    axes[1].set_ylabel("tokens per forward pass")
    axes[1].set_xticks(range(len(tasks)), tasks)
    axes[0].legend(ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.22), frameon=False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _spaced(count: int, first: float, last: float) -> list[float]:
    return [first + (last - first) * i / max(count - 1, 1) for i in range(count)]


def write(rows: Sequence[Row], settings: Row, folder: Path, name: str) -> list[Path]:
    """Write ``name.json``, ``name.md`` and ``name.png`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in ("json", "md", "png")]
    paths[0].write_text(json.dumps({"machine": machine(), "settings": settings, "rows": list(rows)}, indent=1) + "\n")
    paths[1].write_text(markdown(rows))
    plot(rows, paths[2])
    return paths


def into_readme(readme: Path, table: str, marker: str) -> None:
    """Put a table between ``<!-- marker:begin -->`` and ``<!-- marker:end -->``.

    Raises:
        ValueError: if the README has no such markers.
    """
    begin, end = f"<!-- {marker}:begin -->\n", f"<!-- {marker}:end -->"
    text = readme.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{readme} has no {begin.strip()} ... {end}")
    head, rest = text.split(begin, 1)
    readme.write_text(head + begin + "\n" + table + "\n" + end + rest.split(end, 1)[1])
