"""The short form of docs/results/never-slower.md: eight rows and a plot, made from its table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from forerun.bench.never_slower import LEAST_MEDIAN
from forerun.bench.report import figure

LINE = re.compile(r"^\| ([^,|]+)[^|]*: ([\d,]+) x \d+ \|(.*)\|$", re.MULTILINE)
CELL = re.compile(r"\**(\d\.\d\d)\**†? \(\**(\d\.\d\d)")
HEAD = "| model, prompt | cells | lowest | middle | highest | under 0.97 | worst run |\n|---|---|---|---|---|---|---|\n"


def cells(page: str) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """The medians and worst runs of a page's table, by model and tokens of the prompt."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for model, context, line in LINE.findall(page):
        values = [(float(middle), float(worst)) for middle, worst in CELL.findall(line)]
        found.setdefault((model.removesuffix("-Instruct"), context), []).extend(values)
    order = sorted(found, key=lambda key: (key[0] == "bundled", int(key[1].replace(",", ""))))
    return {key: found[key] for key in order}


def short_table(page: str) -> str:
    """A row for each model and length of prompt, over types, batches, texts and temperatures."""
    lines = [HEAD]
    for (model, context), values in cells(page).items():
        middles = sorted(middle for middle, _ in values)
        slow = sum(middle < LEAST_MEDIAN for middle in middles)
        shown = (
            f"{middles[0]:.2f} | {median(middles):.2f} | {middles[-1]:.2f} | {slow} | {min(w for _, w in values):.2f}"
        )
        lines.append(f"| {model}, {context} tokens | {len(values)} | {shown} |\n")
    return "".join(lines)


def draw(page: str, path: Path) -> None:
    """One dot for each cell's median, on a row for each model and length of prompt."""
    groups = cells(page)
    with figure(path, figsize=(8, 3.2)) as (_, axis):
        for place, values in enumerate(groups.values()):
            axis.plot(_sorted(values), [place - 0.3 + 0.6 * i / len(values) for i in range(len(values))], ".", ms=4)
        axis.axvline(1.0, color="black", lw=0.8)
        axis.set_xscale("log")
        ticks = [0.8, 1.0, 1.5, 2.0, 3.0, 4.0]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axis.set_xticks([], minor=True)
        axis.set_yticks(range(len(groups)), [f"{model}, {context} tokens" for model, context in groups])
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.3)
        axis.set_xlabel("speed of auto, relative to none")


def _sorted(values: Sequence[tuple[float, float]]) -> list[float]:
    return sorted(middle for middle, _ in values)
