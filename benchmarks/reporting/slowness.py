"""The short form of docs/results/never-slower.md: eight rows and a plot, made from its table."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

from forerun.bench.never_slower import LEAST_MEDIAN, LEAST_SINGLE
from forerun.bench.report import COLOURS, figure

LINE = re.compile(r"^\| ([^,|]+)[^|]*: ([\d,]+) x \d+ \|(.*)\|$", re.MULTILINE)
MEASURED = re.compile(r"^Measured [^;]*", re.MULTILINE)
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
    """Draw one dot for each cell's median and a tick for its worst run, in a row per model and length of prompt."""
    groups = cells(page)
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
