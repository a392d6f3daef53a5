"""Tables of ``python -m benchmarks server load``: medians over rounds, ratios to plain decoding, outputs that differ.

A turn has each contestant's results of a round, by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.reporting import plots
from benchmarks.reporting.plots import Frame
from benchmarks.reporting.study_report import Report, listing
from benchmarks.server.load_bench import Round, absent, compare
from benchmarks.server.load_figures import PARTS, STEP_PARTS, TIMES, known_median, medians
from benchmarks.server.servers import LLAMA, TRANSFORMERS
from forerun.bench.journal import Turn
from forerun.bench.machine import Row
from forerun.bench.report import pivot
from forerun.bench.rounds import PLAIN

HEAD = {"load": "load", "contestant": "server"}
RATES = HEAD | {
    "requests_per_second": "requests/s", "tokens_per_second": "tokens/s", "slowest": "slowest", "fastest": "fastest",
    "acceptance": "acceptance", "tokens_per_step": "tokens/step", "requests": "requests", "errors": "errors",
}  # fmt: skip
WHERE = HEAD | {part: f"{part}, %" for part in (*STEP_PARTS, "idle")} | {
    "decoding_per_second": "decoding alone, tokens/s", "decoding_of_plain": f"times {PLAIN}",
}  # fmt: skip
LONG = {
    "contestant": "server", "prompt": "prompt, tokens", "first": "its first token, s",
    "without_p50": "without: p50, ms", "without_p99": "p99", "with_p50": "during its prefill: p50, ms",
    "with_p99": "p99", "ratio": "p99, times", "errors": "errors",
}  # fmt: skip
OUTPUTS = {"contestant": "server", "with": "compared with", "compared": "outputs", "same": "equal"}
WHERE_NOTE = (
    "*read*: prefill; a pass over prompts and drafts is divided by tokens. *other*: between passes. *idle*: the server "
    "waited for requests, or the client for the last answer. Decoding alone is to propose, to score and to verify.\n"
)
TIMES_NOTE = (
    "*Between chunks*: between times at which new text came; a step with accepted drafts brings several tokens at "
    "once. *Per token*: of a request, from its first text to its end. Loads in *clients* are closed loops; those *per "
    "second* are Poisson arrivals.\n"
)
GREEDY_NOTE = f"`{TRANSFORMERS}` samples all requests as the first one, greedily. Only greedy outputs are compared.\n"


def fill(report: Report, turns: Sequence[Turn], rounds: Sequence[Round], plotted: bool) -> None:
    """Replace a report's parts by the turns so far; ``plotted`` draws plots, which needs a second."""
    load, long, refused = load_rows(turns, rounds), long_rows(turns), refusals(turns)
    if load:
        report.add("load", f"Load: tokens per second of all clients, and times those of {PLAIN}", load,
                   pivot(load, "load", "contestant", _cell), listing(load, RATES), *_remarks(turns, load))  # fmt: skip
        times = [row | {name: " / ".join(_ms(row[f"{name}_p{part}"]) for part in PARTS) for name in TIMES}
                 for row in load]  # fmt: skip
        heading = "Times of requests, in milliseconds: p50 and p99"
        report.add("times", heading, load, listing(times, HEAD | TIMES), TIMES_NOTE)
        if stated := [row for row in load if row["read"] is not None]:
            shares = [row | {part: 100 * row[part] for part in (*STEP_PARTS, "idle")} for row in stated]
            report.add("where", "Where the time of a load went", stated, listing(shares, WHERE), WHERE_NOTE)
        if plotted:
            groups, bars = plots.grouped(load, lambda row: str(row["load"]), "tokens_per_second")
            report.bars("tokens", Frame("Tokens per second of all clients", "load", "tokens per second"), groups, bars)
    if long or refused:
        names = [f"{name}_p{part}" for name in ("without", "with") for part in PARTS]
        shown = [row | {name: None if row[name] is None else 1000 * row[name] for name in names} for row in long]
        notes = [f"Not measured: {name}: {reason}.\n" for name, reason in refused.items()]
        table = [listing(shown, LONG)] if shown else []
        report.add("long", "Between chunks of other streams, during a long prefill", long, *table, *notes)
    if outputs := output_rows(turns, rounds):
        report.add("texts", "Outputs under load", outputs, listing(outputs, OUTPUTS), _verdict(outputs))


def load_rows(turns: Sequence[Turn], rounds: Sequence[Round]) -> list[Row]:
    """Return a row for each level and contestant that answered it."""
    found = []
    for level in rounds[0].levels:
        for name in _names(turns):
            measured = [turn for turn in turns if level.name in turn.get(name, {}).get("levels", {})]
            if measured:
                found.append(
                    {"load": level.name, "kind": level.kind, "value": level.value, "contestant": name}
                    | medians([turn[name]["levels"][level.name] for turn in measured])
                    | {"of_plain": _of_plain(measured, level.name, name, "tokens_per_second"),
                       "decoding_of_plain": _of_plain(measured, level.name, name, "decoding_per_second")}
                )  # fmt: skip
    return found


def long_rows(turns: Sequence[Turn]) -> list[Row]:
    """Return a row for each contestant that answered a long prompt."""
    answered = {name: [row for row in _longs(turns, name) if "error" not in row] for name in _names(turns)}
    return [
        {"contestant": name} | {each: known_median([row[each] for row in rows]) for each in rows[0]}
        for name, rows in answered.items()
        if rows
    ]


def output_rows(turns: Sequence[Turn], rounds: Sequence[Round]) -> list[Row]:
    """Count outputs that equal those of each request alone, and those of plain decoding; ``exact`` says that they must.
    Of other servers only greedy outputs are compared."""
    found = []
    for name in _names(turns):
        alone = [turn[name]["alone"] for turn in turns if "alone" in turn.get(name, {})]
        pairs = [_beside_plain(turn, one, name) for turn, one in zip(turns, rounds, strict=False)]
        others = {"each alone, without drafts": alone, PLAIN: [row for row in pairs if row and name != PLAIN]}
        for other, rows in others.items():
            if rows:
                total = {each: sum(row[each] for row in rows) for each in ("compared", "same")}
                exact = all(row["exact"] for row in rows)
                found.append({"contestant": name, "with": other, **total, "exact": exact})
    return found


def changed(rows: Sequence[Row]) -> list[str]:
    """List the contestants whose outputs differ though they must not."""
    found = []
    for row in (row for row in rows if row["exact"] and row["same"] < row["compared"]):
        count = f"{row['compared'] - row['same']} of {row['compared']}"
        found.append(f"{row['contestant']}: {count} outputs under load differ from {row['with']}")
    return found


def unanswered(turns: Sequence[Turn]) -> Iterator[str]:
    """Yield what Forerun's servers did not answer."""
    for name, counted in errors(turns).items():
        if _ours(name):
            yield f"{name}: {sum(counted.values())} requests under load were not answered"
    for name, reason in refusals(turns).items():
        if _ours(name):
            yield f"{name}: a long prompt was not answered: {reason}"


def errors(turns: Sequence[Turn]) -> dict[str, dict[str, int]]:
    found = {name: Counter[str]() for name in _names(turns)}
    for turn in turns:
        for name, results in turn.items():
            found[name].update(results.get("reasons", {}))
    return {name: dict(counted) for name, counted in found.items() if counted}


def refusals(turns: Sequence[Turn]) -> dict[str, str]:
    """Return each contestant's last reason for not answering a long prompt."""
    return {name: row["error"] for name in _names(turns) for row in _longs(turns, name) if "error" in row}


def _ours(name: str) -> bool:
    return name not in (TRANSFORMERS, LLAMA)


def _longs(turns: Sequence[Turn], name: str) -> list[Row]:
    return [turn[name]["long"] for turn in turns if "long" in turn.get(name, {})]


def _names(turns: Sequence[Turn]) -> list[str]:
    """Return the contestants, plain decoding first."""
    names = {name for turn in turns for name in turn}
    return sorted(names, key=lambda name: (name == TRANSFORMERS, name != PLAIN, name))


def _of_plain(turns: Sequence[Turn], level: str, name: str, figure: str) -> float | None:
    """Return the median over rounds of a figure's ratio to plain decoding's."""
    pairs = [(turn[name]["levels"][level], turn.get(PLAIN, {}).get("levels", {}).get(level)) for turn in turns]
    return known_median([a[figure] / b[figure] for a, b in pairs if b and a[figure] and b[figure]])


def _beside_plain(turn: Turn, one: Round, name: str) -> Row | None:
    mine, plain = turn.get(name, {}).get("texts"), turn.get(PLAIN, {}).get("texts")
    if not mine or not plain:
        return None
    greedy = {str(request.seed) for request in one.requests if request.temperature == 0}
    kept = mine if _ours(name) else {seed: digest for seed, digest in mine.items() if seed in greedy}
    exact = _ours(name) and all(turn[each].get("alone", {}).get("exact", False) for each in (name, PLAIN))
    return compare(kept, plain) | {"exact": exact}


def _cell(row: Row) -> str:
    times = "" if row["of_plain"] is None or row["contestant"] == PLAIN else f" ({row['of_plain']:.2f}x)"
    return f"{row['tokens_per_second']:.0f}{times}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def _remarks(turns: Sequence[Turn], load: Sequence[Row]) -> list[str]:
    absences = {name: why for turn in turns for name in turn if (why := absent(turn, name))}
    notes = [f"Not measured: {name}: {reason}.\n" for name, reason in absences.items()]
    for name, counted in errors(turns).items():
        notes += [f"Errors of {name}: {count} times {reason}.\n" for reason, count in counted.items()]
    notes += [GREEDY_NOTE] * any(row["contestant"] == TRANSFORMERS for row in load)
    most = max(row["client_share"] for row in load)
    return [*notes, f"The clients needed {100 * most:.0f} % of one processor at most.\n"]


def _verdict(outputs: Sequence[Row]) -> str:
    if found := changed(outputs):
        return "".join(f"**{one}.**\n" for one in found)
    if not any(row["exact"] for row in outputs):
        return "This server does not promise equal bits.\n"
    if not any(row["compared"] for row in outputs if row["exact"]):
        return "No output was compared.\n"
    return "Load has changed no output that must not change.\n"
