"""A few cells of a large matrix in which every two values that can meet do meet."""

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Sequence

Cell = tuple[Hashable, ...]
Pair = tuple[int, Hashable, int, Hashable]
"""Two factors by their place in a cell, each with its value."""


def pairs(cell: Cell, apart: Collection[tuple[int, int]] = ()) -> set[Pair]:
    """Which values meet in a cell, but for those of factors that need not."""
    meeting = itertools.combinations(range(len(cell)), 2)
    return {(i, cell[i], j, cell[j]) for i, j in meeting if (i, j) not in apart}


def pairwise(cells: Iterable[Cell], apart: Collection[tuple[int, int]] = ()) -> list[Cell]:
    """Of the cells that there are, so many that whatever two values meet in one of them meet in one that is chosen.

    Greedy, in one go over the cells for each number of pairs that a cell may bring: those that bring the most come
    first. The same cells in the same order give the same choice.

    Args:
        cells: each with as many values as the others, and none twice.
        apart: factors, two by two and the first one first, whose values need not meet.
    """
    bits: dict[Pair, int] = {}
    waiting = []
    for cell in spread(list(cells)):
        brings = sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs(cell, apart))
        waiting.append((cell, brings))
    missing, chosen = (1 << len(bits)) - 1, []
    for most in range(len(pairs(waiting[0][0], apart)), 0, -1):
        left = []
        for cell, brings in waiting:
            new = (missing & brings).bit_count()
            if new == most:
                chosen.append(cell)
                missing &= ~brings
            elif new:
                left.append((cell, brings))
        waiting = left
    return chosen


def spread(cells: Sequence[Cell]) -> list[Cell]:
    """The cells in an order in which neighbours share few values: in steps of a number that has no common divisor with
    how many there are, near the golden section of it."""
    count = len(cells)
    step = next((s for s in range(int(count * 0.618) or 1, count) if math.gcd(s, count) == 1), 1)
    return [cells[i * step % count] for i in range(count)]
