"""What is to be reached on a GPU, beside what was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from forerun.bench.machine import Row


class Goal(NamedTuple):
    """A goal of one part.

    Attributes:
        part: whose rows have the figure.
        what: the figure, in words.
        wanted: at least, or at most so much.
        most: whether it is a bound from above.
        worst: whether the worst of the rows counts, or the best.
        value: a row's figure; None if it has none.
    """

    part: str
    what: str
    wanted: float
    most: bool
    worst: bool
    value: Callable[[Row], float | None]


def _share(context: int) -> Callable[[Row], float | None]:
    return lambda row: row.get("share_of_bandwidth") if row["context"] == context else None


def _speed_up(rate: float | None = None) -> Callable[[Row], float | None]:
    return lambda row: row.get("speed_up") if row["contestant"] != "none" and row.get("rate") == rate else None


def _differs(row: Row) -> float | None:
    return None if "same_bits" not in row else float(not row["same_bits"])


GOALS = (
    Goal("bits", "differences", 0, True, True, _differs),
    Goal("kernels", "share of the bandwidth at 2,048 tokens", 0.75, False, True, _share(2048)),
    Goal("kernels", "share of the bandwidth at 122,000 tokens", 0.85, False, True, _share(122_000)),
    Goal("auto", "speed of auto by none's", 0.97, False, True,
         lambda row: row["of_none"] if row["drafter"] == "auto" else None),
    Goal("auto", "milliseconds a token of none", 1.2, True, True,
         lambda row: row["milliseconds"] if row["drafter"] == "none" else None),
    Goal("auto", "recordings after load", 0, True, True, lambda row: row["recorded_late"]),
    Goal("triforce", "speed-up at an acceptance of 0.9", 2.31, False, False, _speed_up(0.9)),
    Goal("offload", "speed-up at an acceptance of 0.9", 7.78, False, False, _speed_up()),
)  # fmt: skip


def reached(part: str, rows: Iterable[Row]) -> list[Row]:
    """The goals of a part of which something was measured, each beside its figure."""
    rows = list(rows)
    found = []
    for goal in (each for each in GOALS if each.part == part):
        values = [value for row in rows if (value := goal.value(row)) is not None]
        if values:
            figure = _figure(goal, values)
            met = figure <= goal.wanted if goal.most else figure >= goal.wanted
            bound = "at most" if goal.most else "at least"
            found.append({"goal": goal.what, "wanted": f"{bound} {goal.wanted:g}", "reached": figure, "met": met})
    return found


def _figure(goal: Goal, values: Sequence[float]) -> float:
    return max(values) if goal.most == goal.worst else min(values)
