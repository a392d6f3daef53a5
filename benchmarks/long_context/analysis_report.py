"""Tables and plots of ``python -m benchmarks long-context analyse``: TriForce's table 1 and its figures 2a, 3 and 6."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.long_context.rows import Row
from benchmarks.reporting import plots
from benchmarks.reporting.plots import Frame, Line
from benchmarks.reporting.tables import Report, listing, number_cell
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
    report.plot(
        "acceptance",
        lambda path: plots.bars(path, Frame(title, "task and temperature", ACCEPTANCE, share=True), groups, found),
    )


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


def report_divergence(report: Report, rows: Sequence[Row]) -> None:
    """Figure 2a."""
    named = [row | {"line": f"{row['reader']}, T {row['temperature']:g}"} for row in rows]
    report.add(
        "divergence", "Natural divergence by context length", rows,
        pivot(named, "line", "context", number_cell("divergence")),
    )  # fmt: skip
    frame = Frame("Divergence from the full cache: 1 - sum min(p, q)", "context, tokens", "divergence", log=True)
    report.plot("divergence", lambda path: plots.lines(path, frame, plots.by(named, "line", "context", "divergence")))


def report_recovery(report: Report, top: Sequence[Row], local: Sequence[Row], context: int, budget: int) -> None:
    """Figures 3a and 3c."""
    layered = by_layer(top)
    report.add(
        "recovered", f"Attention that the k keys with most of it draw, at {context:,} tokens; mean over heads", top,
        pivot(layered, "layer", "k", number_cell("recovered")),
    )  # fmt: skip
    report.add(
        "locality", f"Attention that the {budget:,} keys chosen at the prompt's end draw, by tokens generated", local,
        pivot(thinned(local), "layer", "token", number_cell("recovered")),
    )  # fmt: skip
    bands = [with_heads(line, top) for line in _layers(layered, "k")]
    frame = Frame(
        f"Attention recovered by the top k of {context:,} keys",
        "k, tokens; the band spans a layer's heads",
        "share of attention",
        log=True,
        share=True,
    )
    report.plot("recovered", lambda path: plots.lines(path, frame, bands))
    frame_of_time = Frame(
        f"Attention drawn by the {budget:,} keys that mattered most at the prompt's end", "tokens generated since",
        "share of attention to the prompt", share=True,
    )  # fmt: skip
    report.plot("locality", lambda path: plots.lines(path, frame_of_time, _layers(local, "token")))


def by_layer(rows: Sequence[Row]) -> list[Row]:
    """The attention that the top k keys get, averaged over a layer's heads."""
    groups: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        groups.setdefault((row["layer"], row["k"]), []).append(row["recovered"])
    return [{"layer": layer, "k": k, "recovered": sum(found) / len(found)} for (layer, k), found in groups.items()]


def with_heads(line: Line, rows: Sequence[Row]) -> Line:
    """A layer's line with the smallest and largest value of its heads as spread."""
    heads = [
        [row["recovered"] for row in rows if f"layer {row['layer']}" == line.name and row["k"] == k] for k in line.xs
    ]
    return replace(line, low=[min(each) for each in heads], high=[max(each) for each in heads])


def thinned(rows: Sequence[Row]) -> list[Row]:
    """Eight or nine evenly spaced places of the text."""
    step = max(1, max(row["token"] for row in rows) // 8)
    return [row for row in rows if row["token"] % step == 0]


def _layers(rows: Sequence[Row], x: str) -> list[Line]:
    return plots.by([row | {"line": f"layer {row['layer']}"} for row in rows], "line", x, "recovered")


def report_budgets(report: Report, rows: Sequence[Row]) -> None:
    """Figures 3b and 6a."""
    _report_sweep(report, "budgets", "budget", "Acceptance by cache budget, and megabytes that a token reads", rows)
    title = report.titled(f"Acceptance by what a token reads, at {rows[0]['context']:,} tokens of context")
    frame = Frame(title, "keys, values and indexes, megabytes a token", ACCEPTANCE, log=True, share=True)
    found = [row | {"megabytes": float(f"{row['bytes_read'] / 1e6:.3g}")} for row in rows]
    report.plot("bytes", lambda path: plots.lines(path, frame, plots.by(found, "reader", "megabytes", ACCEPTANCE)))


def report_chunks(report: Report, rows: Sequence[Row]) -> None:
    """Figure 6b."""
    title = f"Acceptance by chunk size, and megabytes that a token reads, budget {report.settings['cache_budget']:,}"
    _report_sweep(report, "chunks", "chunk", title, rows)


def _report_sweep(report: Report, name: str, x: str, title: str, rows: Sequence[Row]) -> None:
    named = [row | {"line": f"{row['reader']}, T {row['temperature']:g}"} for row in rows]
    title = f"{title}, at {rows[0]['context']:,} tokens of context"
    report.add(name, title, rows, pivot(named, "line", x, _acceptance_and_bytes))
    frame = Frame(title, f"{x}, tokens", ACCEPTANCE, log=True, share=True)
    report.plot(name, lambda path: plots.lines(path, frame, plots.by(named, "line", x, ACCEPTANCE)))


def _acceptance_and_bytes(row: Row) -> str:
    return f"{row[ACCEPTANCE]:.3f} ({megabytes(row['bytes_read'])})"


def report_trees(report: Report, rows: Sequence[Row]) -> None:
    """Figure 6c."""
    columns = {"shape": "shape", "nodes": "nodes", "depth": "depth", "tokens_per_step": "tokens per step"}
    report.add(
        "trees", "Tokens per step of the target, by draft tree over its sparse cache, greedy", rows,
        pivot(rows, "shape", "nodes", number_cell("tokens_per_step")), listing(rows, columns),
    )  # fmt: skip
    frame = Frame("Draft trees over the sparse cache, greedy", "nodes of a tree", "tokens per step", log=True)
    report.plot("trees", lambda path: plots.lines(path, frame, plots.by(rows, "shape", "nodes", "tokens_per_step")))
