"""Trails: outputs that say their prompt, or themselves, again in another form."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from forerun.reference import bundled
from forerun.trie.arrays import Index
from forerun.trie.candidates import Facts
from forerun.trie.contexts import count
from forerun.trie.gapped_match import (
    AHEAD,
    HEARD,
    JOINS,
    LOST,
    WAYS,
    branch,
    crossing,
    follow_trails,
    lay_trail,
    way_on,
)
from forerun.trie.gapped_match_features import look_around
from forerun.trie.spelling import spellings
from forerun.trie.tables import OUTPUT, OWN, PROMPT, RecordArray
from forerun.trie.text_cursor import TextCursor, ingest
from forerun.trie.token_store import UNWRITTEN
from forerun.trie.trie import Trie

COMMA, LINE, OPEN, COLON, CLOSE = range(5)
KEYS = range(5, 8)


def prompt_of(tokens: list[int]) -> tuple[Index, RecordArray, int]:
    """A prompt's index, trails that wait nowhere, and the position of its first token."""
    index, place = Index.for_tokens(len(tokens)), TextCursor.start()
    ingest(index, place, np.array(tokens))
    return index, place.trails, int(place.ends[OWN].position) - len(tokens) + 1


def laid(trails: RecordArray, position: int) -> None:
    lay_trail(trails, position, 3)


def test_a_trail_moves_on_with_what_it_foresees_and_waits_otherwise() -> None:
    index, trails, first = prompt_of([10, 11, COMMA, 12, 13, LINE, 14])
    laid(trails, first)
    for token, at, gap in ((10, 1, 0), (11, 2, 0), (OPEN, 2, 1), (COLON, 2, 2), (12, 4, 0), (13, 5, 0), (14, 7, 0)):
        follow_trails(index, trails, 0, token)
        assert (trails[0, PROMPT].position - first, trails[0, PROMPT].gap) == (at, gap)
    assert trails[0, PROMPT].resumed == 1  # once, behind the gap; the last token is taken up by leaving one out
    assert trails[0, OUTPUT].position == 0


def test_what_is_taken_up_by_chance_counts_against_a_trail() -> None:
    index, trails, first = prompt_of([10, 11, 12, 13, 14])
    laid(trails, first)
    trails[0, PROMPT].resumed = 2
    for token in (OPEN, 10, OPEN, 11, OPEN):
        follow_trails(index, trails, 0, token)
    assert trails[0, PROMPT].resumed == 0


def test_a_trail_is_taken_up_again_so_often_at_most_and_given_up_when_lost() -> None:
    values = list(range(10, 40))
    index, trails, first = prompt_of(values)
    laid(trails, first)
    for value in range(0, 30, 2):
        for token in (OPEN, values[value], values[value + 1]):
            follow_trails(index, trails, 0, token)
    assert trails[0, PROMPT].resumed == HEARD + JOINS - 1
    laid(trails, first)
    for _ in range(LOST + 1):
        follow_trails(index, trails, 0, CLOSE)
    assert trails[0, PROMPT].position == 0


def test_a_trail_does_not_leave_the_prompt() -> None:
    index, trails, first = prompt_of([10, 11])
    laid(trails, first + 1)
    assert trails[0, PROMPT].prompt_end == first + 1
    follow_trails(index, trails, 0, 11)
    for _ in range(3):
        follow_trails(index, trails, 0, 0)
    assert trails[0, PROMPT].run == 1 + 6
    assert trails[0, PROMPT].gap == 3


def test_a_trail_that_is_being_followed_is_not_laid_anew() -> None:
    index, trails, first = prompt_of([10, 11, 12, 13, 14, 15])
    laid(trails, first)
    lay_trail(trails, first + 3, 32)
    assert trails[0, PROMPT].position == first
    follow_trails(index, trails, 0, OPEN)
    lay_trail(trails, first + 3, 3)
    assert trails[0, PROMPT].position == first  # agreement of three tokens is enough where there is no trail only
    lay_trail(trails, first + 3, 32)
    assert trails[0, PROMPT].position == first + 3


def test_a_node_has_the_trails_that_are_heard() -> None:
    _, trails, first = prompt_of([10, 11, 12])
    laid(trails, first)
    nodes = np.concatenate([trails, trails])
    branch(nodes, 0, 1)
    assert nodes[1, PROMPT].position == 0
    nodes[0, PROMPT].resumed = HEARD
    branch(nodes, 0, 1)
    assert nodes[1, PROMPT] == nodes[0, PROMPT]


def test_nothing_of_what_stood_on_a_node_before_goes_on() -> None:
    index, trails, _ = prompt_of([10, 11, 12])
    nodes = np.concatenate([trails, trails])
    nodes[1, PROMPT].spelled, nodes[1, PROMPT].resumed, nodes[1, PROMPT].prompt_end = 1, HEARD + 1, 99
    branch(nodes, 0, 1)
    follow_trails(index, nodes, 1, 5)
    assert nodes[1, PROMPT].position == 0


def steps_of(trie: Trie, request: int, prompt: list[int], answer: list[int]) -> int:
    """Steps in which an answer is said with drafts of 24 tokens."""
    trie.begin(request, "n", prompt)
    at = steps = 0
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
    return steps


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
        steps = steps_of(trie, request, prompt, answer)
    assert len(answer) / steps > 8, len(answer) / steps  # a cell's key, colon, two tokens and comma are five


def spelled_prompt(tokens: list[int]) -> tuple[Index, RecordArray, int]:
    """As ``prompt_of``, where token 90 is spelled 91, 92 without its space, and 93 is 94."""
    index, trails, first = prompt_of(tokens)
    table = np.full((100, 3), -1, np.int32)
    table[90, :2], table[93, 0] = (91, 92), 94
    return index._replace(spelling=table), trails, first


def test_a_trail_goes_through_the_spelling_of_a_word() -> None:
    index, trails, first = spelled_prompt([10, COMMA, 90, 11, COMMA, 93, 12])
    laid(trails, first)
    for token, at, inside in ((10, 1, 0), (OPEN, 1, 0), (91, 2, 1), (92, 3, 0), (11, 4, 0), (OPEN, 4, 0), (94, 6, 0)):
        follow_trails(index, trails, 0, token)
        assert (trails[0, PROMPT].position - first, trails[0, PROMPT].spelled) == (at, inside)
    assert trails[0, PROMPT].resumed == 1


def test_a_word_spelled_otherwise_is_passed_by() -> None:
    index, trails, first = spelled_prompt([90, 11, 12])
    laid(trails, first)
    for token, at, gap in ((91, 0, 0), (OPEN, 1, 1), (11, 2, 0)):
        follow_trails(index, trails, 0, token)
        assert (trails[0, PROMPT].position - first, trails[0, PROMPT].gap) == (at, gap)
        assert trails[0, PROMPT].spelled == (1 if token == 91 else 0)


def test_the_way_on_is_known_by_what_is_ahead_and_by_its_spelling() -> None:
    index, trails, first = spelled_prompt([COMMA, 90, 11])
    laid(trails, first)
    ways = {COMMA: 0, 90: 1, 91: AHEAD + 1, 11: 2, 92: WAYS, OPEN: WAYS}
    assert {token: way_on(index, trails[0, PROMPT], PROMPT, token) for token in ways} == ways


def test_ways_are_noted_where_the_prompts_trail_waits_and_the_outputs_is_followed() -> None:
    _, trails, first = prompt_of([10, 11, 12])
    hashed = np.uint64(12345)
    assert crossing(trails[0, PROMPT], PROMPT, hashed) == crossing(trails[0, OUTPUT], OUTPUT, hashed) == 0
    for row in (PROMPT, OUTPUT):
        trails[0, row].position, trails[0, row].resumed = first, HEARD
        for gap in (0, 1):
            trails[0, row].gap = gap
            assert (crossing(trails[0, row], row, hashed) != 0) == ((gap != 0) == (row == PROMPT))


def steps_through_cells(spelled: bool) -> float:
    """Tokens a step for tables whose cells' first tokens are other ones in the records."""
    rng = random.Random(5)
    trie = Trie()
    trie._spelling = np.array([[-1], *([-1] for _ in range(9_999)), *([token] for token in range(5_000))], np.int32)
    if not spelled:
        trie._spelling = trie._spelling[:1]
    taken = steps = 0
    for request in range(12):
        rows = [[[rng.randrange(20, 5000) for _ in range(4)] for _ in KEYS] for _ in range(8)]
        prompt = [t for row in rows for cell in row for t in (10_000 + cell[0], *cell[1:], COMMA)]
        said = [[t for key, cell in zip(KEYS, row, strict=True) for t in (key, COLON, *cell, COMMA)] for row in rows]
        answer = [t for record in said for t in (OPEN, *record, CLOSE, LINE)]
        taken, steps = taken + len(answer), steps + steps_of(trie, request, prompt, answer)
    return taken / steps


def test_cells_are_drafted_in_other_tokens_where_their_spelling_is_known() -> None:
    assert steps_through_cells(spelled=True) > 1.5 * steps_through_cells(spelled=False)


def test_spellings_are_those_behind_a_quote() -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled("target")).backend_tokenizer
    table = spellings(tokenizer)
    assert table.shape[0] == tokenizer.get_vocab_size()
    known = 0
    for token, number in tokenizer.get_vocab().items():
        spelling = [part for part in table[number].tolist() if part >= 0]
        if spelling:
            known += 1
            assert tokenizer.decode([number]) == " " + tokenizer.decode(spelling)
        else:
            assert not (token.startswith("Ġ") and token[1:].isascii() and token[1:].isalpha() and len(token) < 5)
    assert known > 1000


def test_a_context_with_a_crossings_hash_is_no_crossing() -> None:
    """Contexts are known by 31 bits, so another one's followers may lie there: tokens, which are no ways."""
    index, trails, first = prompt_of([10, 11, 12])
    hashed, facts = np.uint64(12345), Facts.allocate()
    trails[0, PROMPT].position, trails[0, PROMPT].resumed, trails[0, PROMPT].gap = first, HEARD, 1
    for token in (5000, 1, WAYS + 1):
        count(index, crossing(trails[0, PROMPT], PROMPT, hashed), token)
        look_around(index, trails[0, PROMPT], PROMPT, hashed, facts)
        known = {way for way in range(WAYS) if facts.ways[PROMPT, way] != facts.ways[PROMPT, 0]}
        assert known == (set() if token == 5000 else {1})


def test_a_tokenizer_that_cannot_write_a_quote_has_no_spellings() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁do": 0, "▁re": 1, "mi": 2}))
    assert (spellings(tokenizer) == UNWRITTEN).all()
    trie = Trie()
    trie.spell(tokenizer)
