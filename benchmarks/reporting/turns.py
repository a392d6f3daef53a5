"""Interleaved rounds of anything that can be run, and journals of turns; ``forerun.bench.rounds`` has contestants."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from forerun.bench.journal import Journal, about
from forerun.bench.rounds import rotated

K = TypeVar("K")
T = TypeVar("T")
BENCHMARKS = Path(__file__).parents[1]
"""The benchmarks' sources: turns of a journal are comparable only if these are unchanged."""


def journal_of(options: Any, name: str, model: str, dtype: str, device: str, **more: Any) -> Journal:
    """Open a command's journal in ``--out``; with ``--resume``, raise ValueError if it has other sources or values."""
    return Journal(options.out / f"{name}-turns.jsonl", about(model, dtype, device, BENCHMARKS) | more, options.resume)


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
