"""Plots in one style: lines, bars and named points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forerun.bench.machine import Row
from forerun.bench.report import COLOURS, bar_styles, figure
from forerun.core.install_command import install_command

MARKERS = "os^Dv*P"
DASHES = ("-", ":", "-.")


def check() -> None:
    """Raise ValueError without matplotlib: what cannot be drawn is not measured."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"plots need matplotlib; install it by: {install_command('bench')}")


@dataclass(frozen=True)
class Frame:
    """Title and axes. The y axis starts at 0, and ends at 1 with ``share``; the x axis is logarithmic, base 2, with
    ``log``. ``reference`` is the height of a horizontal line, ``note`` is in small print."""

    title: str
    x: str
    y: str
    log: bool = False
    reference: float | None = None
    share: bool = False
    note: str = ""


@dataclass(frozen=True)
class Line:
    """Points of one colour; ``low`` and ``high`` are their spread, ``dashed`` marks computed values."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False


def lines(path: Path, frame: Frame, found: Sequence[Line]) -> None:
    """Draw lines over one axis; whiskers, or bands of long lines, show the spread."""
    with _figure(path, frame) as axis:
        for i, line in enumerate(found):
            few = len(line.xs) <= 20
            style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "alpha": 0.85, "label": line.name}
            style["ls"] = "--" if line.dashed else DASHES[i // len(COLOURS) % len(DASHES)]
            if few:
                style |= {"marker": MARKERS[i % len(MARKERS)], "ms": 5}
            if few and line.low:
                axis.errorbar(line.xs, line.ys, yerr=_spread(line), elinewidth=0.8, capsize=2, **style)
            else:
                axis.plot(line.xs, line.ys, **style)
                if line.low:
                    axis.fill_between(line.xs, line.low, line.high, color=style["color"], alpha=0.15, lw=0)
        if frame.log:
            axis.set_xscale("log", base=2)
            ticks = sorted({x for line in found for x in line.xs})
            axis.set_xticks(_apart(ticks), [f"{x:g}" for x in _apart(ticks)])
            axis.minorticks_off()
        elif len(xs := {x for line in found for x in line.xs}) <= 10:
            axis.set_xticks(sorted(xs))
        if found:
            legend(axis)


def bars(path: Path, frame: Frame, groups: Sequence[str], found: Sequence[Line]) -> None:
    """Draw bars in groups; a line's points are its bars in each group, in order."""
    with _figure(path, frame, 4 + 0.14 * len(groups) * (len(found) + 1)) as axis:
        bars_on(axis, groups, found)
        legend(axis)


def bars_on(axis: Any, groups: Sequence[str], found: Sequence[Line]) -> None:
    """Draw ``bars`` on an axis."""
    width, styles = 0.8 / len(found), bar_styles([line.name for line in found])
    for i, line in enumerate(found):
        at = [x + (i - (len(found) - 1) / 2) * width for x in range(len(groups))]
        spread = _spread(line) if line.low else None
        axis.bar(at, line.ys, width * 0.92, yerr=spread, label=line.name, error_kw={"lw": 0.8, "capsize": 2},
                 **styles[line.name])  # fmt: skip
    axis.set_xticks(range(len(groups)), groups)


def points(path: Path, frame: Frame, found: Mapping[str, tuple[float, float]], filled: Sequence[str]) -> None:
    """Draw points in different colours with a legend beside the plot; those not ``filled`` are crosses."""
    with _figure(path, frame) as axis:
        for i, (name, (x, y)) in enumerate(found.items()):
            marker, colour = "o" if name in filled else "X", COLOURS[i % len(COLOURS)]
            axis.scatter([x], [y], s=90, marker=marker, color=colour, label=name, zorder=3)
        axis.set_xlim(left=0)
        if found:
            legend(axis)


def by(rows: Sequence[Row], name: str, x: str, y: str, spread: tuple[str, str] | None = None) -> list[Line]:
    """Return a line for each value of the column ``name``, over rows with a value in ``y``; ``spread`` names the
    columns of its smallest and largest value."""
    found = []
    for value in dict.fromkeys(row[name] for row in rows):
        mine = sorted((row for row in rows if row[name] == value and row.get(y) is not None), key=lambda row: row[x])
        if mine:
            low, high = ([row[each] for row in mine] for each in spread) if spread else ([], [])
            found.append(Line(str(value), [row[x] for row in mine], [row[y] for row in mine], low, high))
    return found


def grouped(
    rows: Sequence[Row], group: Callable[[Row], str], value: str, by: str = "contestant"
) -> tuple[list[str], list[Line]]:
    """Return groups of bars, and a line for each value of the column ``by``; the slowest and fastest round are its
    spread. What is in no row has no height."""
    groups, lines = list(dict.fromkeys(map(group, rows))), []
    for name in dict.fromkeys(row[by] for row in rows):
        mine = {group(row): row for row in rows if row[by] == name}
        ys, low, high = ([mine.get(each, {}).get(key, 0.0) for each in groups] for key in (value, "slowest", "fastest"))
        lines.append(Line(name, range(len(groups)), ys, low, high))
    return groups, lines


def _spread(line: Line) -> tuple[list[float], list[float]]:
    below, above = zip(line.ys, line.low, strict=True), zip(line.high, line.ys, strict=True)
    return [max(0.0, y - low) for y, low in below], [max(0.0, high - y) for high, y in above]


def _apart(ticks: Sequence[float]) -> list[float]:
    """Return the ticks far enough from the one before that labels do not overlap."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or tick >= kept[-1] * 1.6:
            kept.append(tick)
    return kept


def legend(axis: Any) -> None:
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))


@contextmanager
def _figure(path: Path, frame: Frame, width: float = 8.0) -> Iterator[Any]:
    with figure(path, title=frame.title, note=frame.note, figsize=(width, 4.2)) as (_, axis):
        yield axis
        if frame.reference is not None:
            axis.axhline(frame.reference, color="grey", lw=0.8, ls=":")
        axis.set_ylim(0, 1.04 if frame.share else None)
        axis.set_xlabel(frame.x)
        axis.set_ylabel(frame.y)
        axis.grid(alpha=0.3)
