"""What is to be reached on a GPU, beside what was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from forerun.bench.machine import Row
from forerun.bench.rounds import PLAIN

GOAL_COLUMNS = {"goal": "goal", "wanted": "wanted", "reached": "reached", "met": "met"}
NEVER_SLOWER = ("forerun auto", "forerun, wrong drafts")


def goals(parts: Mapping[str, Sequence[Row]]) -> list[Row]:
    """A row for each goal of which something was measured: the worst figure counts.

    Args:
        parts: each part's rows.
    """
    return [*_at_least(parts), *_none(parts)]


def _at_least(parts: Mapping[str, Sequence[Row]]) -> Iterator[Row]:
    for context, share in ((122_000, 0.75), (2048, 0.8)):
        found = [row["share_of_bandwidth"] for row in parts["decoding"] if row["context"] == context]
        yield from _goal(f"share of the bandwidth at {context:,} tokens", share, found)
    for part, wanted in (("triforce", 2.31), ("offload", 7.78)):
        found = [row["speed_up"] for row in parts[part] if row["contestant"] == "triforce"]
        yield from _goal(f"{part}: speed-up of TriForce at an acceptance of 0.9", wanted, found)
    for part in ("tasks", "tasks-bundled"):
        yield from _goal(
            f"{part}: speed of auto, and of drafts that never hit, by plain's", 0.97, _of_plain(parts[part])
        )


def _of_plain(rows: Sequence[Row]) -> list[float]:
    plain = {row["task"]: row["tokens_per_second"] for row in rows if row["contestant"] == PLAIN}
    return [row["tokens_per_second"] / plain[row["task"]] for row in rows if row["contestant"] in NEVER_SLOWER]


def _goal(goal: str, wanted: float, found: Sequence[float]) -> Iterator[Row]:
    if found:
        yield {"goal": goal, "wanted": f"at least {wanted}", "reached": min(found), "met": min(found) >= wanted}


def _none(parts: Mapping[str, Sequence[Row]]) -> Iterator[Row]:
    late = [row["recorded_late"] + row["compiled_late"] for row in parts["steps"]]
    if late:
        yield {"goal": "recordings and compilations after the first text", "wanted": "none", "reached": sum(late),
               "met": not sum(late)}  # fmt: skip
    for part, what in (("cells", "equal"), ("kernels", "same_bits")):
        wrong = [row for row in parts[part] if not row[what]]
        if parts[part]:
            yield {"goal": f"{part}: differences", "wanted": "none", "reached": len(wrong), "met": not wrong}
