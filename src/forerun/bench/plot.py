"""The plot of a bench."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Row = dict[str, Any]
GREYS, COLOURS, REDS = "Greys", "viridis", "autumn"
"""Colour maps of transformers, Forerun and all others."""


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bars by task: tokens per second with the rounds' spread, and tokens per pass."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    colours = _colours(list(dict.fromkeys(row["contestant"] for row in rows)), plt.get_cmap)
    size = (4.2 + 1.6 * len(tasks), 6 + 0.12 * len(colours))
    figure, axes = plt.subplots(2, 1, figsize=size, sharex=True, layout="constrained")
    width = 0.86 / len(colours)
    for i, (contestant, colour) in enumerate(colours.items()):
        shift = (i - (len(colours) - 1) / 2) * width
        found = {tasks.index(row["task"]) + shift: row for row in rows if row["contestant"] == contestant}
        _bars(axes, found, width * 0.92, contestant, colour)
    axes[0].set_ylabel("tokens per second")
    axes[1].set_ylabel("tokens per forward pass")
    axes[1].set_xticks(range(len(tasks)), tasks)
    axes[0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bars(axes: Any, found: dict[float, Row], width: float, label: str, colour: Any) -> None:
    rows = found.values()
    speeds = [row["tokens_per_second"] for row in rows]
    spread = [
        [row["tokens_per_second"] - row["slowest"] for row in rows],
        [row["fastest"] - row["tokens_per_second"] for row in rows],
    ]
    axes[0].bar(list(found), speeds, width, yerr=spread, label=label, color=colour, error_kw={"lw": 0.8})
    axes[1].bar(list(found), [row["tokens_per_pass"] or 0 for row in rows], width, color=colour)


def _colours(contestants: Sequence[str], maps: Any) -> dict[str, Any]:
    """Colours of contestants: shades of one colour map per library."""
    makers = {"transformers": (GREYS, 0.7, 0.3), "forerun": (COLOURS, 0.9, 0.1), "": (REDS, 0.0, 0.7)}
    found: dict[str, Any] = {}
    for maker, (name, first, last) in makers.items():
        mine = [one for one in contestants if one.startswith(maker) and one not in found]
        found |= dict(zip(mine, maps(name)(_spaced(len(mine), first, last)), strict=True))
    return {name: found[name] for name in contestants}


def _spaced(count: int, first: float, last: float) -> list[float]:
    return [first + (last - first) * i / max(count - 1, 1) for i in range(count)]
