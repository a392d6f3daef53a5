"""Summaries of runs after long prompts: one row of plain values per contestant, for tables, plots and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.long_context.long_bench import PLAIN, LongSeries, acceptance
from forerun.audit.divergence import first_difference
from forerun.bench.machine import Row
from forerun.core.stats import Stats


def summarise(series: Sequence[LongSeries], more: Mapping[str, Row] | None = None, **labels: Any) -> list[Row]:
    """One row per contestant; ``labels`` are added to every row, ``more`` to the named contestants' rows."""
    plain = next(one for one in series if one.contestant == PLAIN)
    return [labels | _row(one, plain) | (more or {}).get(one.contestant, {}) for one in series]


def _row(one: LongSeries, plain: LongSeries) -> Row:
    every = [stats for rounds in one.runs for run in rounds for stats in run.stats]
    middle = [stats.middle for stats in every if stats.middle is not None]
    ups, total, base = one.speed_ups(plain), one.total_seconds, plain.total_seconds
    return {
        "contestant": one.contestant,
        "tokens_per_second": round(one.tokens_per_second, 2),
        "speed_up": round(one.tokens_per_second / plain.tokens_per_second, 3),
        "slowest": round(min(ups), 3),
        "fastest": round(max(ups), 3),
        "acceptance": _rounded(acceptance(every)),
        "accepted_of_drafted": _rounded(_share(every)),
        "middle_acceptance": _rounded(acceptance(middle)),
        "tokens_per_step": round(sum(s.tokens for s in every) / sum(s.steps for s in every), 3),
        "seconds_per_token": round(_seconds_per_token(one), 6),
        "time_to_first_token": _rounded(one.first_seconds),
        "end_to_end_seconds": _rounded(total),
        "end_to_end_speed_up": None if total is None or base is None else round(base / total, 4),
        "same_output": _same(one, plain),
        "first_difference": _first_difference(one, plain),
    }


def _seconds_per_token(one: LongSeries) -> float:
    """Seconds per token of one row; rows of a batch get their tokens at the same time."""
    rows = len(one.runs[0][0].texts)
    return rows / one.tokens_per_second


def _share(stats: Sequence[Stats]) -> float | None:
    drafted = sum(sum(one.drafted) for one in stats)
    return sum(sum(one.accepted) for one in stats) / drafted if drafted else None


def _pairs(one: LongSeries, plain: LongSeries) -> list[tuple[list[int], list[int]]]:
    mine, theirs = ([text for rounds in series.runs for run in rounds for text in run.texts] for series in (one, plain))
    return list(zip(mine, theirs, strict=True))


def _same(one: LongSeries, plain: LongSeries) -> float:
    """Share of texts that are equal to plain's."""
    pairs = _pairs(one, plain)
    return sum(mine == theirs for mine, theirs in pairs) / len(pairs)


def _first_difference(one: LongSeries, plain: LongSeries) -> int | None:
    """Index of the earliest token at which a text differs from plain's."""
    found = [first_difference(theirs, mine) for mine, theirs in _pairs(one, plain)]
    return min((place for place in found if place is not None), default=None)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
