"""Trails: outputs that say their prompt, or themselves, again in another form."""

from __future__ import annotations

import random

import numpy as np
import pytest

from forerun.index.arrays import Index
from forerun.index.place import Place, ingest
from forerun.index.trail import (
    AHEAD,
    AT,
    GAP,
    HEARD,
    JOINED,
    JOINS,
    LIMIT,
    LOST,
    OUTPUT,
    PROMPT,
    RUN,
    branch,
    follow_trails,
    lay_trail,
)
from forerun.tree import IntArray
from forerun.trie import Trie

COMMA, LINE, OPEN, COLON, CLOSE = range(5)
KEYS = range(5, 8)


def prompt_of(tokens: list[int]) -> tuple[Index, IntArray, int]:
    """A prompt's index, trails that wait nowhere, and the position of its first token."""
    index, place = Index.for_tokens(len(tokens)), Place.start()
    ingest(index, place, np.array(tokens))
    return index, place.trails, int(place.ends[0]) - len(tokens) + 1


def laid(trails: IntArray, position: int) -> None:
    lay_trail(trails, position, 3)


def test_a_trail_moves_on_with_what_it_foresees_and_waits_otherwise() -> None:
    index, trails, first = prompt_of([10, 11, COMMA, 12, 13, LINE, 14])
    laid(trails, first)
    for token, at, gap in ((10, 1, 0), (11, 2, 0), (OPEN, 2, 1), (COLON, 2, 2), (12, 4, 0), (13, 5, 0), (14, 7, 0)):
        follow_trails(index, trails, 0, token)
        assert (trails[0, PROMPT, AT] - first, trails[0, PROMPT, GAP]) == (at, gap)
    assert trails[0, PROMPT, JOINED] == 1  # once, behind the gap; the last token is taken up by leaving one out
    assert trails[0, OUTPUT, AT] == 0


def test_what_is_taken_up_by_chance_counts_against_a_trail() -> None:
    index, trails, first = prompt_of([10, 11, 12, 13, 14])
    laid(trails, first)
    trails[0, PROMPT, JOINED] = 2
    for token in (OPEN, 10, OPEN, 11, OPEN):
        follow_trails(index, trails, 0, token)
    assert trails[0, PROMPT, JOINED] == 0


def test_a_trail_is_taken_up_again_so_often_at_most_and_given_up_when_lost() -> None:
    values = list(range(10, 40))
    index, trails, first = prompt_of(values)
    laid(trails, first)
    for value in range(0, 30, 2):
        for token in (OPEN, values[value], values[value + 1]):
            follow_trails(index, trails, 0, token)
    assert trails[0, PROMPT, JOINED] == HEARD + JOINS - 1
    laid(trails, first)
    for _ in range(LOST + 1):
        follow_trails(index, trails, 0, CLOSE)
    assert trails[0, PROMPT, AT] == 0


def test_a_trail_does_not_leave_the_prompt() -> None:
    index, trails, first = prompt_of([10, 11])
    laid(trails, first + 1)
    assert trails[0, PROMPT, LIMIT] == first + 1
    follow_trails(index, trails, 0, 11)
    for _ in range(3):
        follow_trails(index, trails, 0, 0)
    assert trails[0, PROMPT, RUN] == 1 + 6
    assert trails[0, PROMPT, GAP] == 3


def test_a_trail_that_is_being_followed_is_not_laid_anew() -> None:
    index, trails, first = prompt_of([10, 11, 12, 13, 14, 15])
    laid(trails, first)
    lay_trail(trails, first + 3, 32)
    assert trails[0, PROMPT, AT] == first
    follow_trails(index, trails, 0, OPEN)
    lay_trail(trails, first + 3, 3)
    assert trails[0, PROMPT, AT] == first  # agreement of three tokens is enough where there is no trail only
    lay_trail(trails, first + 3, 32)
    assert trails[0, PROMPT, AT] == first + 3


def test_a_node_has_the_trails_that_are_heard() -> None:
    _, trails, first = prompt_of([10, 11, 12])
    laid(trails, first)
    nodes = np.concatenate([trails, trails])
    branch(nodes, 0, 1)
    assert nodes[1, PROMPT, AT] == 0
    nodes[0, PROMPT, JOINED] = HEARD
    branch(nodes, 0, 1)
    assert (nodes[1, PROMPT] == nodes[0, PROMPT]).all()


@pytest.mark.parametrize("separators", [1, AHEAD - 1])
def test_a_table_said_as_records_is_drafted_across_cells(separators: int) -> None:
    """Where n-grams know none of the values: without trails, no draft could hold the next cell's first token."""
    rng = random.Random(separators)
    trie = Trie()
    for request in range(12):
        rows = [[[rng.randrange(20, 5000) for _ in range(2)] for _ in KEYS] for _ in range(8)]
        prompt = [t for row in rows for cell in row for t in (*cell, *[COMMA] * separators)] + [LINE]
        said = [[t for key, cell in zip(KEYS, row, strict=True) for t in (key, COLON, *cell, COMMA)] for row in rows]
        answer = [t for record in said for t in (OPEN, *record, CLOSE, LINE)]
        trie.begin(request, "n", prompt)
        at, steps = 0, 0
        while at < len(answer):
            draft = trie.retrieve(request, 24, 24)
            node, length = -1, 0
            while at + length < len(answer):
                found = np.flatnonzero((draft.parents == node) & (draft.tokens == answer[at + length]))
                if not len(found):
                    break
                node, length = int(found[0]), length + 1
            trie.extend(request, answer[at : at + length + 1])
            at, steps = at + length + 1, steps + 1
        trie.finish(request)
    assert len(answer) / steps > 8, len(answer) / steps  # a cell's key, colon, two tokens and comma are five
