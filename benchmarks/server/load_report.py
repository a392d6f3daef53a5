"""Tables of ``python -m benchmarks server load``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reporting import plots
from benchmarks.reporting.plots import Frame
from benchmarks.reporting.study_report import Report, listing
from benchmarks.server import load_rows as rows
from benchmarks.server.figures import PARTS, STEP_PARTS, TIMES
from benchmarks.server.load_bench import Round
from benchmarks.server.load_plot import drawer
from benchmarks.server.servers import TRANSFORMERS
from forerun.bench.journal import Turn
from forerun.bench.machine import Row
from forerun.bench.report import pivot
from forerun.bench.rounds import PLAIN

HEAD = {"load": "load", "contestant": "server"}
RATES = HEAD | {
    "requests_per_second": "requests/s",
    "tokens_per_second": "tokens/s",
    "slowest": "slowest",
    "fastest": "fastest",
    "acceptance": "acceptance",
    "tokens_per_step": "tokens/step",
    "requests": "requests",
    "errors": "errors",
}
WHERE = HEAD | {part: f"{part}, %" for part in (*STEP_PARTS, "idle")} | {
    "decoding_per_second": "decoding alone, tokens/s",
    "decoding_of_plain": f"times {PLAIN}",
}  # fmt: skip
LONG = {
    "contestant": "server",
    "prompt": "prompt, tokens",
    "first": "its first token, s",
    "without_p50": "without: p50, ms",
    "without_p99": "p99",
    "with_p50": "while it is read: p50, ms",
    "with_p99": "p99",
    "ratio": "p99, times",
    "errors": "errors",
}
TEXTS = {"contestant": "server", "with": "compared with", "compared": "texts", "same": "the same"}
DIVIDED = (
    "*read*: prompts; a pass over prompts and drafts is divided by tokens. *other*: between passes. *idle*: the server "
    "waited for requests, or the client for the last answer. Decoding alone is to propose, to score and to verify.\n"
)
GREEDY_ONLY = (
    f"`{TRANSFORMERS}` samples all texts as the first request says, which is greedy: it answers requests with a "
    "temperature greedily. Only texts that were asked for greedily are compared with it.\n"
)


def fill(report: Report, turns: Sequence[Turn], rounds: Sequence[Round], plotted: bool) -> None:
    """Put all that the turns have so far into a report, instead of what it had.

    Args:
        report: is filled.
        turns: of all contestants.
        rounds: what was asked in them.
        plotted: draw plots as well, which takes a second or two.
    """
    load = rows.load_rows(turns, rounds)
    if load:
        report.add("load", f"Load: tokens per second of all clients, and times those of {PLAIN}", load,
                   pivot(load, "load", "contestant", _cell), listing(load, RATES), *_remarks(turns, load))  # fmt: skip
        report.add("times", "Times of requests, in milliseconds: p50 and p99", load, _times(load), _meaning())
        if told := [row for row in load if row["read"] is not None]:
            shown = [row | {part: 100 * row[part] for part in (*STEP_PARTS, "idle")} for row in told]
            report.add("where", "Where the time of a load went", told, listing(shown, WHERE), DIVIDED)
        if plotted:
            _plots(report, load)
    long, refused = rows.long_rows(turns), rows.refusals(turns)
    if long or refused:
        shown = [_milliseconds(row, ("without", "with")) for row in long]
        said = [f"Not measured: {name}: {reason}.\n" for name, reason in refused.items()]
        table = [_listing(shown)] if shown else []
        report.add("long", "Between chunks of other streams, while a long prompt is read", long, *table, *said)
    if texts := rows.text_rows(turns, rounds):
        report.add("texts", "Texts under load", texts, listing(texts, TEXTS), _verdict(texts))


def _listing(shown: Sequence[Row]) -> str:
    return listing(shown, LONG)


def _cell(row: Row) -> str:
    times = "" if row["of_plain"] is None or row["contestant"] == PLAIN else f" ({row['of_plain']:.2f}x)"
    return f"{row['tokens_per_second']:.0f}{times}"


def _times(load: Sequence[Row]) -> str:
    columns = HEAD | TIMES
    shown = [
        row | {name: " / ".join(_shown(row[f"{name}_p{part}"]) for part in PARTS) for name in TIMES} for row in load
    ]
    return listing(shown, columns)


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def _milliseconds(row: Row, names: Sequence[str]) -> Row:
    values = {f"{name}_p{part}": row[f"{name}_p{part}"] for name in names for part in PARTS}
    return row | {name: None if value is None else 1000 * value for name, value in values.items()}


def _meaning() -> str:
    return (
        "*Between chunks*: between moments at which new text came; a step with accepted drafts brings several tokens "
        "at once. *Per token*: of a request, from its first text to its end, by its tokens but one. Loads in *clients* "
        "are closed loops; those *per second* are Poisson arrivals.\n"
    )


def _remarks(turns: Sequence[Turn], load: Sequence[Row]) -> list[str]:
    """What a reader of the figures must know."""
    said = [f"Not measured: {name}: {reason}.\n" for name, reason in rows.absences(turns).items()]
    for name, counted in rows.errors(turns).items():
        said += [f"Errors of {name}: {count} times {reason}.\n" for reason, count in counted.items()]
    if any(row["contestant"] == TRANSFORMERS for row in load):
        said.append(GREEDY_ONLY)
    most = max(row["client_share"] for row in load)
    return [*said, f"The clients took {100 * most:.0f} % of one processor at most.\n"]


def _verdict(texts: Sequence[Row]) -> str:
    found = rows.wrong(texts)
    if found:
        return "".join(f"**{one}.**\n" for one in found)
    if not any(row["exact"] for row in texts):
        return "This server does not promise texts bit for bit.\n"
    if not any(row["compared"] for row in texts if row["exact"]):
        return "No text was compared.\n"
    return "Load has changed no text that must not change.\n"


def _plots(report: Report, load: Sequence[Row]) -> None:
    kept = list(load)
    for kind, title in (
        ("clients", "Clients that wait for their answers; at each point: how many"),
        ("rate", "Poisson arrivals; at each point: per second"),
    ):
        mine = [row for row in kept if row["kind"] == kind]
        if mine:
            report.plot(kind, drawer(mine, title, report.note))
    groups, lines = plots.grouped(kept, lambda row: str(row["load"]), "tokens_per_second")
    report.bars("tokens", Frame("Tokens per second of all clients", "load", "tokens per second"), groups, lines)
