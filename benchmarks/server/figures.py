"""What answers under a load come to: rates, percentiles of times, acceptance; and medians over rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from types import MappingProxyType

import numpy as np

from benchmarks.server.load_answers import Answer
from forerun.bench.machine import Row

TIMES = {"first": "time to first token", "gap": "between chunks", "each": "per token", "whole": "end to end"}
"""The times of an answer by their names in the figures, as tables have them."""
PARTS = (50, 99)
"""The percentiles."""
STEP_PARTS = ("read", "propose", "score", "verify", "other")
"""What the time of Forerun's steps goes to, by the names in its metrics."""
DECODING_PARTS = STEP_PARTS[1:4]
NOT_SAID: Mapping[str, float] = MappingProxyType({})


def percentile(values: Sequence[float], part: float) -> float | None:
    """The value that ``part`` % of them do not exceed, with straight lines between neighbours; None for no values."""
    return float(np.percentile(values, part)) if len(values) else None


def figures(
    answers: Sequence[Answer], seconds: float, own_seconds: float, step_seconds: Mapping[str, float] = NOT_SAID
) -> Row:
    """One load's figures as plain values; times in seconds.

    Args:
        answers: all of them, failed ones too, which count as errors alone.
        seconds: that the load took.
        own_seconds: of processor time that the clients took of them.
        step_seconds: by ``STEP_PARTS``, of a server that says what its time goes to.
    """
    good = [answer for answer in answers if answer.error is None]
    tokens = sum(answer.tokens for answer in good)
    return {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": tokens / seconds,
        "tokens": tokens,
        "client_share": own_seconds / seconds,
        **_times(good),
        **_speculation(good),
        **_parts(step_seconds, seconds, tokens),
    }


def reasons(answers: Sequence[Answer]) -> dict[str, int]:
    """How often each error came."""
    return dict(Counter(answer.error for answer in answers if answer.error is not None))


def _times(good: Sequence[Answer]) -> Row:
    found = {
        "first": [answer.first for answer in good],
        "gap": [gap for answer in good for gap in answer.gaps],
        "each": [answer.each for answer in good if answer.each is not None],
        "whole": [answer.seconds for answer in good],
    }
    return {f"{name}_p{part}": percentile(values, part) for name, values in found.items() for part in PARTS}


def _speculation(good: Sequence[Answer]) -> Row:
    """Over all answers whose server tells of drafts: the acceptance rate, and tokens per step."""
    told = [answer.usage["forerun"] for answer in good if "forerun" in answer.usage]
    steps, drafted, accepted = (sum(each[name] for each in told) for name in ("steps", "drafted", "accepted"))
    tokens = sum(answer.tokens for answer in good if "forerun" in answer.usage)
    return {
        "acceptance": accepted / drafted if drafted else None,
        "tokens_per_step": tokens / steps if steps else None,
    }


def _parts(step_seconds: Mapping[str, float], seconds: float, tokens: int) -> Row:
    """The parts of a load's seconds, and tokens for each second of decoding alone: without the reading of prompts, and
    what is done between steps."""
    if not step_seconds:
        return dict.fromkeys((*STEP_PARTS, "idle", "decoding_per_second"))
    decoding = sum(step_seconds[part] for part in DECODING_PARTS)
    shares = {part: step_seconds[part] / seconds for part in STEP_PARTS}
    return shares | {
        "idle": 1 - sum(shares.values()),
        "decoding_per_second": tokens / decoding if decoding else None,
    }


def medians(rounds: Sequence[Row]) -> Row:
    """The median of each figure over rounds, sums of requests and errors, and the spread of tokens a second."""
    speeds = [row["tokens_per_second"] for row in rounds]
    middle = {name: _median([row[name] for row in rounds]) for name in rounds[0]}
    counted = {name: sum(row[name] for row in rounds) for name in ("requests", "errors", "tokens")}
    return middle | counted | {"rounds": len(rounds), "slowest": min(speeds), "fastest": max(speeds)}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
