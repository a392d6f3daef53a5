"""Collect proposals from a cheap source, and from a costly one where the first is not confident."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome
from forerun.decoding.row import Row, RowState
from forerun.decoding.source import Limit, Source
from forerun.tensor_parallel.channel import ParallelError

log = logging.getLogger(__name__)

TINY = 1e-12


class Failed(RowState):
    """Marks a source that failed for a row; holds the source's state until the row ends."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def close(self) -> None:
        if isinstance(self._state, RowState):
            self._state.close()


def works(source: Source, row: Row) -> bool:
    """Return whether a source has not failed for a row."""
    return not isinstance(row.states.get(source), Failed)


def _drop(source: Source, row: Row, error: Exception) -> None:
    log.warning(
        "%s failed for request %d and drafts nothing more for it: %r", type(source).__name__, row.request.id, error
    )
    row.states[source] = Failed(row.states.get(source))


def propose(source: Source, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
    """Return one tree per row; raise TypeError if the source returns anything but a ``DraftTree`` for each. If it
    raises, retry row by row, and drop it for the rows where it raises again."""
    trees = [DraftTree.empty()] * len(rows)
    live = [number for number, row in enumerate(rows) if works(source, row)]
    if live:
        found = _attempt(source, [rows[number] for number in live], [limits[number] for number in live])
        for number, tree in zip(live, found, strict=True):
            trees[number] = tree
    return trees


def _attempt(source: Source, rows: Sequence[Row], limits: Sequence[Limit]) -> Sequence[DraftTree]:
    try:
        trees: Any = source.propose(rows, limits)
    except ParallelError:
        raise
    except Exception as error:
        if len(rows) == 1:
            _drop(source, rows[0], error)
            return [DraftTree.empty()]
        return [_attempt(source, [row], [limit])[0] for row, limit in zip(rows, limits, strict=True)]
    count = len(rows)
    if not isinstance(trees, Sequence) or len(trees) != count or not all(isinstance(each, DraftTree) for each in trees):
        name = type(source).__name__
        raise TypeError(f"{name}.propose returned {trees!r}; it must be one DraftTree for each of {count} rows")
    return trees


def promises(source: Source, rows: Sequence[Row]) -> Sequence[int | None]:
    """Return ``Source.promise`` of all rows; 0 where it failed."""
    if not all(map(partial(works, source), rows)):
        return [promises(source, [row])[0] if works(source, row) else 0 for row in rows]
    try:
        return source.promise(rows)
    except ParallelError:
        raise
    except Exception as error:
        for row in rows:
            _drop(source, row, error)
        return [0] * len(rows)


def read(source: Source, row: Row, tokens: int) -> bool:
    """Let a source process a piece of a row's prompt; return whether it is done."""
    if not works(source, row):
        return True
    try:
        return source.read(row, tokens)
    except ParallelError:
        raise
    except Exception as error:
        _drop(source, row, error)
        return True


def learn(source: Source, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
    """Update a source after a step, for the rows where it has not failed."""
    live = [number for number, row in enumerate(rows) if works(source, row)]
    if not live:
        return
    try:
        source.learn([rows[number] for number in live], [outcomes[number] for number in live])
    except ParallelError:
        raise
    except Exception as error:
        for number in live:
            _drop(source, rows[number], error)


def merge(
    trees: list[DraftTree],
    costly: Source,
    rows: Sequence[Row],
    limits: Sequence[Limit],
    confident: float,
    choose: Callable[[dict[int, DraftTree]], Sequence[int]] = list,
) -> list[DraftTree]:
    """Add a costly source's drafts, for those rows that ``choose`` picks where it is ready and whose trees expect fewer
    than ``confident`` accepted nodes."""
    unsure = choose({
        number: tree
        for number, (row, tree) in enumerate(zip(rows, trees, strict=True))
        if tree.expected < confident and works(costly, row) and costly.ready(row)
    })  # fmt: skip
    if unsure:
        beside = [limits[row]._replace(beside=trees[row]) for row in unsure]
        found = propose(costly, [rows[row] for row in unsure], beside)
        for row, tree in zip(unsure, found, strict=True):
            trees[row] = merged_estimates(tree, trees[row], limits[row].nodes)
    return trees


def merged_estimates(first: DraftTree, second: DraftTree, budget: int) -> DraftTree:
    """Merge two trees into the ``budget`` likeliest nodes; one in both keeps its higher conditional probability: the
    more confident source is usually accepted, a trie where the request repeats itself, a head elsewhere. A tree with
    ``q`` is worth more alone and is not merged; a tree without estimates comes first."""
    if first.q is not None or not len(second):
        return first
    if not len(first):
        return second
    if first.probability is None or second.probability is None:
        return first.merged(second, budget)
    tokens, parents, given, origins = list[int](), list[int](), list[float](), list[int]()
    known: dict[tuple[int, int], int] = {}
    for tree, stated in ((first, first.probability), (second, second.probability)):
        index = {ROOT: ROOT}
        shares = (stated / np.maximum(np.append(stated, 1.0)[tree.parents], TINY)).tolist()
        for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            place = known.setdefault((index[parent], token), len(tokens))
            index[node] = place
            if place == len(tokens):
                tokens.append(token)
                parents.append(index[parent])
                given.append(0.0)
                origins.append(0)
            if shares[node] > given[place]:
                given[place], origins[place] = min(shares[node], 1.0), int(tree.sources[node])
    chances: list[float] = []
    for parent, share in zip(parents, given, strict=True):
        chances.append(share * (1.0 if parent == ROOT else chances[parent]))
    keep = np.zeros(len(tokens), np.bool_)
    keep[np.argsort(-np.array(chances), kind="stable")[:budget]] = True
    whole = DraftTree(
        np.array(tokens), np.array(parents), probability=np.array(chances), origins=np.array(origins, np.int8)
    )
    return whole.select(keep)
