"""Crowding: short training rows that are as hard for attention as a long context.

In a softmax over 100,000 keys, irrelevant keys dilute what a head learned to find among 500. In a crowded row, each
irrelevant key counts ``times`` times: a bias of log(times) on its logit. Keys that a query has to find (``Source``),
and those near the query, count once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import torch

SHARE = 0.6  # share of crowded rows in a stage with crowding
NEAREST = 48


@dataclass(frozen=True)
class Source:
    """Queries `first_query <= i < last_query` have to find keys `first_key <= j < last_key`."""

    first_query: int
    last_query: int
    first_key: int
    last_key: int


def draw(rng: Random, length: int, most: float) -> tuple[float, int]:
    """Draw how often a distant key counts, up to `most`, and the distance from which a key is distant."""
    window = int(math.exp(rng.uniform(math.log(NEAREST), math.log(max(NEAREST + 1, length / 2)))))
    times = math.exp(rng.uniform(0.0, math.log(most))) if rng.random() < SHARE else 1.0
    return times, window


def bias(length: int, sources: Iterable[Source], times: float, window: int) -> torch.Tensor:
    """Return the bias on the attention logits, including the causal mask: [length, length], float32."""
    age = torch.arange(length)[:, None] - torch.arange(length)
    added = torch.where(age >= window, math.log(times), 0.0)
    for source in sources:
        added[source.first_query : source.last_query, source.first_key : source.last_key] = 0.0
    return added.masked_fill(age < 0, -math.inf)
