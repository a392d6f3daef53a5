"""Results of a bench as JSON, Markdown tables and a plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import floor
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from forerun.bench.disturbance import BUSY
from forerun.bench.machine import Row, caption, footer, machine
from forerun.bench.rounds import BASELINE, PLAIN, Decode, Series

MEAN = "geometric mean"
SURE_ROUNDS = 5
"""With fewer rounds than this, ranks are noise: one disturbed round moves the median."""


def summarise(series: Sequence[Series], baseline: str = BASELINE, decode: Decode = str) -> list[Row]:
    """Make a row per task and contestant, with ratios to the baseline and shares of equal outputs."""
    by_name = {(one.task, one.contestant): one for one in series}
    return [_row(one, by_name[one.task, baseline], by_name.get((one.task, PLAIN)), decode) for one in series]


def _row(one: Series, baseline: Series, plain: Series | None, decode: Decode) -> Row:
    slow, fast = one.spread
    passes = one.tokens_per_step
    ours = one.contestant.startswith("forerun")
    return {
        "task": one.task,
        "contestant": one.contestant,
        "tokens_per_second": _figures(one.tokens_per_second),
        "slowest": _figures(slow),
        "fastest": _figures(fast),
        "rounds": len(one.runs[0]),
        "first_token_ms": None if one.first_token is None else _figures(1000 * one.first_token),
        "tokens_per_step": None if passes is None else round(passes, 3),
        "speed_up": round(one.tokens_per_second / baseline.tokens_per_second, 3),
        "same_output": one.same_texts(baseline, decode),
        "same_as_plain": one.same_texts(plain) if ours and plain is not None else None,
        "cores": None if one.cores is None else round(one.cores, 2),
        "others": None if one.others is None else round(one.others, 3),
        "texts": sum(len(rounds[0].texts) for rounds in one.runs),
        "tokens": sum(rounds[0].tokens for rounds in one.runs),
    }


def _figures(value: float) -> float:
    """Round to four digits: after a long prompt, a token may need a minute."""
    return float(f"{value:.4g}")


def _short(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}"


def undisturbed(rows: Sequence[Row]) -> list[Row]:
    """Drop ratios for which other processes used too much of the machine."""
    busy = {(row["task"], row["contestant"]): (row.get("others") or 0) > BUSY for row in rows}
    return [
        row | {"speed_up": None} if busy[row["task"], row["contestant"]] or busy.get((row["task"], BASELINE)) else row
        for row in rows
    ]


def means(rows: Sequence[Row]) -> list[Row]:
    """Return geometric means over tasks, for each contestant that ran every task; none for a single task."""
    tasks = {row["task"] for row in rows}
    rows_of_means = []
    for contestant, mine in _by_contestant(rows).items():
        if 1 < len(mine) == len(tasks):
            names = ("tokens_per_second", "tokens_per_step", "speed_up")
            values = {name: _mean([row[name] for row in mine]) for name in names}
            rows_of_means.append({"task": MEAN, "contestant": contestant, **values})
    return rows_of_means


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return round(geometric_mean(known), 3) if len(known) == len(values) else None


def _by_contestant(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["contestant"], []).append(row)
    return groups


def speed_table(rows: Sequence[Row]) -> str:
    """Format speed-up over ``transformers`` greedy by task, with the slowest and fastest round in brackets."""
    rows = undisturbed(rows)
    named = [row | {"task": row["task"].replace("|", "\\|")} for row in [*rows, *means(rows)]]
    return pivot(named, "contestant", "task", _cell).replace("| contestant |", "| |", 1)


def _cell(row: Row) -> str:
    base = row["contestant"] == BASELINE or row["speed_up"] is None
    median = f"{_short(row['tokens_per_second'])} tokens/s" if base else f"{row['speed_up']:.2f}x"
    if row.get("rounds", 1) == 1:
        return median
    slow, fast = row["slowest"], row["fastest"]
    if base:
        return f"{median} ({_short(slow)} to {_short(fast)})"
    to = row["speed_up"] / row["tokens_per_second"]
    return f"{median} ({slow * to:.2f} to {fast * to:.2f})"


def equality_table(rows: Sequence[Row]) -> str:
    """Format each contestant's time to the first token, tokens per step and shares of equal outputs, over all tasks."""
    lines = [
        "| | first token, ms | tokens per step | texts equal to plain Forerun | to transformers |",
        "|---|---|---|---|---|",
    ]
    for contestant, mine in _by_contestant(rows).items():
        passes = _mean([row["tokens_per_step"] for row in mine])
        first = _mean([row.get("first_token_ms") for row in mine])
        cells = [
            "-" if first is None else f"{first:.0f}",
            "-" if passes is None else f"{passes:.2f}",
            *(_share(mine, name) for name in ("same_as_plain", "same_output")),
        ]
        lines.append(f"| {contestant} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _share(rows: Sequence[Row], name: str) -> str:
    shares = [row.get(name) for row in rows for _ in range(row["texts"])]
    known = [share for share in shares if share is not None]
    if not known:
        return "-"
    share = sum(known) / len(known)
    return "100 %" if min(known) == 1 else f"{floor(1000 * share) / 10:g} %"  # never rounded up to 100 %


def changed(rows: Sequence[Row]) -> list[str]:
    """List contestants of Forerun with an output that differs from plain Forerun's."""
    return [
        name
        for name, mine in _by_contestant(rows).items()
        if any(row["same_as_plain"] not in (None, 1) for row in mine)
    ]


@dataclass(frozen=True)
class BenchResult:
    """Rows of a bench (a subclass may define others), and its settings."""

    rows: Sequence[Row]
    settings: Row

    @property
    def json(self) -> Row:
        """Return the result as plain values."""
        return {
            "machine": machine(),
            "settings": self.settings,
            "rows": undisturbed(self.rows),
            "means": means(undisturbed(self.rows)),
            "notes": warnings(self.rows),
        }

    @property
    def markdown(self) -> str:
        """Return all tables, notes, machine and settings."""
        notes = [f"{note}\n" for note in warnings(self.rows)]
        return "\n".join([speed_table(self.rows), equality_table(self.rows), *notes, footer(self.settings)])

    def plot(self, path: Path) -> None:
        plot(self.rows, path, caption(self.settings))


def warnings(rows: Sequence[Row]) -> list[str]:
    """List what a reader of the figures must know."""
    notes = []
    if any(row["speed_up"] is None for row in undisturbed(rows)):
        most = max(row.get("others") or 0 for row in rows)
        notes.append(
            f"**The machine was busy**: other processes took up to {most:.0%} of its processors' time. Where that was "
            f"over {BUSY:.0%}, speeds have no ratios, which would mean nothing. Stop what else runs."
        )
    if any(row["rounds"] < SURE_ROUNDS for row in rows):
        notes.append(
            f"Fewer than {SURE_ROUNDS} rounds: ranks may be noise. Contestants whose brackets overlap are not ranked."
        )
    if any(row["same_output"] < 1 for row in rows):
        notes.append(
            "Rounding can change outputs from those of transformers where two tokens are nearly tied; "
            "`forerun audit` tells whether rounding explains them."
        )
    return notes


def write(result: BenchResult, folder: Path, name: str) -> list[Path]:
    """Write ``name.json``, ``name.md`` and, if matplotlib is installed, ``name.png`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"json": json.dumps(result.json, indent=1) + "\n", "md": result.markdown}
    paths = [replace_file(folder / f"{name}.{suffix}", text) for suffix, text in texts.items()]
    if find_spec("matplotlib") is not None and result.rows:
        paths.append(folder / f"{name}.png")
        result.plot(paths[-1])
    return paths


def pivot(rows: Sequence[Row], down: str, across: str, cell: Callable[[Row], str]) -> str:
    """Make a Markdown table with one row per value of ``down`` and one column per value of ``across``."""
    columns = list(dict.fromkeys(row[across] for row in rows))
    cells = {(row[down], row[across]): cell(row) for row in rows}
    lines = [f"| {down} | {' | '.join(map(shown, columns))} |", "|---|" + "---|" * len(columns)]
    for value in dict.fromkeys(row[down] for row in rows):
        row_cells = [cells.get((value, column), "-") for column in columns]
        lines.append(f"| {shown(value)} | {' | '.join(row_cells)} |")
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    """Format a value for a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def replace_file(path: Path, text: str) -> Path:
    """Write a file atomically."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text)
    return beside.replace(path)


@contextmanager
def figure(
    path: Path, rows: int = 1, columns: int = 1, *, title: str, note: str = "", **how: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield a new figure and its axis or array of axes; write it to ``path``, a ``.png`` or ``.svg`` file, at the end.
    ``note`` is in small print below: what was measured where and when; see ``machine.caption``."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "forerun"  # redrawing yields an identical file
    import matplotlib.pyplot as plt

    made, axes = plt.subplots(rows, columns, layout="constrained", **how)
    try:
        yield made, axes
        for axis in made.axes:
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_axisbelow(True)
        made.suptitle(title, fontsize=10)
        if note:
            made.supxlabel(note, fontsize=7, color="0.4", x=0.99, ha="right")
        made.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    finally:
        plt.close(made)


HATCHES = ("", "///", "...", "xx")
COLOURS = tuple(f"C{number}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9))
"""Matplotlib's, without the grey, which is for transformers."""


def bar_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a colour and a hatch for each name, so that up to 36 bars differ: greys for transformers, else colours."""
    theirs = [name for name in names if name.startswith("transformers")]
    others = [name for name in names if name not in theirs]
    looks = {name: ("0.6", HATCHES[i % len(HATCHES)]) for i, name in enumerate(theirs)}
    looks |= {
        name: (COLOURS[i % len(COLOURS)], HATCHES[i // len(COLOURS) % len(HATCHES)]) for i, name in enumerate(others)
    }
    return {name: {"color": looks[name][0], "hatch": looks[name][1], "edgecolor": "white", "lw": 0} for name in names}


def plot(rows: Sequence[Row], path: Path, note: str) -> None:
    """Draw bars by task: tokens per second with the slowest and the fastest round, and tokens per step."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    contestants = list(dict.fromkeys(row["contestant"] for row in rows))
    width, size = 0.86 / len(contestants), (4.2 + 1.6 * len(tasks), 6 + 0.12 * len(contestants))
    title = "Decoding speed by task: median, slowest and fastest round"
    with figure(path, 2, title=title, note=note, figsize=size, sharex=True) as (_, axes):
        for i, (contestant, style) in enumerate(bar_styles(contestants).items()):
            shift = (i - (len(contestants) - 1) / 2) * width
            places = {tasks.index(row["task"]) + shift: row for row in rows if row["contestant"] == contestant}
            bars_with_spread(axes[0], places, width * 0.92, contestant, style)
            axes[1].bar(list(places), [row["tokens_per_step"] or 0 for row in places.values()], width * 0.92, **style)
        axes[0].set_ylabel("tokens per second")
        axes[1].set_ylabel("tokens per step")
        axes[1].set_xticks(range(len(tasks)), tasks)
        axes[0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
        for axis in axes:
            axis.grid(axis="y", alpha=0.3)


def bars_with_spread(axis: Any, places: dict[float, Row], width: float, label: str, style: dict[str, Any]) -> None:
    """Draw the tokens per second of rows at their places, from the slowest to the fastest round."""
    rows = places.values()
    speeds = [row["tokens_per_second"] for row in rows]
    spread = [
        [row["tokens_per_second"] - row["slowest"] for row in rows],
        [row["fastest"] - row["tokens_per_second"] for row in rows],
    ]
    axis.bar(list(places), speeds, width, yerr=spread, label=label, error_kw={"lw": 0.8, "capsize": 2}, **style)
