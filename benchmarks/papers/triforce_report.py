"""Tables and plots of ``python -m benchmarks papers triforce``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from benchmarks.long_context.long_bench import PLAIN
from benchmarks.long_context.pass_costs import Costs
from benchmarks.reporting import plots
from benchmarks.reporting.plots import Frame, Line
from benchmarks.reporting.study_report import Report, listing, speed_cell
from forerun.bench.machine import Row
from forerun.bench.report import pivot

COLUMNS = {
    "context": "context",
    "contestant": "drafter",
    "tokens_per_second": "tokens/s",
    "speed_up": "speed-up",
    "slowest": "slowest",
    "fastest": "fastest",
    "acceptance": "acceptance",
    "megabytes_read": "MB a token reads of its cache",
    "tokens_per_step": "tokens/step",
    "time_to_first_token": "first token, s",
    "end_to_end_seconds": "end to end, s",
    "end_to_end_speed_up": "end-to-end speed-up",
    "same_output": "same output",
}
LIMIT, FREE = "TriForce's limit by measured costs", "limit if drafts cost nothing"


SPEED_UP = "speed-up over plain autoregression"


def report_temperatures(report: Report, rows: Sequence[Row]) -> None:
    """Table 2."""
    context = rows[0]["context"]
    report.add(
        "temperatures",
        f"Speed-up, and acceptance in brackets, by temperature at {context:,} tokens",
        rows,
        pivot(rows, "contestant", "temperature", speed_cell),
        listing(rows, {"temperature": "temperature", **COLUMNS}),
        equality(rows),
    )
    frame = Frame(f"Speed-up of decoding at {context:,} tokens", "temperature", SPEED_UP, reference=1)
    report.lines("temperatures", frame, plots.with_spread(drafted(rows), "contestant", "temperature"))
    frame = Frame(f"Acceptance at {context:,} tokens", "temperature", "accepted per tested draft", share=True)
    report.lines("acceptance", frame, plots.by(drafted(rows), "contestant", "temperature", "acceptance"))


def report_budgets(report: Report, rows: Sequence[Row]) -> None:
    """Figure 6a."""
    context = rows[0]["context"]
    report.add(
        "budgets",
        f"Speed-up, and acceptance in brackets, by cache budget at {context:,} tokens, greedy",
        rows,
        pivot(drafted(rows), "contestant", "budget", speed_cell),
        listing(rows, {"budget": "budget", **COLUMNS}),
        equality(rows),
    )
    title = f"Speed-up of decoding at {context:,} tokens, greedy"
    frame = Frame(title, "cache budget, tokens", SPEED_UP, log=True, reference=1)
    report.lines("budgets", frame, plots.with_spread(drafted(rows), "contestant", "budget"))


def report_contexts(report: Report, rows: Sequence[Row], limits: Sequence[Row], costs: Mapping[int, Costs]) -> None:
    """Figure 5."""
    by_context = {row["context"]: row for row in limits}
    joined = sorted((row | by_context.get(row["context"], {}) for row in rows), key=lambda row: int(row["context"]))
    priced = [{"context": context, **asdict(found)} for context, found in costs.items()]
    report.add(
        "contexts",
        "Speed-up by context length, greedy",
        joined,
        pivot(joined, "contestant", "context", speed_cell),
        listing(limits, {"context": "context", "limit": LIMIT, "free_limit": FREE}) if limits else "",
        listing(joined, COLUMNS),
        equality(rows),
    )
    report.add("costs", "Seconds of a pass, by tokens in it", priced, cost_table(costs))
    found = plots.with_spread(drafted(rows), "contestant", "context")
    if limits:
        rising = sorted(limits, key=lambda row: row["context"])
        found.append(Line(LIMIT, [row["context"] for row in rising], [row["limit"] for row in rising], dashed=True))
    report.lines(
        "contexts", Frame("Speed-up of decoding, greedy", "context, tokens", SPEED_UP, log=True, reference=1), found
    )


def cost_table(costs: Mapping[int, Costs]) -> str:
    """Milliseconds of each kind of pass, by context."""
    rows = [
        {"context": context, "pass": f"{level}, {tokens} token{'s' * (tokens > 1)}", "ms": 1000 * seconds}
        for context, found in sorted(costs.items())
        for level, by_tokens in (("full cache", found.full), ("sparse cache", found.middle),
                                 ("small model", {1: found.small} if found.small is not None else {}))
        for tokens, seconds in by_tokens.items()
    ]  # fmt: skip
    return "Milliseconds:\n\n" + pivot(rows, "pass", "context", lambda row: f"{row['ms']:.2f}")


def report_batches(report: Report, rows: Sequence[Row]) -> None:
    """Table 4."""
    named = [
        row | {"setting": f"{row['batch']} x {row['context']:,}, T {row['temperature']:g}",
               "drafter, budget": f"{row['contestant']}, {row['budget']:,}"}
        for row in drafted(rows)
    ]  # fmt: skip
    report.add(
        "batches",
        "Batches: rows x the longest row's context, and temperature; drafter and cache budget of a row",
        rows,
        pivot(named, "drafter, budget", "setting", speed_cell),
        listing(rows, {"batch": "rows", "budget": "budget", "temperature": "temperature", **COLUMNS}),
        equality(rows),
    )
    groups, found = plots.grouped(named, lambda row: str(row["setting"]), "speed_up", "drafter, budget")
    frame = Frame("Speed-up of batches", "rows x context, temperature", SPEED_UP, reference=1)
    report.bars("batches", frame, groups, found)


def report_needles(report: Report, rows: Sequence[Row]) -> None:
    """Figure 1, right."""
    columns = {"contestant": "generated by", "lossless": "lossless", "accuracy": "accuracy", "needles": "needles",
               "context": "context", "seconds_per_token": "seconds per token"}  # fmt: skip
    report.add("needles", "Needles found, by what generates", rows, listing(rows, columns))
    places = {row["contestant"]: (1000 * row["seconds_per_token"], row["accuracy"]) for row in rows}
    lossless = [row["contestant"] for row in rows if row["lossless"]]
    title = f"Needles at {rows[0]['context']:,} tokens: eviction alone is lossy (crosses), drafting lossless (dots)"
    frame = Frame(title, "milliseconds per token", "share of needles found", share=True)
    report.plot("needles", lambda path: plots.points(path, frame, places, lossless))


def equality(rows: Sequence[Row]) -> str:
    """A sentence that says whether drafting changed a text."""
    parted = sum(row["same_output"] < 1 for row in rows)
    if not parted:
        return "Every text equals that of plain autoregression.\n"
    return (
        f"In {parted} of {len(rows)} rows a text differs from that of plain autoregression. Rounding does that where "
        "two tokens are nearly as good; `forerun audit` tells whether it was that.\n"
    )


def drafted(rows: Sequence[Row]) -> list[Row]:
    """The rows without plain autoregression."""
    return [row for row in rows if row["contestant"] != PLAIN]
