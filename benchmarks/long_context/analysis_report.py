"""Tables and plots of ``python -m benchmarks long-context analyse``: TriForce's table 1 and its figures 3b and 6a."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reporting import plots
from benchmarks.reporting.plots import Frame, Line
from benchmarks.reporting.study_report import Report, listing, number_cell
from forerun.bench.machine import Row
from forerun.bench.report import pivot

ACCEPTANCE = "acceptance"
READ = (
    "What a drafted token reads of keys, values and indexes, in megabytes; and what a choice of chunks reads besides:\n"
)


def report_acceptance(report: Report, rows: Sequence[Row]) -> None:
    """Table 1."""
    named = [
        row | {"task": f"{row['task']}, T {row['temperature']:g} ({row['positions']:,} positions)"} for row in rows
    ]
    heading = f"Acceptance of sparse caches of {report.settings['cache_budget']:,} tokens"
    report.add(
        "acceptance", heading, rows, pivot(named, "task", "reader", number_cell(ACCEPTANCE)), READ, bytes_table(rows)
    )
    groups = list(dict.fromkeys(f"{row['task']}, T {row['temperature']:g}" for row in rows))
    found = [
        Line(name, [], [row[ACCEPTANCE] for row in rows if row["reader"] == name])
        for name in dict.fromkeys(row["reader"] for row in rows)
    ]
    title = f"{heading}, at {max(row['context'] for row in rows):,} tokens of context"
    report.bars("acceptance", Frame(title, "task and temperature", ACCEPTANCE, share=True), groups, found)


def bytes_table(rows: Sequence[Row]) -> str:
    """One line per reader, from its first row; its other rows read nearly the same number of bytes."""
    first = {row["reader"]: row for row in reversed(rows)}
    return listing(
        [
            {
                "reader": name,
                "total": megabytes(row["bytes_read"]),
                "layer": megabytes(row["bytes_read"] / len(row["bytes_read_by_layer"])),
                "index": megabytes(row["index_bytes_read"]),
                "choice": megabytes(row["choice_bytes_read"]),
            }
            for name, row in sorted(first.items(), key=lambda item: -int(item[1]["bytes_read"]))
        ],
        {"reader": "cache", "total": "in all", "layer": "a layer", "index": "of it the index", "choice": "a choice"},
    )


def megabytes(count: float) -> str:
    """Bytes as megabytes with three figures; a dash for none."""
    return f"{count / 1e6:#.3g}".rstrip(".") if count else "-"


def report_budgets(report: Report, rows: Sequence[Row]) -> None:
    """Figures 3b and 6a."""
    named = [row | {"line": f"{row['reader']}, T {row['temperature']:g}"} for row in rows]
    title = f"Acceptance by cache budget, and megabytes that a token reads, at {rows[0]['context']:,} tokens of context"
    report.add("budgets", title, rows, pivot(named, "line", "budget", _acceptance_and_bytes))
    frame = Frame(title, "budget, tokens", ACCEPTANCE, log=True, share=True)
    report.lines("budgets", frame, plots.by(named, "line", "budget", ACCEPTANCE))
    title = f"Acceptance by what a token reads, at {rows[0]['context']:,} tokens of context"
    frame = Frame(title, "keys, values and indexes, megabytes a token", ACCEPTANCE, log=True, share=True)
    found = [row | {"megabytes": float(f"{row['bytes_read'] / 1e6:.3g}")} for row in rows]
    report.lines("bytes", frame, plots.by(found, "reader", "megabytes", ACCEPTANCE))


def _acceptance_and_bytes(row: Row) -> str:
    return f"{row[ACCEPTANCE]:.3f} ({megabytes(row['bytes_read'])})"
