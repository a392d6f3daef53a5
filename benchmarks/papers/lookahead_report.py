"""Tables and plots of ``python -m benchmarks papers lookahead``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.sweeps import PRUNED_BYTES
from benchmarks.reporting import plots
from benchmarks.reporting.plots import Frame, Line
from benchmarks.reporting.study_report import Report, listing
from forerun.bench.machine import Row
from forerun.bench.report import means, pivot
from forerun.bench.report import plot as plot_tasks
from forerun.bench.rounds import BASELINE, PLAIN

Triple = tuple[str, str, str]
_SPEEDS: Triple = ("tokens_per_second", "slowest", "fastest")
_RANGE = ("slowest", "fastest")
SPEED = "tokens per second"
STEPS = "tokens per step"
MEMORY = "Table 5: peak memory of a text beyond the model's"
COLUMNS = {
    "task": "task",
    "contestant": "method",
    "tokens_per_second": "tokens/s",
    "slowest": "slowest",
    "fastest": "fastest",
    "speed_up": "speed-up",
    "tokens_per_pass": "tokens/step",
    "same_output": "same output",
}
METHODS = COLUMNS | {"same_output": "same as transformers", "same_as_plain": f"same as {PLAIN}"}


def report_methods(report: Report, rows: Sequence[Row]) -> None:
    """Table 2."""
    report.add(
        "methods",
        "Table 2: methods, as speed-up over transformers (tokens per step)",
        rows,
        pivot([row | {"method": row["contestant"]} for row in [*rows, *means(rows)]], "method", "task", _method_cell),
        listing(rows, METHODS),
        _equal_in_tasks(rows),
    )
    report.plot("methods", lambda path: plot_tasks(rows, path, report.note))


def report_updating(report: Report, rows: Sequence[Row]) -> None:
    """Table 3."""
    drafted = [row for row in rows if "form" in row]
    named = [row | {"updating": f"{row['form']}: {row['update']}"} for row in drafted]
    report.add(
        "updating",
        "Table 3: updating the trie, as tokens/s (tokens per step)",
        rows,
        "`default` is Forerun's own trie, `hierarchical` the paper's form with all of it scored. Pruned tries keep "
        f"{PRUNED_BYTES >> 10} KiB; the others have room for all they saw (the paper's *w/o pruning*).\n",
        pivot(named, "updating", "task", _speed_cell),
        equality(rows),
    )
    groups = list(dict.fromkeys(row["task"] for row in named))
    for form in dict.fromkeys(row["form"] for row in named):
        mine = [row for row in named if row["form"] == form]
        found = [_bars(update, [row for row in mine if row["update"] == update])
                 for update in dict.fromkeys(row["update"] for row in mine)]  # fmt: skip
        frame = Frame(f"Updating the trie: {form}", "task", SPEED)
        report.bars(f"updating-{form}", frame, groups, found)


def report_capacity(report: Report, rows: Sequence[Row]) -> None:
    """Table 4."""
    tries = [row | {"kib": row["capacity"] >> 10, "used": row["bytes"] >> 10} for row in rows if "capacity" in row]
    columns = {
        "kib": "capacity, KiB", "held": "tokens held", "used": "in use, KiB", "tokens_per_second": "tokens/s",
        "slowest": "slowest", "fastest": "fastest", "tokens_per_pass": "tokens/step", "retrieve_ms": "retrieve, ms",
        "update_ms": "update, ms",
    }  # fmt: skip
    report.add(
        "capacity",
        f"Table 4: the trie's capacity, filled with other texts first ({_task(rows)})",
        rows,
        listing(tries, columns),
        "Retrieving and updating are medians of a step.\n",
        equality(rows),
    )
    frame = Frame(f"Speed by the trie's capacity, {_task(rows)}", "KiB", SPEED, log=True)
    report.lines("capacity", frame, _beside(rows, [_spread("default", tries, "kib")]))


def report_memory(report: Report, rows: Sequence[Row], device: str) -> None:
    """Table 5."""
    plain = next(row for row in rows if row["decoding"] == 0)
    shown = [
        {"decoding": row["decoding"] or "none", "peak": f"{row['peak'] / 1e6:.1f}",
         "range": f"{row['least'] / 1e6:.1f} to {row['most'] / 1e6:.1f}",
         "more": f"{100 * (row['peak'] - plain['peak']) / (row['model'] + plain['peak']):+.2f} %"}
        for row in rows
    ]  # fmt: skip
    columns = {"decoding": "decoding length", "peak": "peak, MB", "range": "of all rounds",
               "more": "of model and peak without drafts"}  # fmt: skip
    how = (
        "allocated by torch on the device"
        if device == "cuda"
        else "resident memory of the process, as the kernel counts"
    )
    report.add(
        "memory",
        MEMORY,
        rows,
        f"Measured: {how}, at most during {plain['new']} tokens behind a prompt of {plain['prompt']:,}, beyond what "
        f"was in use before; the model's weights are {plain['model'] / 1e6:,.1f} MB. Form: hierarchical, all scored.\n",
        listing(shown, columns),
    )
    drafted = [row for row in rows if row["decoding"]]
    xs = [row["decoding"] for row in drafted]
    line = Line("hierarchical", xs, *_columns(drafted, ("peak", "least", "most"), 1e-6))
    title = "Peak memory of a text beyond the model's"
    frame = Frame(title, "decoding length, tokens", "MB", log=True)
    report.lines("memory", frame, [line, _level("without drafts", xs, plain["peak"] / 1e6)])


def report_accuracy(report: Report, rows: Sequence[Row], exactness: str) -> None:
    """Table 6."""
    shown = [
        row | {name: _of(row[name], row["questions"]) for name in ("right", "same_as_plain", "same_as_transformers")}
        for row in rows
    ]
    columns = {"task": "task", "contestant": "method", "right": "right answers",
               "same_as_plain": f"texts equal to {PLAIN}", "same_as_transformers": f"to {BASELINE}"}  # fmt: skip
    report.add(
        "accuracy",
        "Table 6: accuracy in bfloat16",
        rows,
        f"Exactness of this engine: {exactness}.\n",
        listing(shown, columns),
    )


def report_lengths(report: Report, rows: Sequence[Row]) -> None:
    """Figures 4 and 5."""
    drafted = [row for row in rows if "line" in row]
    report.add(
        "lengths",
        f"Figures 4 and 5: decoding and branch length, as tokens/s (tokens per step) ({_task(rows)})",
        rows,
        f"Without drafts: {_plain(rows):.1f} tokens/s.\n",
        pivot([row | {"method": row["line"]} for row in drafted], "method", "decoding", _speed_cell),
        equality(rows),
    )
    x, task = "decoding length, tokens", _task(rows)
    frame = Frame(f"Speed by decoding length, {task}", x, SPEED, log=True)
    found = _beside(rows, plots.by(drafted, "line", "decoding", "tokens_per_second", _RANGE))
    report.lines("lengths-speed", frame, found)
    frame = Frame(f"Effective decoding length, {task}", x, STEPS, log=True)
    report.lines("lengths-steps", frame, plots.by(drafted, "line", "decoding", "tokens_per_pass"))


def report_passes(report: Report, rows: Sequence[Row]) -> None:
    """Figures 1 and 6."""
    named = [
        row | {"line": f"{row['rows']} x {row['context']:,}", "width": 1 + row["drafts"],
               "rows x context": f"{row['rows']} x {row['context']:,}",
               "least_ratio": row["ratio_to_no_drafts"] * row["fastest"] / row["milliseconds"],
               "most_ratio": row["ratio_to_no_drafts"] * row["slowest"] / row["milliseconds"]}
        for row in rows
    ]  # fmt: skip
    report.add(
        "passes",
        "Figures 1 and 6: milliseconds of a pass (times one without drafts), by drafts of a row",
        rows,
        pivot(named, "rows x context", "drafts", lambda r: f"{r['milliseconds']:.3g} ({r['ratio_to_no_drafts']:.2f})"),
    )
    title = "A pass by rows x context"
    frame = Frame(title, "tokens of each row in the pass", "milliseconds", log=True)
    report.lines("passes", frame, plots.by(named, "line", "width", "milliseconds", _RANGE[::-1]))
    frame = Frame(title, "tokens of each row in the pass", "times a pass without drafts", log=True, reference=1)
    report.lines(
        "passes-ratio", frame, plots.by(named, "line", "width", "ratio_to_no_drafts", ("least_ratio", "most_ratio"))
    )


def report_warmup(report: Report, rows: Sequence[Row]) -> None:
    """Figure 7."""
    drafted = [row for row in rows if "line" in row]
    report.add(
        "warmup",
        f"Figure 7: answers that the trie knows, as tokens/s (tokens per step) ({_task(rows)})",
        rows,
        pivot([row | {"method": row["line"]} for row in drafted], "method", "warm", _speed_cell),
        equality(rows),
    )
    frame = Frame(f"Speed by answers known, {_task(rows)}", "answers to other prompts", SPEED)
    lines = [_spread(line, [row for row in drafted if row["line"] == line], "warm")
             for line in dict.fromkeys(row["line"] for row in drafted)]  # fmt: skip
    report.lines("warmup", frame, _beside(rows, lines))


def report_batches(report: Report, rows: Sequence[Row]) -> None:
    """Table 12."""
    named = [row | {"method": row["contestant"], "rows": row["batch"]} for row in rows]
    report.add(
        "batches",
        "Table 12: batches, as tokens/s of all rows (times transformers' padded batch)",
        rows,
        pivot(named, "method", "rows", lambda r: f"{r['tokens_per_second']:.1f} ({r['speed_up']:.2f}x)"),
        listing(rows, COLUMNS),
    )
    title = "Batches of ragged prompts, greedy"
    frame = Frame(title, "rows", "tokens per second of all rows", log=True)
    report.lines("batches", frame, plots.by(rows, "contestant", "batch", "tokens_per_second", _RANGE))


def equality(rows: Sequence[Row]) -> str:
    """A sentence that says whether drafts changed a text."""
    if all(row["same_output"] == 1 for row in rows):
        return "Every text equals that without drafts.\n"
    return f"{_parted(rows, 'same_output')} texts differ from that without drafts.\n"


def _equal_in_tasks(rows: Sequence[Row]) -> str:
    """Sentences on how many drafted texts differ from plain decoding's, and plain decoding's from transformers'."""
    forerun = [row for row in rows if row["contestant"].startswith("forerun")]
    theirs = [row for row in rows if row["contestant"] == PLAIN]
    return (
        f"Forerun's texts that differ from those of `{PLAIN}`: {_parted(forerun, 'same_as_plain')}. Texts of `{PLAIN}` "
        f"that differ from those of transformers: {_parted(theirs, 'same_output')}. Rounding can do that where two "
        "tokens are nearly as good; `forerun audit` tells whether it was that.\n"
    )


def _parted(rows: Sequence[Row], name: str) -> str:
    parted = sum(round((1 - row[name]) * row["texts"] * row["rounds"]) for row in rows)
    return f"{parted} of {sum(row['texts'] * row['rounds'] for row in rows)}"


def _method_cell(row: Row) -> str:
    if row["contestant"] == BASELINE:
        return f"{row['tokens_per_second']:.1f} tokens/s"
    return f"{row['speed_up']:.2f}x{_bracketed(row)}"


def _speed_cell(row: Row) -> str:
    return f"{row['tokens_per_second']:.1f}{_bracketed(row)}"


def _bracketed(row: Row) -> str:
    return "" if row["tokens_per_pass"] is None else f" ({row['tokens_per_pass']:.2f})"


def _of(share: float, count: int) -> str:
    return f"{round(share * count)} of {count}"


def _task(rows: Sequence[Row]) -> str:
    return str(rows[0]["task"])


def _bars(name: str, rows: Sequence[Row]) -> Line:
    return Line(name, [], *_columns(rows, _SPEEDS))


def _spread(name: str, rows: Sequence[Row], x: str) -> Line:
    return Line(name, [row[x] for row in rows], *_columns(rows, _SPEEDS))


def _plain(rows: Sequence[Row]) -> float:
    """Tokens per second without drafts."""
    return next(float(row["tokens_per_second"]) for row in rows if row["contestant"] == PLAIN)


def _beside(rows: Sequence[Row], found: Sequence[Line]) -> list[Line]:
    """The lines, and one for the level of plain decoding."""
    return [*found, _level("without drafts", sorted({x for line in found for x in line.xs}), _plain(rows))]


def _level(name: str, xs: Sequence[float], y: float) -> Line:
    return Line(name, xs, [y] * len(xs), dashed=True)


def _columns(rows: Sequence[Row], names: Triple, factor: float = 1) -> tuple[list[float], list[float], list[float]]:
    """The values, with their smallest and largest."""
    middle, low, high = ([factor * row[name] for row in rows] for name in names)
    return middle, low, high
