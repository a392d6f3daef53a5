"""A plot of servers under load: times against requests finished per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.server.figures import TIMES
from forerun.bench.machine import Row
from forerun.bench.report import figure

Draw = Callable[[Path], None]
PANELS = ("first", "gap", "each")
COLOURS = {
    "forerun none": "tab:blue",
    "forerun": "tab:orange",
    "transformers serve": "tab:green",
    "llama-server": "tab:red",
}
"""The usual contestants; others take what is left of matplotlib's."""
OTHERS = ("tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan", "tab:grey")


def drawer(rows: Sequence[Row], title: str, note: str) -> Draw:
    """A panel for each time: p50 and p99, a point for each load; its number is clients, or arrivals per second."""

    def draw(path: Path) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        with figure(path, 1, len(PANELS), title=title, note=note, figsize=(4.1 * len(PANELS), 4.4)) as (whole, axes):
            for axis, name in zip(axes, PANELS, strict=True):
                for contestant, colour in _colours(rows).items():
                    _line(axis, [row for row in rows if row["contestant"] == contestant], name, colour)
                axis.set(title=TIMES[name], xlabel="requests finished per second", yscale="log")
                axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
                axis.yaxis.set_minor_formatter(NullFormatter())
                axis.grid(alpha=0.3)
                axis.set_xlim(left=0)
            axes[0].set_ylabel("milliseconds")
            handles, labels = axes[0].get_legend_handles_labels()
            columns = len(_colours(rows))
            whole.legend(handles, labels, fontsize=8, frameon=False, loc="outside lower center", ncols=columns)

    return draw


def _line(axis: Any, rows: Sequence[Row], name: str, colour: str) -> None:
    found = sorted(rows, key=lambda row: row["value"])
    for part, style, face in ((50, "-", colour), (99, "--", "white")):
        points = [row for row in found if row[f"{name}_p{part}"] is not None]
        xs, ys = [row["requests_per_second"] for row in points], [1000 * row[f"{name}_p{part}"] for row in points]
        label = f"{found[0]['contestant']}, p{part}"
        axis.plot(xs, ys, style, marker="o", ms=5, color=colour, mfc=face, label=label)
        if part == 50:
            for row, x, y in zip(points, xs, ys, strict=True):
                axis.annotate(
                    f"{row['value']:g}", (x, y), (4, -9), textcoords="offset points", fontsize=7, color=colour
                )


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    left, found = iter(OTHERS), {}
    for name in dict.fromkeys(row["contestant"] for row in rows):
        found[name] = COLOURS.get(name) or next(left)
    return found
