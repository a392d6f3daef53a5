"""Figures of the answers under a load, and their medians over rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from benchmarks.server.client import Answer
from forerun.bench.machine import Row

TIMES = {"first": "time to first token", "gap": "between chunks", "each": "per token", "whole": "end to end"}
"""An answer's times, by their names in the figures, with their headings."""
PARTS = (50, 99)  # the percentiles
STEP_PARTS = ("read", "propose", "score", "verify", "other")
"""Parts of the time of Forerun's steps, by their names in its metrics."""


def percentile(values: Sequence[float], part: float) -> float | None:
    return float(np.percentile(values, part)) if len(values) else None


def figures(
    answers: Sequence[Answer], seconds: float, own_seconds: float, step_seconds: Mapping[str, float] | None = None
) -> Row:
    """Return one load's figures; times in seconds. Failed answers count as errors alone.

    Args:
        own_seconds: processor time of the clients.
        step_seconds: by ``STEP_PARTS``; empty for servers that do not state them.
    """
    good = [answer for answer in answers if answer.error is None]
    tokens, ours = sum(answer.tokens for answer in good), [answer for answer in good if "forerun" in answer.usage]
    times = {
        "first": [answer.first for answer in good],
        "gap": [gap for answer in good for gap in answer.gaps],
        "each": [answer.each for answer in good if answer.each is not None],
        "whole": [answer.seconds for answer in good],
    }
    steps, drafted, accepted = (
        sum(answer.usage["forerun"][name] for answer in ours) for name in ("steps", "drafted", "accepted")
    )
    return {
        "requests": len(answers), "errors": len(answers) - len(good), "seconds": seconds,
        "requests_per_second": len(good) / seconds, "tokens_per_second": tokens / seconds, "tokens": tokens,
        "client_share": own_seconds / seconds,
        **{f"{name}_p{part}": percentile(values, part) for name, values in times.items() for part in PARTS},
        "acceptance": accepted / drafted if drafted else None,
        "tokens_per_step": sum(answer.tokens for answer in ours) / steps if steps else None,
        **_parts(step_seconds or {}, seconds, tokens),
    }  # fmt: skip


def reasons(answers: Sequence[Answer]) -> dict[str, int]:
    return dict(Counter(answer.error for answer in answers if answer.error is not None))


def _parts(step_seconds: Mapping[str, float], seconds: float, tokens: int) -> Row:
    """Return the parts of a load's seconds, and tokens per second of proposing, scoring and verifying alone."""
    if not step_seconds:
        return dict.fromkeys((*STEP_PARTS, "idle", "decoding_per_second"))
    decoding = sum(step_seconds[part] for part in STEP_PARTS[1:4])
    shares = {part: step_seconds[part] / seconds for part in STEP_PARTS}
    return shares | {"idle": 1 - sum(shares.values()), "decoding_per_second": tokens / decoding if decoding else None}


def medians(rounds: Sequence[Row]) -> Row:
    """Return each figure's median over rounds, sums of counts, and the spread of tokens per second."""
    speeds = [row["tokens_per_second"] for row in rounds]
    middle = {name: known_median([row[name] for row in rounds]) for name in rounds[0]}
    counted = {name: sum(row[name] for row in rounds) for name in ("requests", "errors", "tokens")}
    return middle | counted | {"rounds": len(rounds), "slowest": min(speeds), "fastest": max(speeds)}


def known_median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
