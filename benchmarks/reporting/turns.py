"""Interleaved rounds of anything that can be run; ``forerun.bench.rounds`` has those of contestants that decode."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from forerun.bench.rounds import rotated

K, T = TypeVar("K"), TypeVar("T")


def in_turns(
    works: Mapping[K, Callable[[], T]], rounds: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[K, list[T]]:
    """Run each work once a round, in an order that rotates from round to round; return each one's results by round."""
    found: dict[K, list[T]] = {name: [] for name in works}
    for turn in range(rounds):
        progress(turn, rounds)
        for name in rotated(list(works), turn):
            found[name].append(works[name]())
    return found
