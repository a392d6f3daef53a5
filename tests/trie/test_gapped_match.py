"""Gapped matches: outputs that say their prompt, or themselves, again in another form."""

import random

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from forerun.reference import bundled
from forerun.trie.arrays import Index
from forerun.trie.candidates import PositionEvidence
from forerun.trie.contexts import count
from forerun.trie.evidence import count_skips
from forerun.trie.gapped_match import (
    MAX_GAP_TOKENS,
    MIN_RESUMED,
    PROMPT_LOOKAHEAD,
    RESUMED_CLASSES,
    SKIPS,
    follow_matches,
    inherit_matches,
    skip_hash,
    skip_to,
    start_match,
)
from forerun.trie.spelling import spellings
from forerun.trie.tables import OUTPUT_MATCH, OWN, PROMPT_MATCH, RecordArray
from forerun.trie.text_cursor import TextCursor, ingest
from forerun.trie.token_store import UNWRITTEN
from forerun.trie.trie import Trie

COMMA, LINE, OPEN, COLON, CLOSE = range(5)
KEYS = range(5, 8)


def prompt_of(tokens: list[int]) -> tuple[Index, RecordArray, int]:
    """A prompt's index, matches that wait nowhere, and the position of its first token."""
    index, cursor = Index.for_tokens(len(tokens)), TextCursor.start()
    ingest(index, cursor, np.array(tokens), 0)
    return index, cursor.matches, int(cursor.ends[OWN].position) - len(tokens) + 1


def start_at(matches: RecordArray, position: int) -> None:
    start_match(matches, position, 3)


def test_a_match_moves_on_with_a_predicted_token_and_waits_otherwise():
    index, matches, first = prompt_of([10, 11, COMMA, 12, 13, LINE, 14])
    start_at(matches, first)
    for token, at, gap in ((10, 1, 0), (11, 2, 0), (OPEN, 2, 1), (COLON, 2, 2), (12, 4, 0), (13, 5, 0), (14, 7, 0)):
        follow_matches(index, matches, 0, token)
        assert (matches[0, PROMPT_MATCH].position - first, matches[0, PROMPT_MATCH].gap) == (at, gap)
    assert matches[0, PROMPT_MATCH].resumed == 1  # once, behind the gap; the last token is taken up by leaving one out
    assert matches[0, OUTPUT_MATCH].position == 0


def test_a_single_predicted_token_counts_against_a_match():
    index, matches, first = prompt_of([10, 11, 12, 13, 14])
    start_at(matches, first)
    matches[0, PROMPT_MATCH].resumed = 2
    for token in (OPEN, 10, OPEN, 11, OPEN):
        follow_matches(index, matches, 0, token)
    assert matches[0, PROMPT_MATCH].resumed == 0


def test_a_match_counts_resumptions_up_to_a_limit_and_is_given_up_behind_a_long_gap():
    values = list(range(10, 40))
    index, matches, first = prompt_of(values)
    start_at(matches, first)
    for value in range(0, 30, 2):
        for token in (OPEN, values[value], values[value + 1]):
            follow_matches(index, matches, 0, token)
    assert matches[0, PROMPT_MATCH].resumed == MIN_RESUMED + RESUMED_CLASSES - 1
    start_at(matches, first)
    for _ in range(MAX_GAP_TOKENS + 1):
        follow_matches(index, matches, 0, CLOSE)
    assert matches[0, PROMPT_MATCH].position == 0


def test_a_prompts_match_does_not_leave_the_prompt():
    index, matches, first = prompt_of([10, 11])
    start_at(matches, first + 1)
    assert matches[0, PROMPT_MATCH].prompt_end == first + 1
    follow_matches(index, matches, 0, 11)
    for _ in range(3):
        follow_matches(index, matches, 0, 0)
    assert matches[0, PROMPT_MATCH].run == 1 + 6
    assert matches[0, PROMPT_MATCH].gap == 3


def test_a_match_that_is_being_followed_is_not_started_again():
    index, matches, first = prompt_of([10, 11, 12, 13, 14, 15])
    start_at(matches, first)
    start_match(matches, first + 3, 32)
    assert matches[0, PROMPT_MATCH].position == first
    follow_matches(index, matches, 0, OPEN)
    start_match(matches, first + 3, 3)
    assert (
        matches[0, PROMPT_MATCH].position == first
    )  # agreement of three tokens is enough where there is no match only
    start_match(matches, first + 3, 32)
    assert matches[0, PROMPT_MATCH].position == first + 3


def test_a_node_inherits_active_matches():
    _, matches, first = prompt_of([10, 11, 12])
    start_at(matches, first)
    nodes = np.concatenate([matches, matches])
    inherit_matches(nodes, 0, 1)
    assert nodes[1, PROMPT_MATCH].position == 0
    nodes[0, PROMPT_MATCH].resumed = MIN_RESUMED
    inherit_matches(nodes, 0, 1)
    assert nodes[1, PROMPT_MATCH] == nodes[0, PROMPT_MATCH]


def test_a_node_inherits_nothing_from_an_earlier_draft():
    index, matches, _ = prompt_of([10, 11, 12])
    nodes = np.concatenate([matches, matches])
    nodes[1, PROMPT_MATCH].spelled, nodes[1, PROMPT_MATCH].resumed, nodes[1, PROMPT_MATCH].prompt_end = (
        1,
        MIN_RESUMED + 1,
        99,
    )
    inherit_matches(nodes, 0, 1)
    follow_matches(index, nodes, 1, 5)
    assert nodes[1, PROMPT_MATCH].position == 0


def steps_of(trie: Trie, request: int, prompt: list[int], answer: list[int]) -> int:
    """Steps in which an answer is predicted with drafts of 24 tokens."""
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


@pytest.mark.parametrize("separators", [1, PROMPT_LOOKAHEAD - 1])
def test_a_table_written_as_records_is_drafted_across_cells(separators):
    """Where n-grams know none of the values: without matches, no draft could hold the next cell's first token."""
    rng = random.Random(separators)
    trie = Trie()
    for request in range(12):
        rows = [[[rng.randrange(20, 5000) for _ in range(2)] for _ in KEYS] for _ in range(8)]
        prompt = [t for row in rows for cell in row for t in (*cell, *[COMMA] * separators)] + [LINE]
        predicted = [
            [t for key, cell in zip(KEYS, row, strict=True) for t in (key, COLON, *cell, COMMA)] for row in rows
        ]
        answer = [t for record in predicted for t in (OPEN, *record, CLOSE, LINE)]
        steps = steps_of(trie, request, prompt, answer)
    assert len(answer) / steps > 8, len(answer) / steps  # a cell's key, colon, two tokens and comma are five


def spelled_prompt(tokens: list[int]) -> tuple[Index, RecordArray, int]:
    """As ``prompt_of``, where token 90 is spelled 91, 92 without its space, and 93 is 94."""
    index, matches, first = prompt_of(tokens)
    table = np.full((100, 3), -1, np.int32)
    table[90, :2], table[93, 0] = (91, 92), 94
    return index._replace(spelling=table), matches, first


def test_a_match_goes_through_the_spelling_of_a_word():
    index, matches, first = spelled_prompt([10, COMMA, 90, 11, COMMA, 93, 12])
    start_at(matches, first)
    for token, at, inside in ((10, 1, 0), (OPEN, 1, 0), (91, 2, 1), (92, 3, 0), (11, 4, 0), (OPEN, 4, 0), (94, 6, 0)):
        follow_matches(index, matches, 0, token)
        assert (matches[0, PROMPT_MATCH].position - first, matches[0, PROMPT_MATCH].spelled) == (at, inside)
    assert matches[0, PROMPT_MATCH].resumed == 1


def test_a_word_with_another_spelling_is_passed_over():
    index, matches, first = spelled_prompt([90, 11, 12])
    start_at(matches, first)
    for token, at, gap in ((91, 0, 0), (OPEN, 1, 1), (11, 2, 0)):
        follow_matches(index, matches, 0, token)
        assert (matches[0, PROMPT_MATCH].position - first, matches[0, PROMPT_MATCH].gap) == (at, gap)
        assert matches[0, PROMPT_MATCH].spelled == (1 if token == 91 else 0)


def test_a_skip_leads_to_a_token_ahead_or_to_its_spelling():
    index, matches, first = spelled_prompt([COMMA, 90, 11])
    start_at(matches, first)
    skips = {COMMA: 0, 90: 1, 91: PROMPT_LOOKAHEAD + 1, 11: 2, 92: SKIPS, OPEN: SKIPS}
    assert {token: skip_to(index, matches[0, PROMPT_MATCH], PROMPT_MATCH, token) for token in skips} == skips


def test_skips_are_counted_where_the_prompts_match_waits_and_the_outputs_is_followed():
    _, matches, first = prompt_of([10, 11, 12])
    hashed = np.uint64(12345)
    assert (
        skip_hash(matches[0, PROMPT_MATCH], PROMPT_MATCH, hashed)
        == skip_hash(matches[0, OUTPUT_MATCH], OUTPUT_MATCH, hashed)
        == 0
    )
    for row in (PROMPT_MATCH, OUTPUT_MATCH):
        matches[0, row].position, matches[0, row].resumed = first, MIN_RESUMED
        for gap in (0, 1):
            matches[0, row].gap = gap
            assert (skip_hash(matches[0, row], row, hashed) != 0) == ((gap != 0) == (row == PROMPT_MATCH))


def steps_through_cells(spelled: bool) -> float:
    """Tokens per step for tables whose cells' first tokens are other ones in the records."""
    rng = random.Random(5)
    trie = Trie()
    trie._spelling = np.array([[-1], *([-1] for _ in range(9_999)), *([token] for token in range(5_000))], np.int32)
    if not spelled:
        trie._spelling = trie._spelling[:1]
    taken = steps = 0
    for request in range(12):
        rows = [[[rng.randrange(20, 5000) for _ in range(4)] for _ in KEYS] for _ in range(8)]
        prompt = [t for row in rows for cell in row for t in (10_000 + cell[0], *cell[1:], COMMA)]
        predicted = [
            [t for key, cell in zip(KEYS, row, strict=True) for t in (key, COLON, *cell, COMMA)] for row in rows
        ]
        answer = [t for record in predicted for t in (OPEN, *record, CLOSE, LINE)]
        taken, steps = taken + len(answer), steps + steps_of(trie, request, prompt, answer)
    return taken / steps


def test_cells_are_drafted_in_other_tokens_where_their_spelling_is_known():
    assert steps_through_cells(spelled=True) > 1.5 * steps_through_cells(spelled=False)


def test_spellings_are_those_behind_a_quote():
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


def test_a_context_with_the_hash_of_a_skip_is_no_skip():
    """Contexts are known by 31 bits, so another one's followers may lie there: tokens, which are no skips."""
    index, matches, first = prompt_of([10, 11, 12])
    hashed, evidence = np.uint64(12345), PositionEvidence.allocate()
    matches[0, PROMPT_MATCH].position, matches[0, PROMPT_MATCH].resumed, matches[0, PROMPT_MATCH].gap = (
        first,
        MIN_RESUMED,
        1,
    )
    for token in (5000, 1, SKIPS + 1):
        count(index, skip_hash(matches[0, PROMPT_MATCH], PROMPT_MATCH, hashed), token)
        count_skips(index, matches[0, PROMPT_MATCH], PROMPT_MATCH, hashed, evidence)
        known = {skip for skip in range(SKIPS) if evidence.skips[PROMPT_MATCH, skip] != evidence.skips[PROMPT_MATCH, 0]}
        assert known == (set() if token == 5000 else {1})


def test_a_tokenizer_that_cannot_write_a_quote_has_no_spellings():
    tokenizer = Tokenizer(models.WordLevel({"▁do": 0, "▁re": 1, "mi": 2}))
    assert (spellings(tokenizer) == UNWRITTEN).all()
    trie = Trie()
    trie.spell(tokenizer)
