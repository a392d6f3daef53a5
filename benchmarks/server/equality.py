"""Whether load changed a text: against the text alone without drafts, and against another server's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.server.load_requests import Ask

Row = dict[str, Any]
Texts = Mapping[str, str | None]
"""What names each text (``Answer.digest``), by its request's seed."""


def sample(asks: Sequence[Ask], count: int) -> list[Ask]:
    """So many greedy requests, from all over the load."""
    greedy = [ask for ask in asks if ask.temperature == 0]
    return greedy[:: max(1, len(greedy) // max(count, 1))][:count]


def compare(texts: Texts, others: Texts) -> Row:
    """How many texts are in both, and how many of them are the same; texts that are not whole are in neither."""
    both = [seed for seed, digest in texts.items() if digest is not None and others.get(seed) is not None]
    return {"compared": len(both), "same": sum(texts[seed] == others[seed] for seed in both)}
